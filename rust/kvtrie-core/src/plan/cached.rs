//! The parts of an index that a plan reads.

use crate::config::Config;
use crate::moved::Windows;
use crate::plan::path::CachedPath;
use crate::plan::scope::InScope;
use crate::session::SessionId;
use crate::storage::forest::Forest;
use crate::tagging::Tagging;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached<'a> {
    pub(crate) forest: &'a Forest,
    /// The windows, with an empty queue; `None` if moved runs are off.
    pub(crate) windows: Option<&'a Windows>,
    pub(crate) tagging: &'a Tagging,
    pub(crate) config: &'a Config,
    /// If set, only blocks of this path may be used.
    pub(crate) path: Option<&'a CachedPath>,
    /// If set, moved runs come only from blocks in this scope.
    pub(crate) scope: Option<&'a InScope<'a>>,
    /// The session of the plan.
    pub(crate) session: Option<SessionId>,
    /// Moved runs supply no token of the prompt at or after this position.
    pub(crate) moved_end: usize,
}
