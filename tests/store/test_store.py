"""Names, seals, labels, budgets: what a store promises on any backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.store.kit import (
    OBJECTS,
    SECRET,
    SHAPE,
    SPACE,
    make_store,
    opened,
    read,
    rows,
    run_of,
    same,
)

import kvtrie
from kvtrie import tags
from kvtrie.store import (
    BackendError,
    HostBackend,
    SpanRows,
    SpanRun,
    SpanStore,
    StoredValue,
    StoreKey,
    StoreRefused,
    TenantLimits,
    borders_of,
    keys,
    pieces,
    worth_keeping,
)
from kvtrie.store import runs as runs_module
from kvtrie.store.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtrie.store.keys import Encryption

SEEDS = 10_000
RUNS = 256


def flipped(backend: HostBackend, name: str, bit: int) -> None:
    """Change one bit of a stored value."""
    backend._values[name][bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("encryption", ["none", "aes-256-gcm"])
def test_one_flipped_bit_in_each_of_10000_ranges_and_none_is_used(encryption: Any) -> None:
    if encryption != "none":
        pytest.importorskip("cryptography", reason="cryptography is not installed")
    backend = HostBackend(1 << 24)
    store = make_store(backend, key=StoreKey(SECRET, encryption=encryption))
    draw = np.random.default_rng(7)
    kept = []
    for number in range(RUNS):
        # Each length once, and half of them with the marks of their prompt.
        seq = kvtrie.TokenSequence(range(1_000 * number, 1_000 * number + 1 + number), SPACE)
        (run,) = store.runs(seq, [])
        marks = store.marks(seq, []) if number % 2 else None
        assert store.put(run, rows(len(seq), number), marks=marks)
        kept.append((run, rows(len(seq), number)))
    used, counted = 0, Counter[str]()
    for number in range(SEEDS):
        run, _ = kept[number % RUNS]
        length = run.num_tokens
        start = int(draw.integers(0, length))
        end = int(draw.integers(start + 1, length + 1))
        low, high = SHAPE.bytes_at(*SHAPE.blocks_at(start, end), length)
        size, where = len(backend._values[run.name]), draw.random()
        part = "units"
        if where < 0.2:
            low, high, part = 0, 1024, "header"
        elif where < 0.4 and size > SHAPE.num_bytes(length):
            low, high, part = SHAPE.num_bytes(length), size, "marks"
        bit = int(draw.integers(low * 8, high * 8))
        counted[part] += 1
        flipped(backend, run.name, bit)
        if part == "marks":
            found = store.get_ranges(run, [], [])
            assert found is not None
            used += store.get_context(run, found[0]) is not None
        else:
            used += read(store, run, (start, end)) is not None
        flipped(backend, run.name, bit)
    assert used == 0
    counts = store.counts()
    header = ("forged", "malformed", "version")
    assert counts["corrupt"] == counted["units"] > 0.5 * SEEDS
    assert sum(counts.get(why, 0) for why in header) == counted["header"] > 0.15 * SEEDS
    assert counts["context_corrupt"] == counted["marks"] > 0.05 * SEEDS
    for run, rows_of_run in kept:
        whole = read(store, run, (0, run.num_tokens))
        assert whole is not None
        assert same(whole, rows_of_run)


def test_a_bit_elsewhere_in_the_value_costs_no_other_range() -> None:
    backend = HostBackend(1 << 20)
    store = make_store(backend)
    run, kept = run_of(store, list(range(80))), rows(80)
    store.put(run, kept)
    low, _ = SHAPE.bytes_at(2, 3, 80)
    flipped(backend, run.name, low * 8)
    into = [SHAPE.empty(32), SHAPE.empty(3), SHAPE.empty(32)]
    found = store.get_ranges(run, [(0, 32), (40, 43), (48, 80)], into)
    assert found is not None
    assert found[1] == [True, False, True]
    assert same(into[0], kept.part(0, 32))
    assert same(into[2], kept.part(48, 80))


def test_a_store_that_returns_another_run_is_not_believed() -> None:
    class Confused(HostBackend):
        swapped: tuple[str, str] = ("", "")

        def read(self, name: str, ranges: Any) -> Any:
            one, two = self.swapped
            return super().read({one: two, two: one}.get(name, name), ranges)

    backend = Confused(1 << 20)
    store = make_store(backend)
    runs = [run_of(store, list(range(at, at + 20))) for at in (0, 100)]
    for number, run in enumerate(runs):
        store.put(run, rows(20, number))
    backend.swapped = runs[0].name, runs[1].name
    assert [read(store, run, (0, 20)) for run in runs] == [None, None]
    assert store.counts()["forged"] == 2


def test_units_of_two_values_of_one_run_cannot_be_mixed() -> None:
    values = []
    for seed in (0, 1):
        backend = HostBackend(1 << 20)
        store = make_store(backend)
        run = run_of(store, list(range(40)))
        store.put(run, rows(40, seed))
        found = backend.read(run.name, [(0, SHAPE.num_bytes(40))])
        assert found is not None
        values.append(bytes(found[0]))
    low, _ = SHAPE.bytes_at(1, 2, 40)
    backend.put(run.name, bytearray(values[0][:low] + values[1][low:]))
    assert read(store, run, (0, 16)) is not None
    assert read(store, run, (16, 40)) is None


def test_whoever_lacks_the_key_can_neither_name_nor_forge_a_run() -> None:
    backend = HostBackend(1 << 20)
    store = make_store(backend)
    other = make_store(key=StoreKey(b"a key that somebody else made up"))
    ids = list(range(40))
    mine, theirs = run_of(store, ids), run_of(other, ids)
    assert mine.name != theirs.name
    # The operator knows the name, because it sees requests, and puts a value of its own there.
    forged = SpanRun(0, 40, 0, mine.name, mine.prefix, theirs.key)
    value = HostBackend(1 << 20)
    make_store(value, key=StoreKey(b"a key that somebody else made up")).put(forged, rows(40))
    found = value.read(mine.name, [(0, SHAPE.num_bytes(40))])
    assert found is not None
    backend.put(mine.name, bytearray(found[0]))
    assert read(store, mine, (0, 40)) is None
    assert store.counts()["forged"] == 1


def test_what_could_not_be_verified_is_stored_again() -> None:
    backend = HostBackend(1 << 20)
    store = make_store(backend)
    run, kept = run_of(store, list(range(40))), rows(40)
    for bit in (5_000, SHAPE.bytes_at(1, 2, 40)[0] * 8):
        store.put(run, kept)
        flipped(backend, run.name, bit)
        assert read(store, run, (16, 40)) is None
        assert store.put(run, kept)
        found = read(store, run, (0, 40))
        assert found is not None
        assert same(found, kept)


def test_tenants_share_no_name_and_shared_is_for_everybody() -> None:
    store = make_store()
    spaces = [SPACE, SPACE.replace(salt="tenant-b"), SPACE.replace(salt=kvtrie.SHARED)]
    names = [run_of(store, list(range(40)), space).name for space in spaces]
    assert len(set(names)) == 3
    assert "tenant" not in "".join(names)
    assert "tenant" not in repr(run_of(store, [1]))
    again = SPACE.replace(salt=kvtrie.SHARED)
    assert run_of(store, list(range(40)), again).name == names[2]


def test_after_a_renewal_nothing_is_found_that_was_stored_before() -> None:
    backend = HostBackend(1 << 20)
    store, other = make_store(backend), make_store(backend)
    seq = kvtrie.TokenSequence(range(40), SPACE)

    def written(one: SpanStore) -> bool:
        (run,) = one.runs(seq, [])
        return one.put(run, rows(40))

    def found(one: SpanStore) -> bool:
        return one.exists(one.runs(seq, [])) == [True]

    assert written(store)
    old = store.marks(seq, [])
    store.renew(b"a generation")
    assert not found(store)
    new = store.marks(seq, [])
    assert old is not None
    assert new is not None
    assert new.num_common(old) == 0
    # Others go on as before, and find nothing of what it stores.
    assert found(other)
    assert written(store)
    assert found(store)
    other.delete(other.runs(seq, [])[0])
    assert not found(other)
    store.renew(b"another one")
    assert not found(store)
    assert not found(make_store(backend))


def test_a_name_depends_on_tokens_items_and_adapter_and_on_nothing_before() -> None:
    store = make_store()
    ids = list(range(100, 140))

    def name(before: list[int], digest: bytes = b"image", adapter: str | None = None) -> str:
        image = kvtrie.Item(len(before) + 2, len(before) + 9, digest)
        space = SPACE.replace(adapter=adapter)
        seq = kvtrie.TokenSequence(before + ids, space, [image])
        return store.runs(seq, [len(before)])[-1].name

    assert name(list(range(20))) == name(list(range(50)))
    assert len({name([]), name([], b"other"), name([], adapter="lora")}) == 3


def test_what_an_item_takes_is_part_of_names_and_prefixes() -> None:
    store = make_store()

    def names(item: kvtrie.Item | None, *cuts: int) -> tuple[str, str]:
        seq = kvtrie.TokenSequence(range(40), SPACE, [] if item is None else [item])
        runs = store.runs(seq, [20, *cuts])
        return runs[0].name, next(run.prefix for run in runs if run.start == 20)

    items = [
        None,
        kvtrie.Item(2, 8, b"i"),
        kvtrie.Item(2, 8, b"i", positions=3),
        kvtrie.Item(2, 8, b"i", positions=4),
        kvtrie.Item(2, 9, b"i", positions=4),
        kvtrie.Item(2, 30, b"i", positions=4),
        kvtrie.Item(2, 31, b"i", positions=4),
    ]
    found = [names(item) for item in items]
    assert len({name for name, _ in found}) == len({prefix for _, prefix in found}) == len(items)
    # The prefix is the same wherever the prompt is cut.
    assert [names(item, 1, 5, 15)[1] for item in items] == [prefix for _, prefix in found]


def test_a_position_counts_what_whole_items_before_it_take() -> None:
    store = make_store()
    items = [kvtrie.Item(2, 8, b"i", positions=3), kvtrie.Item(12, 20, b"j", positions=30)]
    items += [kvtrie.Item(22, 26, b"k")]
    runs = store.runs(kvtrie.TokenSequence(range(40), SPACE, items), [5, 8, 16, 20, 30])
    assert [(run.start, run.position) for run in runs] == [
        (0, 0),
        (5, 5),
        (8, 5),
        (16, 13),
        (20, 39),
        (30, 49),
    ]


def test_naming_looks_at_each_item_and_span_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many images was as slow as their square."""
    seen = 0
    whole = keys.items_of

    def counting(items: Any, start: int, end: int) -> bytes:
        nonlocal seen
        seen += len(items)
        return whole(items, start, end)

    monkeypatch.setattr(keys, "items_of", counting)
    monkeypatch.setattr(runs_module, "items_of", counting)
    store = make_store()
    borders = range(0, 10_000, 10)
    items = [kvtrie.Item(at + 2, at + 8, b"i") for at in borders]
    store.runs(kvtrie.TokenSequence(range(10_000), SPACE, items), borders)
    assert seen <= 3 * len(items)


