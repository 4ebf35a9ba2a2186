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

/// An error with its kind, the call that failed, and a message that names the value and the limit.
///
/// # Examples
/// ```
/// let error = kvtrie_core::BlockAllocator::new(0).unwrap_err();
/// assert_eq!(error.call(), "BlockAllocator::new");
/// assert_eq!(error.message(), "num_blocks is 0; it must be in [1, 2147483648]");
/// assert_eq!(error.to_string(), format!("{}: {}", error.call(), error.message()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    call: &'static str,
    message: String,
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn block_in_use(call: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BlockInUse, call, message)
    }

    pub(crate) fn out_of_blocks(call: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::OutOfBlocks, call, message)
    }

    pub(crate) fn stale(call: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::StaleHandle, call, message)
    }

    pub(crate) fn snapshot(message: impl fmt::Display) -> Self {
        let call = "RadixIndex::restore_within";
        Self::new(ErrorKind::Snapshot, call, message.to_string())
    }

    pub(crate) fn broken_invariant(call: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BrokenInvariant, call, message)
    }

    /// An error of a crate that is built on this one. `call` is a path of Rust, such as `RadixIndex::plan`.
    #[must_use]
    pub fn new(kind: ErrorKind, call: &'static str, message: impl Into<String>) -> Self {
        debug_assert!(call.contains("::"), "{call} is no path of a call");
        Self {
            kind,
            call,
            message: message.into(),
        }
    }

    /// The error of a call that is another one with default arguments.
    pub(crate) fn in_call(self, call: &'static str) -> Self {
        Self { call, ..self }
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The call that failed.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// What was wrong, without the name of the call.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.message)
    }
}

impl std::error::Error for Error {}

/// An invalid argument of a call: its message as for `format!`.
macro_rules! invalid {
    ($call:expr, $($message:tt)+) => {
        $crate::error::Error::new($crate::error::ErrorKind::InvalidArgument, $call, format!($($message)+))
    };
}
pub(crate) use invalid;
