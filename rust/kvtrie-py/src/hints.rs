//! Values that are on their way out, with the type that the stub gives them.
//!
//! PyO3 writes the stub from Rust's types. Where these say less than Python's could (any array is
//! an `ndarray`, any dictionary a `dict`), the value leaves in one of the wrappers here.

use std::convert::Infallible;

use pyo3::prelude::*;

macro_rules! hints {
    ($($(#[$doc:meta])* $name:ident: $hint:literal,)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name<'py>(Bound<'py, PyAny>);

        impl<'py, T> From<Bound<'py, T>> for $name<'py> {
            fn from(value: Bound<'py, T>) -> Self {
                Self(value.into_any())
            }
        }

        impl<'py> IntoPyObject<'py> for $name<'py> {
            type Target = PyAny;
            type Output = Bound<'py, PyAny>;
            type Error = Infallible;

            #[cfg(feature = "experimental-inspect")]
            const OUTPUT_TYPE: pyo3::inspect::PyStaticExpr = pyo3::inspect::PyStaticExpr::Constant {
                value: pyo3::inspect::PyStaticConstant::Str($hint),
            };

            fn into_pyobject(self, _py: Python<'py>) -> Result<Self::Output, Self::Error> {
                Ok(self.0)
            }
        }
    )*};
}

hints! {
    /// Block ids.
    Ids: "npt.NDArray[np.int32]",
    /// Token ids.
    Tokens: "int | npt.NDArray[np.uint32]",
    /// Token ids in an array.
    TokenIds: "npt.NDArray[np.uint32]",
    /// What `json.dumps` takes.
    Document: "dict[str, Any]",
    /// Token ids, one after the other.
    TokenIterator: "Iterator[int]",
    /// Counts, positions or offsets.
    Counts: "npt.NDArray[np.int64]",
    /// Truth values.
    Flags: "npt.NDArray[np.bool_]",
    /// A structured array.
    Records: "npt.NDArray[np.void]",
    /// Names.
    Names: "tuple[str, ...]",
    /// Items of a sequence.
    Items: "tuple[Item, ...]",
    /// A salt.
    SaltValue: "str | SharedSalt",
    /// What a sequence's KV is said to come from.
    SourceValue: "Imported | ComputedSource",
    /// How a manifest is pickled.
    ReducedManifest: "tuple[object, tuple[bytes, TransferLimits]]",
    /// What `__new__` takes, for copies and pickles.
    NewArguments: "tuple[tuple[()], dict[str, object]]",
}
