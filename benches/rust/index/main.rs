//! Times of the index's calls, with 10⁶ cached blocks of 16 tokens where nothing else is said.
//!
//! That is 64 MB of token ids and 4 MB of block ids, more than the caches of most processors: *warm* repeats one query,
//! *cold* draws one at random of all that are cached. Either way every call gets a sequence that no index has seen;
//! only the group `grown` measures sequences that were used before. Every call's result is checked.
//!
//! Run as tests (`cargo test --benches`), everything is small and runs once.

mod change;
mod growth;
mod ledger;
mod lookup;
mod moved;
mod setup;
mod transfer;
mod turn;

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

/// Short measurements: the whole run takes minutes.
fn settings() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
}

criterion_group! {
    name = benches;
    config = settings();
    targets = lookup::edges, lookup::misses, lookup::grown, growth::growth, change::insert, change::evict, change::pin,
        change::crowd, moved::moved, turn::turn, ledger::ledger, transfer::transfer
}
criterion_main!(benches);
