//! Tests that one tenant's windows do not affect another's plans.

use std::sync::Arc;

use proptest::prelude::*;

use crate::moved::{WINDOW, WindowHasher};
use crate::{
    BlockId, Class, Config, InsertOptions, Namespace, PlanOptions, RadixIndex, ReusePolicy, Salt,
    Scope, Source, TokenSequence,
};

const BLOCK_SIZE: usize = 16;
const MAX_CANDIDATES: usize = 64;

fn namespace(tenant: &str) -> Arc<Namespace> {
    let salt = Salt::Tenant(tenant.into());
    Arc::new(Namespace::new("m", "bfloat16", "default", None, salt).unwrap())
}

struct Cache {
    index: RadixIndex,
    next_id: u32,
}

impl Cache {
    fn new(seed: u64) -> Self {
        let config = Config {
            num_blocks: 10_000,
            block_size: BLOCK_SIZE,
            moved_runs: true,
            max_candidates: MAX_CANDIDATES,
            ..Config::seeded(seed)
        };
        Self {
            index: RadixIndex::new(config).unwrap(),
            next_id: 0,
        }
    }

    fn cache(&mut self, tenant: &Arc<Namespace>, text: &[u32]) {
        let count = u32::try_from(text.len() / BLOCK_SIZE).unwrap();
        let blocks: Vec<BlockId> = (self.next_id..self.next_id + count).map(BlockId).collect();
        self.next_id += count;
        let mut seq = TokenSequence::new(Arc::clone(tenant), text.to_vec(), Vec::new()).unwrap();
        let options = InsertOptions::new(text.len(), Source::Computed);
        self.index.insert(&mut seq, &blocks, options).unwrap();
    }

    /// Plans a prompt and returns the tokens moved, the places not tried, and the looks.
    fn plan(&mut self, tenant: &Arc<Namespace>, text: &[u32]) -> (usize, u64, u64) {
        let policy = ReusePolicy {
            approximate: true,
            scope: Scope::Namespace,
            ..ReusePolicy::EXACT_ONLY
        };
        let mut seq = TokenSequence::new(Arc::clone(tenant), text.to_vec(), Vec::new()).unwrap();
        let before = self.index.stats().search_looks;
        let plan = self
            .index
            .plan(&mut seq, &policy, PlanOptions::default())
            .unwrap();
        let looks = self.index.stats().search_looks - before;
        self.index.release(&plan).unwrap();
        (
            plan.num_tokens(Class::Approximate),
            plan.candidates_dropped(),
            looks,
        )
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// An attacker who knows the seed gives windows the hashes of another tenant's windows. They are newer, and more
    /// than are tried.
    #[test]
    fn windows_of_one_tenant_that_collide_with_anothers_change_nothing_for_it(
        seed in prop_oneof![Just(0_u64), any::<u64>()],
    ) {
        let (victim, attacker) = (namespace("victim"), namespace("attacker"));
        let mut cache = Cache::new(seed);
        let text: Vec<u32> = (1_000..1_160).collect();
        cache.cache(&victim, &text);
        let mut prompt: Vec<u32> = (0..40).collect();
        prompt.extend(&text);
        let alone = cache.plan(&victim, &prompt);
        prop_assert_eq!((alone.0, alone.1), (159, 0));

        // Trees are numbered in the order in which they are created.
        let (victims, attackers) = (0, 1);
        let hasher = WindowHasher::new(seed, 64);
        let hashes: Vec<u64> = text
            .windows(WINDOW)
            .filter_map(|window| Some(hasher.hash(victims, window.first_chunk()?)))
            .collect();
        // One window per nine positions is kept, so each is followed by one more token.
        let mut hostile = Vec::new();
        while hostile.len() < 10 * MAX_CANDIDATES * hashes.len() {
            for &hash in &hashes {
                let window = hasher.window_of(attackers, hash);
                prop_assert_eq!(hasher.hash(attackers, &window), hash);
                let unique = u32::try_from(hostile.len()).unwrap();
                hostile.push(unique);
                hostile.extend(window);
            }
        }
        hostile.truncate(hostile.len() / BLOCK_SIZE * BLOCK_SIZE);
        cache.cache(&attacker, &hostile);
        prop_assert_eq!(cache.plan(&victim, &prompt), alone);
    }
}
