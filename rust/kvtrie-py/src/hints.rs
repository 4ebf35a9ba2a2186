//! Result types that the stub needs, where Rust's type says less (any array is an `ndarray`).

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
    Ids: "npt.NDArray[np.int32]",
    Tokens: "int | npt.NDArray[np.uint32]",
    TokenIds: "npt.NDArray[np.uint32]",
    Document: "dict[str, Any]",
    TokenIterator: "Iterator[int]",
    Counts: "npt.NDArray[np.int64]",
    Flags: "npt.NDArray[np.bool_]",
    Bytes8: "npt.NDArray[np.uint8]",
    Records: "npt.NDArray[np.void]",
    Names: "tuple[str, ...]",
    Items: "tuple[Item, ...]",
    MovedRuns: "tuple[MovedRun, ...]",
    SaltValue: "str | SharedSalt",
    SourceValue: "Imported | ComputedSource",
    ReducedManifest: "tuple[object, tuple[bytes, TransferLimits]]",
    Groups: "tuple[Group, ...]",
    GroupResults: "dict[str, GroupInsertResult]",
    GroupIds: "dict[str, npt.NDArray[np.int32]]",
    Forgotten: "tuple[npt.NDArray[np.int32], dict[str, npt.NDArray[np.int32]]]",
    WindowPart: "tuple[int, npt.NDArray[np.int32]]",
    NewArguments: "tuple[tuple[()], dict[str, object]]",
}
