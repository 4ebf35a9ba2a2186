//! Tests which policy a manifest says that its approximate KV was built under, and what receivers make of it.

use std::sync::Arc;

use kvtrie_core::{Config, InsertOptions, PlanOptions, RadixIndex, Repair, Scope, Source};

use super::*;
use crate::transfer::wire::ByteWriter;

fn any_policy() -> impl Strategy<Value = ReusePolicy> {
    let share = || prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0f64];
    let count = || prop_oneof![Just(0usize), 0usize..300, any::<usize>()];
    (
        (
            prop::option::of(8usize..100),
            0..=ReusePolicy::MAX_HOPS,
            share(),
            count(),
            count(),
        ),
        (
            prop::option::of(any::<u16>()),
            share(),
            share(),
            any::<bool>(),
            1usize..100,
        ),
        (share(), 0..Repair::ALL.len(), any::<bool>(), any::<bool>()),
    )
        .prop_map(
            |(first, second, (recompute_share, repair, partial_blocks, forbids))| ReusePolicy {
                approximate: true,
                min_run: first.0,
                max_hops: first.1,
                max_approximate_share: first.2,
                recompute_first: first.3,
                recompute_last: first.4,
                forbid_kinds: if forbids {
                    vec!["answer".into()]
                } else {
                    vec![]
                },
                max_cuts: second.0,
                max_lost_context: second.1,
                max_new_context: second.2,
                scope: if second.3 {
                    Scope::Conversation
                } else {
                    Scope::Namespace
                },
                shared_prefix: second.4,
                recompute_share,
                repair: Repair::ALL[repair].1,
                partial_blocks,
            },
        )
}

/// A manifest of 24 tokens in blocks of 4, of which the last 16 are approximate.
fn built_under(policy: Option<&ReusePolicy>) -> TransferManifest {
    let seq = sequence(&(0..24).collect::<Vec<_>>());
    let table = ids(6, 0);
    let labels = [label(0, 8, Class::Exact), approximate_label(8, 24, 1)];
    let groups = [sent(4, &table)];
    TransferManifest::built_under(policy, &seq, &groups, &labels, 24, &key()).unwrap()
}

/// The approximate tokens that a receiver of the same prompt loads under a policy.
fn loaded(manifest: &TransferManifest, policy: &ReusePolicy) -> usize {
    let seq = sequence(&(0..24).collect::<Vec<_>>());
    let table = ids(6, 5);
    let plan = TransferPlan::new(manifest, &seq, &local(&table), &key(), &options(policy));
    plan.unwrap().num_approximate()
}

proptest! {
    #[test]
    fn a_policy_is_read_as_it_was_written_but_for_kinds(policy in any_policy()) {
        let manifest = built_under(Some(&policy));
        let read = manifest.policy().unwrap();
        let mut expected = ReusePolicy { forbid_kinds: vec![], partial_blocks: true, ..policy.clone() };
        if policy.scope == Scope::Namespace {
            expected.shared_prefix = ReusePolicy::LAXEST.shared_prefix;
        }
        prop_assert_eq!(read, &expected);
        prop_assert!(policy.is_at_least_as_strict_as(read));
        let limits = TransferLimits::default();
        prop_assert_eq!(&TransferManifest::from_bytes(manifest.to_bytes(), &limits).unwrap(), &manifest);
        let more = manifest.to_bytes().len() - built_under(None).to_bytes().len();
        prop_assert!(more <= 90, "{} bytes of {:?}", more, policy);
    }

    #[test]
    fn approximate_kv_is_loaded_under_policies_that_are_no_stricter(built in any_policy(), asked in any_policy(), equal in any::<bool>()) {
        let asked = ReusePolicy {
            max_hops: asked.max_hops.max(1),
            max_approximate_share: 1.0,
            forbid_kinds: vec![],
            ..if equal { built.clone() } else { asked }
        };
        let is_strict = built.is_at_least_as_strict_as(&asked);
        prop_assert_eq!(loaded(&built_under(Some(&built)), &asked) == 16, is_strict);
        let is_lax = ReusePolicy::LAXEST.is_at_least_as_strict_as(&asked);
        prop_assert_eq!(loaded(&built_under(None), &asked) == 16, is_lax);
    }
}

