"""vLLM's cache manager of a model with groups, and an index of kvtrie that holds the same KV.

What is stored, replaced and evicted is vLLM's choice. After each of its steps the index gets what
vLLM has cached since, and loses what vLLM has not any more. `SideBySide.ask` then has the
hit length of a prompt from both, and from the rules of both, which are written out here and read
neither side's answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

SPACE = kvtrie.Namespace(model="model", salt=kvtrie.SHARED)
HASHING = get_hash_fn_by_name("xxhash")
init_none_hash(HASHING)
ONE_TOKEN = SamplingParams(max_tokens=1)
# What the two sides may differ by, and nothing else.
LEFT = "left with its block"
ALIGNED = "whole common blocks"
INSIDE = "inside a block"


@dataclass(frozen=True)
class LayerGroup:
    """A group of layers. `block` is tokens per block of vLLM, `window` None for full attention."""

    block: int
    window: int | None = None
    is_state: bool = False

    @property
    def is_full(self) -> bool:
        return self.window is None and not self.is_state

    def spec(self) -> KVCacheSpec:
        if self.is_state:
            return MambaSpec(
                block_size=self.block,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        given: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        if self.window is None:
            return FullAttentionSpec(**given)
        return SlidingWindowSpec(**given, sliding_window=self.window)


@dataclass(frozen=True)
class HitLengths:
    """Hit lengths in tokens, and the names of the rules that make them differ."""

    vllm: int
    kvtrie: int
    reasons: frozenset[str]
    # The deepest position that group 0 alone allows.
    full: int


class SideBySide:
    """Both sides. Exactly one of `groups` has full attention; it may be at any place of the list.

    Args:
        groups: The groups, in vLLM's order.
        unit: Tokens of a block hash of vLLM, and of a block of kvtrie.
        num_blocks: Blocks of vLLM's pool, which all groups share.
        retention: vLLM's `prefix_cache_retention_interval`.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], unit: int, num_blocks: int, retention: int | None
    ) -> None:
        self.groups = groups
        self.unit = unit
        self.common = self.common_block(groups)
        (self.full,) = (number for number, group in enumerate(groups) if group.is_full)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer.{number}"], group.spec())
                    for number, group in enumerate(groups)
                ],
                prefix_cache_retention_interval=retention,
            ),
            max_model_len=1 << 16,
            scheduler_block_size=self.common,
            hash_block_size=unit,
        )
        self.coordinator = self.manager.coordinator
        assert type(self.coordinator) is HybridKVCacheCoordinator
        # vLLM may then end a hit inside a block.
        self.is_fine: bool = self.coordinator.enable_partial_hash_hits
        self.align = unit if self.is_fine else self.common
        # A block of vLLM is several of kvtrie, and every one of them may be the last that is left.
        size = num_blocks * self.common // unit
        names = {number: f"group {number}" for number in range(len(groups)) if number != self.full}
        self.names: dict[int, str] = names
        self.index = kvtrie.RadixIndex(
            size,
            unit,
            seed=0,
            groups=[
                kvtrie.Group.state(name, num_slots=size)
                if groups[number].is_state
                else kvtrie.Group.window(
                    name, window=groups[number].window or 0, num_blocks=size, block_size=unit
                )
                for number, name in names.items()
            ],
        )
        self._hasher = get_request_block_hasher(unit, HASHING)
        self._numbers = count()
        # Where a hash ends, and the hash of the prefix that is one unit shorter.
        self._before: dict[bytes, tuple[int, bytes | None]] = {}
        # What vLLM has: the blocks under each hash, by group; and the units that they cover.
        self.cached: list[dict[bytes, frozenset[int]]] = [{} for _ in groups]
        self.covered: list[set[bytes]] = [set() for _ in groups]
        # What kvtrie has by its rules: an id for each unit, by group.
        self.kept: list[dict[bytes, int]] = [{} for _ in groups]
        self._free = [list(range(size)) for _ in groups]
        # What left kvtrie with a block of group 0, and is still in vLLM.
        self.left: list[set[bytes]] = [set() for _ in groups]

    @staticmethod
    def common_block(groups: Sequence[LayerGroup]) -> int:
        return math.lcm(*(group.block for group in groups))

    def request(self, tokens: Sequence[int]) -> Request:
        name = f"request-{next(self._numbers)}"
        return Request(name, list(tokens), ONE_TOKEN, None, block_hasher=self._hasher)

    def update(self, request: Request | None = None) -> None:
        """Tell the index what vLLM has changed, `request` if it has cached something."""
        hashes: list[bytes] = [] if request is None else request.block_hashes
        before: bytes | None = None
        for number, name in enumerate(hashes, 1):
            self._before[name] = number * self.unit, before
            before = name
        cached = self._look()
        # What a request has is offered at each of its inserts, as docs/groups.md says.
        held: Sequence[list[int]] = [[] for _ in self.groups]
        if request is not None:
            held = self.manager.get_block_ids(request.request_id)
        offered = [
            {
                place
                for name, blocks in now.items()
                if blocks - old.get(name, frozenset()) or not blocks.isdisjoint(own)
                for place in self._places(number, name)
            }
            for number, (now, old, own) in enumerate(zip(cached, self.cached, held, strict=True))
        ]
        self.cached = cached
        self.covered = [
            {place for name in now for place in self._places(number, name)}
            for number, now in enumerate(cached)
        ]
        self._remove()
        offered = [places - ids.keys() for places, ids in zip(offered, self.kept, strict=True)]
        if any(offered):
            assert request is not None
            self._insert(request, hashes, offered)
        stays = zip(self.left, self.covered, self.kept, strict=True)
        self.left = [left & covered - ids.keys() for left, covered, ids in stays]

    def ask(self, tokens: Sequence[int], limit: int) -> HitLengths:
        """The longest hit of at most `limit` tokens, which are fewer than the prompt's."""
        request = self.request(tokens)
        hashes = request.block_hashes
        _, theirs, _ = self.coordinator.find_longest_cache_hit(hashes, limit)
        seq = kvtrie.TokenSequence(tokens, SPACE)
        ours = self.index.lookup(seq, keep_last=len(tokens) - limit, touch=False).num_tokens
        kept = [set(ids) for ids in self.kept]
        by_rules = self._of_kvtrie(kept, hashes, limit, self.unit)
        stayed = [ids | left for ids, left in zip(kept, self.left, strict=True)]
        with_all_left = self._of_kvtrie(stayed, hashes, limit, self.unit)
        # What comes without a block of group 0 (G3) is offered again when that is there.
        assert with_all_left == self._of_kvtrie(self.covered, hashes, limit, self.unit)
        if_aligned = self._of_kvtrie(self.covered, hashes, limit, self.align)
        of_vllm = self._of_vllm(hashes, limit)
        assert ours == by_rules, f"kvtrie finds {ours}, its rules {by_rules}"
        assert theirs == of_vllm, f"vLLM finds {theirs}, its rules {of_vllm}"
        reasons = {
            LEFT: by_rules != with_all_left,
            ALIGNED: with_all_left != if_aligned,
            INSIDE: if_aligned != of_vllm,
        }
        self._check_plan(seq, hashes, len(tokens) - limit, ours)
        return HitLengths(
            theirs,
            ours,
            frozenset(reason for reason, is_one in reasons.items() if is_one),
            self._present(kept[self.full], hashes, limit) * self.unit,
        )

    def check(self) -> None:
        self.index.check()
        assert self.index.stats().indexed == len(self.kept[self.full])
        for number, name in self.names.items():
            assert self.index.group_stats(name).indexed == len(self.kept[number])

    def _look(self) -> list[dict[bytes, frozenset[int]]]:
        cached: list[dict[bytes, frozenset[int]]] = [{} for _ in self.groups]
        for key, blocks in self.manager.block_pool.cached_block_hash_to_block._cache.items():
            ids = [blocks.block_id] if isinstance(blocks, KVCacheBlock) else blocks
            cached[get_group_id(key)][get_block_hash(key)] = frozenset(ids)
        return cached

    def _places(self, number: int, name: bytes) -> list[bytes]:
        """The units that a block covers, by the hashes that end there."""
        group = self.groups[number]
        end, before = self._before[name]
        places = [name]
        if group.is_state:
            return places
        start = (end - 1) // group.block * group.block
        while (end := end - self.unit) > start:
            assert before is not None
            places.append(before)
            before = self._before[before][1]
        return places

    def _remove(self) -> None:
        for number, name in self.names.items():
            ids = self.kept[number]
            gone = [ids.pop(place) for place in ids.keys() - self.covered[number]]
            assert self.index.discard(gone, group=name).tolist() == gone
            self._free[number] += gone
        full = self.kept[self.full]
        places = full.keys() - self.covered[self.full]
        gone = [full.pop(place) for place in places]
        assert self.index.discard(gone).tolist() == gone
        self._free[self.full] += gone
        for number, name in self.names.items():
            # G7: kvtrie keeps nothing at the place of a block that is gone.
            ids = self.kept[number]
            lost = places & ids.keys()
            self.left[number] |= lost
            freed = sorted(ids.pop(place) for place in lost)
            assert self.index.take_freed(group=name).tolist() == freed
            self._free[number] += freed

    def _insert(self, request: Request, hashes: list[bytes], offered: list[set[bytes]]) -> None:
        def ids_at(number: int, places: Sequence[bytes]) -> list[int]:
            ids, free = self.kept[number], self._free[number]
            for place in places:
                if place not in ids:
                    ids[place] = free.pop()
            return [ids[place] for place in places]

        known = set(hashes)
        assert all(places <= known for places in offered)
        path = hashes[: self._present(self.covered[self.full], hashes, len(hashes) * self.unit)]
        assert offered[self.full] <= set(path)
        # vLLM stores a whole common block of all groups, except for the ends of hits inside blocks.
        assert self.is_fine or all(places <= set(path) for places in offered)
        blocks = ids_at(self.full, path)
        given: dict[str, list[tuple[int, int]]] = {}
        for number, name in self.names.items():
            # G3: kvtrie takes nothing beyond the blocks of group 0.
            new = [
                (depth, place)
                for depth, place in enumerate(path)
                if place in offered[number] and place not in self.kept[number]
            ]
            after = self.unit if self.groups[number].is_state else 0
            ids = ids_at(number, [place for _, place in new])
            given[name] = [
                (depth * self.unit + after, one) for (depth, _), one in zip(new, ids, strict=True)
            ]
        done = self.index.insert(
            kvtrie.TokenSequence(request.all_token_ids[:], SPACE),
            blocks,
            num_computed=len(path) * self.unit,
            source=kvtrie.COMPUTED,
            groups=given,
        )
        assert (done.blocks.tolist(), len(done.freed)) == (blocks, 0)
        for name, ids_given in given.items():
            assert done.groups[name].blocks == [one for _, one in ids_given]

    def _present(self, places: set[bytes], hashes: Sequence[bytes], limit: int) -> int:
        """Leading units that are among these."""
        number = 0
        for name in hashes[: limit // self.unit]:
            if name not in places:
                break
            number += 1
        return number

    def _of_kvtrie(
        self, held: Sequence[set[bytes]], hashes: Sequence[bytes], limit: int, step: int
    ) -> int:
        """D5 and G2: the deepest multiple of `step` at which all groups have what they need."""
        present = self._present(held[self.full], hashes, limit) * self.unit
        for end in range(present // step * step, 0, -step):
            if all(
                self._has(number, held[number], hashes, end, self.unit) for number in self.names
            ):
                return end
        return 0

    def _of_vllm(self, hashes: Sequence[bytes], limit: int) -> int:
        """`HybridKVCacheCoordinator`, without its fixed point: the deepest hash of a common end."""
        block, full = self.groups[self.full].block, self.cached[self.full]
        end = 0
        while end + block <= limit and hashes[(end + block) // self.unit - 1] in full:
            end += block
        if self.is_fine:
            inside = range(end + self.unit, min(end + block, limit + 1), self.unit)
            end = max((one for one in inside if hashes[one // self.unit - 1] in full), default=end)
        for found in range(end // self.align * self.align, 0, -self.align):
            if all(
                self._has(number, self.cached[number].keys(), hashes, found, group.block)
                for number, group in enumerate(self.groups)
                if number != self.full
            ):
                return found
        return 0

    def _has(self, number: int, held: Any, hashes: Sequence[bytes], end: int, block: int) -> bool:
        """Whether a group can continue at `end`, from blocks of this size."""
        group = self.groups[number]
        if group.window is None:
            return hashes[end // self.unit - 1] in held
        first = max(0, end - group.window + 1) // block
        return all(
            hashes[(one + 1) * block // self.unit - 1] in held for one in range(first, end // block)
        )

    def _check_plan(
        self, seq: kvtrie.TokenSequence, hashes: Sequence[bytes], keep_last: int, end: int
    ) -> None:
        """A plan continues there, with ids that show it."""
        with self.index.plan(seq, kvtrie.EXACT_ONLY, keep_last=keep_last) as plan:
            assert plan.num_exact == end
            depth = end // self.unit
            assert plan.blocks.tolist() == [self.kept[self.full][place] for place in hashes[:depth]]
            for number, name in self.names.items():
                ids, window = self.kept[number], self.groups[number].window
                if window is None:
                    state = ids[hashes[depth - 1]] if depth else None
                    assert plan.state(name) == state
                    continue
                first = max(0, end - window + 1) // self.unit
                start, blocks = plan.group(name)
                assert blocks.tolist() == [ids[place] for place in hashes[first:depth]]
                assert not depth or start == first * self.unit