def test_kinds_of_runs_are_those_of_the_spans_that_overlap_them() -> None:
    draw = np.random.default_rng(5)
    store = make_store()
    for _ in range(50):
        ends = np.sort(draw.integers(0, 101, (12, 2)), axis=1).tolist()
        spans = [kvtrie.Span(low, high, f"k{draw.integers(5)}") for low, high in ends]
        runs = store.runs(
            kvtrie.TokenSequence(range(100), SPACE), draw.integers(0, 101, 9).tolist(), spans
        )
        for run in runs:
            over = [one for one in spans if max(one.start, run.start) < min(one.end, run.end)]
            assert run.kinds == tuple(sorted({one.kind for one in over}))


def test_what_is_not_the_stores_is_neither_counted_nor_deleted() -> None:
    backend = HostBackend(1 << 20)
    backend.put("letters.txt", bytearray(5_000))
    backend.put("0123456789abcdef/letters", bytearray(5_000))
    store = make_store(backend, max_bytes=SHAPE.num_bytes(40))
    assert (store.num_runs, store.num_bytes) == (0, 0)
    for at in range(3):
        assert store.put(run_of(store, list(range(at, at + 40))), rows(40))
    assert backend.exists(["letters.txt", "0123456789abcdef/letters"]) == [True, True]


