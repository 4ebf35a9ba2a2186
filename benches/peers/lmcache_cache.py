"""LMCache's side of every comparison: its blend matcher and its token hasher, loaded alone.

They are driven as LMCache's server drives them: a stored sequence is hashed chunk by chunk (BLAKE3,
each with its prefix), and every chunk but the first is registered with the matcher; a prompt is
hashed likewise for its cached prefix, and the matcher looks for registered chunks at every position
of it.

Both are unchanged. The package's `__init__` files, which start a device backend, are skipped; torch
and the module of device-memory handles, which types name and nothing here uses, are replaced by
empty modules.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from workloads.documents import Tokens

from peers.harness import Untyped

_SERVER = "lmcache.v1.multiprocess"
_PACKAGES = (
    "lmcache",
    "lmcache.v1",
    "lmcache.v1.platform",
    "lmcache.v1.platform.base",
    _SERVER,
    f"{_SERVER}.modules",
    f"{_SERVER}.modules.blend",
)


class _Handle:
    """A placeholder for a handle of device memory, which nothing here uses."""

    Serialize = Deserialize = None


def _loaded() -> tuple[Untyped, Untyped]:
    found = importlib.util.find_spec("lmcache")
    if found is None or not found.submodule_search_locations:
        message = "lmcache_cache: the package lmcache is not installed here"
        raise ImportError(message)
    root = Path(found.submodule_search_locations[0])
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    torch, handles = ModuleType("torch"), ModuleType("ipc_wrapper")
    torch.__dict__.update(dtype=type("dtype", (), {}), Size=type("Size", (tuple,), {}))
    handles.__dict__["DeviceIPCWrapper"] = _Handle
    sys.modules["lmcache.v1.platform.base.ipc_wrapper"] = handles
    before = sys.modules.get("torch")
    sys.modules["torch"] = torch
    try:
        importlib.import_module(f"{_SERVER}.custom_types")
    finally:
        # Later imports must not find the empty module in place of torch.
        if before is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = before
    matcher = importlib.import_module(f"{_SERVER}.modules.blend.matcher")
    return matcher, importlib.import_module(f"{_SERVER}.token_hasher")


_MATCHER, _HASHER = _loaded()


@dataclasses.dataclass(frozen=True)
class Found:
    """What LMCache found of a prompt."""

    prefix: int
    matches: list[Untyped]

    def covered(self) -> int:
        """Tokens of the prompt in the prefix or in a match, each counted once."""
        total, end = self.prefix, self.prefix
        for match in sorted(self.matches, key=lambda match: int(match.cur_st)):
            total += max(0, match.cur_ed - max(end, match.cur_st))
            end = max(end, match.cur_ed)
        return total


class Theirs:
    """LMCache's hasher and matcher with everything stored."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.hasher = _HASHER.TokenHasher(chunk_size)
        self.matcher = _MATCHER.BlendTokenRangeMatcher(chunk_size)
        self._stored: dict[bytes, list[int]] = {}

    def store(self, tokens: Tokens) -> None:
        """Store the whole chunks of a sequence."""
        listed = tokens[: len(tokens) // self.chunk_size * self.chunk_size].tolist()
        hashes = self.hasher.compute_chunk_hashes(listed)
        for number, digest in enumerate(hashes):
            start = number * self.chunk_size
            self._stored.setdefault(digest, listed[start : start + self.chunk_size])
        # Chunk 0 can only be found as a prefix.
        self.matcher.on_new_token_hashes(listed, hashes, start_chunk_idx=1)

    def stored(self, digest: bytes) -> list[int]:
        """The tokens of a stored chunk."""
        return self._stored[digest]

    def prefix(self, tokens: Sequence[int]) -> int:
        found = 0
        for digest in self.hasher.compute_chunk_hashes(tokens):
            if digest not in self._stored:
                break
            found += self.chunk_size
        return found

    def match(self, tokens: Sequence[int]) -> list[Untyped]:
        matches: list[Untyped] = self.matcher.match_sub_sequence(tokens)
        return matches

    def find(self, tokens: Sequence[int]) -> Found:
        return Found(self.prefix(tokens), self.match(tokens))
