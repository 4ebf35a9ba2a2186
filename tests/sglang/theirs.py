"""Run SGLang's own unit tests of its prefix cache against kvtrie's, from outside.

Their files are read from a checkout of SGLang and are not part of this repository. In each of them
`RadixCache` and `UnifiedRadixCache` are replaced: a test that builds one gets kvtrie's cache, with
the pools and settings that the test gives. Each test ends as one of:

- passed: it ran to its end, and the cache counted no failure;
- not applicable: with a reason. It builds no cache; it looks into nodes of a radix tree, or calls
  what `BasePrefixCache` does not have; it asks for a policy, a component or a mode that kvtrie
  refuses at start-up; it is of a release with another interface, and fails with the installed
  SGLang's own cache as well; or it is of `UnifiedRadixCache` alone, and fails with SGLang's
  `RadixCache` too;
- failed: it passes with SGLang's own cache, and not with kvtrie's. The exit code is then 1.

Files of other releases are read as far as they can be: what SGLang has moved since is found at its
place, results of a match have the ``device_indices`` that they had, and what is gone ends the test
that uses it as not applicable.

Usage: ``python tests/sglang/theirs.py FOLDER``, the folder ``test`` of a checkout, or a file.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import sys
import unittest
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, DecLockRefParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvtrie.integrations.sglang._handles import Handle
from kvtrie.integrations.sglang._version import installed
from kvtrie.integrations.sglang.cache import KvtrieCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

FILES: Final = (
    "registered/unit/mem_cache/test_radix_cache_unit.py",
    "registered/unit/mem_cache/test_radix_force_miss.py",
    "registered/unit/mem_cache/test_unified_radix_cache_unittest.py",
    "registered/unit/mem_cache/test_decode_radix_lock_ref.py",
    "manual/test_schedule_policy.py",
)
"""Their files that build a `RadixCache` or a `UnifiedRadixCache` without a server."""

_MOVED: Final = {
    "sglang.srt.mem_cache.unified_cache.components.tree_component": (
        "sglang.srt.mem_cache.unified_cache.components.base"
    ),
}
"""Modules by the names that they had."""
_OF_NODES: Final = frozenset(
    "children component_data event_hash_value evicted hash_value hit_count id key"
    " last_access_time lock_ref parent priority value".split()
)
"""What a test reads of a `TreeNode`, and a handle has not."""
_OF_TREES: Final = frozenset(
    "components evictable_leaves evictable_size_ protected_size_ tree_components tree_core".split()
)
"""Attributes of SGLang's caches that `BasePrefixCache` does not have."""
_SIMULATED_TOKENS: Final = 1024


class _NotApplicable(unittest.SkipTest):
    """A test cannot apply to another cache than SGLang's."""


@dataclass(frozen=True)
class Outcome:
    """How one of their tests ended.

    Attributes:
        test: Its class and name.
        status: "passed", "not applicable" or "failed".
        reason: Why it does not apply, or the last line of what failed.
        num_skipped: Of a test that passed: its subtests that do not apply.
    """

    test: str
    status: str
    reason: str = ""
    num_skipped: int = 0


class _Matched(MatchResult):
    """A match with its slots, which results of a match had up to SGLang 0.5.20."""

    device_indices: torch.Tensor


def _matched(cache: Any, found: MatchResult) -> MatchResult:
    result = _Matched(*found)
    slots = cache.path_device_indices(found.last_device_node)
    result.device_indices = slots[: found.device_prefix_len].clone()
    return result


class _Simulated:
    """How their tests build a cache without pools."""

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
        **others: Any,
    ) -> Any:
        params: Any = CacheInitParams(
            disable=disable,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=mock_allocator,
            page_size=page_size,
            enable_kv_cache_events=enable_kv_cache_events,
            **others,
        )
        return cls(params)  # type: ignore[call-arg] # the caches have it


