"""What the binding takes for integers, and what it refuses; values are never wrapped."""

from __future__ import annotations

import array
import fractions
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
LARGEST = 2**32 - 1
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u4", ">u8", "<u2"]


class Odd:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Grows:
    """An integer that changes the list that it is in."""

    def __init__(self, home: list[Any]) -> None:
        self.home = home

    def __index__(self) -> int:
        self.home.clear()
        return 1


def tokens(ids: Any) -> list[int]:
    found: list[int] = kvtrie.TokenSequence(ids, SPACE)[:].tolist()
    return found


def packed(values: list[int]) -> Any:
    records = np.zeros(len(values), dtype=np.dtype([("pad", "u1"), ("id", "i8")]))
    records["id"] = values
    return records["id"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_of_every_integer_dtype(dtype: str) -> None:
    assert tokens(np.array([1, 2, 100], dtype=dtype)) == [1, 2, 100]


@pytest.mark.parametrize("dtype", ["i8", "u8", ">i8", "u4", ">u4", ">u8"])
def test_largest_id_survives(dtype: str) -> None:
    assert tokens(np.array([0, LARGEST], dtype=dtype)) == [0, LARGEST]


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array q": lambda ids: array.array("q", ids),
    "array I": lambda ids: array.array("I", ids),
    "memoryview Q": lambda ids: memoryview(array.array("Q", ids)),
    "memoryview of numpy": lambda ids: np.array(ids).data,
    "strided memoryview": lambda ids: memoryview(
        array.array("q", [value for token in ids for value in (token, 0)])
    )[::2],
    "strided": lambda ids: np.array([value for token in ids for value in (token, 0)])[::2],
    "reversed": lambda ids: np.array(ids[::-1])[::-1],
    "row": lambda ids: np.array([ids, ids])[1],
    "column": lambda ids: np.array([ids, ids]).T[:, 0],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), dtype="i8"),
    "misaligned": packed,
    "list of numpy scalars": lambda ids: [np.int64(token) for token in ids],
    "list of __index__": lambda ids: [Odd(token) for token in ids],
    "subclass": lambda ids: np.array(ids).view(np.recarray),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_ids_of_every_form(make: Callable[[list[int]], Any]) -> None:
    assert tokens(make([7, 0, LARGEST, 3])) == [7, 0, LARGEST, 3]


@pytest.mark.parametrize(
    "make", [list, tuple, lambda _: array.array("q"), lambda _: np.zeros(0, int)]
)
def test_no_ids(make: Callable[[list[int]], Any]) -> None:
    assert tokens(make([])) == []


@pytest.mark.parametrize("limit", [0, 1, 3, 4, np.int64(2), 2**62])
@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_a_limit_takes_the_first_ids(make: Callable[[list[int]], Any], limit: int) -> None:
    seq = kvtrie.TokenSequence(make([5, 0, 7]), SPACE, limit=limit)
    assert seq[:].tolist() == [5, 0, 7][:limit]


@pytest.mark.parametrize("code", "qQlbi")
def test_ids_after_the_limit_are_not_read(code: str) -> None:
    ids = array.array(code, [1, 2, -1 if code.islower() else 2**63])
    assert kvtrie.TokenSequence(ids, SPACE, limit=2)[:].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"TokenSequence: ids\[2\] is "):
        kvtrie.TokenSequence(ids, SPACE, limit=3)


def test_a_negative_limit_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="TokenSequence: limit is -1; it must be in"):
        kvtrie.TokenSequence([1], SPACE, limit=-1)


@pytest.mark.parametrize("length", [2, 4096, 4097, 9000])
@pytest.mark.parametrize("kind", ["q", "i", "H"])
def test_an_array_can_grow_once_its_ids_are_read(kind: str, length: int) -> None:
    ids = array.array(kind, range(length))
    seqs = [kvtrie.TokenSequence(ids, SPACE, limit=limit) for limit in (None, length - 1)]
    ids.append(3)
    assert seqs[0][:].tolist() == list(range(length))
    assert seqs[1][:].tolist() == list(range(length - 1))


