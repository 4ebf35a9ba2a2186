//! The live requests of a ledger.

use std::ops::{Index, IndexMut};

use super::request::Request;

/// Names a live request of a ledger. The name is stale once the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    place: u32,
    generation: u32,
}

impl RequestId {
    pub(super) fn place(self) -> usize {
        self.place as usize
    }
}

#[derive(Debug, Default)]
struct Slot {
    /// Number of requests that ended in this slot.
    generation: u32,
    request: Option<Request>,
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Requests {
    pub(super) fn insert(&mut self, request: Request) -> RequestId {
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let slot = &mut self.slots[place as usize];
        slot.request = Some(request);
        let generation = slot.generation;
        RequestId { place, generation }
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<Request> {
        self.get(id)?;
        let slot = &mut self.slots[id.place()];
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.place);
        slot.request.take()
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Request> {
        let slot = self.slots.get(id.place())?;
        let request = slot.request.as_ref();
        request.filter(|_| slot.generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let slot = self.slots.get_mut(id.place())?;
        let request = slot.request.as_mut();
        request.filter(|_| slot.generation == id.generation)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Number of slots of live and ended requests.
    pub(super) fn num_places(&self) -> usize {
        self.slots.len()
    }
}

impl Index<usize> for Requests {
    type Output = Request;

    /// # Panics
    /// If no live request is there.
    fn index(&self, place: usize) -> &Request {
        let request = self.slots[place].request.as_ref();
        request.expect("a live request")
    }
}

impl IndexMut<usize> for Requests {
    fn index_mut(&mut self, place: usize) -> &mut Request {
        let request = self.slots[place].request.as_mut();
        request.expect("a live request")
    }
}
