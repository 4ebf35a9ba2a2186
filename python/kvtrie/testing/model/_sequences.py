"""Sequences, and tokens in comparable form."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from kvtrie import Item, Namespace, TokenSequence
from kvtrie.testing.model._arguments import TOKEN_LIMIT, Integers, as_count, as_integers, expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Token: TypeAlias = int | tuple[int, bytes, int, int, int]
"""The comparable form of a token: the id, or inside an item (id, digest, offset in it, positions
and tokens of the whole item), the last two 0 if the item does not say how many positions it takes.
"""

Tokens: TypeAlias = tuple[Token, ...]


def effective(ids: Sequence[int], items: Sequence[Item]) -> Tokens:
    """Comparable tokens: in an item, the id with what the item is and the offset."""
    tokens: list[Token] = list(ids)
    for item in items:
        extent = (item.positions or 0, item.num_tokens or 0)
        for place in range(item.start, item.end):
            tokens[place] = (ids[place], bytes(item.digest), place - item.start, *extent)
    return tuple(tokens)


def sort_key(tokens: Tokens) -> list[tuple[int, ...] | tuple[int, int, bytes, int, int, int]]:
    """Sorts tokens by id, then by item; tokens without an item come first."""
    return [(t, 0) if isinstance(t, int) else (t[0], 1, *t[1:]) for t in tokens]


def shift(tokens: Tokens, at: int) -> int:
    """How far the position of token `at` is from its number, as whole items before it say.

    Inside an item that says how many positions it takes, that of its first token.
    """
    ends = [t for t in tokens[:at] if not isinstance(t, int) and t[2] + 1 == t[4]]
    return sum(positions - num_tokens for *_, positions, num_tokens in ends)


def common(left: Tokens, right: Tokens) -> int:
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))


def _is_cut(item: Item) -> bool:
    return (item.num_tokens or 0) > item.end - item.start


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
        if new and self._items and _is_cut(self._items[-1]):
            message = f"nothing follows {self._items[-1]!r}, which lacks tokens"
            raise ValueError(message)
        for item in items:
            expect(item, Item, "an item")
            if not end <= item.start < item.end <= len(self._ids) + len(new):
                message = f"{item!r} is empty, overlaps another or leaves the new ids"
                raise ValueError(message)
            if _is_cut(item) and item.end < len(self._ids) + len(new):
                message = f"nothing follows {item!r}, which lacks tokens"
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
            item if item.end <= n else item.replace(end=n) for item in self._items if item.start < n
        ]
        self._tokens = effective(self._ids, self._items)


AnySequence: TypeAlias = ModelSequence | TokenSequence


def read(seq: AnySequence) -> tuple[Namespace, Tokens]:
    """Namespace and tokens of a sequence, read again at every call."""
    if isinstance(seq, ModelSequence):
        return seq.namespace, seq.tokens
    expect(seq, TokenSequence, "seq")
    return seq.namespace, effective(seq[0 : len(seq)].tolist(), seq.items)