def test_a_run_that_the_backend_has_evicted_is_stored_again() -> None:
    backend = HostBackend(1 << 20)
    store = make_store(backend)
    run = run_of(store, list(range(40)))
    assert store.put(run, rows(40))
    backend.delete(run.name)
    assert store.exists([run]) == [False]
    assert store.num_bytes == 0
    assert store.put(run, rows(40))
    assert store.exists([run]) == [True]


def test_what_was_stored_while_the_backend_was_asked_is_not_forgotten() -> None:
    class Late(HostBackend):
        then: Callable[[], object] | None = None

        def exists(self, names: Any) -> list[bool]:
            found = super().exists(names)
            then, self.then = self.then, None
            if then is not None:
                then()
            return found

    backend = Late(1 << 20)
    store = make_store(backend)
    run = run_of(store, list(range(40)))
    backend.then = lambda: store.put(run, rows(40))
    assert store.exists([run]) == [False]
    assert store.num_runs == 1


def test_bytes_that_cannot_be_deleted_go_on_to_count() -> None:
    class Stuck(HostBackend):
        def delete(self, name: str) -> None:
            raise BackendError(name, reason="unreachable")

    store = make_store(Stuck(1 << 20), max_bytes=SHAPE.num_bytes(40))
    first, second = (run_of(store, list(range(at, at + 40))) for at in (0, 50))
    assert store.put(first, rows(40))
    assert not store.put(second, rows(40))
    assert store.num_bytes == SHAPE.num_bytes(40)
    assert store.exists([first, second]) == [True, False]
    counts = store.counts()
    assert (counts["put_no_room"], counts["delete_unreachable"]) == (1, 1)
    assert "evicted" not in counts


class Locked(HostBackend):
    """Does not delete one value, as a folder in which a file is another user's."""

    locked = ""

    def delete(self, name: str) -> None:
        if name == self.locked:
            raise BackendError(name, reason="unreachable")
        super().delete(name)


