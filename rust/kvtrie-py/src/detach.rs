//! The only way to take locks and to release the interpreter.
//!
//! [`Enter::enter`] runs work that may take locks and must not touch Python. Long work releases the interpreter; for
//! short work, releasing would cost more than the work. [`Enter::enter_briefly`] finds out which it is, by the effort
//! that the work counts.
//!
//! A forked child must not take or drop a [`Lock`] that it inherits: a thread of the parent may have held it during the
//! fork, and the data under it may be half changed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use kvtrie_core::Effort;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyCFunction, PyDict};

use crate::errors::{
    KvTrieError, StaleHandleError, event_exception, exception, transfer_exception,
};

/// Whether work is expected to take longer than about 50 µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    Short,
    Long,
}

impl Cost {
    /// Number of blocks that are found in 50 to 100 µs if each is an edge of its own and none is in
    /// the CPU's cache.
    const BLOCKS: usize = 256;
    /// Number of tokens that are copied in about 10 µs.
    const TOKENS: usize = 1 << 16;

    pub(crate) fn blocks(blocks: usize) -> Self {
        if blocks >= Self::BLOCKS {
            Self::Long
        } else {
            Self::Short
        }
    }

    pub(crate) fn copy(tokens: usize) -> Self {
        if tokens >= 4 * Self::TOKENS {
            Self::Long
        } else {
            Self::Short
        }
    }
}

#[derive(Debug)]
pub(crate) enum Failure {
    Core(kvtrie_core::Error),
    Transfer(kvtrie_transfer::TransferError),
    Event(kvtrie_cluster::EventError),
    /// A call panicked earlier while it held this lock.
    Poisoned(&'static str),
    /// The work panicked: a bug in the core.
    Panicked(String),
    /// The object was made before this process was forked.
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

impl From<kvtrie_cluster::EventError> for Failure {
    fn from(error: kvtrie_cluster::EventError) -> Self {
        Self::Event(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Core(error) => exception(&error),
            Failure::Transfer(error) => transfer_exception(&error),
            Failure::Event(error) => event_exception(&error),
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

/// Number of forks from the first process to this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn inherited(what: &str) -> PyErr {
    StaleHandleError::new_err(format!(
        "{what} was made before os.fork, in the parent; this child makes its own (RadixIndex.restore brings a snapshot over)"
    ))
}

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

#[derive(Clone, Copy, Debug)]
pub(crate) struct Birth(u64);

impl Birth {
    pub(crate) fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    pub(crate) fn is_inherited(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}

/// A mutex that can be taken only in the process that made it.
pub(crate) struct Lock<T> {
    /// `None` only while the lock is dropped.
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

    pub(crate) fn is_inherited(&self) -> bool {
        self.birth.is_inherited()
    }

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
            Box::leak(Box::new(self.mutex.take()));
        }
    }
}

pub(crate) struct Keys<'py> {
    /// `None` if the thread has released the interpreter.
    py: Option<Python<'py>>,
}

impl Keys<'_> {
    /// Takes `lock`, which guards `what`; releases the interpreter while it waits.
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

    /// Takes a lock that nobody holds, of which nothing is wrong. Whoever has to have it asks for it and hears why not.
    pub(crate) fn lock_if_free<T>(lock: &Lock<T>) -> Option<MutexGuard<'_, T>> {
        lock.mutex("").ok()?.try_lock().ok()
    }
}

/// The effort of work that keeps the interpreter: 50 to 100 µs with a cold cache.
const BRIEF: Effort = Effort {
    nodes: Cost::BLOCKS as u64,
    bytes: 1 << 20,
};

pub(crate) trait Enter {
    /// Runs `work` with little effort and the interpreter. If it gives up, it runs again without
    /// the interpreter.
    fn enter_briefly<R, F>(self, work: F) -> PyResult<R>
    where
        R: Send,
        F: Fn(&Keys<'_>, Effort) -> Result<Option<R>, Failure> + Send + Sync;

    /// Runs `work`, which must call no Python.
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
    // Unwinding poisons every lock that the work holds, so no call sees half-done work.
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
