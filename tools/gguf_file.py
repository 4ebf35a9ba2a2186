"""Reads GGUF files: metadata, and tensors as float32, a few rows at a time."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_VERSION: Final = 3
_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
# Types of metadata with one size, as numpy writes them.
_PLAIN: Final = dict(
    enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"))
)
_NUM_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape in torch's order, its type, and its first byte in the file."""

    shape: tuple[int, ...]
    ggml_type: int
    start: int


class GgufFile:
    """The metadata and the tensors of a file.

    Raises:
        ValueError: It is not GGUF of version 3.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._bytes[:4] != b"GGUF" or self._bytes[4:8] != struct.pack("<I", _VERSION):
            msg = f"{path} is not a GGUF file of version {_VERSION}"
            raise ValueError(msg)
        self._at = 8
        num_tensors, num_fields = self._number("<u8"), self._number("<u8")
        self.fields: dict[str, Any] = {
            self._string(): self._value(self._number("<u4")) for _ in range(num_fields)
        }
        infos = {self._string(): self._info() for _ in range(num_tensors)}
        data = -(-self._at // _ALIGNMENT) * _ALIGNMENT
        self.tensors = {
            name: TensorInfo(info.shape, info.ggml_type, data + info.start)
            for name, info in infos.items()
        }

    def rows(self, name: str) -> Iterator[Floats]:
        """The rows of a tensor in order, some million values at a time."""
        info = self.tensors[name]
        if info.ggml_type not in _FORMATS:
            msg = f"{name}: ggml type {info.ggml_type} is not supported"
            raise ValueError(msg)
        per_block, num_bytes, decode = _FORMATS[info.ggml_type]
        *rows, width = info.shape
        num_rows, blocks = prod(rows), width // per_block
        step = max(1, _NUM_AT_ONCE // width)
        for first in range(0, num_rows, step):
            taken = min(step, num_rows - first)
            raw = np.frombuffer(
                self._bytes,
                np.uint8,
                taken * blocks * num_bytes,
                info.start + first * blocks * num_bytes,
            )
            yield decode(raw.reshape(-1, num_bytes)).reshape(taken, width)

    def tensor(self, name: str) -> Floats:
        """A whole tensor."""
        return np.concatenate(list(self.rows(name))).reshape(self.tensors[name].shape)

    def _number(self, kind: str) -> int:
        return int(self._numbers(kind, 1)[0])

    def _numbers(self, kind: str, count: int) -> NDArray[Any]:
        found = np.frombuffer(self._bytes, kind, count, self._at)
        self._at += found.nbytes
        return found

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._bytes, self._at)
        start = self._at + 8
        self._at = start + length
        return self._bytes[start : self._at].decode()

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - metadata has many types
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_PLAIN[kind], 1)[0].item()
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return self._numbers(_PLAIN[kind], count).tolist()

    def _info(self) -> TensorInfo:
        shape = self._numbers("<u8", self._number("<u4")).tolist()
        return TensorInfo(tuple(reversed(shape)), self._number("<u4"), self._number("<u8"))


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, as a column."""
    found: Floats = blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)
    return found


def _nibbles(packed: Bytes) -> Bytes:
    """The low halves of a block's bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    fifth = np.unpackbits(blocks[:, 2:6], axis=-1, bitorder="little")
    codes = (_nibbles(blocks[:, 6:22]) | fifth << 4).astype(np.int8) - 16
    return _half(blocks, 0) * codes


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_k(blocks: Bytes) -> Floats:
    """Eight groups of 32, each with a scale and a least value of six bits."""
    six = blocks[:, 4:16]
    low, mid, high = six[:, :4], six[:, 4:8], six[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    least = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scaled = (_half(blocks, 0) * scales)[:, :, None] * codes
    found: Floats = scaled - (_half(blocks, 2) * least)[:, :, None]
    return found


def _q6_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16, each with a scale of eight bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    packed = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    codes = (low | (packed >> shifts & 3) << 4).astype(np.int8) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    found: Floats = scales[:, :, None] * codes.reshape(-1, 16, 16)
    return found


# By ggml's number: values in a block, its bytes, and what decodes blocks.
_FORMATS: Final[dict[int, tuple[int, int, Callable[[Bytes], Floats]]]] = {
    0: (1, 4, _f32),
    3: (32, 20, _q4_1),
    6: (32, 22, _q5_0),
    8: (32, 34, _q8_0),
    12: (256, 144, _q4_k),
    14: (256, 210, _q6_k),
}
