//! Why bytes are not a batch of KV events.

use std::fmt;

/// Why a batch was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventRefusal {
    /// The bytes are not a batch of events, or contradict themselves.
    Malformed,
    /// The worker's blocks have another size than those of the index.
    BlockSize,
    /// The batch exceeds a limit of the index.
    Limit,
    /// The batch is of another data-parallel rank than those before it.
    Rank,
    /// The batch was read for an index with another key.
    Key,
    /// The worker was removed, or is another index's.
    Worker,
}

impl EventRefusal {
    /// The reason in one word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::BlockSize => "block_size",
            Self::Limit => "limit",
            Self::Rank => "rank",
            Self::Key => "key",
            Self::Worker => "worker",
        }
    }
}

/// A batch that was not applied: nothing of it was.
///
/// # Examples
/// ```
/// use kvtrie_cluster::{EventRefusal, IndexerConfig, KvIndexer};
/// let index = KvIndexer::new(IndexerConfig::new(16), &[7; 32])?;
/// let error = index.reader().read(b"?").unwrap_err();
/// assert_eq!(error.refusal(), EventRefusal::Malformed);
/// # Ok::<(), kvtrie_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventError {
    refusal: EventRefusal,
    message: String,
}

impl EventError {
    pub(crate) fn new(refusal: EventRefusal, message: impl Into<String>) -> Self {
        Self {
            refusal,
            message: message.into(),
        }
    }

    /// Why.
    #[must_use]
    pub fn refusal(&self) -> EventRefusal {
        self.refusal
    }

    /// The value and the limit.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for EventError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvIndexer::apply: {}", self.message)
    }
}

impl std::error::Error for EventError {}
