//! The trees of the forest, one per namespace, and the namespaces that have one.

use std::sync::Arc;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::grade::Grades;
use crate::ids::{NO_NODE, NodeIndex};
use crate::namespace::Namespace;
use crate::storage::salts::Salts;
use crate::storage::slab::Slab;

#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) root: NodeIndex,
    /// Replaced when a block in the middle of a path leaves or is replaced, which makes older cursors stale. No two
    /// values in an index are equal.
    pub(crate) version: u64,
    /// Number of dead blocks; only `eviction` changes it.
    pub(crate) num_dead: u64,
    /// The grades of approximate blocks; only `entries` changes the counts.
    pub(crate) grades: Grades,
}

#[derive(Debug)]
pub(crate) struct Trees {
    all: Slab<Tree>,
    by_namespace: HashMap<Arc<Namespace>, u32, FixedState>,
    by_salt: Salts,
    last_version: u64,
}

impl Trees {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            all: Slab::default(),
            by_namespace: HashMap::with_hasher(FixedState::with_seed(seed)),
            by_salt: Salts::default(),
            last_version: 0,
        }
    }

    pub(crate) fn of(&self, namespace: &Arc<Namespace>) -> Option<u32> {
        self.by_namespace.get(namespace).copied()
    }

    /// Adds a tree without a root; [`Self::name`] must follow.
    pub(super) fn add(&mut self, namespace: &Arc<Namespace>) -> u32 {
        let tree = self.tree(namespace, NO_NODE);
        self.all.insert(tree)
    }

    pub(super) fn name(&mut self, tree: u32, root: NodeIndex) {
        self.all[tree].root = root;
        let namespace = &self.all[tree].namespace;
        self.by_namespace.insert(Arc::clone(namespace), tree);
        self.by_salt.add(namespace);
    }

    fn tree(&mut self, namespace: &Arc<Namespace>, root: NodeIndex) -> Tree {
        self.last_version += 1;
        Tree {
            namespace: Arc::clone(namespace),
            root,
            version: self.last_version,
            num_dead: 0,
            grades: Grades::default(),
        }
    }

    pub(super) fn renew(&mut self, tree: u32) {
        self.last_version += 1;
        self.all[tree].version = self.last_version;
    }

    pub(super) fn remove(&mut self, tree: u32) {
        if let Some(gone) = self.all.remove(tree) {
            self.by_namespace.remove(&gone.namespace);
            self.by_salt.remove(&gone.namespace);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Tree)> {
        self.all.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn num_dead_mut(&mut self, tree: u32) -> &mut u64 {
        &mut self.all[tree].num_dead
    }

    pub(crate) fn grades_mut(&mut self, tree: u32) -> &mut Grades {
        &mut self.all[tree].grades
    }

    pub(crate) fn near<'a>(
        &'a self,
        own: &'a Arc<Namespace>,
        count: usize,
    ) -> impl Iterator<Item = &'a Arc<Namespace>> {
        self.by_salt.near(own, count)
    }

    pub(crate) fn num_by_salt(&self) -> usize {
        self.by_salt.len()
    }

    pub(crate) fn num_by_namespace(&self) -> usize {
        self.by_namespace.len()
    }

    pub(crate) fn vacant(&self) -> &[u32] {
        self.all.vacant()
    }

    /// Makes room for trees to restore, as [`Slab::to_fill`]; returns whether it could.
    pub(crate) fn make_room(&mut self, places: usize, vacant: Vec<u32>) -> bool {
        let room = Slab::to_fill(places, vacant);
        room.map(|room| self.all = room).is_some()
    }

    /// Restores a tree. Returns false if the namespace has another tree.
    pub(super) fn fill(&mut self, place: u32, namespace: &Arc<Namespace>, root: NodeIndex) -> bool {
        let tree = self.tree(namespace, root);
        self.all.fill(place, tree);
        self.by_salt.add(namespace);
        let known = self.by_namespace.insert(Arc::clone(namespace), place);
        known.is_none()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let grades = self.all.iter().map(|(_, tree)| tree.grades.heap_bytes());
        grades.sum::<usize>()
            + self.all.heap_bytes()
            + self.by_namespace.allocation_size()
            + self.by_salt.heap_bytes()
    }

    #[cfg(test)]
    pub(crate) fn hash_of(&self, namespace: &Arc<Namespace>) -> u64 {
        use std::hash::BuildHasher;
        self.by_namespace.hasher().hash_one(namespace)
    }
}

impl std::ops::Index<u32> for Trees {
    type Output = Tree;

    fn index(&self, tree: u32) -> &Tree {
        &self.all[tree]
    }
}
