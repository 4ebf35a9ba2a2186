//! How long single calls take, one by one: evict one leaf of 64 tokens among 10⁵, and insert another in its place.
//!
//! `pauses [--json] [--quick]`
//!
//! The same calls run in several rounds. A pause of the index comes at the same call of every round; one of the system
//! does not. So each call's least time over the rounds is the cost of the index, and the maxima of the rounds include
//! the system's pauses.

use std::error::Error;
use std::time::Instant;

use kvtrie_benches::{BLOCK_SIZE, NEW_SEEDS, Row, add, filled, flag, quantile, sequence};

/// Tokens of a leaf.
const LEAF: usize = 64;

/// Rounds of the same calls.
const ROUNDS: u32 = 3;

/// A pause, in nanoseconds.
const PAUSE: u64 = 100_000;

struct Times {
    /// The least time of each call.
    least: Vec<u64>,
    /// The longest time of any call.
    longest: u64,
    /// Calls of any round that took over [`PAUSE`].
    pauses: u64,
}

impl Times {
    fn new(calls: usize) -> Self {
        Self {
            least: vec![u64::MAX; calls],
            longest: 0,
            pauses: 0,
        }
    }

    fn add(&mut self, call: usize, begun: Instant) {
        let time = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.least[call] = self.least[call].min(time);
        self.longest = self.longest.max(time);
        self.pauses += u64::from(time > PAUSE);
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn row(mut self, work: &str) -> Row {
        self.least.sort_unstable();
        let us = |time: u64| time as f64 / 1000.0;
        let at = |share| us(quantile(&self.least, share));
        Row::new(work, "us")
            .with("calls", self.least.len() as f64)
            .with("p10", at(0.1))
            .with("p50", at(0.5))
            .with("p90", at(0.9))
            .with("p99", at(0.99))
            .with("p99_9", at(0.999))
            .with("max", at(1.0))
            .with("max_seen", us(self.longest))
            .with("over_100_us_seen", self.pauses as f64)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = flag("--json");
    let (calls, leaves) = if flag("--quick") {
        (2_000, "2,000")
    } else {
        (100_000, "10^5")
    };
    let mut evicts = Times::new(calls);
    let mut inserts = Times::new(calls);
    for _ in 0..ROUNDS {
        let mut index = filled(calls as u64, LEAF, LEAF)?;
        for (call, seed) in (0..calls).zip(NEW_SEEDS..) {
            let mut seq = sequence(seed, LEAF)?;
            let begun = Instant::now();
            let ids = index.evict(LEAF / BLOCK_SIZE);
            evicts.add(call, begun);
            if ids.len() != LEAF / BLOCK_SIZE {
                return Err(format!("evict gave {} blocks, not a leaf", ids.len()).into());
            }
            let begun = Instant::now();
            add(&mut index, &mut seq, 0, &ids)?;
            inserts.add(call, begun);
        }
    }
    let rows = [
        evicts.row(&format!("evict one leaf of 64 tokens among {leaves}")),
        inserts.row(&format!("insert a leaf of 64 tokens with {leaves}")),
    ];
    if !json {
        rows[0].print_head()?;
    }
    for row in rows {
        row.print(json)?;
    }
    Ok(())
}