@pytest.mark.parametrize("length", [4096, 4097])
@pytest.mark.parametrize("bad", [-1, 2**32, 2**63 - 1])
def test_a_long_array_has_the_checks_of_a_short_one(length: int, bad: int) -> None:
    ids = array.array("q", range(length))
    ids[-2] = bad
    message = rf"ids\[{length - 2}\] is {bad}; it must be in \[0, 4294967296\)"
    with pytest.raises(ValueError, match=message):
        kvtrie.TokenSequence(ids, SPACE)
    assert len(kvtrie.TokenSequence(ids, SPACE, limit=length - 2)) == length - 2
    ids.append(3)


def test_ids_are_copied() -> None:
    ids = np.array([1, 2, 3])
    seq = kvtrie.TokenSequence(ids, SPACE)
    ids[:] = 9
    copy = seq[:]
    copy[:] = 8
    assert seq[:].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "ids",
    [
        [True],
        (1, False),
        [1.0],
        [None],
        ["1"],
        [[1]],
        [fractions.Fraction(1)],
        [np.float64(1)],
        [np.bool_(1)],
        np.array([True]),
        np.array([1.0]),
        np.array([float("nan")]),
        np.array([1], dtype=object),
        np.array(["1"]),
        np.array([1], dtype="m8[s]"),
        np.array([(1,)], dtype=[("id", "i8")]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        array.array("d", [1.0]),
        memoryview(b"ab").cast("c"),
        memoryview(bytearray(1)).cast("?"),
        "12",
        b"12",
        bytearray(b"12"),
        {1, 2},
        {1: 2},
        (token for token in [1, 2]),
        None,
        1,
    ],
    # Without addresses, which differ from process to process.
    ids=lambda ids: re.sub(r" at 0x\w+", "", repr(ids)),
)
def test_what_holds_no_integers_is_a_type_error(ids: Any) -> None:
    seq = kvtrie.TokenSequence([1], SPACE)
    with pytest.raises(TypeError, match="TokenSequence"):
        tokens(ids)
    with pytest.raises(TypeError, match=r"TokenSequence\.extend"):
        seq.extend(ids)
    assert seq[:].tolist() == [1]


@pytest.mark.parametrize("value", [-1, 2**32, -(2**63), 2**63 - 1, 2**64 - 1, 2**64, -(2**200)])
def test_id_out_of_range_names_value_and_limit(value: int) -> None:
    said = rf"TokenSequence: ids\[1\] is {value}; it must be in \[0, 4294967296\)"
    with pytest.raises(ValueError, match=said if abs(value) < 2**127 else "beyond every limit"):
        tokens([0, value])
    for dtype in ("i8", "u8", ">i8", "i4", "i1"):
        info = np.iinfo(dtype)
        if info.min <= value <= info.max:
            with pytest.raises(ValueError, match=said):
                tokens(np.array([0, value], dtype=dtype))


@pytest.mark.parametrize("ids", [np.zeros((1, 1), int), np.int64(1), np.zeros((2, 0), int)])
def test_ids_of_other_dimensions_are_a_value_error(ids: Any) -> None:
    with pytest.raises(ValueError, match="dimensions; it must have 1"):
        tokens(ids)


