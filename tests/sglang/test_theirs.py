"""What `theirs` says of tests as SGLang's are: whether they apply, and whether they pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.sglang import theirs

from kvtrie.integrations.sglang._version import installed

if TYPE_CHECKING:
    from pathlib import Path

_FILE = """
import unittest
from array import array
from unittest import mock

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.was_here import Gone


def cache_of(ids, **settings):
    cache = RadixCache.create_simulated(**settings)
    cache.insert(InsertParams(key=RadixKey(array("q", ids))))
    return cache


def match(cache, ids):
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids))))


class TestCache(unittest.TestCase):
    def test_match(self):
        found = match(cache_of([5, 6, 7]), [5, 6, 8])
        self.assertEqual(found.device_indices.tolist(), [5, 6])

    def test_match_and_disabled(self):
        for disable in (False, True):
            with self.subTest(disable=disable):
                self.assertEqual(match(cache_of([1], disable=disable), [1])[0], 1 - disable)

    def test_key(self):
        self.assertEqual(len(RadixKey(array("q", [1]))), 1)

    def test_node(self):
        self.assertEqual(match(cache_of([1, 2]), [1]).last_device_node.lock_ref, 0)

    def test_tree(self):
        self.assertFalse(cache_of([1, 2]).evictable_leaves is None)

    def test_gone(self):
        self.assertEqual(Gone(cache_of([1])), 1)

    def test_wrong_in_both(self):
        self.assertEqual(match(cache_of([1]), [1])[0], 2)

    def test_whole_leaves(self):
        cache = cache_of([1, 2, 3], mock_allocator=mock.Mock(device="cpu"))
        self.assertEqual(cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted, 3)

    def test_counted(self):
        cache = cache_of([1])
        cache.evict(EvictParams())
        cache.evict(EvictParams(num_tokens=cache.total_size() - 1.5))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, theirs.Outcome]:
    path: Path = tmp_path_factory.mktemp("theirs") / "test_like_theirs.py"
    path.write_text(_FILE)
    return {one.test.removeprefix("TestCache."): one for one in theirs.outcomes(path)}


def test_what_holds_of_the_cache_passes_with_slots_as_older_results_had_them(
    found: dict[str, theirs.Outcome],
) -> None:
    assert found["test_match"] == theirs.Outcome("TestCache.test_match", "passed")


def test_subtests_that_do_not_apply_are_counted(found: dict[str, theirs.Outcome]) -> None:
    done = found["test_match_and_disabled"]
    assert (done.status, done.num_skipped) == ("passed", 1)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("test_key", "builds no cache"),
        ("test_node", "looks into nodes of SGLang's tree: .lock_ref"),
        ("test_tree", "not of BasePrefixCache: .evictable_leaves"),
        ("test_gone", "of another release: Gone"),
        ("test_wrong_in_both", f"fails with SGLang {installed()}'s own cache as well"),
    ],
)
def test_what_cannot_apply_has_a_reason(
    found: dict[str, theirs.Outcome], test: str, reason: str
) -> None:
    assert (found[test].status, found[test].reason) == ("not applicable", reason)


def test_what_only_sglang_does_fails(found: dict[str, theirs.Outcome]) -> None:
    # SGLang evicts leaves, of any length; kvtrie evicts pages (docs/sglang.md).
    done = found["test_whole_leaves"]
    assert (done.status, done.reason) == ("failed", "AssertionError: 1 != 3")


def test_a_failure_that_the_cache_answered_as_a_miss_fails(
    found: dict[str, theirs.Outcome],
) -> None:
    done = found["test_counted"]
    assert (done.status, "evict" in done.reason) == ("failed", True)


def test_the_exit_code_says_whether_one_failed_and_whether_there_was_one(tmp_path: Path) -> None:
    assert theirs.main([str(tmp_path)]) == 2
    path = tmp_path / "test_some.py"
    path.write_text(_FILE)
    assert theirs.main([str(path)]) == 1
    path.write_text(_FILE[: _FILE.index("    def test_wrong_in_both")])
    assert theirs.main([str(path)]) == 0
