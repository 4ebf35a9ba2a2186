//! An index with what plans and ledgers need of it besides the core.

use kvtrie_core::{Group, RadixIndex, ReusePolicy};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

use crate::detach::{Cost, Enter, Lock};
use crate::output::quoted;

/// Number of blocks that an insert takes in the time of one visit of an edge.
pub(crate) const OFFERS_PER_VISIT: usize = 4;
pub(crate) const INDEX: &str = "the index";

const MOST_WARNED_OF: usize = 64;

pub(crate) struct SharedIndex {
    pub(crate) core: Lock<RadixIndex>,
    pub(crate) warned_of: Lock<Vec<String>>,
    pub(crate) num_blocks: u64,
    pub(crate) block_size: usize,
    pub(crate) seed: u64,
    pub(crate) hash_bits: u32,
    pub(crate) groups: Vec<Group>,
}

impl SharedIndex {
    /// Warns of each name in a policy's `forbid_kinds` that no tag of the index has (P12), once per
    /// name, with the nearest kind.
    pub(crate) fn warn_of_unknown_kinds(
        &self,
        py: Python<'_>,
        policy: &ReusePolicy,
        call: &str,
    ) -> PyResult<()> {
        if !policy.approximate || policy.forbid_kinds.is_empty() {
            return Ok(());
        }
        let (unknown, kinds) = py.enter(Cost::Short, |keys| {
            let index = keys.lock(&self.core, INDEX)?;
            let mut warned_of = keys.lock(&self.warned_of, INDEX)?;
            let kinds = index.kinds();
            let is_new = |name: &&String| !kinds.contains(name) && !warned_of.contains(name);
            let unknown: Vec<String> = policy.forbid_kinds.iter().filter(is_new).cloned().collect();
            if unknown.is_empty() {
                return Ok((unknown, Vec::new()));
            }
            warned_of.extend_from_slice(&unknown);
            // Clients may choose the names, so the number of remembered ones is bounded.
            let many = warned_of.len().saturating_sub(MOST_WARNED_OF);
            warned_of.drain(..many);
            Ok((unknown, kinds.to_vec()))
        })?;
        for name in unknown {
            let message = format!(
                "{call}: no tag of this index is of the kind {} in the policy's forbid_kinds, so it forbids nothing{}",
                quoted(py, &name)?,
                match nearest(py, &name, &kinds)? {
                    Some(kind) => format!("; the nearest kind is {}", quoted(py, &kind)?),
                    None => String::new(),
                }
            );
            let message = std::ffi::CString::new(message.replace('\0', "\\x00"))?;
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &message, 1)?;
        }
        Ok(())
    }
}

fn nearest(py: Python<'_>, name: &str, kinds: &[String]) -> PyResult<Option<String>> {
    let near = py
        .import("difflib")?
        .call_method1("get_close_matches", (name, kinds, 1))?;
    Ok(near.extract::<Vec<String>>()?.pop())
}
