//! A ledger's step.

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use kvtrie_benches::{BLOCK_SIZE, tokens};
use kvtrie_core::{BlockId, TokenSequence};
use kvtrie_transfer::{Begin, LedgerSource, RequestId, SequenceLedger, Step, StepError};

use crate::setup::{fresh, size};

const LENGTH: usize = 512;
/// Steps that the tables have room for.
const STEPS: usize = 512;

/// Requests whose prompts are computed, and how many steps they have made since.
struct Running {
    ledger: SequenceLedger,
    seqs: Vec<TokenSequence>,
    names: Vec<RequestId>,
    made: usize,
}

impl Running {
    fn new(requests: usize) -> Self {
        let mut ledger = SequenceLedger::new(BLOCK_SIZE).expect("a block size");
        let (mut seqs, mut names) = (Vec::new(), Vec::new());
        let blocks = (LENGTH + STEPS) / BLOCK_SIZE;
        for number in 0..requests {
            let mut seq = fresh(tokens(number as u64, LENGTH));
            let table = number * blocks..(number + 1) * blocks;
            let table: Vec<BlockId> = table
                .map(|id| BlockId(u32::try_from(id).expect("few blocks")))
                .collect();
            let begin = Begin {
                source: LedgerSource::Computed,
                num_computed: LENGTH,
                missing: None,
                in_place: None,
                session: None,
            };
            names.push(ledger.begin(&mut seq, &table, begin).expect("a request"));
            seqs.push(seq);
        }
        Self {
            ledger,
            seqs,
            names,
            made: 0,
        }
    }

    /// One step of one token per request; returns how long the call took.
    fn step(&mut self, ids: &[u32], offsets: &[usize], one: &[usize]) -> Duration {
        let computed = vec![LENGTH + self.made; self.names.len()];
        self.made += 1;
        let step = Step {
            requests: &self.names,
            num_scheduled: one,
            num_computed: &computed,
            ids,
            offsets,
            num_drafts: None,
        };
        let seqs = &mut self.seqs;
        let start = Instant::now();
        let done: Result<(), StepError> = self.ledger.step(&step, |at, ids| ids.to(&mut seqs[at]));
        let spent = start.elapsed();
        done.expect("a possible step");
        spent
    }
}

/// Steps of 1,000 live requests, one token each.
pub(crate) fn ledger(c: &mut Criterion) {
    let requests = size(1_000, 10);
    let mut group = c.benchmark_group("ledger");
    group.throughput(Throughput::Elements(requests as u64));
    let (ids, one) = (tokens(1, requests), vec![1; requests]);
    let offsets: Vec<usize> = (0..=requests).collect();
    group.bench_function("step of 1,000 requests, one token each", |b| {
        let mut running = Running::new(requests);
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                if running.made == STEPS {
                    running = Running::new(requests);
                }
                spent += running.step(&ids, &offsets, &one);
            }
            let end = running.ledger.final_end(running.names[0]);
            assert_eq!(end, Ok(LENGTH + running.made - 1), "final and computed");
            spent
        });
    });
    group.finish();
}
