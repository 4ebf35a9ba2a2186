"""A manifest is about one engine and request, if both sides say so."""

from __future__ import annotations

import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
KEY = b"k" * 32
IDS = list(range(8))


def written(context: bytes) -> kvtrie.TransferManifest:
    return kvtrie.TransferManifest.from_blocks(
        kvtrie.TokenSequence(IDS, SPACE),
        [5, 6],
        key=KEY,
        num_computed=8,
        block_size=4,
        context=context,
    )


@pytest.mark.parametrize("said", [b"", b"decode-0/cmpl-2", b"decode-0/cmpl-1 "])
def test_plan_refuses_a_manifest_of_another_context(said: bytes) -> None:
    manifest = written(b"decode-0/cmpl-1")
    seq = kvtrie.TokenSequence(IDS, SPACE)
    with pytest.raises(kvtrie.TransferRefused) as refused:
        kvtrie.plan_transfer(manifest, seq, [0, 1], key=KEY, context=said)
    assert refused.value.reason == "digest"
    move = kvtrie.plan_transfer(manifest, seq, [0, 1], key=KEY, context=b"decode-0/cmpl-1")
    assert move.pairs["remote"].tolist() == [5, 6]


def test_ledger_writes_the_context_too() -> None:
    ledger = kvtrie.SequenceLedger(block_size=4)
    ledger.begin("a", kvtrie.TokenSequence(IDS, SPACE), [5, 6], num_computed=8)
    manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY, context=b"a")
    assert manifest == written(b"a")
    assert manifest != written(b"")


def test_context_that_is_too_long_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"1025 bytes; the limit is 1024"):
        written(b"x" * 1025)
