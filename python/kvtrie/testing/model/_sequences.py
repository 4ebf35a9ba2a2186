"""Sequences, and tokens in comparable form."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from kvtrie import Item, Namespace, TokenSequence
from kvtrie.testing.model._arguments import TOKEN_LIMIT, Integers, as_count, as_integers, expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Token: TypeAlias = int | tuple[int, bytes, int]
"""The comparable form of a token: the id, or inside an item (id, digest, offset in it)."""

Tokens: TypeAlias = tuple[Token, ...]


def effective(ids: Sequence[int], items: Sequence[Item]) -> Tokens:
    """Comparable tokens: in an item, the id with the item's digest and the offset."""
    tokens: list[Token] = list(ids)
    for item in items:
        for position in range(item.start, item.end):
            tokens[position] = (ids[position], bytes(item.digest), position - item.start)
    return tuple(tokens)


def sort_key(tokens: Tokens) -> list[tuple[int, int, bytes, int]]:
    """Sorts tokens by id, then by item; tokens without an item come first."""
    return [(t, 0, b"", 0) if isinstance(t, int) else (t[0], 1, t[1], t[2]) for t in tokens]


def common(left: Tokens, right: Tokens) -> int:
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))


class ModelSequence:
    """`kvtrie.TokenSequence` without cached state; only it has `tokens`, in comparable form."""

    def __init__(self, ids: Integers, namespace: Namespace, items: Sequence[Item] = ()) -> None:
        expect(namespace, Namespace, "namespace")
        self._namespace = namespace
        self._ids: list[int] = []
        self._items: list[Item] = []
        self._tokens: Tokens = ()
        self.extend(ids, items)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    @property
    def tokens(self) -> Tokens:
        return self._tokens

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, where: int) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> npt.NDArray[np.uint32]: ...

    def __getitem__(self, where: int | slice) -> int | npt.NDArray[np.uint32]:
        if isinstance(where, slice):
            return np.array(self._ids[where], dtype=np.uint32)
        return self._ids[where]

    def __repr__(self) -> str:
        return f"ModelSequence({self._ids}, {self._namespace}, items={self._items})"

    def extend(self, ids: Integers, items: Sequence[Item] = ()) -> None:
        new = as_integers(ids, "ids", TOKEN_LIMIT)
        end = len(self._ids)
        for item in items:
            expect(item, Item, "an item")
            if not end <= item.start < item.end <= len(self._ids) + len(new):
                message = f"{item!r} is empty, overlaps another or leaves the new ids"
                raise ValueError(message)
            end = item.end
        self._ids += new
        self._items += items
        self._tokens = effective(self._ids, self._items)

    def truncate(self, n: int) -> None:
        n = as_count(n, "n")
        if n > len(self._ids):
            message = f"truncate to {n}, but the sequence has {len(self._ids)} tokens"
            raise ValueError(message)
        del self._ids[n:]
        self._items = [
            item if item.end <= n else Item(item.start, n, item.digest)
            for item in self._items
            if item.start < n
        ]
        self._tokens = effective(self._ids, self._items)


AnySequence: TypeAlias = ModelSequence | TokenSequence


def read(seq: AnySequence) -> tuple[Namespace, Tokens]:
    """Namespace and tokens of a sequence, read again at every call."""
    if isinstance(seq, ModelSequence):
        return seq.namespace, seq.tokens
    expect(seq, TokenSequence, "seq")
    return seq.namespace, effective(seq[0 : len(seq)].tolist(), seq.items)
