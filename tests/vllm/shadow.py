"""What every slot of vLLM's pool should hold, followed from the scheduler's output alone.

The shadow records whose token a slot has, at which position, and whether all before it was exact.
It detects a read of an unwritten slot, of other tokens or of another tenant's; a copy from a block
that was allocated again; a slot that is written twice; approximate KV under a hash that plain
requests compute.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.vllm.names import parent_of
from vllm.v1.core.kv_cache_utils import get_block_hash

if TYPE_CHECKING:
    from tests.vllm.inside import Inside
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class Content:
    request: Request
    at: int
    position: int
    exact: bool | None

    @property
    def token(self) -> object:
        """The token, which is known by the time it is read."""
        return tokens_of(self.request)[self.at]


def tokens_of(request: Request) -> list[object]:
    """The tokens of a request; in the place of those of an image, what they are of it."""
    tokens: list[object] = request._all_token_ids
    if not request.mm_features:
        return tokens
    known: list[object] = vars(request).setdefault("tokens_of_shadow", [])
    if not known:
        known += tokens
        for one in request.mm_features:
            first = one.mm_position.offset
            for at in range(first, first + one.mm_position.length):
                known[at] = (tokens[at], one.identifier, at - first)
    known += tokens[len(known) :]
    return known


def _space(request: Request) -> tuple[str | None, ...]:
    lora = request.lora_request
    return (request.cache_salt, *((lora.lora_name, lora.lora_path) if lora else ()))


class Shadow:
    def __init__(self, inside: Inside, block_size: int) -> None:
        self._inside = inside
        self._size = block_size
        self._slots: list[list[Content | None]] = [[None] * block_size for _ in inside.pool.blocks]
        self._cached: list[tuple[KVCacheBlock, Any, Request, int]] = []
        self._verified: dict[str, int] = {}
        self._fails = False
        self.num_moved = self.num_exact_copies = self.num_rows = self.num_in_rows = 0
        self.reused: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._watch()

    def _watch(self) -> None:
        pool, scheduler = self._inside.pool, self._inside.scheduler
        get, cache, schedule = pool.get_new_blocks, pool.cache_full_blocks, scheduler.schedule

        def get_new_blocks(count: int) -> list[KVCacheBlock]:
            blocks: list[KVCacheBlock] = get(count)
            for block in blocks:
                self._slots[block.block_id] = [None] * self._size
            return blocks

        def cache_full_blocks(request: Request, blocks: list[KVCacheBlock], **given: Any) -> None:
            cache(request=request, blocks=blocks, **given)
            for number in range(given["num_cached_blocks"], given["num_full_blocks"]):
                block = blocks[number]
                self._cached.append((block, block.block_hash, request, number))

        def following(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._follow(output)
            return output

        pool.get_new_blocks = get_new_blocks
        pool.cache_full_blocks = cache_full_blocks
        scheduler.schedule = following

    def expect_failures(self, *, expected: bool = True) -> None:
        """Whether copies fail from here on: their blocks are computed instead."""
        self._fails = expected

    def _table(self, request_id: str) -> list[int]:
        table: list[int] = self._inside.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        return table

    def _follow(self, output: Any) -> None:
        requests = self._inside.scheduler.requests
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        metadata = output.kv_connector_metadata
        for load in getattr(metadata, "loads", ()):
            assert output.has_sync_kv_loads, "copies come after the forward pass that reads them"
            if not self._fails:
                self._copy(load)
        for name in output.preempted_req_ids:
            self._verified.pop(name, None)
        for name, start in starts.items():
            if start < self._verified.get(name, 0):
                self._verified.pop(name, None)
        self._check_limits(output)
        rows = {name for name in output.num_scheduled_tokens if name not in requests}
        counts = {
            name: one for name, one in output.num_scheduled_tokens.items() if name not in rows
        }
        for name in rows:
            self._write_row(name, starts[name], output)
        for name, count in counts.items():
            self._count_reuse(name, starts[name], starts[name] + count)
            request, table = requests[name], self._table(name)
            for position in range(starts[name], starts[name] + count):
                content = Content(request, position, position, None)
                self._write(table[position // self._size], position % self._size, content)
        if self._fails:
            return
        for name, count in counts.items():
            self._verify(requests[name], starts[name], count)
        self._check_cached()

    def _check_limits(self, output: Any) -> None:
        """A step has no more sequences and tokens than the workers have room for."""
        scheduler, counts = self._inside.scheduler, output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        assert total == sum(counts.values()) <= scheduler.max_num_scheduled_tokens
        # Workers keep the state of running requests that a step does not have.
        names = counts.keys() | {request.request_id for request in scheduler.running}
        assert len(names) <= scheduler.max_num_running_reqs
        assert all(count > 0 for count in counts.values())

    def _write_row(self, name: str, start: int, output: Any) -> None:
        """A piece of a request that the same step has, at a later position."""
        parent = parent_of(name)
        request, table = self._inside.scheduler.requests[parent], self._table(parent)
        assert parent in output.num_scheduled_tokens
        (new,) = (one for one in output.scheduled_new_reqs if one.req_id == name)
        stop = start + output.num_scheduled_tokens[name]
        assert list(new.block_ids[0]) == table[: len(new.block_ids[0])]
        assert list(new.prompt_token_ids) == request._all_token_ids[: len(new.prompt_token_ids)]
        assert new.prefill_token_ids is new.prompt_token_ids
        assert stop < len(new.prompt_token_ids), "a row would be sampled"
        assert name in self._inside.scheduler.finished_req_ids
        for position in range(start, stop):
            content = Content(request, position, position, None)
            self._write(table[position // self._size], position % self._size, content)
        reached = self._reached.get(parent, 0)
        fresh = min(stop, request.num_prompt_tokens) - max(start, reached)
        self.reused[parent] = self.reused.get(parent, 0) - max(0, fresh)
        self.num_in_rows += stop - start
        self.num_rows += 1

    def _count_reuse(self, name: str, start: int, end: int) -> None:
        """Count the tokens of a prompt that a request has without having computed them before."""
        prompt = self._inside.scheduler.requests[name].num_prompt_tokens
        reached = self._reached.get(name, 0)
        self.reused[name] = self.reused.get(name, 0) + max(0, min(start, prompt) - reached)
        self._reached[name] = max(reached, min(end, prompt))

    def _copy(self, load: Any) -> None:
        for source, dest, count, delta in load.moves.tolist():
            for offset in range(count):
                block, slot = divmod(source + offset, self._size)
                content = self._slots[block][slot]
                assert content is not None, f"slot {source + offset} is copied and unwritten"
                exact = content.exact and delta == 0
                moved = Content(content.request, content.at, content.position + delta, exact)
                block, slot = divmod(dest + offset, self._size)
                self._write(block, slot, moved)
            if delta:
                self.num_moved += count
            else:
                self.num_exact_copies += count

    def _write(self, block: int, slot: int, content: Content) -> None:
        before = self._slots[block][slot]
        # Where copies fail on purpose, vLLM computes what it had counted on.
        again = before is not None and not self._fails
        assert not again, f"slot {slot} of block {block} is written twice"
        assert self._inside.pool.blocks[block].ref_cnt > 0, f"block {block} is written, and free"
        self._slots[block][slot] = content

    def _verify(self, request: Request, start: int, count: int) -> None:
        table = self._table(request.request_id)
        name, space = request.request_id, _space(request)
        first = self._verified.get(name, 0)
        exact = first == 0 or bool(self._at(table, first - 1).exact)
        allowed = self._may_be_approximate(request)
        same: dict[int, bool] = {}
        for position in range(first, start + count):
            content = self._at(table, position)
            assert content is not None, f"{name} reads position {position}, which is unwritten"
            mine = content.request is request
            assert content.position == position, (name, position, content.position)
            if content.exact is None:
                content.exact = exact
            if mine and content.at == position:
                exact = exact and content.exact
                continue
            assert content.token == tokens_of(request)[position], (name, position)
            assert _space(content.request) == space, f"{name} reads another tenant's KV"
            if content.exact and exact:
                key = id(content.request)
                if key not in same or position % self._size == 0:
                    theirs, own = tokens_of(content.request), tokens_of(request)
                    same[key] = theirs[: position + 1] == own[: position + 1]
                exact = same[key]
            else:
                exact = False
            if not exact:
                assert allowed, f"{name} may not read approximate KV, at {position}"
        self._verified[name] = start + count

    def _at(self, table: list[int], position: int) -> Content:
        content = self._slots[table[position // self._size]][position % self._size]
        assert content is not None, f"position {position} was never written"
        return content

    def _may_be_approximate(self, request: Request) -> bool:
        connector = self._inside.scheduler.connector
        if connector is None or not connector._cleared.approximate:
            return False
        said = (request.kv_transfer_params or {}).get("kvtrie", connector._settings.default)
        return bool(said == "approximate")

    def _check_cached(self) -> None:
        """Blocks under the hash of their tokens alone hold exact KV of these tokens."""
        for block, block_hash, request, number in self._cached:
            if block.block_hash != block_hash or block_hash is None:
                continue
            end = (number + 1) * self._size
            tokens = tokens_of(request)[:end]
            if get_block_hash(block_hash) != self.plain_hashes(request)[number]:
                continue
            for slot, content in enumerate(self._slots[block.block_id]):
                where = f"block {number} of {request.request_id}, slot {slot}"
                assert content is not None, f"{where}: cached and unwritten"
                assert content.exact, f"{where}: approximate KV under a plain hash"
                position = number * self._size + slot
                assert content.position == position, where
                assert _space(content.request) == _space(request), where
                assert tokens_of(content.request)[: position + 1] == tokens[: position + 1], where
        self._cached.clear()

    def plain_hashes(self, request: Request) -> list[bytes]:
        """vLLM's hashes of the full blocks of a request that got nothing approximate."""
        plain = copy.copy(request)
        plain.block_hashes = []
        hashes: list[bytes] = self._inside.core.request_block_hasher(plain)
        return hashes

    def unwritten(self) -> list[int]:
        """Unwritten blocks that other requests would hit."""
        return [
            block.block_id
            for block in self._inside.pool.blocks
            if block.block_hash is not None
            and any(content is None for content in self._slots[block.block_id])
        ]

    def check_index(self) -> None:
        """Blocks that the index labels exact are exact, and indexed blocks hold their tokens."""
        sources = self._inside.connector.planner.half.sources
        # Those that the pool has handed out again are settled first.
        assert sources.index.stats().indexed == len(sources)
        for number in sources._hashes:
            if sources.is_stale(number):
                continue
            assert all(content is not None for content in self._slots[number]), number
