//! The one door to what is under locks, and out of the interpreter.
//!
//! [`Enter::enter`] runs a piece of work that may take locks and must not touch Python. Short work
//! stays attached to the interpreter, because letting go and coming back costs more than the work;
//! long work lets go, so that other threads run. [`Enter::enter_briefly`] finds out which it is: by
//! effort that the work counts, or by numbers that the index keeps and the work asks first.
//!
//! [`Lock`] is the one kind of lock. Those that a forked child inherits are never taken there: a thread that the
//! child does not have may hold them, and what they guard may be half changed. Taking one is an error in the child,
//! and what it guards is not dropped there.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use kvtrie_core::Effort;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyCFunction, PyDict};

use crate::errors::{KvTrieError, StaleHandleError, exception, transfer_exception};

/// Whether a piece of work is expected to take longer than about 50 µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    Short,
    Long,
}

impl Cost {
    /// Blocks that are found in 50 to 100 µs where each is an edge of its own and none is in the
    /// CPU's cache; in long edges or a warm cache they take a tenth of it.
    const BLOCKS: usize = 256;
    /// Tokens that are copied in about 10 µs.
    const TOKENS: usize = 1 << 16;

    /// The cost of work on so many blocks.
    pub(crate) fn blocks(blocks: usize) -> Self {
        if blocks >= Self::BLOCKS {
            Self::Long
        } else {
            Self::Short
        }
    }

    /// The cost of copying so many tokens.
    pub(crate) fn copy(tokens: usize) -> Self {
        if tokens >= 4 * Self::TOKENS {
            Self::Long
        } else {
            Self::Short
        }
    }
}

/// Why work under a lock failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The core refused.
    Core(kvtrie_core::Error),
    /// A transfer failed.
    Transfer(kvtrie_transfer::TransferError),
    /// A call panicked earlier while it held this lock.
    Poisoned(&'static str),
    /// The work panicked: a bug in the core.
    Panicked(String),
    /// This was made before this process was forked.
    Inherited(&'static str),
}

impl From<kvtrie_core::Error> for Failure {
    fn from(error: kvtrie_core::Error) -> Self {
        Self::Core(error)
    }
}

impl From<kvtrie_transfer::TransferError> for Failure {
    fn from(error: kvtrie_transfer::TransferError) -> Self {
        Self::Transfer(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Core(error) => exception(&error),
            Failure::Transfer(error) => transfer_exception(&error),
            Failure::Poisoned(what) => KvTrieError::new_err(format!(
                "{what} is unusable: an earlier call on it ended in an internal error"
            )),
            Failure::Panicked(message) => KvTrieError::new_err(format!(
                "internal error: {message}; what the call was working on is unusable"
            )),
            Failure::Inherited(what) => inherited(what),
        }
    }
}

/// How often this process and those before it were forked, up to here: each child counts one more.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The error of a handle in a process that inherited it.
pub(crate) fn inherited(what: &str) -> PyErr {
    StaleHandleError::new_err(format!(
        "{what} was made before os.fork, in the parent; this child makes its own (RadixIndex.restore brings a snapshot over)"
    ))
}

/// Counts the forks of the interpreter, from the import of the module on.
pub(crate) fn count_forks(py: Python<'_>) -> PyResult<()> {
    let count = PyCFunction::new_closure(py, None, None, |_, _| {
        FORKS.fetch_add(1, Ordering::Relaxed);
    })?;
    let os = py.import("os")?;
    if os.hasattr("register_at_fork")? {
        let hooks = PyDict::new(py);
        hooks.set_item("after_in_child", count)?;
        os.call_method("register_at_fork", (), Some(&hooks))?;
    }
    Ok(())
}

/// The process in which something was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Birth(u64);

impl Birth {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it was another process, which forked this one.
    pub(crate) fn is_inherited(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}

/// A lock that only the process can take that made it. O(1) more than a mutex: one comparison.
pub(crate) struct Lock<T> {
    /// None only while it is dropped.
    mutex: Option<Mutex<T>>,
    birth: Birth,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            mutex: Some(Mutex::new(value)),
            birth: Birth::here(),
        }
    }

    /// Whether another process made it, which forked this one.
    pub(crate) fn is_inherited(&self) -> bool {
        self.birth.is_inherited()
    }

    /// The mutex, in the process that made it.
    fn mutex(&self, what: &'static str) -> Result<&Mutex<T>, Failure> {
        match &self.mutex {
            Some(mutex) if !self.is_inherited() => Ok(mutex),
            _ => Err(Failure::Inherited(what)),
        }
    }
}

impl<T> Drop for Lock<T> {
    fn drop(&mut self) {
        if self.is_inherited() {
            // A thread of the parent may have been changing it: its memory is left alone.
            Box::leak(Box::new(self.mutex.take()));
        }
    }
}

/// Takes locks inside the door.
pub(crate) struct Keys<'py> {
    /// None where the thread has let go of the interpreter.
    py: Option<Python<'py>>,
}

impl Keys<'_> {
    /// Takes `lock`, which guards `what`; lets go of the interpreter while it has to wait.
    pub(crate) fn lock<'a, T>(
        &self,
        lock: &'a Lock<T>,
        what: &'static str,
    ) -> Result<MutexGuard<'a, T>, Failure> {
        let mutex = lock.mutex(what)?;
        let locked = match self.py {
            Some(py) => mutex.lock_py_attached(py),
            None => mutex.lock(),
        };
        locked.map_err(|_| Failure::Poisoned(what))
    }
}

/// What work may take that stays attached: 50 to 100 µs where nothing of it is in the CPU's cache.
const BRIEF: Effort = Effort {
    nodes: Cost::BLOCKS as u64,
    bytes: 1 << 20,
};

/// The door.
pub(crate) trait Enter {
    /// Runs `work` attached, as far as little effort takes it. Where it gives up it runs again, detached.
    fn enter_briefly<R, F>(self, work: F) -> PyResult<R>
    where
        R: Send,
        F: Fn(&Keys<'_>, Effort) -> Result<Option<R>, Failure> + Send + Sync;

    /// Runs `work`, which takes its locks from [`Keys`] and calls no Python.
    fn enter<R, F>(self, cost: Cost, work: F) -> PyResult<R>
    where
        R: Send,
        F: FnOnce(&Keys<'_>) -> Result<R, Failure> + Send;
}

impl Enter for Python<'_> {
    fn enter_briefly<R, F>(self, work: F) -> PyResult<R>
    where
        R: Send,
        F: Fn(&Keys<'_>, Effort) -> Result<Option<R>, Failure> + Send + Sync,
    {
        if let Some(done) = self.enter(Cost::Short, |keys| work(keys, BRIEF))? {
            return Ok(done);
        }
        let done = self.enter(Cost::Long, |keys| work(keys, Effort::ANY))?;
        done.ok_or_else(|| KvTrieError::new_err("internal error: the work gave up"))
    }

    fn enter<R, F>(self, cost: Cost, work: F) -> PyResult<R>
    where
        R: Send,
        F: FnOnce(&Keys<'_>) -> Result<R, Failure> + Send,
    {
        let caught = match cost {
            Cost::Short => catch(|| work(&Keys { py: Some(self) })),
            Cost::Long => self.detach(|| catch(|| work(&Keys { py: None }))),
        };
        Ok(caught?)
    }
}

fn catch<R>(work: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    // Unwinding poisons every lock that the work holds, so nobody sees what it left half-done.
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Failure::Panicked(message_of(panic.as_ref()))))
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
