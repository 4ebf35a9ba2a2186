"""Transfers between two engines: a manifest, its bytes, and what a receiver plans to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import QUICK

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meter import Meter

LENGTH = 10_000 if QUICK else 100_000
REASONING = 5_003
BLOCK_SIZE = 16
KEY = b"k" * 32
SPACE = kvtrie.Namespace(model="model", salt=kvtrie.SHARED)
TOKENS = np.random.default_rng(4).integers(0, 1 << 17, LENGTH + REASONING).astype(np.uint32)
TABLE = np.arange(-(-len(TOKENS) // BLOCK_SIZE), dtype=np.int32)
APPROXIMATE = kvtrie.ReusePolicy(approximate=True)


def _sequence(*pieces: slice) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(np.concatenate([TOKENS[piece] for piece in pieces]), SPACE)


def _manifest(seq: kvtrie.TokenSequence) -> kvtrie.TransferManifest:
    return kvtrie.TransferManifest.from_blocks(
        seq, TABLE, key=KEY, num_computed=len(seq), block_size=BLOCK_SIZE
    )


def test_manifest(meter: Meter) -> None:
    def target(seqs: Sequence[kvtrie.TokenSequence]) -> kvtrie.TransferManifest:
        for seq in seqs:
            manifest = _manifest(seq)
        return manifest

    work = f"transfer: manifest of {LENGTH:,} tokens"
    made = meter(work, target, lambda: _sequence(slice(LENGTH)), calls=1, tokens=LENGTH)
    assert made.num_tokens == LENGTH


def test_bytes(meter: Meter) -> None:
    raw = _manifest(_sequence(slice(LENGTH))).to_bytes()

    def target(blobs: Sequence[bytes]) -> kvtrie.TransferManifest:
        for blob in blobs:
            manifest = kvtrie.TransferManifest.from_bytes(blob)
        return manifest

    work = f"transfer: {LENGTH:,} tokens read from bytes"
    assert meter(work, target, lambda: raw, calls=4, tokens=LENGTH).to_bytes() == raw


EDGE = LENGTH // 2 + 5
PROMPTS = {
    "all exact": (kvtrie.EXACT_ONLY, (slice(LENGTH),)),
    "reasoning removed": (APPROXIMATE, (slice(EDGE), slice(EDGE + REASONING, None))),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_plan(name: str, meter: Meter) -> None:
    policy, pieces = PROMPTS[name]
    theirs = _sequence(slice(LENGTH) if name == "all exact" else slice(None))
    manifest = _manifest(theirs)

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> kvtrie.TransferPlan:
        for seq in seqs:
            plan = kvtrie.plan_transfer(manifest, seq, TABLE, key=KEY, policy=policy)
            plan.pairs  # noqa: B018 - what an engine reads
        return plan

    work = f"transfer: plan of {LENGTH:,} tokens, {name}"
    plan = meter(work, target, lambda: _sequence(*pieces), calls=1, tokens=LENGTH)
    assert plan.num_exact + plan.num_approximate > LENGTH - 2 * BLOCK_SIZE