#[test]
fn policies_that_no_manifest_is_made_with() {
    let seq = sequence(&[1, 2, 3, 4]);
    let (table, labels) = (ids(1, 0), [approximate_label(0, 4, 1)]);
    let lax = ReusePolicy::LAXEST;
    for (policy, words) in [
        (ReusePolicy::EXACT_ONLY, "approximate = false"),
        (
            ReusePolicy {
                min_run: Some(7),
                ..lax.clone()
            },
            "min_run is 7",
        ),
        (
            ReusePolicy {
                recompute_share: 1.5,
                ..lax.clone()
            },
            "recompute_share is 1.5",
        ),
    ] {
        let groups = [sent(4, &table)];
        let made = TransferManifest::built_under(Some(&policy), &seq, &groups, &labels, 4, &key());
        let error = made.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
}

#[test]
fn a_manifest_without_approximate_kv_has_no_policy() {
    let seq = sequence(&[1, 2, 3, 4]);
    let (table, labels) = (ids(1, 0), [label(0, 4, Class::Exact)]);
    let policy = approximate();
    let groups = [sent(4, &table)];
    let made = TransferManifest::built_under(Some(&policy), &seq, &groups, &labels, 4, &key());
    assert_eq!(made.unwrap().policy(), None);
}

/// Bytes of a manifest with no group, and this policy.
fn with(policy: impl FnOnce(&mut ByteWriter)) -> Vec<u8> {
    let mut out = ByteWriter::default();
    out.array(5);
    out.text("kvtrie.manifest");
    out.uint(3);
    out.array(5);
    for name in ["m", "auto", "default"] {
        out.text(name);
    }
    out.nil();
    out.nil();
    policy(&mut out);
    out.array(0);
    out.into_bytes()
}

/// The fields of a policy that bounds nothing, one of them written otherwise.
fn fields(out: &mut ByteWriter, field: usize, other: &dyn Fn(&mut ByteWriter)) {
    out.array(11);
    for at in 0..11 {
        match at {
            _ if at == field => other(out),
            0 | 5 | 8 => out.nil(),
            1 => out.uint(255),
            2 | 6 | 7 => out.share(1.0),
            9 => out.share(0.0),
            10 => out.text("fronts"),
            _ => out.uint(0),
        }
    }
}

type Written = &'static dyn Fn(&mut ByteWriter);

#[test]
fn malformed_policies_are_refused() {
    let read = |raw: &[u8]| TransferManifest::from_bytes(raw, &TransferLimits::default());
    let lax = read(&with(|out| fields(out, 11, &|_| ()))).unwrap();
    assert_eq!(lax.policy(), Some(&ReusePolicy::LAXEST));
    let cases: [(usize, Written, &str); 14] = [
        (0, &|out| out.uint(7), "min_run is 7"),
        (0, &|out| out.text("8"), "min_run is encoded as"),
        (1, &|out| out.uint(256), "max_hops is 256"),
        (
            1,
            &|out| out.uint(1 << 16),
            "max_hops is 65536, which is too large",
        ),
        (1, &|out| out.nil(), "max_hops is encoded as"),
        (2, &|out| out.share(1.5), "max_approximate_share is 1.5"),
        (
            2,
            &|out| out.share(f64::NAN),
            "max_approximate_share is NaN",
        ),
        (2, &|out| out.uint(1), "max_approximate_share is encoded as"),
        (
            5,
            &|out| out.uint(1 << 16),
            "max_cuts is 65536, which is too large",
        ),
        (
            6,
            &|out| out.share(f64::INFINITY),
            "max_lost_context is inf",
        ),
        (8, &|out| out.uint(0), "shared_prefix is 0"),
        (9, &|out| out.bin(&[0; 8]), "recompute_share is encoded as"),
        (10, &|out| out.text("oracle"), "repair is Some(\"oracle\")"),
        (10, &|out| out.uint(0), "repair is encoded as"),
    ];
    for (field, written, words) in cases {
        let error = read(&with(|out| fields(out, field, written))).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Malformed), "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
    let error = read(&with(|out| out.array(10))).unwrap_err();
    assert!(
        error.to_string().contains("the policy has 10 entries"),
        "{error}"
    );
    // A share of -0.0 would be a second form of 0.
    let mut raw = with(|out| fields(out, 11, &|_| ()));
    let at = raw.iter().rposition(|&byte| byte == 0xcb).unwrap();
    raw[at + 1] = 0x80;
    let error = read(&raw).unwrap_err();
    assert!(
        error.to_string().contains("recompute_share is -0"),
        "{error}"
    );
}

#[test]
fn a_changed_policy_has_another_digest() {
    let raw = built_under(Some(&approximate())).to_bytes().to_vec();
    let changed = built_under(Some(&ReusePolicy {
        max_hops: 2,
        ..approximate()
    }));
    let differ: Vec<usize> = (0..raw.len())
        .filter(|&at| raw[at] != changed.to_bytes()[at])
        .collect();
    let mut forged = raw.clone();
    forged[differ[0]] = changed.to_bytes()[differ[0]];
    let forged = TransferManifest::from_bytes(&forged, &TransferLimits::default()).unwrap();
    assert_eq!(forged.policy(), changed.policy());
    let (seq, table) = (sequence(&[1]), ids(1, 0));
    let exact = ReusePolicy::EXACT_ONLY;
    let planned = TransferPlan::new(&forged, &seq, &local(&table), &key(), &options(&exact));
    assert_eq!(planned.unwrap_err().refusal(), Some(Refusal::Digest));
}

/// What a ledger says that a request was built under: by its source, and by the plan of its blocks in place.
fn of_a_request(
    source: LedgerSource,
    in_place: Option<Arc<kvtrie_core::ReusePlan>>,
) -> Option<ReusePolicy> {
    let mut ledger = SequenceLedger::new(4).unwrap();
    let mut seq = sequence(&(0..24).collect::<Vec<_>>());
    let placed = in_place
        .as_ref()
        .map_or(vec![], |plan| plan.blocks().to_vec());
    let mut table = placed.clone();
    table.extend((placed.len()..6).map(|id| BlockId(100 + u32::try_from(id).unwrap())));
    let begin = Begin {
        source,
        in_place,
        num_computed: 24,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    let offer = Offer::of(&ledger, id, &seq).unwrap();
    assert_eq!(offer.policy.as_ref(), ledger.built_under(id).unwrap());
    offer.policy
}

#[test]
fn an_offer_has_the_laxest_policy_that_its_request_was_built_under() {
    let first = |recompute_first| ReusePolicy {
        recompute_first,
        ..approximate()
    };
    let imported = |policy: Option<ReusePolicy>| {
        LedgerSource::Imported(Imported {
            policy: policy.map(Arc::new),
            ..Imported::new(8, 1)
        })
    };
    assert_eq!(of_a_request(LedgerSource::Computed, None), None);
    assert_eq!(of_a_request(imported(None), None), None);
    assert_eq!(of_a_request(imported(Some(first(3))), None), Some(first(3)));

    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 4,
        ..Config::seeded(1)
    })
    .unwrap();
    let mut seq = sequence(&(0..24).collect::<Vec<_>>());
    let source = Source::Imported(Imported {
        policy: Some(Arc::new(first(3))),
        ..Imported::new(4, 1)
    });
    index
        .insert(&mut seq, &ids(3, 0), InsertOptions::new(12, source))
        .unwrap();
    let plans: Vec<_> = [
        first(2),
        ReusePolicy {
            max_cuts: Some(1),
            ..first(3)
        },
        first(3),
    ]
    .into_iter()
    .map(|policy| {
        Arc::new(
            index
                .plan(&mut seq, &policy, PlanOptions::default())
                .unwrap(),
        )
    })
    .collect();
    // The second policy is stricter than the KV in place, and finds the exact block alone.
    let in_place: Vec<usize> = plans.iter().map(|plan| plan.blocks().len()).collect();
    assert_eq!(in_place, [3, 1, 3]);
    let in_place = |at: usize| Some(Arc::clone(&plans[at]));
    assert_eq!(
        of_a_request(LedgerSource::Computed, in_place(0)),
        Some(first(2))
    );
    assert_eq!(of_a_request(LedgerSource::Computed, in_place(1)), None);
    assert_eq!(
        of_a_request(imported(Some(first(5))), in_place(0)),
        Some(first(2))
    );
    assert_eq!(
        of_a_request(imported(Some(first(1))), in_place(0)),
        Some(first(1))
    );
    assert_eq!(of_a_request(imported(None), in_place(0)), None);
    let other = ReusePolicy {
        max_cuts: Some(0),
        ..first(1)
    };
    assert_eq!(
        of_a_request(imported(Some(other)), in_place(2)),
        None,
        "neither is as strict"
    );
    for plan in plans {
        index.release(&plan).unwrap();
    }
}
