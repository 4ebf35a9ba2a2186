//! The errors of transfers, with the reason why a manifest is refused.

use std::fmt;

use kvtrie_core::{Error, ErrorKind};

/// Why a transfer manifest is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The bytes are not a manifest, or contradict themselves.
    Malformed,
    /// The bytes have another version of the format.
    Version,
    /// The manifest exceeds a limit of its reader.
    Limits,
    /// A run was not written with this key, or was changed afterwards.
    Digest,
    /// The blocks belong to another namespace than the prompt.
    Namespace,
    /// The manifest names other groups of blocks than the receiver has.
    Groups,
}

impl Refusal {
    /// The reason in one word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Version => "version",
            Self::Limits => "limits",
            Self::Digest => "digest",
            Self::Namespace => "namespace",
            Self::Groups => "groups",
        }
    }
}

/// An error of reading a manifest, or of planning with one.
///
/// # Examples
/// ```
/// use kvtrie_transfer::{Refusal, TransferLimits, TransferManifest};
/// let error = TransferManifest::from_bytes(b"?", &TransferLimits::default()).unwrap_err();
/// assert_eq!(error.refusal(), Some(Refusal::Malformed));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferError {
    /// The manifest is refused.
    Refused {
        /// Why.
        refusal: Refusal,
        /// The call that failed.
        call: &'static str,
        /// The value and the limit.
        message: String,
    },
    /// The receiver's own arguments are wrong.
    Argument(Error),
}

impl TransferError {
    /// Why the manifest is refused, if it is.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Refused { refusal, .. } => Some(*refusal),
            Self::Argument(_) => None,
        }
    }

    /// What was wrong, without the name of the call.
    #[must_use]
    pub fn message(&self) -> &str {
        match self {
            Self::Refused { message, .. } => message,
            Self::Argument(error) => error.message(),
        }
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { call, message, .. } => write!(f, "{call}: {message}"),
            Self::Argument(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TransferError {}

impl From<Error> for TransferError {
    fn from(error: Error) -> Self {
        Self::Argument(error)
    }
}

pub(crate) fn block_in_use(call: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::BlockInUse, call, message)
}

pub(crate) fn stale(call: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::StaleHandle, call, message)
}

pub(crate) fn refused(
    refusal: Refusal,
    call: &'static str,
    message: impl Into<String>,
) -> TransferError {
    TransferError::Refused {
        refusal,
        call,
        message: message.into(),
    }
}

/// An invalid argument of a call: its message as for `format!`.
macro_rules! invalid {
    ($call:expr, $($message:tt)+) => {
        kvtrie_core::Error::new(kvtrie_core::ErrorKind::InvalidArgument, $call, format!($($message)+))
    };
}
pub(crate) use invalid;
