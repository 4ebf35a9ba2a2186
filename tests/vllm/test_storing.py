"""vLLM's storing connector next to kvtrie's, in a real engine: what it stores under plain keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.vllm import storing
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import ANSWER, EDITED, NEXT, QUESTION, REASONING, words
from tests.vllm.reference import Reference
from vllm.v1.core.kv_cache_utils import get_block_hash

from kvtrie.integrations.vllm import _lineage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine

TURN = QUESTION + REASONING + ANSWER
# Turns, edits that move KV or copy the tail of a block, and what continues after either.
PROMPTS = [
    TURN,
    EDITED,
    EDITED + words(90, 5),
    QUESTION[:180] + words(100, 6),
    TURN + NEXT,
    ANSWER + QUESTION,
]
OPTIONS: dict[str, Any] = {"blocks": 60, "max_model_len": 1024}


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    storing.without_gpu(monkeypatch)


def serve(engine: Engine) -> list[list[int]]:
    """Ask everything twice; the pool has lost the first of it by the second time."""
    said = []
    for _ in range(2):
        said += [engine.ask(prompt, max_tokens=6).tokens for prompt in PROMPTS]
        for seed in range(4):
            engine.ask(words(800, 50 + seed), max_tokens=1)
    return said


def stored(engine: Engine, said: list[list[int]], reference: Reference) -> tuple[int, int, int]:
    """Blocks stored under a plain key with its KV, with other KV, and under other keys."""
    manager, copies = storing.halves(engine)
    plain: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}
    for prompt, answer in zip([*PROMPTS, *PROMPTS], said, strict=True):
        tokens = prompt + answer
        k, v = reference.kv(tokens)
        for number, one in enumerate(engine.plain_hashes(tokens)):
            inside = slice(number * BLOCK, (number + 1) * BLOCK)
            plain[one] = k[:, inside], v[:, inside]
    fillers = {one for at in range(4) for one in engine.plain_hashes(words(800, 50 + at))}
    # A block that nobody has, to read what is stored.
    spare = engine.pool.free_block_queue.get_all_free_blocks()[0].block_id
    right = wrong = other = 0
    for block in manager.cpu_block_pool.blocks:
        if block.block_hash is None:
            continue
        key = bytes(get_block_hash(block.block_hash))
        if key not in plain:
            other += key not in fillers
            continue
        for name, tensor in copies.host.items():
            copies.device[name][spare] = tensor[block.block_id]
        pairs = zip(engine.kv(spare), plain[key], strict=True)
        is_right = all(
            found is not None and torch.allclose(found.view_as(known), known, atol=1e-3)
            for found, known in pairs
        )
        right, wrong = right + is_right, wrong + (not is_right)
    engine.reset()
    return right, wrong, other


def test_no_approximate_block_is_stored_under_a_plain_key(
    engine: Callable[..., Engine], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(llama)
    e = engine(**storing.options(APPROXIMATE, is_exact=False), **OPTIONS)
    said = serve(e)
    assert e.counts["tokens_moved"] > 100
    assert e.counts["errors"] == 0
    right, wrong, other = stored(e, said, reference)
    assert wrong == 0
    assert right > 10
    assert other > 5
    # The check finds approximate KV that has kept its plain key.
    monkeypatch.setattr(_lineage, "start", lambda *_: None)
    assert stored(e, serve(e), reference)[1] > 0


def test_exact_mode_says_what_vllm_says_and_stores_exact_blocks_alone(
    engine: Callable[..., Engine], llama: Path
) -> None:
    alone = serve(engine(shadow=False, **OPTIONS))
    mine = {"mode": "exact", "chat_format": None}
    e = engine(**storing.options(mine, is_exact=True), **OPTIONS)
    assert serve(e) == alone
    assert e.counts["tokens_exact"] > 0
    assert e.counts["tokens_moved"] == e.counts["errors"] == 0
    assert storing.halves(e)[1].num_loaded > 0
    right, wrong, _ = stored(e, alone, Reference(llama))
    assert wrong == 0
    assert right > 10
