"""Plans on indexes of thousands of tokens, compared with the tokens of their source blocks.

    python -m tests.property.sound_plans --plans 1000000

A side table has for every slot the token, the position, a digest of its whole prefix, the label and
the tags. Each token of every plan is looked up there: same token, the plan's delta, the class and
hops that follow from the two prefixes. Moved tokens are before `moved_end`, and come from blocks of
the plan's session or of a path that begins as the prompt does. What is reused is in the union of
all usable shared windows. Where no candidate was dropped and the scope is the namespace, no such
window is computed whole. The exit status is 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from tests.property.kit import imported

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[Any]
EXACT, APPROXIMATE, COMPUTE = range(3)
NAMESPACES = tuple(kvtrie.Namespace(model="m", salt=salt) for salt in ("one", "two"))
LONGEST = 1024
KINDS = ("reasoning", "answer", "tool_result")
SHARED_PREFIXES = (1, 2, 4)
SESSIONS = 6
MIX = np.uint64(0x9E3779B97F4A7C15)


class UnsoundError(AssertionError):
    """A plan is wrong."""


def require(what: str, holds: Any) -> None:
    if not holds:
        raise UnsoundError(what)


def mixed(tokens: Array) -> Array:
    words = (tokens.astype(np.uint64) + np.uint64(1)) * MIX
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(words ^ (words >> np.uint64(32)))


def contains(ordered: Array, values: Array) -> Array:
    if not len(ordered):
        return np.zeros(len(values), dtype=np.bool_)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[at] == values)


def spread(ends: Array, count: int, width: int) -> Array:
    """Which of `count` positions are in a window of `width` that begins where `ends` is true."""
    edges = np.zeros(count + 1, dtype=np.int64)
    edges[: len(ends)] += ends
    edges[width : width + len(ends)] -= ends
    return np.asarray(np.cumsum(edges[:count]) > 0)


class Histories:
    """Conversations as spans of tokens, and what clients do to them."""

    def __init__(self, rng: np.random.Generator, alphabet: int) -> None:
        self.rng = rng
        self.alphabet = alphabet
        self.boilerplate = [self.text(int(rng.integers(4, 40))) for _ in range(3)]
        self.known: list[list[Array]] = [self.fresh() for _ in range(4)]

    def text(self, count: int) -> Array:
        ids = self.rng.integers(0, self.alphabet, count)
        if self.rng.random() < 0.04:
            ids = np.resize(ids[: self.rng.choice([1, 2, 17])], count)
        return ids

    def fresh(self) -> list[Array]:
        spans = [self.boilerplate[0], self.text(int(self.rng.integers(8, 80)))]
        for _ in range(self.rng.integers(2, 12)):
            spans.append(self.text(int(self.rng.choice([3, 9, 20, 33, 64, 90]))))
            if self.rng.random() < 0.3:
                spans.append(self.boilerplate[self.rng.integers(3)])
        return spans

    def edited(self, spans: list[Array]) -> list[Array]:
        spans = list(spans)
        for _ in range(self.rng.integers(1, 4)):
            at = int(self.rng.integers(len(spans))) if spans else 0
            edit = self.rng.integers(7)
            if edit == 0:
                # Reasoning or tool results are dropped, several at once.
                keep = self.rng.random(len(spans)) < 0.7
                spans = [span for span, kept in zip(spans, keep, strict=True) if kept]
            elif edit == 1 and spans:
                spans[at] = self.text(int(self.rng.integers(1, 6)))
            elif edit == 2 and spans:
                # A clock in the head: as long as before.
                span = spans[at].copy()
                span[len(span) // 2 : len(span) // 2 + 2] = self.rng.integers(self.alphabet)
                spans[at] = span
            elif edit == 3:
                spans.insert(at, self.text(int(self.rng.integers(1, 5))))
            elif edit == 4:
                spans = [spans[i] for i in self.rng.permutation(len(spans))]
            elif edit == 5:
                spans = [self.boilerplate[0], self.text(20), *spans[-3:]]
            else:
                spans.append(self.text(int(self.rng.integers(1, 60))))
        return spans

    def next(self) -> Array:
        spans = self.known[self.rng.integers(len(self.known))]
        roll = self.rng.random()
        if roll < 0.2:
            spans = [*spans, self.text(int(self.rng.integers(1, 60)))]
        else:
            spans = self.edited(spans) if roll < 0.9 else self.fresh()
        if sum(map(len, spans)) > LONGEST:
            spans = self.fresh()
        if self.rng.random() < 0.2:
            self.known[self.rng.integers(len(self.known))] = spans
        return np.concatenate([np.zeros(0, dtype=np.int64), *spans])[:LONGEST]


@dataclass
class Report:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.counts += other.counts
        self.wrong += other.wrong


class World:
    def __init__(self, seed: int, hash_bits: int) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.counts: collections.Counter[str] = collections.Counter()
        self.size = size = int(rng.choice([1, 2, 4, 7, 8, 16, 16, 16, 32]))
        # With few bits most candidates are false.
        capacity = int(rng.choice([2_000, 6_000, 12_000])) // (1 if hash_bits > 4 else 4)
        self.spare = capacity // size
        self.num_blocks = self.spare + LONGEST // size + 2
        self.min_run = int(rng.choice([8, 12, 16, 16, 24]))
        self.index = kvtrie.RadixIndex(
            self.num_blocks,
            size,
            min_run=self.min_run,
            max_candidates=int(rng.choice([2, 64, 1 << 14])),
            seed=seed,
            hash_bits=hash_bits,
        )
        self.histories = Histories(rng, int(rng.choice([4, 200, 100_000])))
        self.free = list(range(self.spare))
        slots = self.num_blocks * size
        self.token = np.zeros(slots, dtype=np.int64)
        self.position = np.zeros(slots, dtype=np.int64)
        self.prefix = np.zeros(slots, dtype=np.uint64)
        self.window = np.zeros(slots, dtype=np.uint64)
        self.tags = np.zeros(slots, dtype=np.uint64)
        self.exact = np.zeros(self.num_blocks, dtype=np.bool_)
        self.hops = np.zeros(self.num_blocks, dtype=np.int64)
        self.present = np.zeros(self.num_blocks, dtype=np.bool_)
        self.space = np.zeros(self.num_blocks, dtype=np.int64)
        self.above = np.zeros(self.num_blocks, dtype=np.uint64)
        # By length: the digest of the first blocks of each block's path, 0 where it has fewer.
        self.heads = {
            count: np.zeros(self.num_blocks, dtype=np.uint64) for count in SHARED_PREFIXES
        }
        # A bit per session. There are fewer than a block belongs to at most.
        self.sessions = np.zeros(self.num_blocks, dtype=np.uint8)
        self.powers = rng.integers(0, 2**63, LONGEST + 1, dtype=np.uint64) | np.uint64(1)
        self.views: dict[tuple[int, int], View] = {}

    def digests(self, tokens: Array, space: int) -> Array:
        """A digest of each whole prefix of a sequence."""
        return np.asarray(np.cumsum(mixed(tokens) * self.powers[: len(tokens)]) + self.root(space))

    def root(self, space: int) -> np.uint64:
        """The digest of the empty prefix."""
        return np.uint64((space + 1) * 0x9E3779B9)

    def windows(self, tokens: Array) -> Array:
        """A digest of each window of min_run tokens, by its first token."""
        words = mixed(tokens)
        if len(words) < self.min_run:
            return words[:0]
        each = np.lib.stride_tricks.sliding_window_view(words, self.min_run)
        return np.asarray((each * self.powers[: self.min_run]).sum(axis=1, dtype=np.uint64))

    def slots(self, blocks: Array) -> Array:
        return np.asarray((blocks[:, np.newaxis] * self.size + np.arange(self.size)).ravel())

    def sequence(self, tokens: Array, space: int) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(tokens, NAMESPACES[space])

    def left(self, ids: Array) -> None:
        """Forget these blocks, which were removed."""
        self.views.clear()
        self.present[ids] = False
        self.free += ids.tolist()

    def insert(self) -> None:
        tokens, space = self.histories.next(), int(self.rng.random() < 0.2)
        count = len(tokens) // self.size
        if len(self.free) < count:
            self.left(self.index.evict(count - len(self.free)))
        if len(self.free) < count:
            return
        offered = np.array([self.free.pop() for _ in range(count)], dtype=np.int64)
        seq, end = self.sequence(tokens, space), count * self.size
        exact_until, hops = end, 0
        source: Any = kvtrie.COMPUTED
        if self.rng.random() < 0.3:
            exact_until, hops = int(self.rng.integers(0, end + 1)), int(self.rng.integers(0, 3))
            source = imported(exact_until, hops)
        number = self.session()
        session = None if number is None else f"session {number}"
        done = self.index.insert(seq, offered, num_computed=end, source=source, session=session)
        self.free += done.duplicates.tolist() + done.surplus.tolist()
        self.record(tokens, space, done, (exact_until, hops))
        if number is not None:
            self.sessions[done.blocks] |= np.uint8(1 << number)
        self.left(done.freed)
        if done.num_exact != self.exact_tokens(done.blocks):
            raise UnsoundError(f"insert says {done.num_exact} exact, {source}")
        if len(tokens) and self.rng.random() < 0.5:
            a, b = sorted(self.rng.integers(0, len(tokens) + 1, 2).tolist())
            kind = str(self.rng.choice(KINDS))
            self.index.tag(seq, [kvtrie.Span(a, b, kind)])
            if a < b:
                bit = np.uint64(1) << np.uint64(self.index.kinds.index(kind))
                self.tags[self.slots(done.blocks.astype(np.int64))[a:b]] |= bit

    def session(self) -> int | None:
        return None if self.rng.random() < 0.3 else int(self.rng.integers(SESSIONS))

    def exact_tokens(self, blocks: Array) -> int:
        wrong = np.flatnonzero(~self.exact[blocks])
        return int(wrong[0] if len(wrong) else len(blocks)) * self.size

    def record(self, tokens: Array, space: int, done: Any, label: tuple[int, int]) -> None:
        size = self.size
        digests, windows = self.digests(tokens, space), self.windows(tokens)
        by_end = np.concatenate([np.zeros(self.min_run - 1, dtype=np.uint64), windows])
        exact_until, hops = label
        replaced = {int(self.prefix[(old + 1) * size - 1]): old for old in done.freed.tolist()}
        exact_so_far, above = True, self.root(space)
        for depth, block in enumerate(done.blocks.tolist()):
            part = slice(depth * size, (depth + 1) * size)
            here = slice(block * size, (block + 1) * size)
            if not self.present[block]:
                self.token[here], self.prefix[here] = tokens[part], digests[part]
                self.position[here] = np.arange(part.start, part.stop)
                self.window[here] = by_end[part]
                old = replaced.get(int(digests[part.stop - 1]))
                # A replacement keeps the tags.
                kept = 0 if old is None else self.tags[old * size : (old + 1) * size]
                self.tags[here] = kept
                said = part.stop <= exact_until
                self.exact[block] = said and exact_so_far
                self.hops[block] = 0 if said else hops
                self.present[block], self.space[block] = True, space
                self.above[block] = above
                self.sessions[block] = 0 if old is None else self.sessions[old]
                for count, heads in self.heads.items():
                    heads[block] = digests[count * size - 1] if depth + 1 >= count else 0
            exact_so_far = exact_so_far and bool(self.exact[block])
            above = digests[part.stop - 1]
        self.views.clear()

    def forget(self) -> None:
        roll = self.rng.random()
        if roll < 0.4:
            self.left(self.index.evict(int(self.rng.integers(0, 40))))
        elif roll < 0.9:
            ids = np.flatnonzero(self.present)
            if len(ids):
                chosen = self.rng.choice(ids, min(len(ids), int(self.rng.integers(1, 12))))
                self.left(self.index.discard(chosen))
        else:
            tokens = self.histories.next()
            edges = np.sort(self.rng.integers(0, len(tokens) + 1, 4)).reshape(2, 2).tolist()
            ranges = [(a, b) for a, b in edges]
            gone = self.index.remove_spans(self.sequence(tokens, 0), ranges, force=True)
            self.left(gone.freed)
        self.left(self.index.take_freed())

    def view(self, space: int, max_hops: int) -> View:
        key = space, max_hops
        if key not in self.views:
            self.views[key] = self.look(space, max_hops)
        return self.views[key]

    def look(self, space: int, max_hops: int) -> View:
        size = self.size
        within = self.present & (self.space == space)
        movable = np.flatnonzero(within & (self.hops + 1 <= max_hops))
        movable = movable[np.argsort(self.position[movable * size], kind="stable")]
        ends = {int(self.prefix[block * size + size - 1]): block for block in movable.tolist()}
        back = np.zeros(self.num_blocks, dtype=np.int64)
        for block in movable.tolist():
            parent = ends.get(int(self.above[block]))
            if parent is not None:
                back[block] = back[parent] + size
        run = back[movable, np.newaxis] + np.arange(1, size + 1)
        slots = self.slots(movable)[(run >= self.min_run).ravel()]
        exact = self.slots(np.flatnonzero(within & self.exact))
        alike = self.slots(np.flatnonzero(within & (self.exact | (self.hops <= max_hops))))
        return View(
            np.sort(self.window[slots]), np.sort(self.prefix[exact]), np.sort(self.prefix[alike])
        )

    def policy(self) -> kvtrie.ReusePolicy:
        roll = self.rng.random()
        if roll < 0.1:
            return kvtrie.EXACT_ONLY
        max_hops = int(self.rng.choice([0, 1, 1, 1, 2, 9]))
        conversation = self.rng.random() < 0.4
        scope: Literal["conversation", "namespace"] = (
            "conversation" if conversation else "namespace"
        )
        shared_prefix = int(self.rng.choice(SHARED_PREFIXES))
        if roll < 0.75:
            return kvtrie.ReusePolicy(max_hops=max_hops, scope=scope, shared_prefix=shared_prefix)
        return kvtrie.ReusePolicy(
            max_hops=max_hops,
            scope=scope,
            shared_prefix=shared_prefix,
            recompute_first=int(self.rng.choice([0, 2, 16])),
            recompute_last=int(self.rng.choice([0, 2, 16])),
            recompute_share=float(self.rng.choice([0.0, 0.0, 0.2, 0.5])),
            forbid_kinds=[(), ("reasoning",), KINDS][self.rng.integers(3)],
            partial_blocks=bool(self.rng.random() < 0.5),
        )

    def plan(self) -> None:
        tokens, space = self.histories.next(), int(self.rng.random() < 0.2)
        policy, keep_last = self.policy(), int(self.rng.choice([0, 1, 1, 7]))
        pin = bool(self.rng.random() < 0.2)
        number, moved_end = self.session(), None
        if self.rng.random() < 0.3:
            moved_end = int(self.rng.integers(0, len(tokens) + 1))
        plan = self.index.plan(
            self.sequence(tokens, space),
            policy,
            keep_last=keep_last,
            pin=pin,
            session=None if number is None else f"session {number}",
            moved_end=moved_end,
        )
        try:
            in_scope = self.scope(tokens, space, policy, number)
            reused = self.check(plan, tokens, space, policy, in_scope)
            if self.predictable(policy):
                self.cover(plan, tokens[: max(0, len(tokens) - keep_last)], space, policy, reused)
            if not plan.validate().all():
                raise UnsoundError("a plan is not valid at once")
            if self.rng.random() < 0.3:
                self.recompute(plan)
        finally:
            plan.release()

    def scope(
        self, tokens: Array, space: int, policy: kvtrie.ReusePolicy, session: int | None
    ) -> Array:
        """Which blocks moved runs may come from."""
        within: Array = self.present & (self.space == space)
        if policy.scope == "namespace" or not policy.approximate:
            return within
        found = (self.sessions >> np.uint8(session or 0)) & np.uint8(session is not None) != 0
        end = policy.shared_prefix * self.size
        if end <= len(tokens):
            digests = self.digests(tokens, space)
            below = self.heads[policy.shared_prefix] == digests[end - 1]
            if (within & below).any():
                ends = self.prefix[self.size - 1 :: self.size]
                found |= below | np.isin(ends, digests[self.size - 1 : end : self.size])
        return np.asarray(within & found)

    @staticmethod
    def predictable(policy: kvtrie.ReusePolicy) -> bool:
        cut = policy.recompute_first or policy.recompute_last or policy.recompute_share
        is_whole = policy.partial_blocks and not (cut or policy.forbid_kinds)
        return is_whole and (policy.scope == "namespace" or not policy.approximate)

    def recompute(self, plan: kvtrie.ReusePlan) -> None:
        """Compute some tokens of moved runs; the others must come from where they came from."""
        if not len(plan.segments):
            return  # an empty prompt
        before = self.segments(plan, int(plan.segments["end"][-1]))
        slots = self.sources(plan, *before)
        label = before[0]["class"][before[1]].copy()
        in_place = len(plan.blocks) * self.size
        moved = np.flatnonzero((label == APPROXIMATE) & (np.arange(len(label)) >= in_place))
        again = moved[self.rng.random(len(moved)) < self.rng.choice([0.05, 0.3, 1.0])]
        plan.recompute(np.stack([again, again + 1], axis=1))
        label[again], slots[again] = COMPUTE, -1
        after = self.segments(plan, len(label))
        require("recomputed are computed", (after[0]["class"][after[1]] == label).all())
        require("others are copied as before", (self.sources(plan, *after) == slots).all())
        require("a repaired plan is valid", plan.validate().all())
        self.counts["plans, recomputed"] += bool(len(again))

    def check(
        self,
        plan: kvtrie.ReusePlan,
        tokens: Array,
        space: int,
        policy: kvtrie.ReusePolicy,
        in_scope: Array,
    ) -> Array:
        segments, number = self.segments(plan, len(tokens))
        slot = self.sources(plan, segments, number)
        reused = segments["class"][number] != COMPUTE
        require("what is reused has a slot, and nothing else", ((slot >= 0) == reused).all())
        at = np.flatnonzero(reused)
        slot, number = slot[at], number[at]
        block, label = slot // self.size, segments["class"][number]
        require("sources are present", self.present[block].all())
        require("namespaces are walls", (self.space[block] == space).all())
        require("tokens are the same", (self.token[slot] == tokens[at]).all())
        require("delta", (at - self.position[slot] == segments["delta"][number]).all())
        same = self.prefix[slot] == self.digests(tokens, space)[at]
        in_place = len(plan.blocks) * self.size
        require("what is in place has the prefix", same[:in_place].all())
        require("moved tokens are in scope", in_scope[block[~same]].all())
        end = len(tokens) if plan.moved_end is None else plan.moved_end
        require("moved tokens are before moved_end", (at[~same] < end).all())
        exact = same & self.exact[block]
        require("classes", ((label == EXACT) == exact).all())
        hops = segments["hops"].astype(np.int64)[number]
        require("hops", (hops == self.hops[block] + ~same).all())
        require("within max_hops", (hops[~exact] <= policy.max_hops).all())
        require("exact only", bool(exact.all()) or policy.approximate)
        step = mixed(self.token[slot[1:]]) * self.powers[self.position[slot[1:]]]
        on_one_path = self.prefix[slot[1:]] - self.prefix[slot[:-1]] == step
        require("one path a segment", on_one_path[number[1:] == number[:-1]].all())
        kinds = np.zeros(len(segments), dtype=np.uint64)
        np.bitwise_or.at(kinds, number, self.tags[slot])
        require("kinds", (kinds == segments["kinds"]).all())
        forbidden = sum(1 << self.index.kinds.index(kind) for kind in policy.forbid_kinds)
        require("forbidden kinds", not (self.tags[slot[~exact]] & np.uint64(forbidden)).any())
        read = np.unique(block[at >= in_place])
        require("source blocks", np.array_equal(plan.source_blocks, read))
        first_gap = plan.gaps[0, 0] if len(plan.gaps) else len(tokens)
        self.counts.update(
            {
                "plans": 1,
                "tokens": len(tokens),
                "tokens reused": len(at),
                "plans, >= 3 segments": len(segments) >= 3,
                "plans, >= 10 segments": len(segments) >= 10,
                "plans, moved runs": bool((~same).any()),
                "plans, approximate in place": bool((~exact & (at < in_place)).any()),
                "plans, more than one hop": bool((hops > 1).any()),
                "plans, moved_end": plan.moved_end is not None,
                "plans, moved in a conversation": policy.scope == "conversation"
                and bool((~same).any()),
                "plans, share computed": policy.recompute_share > 0,
                "plans, exact after a gap": bool((exact & (at > first_gap)).any()),
                "plans, candidates dropped": plan.candidates_dropped > 0,
            }
        )
        return np.asarray(reused)

    @staticmethod
    def segments(plan: kvtrie.ReusePlan, count: int) -> tuple[Array, Array]:
        segments = plan.segments
        edges = np.concatenate([[0], segments["end"]])
        require("segments cover the prompt once", (segments["start"] == edges[:-1]).all())
        require("segments end with the prompt", edges[-1] == count)
        lengths = segments["end"] - segments["start"]
        require("no segment is empty", (lengths > 0).all())
        computed = segments["class"] == COMPUTE
        require("gaps are merged", not (computed[1:] & computed[:-1]).any())
        gaps = np.stack([segments["start"], segments["end"]], axis=1)[computed]
        require("gaps are what is computed", np.array_equal(plan.gaps, gaps))
        sums = [int(lengths[segments["class"] == each].sum()) for each in range(3)]
        require("counts", sums == [plan.num_exact, plan.num_approximate, plan.num_compute])
        return segments, np.repeat(np.arange(len(segments)), lengths)

    def sources(self, plan: kvtrie.ReusePlan, segments: Array, number: Array) -> Array:
        """The slot of each token, by what is in place and by the copies; -1 where there is none."""
        size, count = self.size, len(number)
        blocks = plan.blocks.astype(np.int64)
        in_place = len(blocks) * size
        require("new blocks", plan.num_new_blocks == -(-count // size) - len(blocks))
        # New tokens go to the spare blocks, in order: a destination has a known position.
        moves = plan.moves(np.concatenate([blocks, self.spare + np.arange(plan.num_new_blocks)]))
        length = moves["num_tokens"]
        for first in (moves["source_slot"], moves["dest_slot"]):
            require("copies keep to a block", (first // size == (first + length - 1) // size).all())
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        dest = np.repeat(moves["dest_slot"], length) + within - self.spare * size + in_place
        require("copies ascend", (np.diff(dest) > 0).all())
        delta = np.repeat(moves["delta"], length)
        require("delta of copies", (segments["delta"][number[dest]] == delta).all())
        slot = np.full(count, -1, dtype=np.int64)
        slot[:in_place] = self.slots(blocks)
        slot[dest] = np.repeat(moves["source_slot"], length) + within
        return slot

    def cover(
        self,
        plan: kvtrie.ReusePlan,
        tokens: Array,
        space: int,
        policy: kvtrie.ReusePolicy,
        reused: Array,
    ) -> None:
        """Compare the reused tokens with all that can be reused, found without the index."""
        size, count = self.size, len(tokens)
        view, digests = self.view(space, policy.max_hops), self.digests(tokens, space)
        exact = contains(view.exact, digests)
        alike = contains(view.alike, digests) if policy.approximate else exact
        in_place = _leading(alike[size - 1 :: size]) * size
        require("all in place", len(plan.blocks) * size == in_place)
        start = in_place + _leading(exact[in_place : in_place + size])
        least = max(0, count - self.min_run + 1)
        sums = np.concatenate([[0], np.cumsum(alike)])
        own = sums[self.min_run :] - sums[:least] if least else sums[:0]
        found = spread(own == self.min_run, count, self.min_run)
        if policy.approximate:
            hits = contains(view.windows, self.windows(tokens))
            if plan.moved_end is not None:
                hits[max(0, plan.moved_end - self.min_run + 1) :] = False
            found |= spread(hits, count, self.min_run)
        found[:start] = True
        require("nothing but what is cached", not (reused[:count] & ~found).any())
        if not plan.candidates_dropped:
            computed = np.concatenate([[0], np.cumsum(~reused[:count])])
            whole = computed[self.min_run :] - computed[:least] if least else computed[:0]
            missed = (own == self.min_run) & (whole == self.min_run)
            require("coverage of its own prefix", not missed.any())
            if policy.approximate:
                require("coverage", not (hits & (whole == self.min_run)).any())
            else:
                require("exact coverage", np.array_equal(reused[:count], found))
            self.counts["coverage compared"] += 1
        require("nothing of what is kept", not reused[count:].any())


@dataclass(frozen=True)
class View:
    """What a plan may use, as ordered digests.

    `windows` of min_run usable slots, wherever they move; whole prefixes of `exact` slots; `alike`:
    whole prefixes of slots that are usable under the same prefix.
    """

    windows: Array
    exact: Array
    alike: Array


def _leading(flags: Array) -> int:
    wrong = np.flatnonzero(~flags)
    return int(wrong[0]) if len(wrong) else len(flags)


def world(seed: int, hash_bits: int, plans: int) -> Report:
    report = Report()
    here = World(seed, hash_bits)
    try:
        for _ in range(12):
            here.insert()
        for number in range(plans):
            if number % 10 == 0:
                here.insert()
                if here.rng.random() < 0.3:
                    here.forget()
            here.plan()
        here.index.check()
    except UnsoundError as error:
        made = here.counts["plans"]
        report.wrong.append(f"world {seed}, {hash_bits} bits, after plan {made}: {error}")
    report.counts += here.counts
    report.counts["indexes"] += 1
    report.counts["tokens cached at the end"] += int(here.present.sum()) * here.size
    return report


def _worker(task: tuple[int, int, int]) -> Report:
    return world(*task)


def run(
    plans: int,
    *,
    first: int = 0,
    hash_bits: int | None = None,
    each: int = 2_000,
    jobs: int = 1,
    seconds: float = math.inf,
    done: Callable[[Report], None] = lambda _: None,
) -> Report:
    bits = [64, 8, 4, 0] if hash_bits is None else [hash_bits]
    count = -(-plans // each)
    tasks = [(first + i, bits[i % len(bits)], min(each, plans)) for i in range(count)]
    total, end = Report(), time.monotonic() + seconds
    if jobs == 1:
        for task in tasks:
            total.add(_worker(task))
            done(total)
            if time.monotonic() > end:
                break
        return total
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for report in pool.imap_unordered(_worker, tasks):
            total.add(report)
            done(total)
            if time.monotonic() > end:
                break
    return total


def describe(report: Report, seconds: float) -> str:
    plans = report.counts["plans"]
    lines = [f"{plans} plans checked in {seconds:.0f} s, {len(report.wrong)} wrong", ""]
    for name, count in sorted(report.counts.items()):
        share = f"{count / plans:>9.1%}" if name.startswith(("plans,", "coverage")) else ""
        lines.append(f"  {name:<32}{count:>12}{share}")
    lines += ["", *report.wrong[:5]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first index")
    parser.add_argument("--each", type=int, default=2_000, help="plans per index")
    parser.add_argument(
        "--hash-bits", type=int, default=None, help="0, 4, 8 or 64; else they alternate"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after the index that ends later"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    began = time.perf_counter()
    report = run(
        args.plans,
        first=args.first,
        hash_bits=args.hash_bits,
        each=args.each,
        jobs=args.jobs,
        seconds=args.seconds,
    )
    sys.stdout.write(describe(report, time.perf_counter() - began) + "\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
