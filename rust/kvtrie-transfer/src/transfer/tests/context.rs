//! Tests what a plan of moved runs does of its policy, and what it says that it did.

use kvtrie_core::Repair;

use super::*;

/// A sender of 96 tokens in blocks of 4 that all have KV, in groups with the same blocks.
fn sender(num_groups: u32, labels: &[LabelRun], policy: Option<&ReusePolicy>) -> TransferManifest {
    let table = ids(24, 0);
    let groups: Vec<SentGroup<'_>> = (0..num_groups)
        .map(|group| SentGroup {
            group,
            ..sent(4, &table)
        })
        .collect();
    let seq = sequence(&(0..96).collect::<Vec<_>>());
    TransferManifest::built_under(policy, &seq, &groups, labels, 96, &key()).unwrap()
}

fn plan(
    manifest: &TransferManifest,
    mine: &[u32],
    cached: usize,
    policy: &ReusePolicy,
) -> TransferPlan {
    let table = ids(mine.len().div_ceil(4), 5);
    let groups = manifest.groups().map(|(group, _)| LocalGroup {
        group,
        ..local(&table)[0]
    });
    let groups: Vec<LocalGroup<'_>> = groups.collect();
    let options = TransferOptions {
        cached: 0..cached,
        ..options(policy)
    };
    TransferPlan::new(manifest, &sequence(mine), &groups, &key(), &options).unwrap()
}

/// The moved tokens of the first group.
fn moved(plan: &TransferPlan) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for pair in plan
        .pairs()
        .iter()
        .filter(|pair| pair.delta != 0 && pair.group == 0)
    {
        match found.last_mut() {
            Some(last) if last.1 == pair.start => last.1 = pair.end,
            _ => found.push((pair.start, pair.end)),
        }
    }
    found
}

fn exact() -> [LabelRun; 1] {
    [label(0, 96, Class::Exact)]
}

/// In place are 32 tokens. The first moved run was computed after 48, of which these are kept. The second was computed
/// after 64 and comes after 56, of which 48 are kept, with two cuts.
fn edited() -> Vec<u32> {
    (0..32)
        .chain(48..64)
        .chain([500; 8])
        .chain(64..96)
        .collect()
}

/// Such runs were loaded, and the plan said that they were built under the policy with its limits.
#[test]
fn a_moved_run_beyond_the_limits_on_its_context_is_computed() {
    let (first, second) = ((32, 48), (56, 88));
    let lax = approximate();
    for (policy, expected) in [
        (lax.clone(), vec![first, second]),
        (
            ReusePolicy {
                max_cuts: Some(2),
                ..lax.clone()
            },
            vec![first, second],
        ),
        (
            ReusePolicy {
                max_cuts: Some(1),
                ..lax.clone()
            },
            vec![first],
        ),
        (
            ReusePolicy {
                max_cuts: Some(0),
                ..lax.clone()
            },
            vec![],
        ),
        (
            ReusePolicy {
                max_lost_context: 1.0 / 3.0 + 1e-9,
                ..lax.clone()
            },
            vec![first, second],
        ),
        // Without the first run, the second has lost half.
        (
            ReusePolicy {
                max_lost_context: 0.33,
                ..lax.clone()
            },
            vec![],
        ),
        (
            ReusePolicy {
                max_new_context: 8.0 / 56.0 + 1e-9,
                ..lax.clone()
            },
            vec![first, second],
        ),
        (
            ReusePolicy {
                max_new_context: 0.14,
                ..lax.clone()
            },
            vec![first],
        ),
        (
            ReusePolicy {
                max_new_context: 0.0,
                ..lax.clone()
            },
            vec![first],
        ),
    ] {
        // What is cached is context as what is loaded.
        for cached in [0, 10, 32] {
            let plan = plan(&sender(1, &exact(), None), &edited(), cached, &policy);
            assert_eq!(moved(&plan), expected, "{policy:?} {cached}");
            assert_eq!(plan.policy(), &policy);
        }
    }
}

#[test]
fn cached_tokens_that_the_sender_does_not_have_as_exact_are_no_context() {
    let policy = ReusePolicy {
        max_lost_context: 0.5,
        ..approximate()
    };
    let labels = [approximate_label(0, 32, 1), label(32, 96, Class::Exact)];
    let manifest = sender(1, &labels, Some(&policy));
    assert_eq!(moved(&plan(&manifest, &edited(), 0, &policy)).len(), 2);
    assert_eq!(moved(&plan(&manifest, &edited(), 32, &policy)), []);
}

