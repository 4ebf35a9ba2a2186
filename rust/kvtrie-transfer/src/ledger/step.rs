//! Records one scheduler step of many requests in one call.

use std::fmt;

use kvtrie_core::{Error, Result, SequenceOwner, TokenSequence, failpoints};

use super::ids::{finals, tokens};
use super::positions::Stepped;
use super::request::refuse;
use super::{RequestId, SequenceLedger};
use crate::error::invalid;

const CALL: &str = "SequenceLedger::step";

/// What an engine reports once per step, with one item per request.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a, T> {
    /// The requests. None may occur twice.
    pub requests: &'a [RequestId],
    /// Number of positions that the step issues, from `num_computed` on.
    pub num_scheduled: &'a [usize],
    /// The engine's counters before the step, which include steps under way.
    pub num_computed: &'a [usize],
    /// The ids that became final since the last step: `ids[offsets[i]..offsets[i + 1]]` for request `i`. They may end
    /// in [`PLACEHOLDER`](super::PLACEHOLDER)s.
    pub ids: &'a [T],
    /// Offsets into `ids`, ascending, one more than there are requests.
    pub offsets: &'a [usize],
    /// How many of the issued positions, counted from the end, are drafts. `None` means that there are none.
    pub num_drafts: Option<&'a [usize]>,
}

/// The change that a step makes to one request's sequence. [`to`](Self::to) applies it.
#[derive(Debug)]
pub struct StepIds<'a> {
    change: IdChange<'a>,
    owner: &'a SequenceOwner,
    num_final: usize,
}

#[derive(Clone, Copy, Debug)]
enum IdChange<'a> {
    Append(&'a [u32]),
    Cut(usize),
}

impl StepIds<'_> {
    /// Applies the change, if `seq` is the request's sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if it is another sequence, which is left unchanged.
    pub fn to(self, seq: &mut TokenSequence) -> Result<()> {
        let done = match self.change {
            IdChange::Append(ids) => seq.extend_as(self.owner, ids),
            IdChange::Cut(len) => seq.truncate_as(self.owner, len),
        };
        done.map_err(|_| {
            invalid!(
                CALL,
                "the sequence of {} tokens is not the one of {} tokens that the request began with",
                seq.len(),
                self.num_final
            )
        })
    }
}

/// Why a step was refused, and for which request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepError<E = Error> {
    /// The index of the request in the step; `None` for an error of the whole step.
    pub at: Option<usize>,
    /// What is wrong.
    pub error: E,
}

impl<E: fmt::Display> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            Some(at) => write!(f, "{} (requests[{at}])", self.error),
            None => self.error.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for StepError<E> {}

/// Buffers kept between steps to save allocations.
#[derive(Default)]
pub(super) struct Scratch {
    /// For each slot of a request, the last step that named it.
    seen_in: Vec<u64>,
    steps: u64,
    stepped: Vec<(usize, Stepped)>,
    ids: Vec<u32>,
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scratch")
    }
}

impl SequenceLedger {
    /// Records one scheduler step: new final ids, the engine's counter and the issued positions of every request. It
    /// takes effect for all requests or for none.
    ///
    /// `visit` gives access to the sequences. It is called for every request with new ids, and must apply its second
    /// argument to the request's sequence. If it fails, nothing has changed.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle): a request is not live.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): lists of different lengths, offsets that do not
    ///   ascend, a request given twice, and what [`append`](Self::append), [`confirm`](Self::confirm) and
    ///   [`schedule`](Self::schedule) refuse.
    ///
    /// # Complexity
    /// O(requests + new ids).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # use kvtrie_transfer::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut seqs = [TokenSequence::new(ns, vec![1, 2, 3], vec![])?];
    /// let mut ledger = SequenceLedger::new(2)?;
    /// let id = ledger.begin(&mut seqs[0], &[BlockId(5), BlockId(6)], Begin::default())?;
    /// let mut step = |scheduled, computed, ids: &[u32]| {
    ///     let step = Step {
    ///         requests: &[id],
    ///         num_scheduled: &[scheduled],
    ///         num_computed: &[computed],
    ///         ids,
    ///         offsets: &[0, ids.len()],
    ///         num_drafts: None,
    ///     };
    ///     ledger.step(&step, |at, ids| ids.to(&mut seqs[at]))?;
    ///     Ok::<_, StepError>(ledger.final_end(id))
    /// };
    /// assert_eq!(step(3, 0, &[]), Ok(Ok(0)));
    /// assert_eq!(step(1, 3, &[]), Ok(Ok(3)));
    /// assert_eq!(step(0, 4, &[4]), Ok(Ok(4)));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn step<T, E>(
        &mut self,
        step: &Step<'_, T>,
        mut visit: impl FnMut(usize, StepIds<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), StepError<E>>
    where
        T: Copy + Into<i64>,
        E: From<Error>,
    {
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = match self.check_step(step, &mut scratch) {
            Ok(()) => self.take_step(step, &mut scratch, &mut visit),
            Err(StepError { at, error }) => Err(StepError {
                at,
                error: E::from(error),
            }),
        };
        self.scratch = scratch;
        done
    }

