"""Manifests and plans against the naive ones, and against the tokens that the sender really had."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer import cases, naive

import kvtrie

KEY = cases.KEY


def _written(case: cases.Case) -> kvtrie.TransferManifest:
    """The extension's manifest of a case whose labels an `Imported` can express."""
    exact = [label for label in case.labels if label and label[0] == naive.EXACT]
    hops = max((label[1] for label in case.labels if label), default=0)
    return kvtrie.TransferManifest.from_blocks(
        cases.sequence(case.theirs),
        {group: table for group, (_, table) in case.their_tables.items()},
        key=KEY,
        num_computed=len(case.labels),
        block_size={group: size for group, (size, _) in case.their_tables.items()},
        source=kvtrie.Imported(
            exact_until=len(exact),
            hops=hops,
            policy=None if case.built is None else cases.policy(case.built),
        ),
        num_lookahead=case.num_lookahead,
        groups=case.groups({group: size for group, (size, _) in case.their_tables.items()}),
    )


def check_plan(case: cases.Case, sent: naive.Manifest, manifest: kvtrie.TransferManifest) -> None:
    expected = cases.refusal(lambda: case.planned(sent))
    assert cases.refusal(lambda: case.asked(manifest)) == expected
    if expected is None:
        found = cases.as_plan(case.asked(manifest))
        assert found == case.planned(sent)
        cases.check_loads(case, found)


def _of_one_block(prompt: naive.Prompt) -> kvtrie.TransferManifest:
    size = len(prompt.ids)
    return kvtrie.TransferManifest.from_blocks(
        cases.sequence(prompt), [1], key=KEY, num_computed=size, block_size=size
    )


@given(cases.cases())
@settings(max_examples=400)
def test_manifest_and_plan_equal_the_naive_ones(case: cases.Case) -> None:
    sent = case.sent()
    manifest = _written(case)
    raw = manifest.to_bytes()
    assert raw == naive.to_bytes(sent)
    assert naive.from_bytes(raw) == sent
    again = kvtrie.TransferManifest.from_bytes(raw)
    assert again == manifest
    assert again.to_bytes() == raw
    assert hash(again) == hash(manifest)
    for one in (manifest, again):
        check_plan(case, sent, one)


@given(cases.cases(), st.binary(min_size=16, max_size=64))
@settings(max_examples=30)
def test_another_key_is_refused(case: cases.Case, key: bytes) -> None:
    sent = case.sent()
    manifest = kvtrie.TransferManifest.from_bytes(naive.to_bytes(sent))
    expected = cases.refusal(lambda: case.planned(sent, key))
    assert cases.refusal(lambda: case.asked(manifest, key)) == expected
    if key != KEY and manifest.runs:
        assert expected == "digest"


@given(cases.cases(), st.data())
@settings(max_examples=200)
def test_segments_after_gaps_and_mixed_labels_equal_the_naive_ones(
    case: cases.Case, data: st.DataObject
) -> None:
    """Labels that no `Imported` can express come from the naive writer."""
    label = st.sampled_from([None, (0, 0), (0, 0), (0, 0), (1, 0), (1, 1), (1, 2)])
    parts = data.draw(st.lists(st.tuples(label, st.integers(1, 12)), max_size=8))
    labels = [label for label, count in parts for _ in range(count)][: len(case.labels)]
    while labels and labels[-1] is None:
        labels.pop()
    case = cases.replaced(case, labels=labels)
    sent = case.sent()
    manifest = kvtrie.TransferManifest.from_bytes(naive.to_bytes(sent))
    check_plan(case, sent, manifest)


@pytest.mark.parametrize("seed", range(8))
def test_moved_runs_equal_the_naive_ones(seed: int) -> None:
    """Prompts that share long pieces at odd places, unlike random lists of tokens."""
    rng = random.Random(seed)
    met: Counter[str] = Counter()
    for _ in range(150):
        case = cases.edited(rng)
        sent = case.sent()
        manifest = kvtrie.TransferManifest.from_bytes(naive.to_bytes(sent))
        found = cases.as_plan(case.asked(manifest))
        assert found == case.planned(sent), case
        cases.check_loads(case, found)
        sent_on = {
            block
            for group in sent.groups
            for run in group.runs
            if run.flags == 1
            for block in run.blocks
        }
        met["approximate as sent"] += any(pair[1] in sent_on for pair in found.pairs)
        met["exact"] += found.num_exact > 0
        met["approximate"] += found.num_approximate > 0
        met["moved"] += any(pair[5] for pair in found.pairs)
        met["several deltas"] += len({pair[5] for pair in found.pairs}) > 2
        lax = cases.replaced(case, policy=cases.without_limits(case.policy))
        met["limited"] += found.num_approximate < lax.planned(sent).num_approximate
    wanted = ("exact", "approximate", "approximate as sent", "moved", "several deltas", "limited")
    assert all(met[what] > 0 for what in wanted), met


