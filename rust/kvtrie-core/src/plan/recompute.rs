//! Computes tokens that a plan would copy approximately (P20). Costs one pass over the segments and the ranges.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, invalid};
use crate::plan::draft::Draft;
use crate::plan::{Class, Copied, Repaired, ReusePlan, Segment};
use crate::policy::{Repair, ReusePolicy};
use crate::storage::slab::Handle;

impl Repaired {
    /// What a policy demands of a new plan.
    pub(crate) fn by(policy: &ReusePolicy, draft: &Draft, block_size: usize) -> Self {
        let in_place = draft.in_place.map_or(0, |end| end.depth as usize) * block_size;
        let moves =
            |segment: &Segment| segment.class == Class::Approximate && segment.start >= in_place;
        let chooses = policy.repair != Repair::Fronts && policy.recompute_share > 0.0;
        if chooses && draft.segments.iter().any(moves) {
            Self::Must(policy.repair)
        } else {
            Self::May
        }
    }
}

impl ReusePlan {
    /// How the engine must choose tokens to compute before anything is inserted with the plan; `None` if it need not.
    #[must_use]
    pub fn awaits(&self) -> Option<Repair> {
        match self.repair {
            Repaired::Must(repair) => Some(repair),
            Repaired::May | Repaired::Done => None,
        }
    }

    pub(crate) fn set_lease(&mut self, lease: Handle) {
        self.lease = lease;
    }

    /// The plan with the tokens in `ranges` to compute as well, and the same lease.
    pub(crate) fn recomputed(&self, ranges: &[(usize, usize)], call: &'static str) -> Result<Self> {
        if self.repair == Repaired::Done {
            return Err(invalid!(
                call,
                "the tokens to compute were chosen by an earlier call"
            ));
        }
        let ranges = self.checked(ranges, call)?;
        let mut parts = Parts {
            block_size: self.block_size,
            segments: Vec::new(),
            copies: Vec::new(),
        };
        let mut copies = self.copies.iter();
        let mut next = 0;
        for segment in &self.segments {
            let copy = if self.is_copied(segment) {
                copies.next()
            } else {
                None
            };
            let Some(copy) = copy else {
                parts.push(*segment);
                continue;
            };
            let mut at = segment.start;
            while let Some(range) = ranges.get(next).filter(|range| range.start < segment.end) {
                parts.copy(segment, copy, at..range.start);
                parts.compute(range.start.max(at)..range.end.min(segment.end));
                at = range.end.min(segment.end);
                if range.end > segment.end {
                    break;
                }
                next += 1;
            }
            parts.copy(segment, copy, at..segment.end);
        }
        Ok(Self {
            index: self.index,
            lease: self.lease,
            block_size: self.block_size,
            num_blocks: self.num_blocks,
            pinned: self.pinned,
            snapshot: self.snapshot.clone(),
            number: self.number,
            ids: Arc::clone(&self.ids),
            num_blocks_in_place: self.num_blocks_in_place,
            edges: self.edges,
            segments: parts.segments,
            copies: parts.copies,
            source_ids: self.source_ids.clone(),
            moved_runs: self.moved_runs.clone(),
            moved_end: self.moved_end,
            candidates_dropped: self.candidates_dropped,
            policy: self.policy.clone(),
            grade: self.grade,
            repair: Repaired::Done,
            groups: self.groups.clone(),
        })
    }

    fn is_copied(&self, segment: &Segment) -> bool {
        segment.class != Class::Compute
            && segment.start >= self.num_blocks_in_place * self.block_size
    }

    /// The ranges without empty ones; touching ones are one.
    fn checked(&self, ranges: &[(usize, usize)], call: &'static str) -> Result<Vec<Range<usize>>> {
        let len = self.snapshot.tokens.len();
        let mut merged: Vec<Range<usize>> = Vec::new();
        let mut last_end = 0;
        for &(start, end) in ranges {
            if start > end || end > len {
                return Err(invalid!(
                    call,
                    "ranges has [{start}, {end}); it must ascend and lie in [0, {len}], the prompt"
                ));
            }
            if start < last_end {
                return Err(invalid!(
                    call,
                    "ranges has [{start}, {end}) after a range that ends at {last_end}; ranges must ascend and be \
                     disjoint"
                ));
            }
            last_end = end;
            if start == end {
                continue;
            }
            self.check_moved(start..end, call)?;
            match merged.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => merged.push(start..end),
            }
        }
        Ok(merged)
    }

    /// Refuses a range with a token that is not an approximate one to be copied.
    fn check_moved(&self, range: Range<usize>, call: &'static str) -> Result<()> {
        let first = self
            .segments
            .partition_point(|segment| segment.end <= range.start);
        let inside = self.segments[first..]
            .iter()
            .take_while(|segment| segment.start < range.end);
        for segment in inside {
            let why = match segment.class {
                Class::Compute => "to compute already",
                _ if !self.is_copied(segment) => "in place",
                Class::Exact => "exact",
                Class::Approximate => continue,
            };
            return Err(invalid!(
                call,
                "ranges has [{}, {}), and token {} is {why}; all must be in moved runs",
                range.start,
                range.end,
                segment.start.max(range.start)
            ));
        }
        Ok(())
    }
}

struct Parts {
    block_size: usize,
    segments: Vec<Segment>,
    copies: Vec<Copied>,
}

impl Parts {
    /// Adds a part of a copied segment.
    fn copy(&mut self, segment: &Segment, copy: &Copied, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let old_start = copy.old_start + (range.start - copy.start);
        let old_end = old_start + range.len();
        let first = copy.ids.start + old_start / self.block_size - copy.old_start / self.block_size;
        let count = old_end.div_ceil(self.block_size) - old_start / self.block_size;
        self.copies.push(Copied {
            start: range.start,
            end: range.end,
            old_start,
            position_delta: copy.position_delta,
            ids: first..first + count,
        });
        self.push(Segment {
            start: range.start,
            end: range.end,
            old_start,
            ..*segment
        });
    }

    fn compute(&mut self, range: Range<usize>) {
        self.push(Segment {
            start: range.start,
            end: range.end,
            old_start: range.start,
            position_delta: 0,
            class: Class::Compute,
            hops: 0,
            kinds: 0,
        });
    }

    /// Adds a segment; neighbouring tokens to compute are one.
    fn push(&mut self, segment: Segment) {
        match self.segments.last_mut() {
            Some(last) if (last.class, segment.class) == (Class::Compute, Class::Compute) => {
                last.end = segment.end;
            }
            _ => self.segments.push(segment),
        }
    }
}