class _Theirs(_Simulated, RadixCache):
    """SGLang's own."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return _matched(self, super().match_prefix(params))

    def full_evictable_size(self) -> int:
        size: int = self.evictable_size()
        return size

    def sanity_check(self) -> None:
        """It has none."""


class _Receipt(DecLockRefParams):
    """What a lock is given back with, as tests of other releases make it: it says nothing."""

    def __init__(self, **_: object) -> None:
        super().__init__()


class _TheirsUnified(UnifiedRadixCache):
    """SGLang's own; a lock that is given back without its receipt has the last one of its node."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        self._receipts: dict[Any, list[DecLockRefParams]] = {}

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return _matched(self, super().match_prefix(params))

    def inc_lock_ref(self, node: Any) -> Any:
        taken = super().inc_lock_ref(node)
        self._receipts.setdefault(node, []).append(taken.to_dec_params())
        return taken

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> Any:
        receipt = self._receipts[node].pop()
        return super().dec_lock_ref(node, receipt if isinstance(params, _Receipt) else params)


class _Ours(_Simulated, KvtrieCache):
    """kvtrie's, built from what SGLang's are built from."""

    built: Final[list[_Ours]] = []
    """The caches of the test that runs."""

    def __init__(self, params: CacheInitParams) -> None:
        refused = {
            "a disabled cache: SGLang then asks no factory": params.disable,
            f"eviction policy {params.eviction_policy!r}": params.eviction_policy != "lru",
            "bigram keys of EAGLE": params.is_eagle,
            "a cache with sessions": params.enable_session_radix_cache,
            "components other than full attention": tuple(
                params.tree_components or (ComponentType.FULL,)
            )
            != (ComponentType.FULL,),
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise _NotApplicable(f"refused at start-up: {name}")
        size = getattr(params.token_to_kv_pool_allocator, "size", None)
        num_tokens = size if isinstance(size, int) else _SIMULATED_TOKENS
        self.built.append(self)
        super().__init__(params, num_tokens // params.page_size, "model")

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return _matched(self, super().match_prefix(params))

    def sanity_check(self) -> None:
        """SGLang's walks its tree: of kvtrie's, sizes add up, and no call has failed."""
        assert self.evictable_size() + self.protected_size() == self.total_size()
        assert len(self.all_values_flatten()) == self.total_size()
        assert not self.counts, dict(self.counts)

    def __getattr__(self, name: str) -> Any:
        is_theirs = hasattr(UnifiedRadixCache, name) and not hasattr(BasePrefixCache, name)
        if is_theirs or name in _OF_TREES:
            raise _NotApplicable(f"not of BasePrefixCache: .{name}")
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def _of_node(handle: Handle, name: str) -> Any:
    if name in _OF_NODES:
        raise _NotApplicable(f"looks into nodes of SGLang's tree: .{name}")
    raise AttributeError(f"{type(handle).__name__} has no {name!r}")


class _OwnAllocator(TokenToKVPoolAllocator):
    """Frees what it is given: their fixtures give one of tokens to a cache of pages too."""


class _Gone(type):
    """Of a class that the installed SGLang does not have: its use ends the test."""

    def __getattr__(cls, name: str) -> Any:
        raise _NotApplicable(f"of another release: {cls.__name__}.{name}")

    def __call__(cls, *_args: object, **_kwargs: object) -> Any:
        raise _NotApplicable(f"of another release: {cls.__name__}")


_INSTEAD: Final = {"CustomTestCase": unittest.TestCase, "get_device": lambda: "cpu"}
"""Theirs tries tests again, and waits for a GPU; a fixture's pools are in memory of the host."""


def _imported(module: str, name: str) -> Any:
    """What their file imports, or what stands for it where SGLang has it no more."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    try:
        return getattr(importlib.import_module(_MOVED.get(module, module)), name)
    except (AttributeError, ImportError):
        return _Gone(name, (), {})


class _Imports(ast.NodeTransformer):
    """Imports from SGLang, by `_imported`."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module is None or not node.module.startswith("sglang."):
            return node
        lines = [
            f"{one.asname or one.name} = __imported__({node.module!r}, {one.name!r})"
            for one in node.names
        ]
        new = ast.parse("\n".join(lines)).body
        for line in new:
            for each in ast.walk(line):
                ast.copy_location(each, node)
        return new


def load(path: Path) -> ModuleType:
    """One of their files as a module, with the imports that the installed SGLang has.

    Raises:
        SyntaxError: It is not of this Python.
        Exception: What its own top level raises.
    """
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    module.__dict__["__imported__"] = _imported
    tree = ast.fix_missing_locations(_Imports().visit(ast.parse(path.read_text())))
    exec(compile(tree, str(path), "exec"), module.__dict__)  # noqa: S102 - it is what the user names
    return module


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _tests(one)
        else:
            yield one


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _run(
    module: ModuleType, test: unittest.TestCase, caches: dict[str, Any]
) -> unittest.TestResult:
    """Run one test with these caches in place of those that its file imports."""
    replaced = {name: value for name, value in caches.items() if hasattr(module, name)}
    result = unittest.TestResult()
    with (
        mock.patch.multiple(module, **replaced),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        test.run(result)
    return result


_KVTRIE: Final = {
    "RadixCache": _Ours,
    "UnifiedRadixCache": _Ours,
    "TokenToKVPoolAllocator": _OwnAllocator,
    "DecLockRefParams": _Receipt,
}
_SGLANG: Final = {
    "RadixCache": _Theirs,
    "UnifiedRadixCache": _TheirsUnified,
    "DecLockRefParams": _Receipt,
}
_OF_ONE_KIND: Final = {"UnifiedRadixCache": _Theirs, "DecLockRefParams": _Receipt}
"""SGLang's cache without components, where a test builds the one that has them."""


def _outcome(module: ModuleType, test: unittest.TestCase) -> Outcome:
    """Run one of their tests with kvtrie's cache, and where it fails, with their own."""
    name = ".".join(test.id().split(".")[-2:])
    _Ours.built.clear()
    result = _run(module, test, _KVTRIE)
    skipped = [reason for _, reason in result.skipped]
    problems = [_last_line(text) for _, text in result.failures + result.errors]
    counted = [dict(cache.counts) for cache in _Ours.built if cache.counts]
    if counted:
        problems.append(f"the cache counted failures: {counted}")
    if any(one is test for one, _ in result.skipped) and not counted:
        return Outcome(name, "not applicable", skipped[0])
    if not _Ours.built:
        return Outcome(name, "not applicable", (skipped or ["builds no cache"])[0])
    if not problems:
        return Outcome(name, "passed", num_skipped=len(skipped))
    if not _run(module, test, _SGLANG).wasSuccessful():
        reason = f"fails with SGLang {installed()}'s own cache as well"
        return Outcome(name, "not applicable", reason)
    if hasattr(module, "UnifiedRadixCache"):
        other = _run(module, test, _OF_ONE_KIND)
        if not other.wasSuccessful():
            why = _last_line((other.failures + other.errors)[0][1])
            return Outcome(name, "not applicable", f"of UnifiedRadixCache alone: {why}")
    return Outcome(name, "failed", problems[0])


def outcomes(path: Path) -> list[Outcome]:
    """Run the tests of one of their files."""
    module = load(path)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    with mock.patch.object(Handle, "__getattr__", _of_node, create=True):
        return [_outcome(module, test) for test in _tests(suite)]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run their files, and say how each test ended.

    Returns:
        The exit code: 1 if a test failed, 2 if there was none to run.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the folder `test` of a checkout, or a file")
    parser.add_argument("-v", "--verbose", action="store_true", help="name each test")
    options = parser.parse_args(arguments)
    paths = [options.path]
    if options.path.is_dir():
        paths = [one for file in FILES if (one := options.path / file).exists()]
    total: Counter[str] = Counter()
    for path in paths:
        done = outcomes(path)
        total.update(one.status for one in done)
        _say(f"{path.name}: {dict(Counter(one.status for one in done))}")
        reasons = Counter(one.reason for one in done if one.status == "not applicable")
        for reason, count in reasons.most_common():
            _say(f"  {count:4} not applicable: {reason}")
        for one in done:
            if options.verbose or one.status == "failed":
                _say(f"  {one.status}: {one.test} {one.reason}")
    _say(f"all, with SGLang {installed()}: {dict(total)}")
    return 2 if not total else int(bool(total["failed"]))


if __name__ == "__main__":
    sys.exit(main())