def test_a_run_that_cannot_be_deleted_does_not_keep_others_out() -> None:
    """It was the one to leave for each run that came, and none was stored again."""
    backend = Locked(1 << 20)
    store = make_store(backend, max_bytes=3 * SHAPE.num_bytes(40))
    runs = [run_of(store, list(range(at, at + 40))) for at in range(0, 250, 50)]
    backend.locked = runs[0].name
    assert [store.put(run, rows(40)) for run in runs] == [True, True, True, False, True]
    assert store.exists(runs) == [True, False, True, False, True]
    assert store.num_bytes == 3 * SHAPE.num_bytes(40)
    assert store.counts()["delete_unreachable"] == 1


def test_a_header_that_has_no_room_evicts_nothing() -> None:
    store = make_store(max_bytes=SHAPE.num_bytes(40))
    kept = run_of(store, list(range(40)))
    assert store.put(kept, rows(40))
    spans = [kvtrie.Span(0, 40, f"kind-{number:0100}") for number in range(10)]
    (run,) = store.runs(kvtrie.TokenSequence(range(50, 90), SPACE), [], spans)
    with pytest.raises(ValueError, match="the header has"):
        store.put(run, rows(40))
    assert store.exists([kept]) == [True]


def test_a_replacement_that_fails_leaves_the_older_value_counted() -> None:
    class Full(HostBackend):
        is_full = False

        def put(self, name: str, value: bytearray) -> None:
            if self.is_full:
                raise BackendError(name, reason="full")
            super().put(name, value)

    backend = Full(1 << 20)
    store = make_store(backend)
    run = run_of(store, list(range(40)))
    assert store.put(run, rows(40), exact_until=3, hops=1)
    backend.is_full = True
    assert not store.put(run, rows(40))
    assert store.num_bytes == SHAPE.num_bytes(40)
    backend.is_full = False
    assert store.put(run, rows(40))
    assert store.num_bytes == SHAPE.num_bytes(40)


def test_a_run_that_is_read_often_makes_no_list_long() -> None:
    budget = Budget()
    for tenant in range(100):
        budget.add(f"{tenant}/a", num_bytes=1, written=0, exactness=(0, 0))
    for _ in range(10_000):
        budget.read("7/a", (0, 0))
    assert len(budget._tenant_order["7"]) == 1
    assert len(budget._order) == 100
    budget.remove("7/a")
    assert "7" not in budget._tenant_order
    assert len(budget._order) == 99


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("namespace", {"space": SPACE.replace(model="n@1")}),
        ("namespace", {"space": SPACE.replace(rope="yarn:4")}),
        ("geometry", {"shape": replace(SHAPE, num_layers=3)}),
        ("key", {"key": StoreKey(b"another secret, as long")}),
    ],
)
def test_a_store_of_another_is_refused_by_name_at_the_start(
    reason: str, changes: dict[str, Any]
) -> None:
    backend = HostBackend(1 << 20)
    make_store(backend)
    make_store(backend)
    with pytest.raises(StoreRefused) as refused:
        make_store(backend, **changes)
    assert refused.value.reason == reason


def test_a_store_without_its_descriptor_is_not_refused_and_finds_nothing_of_another() -> None:
    """As where Mooncake has evicted it."""
    backend = HostBackend(1 << 20)
    first = make_store(backend)
    ids = list(range(40))
    assert first.put(run_of(first, ids), rows(40))
    others: list[dict[str, Any]] = [
        {"space": SPACE.replace(model="n@1")},
        {"shape": replace(SHAPE, num_layers=3)},
        {"key": StoreKey(b"another secret, as long")},
    ]
    for changes in others:
        backend.delete("kvtrie/store")
        other = make_store(backend, **changes)
        (run,) = other.runs(kvtrie.TokenSequence(ids, changes.get("space", SPACE)), [])
        assert other.exists([run]) == [False]
        assert other.get_ranges(run, [], []) is None
    assert read(first, run_of(first, ids), (0, 40)) is not None


@pytest.mark.parametrize("encryption", ["none", "aes-256-gcm"])
def test_the_descriptor_is_clear_text_and_nothing_else_is_under_encryption(
    encryption: Encryption,
) -> None:
    if encryption != "none":
        pytest.importorskip("cryptography", reason="cryptography is not installed")
    backend = HostBackend(1 << 20)
    store = make_store(backend, key=StoreKey(SECRET, encryption=encryption))
    seq = kvtrie.TokenSequence(range(40), SPACE)
    (run,) = store.runs(seq, [], [kvtrie.Span(0, 40, "answer")])
    assert store.put(run, rows(40), marks=store.marks(seq, []))
    value = bytes(backend._values[run.name])
    for told in (b"answer", b"num_tokens", rows(40).k[0, :16].tobytes()):
        assert (told in value) == (encryption == "none")
    assert b'"m@1"' in backend._values["kvtrie/store"]


