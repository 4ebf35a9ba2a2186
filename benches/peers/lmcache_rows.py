"""LMCache compared with kvtrie: moved runs of an agent's prompt without reasoning (`agent.close`).

The matcher takes a list of ints and makes an array of it inside each call. kvtrie starts from a
ready sequence, as in the rows of other peers, unless a row says that both start from a list.
"""

import importlib.metadata
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from workloads.ceiling import Ceiling, Reach, coverage, reused
from workloads.documents import BLOCK_SIZE, Tokens
from workloads.populations import population
from workloads.registry import WORKLOADS

import kvtrie
from peers.harness import Effort, Row, Side, Untyped, compare, expect, report
from peers.lmcache_cache import Found, Theirs
from peers.ours import NAMESPACE, Ours

ENGINE = "lmcache"
PEER = "LMCache blend"

# LMCache's default, and the block of kvtrie and of the other peers.
_CHUNKS = (256, 16)
_PROMPTS = (20_000, 32_000)
_POLICY = kvtrie.ReusePolicy(scope="namespace")
_GOAL = 50.0
# Share of what could be reused: only windows at more places than are tried may be missing.
_LEAST_COVERAGE = 0.97


class _Planned(NamedTuple):
    blocks: Untyped
    segments: Untyped
    gaps: Untyped
    source_blocks: Untyped
    candidates_dropped: int


class _Prompts:
    def __init__(self, arrays: list[Tokens]) -> None:
        self.arrays = arrays
        self.lists: list[list[int]] = [ids.tolist() for ids in arrays]
        self._numbers = count()

    def first(self) -> "_Prompts":
        return _Prompts(self.arrays[:1])

    def next(self) -> int:
        return next(self._numbers) % len(self.arrays)


def rows(effort: Effort) -> Iterator[Row]:
    for length in _PROMPTS:
        for row in _moved_runs(effort, effort.of(length, length // 10)):
            yield report({"engine": ENGINE, "peer": PEER} | row)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("lmcache", "numba")}


def _moved_runs(effort: Effort, length: int) -> Iterator[Row]:
    made = population(
        WORKLOADS["W11"],
        conversations=effort.of(200, 20),
        cached_tokens=effort.of(1_000_000, 50_000),
        prompt_tokens=length,
        asked=effort.of(8, 2),
    )
    computed = [each.cached[: each.num_computed] for each in made.conversations]
    ours = Ours(made.num_cached, moved_runs=True)
    for tokens in computed:
        ours.store(tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE])
    ceiling = Ceiling(computed, block_size=BLOCK_SIZE)
    reaches = [ceiling.of(each.prompt, keep_last=1) for each in made.asked]
    prompts = _Prompts([each.prompt for each in made.asked])
    our_share = _our_share(ours, prompts, reaches)
    for chunk in _CHUNKS:
        theirs = Theirs(chunk)
        for tokens in computed:
            theirs.store(tokens)
        their_share = _their_share(theirs, prompts)
        note = (
            f"Of a prompt of {length:,} tokens kvtrie finds {our_share:.1%}, "
            f"LMCache with chunks of {chunk} {their_share:.1%}"
        )
        state = {
            "tokens": length,
            "cached": made.num_cached,
            "conversations": len(made.conversations),
            "chunk": chunk,
            "kvtrie_share": round(our_share, 4),
            "theirs_share": round(their_share, 4),
            "note": note,
        }
        whole = "prefix and moved runs"
        for name, what, drawn, listed, their_call in (
            ("cold", f"{whole}, cold", prompts, False, theirs.find),
            ("warm", f"{whole}, warm", prompts.first(), False, theirs.find),
            ("list", f"{whole}, warm, both from a list", prompts.first(), True, theirs.find),
            # The matcher does not find the prefix, which every plan includes.
            ("match", "its matcher alone, warm", prompts.first(), False, theirs.match),
        ):
            row = compare(
                _our_side(ours, drawn, reaches, listed=listed),
                _their_side(theirs, drawn, their_call),
                effort,
                warm=name != "cold",
            )
            columns = {
                "work": f"{length:,} tokens of W11, chunks of {chunk}, {what}",
                "id": f"lmcache.w11.{length}.{chunk}.{name}",
                "goal": _GOAL if name in {"cold", "warm"} else None,
            }
            yield row | state | columns


def _our_side(
    ours: Ours, prompts: _Prompts, reaches: list[Reach], *, listed: bool
) -> Side[Untyped]:
    index = ours.index

    def prepare() -> tuple[int, Untyped]:
        number = prompts.next()
        if listed:
            return number, prompts.lists[number]
        return number, ours.sequence(prompts.arrays[number])

    def planned(seq: kvtrie.TokenSequence) -> _Planned:
        made = index.plan(seq, _POLICY)
        answer = _Planned(
            made.blocks, made.segments, made.gaps, made.source_blocks, made.candidates_dropped
        )
        made.release()
        return answer

    def plan(argument: tuple[int, kvtrie.TokenSequence]) -> _Planned:
        return planned(argument[1])

    def plan_of_list(argument: tuple[int, list[int]]) -> _Planned:
        return planned(kvtrie.TokenSequence(argument[1], NAMESPACE))

    def check(argument: tuple[int, Untyped], answer: _Planned) -> None:
        reach = reaches[argument[0]]
        found = coverage(answer.segments, reach)
        expect(found >= _LEAST_COVERAGE, True, f"kvtrie's coverage of {found:.4f}, enough")
        if not answer.candidates_dropped:
            expect(found, 1.0, "kvtrie's coverage")

    return Side(prepare, plan_of_list if listed else plan, check)


def _their_side(theirs: Theirs, prompts: _Prompts, call: Untyped) -> Side[Untyped]:
    def prepare() -> list[int]:
        return prompts.lists[prompts.next()]

    def check(tokens: list[int], answer: Untyped) -> None:
        found = answer if isinstance(answer, Found) else Found(0, answer)
        for match in found.matches:
            expect(tokens[match.cur_st : match.cur_ed], theirs.stored(match.hash), "a match")

    return Side(prepare, call, check)


def _our_share(ours: Ours, prompts: _Prompts, reaches: list[Reach]) -> float:
    found = total = 0
    for ids, reach in zip(prompts.arrays, reaches, strict=True):
        with ours.index.plan(ours.sequence(ids), _POLICY) as plan:
            mask = reused(plan.segments, len(ids))
        found += int(np.count_nonzero(mask & reach.mask))
        total += len(ids)
    return found / total


def _their_share(theirs: Theirs, prompts: _Prompts) -> float:
    found = sum(theirs.find(tokens).covered() for tokens in prompts.lists)
    return found / sum(map(len, prompts.lists))
