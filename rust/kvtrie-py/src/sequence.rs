//! The class `TokenSequence`.

use std::sync::Arc;

use kvtrie_core::{Error, ErrorKind, Item, TokenSequence};
use numpy::PyArray1;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice, PyTuple};

use crate::arguments::{arg, call, int, of, optional_int};
use crate::buffers::{Arg, TOKEN_IDS, first_integers, integers, nothing};
use crate::detach::{Cost, Enter, Lock};
use crate::errors::exception;
use crate::hints::{Items, TokenIterator, Tokens};
use crate::item::PyItem;
use crate::namespace::PyNamespace;

pub(crate) const SEQUENCE: &str = "the sequence";

/// Token ids from position 0, in a namespace.
///
/// Make one sequence per request and extend it. It remembers how far it matched in the index that
/// last used it, so a call costs only its new tokens.
///
/// `len(seq)` is the number of tokens, `seq[i]` the id at a position (an int), and `seq[a:b]` a
/// copy as a numpy array of uint32. Iteration covers the ids at its start. Sequences compare by
/// identity; compare slices to compare ids.
///
/// Args:
///     ids: Token ids, each in 0..2**32: a list or tuple of int, an `array.array`, a memoryview, a
///         one-dimensional numpy array of any integer dtype, or a CPU tensor. They are copied.
///     namespace: Everything besides tokens that the KV depends on.
///     items: Ranges that represent something else, ascending, disjoint and inside the ids.
///     limit: How many of the ids are taken, from the first on; the others are not read. None, or
///         more than there are, takes all.
///
/// Raises:
///     TypeError: An id is a bool, a float or anything else that is not an integer.
///     ValueError: An id or `limit` is negative, or an id too large (none is wrapped), the array is
///         not one-dimensional, or an item is outside the ids, overlaps, does not ascend, or lacks
///         tokens and has others after it.
///
/// Example:
///     >>> import numpy as np
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> seq = kvtrie.TokenSequence(np.array([5, 6, 7]), space)
///     >>> seq.extend([8, 9])
///     >>> len(seq), seq[-1], seq[1:3]
///     (5, 9, array([6, 7], dtype=uint32))
#[pyclass(frozen, weakref, module = "kvtrie", name = "TokenSequence")]
pub(crate) struct PyTokenSequence {
    pub(crate) core: Lock<TokenSequence>,
    namespace: Py<PyNamespace>,
}

impl PyTokenSequence {
    /// A sequence of the first `limit` ids.
    fn of(
        ids: &Bound<'_, PyAny>,
        namespace: &Bound<'_, PyNamespace>,
        items: Option<&Bound<'_, PyAny>>,
        limit: (Option<i128>, Arg),
        arg: Arg,
    ) -> PyResult<Self> {
        let ids = read_ids(ids, limit, arg)?;
        let items = read_items(items, Arg::new(arg.call, "items"))?;
        Self::around(ids, namespace, items)
    }

    /// As [`Self::of`] without items. It is called once a prompt, mostly when none of its code is in a cache, so it is
    /// short.
    #[inline]
    pub(crate) fn plain(
        ids: &Bound<'_, PyAny>,
        namespace: &Bound<'_, PyNamespace>,
        limit: (Option<i128>, Arg),
        arg: Arg,
    ) -> PyResult<Self> {
        Self::around(read_ids(ids, limit, arg)?, namespace, Vec::new())
    }

    #[inline]
    fn around(
        ids: Vec<u32>,
        namespace: &Bound<'_, PyNamespace>,
        items: Vec<Item>,
    ) -> PyResult<Self> {
        let core = TokenSequence::new(Arc::clone(&namespace.get().core), ids, items);
        Ok(Self {
            core: Lock::new(core.map_err(|error| exception(&error))?),
            namespace: namespace.clone().unbind(),
        })
    }

    pub(crate) fn len(&self, py: Python<'_>) -> PyResult<usize> {
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, SEQUENCE)?.len())
        })
    }
}