@given(cases.cases(), st.data())
@settings(max_examples=100)
def test_other_groups_are_refused_alike(case: cases.Case, data: st.DataObject) -> None:
    sent = case.sent()
    numbers = sorted(data.draw(st.sets(st.integers(0, 3), max_size=3)))
    windows = data.draw(st.just({}) | cases.kinds(numbers)) if numbers else {}
    whole: list[Any] = list(range(200))
    tables = {number: (2, [] if number in windows else whole) for number in numbers}
    case = cases.replaced(case, my_tables=tables, windows=windows, cached=(0, 0))
    manifest = kvtrie.TransferManifest.from_bytes(naive.to_bytes(sent))
    assert cases.refusal(lambda: case.asked(manifest)) == cases.refusal(lambda: case.planned(sent))


def counting(num_tokens: int) -> kvtrie.TokenSequence:
    return cases.sequence(naive.Prompt(tuple(range(num_tokens))))


def _manifest(num_tokens: int = 40, **options: Any) -> kvtrie.TransferManifest:
    seq = counting(num_tokens)
    given_: dict[str, Any] = {"key": KEY, "num_computed": num_tokens, "block_size": 16}
    return kvtrie.TransferManifest.from_blocks(seq, [4, 2, 9, 7], **given_ | options)


def test_manifest_says_what_it_holds() -> None:
    manifest = _manifest(num_computed=35, num_lookahead=14, source=kvtrie.Imported(20, hops=2))
    found = [
        (run.start, run.num_tokens, run.blocks.tolist(), run.class_, run.hops, run.is_lookahead)
        for run in manifest.runs
    ]
    assert found == [
        (0, 16, [4], 0, 0, False),
        (16, 19, [2, 9], 1, 2, False),
        (48, 16, [7], 2, 0, True),
    ]
    assert manifest.num_tokens == 35
    assert manifest.block_sizes == {0: 16}
    assert (manifest.model, manifest.adapter, manifest.is_shared) == ("m", None, True)
    assert pickle.loads(pickle.dumps(manifest)) == manifest  # noqa: S301 - our own bytes
    assert (
        manifest.runs
        == _manifest(num_computed=35, num_lookahead=14, source=kvtrie.Imported(20, hops=2)).runs
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_computed": 41}, r"num_computed is 41; it must be in \[0, 40\], the tokens"),
        ({"num_lookahead": 2**32}, r"num_lookahead is 4294967296; .* in \[0, 4294967255\]"),
        ({"block_size": 8}, "has 4 blocks, 40 tokens need 5 of 8 tokens"),
        ({"num_lookahead": 30}, "has 4 blocks, 70 tokens need 5 of 16 tokens"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": {1: 16}}, r"of the groups \[1\], blocks of \[0\]"),
        ({"key": b"short"}, "the key has 5 bytes"),
        ({"num_computed": -1}, "num_computed is -1"),
    ],
)
def test_from_blocks_refuses_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^TransferManifest\.from_blocks: .*{message}"):
        _manifest(**options)


def test_from_blocks_refuses_a_block_twice() -> None:
    seq = counting(40)
    with pytest.raises(ValueError, match="block 4 comes twice in the table of group 0"):
        kvtrie.TransferManifest.from_blocks(seq, [4, 2, 4], key=KEY, num_computed=40, block_size=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cached": (3, 2)}, r"cached is \[3, 2\)"),
        ({"cached": (0, 41)}, r"lie in \[0, 40\]"),
        ({"keep_last": -1}, "keep_last is -1"),
        ({"block_size": 8}, "has 3 blocks, 40 tokens need 5 of 8 tokens"),
        ({"block_size": {1: 16}}, r"of the groups \[1\], local_blocks of \[0\]"),
        ({"key": b"k" * 65}, "the key has 65 bytes"),
    ],
)
def test_plan_refuses_contradictions(options: dict[str, Any], message: str) -> None:
    seq = counting(40)
    with pytest.raises(ValueError, match=f"^plan_transfer: .*{message}"):
        kvtrie.plan_transfer(_manifest(), seq, [1, 2, 3], **{"key": KEY} | options)


