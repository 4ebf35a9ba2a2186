"""Ranks of tensor parallelism: one seed for all, so that their caches decide alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.sglang.processes import forked_together
from tests.sglang.test_parts import context

from kvtrie.integrations.sglang import _support, _version

if TYPE_CHECKING:
    from pathlib import Path


def two_ranks(what: str, folder: Path) -> list[Any]:
    file = str(folder / "store")
    return forked_together("tests.sglang.ranks", [(what, str(rank), file) for rank in (0, 1)])


def test_ranks_share_a_secret_seed_and_answer_alike(tmp_path: Path) -> None:
    found = []
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        first, second = two_ranks("calls", tmp_path / run)
        assert first == second
        assert len(first["answers"]) > 200
        found.append(first)
    # The next start has another seed. What is matched and evicted does not depend on it.
    assert found[0]["seed"] != found[1]["seed"]
    assert found[0]["answers"] == found[1]["answers"]


@pytest.mark.parametrize(
    ("what", "rank", "why"),
    [
        ("absent", 1, "tp_size=2 is not supported here: rank 0 could not send its seed to the oth"),
        ("unequal", 1, "unequal pools: 41 pages here, and 40 at rank 0"),
        ("alone", 0, "tp_size=2 is not supported over a group of 1 ranks"),
    ],
)
def test_ranks_without_a_seed_do_not_start(what: str, rank: int, why: str, tmp_path: Path) -> None:
    said = two_ranks(what, tmp_path)[rank]["refused"]
    assert said.startswith("--radix-cache-backend kvtrie: tp_size=2 is not supported")
    assert why in said
    assert "\n" not in said


def test_more_than_one_rank_needs_a_group() -> None:
    with pytest.raises(_version.SGLangUnsupportedError, match="tp_size=2 is not supported without"):
        _support.make(context(tp_size=2))
