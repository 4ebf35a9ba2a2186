"""Weights of JSON: what is heavy is not read, whatever its form, and what is not heavy is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.fleet import documents
from kvtrie.fleet.documents import HEAVIEST, HeavyError, read_json, weight

EIGHT_MB = 8 << 20


def filled(piece: bytes, head: bytes = b"[", tail: bytes = b"0]") -> bytes:
    return head + piece * ((EIGHT_MB - len(head) - len(tail)) // len(piece)) + tail


def keys() -> bytes:
    return b'{"":0' + b"".join(b',"%x":0' % number for number in range(800_000)) + b"}"


HEAVY = {
    "floats": filled(b"0.1,"),
    "exponents": filled(b"1e5,"),
    "integers": filled(b"1,"),
    "empty lists": filled(b"[],"),
    "empty objects": filled(b"{},"),
    "nested lists": filled(b"[" * 60 + b"]" * 60 + b","),
    "brackets": b"[" * EIGHT_MB,
    "words": filled(b"null,"),
    "strings": filled(b'"",'),
    "keys": keys(),
    "after an escaped quote": filled(b"[],", b'["\\\\\\"",'),
    "after a backslash": filled(b"[],", b'["\\\\",'),
    "no JSON at its end": filled(b"[],", tail=b'"'),
    "floats between two doubles": filled(b"2." + b"4703282292062327" * 47 + b"e-308,"),
    "integers of 4,300 digits": filled(b"7" * 4_300 + b","),
    "one integer": b"7" * EIGHT_MB,
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_document_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(json, "loads", read.append)
    with pytest.raises(HeavyError, match=f"^JSON of a weight above {HEAVIEST}$"):
        read_json(HEAVY[name])
    assert read == []


def test_a_heavy_document_is_weighed_in_part_alone() -> None:
    """Up to the first piece of 1 MiB that makes it too heavy."""
    assert HEAVIEST < weight(HEAVY["empty lists"]) < 4 * HEAVIEST


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_another_encoding_is_not_json(encoding: str) -> None:
    """Whose quotes are bytes of other characters here."""
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        read_json('["\u2222é", [], []]'.encode(encoding, "replace"))


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("text", "is_heavy"),
    [
        (b"[%s, 1]" % (b"7" * 64), False),
        (b"[%s, 1]" % (b"7" * 65), True),
        (b"[1, 2, 0.%s]" % (b"7" * 65), True),
        (b"%s" % (b"7" * 65), True),
        (b'["%s", 12345, "%s"]' % (b"7" * 65, b'\\"' * 9 + b"7" * 500), False),
    ],
    ids=["64 digits", "65 digits", "65 digits of a fraction", "nothing else", "in texts"],
)
def test_numbers_of_many_digits_are_heavy(
    text: bytes, is_heavy: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a number takes longer to read than its length says."""
    monkeypatch.setattr(documents, "_PIECE", piece)
    assert (weight(text) > HEAVIEST) == is_heavy


@pytest.mark.parametrize(
    ("text", "document"),
    [(b'\xef\xbb\xbf{"a": 1}', {"a": 1}), (b'["\xed\xa0\x80"]', ["\ud800"])],
    ids=["a mark of the order of bytes", "half a surrogate pair"],
)
def test_what_python_reads_of_utf_8_is_read(text: bytes, document: Any) -> None:
    assert read_json(text) == json.loads(text) == document


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "document",
    [
        {"messages": [message('"a", [b]: {c}, \\ 1.5e3,\n' * (EIGHT_MB // 40))]},
        {"messages": [message("\U0001f600" * (EIGHT_MB // 4 - 100))]},
        {"prompt": list(range(100_000, 100_000 + HEAVIEST - 100))},
        {"messages": [message("Is it so?")] * 25_000},
        {"tools": [{"type": "function", "function": {"parameters": {"a": {}}}}] * 10_000},
    ],
    ids=["text of marks", "unicode", "ids", "messages", "tools"],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_large_document_of_few_values_is_read(document: Any, *, is_ascii: bool) -> None:
    assert read_json(json.dumps(document, ensure_ascii=is_ascii).encode()) == document


def weighed(document: object) -> int:
    """By its values, not by its text."""
    if isinstance(document, dict):
        inside = [weighed(one) + 4 for one in document.values()]
    elif isinstance(document, list):
        inside = [weighed(one) for one in document]
    elif isinstance(document, str):
        return 0
    else:
        return 4 * sum(json.dumps(document).count(mark) for mark in ".eE")
    return 4 + sum(inside) + max(0, len(inside) - 1)


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('",[]{}:\\.e\u2222\n'), inner),
)


@given(DOCUMENTS, st.booleans(), st.sampled_from([1, 2, 7, 1 << 20]))
def test_a_weight_is_that_of_the_values(document: Any, is_ascii: bool, piece: int) -> None:
    text = json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE", piece)
        assert weight(text, 1 << 60) == weighed(document)