def test_plan_refuses_tables_with_a_block_twice() -> None:
    seq = counting(40)
    with pytest.raises(ValueError, match="block 1 comes twice"):
        kvtrie.plan_transfer(_manifest(), seq, [1, 2, 1], key=KEY)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (naive.Space(model="n"), 'model is "m" in the manifest and "n" in the sequence'),
        (naive.Space(kv_dtype="fp8"), 'kv_dtype is "auto" in the manifest and "fp8"'),
        (naive.Space(rope="yarn:4"), 'rope is "default" in the manifest and "yarn:4"'),
        (naive.Space(adapter="l"), 'the adapter is none in the manifest and "l"'),
        (naive.Space(salt="secret"), "the salt is shared in the manifest and a tenant's"),
    ],
)
def test_another_namespace_is_refused_by_its_field(space: naive.Space, message: str) -> None:
    seq = cases.sequence(naive.Prompt(tuple(range(40)), space=space))
    with pytest.raises(kvtrie.TransferRefused, match=message) as caught:
        kvtrie.plan_transfer(_manifest(), seq, [1, 2, 3], key=KEY)
    assert caught.value.reason == "namespace"
    assert "secret" not in str(caught.value)


def test_long_names_are_cut_in_messages_and_reprs() -> None:
    """Names that somebody else wrote, without a run whose digest could be wrong."""
    count = 1 << 20
    space = b"\x95\xdb" + count.to_bytes(4, "big") + b"\x01" * count + b"\xa1x\xa1x\xc0\xc0"
    raw = b"\x95\xafkvtrie.manifest\x03" + space + b"\xc0\x90"
    manifest = kvtrie.TransferManifest.from_bytes(raw)
    assert len(manifest.model) == count
    cut = "\\x01" * 80
    assert repr(manifest) == (
        f"<TransferManifest of 0 tokens of '{cut}'... ({count} characters) in 0 runs>"
    )
    seq = cases.sequence(naive.Prompt((1,)))
    with pytest.raises(kvtrie.TransferRefused, match="1048576 characters") as caught:
        kvtrie.plan_transfer(manifest, seq, [0], key=KEY)
    assert (caught.value.reason, len(str(caught.value)) < 1000) == ("namespace", True)


@pytest.mark.parametrize(("count", "shown"), [(80, "'{}'"), (81, "'{}'... (81 characters)")])
def test_names_of_eighty_characters_are_shown_whole(count: int, shown: str) -> None:
    prompt = naive.Prompt((1, 2), space=naive.Space(model="ü" * count))
    manifest = _of_one_block(prompt)
    name = shown.format("ü" * 80)
    assert repr(manifest) == f"<TransferManifest of 2 tokens of {name} in 1 run>"
    with pytest.raises(kvtrie.TransferRefused) as caught:
        kvtrie.plan_transfer(manifest, cases.sequence(naive.Prompt((1, 2))), [1], key=KEY)
    name = name.replace("'", '"')
    assert f'model is {name} in the manifest and "m" in the sequence' in str(caught.value)


def test_names_that_differ_after_the_shown_part_say_where() -> None:
    prompt = naive.Prompt((1, 2), space=naive.Space(model="m" * 90 + "a"))
    manifest = _of_one_block(prompt)
    other = cases.sequence(naive.Prompt((1, 2), space=naive.Space(model="m" * 90 + "b")))
    with pytest.raises(kvtrie.TransferRefused, match=r"they differ after character 90$"):
        kvtrie.plan_transfer(manifest, other, [1], key=KEY)


def test_another_salt_is_refused_without_naming_either() -> None:
    prompt = naive.Prompt(tuple(range(16)), space=naive.Space(salt="mine"))
    manifest = _of_one_block(prompt)
    assert b"mine" not in manifest.to_bytes()
    other = cases.sequence(naive.Prompt(prompt.ids, space=naive.Space(salt="yours")))
    with pytest.raises(kvtrie.TransferRefused, match="the salt is one") as caught:
        kvtrie.plan_transfer(manifest, other, [1], key=KEY)
    assert caught.value.reason == "namespace"
    assert "mine" not in str(caught.value)
    assert "yours" not in str(caught.value)


def test_a_refusal_keeps_its_reason_when_it_is_pickled() -> None:
    with pytest.raises(kvtrie.TransferRefused) as caught:
        kvtrie.TransferManifest.from_bytes(b"")
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert (again.reason, str(again)) == ("malformed", str(caught.value))


