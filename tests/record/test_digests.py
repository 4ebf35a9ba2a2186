"""Which prompts have blocks and windows in common, against the tokens themselves."""

from __future__ import annotations

import itertools
import random
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrie.record import Digester, new_key, read_key

KEY = bytes(range(32))


def digester(min_run: int = 32, key: bytes = KEY, block_size: int = 16) -> Digester:
    return Digester(key, block_size=block_size, min_run=min_run)


def ids(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(tokens, np.uint32)


def windows(one: Digester, tokens: list[int], salt: str | None = None) -> list[tuple[int, bytes]]:
    gaps, found = one.windows(ids(tokens), one.space(salt, None))
    starts = np.cumsum(np.frombuffer(gaps, np.uint8), dtype=np.int64).tolist()
    assert len(found) == 8 * len(starts)
    return [(start, found[8 * at : 8 * at + 8]) for at, start in enumerate(starts)]


def words(count: int, seed: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


@settings(max_examples=150, deadline=None)
@given(
    min_run=st.sampled_from([16, 17, 31, 32, 64, 255, 256]),
    seed=st.integers(0, 1 << 32),
    before=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    after=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    more=st.integers(0, 200),
    # Few different tokens: ties between windows, and runs in common that nobody made.
    vocabulary=st.sampled_from([1, 2, 3, 1 << 32]),
)
def test_a_run_of_min_run_tokens_is_found_wherever_it_is(
    min_run: int,
    seed: int,
    before: tuple[int, int],
    after: tuple[int, int],
    more: int,
    vocabulary: int,
) -> None:
    one = digester(min_run)
    run = words(min_run + more, seed, vocabulary)
    found = []
    for number in (0, 1):
        head = words(before[number], seed + 1 + number, vocabulary)
        tail = words(after[number], seed + 3 + number, vocabulary)
        inside = [
            (start - len(head), what)
            for start, what in windows(one, [*head, *run, *tail])
            if len(head) <= start and start + one.window <= len(head) + len(run)
        ]
        found.append(inside)
    # The same windows of the run in both prompts, except near its ends.
    common = sorted(set(found[0]) & set(found[1]))
    span = min_run - one.window + 1
    assert common
    assert common[0][0] < span
    assert common[-1][0] + one.window > len(run) - span
    # Together they cover it: nothing is left out between them.
    assert all(second - first <= span for (first, _), (second, _) in itertools.pairwise(common))
    assert span < one.window


def test_equal_digests_mean_equal_tokens() -> None:
    one, seen = digester(16, block_size=4), dict[bytes, tuple[int, ...]]()
    for seed in range(200):
        tokens = words(100, seed, 3)
        for start, what in windows(one, tokens):
            held = tuple(tokens[start : start + one.window])
            assert seen.setdefault(what, held) == held
        blocks = one.blocks(ids(tokens), one.space(None, None))
        for at in range(25):
            held = tuple(tokens[4 * at : 4 * at + 4])
            assert seen.setdefault(blocks[8 * at : 8 * at + 8], held) == held


def test_only_whole_blocks_have_digests() -> None:
    one = digester()
    space = one.space(None, None)
    assert [len(one.blocks(ids(words(count, 1, 99)), space)) for count in (0, 15, 16, 47)] == [
        *(0, 0, 8, 16)
    ]


@pytest.mark.parametrize("period", [1, 2, 9, 10_000])
def test_no_prompt_has_more_than_one_window_per_token(period: int) -> None:
    """docs/record.md says what the record of a hostile prompt takes at most."""
    one = digester(min_run=16)
    space = one.space(None, None)
    tokens = ids([at % period for at in range(10_000)])
    parts = (*one.windows(tokens, space), one.blocks(tokens, space))
    assert sum(len(b64encode(part)) for part in parts) < 12.75 * len(tokens)


@pytest.mark.parametrize("count", [0, 1, 16, 31])
def test_prompts_shorter_than_min_run_have_no_windows(count: int) -> None:
    assert windows(digester(), words(count, 1, 99)) == []


def test_namespaces_and_keys_have_nothing_in_common() -> None:
    tokens = words(500, 1, 1 << 32)
    first, other = digester(), digester(key=new_key())
    spaces = [
        *((first, first.space(*one)) for one in ((None, None), ("a", None), (None, "a"))),
        (other, other.space(None, None)),
    ]
    seen: set[bytes] = set()
    for one, space in spaces:
        found = one.blocks(ids(tokens), space) + one.windows(ids(tokens), space)[1]
        digests = {found[at : at + 8] for at in range(0, len(found), 8)}
        assert len(digests) > 31  # the blocks; which windows come in is up to the key
        assert not digests & seen
        seen |= digests
    assert len({one.space_name(space) for one, space in spaces}) == 4
    assert first.key_id != other.key_id
    assert KEY.hex() not in first.key_id


def test_names_are_sampled_evenly_and_always_the_same_way() -> None:
    one = digester()
    shares = [one.share(f"request-{number}") for number in range(2000)]
    assert shares == [digester().share(f"request-{number}") for number in range(2000)]
    assert 0.22 < sum(share < 0.25 for share in shares) / 2000 < 0.28
    assert one.name("request", "x") != one.name("session", "x")
    assert one.name("request", "\ud800") != one.name("request", "?")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"key": bytes(15)}, "the key must have 16 to 64 bytes, not 15"),
        ({"key": bytes(65)}, "the key must have 16 to 64 bytes, not more than 64"),
        ({"min_run": 15}, "min_run must be from 16 to 256, not 15"),
        ({"min_run": 257}, "min_run must be from 16 to 256, not 257"),
        ({"block_size": 0}, "block_size must be from 1 to 4096, not 0"),
    ],
    ids=str,
)
def test_what_a_digester_refuses(given: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Digester(**{"key": KEY, "block_size": 16, "min_run": 32, **given})  # type: ignore[arg-type]


def test_a_key_file_of_the_wrong_length(tmp_path: object) -> None:
    path = tmp_path / "key"  # type: ignore[operator]
    path.write_bytes(bytes(70))
    with pytest.raises(ValueError, match="key must have 16 to 64 bytes, not more than 64"):
        read_key(path)