#[test]
fn of_several_groups_nothing_is_moved_under_a_limit_on_the_context() {
    let limited = ReusePolicy {
        max_lost_context: 0.9,
        ..approximate()
    };
    for (num_groups, policy, num) in [
        (2, approximate(), 48),
        (2, limited.clone(), 0),
        (1, limited, 48),
    ] {
        let plan = plan(&sender(num_groups, &exact(), None), &edited(), 0, &policy);
        assert_eq!((plan.num_exact(), plan.num_approximate()), (32, num));
    }
}

#[test]
fn after_512_stretches_a_run_counts_as_if_nothing_were_kept() {
    // Blocks of 8 in the opposite order, each after a new token.
    let tokens: Vec<u32> = (0..8 * 600).collect();
    let seq = sequence(&tokens);
    let labels = [label(0, tokens.len(), Class::Exact)];
    let table: Vec<BlockId> = (0..600).map(BlockId).collect();
    let manifest =
        TransferManifest::new(&seq, &[sent(8, &table)], &labels, tokens.len(), &key()).unwrap();
    let mine: Vec<u32> = tokens
        .chunks(8)
        .rev()
        .flat_map(|block| [&[9999], block].concat())
        .collect();
    let policy = ReusePolicy {
        min_run: Some(8),
        ..approximate()
    };
    for (limits, num) in [
        (policy.clone(), 600),
        (
            ReusePolicy {
                max_new_context: 1.0 - 1e-9,
                ..policy.clone()
            },
            0,
        ),
        (
            ReusePolicy {
                max_cuts: Some(u16::MAX),
                ..policy.clone()
            },
            600,
        ),
        // The 513 runs before which at most 512 are kept have no cuts: all that is kept comes after them.
        (
            ReusePolicy {
                max_cuts: Some(u16::MAX - 1),
                ..policy
            },
            513,
        ),
    ] {
        let group = LocalGroup {
            group: 0,
            block_size: None,
            table: None,
        };
        let plan = TransferPlan::new(
            &manifest,
            &sequence(&mine),
            &[group],
            &key(),
            &options(&limits),
        );
        assert_eq!(plan.unwrap().num_approximate(), 8 * num, "{limits:?}");
    }
}

/// A plan said that its share was chosen as the policy asks, and took fronts.
#[test]
fn a_plan_says_which_share_of_its_moved_runs_was_computed() {
    let asked = ReusePolicy {
        recompute_share: 0.25,
        repair: Repair::Probe,
        ..approximate()
    };
    let fronts = ReusePolicy {
        repair: Repair::Fronts,
        ..asked.clone()
    };
    let none = ReusePolicy {
        recompute_share: 0.0,
        ..fronts.clone()
    };
    let sent_on = [label(0, 16, Class::Exact), approximate_label(16, 96, 0)];
    let in_place: Vec<u32> = (0..96).collect();
    for (labels, built, mine, policy, said) in [
        (&exact()[..], None, &edited(), &asked, &fronts),
        (&exact()[..], None, &edited(), &fronts, &fronts),
        // The moved runs have a share of another kind than the sender's KV.
        (&sent_on[..], Some(&asked), &edited(), &asked, &none),
        (&sent_on[..], Some(&fronts), &edited(), &fronts, &fronts),
        // Nothing is moved, and what is in place was built under the policy.
        (&sent_on[..], Some(&asked), &in_place, &asked, &asked),
    ] {
        let manifest = sender(1, labels, built);
        let plan = plan(&manifest, mine, 0, policy);
        assert!(plan.num_approximate() > 0);
        assert_eq!(plan.policy(), said, "{policy:?}");
        assert!(
            policy == &fronts
                || built.is_none()
                || built.unwrap().is_at_least_as_strict_as(plan.policy())
        );
    }
}

/// Runs that are not loaded counted, so that less than the share was computed of those that are.
#[test]
fn the_share_is_one_of_the_runs_that_are_loaded() {
    let mine: Vec<u32> = [500]
        .into_iter()
        .chain(80..88)
        .chain([500; 4])
        .chain(0..40)
        .collect();
    let policy = ReusePolicy {
        min_run: Some(8),
        recompute_first: 8,
        recompute_share: 0.5,
        ..approximate()
    };
    let found = plan(&sender(1, &exact(), None), &mine, 0, &policy);
    assert_eq!(moved(&found), [(13 + 20, 53)]);
    let limited = ReusePolicy {
        recompute_first: 0,
        max_lost_context: 0.0,
        ..policy
    };
    let found = plan(&sender(1, &exact(), None), &mine, 0, &limited);
    assert_eq!(moved(&found), [(13 + 20, 53)]);
}