@pytest.mark.parametrize(
    ("reason", "old", "new"),
    [
        ("version", b'"version": 2', b'"version": 9'),
        ("encryption", b'"none"', b'"some"'),
        ("malformed", b"kvtrie.store", b"other.format"),
    ],
)
def test_a_store_of_another_version_or_format_is_refused(
    reason: str, old: bytes, new: bytes
) -> None:
    backend = HostBackend(1 << 20)
    make_store(backend)
    found = backend.read("kvtrie/store", [(0, 1024)])
    assert found is not None
    backend.put("kvtrie/store", bytearray(bytes(found[0]).replace(old, new)))
    with pytest.raises(StoreRefused) as refused:
        make_store(backend)
    assert refused.value.reason == reason


def test_a_sequence_of_another_model_is_refused() -> None:
    store = make_store()
    seq = kvtrie.TokenSequence([1], SPACE.replace(model="n@1"))
    with pytest.raises(ValueError, match=r"model 'n@1'.*'m@1'"):
        store.runs(seq, [])


def test_bad_arguments_change_nothing() -> None:
    store = make_store()
    run = run_of(store, list(range(40)))
    wrong = SpanRows(rows(39).k, rows(40).v)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: store.put(run, wrong), "k is uint8"),
        (lambda: store.put(run, rows(40), exact_until=41), "exact_until is 41"),
        (lambda: store.put(run, rows(40), hops=1), "hops 1"),
        (lambda: store.put(run, rows(40), exact_until=3), "hops None"),
        (lambda: store.put(run, rows(40), exact_until=3, hops=256), "hops 256"),
        (lambda: store.get_ranges(run, [(0, 41)], [SHAPE.empty(41)]), r"\(0, 41\)"),
        (lambda: store.get_ranges(run, [(5, 5)], [SHAPE.empty(0)]), r"\(5, 5\)"),
        (lambda: store.get_ranges(run, [(0, 4)], []), "rows for 0"),
        (lambda: store.get_ranges(run, [(0, 4)], [SHAPE.empty(3)]), "k is uint8"),
        (lambda: StoreKey(b"short"), "5 bytes"),
        (lambda: make_store(max_bytes=0), "max_bytes is 0"),
        (lambda: TenantLimits(lifetime=0), "lifetime is 0"),
        (lambda: TenantLimits(lifetime=float("nan")), "lifetime is nan"),
        (lambda: HostBackend(0), "max_bytes is 0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert store.num_runs == 0
    assert store.exists([run]) == [False]


def test_exact_replaces_approximate_and_nothing_replaces_what_is_as_exact() -> None:
    backend = HostBackend(1 << 20)
    store = make_store(backend)
    run = run_of(store, list(range(40)))
    policy = kvtrie.ReusePolicy(max_hops=2)
    assert store.put(run, rows(40, 1), exact_until=16, hops=2, policy=policy)
    assert not store.put(run, rows(40, 2), exact_until=16, hops=2)
    assert store.put(run, rows(40, 3))
    assert not store.put(run, rows(40, 4))
    # Another process knows nothing, and reads what is there.
    other = make_store(backend)
    assert not other.put(run_of(other, list(range(40))), rows(40, 5))
    found = read(store, run, (0, 40))
    assert found is not None
    assert same(found, rows(40, 3))
    assert store.counts()["known"] == 2
    assert other.counts()["known"] == 1


def test_a_header_says_where_a_run_was_computed_and_how_exact_it_is() -> None:
    store = make_store()
    seq = kvtrie.TokenSequence(range(90), SPACE)
    run = store.runs(seq, [30], [kvtrie.Span(40, 50, "answer")])[1]
    policy = kvtrie.ReusePolicy(max_hops=3, min_run=32, scope="namespace", forbid_kinds=["user"])
    session = store.session_of(SPACE, "chat-7")
    store.put(run, rows(60), exact_until=5, hops=3, policy=policy, session=session)
    found = store.get_ranges(run, [], [])
    assert found is not None
    header, _ = found
    assert (header.start, header.num_tokens, header.exact_until, header.hops) == (30, 60, 5, 3)
    assert (header.policy, header.session, header.kinds) == (policy, session, ("answer",))
    assert header.is_at(run)
    moved = store.runs(kvtrie.TokenSequence([*range(20, 50), *range(30, 90)], SPACE), [30])[1]
    assert moved.name == run.name
    assert not header.is_at(moved)


@pytest.mark.parametrize("kind", ["host", *OBJECTS])
def test_the_budget_is_kept_and_what_was_used_last_stays(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        size = SHAPE.num_bytes(32)
        store = make_store(backend, max_bytes=4 * size)
        seq = kvtrie.TokenSequence(range(20_000), SPACE)
        late = store.runs(seq, [19_968])[-1]
        runs = [late, *(run_of(store, list(range(at, at + 32))) for at in range(0, 288, 32))]
        for run in runs[:4]:
            store.put(run, rows(32))
        # Neither many uses in the past nor the cost of a run late in a prompt keeps it.
        for _ in range(3):
            read(store, late, (0, 32))
        read(store, runs[1], (0, 32))
        for run in runs[4:7]:
            store.put(run, rows(32))
            assert store.num_bytes <= 4 * size
        assert store.exists(runs[:7]) == [False, True, False, False, True, True, True]
        assert store.counts()["evicted"] == 3
        assert not store.put(run_of(store, list(range(255))), rows(255))
        assert store.counts()["put_too_large"] == 1


ROOM_FOR_THREE = 3 * SHAPE.num_bytes(32)


def full_of_three() -> tuple[HostBackend, SpanStore, list[SpanRun]]:
    """A store in which three runs of 32 tokens take all room, and a fourth run."""
    backend = HostBackend(1 << 20)
    store = make_store(backend, max_bytes=ROOM_FOR_THREE)
    runs = [run_of(store, list(range(at, at + 32))) for at in range(4)]
    for run in runs[:3]:
        assert store.put(run, rows(32))
    return backend, store, runs


@pytest.mark.parametrize("call", ["put", "is_known", "put by another process"])
def test_a_run_that_is_offered_again_counts_as_used(call: str) -> None:
    """A run of a conversation whose pool has it is never read, and left the store first."""
    backend, store, (hot, cold, last, new) = full_of_three()
    if call == "put by another process":
        store = make_store(backend, max_bytes=ROOM_FOR_THREE)
    if call == "is_known":
        assert store.is_known(hot)
        assert not store.is_known(new)
    else:
        assert not store.put(hot, rows(32))
    assert store.put(new, rows(32))
    there = store.exists([hot, cold, last, new])
    assert there[0]
    assert there[3]
    assert sum(there) == 3


def test_the_header_that_an_offer_reads_is_no_use_by_a_prompt() -> None:
    """A run that was found at the start lost its next use, and left before others."""
    backend, store, (hot, cold, last, new) = full_of_three()
    store = make_store(backend, max_bytes=ROOM_FOR_THREE)
    assert not store.put(hot, rows(32))
    for run in (cold, last):
        assert read(store, run, (0, 32)) is not None
    assert store.is_known(hot)
    assert store.put(new, rows(32))
    assert store.exists([hot, cold, last, new]) == [True, False, True, True]


@pytest.mark.parametrize("call", ["put", "is_known"])
def test_a_turn_that_has_read_a_run_and_offers_it_again_counts_once(call: str) -> None:
    """A use at the end of each turn too keeps conversations that are over longer than others."""
    store = make_store(max_bytes=2 * SHAPE.num_bytes(32))
    first, second, third, fourth = (run_of(store, list(range(at, at + 32))) for at in range(4))

    def offer(run: SpanRun) -> None:
        assert store.is_known(run) if call == "is_known" else not store.put(run, rows(32))

    for run in (second, first):
        assert store.put(run, rows(32))
    for run in (first, second):
        assert read(store, run, (0, 32)) is not None
    offer(first)
    assert store.put(third, rows(32))
    assert store.exists([first, second, third]) == [False, True, True]
    # The next turn reads nothing.
    offer(second)
    offer(second)
    assert store.put(fourth, rows(32))
    assert store.exists([second, third, fourth]) == [True, False, True]


def test_after_a_restart_each_run_is_asked_for_once() -> None:
    """Each offer of a run that was found at the start read its header again."""

    class Asked(HostBackend):
        num_calls = 0

        def exists(self, names: Any) -> Any:
            self.num_calls += 1
            return super().exists(names)

        def read(self, name: str, ranges: Any) -> Any:
            self.num_calls += 1
            return super().read(name, ranges)

    backend = Asked(1 << 20)
    exact, moved = (run_of(make_store(backend), list(range(at, at + 32))) for at in range(2))
    store = make_store(backend)
    assert store.put(exact, rows(32))
    assert store.put(moved, rows(32), exact_until=8, hops=2)
    again = make_store(backend)
    assert not again.put(exact, rows(32))
    assert read(again, moved, (0, 32)) is not None
    backend.num_calls = 0
    assert not again.put(exact, rows(32))
    assert again.is_known(exact)
    assert again.is_known(moved, exact_until=8, hops=2)
    assert not again.is_known(moved, exact_until=8, hops=1)
    assert backend.num_calls == 0
    assert again.put(moved, rows(32))


def test_a_run_that_is_less_exact_than_what_is_asked_for_is_not_used_by_it() -> None:
    store = make_store(max_bytes=2 * SHAPE.num_bytes(32))
    first, second, third = (run_of(store, list(range(at, at + 32))) for at in range(3))
    assert store.put(first, rows(32), exact_until=8, hops=0)
    assert store.put(second, rows(32))
    assert not store.is_known(first)
    assert store.put(third, rows(32))
    assert store.exists([first, second, third]) == [False, True, True]


def test_tenants_share_one_order_of_last_use() -> None:
    size = SHAPE.num_bytes(32)
    store = make_store(max_bytes=3 * size)
    other = SPACE.replace(salt="tenant-b")
    first = run_of(store, list(range(32)))
    theirs = run_of(store, list(range(32)), other)
    last = run_of(store, list(range(1, 33)))
    for run in (first, theirs, last):
        store.put(run, rows(32))
    read(store, first, (0, 32))
    store.put(run_of(store, list(range(2, 34))), rows(32))
    assert store.exists([first, theirs, last]) == [True, False, True]


def test_a_tenant_has_its_own_bytes_and_lifetime() -> None:
    now = [1_000.0]
    size = SHAPE.num_bytes(32)
    store = make_store(
        limits=TenantLimits(max_bytes=2 * size),
        tenants={"tenant-b": TenantLimits(lifetime=10)},
        clock=lambda: now[0],
    )
    other = SPACE.replace(salt="tenant-b")
    mine = [run_of(store, list(range(at, at + 32))) for at in range(0, 128, 32)]
    theirs = [run_of(store, list(range(at, at + 32)), other) for at in range(0, 128, 32)]
    for run in [*theirs, *mine]:
        store.put(run, rows(32))
    assert sum(store.exists(mine)) == 2
    assert sum(store.exists(theirs)) == 4
    now[0] += 11
    assert read(store, theirs[0], (0, 32)) is None
    assert store.counts()["expired"] == 1
    assert store.sweep() == 3
    assert not any(store.exists(theirs))
    assert sum(store.exists(mine)) == 2


def outlived(backend: HostBackend, count: int) -> tuple[SpanStore, list[SpanRun]]:
    """A store with so many runs that have outlived their time."""
    now = [1_000.0]
    store = make_store(backend, limits=TenantLimits(lifetime=10), clock=lambda: now[0])
    runs = [run_of(store, list(range(32 * at, 32 * at + 32))) for at in range(count)]
    for run in runs:
        assert store.put(run, rows(32))
    now[0] += 11
    return store, runs


def test_a_sweep_ends_at_the_first_run_that_cannot_be_deleted() -> None:
    """With a server that is gone, the writer waited for each run's time-out."""
    asked: list[str] = []

    class Gone(HostBackend):
        is_gone = True

        def delete(self, name: str) -> None:
            asked.append(name)
            if self.is_gone:
                raise BackendError(name, reason="unreachable")
            super().delete(name)

    backend = Gone(1 << 20)
    store, _ = outlived(backend, 5)
    assert store.sweep() == 0
    assert len(asked) == 1
    assert "expired" not in store.counts()
    backend.is_gone = False
    assert [store.sweep(2), store.sweep(2), store.sweep(2)] == [2, 2, 1]
    assert store.counts()["expired"] == 5


def test_a_sweep_ends_where_it_cannot_ask_when_a_run_was_written() -> None:
    class Silent(HostBackend):
        silent = ""

        def written(self, name: str) -> float | None:
            if name == self.silent:
                raise BackendError(name, reason="unreachable")
            return None

    backend = Silent(1 << 20)
    store, runs = outlived(backend, 3)
    backend.silent = runs[0].name
    assert [store.sweep(), store.sweep()] == [0, 2]
    assert store.exists(runs) == [True, False, False]
    assert store.counts()["exists_unreachable"] == 2


def test_a_sweep_goes_on_after_a_run_that_cannot_be_deleted_in_the_next() -> None:
    """Each sweep began with it, and ended there."""
    backend = Locked(1 << 20)
    store, runs = outlived(backend, 5)
    backend.locked = runs[1].name
    assert [store.sweep(), store.sweep(), store.sweep()] == [1, 3, 0]
    assert store.exists(runs) == [False, True, False, False, False]
    backend.locked = ""
    assert (store.sweep(), store.num_runs) == (1, 0)


def test_where_a_backend_knows_no_times_a_lifetime_begins_at_the_start() -> None:
    class Timeless(HostBackend):
        def values(self) -> list[StoredValue]:
            return [one._replace(written=None) for one in super().values()]

    now = [1_000.0]

    def opened() -> SpanStore:
        return make_store(backend, limits=TenantLimits(lifetime=100), clock=lambda: now[0])

    backend = Timeless(1 << 20, clock=lambda: now[0])
    store = opened()
    run = run_of(store, list(range(32)))
    assert store.put(run, rows(32))
    now[0] += 90
    store = opened()
    now[0] += 90
    assert store.sweep() == 0
    # It is not used, whatever is known of its time.
    assert read(store, run, (0, 32)) is None
    assert store.counts()["expired"] == 1


def test_pieces_are_those_of_the_text_whatever_was_deleted_before() -> None:
    store = make_store()
    parts = {"system": 40, "question": 300, "reasoning": 90, "answer": 610, "short": 5}
    ids = {
        name: list(range(1000 * number, 1000 * number + length))
        for number, (name, length) in enumerate(parts.items())
    }

    def names(*order: str) -> set[str]:
        seq: list[int] = []
        borders = []
        for part in order:
            borders.append(len(seq))
            seq += ids[part]
        return {run.name for run in store.runs(kvtrie.TokenSequence(seq, SPACE), borders)}

    before = names("system", "question", "reasoning", "answer", "short")
    after = names("system", "question", "answer", "short")
    assert after < before
    assert len(before) - len(after) == 1


def test_pieces_cover_a_prompt_once() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        length = int(draw.integers(0, 2_000))
        borders = draw.integers(0, length + 1, 6).tolist()
        found = pieces(length, borders, longest=100)
        assert [at for one in found for at in range(*one)] == list(range(length))
        assert all(end - start <= 100 for start, end in found)
    with pytest.raises(ValueError, match="borders 0 to 9"):
        pieces(5, [9])


def test_reasoning_that_the_template_drops_is_not_worth_keeping() -> None:
    stream = tags.Tagger.from_ids(user=1, assistant=2, reasoning=(7, 8), end=9).stream()
    thinking, text = list(range(100, 140)), list(range(200, 240))
    turn = [1, *text, 9, 2, 7, *thinking, 8, *text, 9]
    store = make_store()

    def kept(ids: list[int], policy: tags.TurnPolicy) -> set[int]:
        runs = store.runs(kvtrie.TokenSequence(ids, SPACE), borders_of(stream))
        kept = worth_keeping(runs, stream, policy)
        return {at for run in kept for at in range(run.start, run.end)}

    stream.feed(turn[:60])
    assert not kept(turn[:60], tags.TurnPolicy()) & set(range(45, 60)), "still open"
    stream.feed(turn[60:])
    stream.finish()
    assert not kept(turn, tags.TurnPolicy()) & set(range(43, 85))
    assert kept(turn, tags.TurnPolicy()) >= set(range(85, 126))
    assert kept(turn, tags.TurnPolicy(thinking="preserved")) == set(range(len(turn)))


class StoreMachine(RuleBasedStateMachine):
    """A store next to a dict: what is found is what was stored, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = HostBackend(1 << 20)
        self.limit = 6 * SHAPE.num_bytes(48)
        self.store: SpanStore = make_store(self.backend, max_bytes=self.limit)
        self.model: dict[tuple[int, ...], tuple[int, tuple[int, int]]] = {}
        self.broken: set[tuple[int, ...]] = set()

    def _ids(self, first: int, length: int) -> tuple[int, ...]:
        return tuple(range(first * 50, first * 50 + length))

    texts = st.tuples(st.integers(0, 9), st.sampled_from([16, 17, 48]))

    @rule(text=texts, seed=st.integers(0, 99), hops=st.none() | st.integers(0, 2))
    def put(self, text: tuple[int, int], seed: int, hops: int | None) -> None:
        ids = self._ids(*text)
        run = run_of(self.store, list(ids))
        exact = len(ids) if hops is None else 4
        there = ids in self.model and self.store.exists([run])[0] and ids not in self.broken
        stored = self.store.put(run, rows(len(ids), seed), exact_until=exact, hops=hops)
        label = (len(ids) - exact, hops or 0)
        if stored:
            assert not there or label < self.model[ids][1]
            self.model[ids] = (seed, label)
            self.broken.discard(ids)
        elif ids in self.model and ids not in self.broken:
            assert self.model[ids][1] <= label

    @rule(text=texts, start=st.integers(0, 47), length=st.integers(1, 48))
    def read(self, text: tuple[int, int], start: int, length: int) -> None:
        ids = self._ids(*text)
        at = min(start, len(ids) - 1), min(start + length, len(ids))
        at = at if at[0] < at[1] else (0, len(ids))
        run = run_of(self.store, list(ids))
        found = read(self.store, run, at)
        if found is not None:
            assert ids not in self.broken
            assert same(found, rows(len(ids), self.model[ids][0]).part(*at))
        else:
            assert ids in self.broken or not self.store.exists([run])[0]

    @rule(text=texts)
    def delete(self, text: tuple[int, int]) -> None:
        ids = self._ids(*text)
        self.store.delete(run_of(self.store, list(ids)))
        self.model.pop(ids, None)
        self.broken.discard(ids)

    @rule(text=texts, bit=st.integers(0, 1023 * 8))
    def damage_header(self, text: tuple[int, int], bit: int) -> None:
        ids = self._ids(*text)
        run = run_of(self.store, list(ids))
        if self.store.exists([run])[0] and ids not in self.broken:
            flipped(self.backend, run.name, bit)
            self.broken.add(ids)

    @rule()
    def restart(self) -> None:
        self.store = make_store(self.backend, max_bytes=self.limit)

    @invariant()
    def within_the_budget(self) -> None:
        assert self.store.num_bytes <= self.limit
        kept = sum(one.num_bytes for one in self.backend.values() if one.name != "kvtrie/store")
        assert kept == self.store.num_bytes


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