@pytest.mark.parametrize("block_size", [None, 8, {0: 8}])
def test_a_plan_without_a_table_is_that_with_one_but_for_the_local_blocks(block_size: Any) -> None:
    seq = cases.sequence(naive.Prompt((*range(16), *range(32, 64))))
    manifest = _manifest(64)
    options: Any = {
        "key": KEY,
        "policy": kvtrie.ReusePolicy(approximate=True),
        "keep_last": 1,
        "block_size": block_size,
    }
    table = [40, 30, 20, 10, 50, 60]
    known = kvtrie.plan_transfer(manifest, seq, table, **options)
    early = kvtrie.plan_transfer(manifest, seq, **options)
    assert set(early.pairs["local"].tolist()) == {-1}
    local = np.array(table)[early.pairs["start"] // (16 if block_size is None else 8)]
    assert local.tolist() == known.pairs["local"].tolist()
    rest = ["group", "remote", "start", "end", "delta", "class", "hops"]
    assert early.pairs[rest].tolist() == known.pairs[rest].tolist()
    assert early.compute.tolist() == known.compute.tolist()
    assert (early.source, early.num_exact) == (known.source, known.num_exact)


def test_a_plan_without_a_table_refuses_other_groups_and_sizes() -> None:
    seq = counting(40)
    with pytest.raises(
        kvtrie.TransferRefused, match=r"has the groups \[0\], the receiver has \[0, 1\]"
    ):
        kvtrie.plan_transfer(_manifest(), seq, key=KEY, block_size={0: 16, 1: 16})
    with pytest.raises(ValueError, match=r"block_size is 0; it must be in \[1, "):
        kvtrie.plan_transfer(_manifest(), seq, key=KEY, block_size=0)


def test_source_is_computed_while_all_is_exact() -> None:
    seq = counting(40)
    move = kvtrie.plan_transfer(_manifest(), seq, [1, 2, 3], key=KEY, keep_last=1)
    assert move.source is kvtrie.COMPUTED
    assert (move.exact_until, move.hops) == (40, 0)
    assert move.compute.tolist() == move.missing.tolist() == [[39, 40]]


def test_a_plan_can_be_begun_with() -> None:
    """The ledger counts the loaded tokens as computed, with the same labels."""
    prompt = naive.Prompt((*range(16), *range(32, 64)))
    manifest = _manifest(64)
    policy = kvtrie.ReusePolicy(approximate=True)
    seq = cases.sequence(prompt)
    move = kvtrie.plan_transfer(manifest, seq, [1, 2, 3], key=KEY, policy=policy, keep_last=1)
    ledger = kvtrie.SequenceLedger(block_size=16)
    ledger.begin("a", seq, [1, 2, 3], source=move.source, missing=move.missing)
    assert ledger.final_range("a") == (0, 47)
    again = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
    assert [(run.start, run.num_tokens, run.class_, run.hops) for run in again.runs] == [
        (0, 16, 0, 0),
        (16, 31, 1, 1),
    ]


def test_approximate_kv_is_loaded_under_a_policy_that_is_no_stricter() -> None:
    """Before, no policy with a bound could load what a peer had as approximate."""
    built = kvtrie.ReusePolicy(recompute_first=4, forbid_kinds=["reasoning"])
    manifest = _manifest(source=kvtrie.Imported(16, policy=built))
    assert manifest.policy == built.replace(forbid_kinds=())
    seq = counting(40)
    for policy, loaded in [
        (built.replace(forbid_kinds=()), 24),
        (kvtrie.ReusePolicy(recompute_first=3), 24),
        (kvtrie.ReusePolicy(recompute_first=5), 0),
        (kvtrie.ReusePolicy(recompute_first=3, max_cuts=2), 0),
        (built, 0),
    ]:
        move = kvtrie.plan_transfer(manifest, seq, [1, 2, 3], key=KEY, policy=policy)
        assert move.num_approximate == loaded, policy
    unknown = _manifest(source=kvtrie.Imported(16))
    assert unknown.policy is None
    assert _manifest(source=kvtrie.Imported(40, policy=built)).policy is None
    move = kvtrie.plan_transfer(unknown, seq, [1, 2, 3], key=KEY, policy=kvtrie.ReusePolicy())
    assert move.num_approximate == 0


def test_what_was_loaded_is_sent_on_with_its_policy() -> None:
    policy = kvtrie.ReusePolicy(recompute_first=4)
    manifest = _manifest(source=kvtrie.Imported(16, policy=policy))
    seq = counting(40)
    move = kvtrie.plan_transfer(manifest, seq, [1, 2, 3], key=KEY, policy=policy)
    ledger = kvtrie.SequenceLedger(block_size=16)
    ledger.begin("a", seq, [1, 2, 3], source=move.source, missing=move.missing)
    again = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
    assert again.policy == policy
    assert kvtrie.TransferManifest.from_bytes(again.to_bytes()).policy == policy


def test_from_ledger_offers_segments_after_gaps_and_lookahead() -> None:
    seq = counting(12)
    ledger = kvtrie.SequenceLedger(block_size=2)
    ledger.begin("a", seq, list(range(8)), missing=[(3, 5), (9, 12)])
    runs = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY, group=2).runs
    # Block 1 lacks a token, block 2 another; block 4 ends the last computed segment.
    assert [(run.group, run.start, run.num_tokens) for run in runs] == [(2, 0, 2), (2, 6, 3)]
    with pytest.raises(kvtrie.StaleHandleError, match="from_ledger"):
        kvtrie.TransferManifest.from_ledger(ledger, "b", key=KEY)
