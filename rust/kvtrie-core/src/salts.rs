//! The namespaces that hold something, by salt: those that `explain` looks at beside its own.
//!
//! Within a salt they stand in the order of their fields, so that neighbours differ in as little as can be, and which of very many
//! are looked at depends on nothing else. Looking costs O(log namespaces); coming and going costs the same.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use crate::namespace::{Namespace, Salt};

/// Namespaces by salt, then by their other fields.
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

    /// Namespaces of the salt of `own` but itself: those that stand next to it, at most `count` before and as many behind.
    pub(crate) fn near<'a>(
        &'a self,
        own: &'a Arc<Namespace>,
        count: usize,
    ) -> impl Iterator<Item = &'a Arc<Namespace>> {
        let here = || Bound::Excluded(BySalt(Arc::clone(own)));
        let before = self.0.range((Bound::Unbounded, here())).rev();
        let behind = self.0.range((here(), Bound::Unbounded));
        let is_same = |other: &&BySalt| other.0.salt() == own.salt();
        let before = before.take_while(is_same).take(count);
        let behind = behind.take_while(is_same).take(count);
        before.chain(behind).map(|other| &other.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Nodes of the tree are about two thirds full.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.len() * size_of::<BySalt>() * 3 / 2
    }
}