def test_list_that_changes_while_it_is_read() -> None:
    ids: list[Any] = [1, 2, 3]
    ids[1] = Grows(ids)
    with pytest.raises(IndexError):
        tokens(ids)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert tokens(torch.tensor([1, 2, 3], dtype=dtype)) == [1, 2, 3]
    assert tokens(torch.arange(6)[::2]) == [0, 2, 4]
    for bad in (torch.tensor([1.0]), torch.tensor([True]), torch.ones(1, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="TokenSequence: ids"):
            tokens(bad)
    with pytest.raises(TypeError, match="numpy says") as caught:
        tokens(torch.ones(1, dtype=torch.int64, device="meta"))
    assert caught.value.__cause__ is not None
    with pytest.raises(ValueError, match="dimensions"):
        tokens(torch.tensor(1))
    with pytest.raises(ValueError, match="is -1"):
        tokens(torch.tensor([-1]))


@pytest.mark.cuda
def test_cuda_tensor_is_a_type_error() -> None:
    import torch  # noqa: PLC0415 - only with the marker

    with pytest.raises(TypeError, match="cuda"):
        tokens(torch.ones(1, dtype=torch.int64, device="cuda"))


INDEX = kvtrie.RadixIndex(num_blocks=8, block_size=2)
SEQ = kvtrie.TokenSequence([1, 2, 3], SPACE)
CALLS: dict[str, Callable[[Any], object]] = {
    "keep_last": lambda n: INDEX.lookup(SEQ, keep_last=n),
    "start": lambda n: INDEX.lookup(SEQ, start=n),
    "keep_last of plan": lambda n: INDEX.plan(SEQ, keep_last=n),
    "num_computed": lambda n: INDEX.insert(SEQ, [0], num_computed=n, source=kvtrie.COMPUTED),
    "evict": INDEX.evict,
    "truncate": SEQ.truncate,
    "allocate": kvtrie.BlockAllocator(8).allocate,
    "num_blocks": kvtrie.RadixIndex,
    "block_size": lambda n: kvtrie.RadixIndex(8, n),
    "min_run": lambda n: kvtrie.RadixIndex(8, min_run=n),
    "max_candidates": lambda n: kvtrie.RadixIndex(8, max_candidates=n),
    "seed": lambda n: kvtrie.RadixIndex(8, seed=n),
    "hash_bits": lambda n: kvtrie.RadixIndex(8, hash_bits=n),
    "pool": kvtrie.BlockAllocator,
    "span": lambda n: kvtrie.Span(n, 5, "user"),
    "item": lambda n: kvtrie.Item(n, 5, b"x"),
    "exact_until": kvtrie.Imported,
    "hops": lambda n: kvtrie.Imported(0, n),
    "max_hops": lambda n: kvtrie.ReusePolicy(max_hops=n),
    "recompute_first": lambda n: kvtrie.ReusePolicy(recompute_first=n),
}


WRONG: list[Any] = [True, 1.0, float("nan"), "1", None, [1], np.bool_(1)]


@pytest.mark.parametrize(
    ("call", "value"),
    # A seed of None is drawn.
    [(call, value) for call in CALLS for value in WRONG if call != "seed" or value is not None],
    ids=repr,
)
def test_what_is_no_integer_is_a_type_error(call: str, value: Any) -> None:
    before = INDEX.digest()
    with pytest.raises(TypeError):
        CALLS[call](value)
    assert INDEX.digest() == before
    assert len(SEQ) == 3


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [-1, -(2**64), 2**64, 2**200], ids=repr)
def test_integer_out_of_range_is_a_value_error(call: str, value: int) -> None:
    before = INDEX.digest()
    with pytest.raises(ValueError, match=str(value) if abs(value) < 2**127 else "limit"):
        CALLS[call](value)
    assert INDEX.digest() == before
    assert len(SEQ) == 3


