//! The positions of one request: which tokens are final, computed and issued.

use super::cached::CachedRanges;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    /// Number of final ids, which is the length of the sequence.
    pub(super) num_final: usize,
    /// The engine's last claim, which may include drafts. It is never inside a cached range.
    computed: usize,
    /// The end of the issued positions, at least `computed`. It is never inside a cached range.
    issued: usize,
    cached: CachedRanges,
    /// The first unverified draft of each call that issued drafts, ascending.
    drafts: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Stepped {
    computed: usize,
    issued: usize,
    num_final: usize,
    draft: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contradiction {
    Below {
        claimed: usize,
        verified: usize,
    },
    NotIssued {
        claimed: usize,
        issued: usize,
    },
    NoRoom {
        end: usize,
        capacity: usize,
    },
    /// A claim is lower than the last one while no ids have arrived for the first drafts.
    Refused {
        claimed: usize,
        computed: usize,
        draft: usize,
    },
    Drafts {
        drafts: usize,
        tokens: usize,
    },
}

impl Positions {
    /// The positions of a request with KV below `computed` and in the cached ranges.
    pub(super) fn new(num_final: usize, computed: usize, cached: CachedRanges) -> Self {
        let computed = cached.leave(computed);
        Self {
            num_final,
            computed,
            issued: computed,
            cached,
            drafts: Vec::new(),
        }
    }

    pub(super) fn verified(&self) -> usize {
        let first_draft = self.drafts.first().copied().unwrap_or(usize::MAX);
        self.num_final.min(self.computed).min(first_draft)
    }

    pub(super) fn issued(&self) -> usize {
        self.issued
    }

    pub(super) fn missing(&self) -> Vec<(usize, usize)> {
        self.cached.gaps(self.verified(), self.num_final)
    }

    pub(super) fn schedule(
        &mut self,
        tokens: usize,
        drafts: usize,
        capacity: usize,
    ) -> Result<(), Contradiction> {
        let (issued, draft) = self.issue(self.issued, tokens, drafts, capacity)?;
        self.issued = issued;
        self.drafts.extend(draft);
        Ok(())
    }

    pub(super) fn append(&mut self, count: usize) {
        self.num_final += count;
    }

    /// Takes a claim. If it is lower than the last one, or verifies drafts, later positions no longer count as issued.
    pub(super) fn confirm(&mut self, claimed: usize) -> Result<(), Contradiction> {
        self.check_claim(claimed)?;
        // The ids of a later call could replace any of the drafts, so which ones the claim subtracts is unknown.
        if let Some(&draft) = self.drafts.first()
            && claimed < self.computed
            && draft >= self.num_final
        {
            return Err(Contradiction::Refused {
                claimed,
                computed: self.computed,
                draft,
            });
        }
        let claimed = self.cached.leave(claimed);
        let comes_down = claimed < self.computed;
        if self.claim(claimed) || comes_down {
            self.issued = claimed;
            self.give_up_drafts(claimed);
        }
        Ok(())
    }

    /// Checks a step: `new_ids` become final, everything below `claimed` is computed or under way, and `tokens` more
    /// are issued.
    pub(super) fn check_step(
        &self,
        new_ids: usize,
        claimed: usize,
        tokens: usize,
        drafts: usize,
        capacity: usize,
    ) -> Result<Stepped, Contradiction> {
        self.check_claim(claimed)?;
        let computed = self.cached.leave(claimed);
        let (issued, draft) = self.issue(computed, tokens, drafts, capacity)?;
        Ok(Stepped {
            computed,
            issued,
            num_final: self.num_final + new_ids,
            draft,
        })
    }

    pub(super) fn step(&mut self, stepped: Stepped) {
        self.num_final = stepped.num_final;
        self.claim(stepped.computed);
        self.give_up_drafts(stepped.computed);
        self.issued = stepped.issued;
        self.drafts.extend(stepped.draft);
    }

    /// Whether a rollback to `to` takes back a claim or a cached segment.
    pub(super) fn loses(&self, to: usize) -> bool {
        to < self.computed || to < self.cached.end()
    }

    pub(super) fn rollback(&mut self, to: usize) -> Vec<(usize, usize)> {
        let verified = self.verified();
        let mut gone = Vec::new();
        if to < verified {
            gone.push((to, verified));
        }
        gone.extend(self.cached.from(to.max(verified)));
        self.computed = self.computed.min(to);
        self.issued = to;
        self.cached.cut(to);
        self.drafts.retain(|&first| first < to);
        gone
    }

    fn check_claim(&self, claimed: usize) -> Result<(), Contradiction> {
        let (verified, issued) = (self.verified(), self.issued);
        if claimed < verified {
            return Err(Contradiction::Below { claimed, verified });
        }
        if claimed > issued {
            return Err(Contradiction::NotIssued { claimed, issued });
        }
        Ok(())
    }

    fn give_up_drafts(&mut self, counter: usize) {
        let kept = self.drafts.partition_point(|&first| first < counter);
        self.drafts.truncate(kept);
    }

    /// Sets the claim and verifies the drafts for which ids have arrived. Returns whether there were any.
    fn claim(&mut self, computed: usize) -> bool {
        let verified = self
            .drafts
            .iter()
            .take_while(|&&first| first < self.num_final)
            .count();
        if verified > 0 {
            self.drafts.drain(..verified);
            // The claim excludes rejected drafts, so later drafts move down by their number, but not below the final
            // ids.
            let (refused, num_final) = (self.issued.saturating_sub(computed), self.num_final);
            self.drafts.retain(|&first| first >= num_final + refused);
            for first in &mut self.drafts {
                *first -= refused;
            }
        }
        self.computed = computed;
        self.cached.forget_below(self.verified());
        verified > 0
    }

    /// The end of `tokens` positions from `from` on, and the start of the last `drafts` of them, if there are any.
    fn issue(
        &self,
        from: usize,
        tokens: usize,
        drafts: usize,
        capacity: usize,
    ) -> Result<(usize, Option<usize>), Contradiction> {
        if drafts > tokens {
            return Err(Contradiction::Drafts { drafts, tokens });
        }
        let end = self.cached.advance(from, tokens);
        if end > capacity {
            return Err(Contradiction::NoRoom { end, capacity });
        }
        let draft = (drafts > 0).then(|| self.cached.advance(from, tokens - drafts));
        Ok((end, draft))
    }
}
