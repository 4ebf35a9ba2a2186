//! The namespaces that hold blocks, by salt. `explain` looks at those of a prompt's own salt.
//!
//! Within a salt they are ordered by their fields, so that neighbours differ in few fields and the choice among many
//! depends on nothing else. Each call costs O(log namespaces).

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use crate::namespace::{Namespace, Salt};

#[derive(Debug, Default)]
pub(crate) struct Salts(BTreeSet<BySalt>);

#[derive(Debug)]
struct BySalt(Arc<Namespace>);

impl BySalt {
    fn key(&self) -> (&Salt, [&str; 3], Option<&str>) {
        let own = &self.0;
        let named = [own.model(), own.kv_dtype(), own.rope()];
        (own.salt(), named, own.adapter())
    }
}

impl Ord for BySalt {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for BySalt {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for BySalt {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for BySalt {}

impl Salts {
    pub(crate) fn add(&mut self, namespace: &Arc<Namespace>) {
        self.0.insert(BySalt(Arc::clone(namespace)));
    }

    pub(crate) fn remove(&mut self, namespace: &Arc<Namespace>) {
        self.0.remove(&BySalt(Arc::clone(namespace)));
    }

    /// The namespaces of the same salt nearest to `own`: at most `count` before it and `count` after it.
    pub(crate) fn near<'a>(
        &'a self,
        own: &'a Arc<Namespace>,
        count: usize,
    ) -> impl Iterator<Item = &'a Arc<Namespace>> {
        let here = || Bound::Excluded(BySalt(Arc::clone(own)));
        let before = self.0.range((Bound::Unbounded, here())).rev();
        let after = self.0.range((here(), Bound::Unbounded));
        let is_same = |other: &&BySalt| other.0.salt() == own.salt();
        let before = before.take_while(is_same).take(count);
        let after = after.take_while(is_same).take(count);
        before.chain(after).map(|other| &other.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Heap bytes; nodes of the `BTreeSet` are about two thirds full.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.len() * size_of::<BySalt>() * 3 / 2
    }
}