@pytest.mark.parametrize(
    "value", [Odd(2), np.int16(2), np.array(2)], ids=lambda v: type(v).__name__
)
def test_integer_by_index(value: Any) -> None:
    assert INDEX.lookup(SEQ, start=value).num_tokens == 0
    assert kvtrie.Span(value, value, "user").start == 2


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: kvtrie.RadixIndex(0), ValueError),
        (lambda: kvtrie.RadixIndex(2**31 + 1), ValueError),
        (lambda: kvtrie.RadixIndex(8, 0), ValueError),
        (lambda: kvtrie.RadixIndex(8, 4097), ValueError),
        (lambda: kvtrie.RadixIndex(8, min_run=7), ValueError),
        (lambda: kvtrie.RadixIndex(8, hash_bits=65), ValueError),
        (lambda: kvtrie.RadixIndex(8, moved_runs=1), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.BlockAllocator(0), ValueError),
        (lambda: kvtrie.BlockAllocator(2**31 + 1), ValueError),
        (lambda: kvtrie.Imported(0, 32768), ValueError),
        (lambda: kvtrie.Span(3, 2, "user"), ValueError),
        (lambda: kvtrie.Span(0, 2, ""), ValueError),
        (lambda: kvtrie.Item(2, 2, b"x"), ValueError),
        (lambda: kvtrie.Item(0, 2, b""), ValueError),
        (lambda: kvtrie.Item(0, 2, bytes(65)), ValueError),
        (lambda: kvtrie.Item(0, 2, "x"), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.ReusePolicy(min_run=7), ValueError),
        (lambda: kvtrie.ReusePolicy(max_hops=32768), ValueError),
        (lambda: kvtrie.ReusePolicy(max_approximate_share=1.5), ValueError),
        (lambda: kvtrie.RadixIndex(8, max_candidates=0), ValueError),
        (lambda: kvtrie.ReusePolicy(max_approximate_share=float("nan")), ValueError),
        (lambda: kvtrie.ReusePolicy(max_approximate_share=True), TypeError),
        (lambda: kvtrie.ReusePolicy(max_approximate_share="1"), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.ReusePolicy(max_cuts=-1), ValueError),
        (lambda: kvtrie.ReusePolicy(max_cuts=65_536), ValueError),
        (lambda: kvtrie.ReusePolicy(max_cuts=1.0), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.ReusePolicy(max_lost_context=1.1), ValueError),
        (lambda: kvtrie.ReusePolicy(max_lost_context=True), TypeError),
        (lambda: kvtrie.ReusePolicy(max_new_context=float("nan")), ValueError),
        (lambda: kvtrie.ReusePolicy(max_new_context=-0.1), ValueError),
        (lambda: kvtrie.ReusePolicy(forbid_kinds="user"), TypeError),
        (lambda: kvtrie.ReusePolicy(forbid_kinds=("",)), ValueError),
        (lambda: kvtrie.ReusePolicy(forbid_kinds=(1,)), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.ReusePolicy(approximate=1), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.Namespace(model="", salt=kvtrie.SHARED), ValueError),
        (lambda: kvtrie.Namespace(model="m", salt=""), ValueError),
        (lambda: kvtrie.Namespace(model="m", salt=None), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.Namespace(model="m"), TypeError),  # type: ignore[call-arg]
        (lambda: kvtrie.Namespace(model=1, salt="s"), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.TokenSequence([1], "m"), TypeError),  # type: ignore[arg-type]
        (lambda: kvtrie.TokenSequence([1], SPACE, [(0, 1)]), TypeError),  # type: ignore[list-item]
        (lambda: kvtrie.TokenSequence([1], SPACE, [kvtrie.Item(0, 2, b"x")]), ValueError),
        (lambda: INDEX.lookup([1, 2]), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.lookup(SEQ, touch=1), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.plan(SEQ, "exact"), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.plan(SEQ, kvtrie.ReusePolicy(min_run=8)), ValueError),
        (lambda: INDEX.insert(SEQ, [0], num_computed=2, source=None), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.insert(SEQ, [8], num_computed=2, source=kvtrie.COMPUTED), ValueError),
        (lambda: INDEX.insert(SEQ, [-1], num_computed=2, source=kvtrie.COMPUTED), ValueError),
        (lambda: INDEX.discard([8]), ValueError),
        (lambda: INDEX.discard(0), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.drop("m"), TypeError),  # type: ignore[arg-type]
        (lambda: INDEX.tag(SEQ, [(0, 1, "user")]), TypeError),  # type: ignore[list-item]
        (lambda: INDEX.tag(SEQ, 1), TypeError),  # type: ignore[arg-type]
    ],
)
def test_wrong_argument_changes_nothing(make: Callable[[], object], error: type) -> None:
    before = INDEX.digest()
    with pytest.raises(error):
        make()
    assert INDEX.digest() == before


def test_position_in_a_sequence() -> None:
    seq = kvtrie.TokenSequence([5, 6, 7], SPACE)
    assert [seq[0], seq[-1], seq[np.int8(1)]] == [5, 7, 6]
    assert type(seq[0]) is int
    for slice_ in (
        slice(None),
        slice(1, 9),
        slice(-2, None),
        slice(None, None, -1),
        slice(0, 3, 2),
    ):
        assert seq[slice_].tolist() == [5, 6, 7][slice_]
        assert seq[slice_].dtype == np.uint32
    assert list(seq) == [5, 6, 7]
    for position in (3, -4, 2**80):
        with pytest.raises(IndexError):
            seq[position]
    bad: Any
    for bad in (True, 1.0, "1"):
        with pytest.raises(TypeError):
            seq[bad]
