"""The same outputs as without the connector, and the same bytes as the reference copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.vllm.conftest import APPROXIMATE, EXACT
from tests.vllm.prompts import ANSWER, NEXT, QUESTION, REASONING
from tests.vllm.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from tests.vllm.engine import Engine

NUM_CONVERSATIONS = 200


def answers(vllm: Engine, prompts: list[list[int]]) -> list[list[int]]:
    said = []
    for first in range(0, len(prompts), 8):
        names = [vllm.add(prompt, max_tokens=6) for prompt in prompts[first : first + 8]]
        vllm.drain()
        said += [vllm.answers[name].tokens for name in names]
    return said


def test_without_approximate_reuse_outputs_are_those_of_vllm(engine: Callable[..., Engine]) -> None:
    traffic = Traffic(seed=3)
    prompts = [traffic.next().prompt for _ in range(NUM_CONVERSATIONS)]
    plain = answers(engine(), prompts)
    vllm = engine(connector=EXACT)
    mine = answers(vllm, prompts)
    assert vllm.shadow.num_exact_copies > 0
    assert vllm.shadow.num_moved == 0
    assert mine == plain


def rotated(k: torch.Tensor, delta: int, theta: float = 10_000.0) -> torch.Tensor:
    """Keys in two halves, rotated by a number of positions."""
    half = k.shape[-1] // 2
    angles = delta * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    one, two = k[..., :half].double(), k[..., half:].double()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def test_copied_kv_is_what_the_reference_makes_of_it(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    pool = vllm.kv_pool
    tensors = list(pool.k), [v for v in pool.v if v is not None]
    apply = pool.apply
    num_seen = 0

    def rows(view: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        block, at = divmod(slot, view.shape[1])
        return view[block, at : at + count].clone()

    def checked(moves: Any) -> Any:
        nonlocal num_seen
        before = [[view.clone() for view in side] for side in tensors]
        event = apply(moves)
        untouched = torch.ones(pool.k[0].shape[:2], dtype=torch.bool)
        for source, dest, count, delta in moves.tolist():
            block, at = divmod(dest, pool.k[0].shape[1])
            untouched[block, at : at + count] = False
            for layer, (k, v) in enumerate(zip(*tensors, strict=True)):
                wanted = rows(before[0][layer], source, count)
                got = rows(k, dest, count)
                assert (rotated(wanted, delta) - got).abs().max() < 1e-5
                if not delta:
                    assert torch.equal(wanted, got)
                assert torch.equal(rows(before[1][layer], source, count), rows(v, dest, count))
            num_seen += count
        for old, new in zip(before, tensors, strict=True):
            for one, two in zip(old, new, strict=True):
                assert torch.equal(one[untouched], two[untouched])
        return event

    monkeypatch.setattr(pool, "apply", checked)
    vllm.ask(QUESTION + ANSWER + NEXT)
    assert num_seen >= len(ANSWER)
