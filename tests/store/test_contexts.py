"""Moved runs from the store in the terms of a gate: those of the same plan from the pool."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.cleared import BAD
from tests.cleared import gate as gate_of
from tests.cleared import kind as kind_of
from tests.store.kit import SECONDS, SPACE, make_store, rows, run_of

import kvtrie
from kvtrie import gates
from kvtrie.integrations import _filled_plan
from kvtrie.integrations._filled_plan import FilledPlan
from kvtrie.store import HostBackend, PrefixMarks, SpanLoader, SpanShape, TakenSpans
from kvtrie.store.contexts import KeptContext, PathStretch, with_marks
from kvtrie.store.shape import HEADER_BYTES, SEAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtrie.store import SpanStore

BLOCK = 16
BLOCKS = 256
LAYOUT = kvtrie.KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=BLOCK
)
ROPE = kvtrie.RopeSpec(layers=(kvtrie.rope.Rotary((1.0,)),), head_dim=2)
SHAPE = SpanShape.of(LAYOUT)
POLICY = kvtrie.ReusePolicy(min_run=16, shared_prefix=1)
COMPUTE = 2


class Both:
    """The same turns in a pool's index and in a store."""

    def __init__(self) -> None:
        self.pool = kvtrie.RadixIndex(num_blocks=BLOCKS, block_size=BLOCK, min_run=16)
        self.backend = HostBackend(1 << 26)
        self.store = make_store(self.backend, shape=SHAPE, max_bytes=1 << 26)
        self.loader = SpanLoader(self.store, threads=1)
        self.kv = kvtrie.KVPool(LAYOUT, ROPE, num_blocks=4)
        self.free = list(range(BLOCKS))
        self.plans: list[kvtrie.ReusePlan] = []

    def close(self) -> None:
        self.release()
        assert self.loader.close(SECONDS)

    def turn(self, messages: Sequence[Sequence[int]], session: str | None = None) -> None:
        seq, borders = joined(messages)
        have = self.pool.lookup(seq).blocks.tolist()
        new = self.free[: len(seq) // BLOCK - len(have)]
        self.free = self.free[len(new) :]
        ids = [*have, *new]
        self.pool.insert(seq, ids, num_computed=len(seq), source=kvtrie.COMPUTED, session=session)
        runs = self.store.runs(seq, borders)
        marks = self.store.marks(seq, [at for run in runs for at in (run.start, run.end)])
        name = self.store.session_of(SPACE, session)
        for run in runs:
            self.store.put(run, rows(run.num_tokens, shape=SHAPE), session=name, marks=marks)

    def found(
        self,
        plan: kvtrie.ReusePlan,
        messages: Sequence[Sequence[int]],
        policy: kvtrie.ReusePolicy,
        session: str | None,
    ) -> TakenSpans:
        seq, borders = joined(messages)
        gaps = [tuple(one) for one in plan.gaps.tolist()]
        gaps[-1] = (gaps[-1][0], min(gaps[-1][1], len(seq) - 1))
        load = self.loader.seek(
            seq,
            gaps,
            lambda: self.store.runs(seq, borders),
            policy,
            session=session,
            contexts=True,
            shared_prefix=policy.shared_prefix * BLOCK,
        )
        assert load.wait(SECONDS)
        taken = load.take(self.kv)
        load.cancel()
        return taken

    def filled(
        self,
        messages: Sequence[Sequence[int]],
        policy: kvtrie.ReusePolicy = POLICY,
        *,
        session: str | None = None,
        pool: kvtrie.RadixIndex | None = None,
    ) -> FilledPlan:
        """The plan of a pool, which has nothing if none is given, with what the store has."""
        index = pool or kvtrie.RadixIndex(num_blocks=BLOCKS, block_size=BLOCK, min_run=16)
        seq, _ = joined(messages)
        plan = index.plan(seq, policy, keep_last=1, pin=False, session=session)
        self.plans.append(plan)
        taken = self.found(plan, messages, policy, session)
        return FilledPlan(
            plan,
            taken.spans,
            policy,
            is_judged=True,
            sought=policy,
            contexts=taken.contexts,
            index=index,
        )

    def release(self) -> None:
        for plan in self.plans:
            plan.release()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.close()


def joined(messages: Sequence[Sequence[int]]) -> tuple[kvtrie.TokenSequence, list[int]]:
    tokens: list[int] = []
    borders = []
    for one in messages:
        borders.append(len(tokens))
        tokens += one
    return kvtrie.TokenSequence(tokens, SPACE), borders


def reused(plan: Any) -> set[int]:
    return {
        token
        for row in plan.segments.tolist()
        if row[4] != COMPUTE
        for token in range(row[0], row[1])
    }


def described(plan: Any) -> list[tuple[object, ...]]:
    return [
        (
            *(one.start, one.end, one.old_start, one.cuts),
            *(one.lost_context, one.new_context, one.same_conversation),
        )
        for one in plan.moved_runs
    ]


class Talk:
    """A random conversation, and a prompt that a client has edited."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._next = 1_000

    def message(self, least: int = 17, most: int = 300) -> list[int]:
        """No two messages begin or go on alike, as in prompts whose template says who speaks."""
        first, count = self._next, self.draw.randrange(least, most)
        self._next += count
        return list(range(first, first + count))

    def turns(self) -> list[list[list[int]]]:
        """Prompts of which each begins with the last one, and ends with a whole block."""
        made: list[list[list[int]]] = []
        messages: list[list[int]] = [self.message(17, 60)]
        for _ in range(self.draw.randrange(1, 4)):
            messages = [*messages, *(self.message() for _ in range(self.draw.randrange(1, 4)))]
            last = self.message(2 * BLOCK)
            rest = (sum(map(len, messages)) + len(last)) % BLOCK
            messages = [*messages, last[: len(last) - rest]]
            made.append(messages)
        return made

    def edited(self, messages: list[list[int]]) -> list[list[int]]:
        new = [one for one in messages if self.draw.random() > 0.25] or messages[:1]
        if self.draw.random() < 0.3:
            at = self.draw.randrange(len(new))
            new[at] = self.message()
        if self.draw.random() < 0.3 and len(new) > 2:
            one, other = self.draw.sample(range(len(new)), 2)
            new[one], new[other] = new[other], new[one]
        return [*new, self.message()]


POLICIES = {
    "default": POLICY,
    "namespace": POLICY.replace(scope="namespace"),
    "first": POLICY.replace(recompute_first=8, recompute_last=3),
    "share": POLICY.replace(recompute_share=0.2),
    "limits": POLICY.replace(max_cuts=2, max_lost_context=0.5, max_new_context=0.5),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_from_the_store_is_described_as_that_from_the_pool(
    both: Both, name: str, seed: int
) -> None:
    """Same tokens, same moved runs in the same terms, and so the same box."""
    talk, policy = Talk(seed), POLICIES[name]
    turns = talk.turns()
    for one in turns:
        both.turn(one, session="chat")
    for _ in range(4):
        prompt = talk.edited(turns[-1])
        seq, _ = joined(prompt)
        session = "chat" if talk.draw.random() < 0.7 else "another"
        with both.pool.plan(seq, policy, keep_last=1, session=session) as wanted:
            found = both.filled(prompt, policy, session=session)
            assert described(found) == described(wanted)
            assert reused(found) == reused(wanted)
            assert gates.terms(found) == gates.terms(wanted)


def test_random_edits_are_of_many_kinds() -> None:
    """Else the tests around this one would compare nothing."""
    seen = set()
    for seed in range(40):
        talk, both = Talk(seed), Both()
        turns = talk.turns()
        both.turn(turns[-1], session="chat")
        found = gates.terms(both.filled(talk.edited(turns[-1]), session="chat"))
        both.close()
        if found is not None:
            seen.add((found.cuts, found.new_context > 0, found.same_conversation))
    assert {one[0] for one in seen} >= {1, 2, 3}
    assert {one[1:] for one in seen} == {(True, True), (False, True)}


@pytest.mark.parametrize("name", ["default", "namespace", "limits"])
@pytest.mark.parametrize("seed", range(40))
def test_a_pool_that_has_lost_some_blocks_is_filled_up(both: Both, name: str, seed: int) -> None:
    """The store's runs are context of the pool's, and the other way round."""
    talk, policy = Talk(seed), POLICIES[name]
    turns = talk.turns()
    for one in turns:
        both.turn(one, session="chat")
    part = kvtrie.RadixIndex(num_blocks=BLOCKS, block_size=BLOCK, min_run=16)
    last, _ = joined(turns[-1])
    ids = both.pool.lookup(last).blocks
    part.insert(last, ids, num_computed=len(last), source=kvtrie.COMPUTED, session="chat")
    part.evict(talk.draw.randrange(1, len(ids)))
    for _ in range(4):
        prompt = talk.edited(turns[-1])
        seq, _ = joined(prompt)
        with both.pool.plan(seq, policy, keep_last=1, session="chat") as wanted:
            found = both.filled(prompt, policy, session="chat", pool=part)
            # What is left of a message between a block of the pool and its end may be short.
            missing = reused(wanted) - reused(found)
            assert len(missing) < 16
            assert reused(found) <= reused(wanted)
            if not missing:
                assert gates.terms(found) == gates.terms(wanted)


# Whole blocks together, so that the pool has all of them.
A, B, C = list(range(100, 150)), list(range(200, 260)), list(range(300, 366))
END = list(range(900, 930))


def kept(both: Both, session: str | None = "chat") -> kvtrie.store.SpanRun:
    """The run of C, stored after A and B."""
    both.turn([A, B, C], session=session)
    return run_of(both.store, C)


def test_a_gate_clears_what_the_store_supplies_as_it_clears_the_pool(both: Both) -> None:
    kept(both)
    box = gates.Box(cuts=gates.Range(most=1), new_context=gates.Range(most=0.0))
    cleared = gate_of(kind_of(box=box), policy=POLICY).policy(POLICY, model="m@1")
    many = kind_of("many cuts", gates.Box(cuts=gates.Range(above=1)))
    bad = kind_of(box=box, own=BAD)
    refused = gate_of(bad, many, policy=POLICY).policy(POLICY, model="m@1")
    for prompt, decision, moves in (
        ([A, C, END], cleared, True),
        # The kind was measured, and is not cleared.
        ([A, C, END], refused, False),
        # Nothing of this kind was measured.
        ([END, C, [7]], cleared, False),
    ):
        seq, _ = joined(prompt)
        found = both.filled(prompt, decision.policy, session="chat")
        with both.pool.plan(seq, decision.policy, keep_last=1, session="chat") as wanted:
            assert found.num_approximate == wanted.num_approximate > 0
            assert (decision.of(wanted) is decision) == moves
            assert (decision.of(found) is decision) == moves


def damaged(store: SpanStore, backend: HostBackend, name: str, how: str) -> None:
    value = backend._values[name]
    context = len(value) - SHAPE.num_bytes(len(C))
    assert context > SEAL_BYTES
    if how == "missing":
        del value[-context:]
    elif how == "altered":
        value[-context + 3] ^= 1
    elif how == "of another run":
        other = run_of(store, B)
        value[-context:] = backend._values[other.name][-context:]
    else:
        value[-1] ^= 1


@pytest.mark.parametrize("how", ["missing", "altered", "of another run", "unsealed"])
def test_a_context_that_cannot_be_verified_moves_nothing_and_is_counted(
    both: Both, how: str
) -> None:
    run = kept(both)
    damaged(both.store, both.backend, run.name, how)
    found = both.filled([A, C, END], session="chat")
    assert reused(found) == set(range(len(A)))
    assert found.num_approximate == 0
    assert both.store.counts()["context_corrupt"] == 1
    # The run itself is as it was: at its own place it is exact, and needs no context.
    found = both.filled([A, B, C, END], session="chat")
    assert len(reused(found)) == len(A + B + C)
    assert found.num_approximate == 0


def test_a_run_that_was_stored_without_its_context_moves_under_no_gate(both: Both) -> None:
    seq, borders = joined([A, B, C])
    for run in both.store.runs(seq, borders):
        both.store.put(run, rows(run.num_tokens, shape=SHAPE))
    found = both.filled([A, C, END], POLICY.replace(scope="namespace"))
    assert reused(found) == set(range(len(A)))
    assert both.store.counts()["context"] == 1


def test_a_run_of_another_salt_is_refused_with_its_context(both: Both) -> None:
    run = kept(both)
    theirs = SPACE.replace(salt="another tenant")
    seq = kvtrie.TokenSequence([*A, *B, *C], theirs)
    (other,) = (one for one in both.store.runs(seq, [50, 110]) if one.start == 110)
    marks = both.store.marks(seq, [50, 110])
    assert both.store.put(other, rows(len(C), shape=SHAPE), marks=marks)
    both.backend._values[run.name] = both.backend._values[other.name]
    found = both.filled([A, C, END], session="chat")
    assert reused(found) == set(range(len(A)))
    assert both.store.counts()["forged"] == 1
    # Marks say nothing to whoever has another key.
    mine = both.store.marks(kvtrie.TokenSequence([*A, *B, *C], SPACE), [50, 110])
    assert marks is not None
    assert mine is not None
    assert mine.num_common(marks) == 0
    assert mine.num_common(mine) == 176


def test_a_shared_prefix_is_one_conversation_as_in_the_pool(both: Both) -> None:
    kept(both, session="somebody else's")
    for prompt in ([A, C, END], [A[:16], C, END], [C, END]):
        seq, _ = joined(prompt)
        found = both.filled(prompt, session="chat")
        with both.pool.plan(seq, POLICY, keep_last=1, session="chat") as wanted:
            assert reused(found) == reused(wanted) or prompt[0] == A[:16]
            assert found.num_approximate == wanted.num_approximate
            assert (found.num_approximate > 0) == (prompt[0] is not C)


def test_a_stricter_rung_takes_what_was_exact_before_it_moved(both: Both) -> None:
    kept(both)
    strict = POLICY.replace(recompute_first=8)
    empty = kvtrie.RadixIndex(num_blocks=BLOCKS, block_size=BLOCK, min_run=16)
    seq, _ = joined([A, C, END])
    with empty.plan(seq, POLICY, keep_last=1, session="chat") as plan:
        taken = both.found(plan, [A, C, END], POLICY, "chat")
        found = FilledPlan(
            plan,
            taken.spans,
            strict,
            is_judged=True,
            sought=POLICY,
            contexts=taken.contexts,
            index=None,
        )
        assert found.stored == [(0, 50), (58, 116)]


def test_what_is_in_place_lends_its_place_to_no_moved_run(both: Both) -> None:
    """It has no context, and a run of another prompt after it was judged as a part of it."""
    head, first, second, changed = (list(range(at, at + 64)) for at in (100, 200, 300, 400))
    moved: dict[str, Any] = {"exact_until": 0, "hops": 1, "policy": POLICY}
    stored: list[tuple[list[list[int]], int, dict[str, Any]]] = [
        ([head, first, second], 2, {}),
        ([changed, first], 0, {}),
        ([changed, first], 1, moved),
    ]
    for messages, number, labels in stored:
        seq, borders = joined(messages)
        run = both.store.runs(seq, borders)[number]
        marks = both.store.marks(seq, borders)
        name = both.store.session_of(SPACE, "chat")
        has = rows(64, shape=SHAPE)
        assert both.store.put(run, has, session=name, marks=marks, **labels)
    prompt = [changed, first, second, END]
    found = both.filled(prompt, session="chat")
    assert {one.start: one.lost_context for one in found.moved_runs} == {64: 1.0, 128: 1.0}
    assert found.num_approximate == 128
    for limits in ({"max_lost_context": 0.3}, {"max_lost_context": 0.0, "max_cuts": 0}):
        assert both.filled(prompt, POLICY.replace(**limits), session="chat").num_approximate == 0


def test_a_context_of_a_run_that_was_replaced_is_no_damage(both: Both) -> None:
    """Another process may write a better one between the two reads."""
    run = kept(both)
    found = both.store.get_ranges(run, [], [])
    assert found is not None
    before = dataclasses.replace(found[0], written=found[0].written - 1)
    assert both.store.get_context(run, before) is None
    counts = both.store.counts()
    assert counts["context"] == 1
    assert counts.get("context_corrupt") is None
    assert both.store.get_context(run, found[0]) is not None


def test_marks_are_bounded_and_say_when_they_are_none() -> None:
    marks = PrefixMarks.of(b"key", np.arange(40, dtype=np.uint32), [7, 33])
    assert marks.marks["position"].tolist() == [7, 16, 32, 33]
    again = PrefixMarks.read(marks.tobytes())
    assert again is not None
    assert again.num_common(marks) == 33
    assert PrefixMarks.read(marks.tobytes()[:-1]) is None
    turned = PrefixMarks(marks.marks[::-1].copy())
    assert PrefixMarks.read(turned.tobytes()) is None
    store = make_store(shape=SHAPE)
    long = kvtrie.TokenSequence(np.arange(16 * 16_385, dtype=np.uint32), SPACE)
    assert store.marks(long, []) is None
    assert store.marks(kvtrie.TokenSequence(long[: 16 * 16_384], SPACE), []) is not None


@pytest.mark.parametrize("seed", range(20))
def test_common_tokens_are_the_last_that_both_have_marked(seed: int) -> None:
    draw = random.Random(seed)
    base = [draw.randrange(9) for _ in range(draw.randrange(1, 200))]
    made = []
    for _ in range(2):
        at = draw.randrange(len(base) + 1)
        tokens = np.array(base[:at] + [draw.randrange(9) for _ in range(60)], np.uint32)
        borders = draw.sample(range(1, len(tokens) + 1), 8)
        made.append((tokens, PrefixMarks.of(b"key", tokens, borders)))
    (one, marks), (other, others) = made
    both = set(marks.marks["position"].tolist()) & set(others.marks["position"].tolist())
    same = [at for at in both if np.array_equal(one[:at], other[:at])]
    assert marks.num_common(others) == others.num_common(marks) == max(same, default=0)


def test_what_too_many_turns_have_supplied_has_the_worst_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant chooses how many turns a prompt is of; each pair of them was compared."""
    compared = []
    num_common = PrefixMarks.num_common

    def counted(one: PrefixMarks, other: PrefixMarks) -> int:
        compared.append(1)
        return num_common(one, other)

    monkeypatch.setattr(PrefixMarks, "num_common", counted)
    tokens = np.arange(16 * 400, dtype=np.uint32)
    paths = {number: PrefixMarks.of(b"key", tokens) for number in range(400)}
    kept = KeptContext(paths)
    known = []
    for number in range(400):
        run = PathStretch(16 * number + 8, 16 * number + 24, 16 * number, number)
        known.append(kept.judge(run, same_conversation=True).lost_context < 1)
        kept.keep(run)
    assert 60 < sum(known) < 70
    assert known[1:60] == [True] * 59
    assert not any(known[70:])
    assert len(compared) <= 2048


def test_neighbours_of_one_path_are_one_stretch() -> None:
    tokens = np.arange(16 * 600, dtype=np.uint32)
    kept = KeptContext({"own": PrefixMarks.of(b"key", tokens)})
    for number in range(599):
        kept.keep(PathStretch(16 * number, 16 * number + 16, 16 * number, "own"))
    run = PathStretch(16 * 599, 16 * 600, 16 * 599, "own")
    assert kept.judge(run, same_conversation=True).lost_context == 0.0


def test_marks_without_a_grid_are_none() -> None:
    marks = PrefixMarks.of(b"key", np.arange(64, dtype=np.uint32), [7])
    assert PrefixMarks.read(marks.tobytes()) is not None
    assert PrefixMarks.read(PrefixMarks(np.delete(marks.marks, 1)).tobytes()) is None


@pytest.mark.parametrize("seed", range(20))
def test_marks_at_most_double_what_a_turn_takes(seed: int) -> None:
    """A prompt of many short messages had the marks of all with each of them."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1_000, 9_000) for _ in range(draw.randrange(1, 90))]
    num_bytes = draw.randrange(1, 50_000)
    chosen = with_marks(sizes, num_bytes)
    count = sum(chosen)
    assert len(chosen) == len(sizes)
    assert count * num_bytes <= sum(sizes)
    assert count == len(sizes) or (count + 1) * num_bytes > sum(sizes)
    least = min(
        (size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen), default=0
    )
    most = max(
        (size for size, is_chosen in zip(sizes, chosen, strict=True) if not is_chosen), default=0
    )
    assert not count or least >= most
    # Messages of ordinary length all have them: also the last token of one that is cut.
    assert all(with_marks([40_000] * 30 + [1_200], 20_000))


def test_a_header_has_the_size_of_its_context() -> None:
    store = make_store(shape=SHAPE)
    seq = kvtrie.TokenSequence(A, SPACE)
    (run,) = store.runs(seq, [])
    marks = store.marks(seq, [50])
    assert marks is not None
    assert store.put(run, rows(50, shape=SHAPE), marks=marks)
    assert store.num_bytes == SHAPE.num_bytes(50) + len(marks.tobytes()) + SEAL_BYTES
    found = store.get_ranges(run, [], [])
    assert found is not None
    assert found[0].context_bytes == len(marks.tobytes())
    assert HEADER_BYTES < store.num_bytes


@pytest.mark.parametrize("count", [20, 88])
def test_few_paths_of_the_pool_are_read(count: int) -> None:
    """Each is as long as what it was computed after: the square of a prompt of many runs."""
    talk = Talk(3)
    parts = [talk.message(40, 41) for _ in range(180)]
    index = kvtrie.RadixIndex(num_blocks=1000, block_size=BLOCK, min_run=16)
    seq, _ = joined(parts[:90])
    table = np.arange(len(seq) // BLOCK, dtype=np.int32)
    index.insert(seq, table, num_computed=len(table) * BLOCK, source=kvtrie.COMPUTED)
    edited = [one for at in range(count) for one in (parts[88 - at], parts[90 + at][:9])]
    seen: list[int] = []

    class Index:
        block_size = BLOCK
        num_blocks = 1000

        def path_tokens(self, block: int) -> Any:
            seen.append(block)
            return index.path_tokens(block)

    asked: Any = Index()
    contexts: Any = SimpleNamespace(marks_of=lambda _: None)
    with index.plan(joined(edited)[0], POLICY.replace(scope="namespace"), pin=False) as plan:
        ends = [run.end for run in plan.moved_runs]
        assert len(ends) >= count
        _filled_plan._paths_of_pool(plan, asked, contexts, {}, ends)
    assert len(seen) == min(len(ends), 64)
