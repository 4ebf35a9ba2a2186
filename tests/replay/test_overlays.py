"""Overlays: what is synthetic, where reasoning is kept, and where it is gone."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.replay.traffic import mooncake, write

from kvtrie.replay import OVERLAYS, Overlay, Trace, TraceError, chain_keys, read_trace, replay

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.replay.trace import Tokens, TraceRequest


def chat(path: Path, num: int) -> Trace:
    """One conversation that grows by two blocks of 64 tokens a request."""
    rows = [{"input_length": 128 * n + 70, "hash_ids": list(range(2 * n + 1))} for n in range(num)]
    return read_trace(write(path / "chat.jsonl", rows))


def texts(request: TraceRequest) -> tuple[Tokens, Tokens]:
    assert request.tokens is not None
    return request.tokens()


def test_w01_replies_and_no_prompt_has_their_reasoning(tmp_path: Path) -> None:
    trace = chat(tmp_path, 5)
    over = OVERLAYS["W01"].over(trace)
    assert (over.synthetic, over.marks_reasoning, over.shows_tokens) == ("W01", True, True)
    for before, one in zip(trace.requests, over.requests, strict=True):
        prompt, whole = texts(one)
        length = 64 * len(before.prompt)
        assert (len(prompt), len(whole)) == (length, length + 1900)
        assert one.dead == ((length, length + 1500),)
        assert len(one.prompt) == len(before.prompt)
        assert np.array_equal(whole[:length], prompt)
    for one, after in pairwise(over.requests):
        # What follows the reasoning is in the next prompt, 1,500 tokens before.
        _, whole = texts(one)
        prompt, _ = texts(after)
        at = len(whole) - 1900
        assert np.array_equal(prompt[:at], whole[:at])
        assert np.array_equal(prompt[at : at + 128], whole[at + 1500 : at + 1628])
        assert not np.isin(whole[at : at + 1500], prompt).any()


def test_w11_keeps_reasoning_until_the_user_speaks(tmp_path: Path) -> None:
    over = Overlay("W11", reasoning=150, turn=3, output=33).over(chat(tmp_path, 7))
    prompts, wholes = zip(*(texts(one) for one in over.requests), strict=True)
    lengths = [len(one) for one in prompts]
    plain = [64 + 128 * n for n in range(7)]
    # 0, 1 and 2 replies of the turn are before each prompt.
    assert lengths == [one + 150 * (n % 3) for n, one in enumerate(plain)]
    for n in (0, 1, 3, 4):
        same = len(prompts[n]) + 150 + 33
        assert np.array_equal(prompts[n + 1][:same], wholes[n])
    assert [len(one.dead) for one in over.requests] == [0, 0, 3, 0, 0, 3, 0]
    for start, end in over.requests[2].dead:
        assert not np.isin(wholes[2][start:end], np.concatenate(prompts[3:])).any()
    kept = np.delete(prompts[2], [n for a, b in over.requests[2].dead[:2] for n in range(a, b)])
    assert np.array_equal(prompts[3][: len(kept)], kept)


@pytest.mark.parametrize("name", OVERLAYS)
def test_blocks_are_named_by_their_prefixes(name: str, tmp_path: Path) -> None:
    over = OVERLAYS[name].over(read_trace(write(tmp_path / "t.jsonl", mooncake(1, 200))))
    named: dict[int, int] = {}
    for one in over.requests:
        prompt, whole = texts(one)
        keys = chain_keys(whole, 64).tolist()
        assert len(one.prompt) == len(prompt) // 64
        assert [named.setdefault(key, number) for key, number in zip(keys, one.cached, strict=True)]
        assert [named[key] for key in keys] == one.cached.tolist()
    assert sorted(named.values()) == list(range(over.num_ids))


def test_a_trace_that_marks_reasoning_has_no_overlay(tmp_path: Path) -> None:
    over = OVERLAYS["W01"].over(chat(tmp_path, 2))
    with pytest.raises(TraceError, match="marks reasoning itself; the overlay W11 is not for it"):
        OVERLAYS["W11"].over(over)


def test_more_tokens_than_numbers_is_an_error(tmp_path: Path) -> None:
    trace = chat(tmp_path, 2)
    with pytest.raises(TraceError, match="more than 4294967296 distinct tokens"):
        Overlay("W01", reasoning=2**31, turn=1, output=1).over(trace)


def test_what_moved_is_found_by_kvtrie_alone(tmp_path: Path) -> None:
    over = OVERLAYS["W01"].over(chat(tmp_path, 5))
    last = replay(over).rows[-1]
    # The first prompt, and the last token of each: all else of a prompt was in a prompt or a reply.
    assert last.kvtrie.computed == 64 + 4
    assert last.prefix.computed == last.optimum.computed == 64 + 4 * 128
