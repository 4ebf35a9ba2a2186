//! The class `Item`.

use std::hash::{Hash, Hasher};

use kvtrie_core::Item;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{arg, call, int, of, optional_int};
use crate::buffers::Arg;
use crate::errors::exception;
use crate::fields::{Value, new_arguments, value_methods};
use crate::hints::NewArguments;

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
///     positions: How many positions the whole item takes, 1 to 2**31 - 1, under M-RoPE: the token
///         after it is at the position of its first token plus this. For an image of Qwen-VL, the
///         largest of its merged grid's sides. None: each token takes one position, as without
///         M-RoPE. It is part of what the item is: with another number, it is another item.
///     num_tokens: Tokens of the whole item, if `positions` is given and the range is only its first
///         tokens, as in a sequence that was cut inside it. None: those of the range.
///
/// Raises:
///     TypeError: A number is not an int, or the digest is not bytes.
///     ValueError: The range is empty, reversed or negative, the digest is too short or too long,
///         `positions` or `num_tokens` is out of range, or `num_tokens` is given alone.
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
        let item = &self.core;
        let range = (item.start(), item.end(), item.num_tokens());
        (range, item.digest(), item.positions()).hash(state);
    }
}

impl Value for PyItem {
    const FIELDS: &[&str] = &["start", "end", "digest", "positions", "num_tokens"];
}

value_methods! {
    ///     >>> kvtrie.Item(0, 4, b"image").replace(start=2)
    ///     Item(2, 4, b'image')
    impl PyItem {
        #[new]
        #[pyo3(signature = (
            start: "SupportsIndex", end: "SupportsIndex", digest: "bytes", *,
            positions: "SupportsIndex | None" = None, num_tokens: "SupportsIndex | None" = None
        ), text_signature = "(start, end, digest, *, positions=None, num_tokens=None)")]
        fn new(
            #[pyo3(from_py_with = int::<call::Item, arg::Start>)] start: i128,
            #[pyo3(from_py_with = int::<call::Item, arg::End>)] end: i128,
            #[pyo3(from_py_with = of::<call::Item, arg::Digest, PyBytes>)] digest: &Bound<'_, PyBytes>,
            #[pyo3(from_py_with = optional_int::<call::Item, arg::Positions>)] positions: Option<i128>,
            #[pyo3(from_py_with = optional_int::<call::Item, arg::NumTokens>)] num_tokens: Option<i128>,
        ) -> PyResult<Self> {
            let count = |name, number| Arg::new("Item", name).count(number);
            let (start, end) = (count("start", start)?, count("end", end)?);
            let item = Item::new(start, end, digest.as_bytes()).map_err(|error| exception(&error))?;
            let core = match (positions, num_tokens) {
                (None, None) => item,
                (None, Some(number)) => {
                    return Err(PyValueError::new_err(format!(
                        "Item: num_tokens is {number} and positions is None; only an item that says how many \
                         positions it takes has tokens beyond its range"
                    )));
                }
                (Some(positions), num_tokens) => {
                    let positions = count("positions", positions)?;
                    let num_tokens = num_tokens.map_or(Ok(end - start), |all| count("num_tokens", all))?;
                    let item = item.taking(positions, num_tokens);
                    item.map_err(|error| exception(&error))?
                }
            };
            Ok(Self { core })
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

        /// How many positions the whole item takes; None if each of its tokens takes one.
        #[getter]
        fn positions(&self) -> Option<usize> {
            self.core.positions()
        }

        /// Tokens of the whole item, of which a sequence that was cut may have only the first; None
        /// if `positions` is None.
        #[getter]
        fn num_tokens(&self) -> Option<usize> {
            let positions = self.core.positions();
            positions.map(|_| self.core.num_tokens())
        }

        fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
            let digest: Bound<'_, PyString> = self.digest(py).repr()?;
            let mut fields = vec![
                self.start().to_string(),
                self.end().to_string(),
                digest.to_string(),
            ];
            if let Some(positions) = self.positions() {
                fields.push(format!("positions={positions}"));
            }
            if self.core.num_tokens() > self.end() - self.start() {
                fields.push(format!("num_tokens={}", self.core.num_tokens()));
            }
            Ok(format!("Item({})", fields.join(", ")))
        }

        fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
            new_arguments(slf)
        }
    }
}
