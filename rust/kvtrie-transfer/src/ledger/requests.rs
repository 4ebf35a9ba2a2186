//! The live requests of a ledger.

use std::ops::{Index, IndexMut};

use super::request::Request;

/// Names a live request of a ledger. It is stale for good once the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    place: u32,
    /// How many requests began before this one.
    number: u64,
}

impl RequestId {
    pub(super) fn place(self) -> usize {
        self.place as usize
    }
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    places: Vec<Option<(u64, Request)>>,
    free: Vec<u32>,
    begun: u64,
}

impl Requests {
    pub(super) fn insert(&mut self, request: Request) -> RequestId {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let number = self.begun;
        self.begun += 1;
        self.places[place as usize] = Some((number, request));
        RequestId { place, number }
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<Request> {
        self.get(id)?;
        self.free.push(id.place);
        let (_, request) = self.places[id.place()].take()?;
        Some(request)
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Request> {
        match self.places.get(id.place()) {
            Some(Some((number, request))) if *number == id.number => Some(request),
            _ => None,
        }
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        match self.places.get_mut(id.place()) {
            Some(Some((number, request))) if *number == id.number => Some(request),
            _ => None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Places of live and of ended requests.
    pub(super) fn num_places(&self) -> usize {
        self.places.len()
    }
}

impl Index<RequestId> for Requests {
    type Output = Request;

    /// # Panics
    /// If the request has ended.
    fn index(&self, id: RequestId) -> &Request {
        self.get(id).expect("a live request")
    }
}

impl IndexMut<RequestId> for Requests {
    fn index_mut(&mut self, id: RequestId) -> &mut Request {
        self.get_mut(id).expect("a live request")
    }
}
