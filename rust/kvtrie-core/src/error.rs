//! The error type of all calls.

use std::fmt;

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is outside its limits.
    InvalidArgument,
    /// A block id backs another place already, or was given twice in one call.
    BlockInUse,
    /// Fewer blocks can be freed than requested.
    OutOfBlocks,
    /// A released plan, or a request that has ended, was used again.
    StaleHandle,
    /// The bytes are not a snapshot, are damaged, or exceed a limit.
    Snapshot,
    /// An invariant of the index is broken: a bug in this crate.
    BrokenInvariant,
}

/// An error with its kind and one sentence that names the call, the value and the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    pub(crate) fn block_in_use(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BlockInUse, message)
    }

    pub(crate) fn out_of_blocks(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::OutOfBlocks, message)
    }

    pub(crate) fn stale(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::StaleHandle, message)
    }

    pub(crate) fn snapshot(message: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::Snapshot,
            format!("RadixIndex.restore: {message}"),
        )
    }

    pub(crate) fn broken_invariant(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BrokenInvariant, message)
    }

    /// An error of a crate that is built on this one.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