#[pymethods]
impl PyTokenSequence {
    #[new]
    #[pyo3(signature = (
        ids: "_Integers", namespace: "Namespace", items: "Iterable[Item]" = nothing(), *,
        limit: "SupportsIndex | None" = None
    ), text_signature = "(ids, namespace, items=(), *, limit=None)")]
    fn new(
        ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::TokenSequence, arg::Namespace, PyNamespace>)]
        namespace: &Bound<'_, PyNamespace>,
        items: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = optional_int::<call::TokenSequence, arg::Limit>)] limit: Option<i128>,
    ) -> PyResult<Self> {
        let limit = (limit, Arg::new("TokenSequence", "limit"));
        Self::of(
            ids,
            namespace,
            items,
            limit,
            Arg::new("TokenSequence", "ids"),
        )
    }

    /// Append token ids.
    ///
    /// Args:
    ///     ids: Token ids, as for the class. They are copied.
    ///     items: Items over the new tokens; positions count from the start of the sequence.
    ///
    /// Raises:
    ///     TypeError, ValueError: As for the class; and the sequence was cut inside an item with
    ///         `positions`.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> seq.extend([4])
    #[pyo3(signature = (
        ids: "_Integers", items: "Iterable[Item]" = nothing()
    ), text_signature = "($self, ids, items=())")]
    fn extend(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        items: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        const CALL: &str = "TokenSequence.extend";
        let ids = integers(ids, TOKEN_IDS, Arg::new(CALL, "ids"))?;
        let items = read_items(items, Arg::new(CALL, "items"))?;
        // A plan may share the old ids, which are then copied.
        let cost = Cost::copy(self.len(py)? + ids.len());
        py.enter(cost, move |keys| {
            let mut seq = keys.lock(&self.core, SEQUENCE)?;
            check_free(&seq, "TokenSequence::extend")?;
            Ok(seq.extend(&ids, items)?)
        })
    }

    /// Keep the first `n` tokens, for instance to roll back a speculation.
    ///
    /// Args:
    ///     n: The new length in tokens. An item that is cut ends at the cut; if it says how many
    ///         positions it takes, nothing can follow it.
    ///
    /// Raises:
    ///     ValueError: `n` is negative or beyond the sequence.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> seq.truncate(2)
    ///     >>> seq[:]
    ///     array([1, 2], dtype=uint32)
    #[pyo3(signature = (n: "SupportsIndex"))]
    fn truncate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::TokenSequenceTruncate, arg::N>)] n: i128,
    ) -> PyResult<()> {
        const CALL: &str = "TokenSequence.truncate";
        let n = Arg::new(CALL, "n").count(n)?;
        py.enter(Cost::copy(n), |keys| {
            let mut seq = keys.lock(&self.core, SEQUENCE)?;
            check_free(&seq, "TokenSequence::truncate")?;
            Ok(seq.truncate(n)?)
        })
    }

    /// Return the position of a token, which differs from its number where items say how many
    /// positions they take.
    ///
    /// Args:
    ///     token: Its number, 0 to `len(seq)`; `len(seq)` asks for that of the next token.
    ///
    /// Returns:
    ///     Its position; for a token of an item that says how many positions it takes, that of the
    ///     item's first token.
    ///
    /// Raises:
    ///     ValueError: `token` is negative or beyond the sequence, or asks for the token after an item
    ///         with positions inside which the sequence was cut.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> image = kvtrie.Item(1, 5, b"digest of the image", positions=2)
    ///     >>> seq = kvtrie.TokenSequence([7, 0, 0, 0, 0, 8], space, items=[image])
    ///     >>> [seq.position(token) for token in range(7)]
    ///     [0, 1, 1, 1, 1, 3, 4]
    #[pyo3(signature = (token: "SupportsIndex"))]
    fn position(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::TokenSequencePosition, arg::Token>)] token: i128,
    ) -> PyResult<usize> {
        let token = Arg::new("TokenSequence.position", "token").count(token)?;
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, SEQUENCE)?.position(token)?)
        })
    }

    /// The namespace.
    #[getter]
    fn namespace(&self, py: Python<'_>) -> Py<PyNamespace> {
        self.namespace.clone_ref(py)
    }

    /// The items, in order of position.
    #[getter]
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Items<'py>> {
        let items = py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, SEQUENCE)?.items().to_vec())
        })?;
        Ok(PyTuple::new(py, items.into_iter().map(|core| PyItem { core }))?.into())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.len(py)
    }

    fn __getitem__<'py>(&self, py: Python<'py>, key: Key<'py>) -> PyResult<Tokens<'py>> {
        let len = self.len(py)?;
        match key {
            Key::Position(position) => self.token(py, position, len),
            Key::Slice(slice) => self.copy(py, &slice, len),
        }
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<TokenIterator<'py>> {
        let ids = py.enter(Cost::copy(self.len(py)?), |keys| {
            Ok(keys.lock(&self.core, SEQUENCE)?.tokens().to_vec())
        })?;
        Ok(PyList::new(py, ids)?.try_iter()?.into())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let namespace = self.namespace.bind(py).repr()?;
        Ok(format!(
            "<TokenSequence of {} tokens in {namespace}>",
            self.len(py)?
        ))
    }
}

