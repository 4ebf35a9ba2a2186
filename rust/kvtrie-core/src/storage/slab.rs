//! An arena with handles that become stale when their entry is removed.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    generation: u32,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize].value = Some(value);
            return index;
        }
        let index = crate::ids::depth(self.slots.len());
        self.slots.push(Slot {
            generation: 0,
            value: Some(value),
        });
        index
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(value)
    }

    pub(crate) fn handle(&self, index: u32) -> Handle {
        Handle {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// A new handle of an entry; those before it become stale.
    pub(crate) fn renew(&mut self, index: u32) -> Handle {
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        self.handle(index)
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index as usize)?;
        if slot.generation == handle.generation {
            slot.value.as_ref()
        } else {
            None
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((crate::ids::depth(index), slot.value.as_ref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter_map(|(index, slot)| Some((crate::ids::depth(index), slot.value.as_mut()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The vacant places, oldest first. The last is filled first.
    pub(crate) fn vacant(&self) -> &[u32] {
        &self.free
    }

    /// A slab in which [`Self::fill`] must fill all places except `vacant`. `None` if `vacant` has a place twice or an
    /// invalid one.
    pub(crate) fn to_fill(places: usize, vacant: Vec<u32>) -> Option<Self> {
        let mut sorted = vacant.clone();
        sorted.sort_unstable();
        let inside = sorted.last().is_none_or(|&last| (last as usize) < places);
        let distinct = sorted.windows(2).all(|pair| pair[0] < pair[1]);
        let empty = || Slot {
            generation: 0,
            value: None,
        };
        (inside && distinct).then(|| Self {
            slots: std::iter::repeat_with(empty).take(places).collect(),
            free: vacant,
        })
    }

    /// Fills a place that is neither filled nor vacant.
    pub(crate) fn fill(&mut self, index: u32, value: T) {
        self.slots[index as usize].value = Some(value);
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<T>>() + self.free.capacity() * size_of::<u32>()
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    /// # Panics
    /// If the entry was removed: links inside the index never point at a removed entry.
    fn index(&self, index: u32) -> &T {
        self.slots[index as usize]
            .value
            .as_ref()
            .expect("a link points at a removed entry")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        self.slots[index as usize]
            .value
            .as_mut()
            .expect("a link points at a removed entry")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_stale_once_its_entry_was_removed_even_if_the_place_is_used_again() {
        let mut slab = Slab::default();
        let index = slab.insert("a");
        let handle = slab.handle(index);
        assert_eq!(slab.get(handle), Some(&"a"));
        assert_eq!(slab.remove(index), Some("a"));
        assert_eq!(slab.get(handle), None);
        assert_eq!(slab.insert("b"), index);
        assert_eq!(slab.get(handle), None);
        assert_eq!(slab.len(), 1);
    }
}
