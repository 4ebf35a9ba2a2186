//! The class `Item`.

use std::hash::{Hash, Hasher};

use kvtrie_core::Item;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{arg, call, int, of};
use crate::buffers::Arg;
use crate::errors::exception;
use crate::fields::{Value, value_methods};
use crate::output::signed;

/// A range of tokens that represents something else, such as an image.
///
/// Tokens inside an item are compared by id, the item's digest and the offset in the item: two
/// prompts with the same placeholder ids and different images share nothing from the image on.
///
/// Args:
///     start: First token, a position in the sequence.
///     end: One past the last token.
///     digest: Identifies what the range represents: 1 to 64 bytes, for instance a SHA-256 of the
///         image.
///
/// Raises:
///     TypeError: A position is not an int, or the digest is not bytes.
///     ValueError: The range is empty, reversed or negative, or the digest is too short or too
///         long.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> image = kvtrie.Item(1, 4, b"digest of the image")
///     >>> seq = kvtrie.TokenSequence([7, 0, 0, 0, 8], space, items=[image])
///     >>> seq.items == (image,)
///     True
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Item")]
#[derive(PartialEq, Eq)]
pub(crate) struct PyItem {
    pub(crate) core: Item,
}

impl Hash for PyItem {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.core.start(), self.core.end(), self.core.digest()).hash(state);
    }
}

impl Value for PyItem {
    const FIELDS: &[&str] = &["start", "end", "digest"];
}

value_methods! {
    ///     >>> kvtrie.Item(0, 4, b"image").replace(start=2)
    ///     Item(2, 4, b'image')
    impl PyItem {
        #[new]
        #[pyo3(signature = (start: "SupportsIndex", end: "SupportsIndex", digest: "bytes"))]
        fn new(
            #[pyo3(from_py_with = int::<call::Item, arg::Start>)] start: i128,
            #[pyo3(from_py_with = int::<call::Item, arg::End>)] end: i128,
            #[pyo3(from_py_with = of::<call::Item, arg::Digest, PyBytes>)] digest: &Bound<'_, PyBytes>,
        ) -> PyResult<Self> {
            let start = Arg::new("Item", "start").count(start)?;
            let end = Arg::new("Item", "end").count(end)?;
            let core = Item::new(start, end, digest.as_bytes());
            Ok(Self {
                core: core.map_err(|error| exception(&error))?,
            })
        }

        /// First token.
        #[getter]
        fn start(&self) -> usize {
            self.core.start()
        }

        /// One past the last token.
        #[getter]
        fn end(&self) -> usize {
            self.core.end()
        }

        /// The digest of what the range represents.
        #[getter]
        fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
            PyBytes::new(py, self.core.digest())
        }

        fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
            let digest: Bound<'_, PyString> = self.digest(py).repr()?;
            Ok(format!("Item({}, {}, {digest})", self.start(), self.end()))
        }

        fn __getnewargs__<'py>(&self, py: Python<'py>) -> (i64, i64, Bound<'py, PyBytes>) {
            (signed(self.start()), signed(self.end()), self.digest(py))
        }
    }
}
