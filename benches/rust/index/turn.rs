//! The bookkeeping of one turn of a chat.

use criterion::{Criterion, Throughput};
use kvtrie_benches::{BLOCK_SIZE, Ids, NEW_SEEDS, add, empty, sequence, tokens};
use kvtrie_core::{
    BlockId, InsertOptions, PlanOptions, RadixIndex, ReusePolicy, Source, TokenSequence,
};

use crate::setup::{alone, fresh, look_up, size};

/// Tokens that a turn adds to its history.
const NEW: usize = 256;

/// One sequence of a turn, what it makes of the pool's blocks, and the room it needs.
struct Chat {
    index: RadixIndex,
    history: Vec<u32>,
    out: Vec<BlockId>,
    seeds: std::ops::RangeFrom<u64>,
}

impl Chat {
    /// A history of `len` tokens next to a million blocks in leaves as long as a turn.
    fn new(len: usize) -> Self {
        let others = size(16_000_000, 200_000) / NEW as u64;
        let mut index = empty(others * NEW as u64 + len as u64).expect("a million blocks");
        let mut ids = Ids::default();
        for seed in 0..others {
            let mut seq = sequence(seed, NEW).expect("a sequence");
            add(&mut index, &mut seq, 0, &ids.take(NEW / BLOCK_SIZE)).expect("a pool with room");
        }
        let history = tokens(NEW_SEEDS, len);
        let ids = ids.take(len / BLOCK_SIZE);
        add(&mut index, &mut fresh(history.clone()), 0, &ids).expect("a pool with room");
        Self {
            index,
            history,
            out: Vec::new(),
            seeds: NEW_SEEDS + 1..,
        }
    }

    fn new_tokens(&mut self) -> Vec<u32> {
        tokens(self.seeds.next().unwrap_or(NEW_SEEDS), NEW)
    }

    /// Lookup, plan, evict, insert and release of a prompt whose last 256 tokens are new.
    fn turn(&mut self, seq: &mut TokenSequence) -> Vec<BlockId> {
        let known = self.history.len();
        look_up(&mut self.index, seq, 0, known, &mut self.out);
        let plan = self
            .index
            .plan(seq, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
            .expect("an exact plan");
        assert_eq!(plan.num_new_blocks(), NEW / BLOCK_SIZE, "new blocks");
        let ids = self.index.evict(plan.num_new_blocks());
        let options = InsertOptions {
            start: known,
            ..InsertOptions::new(seq.len(), Source::Plan(&plan))
        };
        let done = self.index.insert(seq, &ids, options).expect("held ids");
        assert_eq!(done.blocks, ids, "all new blocks were taken");
        self.index.release(&plan).expect("a live plan");
        ids
    }

    /// Restores the index: the turn's blocks back another leaf.
    fn undo(&mut self, ids: &[BlockId]) {
        let gone = self.index.discard(ids).expect("ids in the pool");
        assert_eq!(gone.len(), ids.len(), "the turn's blocks left");
        let mut other = fresh(self.new_tokens());
        add(&mut self.index, &mut other, 0, ids).expect("held ids");
    }
}

/// A turn with 256 new tokens after a warm history, from a fresh sequence of the whole prompt.
pub(crate) fn turn(c: &mut Criterion) {
    let mut group = c.benchmark_group("turn");
    for (len, name) in [
        (8_192, "256 new tokens after 8,192"),
        (102_400, "256 new tokens after 102,400"),
    ] {
        group.throughput(Throughput::Elements((len + NEW) as u64));
        let mut chat = Chat::new(len);
        alone(
            &mut group,
            name,
            &mut chat,
            |chat| {
                let mut prompt = chat.history.clone();
                prompt.extend(chat.new_tokens());
                fresh(prompt)
            },
            Chat::turn,
            |chat, _, ids| chat.undo(&ids),
        );
    }
    group.finish();
}