    fn check_step<T: Copy + Into<i64>>(
        &self,
        step: &Step<'_, T>,
        scratch: &mut Scratch,
    ) -> std::result::Result<(), StepError> {
        step.check_lengths()
            .map_err(|error| StepError { at: None, error })?;
        scratch.steps += 1;
        scratch.stepped.clear();
        scratch.stepped.reserve(step.requests.len());
        if scratch.seen_in.len() < self.requests.num_places() {
            scratch.seen_in.resize(self.requests.num_places(), 0);
        }
        for at in 0..step.requests.len() {
            let item = self
                .check_item(step, at, scratch)
                .map_err(|error| StepError {
                    at: Some(at),
                    error,
                })?;
            scratch.stepped.push(item);
        }
        failpoints::before(CALL).map_err(|error| StepError { at: None, error })
    }

    fn check_item<T: Copy + Into<i64>>(
        &self,
        step: &Step<'_, T>,
        at: usize,
        scratch: &mut Scratch,
    ) -> Result<(usize, Stepped)> {
        let id = step.requests[at];
        let request = self.request(id, CALL)?;
        let seen_in = &mut scratch.seen_in[id.place()];
        if *seen_in == scratch.steps {
            return Err(invalid!(
                CALL,
                "the request at {at} came before in this step"
            ));
        }
        *seen_in = scratch.steps;
        let new = finals(step.ids_of(at))
            .map_err(|why| invalid!(CALL, "of the ids from {} on, {why}", step.offsets[at]))?;
        let capacity = request.blocks.len() * self.block_size;
        let drafts = step.num_drafts.map_or(0, |drafts| drafts[at]);
        let (computed, scheduled) = (step.num_computed[at], step.num_scheduled[at]);
        let stepped =
            request
                .positions
                .check_step(new.len(), computed, scheduled, drafts, capacity);
        let stepped =
            stepped.map_err(|why| refuse(why, request.blocks.len(), self.block_size, CALL))?;
        Ok((id.place(), stepped))
    }

    /// Applies a checked step. If a sequence cannot be reached, the ids appended so far are removed again.
    fn take_step<T: Copy + Into<i64>, E>(
        &mut self,
        step: &Step<'_, T>,
        scratch: &mut Scratch,
        visit: &mut impl FnMut(usize, StepIds<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), StepError<E>> {
        for at in 0..scratch.stepped.len() {
            let Ok(new @ [_, ..]) = finals(step.ids_of(at)) else {
                continue;
            };
            tokens(new, &mut scratch.ids);
            let change = IdChange::Append(&scratch.ids);
            if let Err(error) = visit(at, self.change(scratch.stepped[at].0, change)) {
                for before in (0..at).rev() {
                    let request = scratch.stepped[before].0;
                    let len = self.requests[request].positions.num_final;
                    drop(visit(before, self.change(request, IdChange::Cut(len))));
                }
                return Err(StepError {
                    at: Some(at),
                    error,
                });
            }
        }
        for &(place, stepped) in &scratch.stepped {
            failpoints::within("step: ids that are not counted");
            self.requests[place].positions.step(stepped);
        }
        Ok(())
    }

    fn change<'a>(&'a self, place: usize, change: IdChange<'a>) -> StepIds<'a> {
        let request = &self.requests[place];
        StepIds {
            change,
            owner: &request.owner,
            num_final: request.positions.num_final,
        }
    }
}

impl<T> Step<'_, T> {
    fn ids_of(&self, at: usize) -> &[T] {
        &self.ids[self.offsets[at]..self.offsets[at + 1]]
    }

    fn check_lengths(&self) -> Result<()> {
        let count = self.requests.len();
        let lists = [
            ("num_scheduled", self.num_scheduled.len(), count),
            ("num_computed", self.num_computed.len(), count),
            (
                "num_drafts",
                self.num_drafts.map_or(count, <[usize]>::len),
                count,
            ),
            ("offsets", self.offsets.len(), count + 1),
        ];
        for (name, found, wanted) in lists {
            if found != wanted {
                return Err(invalid!(
                    CALL,
                    "{name} has {found} items; {count} requests need {wanted}"
                ));
            }
        }
        let (first, last) = (self.offsets[0], self.offsets[count]);
        if first != 0 || last != self.ids.len() || !self.offsets.is_sorted() {
            return Err(invalid!(
                CALL,
                "offsets go from {first} to {last}; they must ascend from 0 to the {} ids",
                self.ids.len()
            ));
        }
        Ok(())
    }
}
