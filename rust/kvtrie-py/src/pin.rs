//! The class `Pin`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtrie_core::{IdRange, LookupOptions, Pin};
use pyo3::prelude::*;

use crate::detach::{Enter, Keys};
use crate::errors::released;
use crate::output::truth;
use crate::plan::{at_drop, warn_of_leak};
use crate::results::PyMatch;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::shared::{INDEX, SharedIndex};

/// Blocks of a match that stay in the index until the pin is released. `RadixIndex.pin` makes one.
///
/// Release every pin, or use it in a `with` statement. A pin that is collected unreleased releases
/// itself and emits a `ResourceWarning`.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
///     >>> with index.pin(index.lookup(seq)) as pin:
///     ...     print(pin, pin.found)
///     <Pin of 2 tokens, released=False> Match(num_tokens=2, blocks=[6])
#[pyclass(frozen, weakref, module = "kvtrie", name = "Pin")]
pub(crate) struct PyPin {
    core: Pin,
    num_tokens: usize,
    ranges: Vec<IdRange>,
    start: usize,
    seq: Py<PyTokenSequence>,
    index: Arc<SharedIndex>,
    released: AtomicBool,
}

impl PyPin {
    pub(crate) fn of(py: Python<'_>, index: &Arc<SharedIndex>, found: &PyMatch) -> PyResult<Self> {
        let (shared, own) = (&**index, found.seq.get());
        let (core, num_tokens, ranges) = py.enter_briefly(|keys: &Keys<'_>, effort| {
            let mut seq = keys.lock(&own.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            // The known path is walked once more, to pin it.
            if index.known_edges(&seq) > effort.nodes {
                return Ok(None);
            }
            let options = LookupOptions {
                keep_last: seq.len().saturating_sub(found.num_tokens),
                start: found
                    .start
                    .min(seq.len() / shared.block_size * shared.block_size),
                touch: true,
            };
            let mut ranges = Vec::new();
            let pinned = index.lookup_pinned_within(&mut seq, options, effort, &mut ranges)?;
            Ok(pinned.map(|(found, pin)| (pin, found.num_tokens, ranges)))
        })?;
        Ok(Self {
            core,
            num_tokens,
            ranges,
            start: found.start,
            seq: found.seq.clone_ref(py),
            index: Arc::clone(index),
            released: AtomicBool::new(false),
        })
    }

    fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }

    /// Releases the pin if it is live; returns how many blocks wait then, and whether it was live.
    fn release_once(&self, py: Python<'_>) -> PyResult<(u64, bool)> {
        py.enter_briefly(|keys, effort| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            // Another thread may have released it.
            let is_live = !self.is_released();
            if is_live {
                if index.release_pin_steps(&self.core) > effort.nodes {
                    return Ok(None);
                }
                index.release_pin(&self.core)?;
                self.released.store(true, Ordering::Relaxed);
            }
            Ok(Some((index.num_waiting(), is_live)))
        })
    }
}

#[pymethods]
impl PyPin {
    /// What is pinned.
    #[getter]
    fn found(&self, py: Python<'_>) -> PyMatch {
        PyMatch {
            num_tokens: self.num_tokens,
            ranges: self.ranges.clone(),
            start: self.start,
            seq: self.seq.clone_ref(py),
        }
    }

    /// Whether it was released.
    #[getter]
    fn released(&self) -> bool {
        self.is_released()
    }

    /// Release the pin.
    ///
    /// Returns:
    ///     How many blocks wait for `RadixIndex.take_freed`: those that left the index while only pins
    ///     that have ended held them.
    ///
    /// Raises:
    ///     StaleHandleError: It was released already.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
    ///     >>> pin = index.pin(index.lookup(seq))
    ///     >>> gone = index.discard([6])
    ///     >>> pin.release(), index.take_freed()
    ///     (1, array([6], dtype=int32))
    fn release(&self, py: Python<'_>) -> PyResult<u64> {
        match self.release_once(py)? {
            (num_waiting, true) => Ok(num_waiting),
            (_, false) => Err(released("Pin.release", "pin")),
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        if slf.is_released() {
            return Err(released("Pin.__enter__", "pin"));
        }
        Ok(slf)
    }

    #[pyo3(signature = (
        exception_type: "type[BaseException] | None", exception: "BaseException | None",
        traceback: "TracebackType | None", /
    ) -> "None")]
    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: &Bound<'_, PyAny>,
        exception: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exception_type, exception, traceback);
        self.release_once(py).map(|_| ())
    }

    fn __repr__(&self) -> String {
        format!(
            "<Pin of {} tokens, released={}>",
            self.num_tokens,
            truth(self.is_released())
        )
    }
}

impl Drop for PyPin {
    fn drop(&mut self) {
        // What a forked child inherited is released by its parent.
        if self.is_released() || self.index.core.is_inherited() {
            return;
        }
        at_drop(|py| {
            // If the index is unusable, nothing is reported here: every other call on it raises.
            if let Ok((_, true)) = self.release_once(py) {
                warn_of_leak::<Self>(
                    py,
                    c"a Pin was collected unreleased: release it, or use it in a with statement",
                );
            }
        });
    }
}
