"""The token ids of a format's delimiters and names, from a tokenizer or a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvtrie.tags.ids import MAX_TOKEN

if TYPE_CHECKING:
    from kvtrie.tags.automaton import Spelling
    from kvtrie.tags.formats import Format

# Neighbours that may merge with the first or last token of a delimiter of ordinary text.
_NEIGHBOURS: Final = ("", "\n", "\n\n", " ", "x")
_NEWLINES: Final = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that a tokenizer needs; those of `transformers` have them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text, with its delimiters as special ids."""
        ...

    def decode(self, token_ids: Any) -> Any:  # noqa: ANN401 - transformers takes many types here
        """The text of token ids, delimiters included."""
        ...


class Spellings(NamedTuple):
    """The token ids of a format."""

    delimiters: dict[str, tuple[Spelling, ...]]
    names: dict[str, dict[str, Spelling]]
    recipients: tuple[Spelling, ...]
    newlines: frozenset[int]


def _encode(tokenizer: Tokenizer, text: str) -> Spelling:
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def _between(tokenizer: Tokenizer, before: str, text: str, after: str) -> Spelling:
    """The ids of a text between two others; empty if it cannot be separated from them."""
    whole = _encode(tokenizer, before + text + after)
    front, back = _encode(tokenizer, before), _encode(tokenizer, after)
    # A token that `text` shares with a neighbour belongs to the delimiter.
    while front and whole[: len(front)] != front:
        front = front[:-1]
    whole = whole[len(front) :]
    while back and whole[len(whole) - len(back) :] != back:
        back = back[1:]
    return whole[: len(whole) - len(back)]


def _spell(tokenizer: Tokenizer, text: str, *, several: bool, what: str) -> tuple[Spelling, ...]:
    alone = _encode(tokenizer, text)
    if len(alone) == 1:
        return (alone,)
    if not several:
        msg = (
            f"{what}: the tokenizer has no token {text!r}: it encodes it as {len(alone)} "
            f"tokens, {list(alone)[:8]}"
        )
        raise ValueError(msg)
    found = {alone} if alone else set()
    for before in _NEIGHBOURS:
        for after in _NEIGHBOURS:
            spelling = _between(tokenizer, before, text, after)
            # A spelling that merges with letters is not usable.
            if len(spelling) > 1 and text in tokenizer.decode(list(spelling)):
                found.add(spelling)
    if not found:
        msg = f"{what}: the tokenizer makes no tokens of {text!r}"
        raise ValueError(msg)
    return tuple(sorted(found))


def from_tokenizer(form: Format, tokenizer: object, what: str) -> Spellings:
    """The ids of a format's strings in a tokenizer. Some must be one token."""
    if not isinstance(tokenizer, Tokenizer):
        msg = (
            f"{what}: {type(tokenizer).__name__} is neither a tokenizer (with encode and decode) "
            "nor a mapping from delimiters to ids"
        )
        raise TypeError(msg)
    several = form.text_delimiters()
    delimiters: dict[str, tuple[Spelling, ...]] = {}
    for text, _ in form.delimiters():
        if text in delimiters:
            continue
        try:
            delimiters[text] = _spell(tokenizer, text, several=text in several, what=what)
        except ValueError:
            if text not in form.optional:
                raise
    names: dict[str, dict[str, Spelling]] = {}
    for start, name in form.names():
        spelling = _between(tokenizer, start, name, "")
        if not spelling:
            msg = f"{what}: the tokenizer makes no tokens of {name!r} after {start!r}"
            raise ValueError(msg)
        names.setdefault(start, {})[name] = spelling
    recipients: set[Spelling] = set()
    if form.channels is not None:
        to = form.channels.recipient
        for before in ("assistant", "x", ""):
            spelling = _between(tokenizer, before, to, "functions")
            if spelling:
                recipients.add(spelling)
    return Spellings(delimiters, names, tuple(sorted(recipients)), _newlines(tokenizer))


def _newlines(tokenizer: Tokenizer) -> frozenset[int]:
    found = set()
    for text in _NEWLINES:
        for before in ("x", ""):
            spelling = _between(tokenizer, before, text, "")
            if len(spelling) == 1 and not tokenizer.decode(list(spelling)).strip():
                found.add(spelling[0])
    return frozenset(found)


def spelling_of(value: object, what: str) -> Spelling:
    """One id, or a sequence of ids, as a tuple."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    row = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    spelling: list[int] = []
    for token in row:
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            msg = f"{what} is {value!r}, neither a token id nor a sequence of them"
            raise TypeError(msg)
        if not 0 <= token <= MAX_TOKEN:
            msg = f"{what}: token id {token} is not in [0, {MAX_TOKEN}]"
            raise ValueError(msg)
        spelling.append(int(token))
    if not spelling:
        msg = f"{what} is empty; a delimiter is at least one token"
        raise ValueError(msg)
    return tuple(spelling)


def from_mapping(form: Format, ids: Mapping[str, object], what: str) -> Spellings:
    """The ids of a format's strings in a mapping."""
    wanted = {text for text, _ in form.delimiters()} - form.optional
    wanted |= {name for _, name in form.names()}
    if form.channels is not None:
        wanted.add(form.channels.recipient)
    if missing := sorted(wanted - set(ids)):
        msg = f"{what}: no ids are given for {', '.join(map(repr, missing))}"
        raise ValueError(msg)
    found = {text: spelling_of(value, f"{what}: {text!r}") for text, value in ids.items()}
    names: dict[str, dict[str, Spelling]] = {}
    for start, name in form.names():
        names.setdefault(start, {})[name] = found[name]
    return Spellings(
        {text: (found[text],) for text, _ in form.delimiters() if text in found},
        names,
        () if form.channels is None else (found[form.channels.recipient],),
        frozenset(found[text][0] for text in _NEWLINES if text in found),
    )
