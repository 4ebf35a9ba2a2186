//! The positions of one request: what is final, what is computed, what is issued.

use super::present::Islands;

/// Where one request stands. Nobody else counts its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    /// Final ids: the length of the sequence.
    pub(super) num_final: usize,
    /// KV of everything below was claimed to be written, drafts included; never inside an island.
    computed: usize,
    /// The engine has issued everything below; at least `computed`, and never inside an island.
    issued: usize,
    /// What has KV already and lies at or behind the computed prefix.
    islands: Islands,
    /// First positions of the drafts that were issued and not verified, ascending, one for each time they were issued.
    drafts: Vec<usize>,
}

/// A request's positions after a step that was found to contradict nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stepped {
    computed: usize,
    issued: usize,
    num_final: usize,
    draft: Option<usize>,
}

/// What a call says that cannot be, with both numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contradiction {
    /// A claim below what is final and computed.
    Below { claimed: usize, verified: usize },
    /// A claim behind what was issued.
    Behind { claimed: usize, issued: usize },
    /// Positions behind the end of the table.
    NoRoom { end: usize, capacity: usize },
    /// A claim that comes down from another one while no ids have arrived for the first drafts.
    Refused {
        claimed: usize,
        computed: usize,
        draft: usize,
    },
    /// More drafts than tokens issued with them.
    Drafts { drafts: usize, tokens: usize },
}

impl Positions {
    /// `num_final` ids, and KV for what lies below `computed` and for the islands behind it.
    pub(super) fn new(num_final: usize, computed: usize, islands: Islands) -> Self {
        let computed = islands.leave(computed);
        Self {
            num_final,
            computed,
            issued: computed,
            islands,
            drafts: Vec::new(),
        }
    }

    /// The end of what is final *and* computed.
    pub(super) fn verified(&self) -> usize {
        let first_draft = self.drafts.first().copied().unwrap_or(usize::MAX);
        self.num_final.min(self.computed).min(first_draft)
    }

    pub(super) fn issued(&self) -> usize {
        self.issued
    }

    /// The ranges of final tokens that have no KV, or none that is known to be theirs.
    pub(super) fn missing(&self) -> Vec<(usize, usize)> {
        self.islands.between(self.verified(), self.num_final)
    }

    /// Issues positions, the last of them drafts; answers where they end if the table ends before that.
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

    /// More ids are final.
    pub(super) fn append(&mut self, count: usize) {
        self.num_final += count;
    }

    /// KV of everything below `claimed` is written. A claim that comes down, or that verifies drafts, says where the engine
    /// stands: nothing behind it counts as issued any more.
    pub(super) fn confirm(&mut self, claimed: usize) -> Result<(), Contradiction> {
        self.check_claim(claimed)?;
        // Drafts were counted out, and nobody says whose: ids that come alone would count with what they replace.
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
        let claimed = self.islands.leave(claimed);
        let comes_down = claimed < self.computed;
        if self.claim(claimed) || comes_down {
            self.issued = claimed;
            self.give_up_drafts(claimed);
        }
        Ok(())
    }

    /// One step at once: `new_ids` are final, everything below `claimed` is computed or on its way, and so many tokens
    /// more are issued from there on.
    pub(super) fn check_step(
        &self,
        new_ids: usize,
        claimed: usize,
        tokens: usize,
        drafts: usize,
        capacity: usize,
    ) -> Result<Stepped, Contradiction> {
        self.check_claim(claimed)?;
        let computed = self.islands.leave(claimed);
        let (issued, draft) = self.issue(computed, tokens, drafts, capacity)?;
        Ok(Stepped {
            computed,
            issued,
            num_final: self.num_final + new_ids,
            draft,
        })
    }

    /// Takes a step that was checked.
    pub(super) fn step(&mut self, stepped: Stepped) {
        self.num_final = stepped.num_final;
        self.claim(stepped.computed);
        self.give_up_drafts(stepped.computed);
        self.issued = stepped.issued;
        self.drafts.extend(stepped.draft);
    }

    /// Nothing at or behind `to`, which is issued, is computed or issued from here on. Answers the ranges that were.
    pub(super) fn rollback(&mut self, to: usize) -> Vec<(usize, usize)> {
        let verified = self.verified();
        let mut gone = Vec::new();
        if to < verified {
            gone.push((to, verified));
        }
        gone.extend(self.islands.behind(to.max(verified)));
        self.computed = self.computed.min(to);
        self.issued = to;
        self.islands.cut(to);
        self.drafts.retain(|&first| first < to);
        gone
    }

    fn check_claim(&self, claimed: usize) -> Result<(), Contradiction> {
        let (verified, issued) = (self.verified(), self.issued);
        if claimed < verified {
            return Err(Contradiction::Below { claimed, verified });
        }
        if claimed > issued {
            return Err(Contradiction::Behind { claimed, issued });
        }
        Ok(())
    }

    /// The engine counts what is under way: drafts at or behind its counter were given up.
    fn give_up_drafts(&mut self, counter: usize) {
        let kept = self.drafts.partition_point(|&first| first < counter);
        self.drafts.truncate(kept);
    }

    /// Notes a claim, and verifies the drafts that ids have arrived for; answers whether there are such.
    fn claim(&mut self, computed: usize) -> bool {
        let verified = self
            .drafts
            .iter()
            .take_while(|&&first| first < self.num_final)
            .count();
        if verified > 0 {
            self.drafts.drain(..verified);
            // The counter has what is under way without what was refused, so all that is stands so much further in front.
            // What would stand among the ids is not in it.
            let (refused, num_final) = (self.issued.saturating_sub(computed), self.num_final);
            self.drafts.retain(|&first| first >= num_final + refused);
            for first in &mut self.drafts {
                *first -= refused;
            }
        }
        self.computed = computed;
        self.islands.forget_below(self.verified());
        verified > 0
    }

    /// Where so many tokens from `from` on end, and where the last `drafts` of them begin.
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
        let end = self.islands.advance(from, tokens);
        if end > capacity {
            return Err(Contradiction::NoRoom { end, capacity });
        }
        let draft = (drafts > 0).then(|| self.islands.advance(from, tokens - drafts));
        Ok((end, draft))
    }
}
