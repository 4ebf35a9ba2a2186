//! The rules of the ledger without counters: a list of slots with the state of each.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Whether the slot had KV when the request began.
    pub(crate) present: bool,
    pub(crate) issued: bool,
    /// Whether the engine has claimed that its KV is written.
    pub(crate) claimed: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) block_size: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Vec<u32>,
    pub(crate) slots: Vec<Slot>,
    /// Positions of unverified drafts, one list per call that issued some.
    pub(crate) drafts: Vec<Vec<usize>>,
    pub(crate) committed: usize,
}

/// The result of a call: an error if the call contradicts the slots.
pub(crate) type Outcome<T = ()> = Result<T, ()>;

impl Request {
    pub(crate) fn new(block_size: usize, tokens: Vec<u32>, table: Vec<u32>) -> Self {
        let slots = vec![Slot::default(); table.len() * block_size];
        Self {
            block_size,
            tokens,
            table,
            slots,
            drafts: Vec::new(),
            committed: 0,
        }
    }

    /// The first slot that does not fulfil a condition, or the end of the table.
    fn until(&self, like: impl Fn(usize, Slot) -> bool) -> usize {
        (0..self.slots.len())
            .find(|&at| !like(at, self.slots[at]))
            .unwrap_or(self.slots.len())
    }

    pub(crate) fn verified(&self) -> usize {
        let draft = |at| {
            self.drafts
                .iter()
                .any(|drafts| drafts.first().is_some_and(|&first| first <= at))
        };
        self.until(|at, slot| {
            at < self.tokens.len() && (slot.present || slot.claimed) && !draft(at)
        })
    }

    pub(crate) fn issued(&self) -> usize {
        self.until(|_, slot| slot.present || slot.issued)
    }

    pub(crate) fn missing(&self) -> Vec<usize> {
        let verified = self.verified();
        (verified..self.tokens.len())
            .filter(|&at| self.slots.get(at).is_none_or(|slot| !slot.present))
            .collect()
    }

    pub(crate) fn schedule(&mut self, tokens: usize, drafts: usize) -> Outcome {
        let free = |(at, slot): (usize, &Slot)| (!slot.present && !slot.issued).then_some(at);
        let next: Vec<usize> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(free)
            .take(tokens)
            .collect();
        if next.len() < tokens || drafts > tokens {
            return Err(());
        }
        for &at in &next {
            self.slots[at].issued = true;
        }
        if drafts > 0 {
            self.drafts.push(next[tokens - drafts..].to_vec());
        }
        Ok(())
    }

    pub(crate) fn confirm(&mut self, computed: usize) -> Outcome {
        if !self.can_claim(computed) {
            return Err(());
        }
        let claimed = self.until(|_, slot| slot.present || slot.claimed);
        let drafts = self.drafts.len();
        self.claim(computed);
        let from = self.after_present(computed);
        if from < claimed || self.drafts.len() < drafts {
            // The engine's counter excludes the rejected drafts.
            for (at, slot) in self.slots.iter_mut().enumerate() {
                slot.issued = at < computed;
            }
            self.drafts.retain(|drafts| drafts[0] < from);
        }
        Ok(())
    }

    fn can_claim(&self, computed: usize) -> bool {
        computed >= self.verified() && computed <= self.issued() && self.knows_which(computed)
    }

    /// Whether it is known which drafts a lower claim excludes.
    fn knows_which(&self, computed: usize) -> bool {
        let claimed = self.until(|_, slot| slot.present || slot.claimed);
        computed >= claimed
            || self
                .drafts
                .first()
                .is_none_or(|drafts| drafts[0] < self.tokens.len())
    }

    fn after_present(&self, mut at: usize) -> usize {
        while self.slots.get(at).is_some_and(|slot| slot.present) {
            at += 1;
        }
        at
    }

    fn claim(&mut self, computed: usize) {
        let len = self.tokens.len();
        let before = self.drafts.len();
        self.drafts.retain(|drafts| drafts[0] >= len);
        if self.drafts.len() < before {
            // Issued positions move down by the number of rejected drafts.
            let refused = self.issued().saturating_sub(self.after_present(computed));
            self.drafts
                .retain(|drafts| drafts[0] >= self.tokens.len() + refused);
            for drafts in &mut self.drafts {
                for at in drafts {
                    *at -= refused;
                }
            }
        }
        for (at, slot) in self.slots.iter_mut().enumerate() {
            slot.claimed = at < computed;
        }
    }

    pub(crate) fn step(
        &mut self,
        new: &[i64],
        computed: usize,
        scheduled: usize,
        drafts: usize,
    ) -> Outcome {
        let mut next = self.clone();
        if computed < next.verified() || computed > next.issued() {
            return Err(());
        }
        next.append(new)?;
        next.claim(computed);
        // Cached slots after the counter are skipped.
        let from = next.after_present(computed);
        next.drafts.retain(|drafts| drafts[0] < from);
        for slot in &mut next.slots[computed..] {
            slot.issued = false;
        }
        for slot in &mut next.slots[..computed] {
            slot.issued = true;
        }
        next.schedule(scheduled, drafts)?;
        *self = next;
        Ok(())
    }

    pub(crate) fn append(&mut self, ids: &[i64]) -> Outcome {
        let known: Vec<i64> = {
            let mut ids = ids.to_vec();
            while ids.last() == Some(&-1) {
                ids.pop();
            }
            ids
        };
        let tokens: Option<Vec<u32>> = known.iter().map(|&id| u32::try_from(id).ok()).collect();
        self.tokens.extend(tokens.ok_or(())?);
        Ok(())
    }

    pub(crate) fn add_blocks(&mut self, blocks: &[u32]) -> Outcome {
        let mut all = self.table.clone();
        for id in blocks {
            if all.contains(id) {
                return Err(());
            }
            all.push(*id);
        }
        self.table = all;
        self.slots
            .resize(self.table.len() * self.block_size, Slot::default());
        Ok(())
    }

    /// Returns the positions whose KV no longer counts, and the blocks that were cut off.
    pub(crate) fn rollback(&mut self, to: usize, drop: bool) -> Outcome<(Vec<usize>, Vec<u32>)> {
        if to < self.committed || to > self.issued() {
            return Err(());
        }
        let verified = self.verified();
        let gone = (to..self.slots.len())
            .filter(|&at| at < verified || self.slots[at].present)
            .collect();
        for slot in &mut self.slots[to..] {
            *slot = Slot::default();
        }
        self.drafts.retain(|drafts| drafts[0] < to);
        let mut cut = Vec::new();
        if drop {
            let keep = to.div_ceil(self.block_size);
            cut = self.table.split_off(keep);
            self.slots.truncate(keep * self.block_size);
        }
        Ok((gone, cut))
    }
}
