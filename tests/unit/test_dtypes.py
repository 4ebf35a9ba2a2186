"""Which containers of integers are taken, which are refused, and that nothing wraps silently."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
KINDS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
INTEGERS = [order + kind for order in "<>" for kind in KINDS]


def as_numpy(kind: str) -> Callable[[list[int]], Any]:
    return lambda ids: np.array(ids, dtype=kind)


def read_only(ids: list[int]) -> Any:
    data = np.array(ids, dtype=np.int64)
    data.flags.writeable = False
    return data


CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "list of numpy scalars": lambda ids: [np.int64(token) for token in ids],
    "array.array I": lambda ids: array.array("I", ids),
    "array.array i": lambda ids: array.array("i", ids),
    "array.array q": lambda ids: array.array("q", ids),
    "array.array B": lambda ids: array.array("B", ids),
    "memoryview of an array": lambda ids: memoryview(array.array("I", ids)),
    "memoryview of bytes": lambda ids: memoryview(bytes(ids)),
    "memoryview of numpy": lambda ids: np.array(ids, dtype=np.int64).data,
    "strided memoryview": lambda ids: memoryview(array.array("q", np.repeat(ids, 2).tolist()))[::2],
    "read-only": read_only,
    "strided": lambda ids: np.repeat(np.array(ids, dtype=np.int32), 3)[::3],
    "reversed": lambda ids: np.array(ids[::-1], dtype=np.int64)[::-1],
    "column": lambda ids: np.array([[token, 99] for token in ids], dtype=np.int64)[:, 0],
    "unaligned": lambda ids: np.frombuffer(
        b"\0" + np.array(ids, dtype="<u4").tobytes(), dtype="<u4", offset=1
    ),
    "subclass": lambda ids: np.array(ids, dtype=np.int64).view(type("Mine", (np.ndarray,), {})),
    **{f"numpy {kind}": as_numpy(kind) for kind in INTEGERS},
}

REFUSED: dict[str, tuple[type[Exception], Any]] = {
    "None": (TypeError, None),
    "int": (TypeError, 7),
    "str": (TypeError, "123"),
    "dict": (TypeError, {1: 2}),
    "set": (TypeError, {1, 2}),
    "generator": (TypeError, (i for i in range(3))),
    "list of bool": (TypeError, [1, True, 2]),
    "list of numpy bool": (TypeError, [1, np.True_]),
    "list of float": (TypeError, [1, 2.0]),
    "list of numpy float": (TypeError, [1, np.float64(2)]),
    "list of NaN": (TypeError, [float("nan")]),
    "list of None": (TypeError, [1, None]),
    "list of str": (TypeError, ["1"]),
    "bool array": (TypeError, np.array([True, False])),
    "float array": (TypeError, np.array([1.0, 2.0])),
    "half array": (TypeError, np.array([1, 2], dtype=np.float16)),
    "empty float array": (TypeError, np.array([])),
    "NaN array": (TypeError, np.array([np.nan])),
    "complex array": (TypeError, np.array([1j])),
    "object array": (TypeError, np.array([1, 2], dtype=object)),
    "string array": (TypeError, np.array(["1"])),
    "datetime array": (TypeError, np.array([1, 2], dtype="M8[s]")),
    "timedelta array": (TypeError, np.array([1, 2], dtype="m8[s]")),
    "float array.array": (TypeError, array.array("d", [1.0])),
    "float memoryview": (TypeError, memoryview(array.array("f", [1.0]))),
    "2-D array": (ValueError, np.array([[1, 2]])),
    "2-D empty array": (ValueError, np.zeros((0, 2), dtype=np.int64)),
    "0-D array": (ValueError, np.array(7)),
    "negative": (ValueError, [1, -1]),
    "2**32": (ValueError, [2**32]),
    "2**63": (ValueError, [2**63]),
    "2**64": (ValueError, [2**64]),
    "2**200": (ValueError, [2**200]),
    "-2**63": (ValueError, [-(2**63)]),
    "-2**200": (ValueError, [-(2**200)]),
    "negative i1": (ValueError, np.array([-1], dtype=np.int8)),
    "negative i4": (ValueError, np.array([-1], dtype=np.int32)),
    "negative i8": (ValueError, np.array([5, -(2**40)], dtype=np.int64)),
    "2**32 in i8": (ValueError, np.array([2**32], dtype=np.int64)),
    "2**32 + 1 in u8": (ValueError, np.array([2**32 + 1], dtype=np.uint64)),
    "2**64 - 1 in u8": (ValueError, np.array([2**64 - 1], dtype=np.uint64)),
    "2**32 in big-endian i8": (ValueError, np.array([2**32], dtype=">i8")),
    "2**32 in array.array": (ValueError, array.array("q", [2**32])),
    "negative in a memoryview": (ValueError, memoryview(array.array("i", [-1]))),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_token_ids_are_taken(name: str) -> None:
    ids = [3, 1, 0, 127, 3]
    seq = kvtrie.TokenSequence(CONTAINERS[name](ids), NS)
    assert seq[:].tolist() == ids
    seq.extend(CONTAINERS[name](ids[:2]))
    assert seq[:].tolist() == ids + ids[:2]


@pytest.mark.parametrize("name", CONTAINERS)
def test_block_ids_are_taken(name: str) -> None:
    index = kvtrie.RadixIndex(128, 1)
    seq = kvtrie.TokenSequence([1, 2, 3], NS)
    blocks = CONTAINERS[name]([5, 0, 127])
    done = index.insert(seq, blocks, num_computed=3, source=kvtrie.COMPUTED)
    assert done.blocks.tolist() == [5, 0, 127]
    assert index.discard(CONTAINERS[name]([127, 5])).tolist() == [127, 5]


@pytest.mark.parametrize("kind", INTEGERS)
def test_token_ids_of_every_dtype_up_to_its_limit(kind: str) -> None:
    largest = min(np.iinfo(kind).max, 2**32 - 1)
    data = np.array([0, largest], dtype=kind)
    assert kvtrie.TokenSequence(data, NS)[:].tolist() == [0, largest]


def test_token_ids_are_copied() -> None:
    data = np.array([1, 2, 3], dtype=np.uint32)
    seq = kvtrie.TokenSequence(data, NS)
    data[0] = 9
    assert seq[:].tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", REFUSED)
def test_token_ids_are_refused(name: str) -> None:
    expected, ids = REFUSED[name]
    with pytest.raises(expected):
        kvtrie.TokenSequence(ids, NS)
    seq = kvtrie.TokenSequence([1], NS)
    with pytest.raises(expected):
        seq.extend(ids)
    assert seq[:].tolist() == [1]


@pytest.mark.parametrize("name", REFUSED)
def test_block_ids_are_refused(name: str) -> None:
    expected, ids = REFUSED[name]
    index = kvtrie.RadixIndex(16, 1)
    pool = kvtrie.BlockAllocator(16)
    pool.allocate(16)
    seq = kvtrie.TokenSequence([1, 2, 3], NS)
    before = index.digest()
    with pytest.raises(expected):
        index.insert(seq, ids, num_computed=0, source=kvtrie.COMPUTED)
    with pytest.raises(expected):
        index.discard(ids)
    with pytest.raises(expected):
        pool.free(ids)
    assert index.digest() == before
    assert index.stats().clock == 0
    assert pool.num_free == 0


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32", "int64"])
def test_token_ids_cpu_tensor(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    tensor = torch.tensor([3, 1, 127], dtype=getattr(torch, kind))
    assert kvtrie.TokenSequence(tensor, NS)[:].tolist() == [3, 1, 127]
    assert kvtrie.TokenSequence(tensor[::2], NS)[:].tolist() == [3, 127]


def test_token_ids_wrong_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    for tensor, expected in (
        (torch.tensor([1.0]), TypeError),
        (torch.tensor([True]), TypeError),
        (torch.tensor([1.0], dtype=torch.bfloat16), TypeError),
        (torch.tensor([[1]]), ValueError),
        (torch.tensor(1), ValueError),
        (torch.tensor([-1]), ValueError),
        (torch.tensor([2**32]), ValueError),
    ):
        with pytest.raises(expected):
            kvtrie.TokenSequence(tensor, NS)


def test_counts_numpy_integers_are_taken() -> None:
    index = kvtrie.RadixIndex(np.int64(8), np.uint8(2))
    seq = kvtrie.TokenSequence([1, 2, 3, 4], NS)
    done = index.insert(
        seq, [0, 1], num_computed=np.int32(4), start=np.int64(0), source=kvtrie.COMPUTED
    )
    assert done.blocks.tolist() == [0, 1]
    assert index.lookup(seq, keep_last=np.uint16(1)).num_tokens == 2
    assert index.evict(np.int64(1)).tolist() == [1]
    seq.truncate(np.int64(2))
    assert len(seq) == 2


def test_huge_counts_never_wrap() -> None:
    index = kvtrie.RadixIndex(8, 2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], NS)
    index.insert(seq, [0, 1], num_computed=4, source=kvtrie.COMPUTED)
    assert index.lookup(seq, keep_last=2**31).num_tokens == 0
    assert index.lookup(seq, keep_last=2**62).num_tokens == 0
    with pytest.raises(ValueError, match=r"."):
        index.lookup(seq, start=2**40)
    with pytest.raises(ValueError, match=r"."):
        index.insert(seq, [0, 1], num_computed=2**32 + 4, source=kvtrie.COMPUTED)
    assert index.evict(2**40).tolist() == [1, 0]