impl PyTokenSequence {
    fn token<'py>(&self, py: Python<'py>, position: i128, len: usize) -> PyResult<Tokens<'py>> {
        let from_start = if position < 0 {
            position + signed(len)
        } else {
            position
        };
        let token = py.enter(Cost::Short, |keys| {
            let seq = keys.lock(&self.core, SEQUENCE)?;
            Ok(usize::try_from(from_start)
                .ok()
                .and_then(|at| seq.tokens().get(at).copied()))
        })?;
        match token {
            Some(token) => Ok(token.into_pyobject(py)?.into()),
            None => Err(PyIndexError::new_err(format!(
                "TokenSequence: position {position} is outside the {len} tokens"
            ))),
        }
    }

    fn copy<'py>(
        &self,
        py: Python<'py>,
        slice: &Bound<'py, PySlice>,
        len: usize,
    ) -> PyResult<Tokens<'py>> {
        let bounds = slice.indices(isize::try_from(len)?)?;
        let (start, step, count) = (bounds.start, bounds.step, bounds.slicelength);
        let ids: Vec<u32> = py.enter(Cost::copy(count), |keys| {
            let seq = keys.lock(&self.core, SEQUENCE)?;
            let tokens = seq.tokens();
            // Another thread may have truncated the sequence meanwhile.
            if step == 1 {
                let start = start.unsigned_abs().min(tokens.len());
                return Ok(tokens[start..(start + count).min(tokens.len())].to_vec());
            }
            let places = (0..count).map(|place| start + place.cast_signed() * step);
            Ok(places
                .filter_map(|at| tokens.get(at.unsigned_abs()).copied())
                .collect())
        })?;
        Ok(PyArray1::from_vec(py, ids).into())
    }
}

enum Key<'py> {
    Position(i128),
    Slice(Bound<'py, PySlice>),
}

impl<'py> FromPyObject<'_, 'py> for Key<'py> {
    type Error = PyErr;

    #[cfg(feature = "experimental-inspect")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = pyo3::inspect::PyStaticExpr::Constant {
        value: pyo3::inspect::PyStaticConstant::Str("SupportsIndex | slice"),
    };

    fn extract(key: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match key.cast::<PySlice>() {
            Ok(slice) => Ok(Self::Slice(slice.to_owned())),
            Err(_) => crate::buffers::int(&key).map(Self::Position),
        }
    }
}

fn signed(len: usize) -> i128 {
    i128::try_from(len).unwrap_or(i128::MAX)
}

/// Refuses a change of a sequence that a request of a ledger has.
fn check_free(seq: &TokenSequence, call: &'static str) -> kvtrie_core::Result<()> {
    if !seq.is_owned() {
        return Ok(());
    }
    let message = format!(
        "a request of a SequenceLedger has this sequence of {} tokens; append through the ledger, or finish or \
         forget the request first",
        seq.len()
    );
    Err(Error::new(ErrorKind::InvalidArgument, call, message))
}

#[inline]
fn read_ids(
    ids: &Bound<'_, PyAny>,
    (limit, limit_arg): (Option<i128>, Arg),
    arg: Arg,
) -> PyResult<Vec<u32>> {
    match limit {
        None => integers(ids, TOKEN_IDS, arg),
        Some(limit) => first_integers(ids, limit_arg.count(limit)?, TOKEN_IDS, arg),
    }
}

fn read_items(value: Option<&Bound<'_, PyAny>>, arg: Arg) -> PyResult<Vec<Item>> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    if let Ok(tuple) = value.cast::<PyTuple>()
        && tuple.is_empty()
    {
        return Ok(Vec::new());
    }
    let items = arg.iterate(value, "an iterable of Item")?;
    items
        .enumerate()
        .map(|(at, item)| {
            let item = item?;
            let item = item
                .cast::<PyItem>()
                .map_err(|_| arg.wrong_item(at, &item, "an Item"))?;
            Ok(item.get().core.clone())
        })
        .collect()
}
