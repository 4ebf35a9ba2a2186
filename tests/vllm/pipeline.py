"""vLLM's real scheduler with steps in flight, and no model: KV is a digest of what made it.

The CPU backend turns asynchronous scheduling off, so engines of tests never have two steps under
way. Here they do: a step's work is done when it is scheduled, in the order of a device's queue, and
its outcome is told later.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvtrie.calibrate import shipped
from kvtrie.integrations.vllm import KvtrieScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 16


def kv_of(before: str, token: int, adapter: str) -> str:
    """The KV of a token behind some other KV."""
    return hashlib.sha256(f"{before}|{token}|{adapter}".encode()).hexdigest()[:16]


def said_behind(kv: str) -> int:
    """What the model says next."""
    return 3 + int(kv, 16) % 400


class Pipeline:
    """A scheduler and the device behind it.

    Args:
        gaps: Whether it is `KvtrieScheduler`.
        depth: Steps that may be under way.
        connector: Settings of the connector; None: plain vLLM.
        blocks: Blocks of the pool, the null block among them.
        options: More for ``EngineArgs``.
    """

    def __init__(
        self,
        *,
        gaps: bool = False,
        depth: int = 2,
        connector: dict[str, Any] | None = None,
        blocks: int = 64,
        **options: Any,
    ) -> None:
        init_none_hash(sha256)
        config = EngineArgs(
            model=str(shipped.model_path("gqa")),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=SIZE,
            **{"max_model_len": 1024, **options},
        ).create_engine_config()
        # What the CPU's platform has turned off: the scheduler believes that steps are in flight.
        config.scheduler_config.async_scheduling = depth > 1
        if connector is not None:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="KvtrieConnector",
                kv_connector_module_path="kvtrie.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=connector,
            )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        kind = KvtrieScheduler if gaps else AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=SIZE,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.fails = False
        self._hasher = get_request_block_hasher(SIZE, sha256)
        self._depth = depth
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._kv: dict[int, str] = {}
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        take = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks: list[Any] = take(count)
            for block in blocks:
                for slot in range(block.block_id * SIZE, (block.block_id + 1) * SIZE):
                    self._kv.pop(slot, None)
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    @property
    def planner(self) -> Any:
        """The connector's half in the scheduler."""
        return self.scheduler.connector.planner

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        mode: str | None = None,
        **more: Any,
    ) -> Request:
        """Queue a request."""
        extra = {"kv_transfer_params": {"kvtrie": mode}} if mode else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher, **more)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule a step, and tell the outcome of the oldest where enough are under way."""
        output = self.scheduler.schedule()
        self._under_way.append((output, self._execute(output)))
        if len(self._under_way) >= self._depth or not output.total_num_scheduled_tokens:
            self.tell()

    def tell(self) -> None:
        """Tell the outcome of the oldest step under way."""
        self.scheduler.update_from_output(*self._under_way.popleft())

    def drain(self, limit: int = 300) -> None:
        """Until all is done."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        else:
            raise AssertionError("the scheduler never comes to an end")
        self.tell_all()

    def tell_all(self) -> None:
        """Tell the outcome of all steps under way."""
        while self._under_way:
            self.tell()

    def ask(self, name: str, prompt: Sequence[int], **options: Any) -> list[int]:
        """One request, to its end."""
        request = self.add(name, prompt, **options)
        self.drain()
        return list(request.output_token_ids)

    def truth(self, request: Request, count: int = 4) -> list[int]:
        """What the model says without any cache."""
        kv, said = "", []
        for token in request.prompt_token_ids or []:
            kv = kv_of(kv, token, _adapter(request))
        for _ in range(count):
            said.append(said_behind(kv))
            kv = kv_of(kv, said[-1], _adapter(request))
        return said

    def unwritten(self) -> list[int]:
        """Blocks that others would find, and nobody has written."""
        cached = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        return [
            number
            for number in cached
            if any(number * SIZE + offset not in self._kv for offset in range(SIZE))
        ]

    # --- the device ------------------------------------------------------------------------------

    def _execute(self, output: Any) -> ModelRunnerOutput:
        starts = self._follow(output)
        failed: set[int] = set()
        for load in getattr(output.kv_connector_metadata, "loads", ()):
            if self.fails or load.moves is None:
                failed.update(load.blocks)
                continue
            for source, dest, count, _ in load.moves.tolist():
                for offset in range(count):
                    self._kv[dest + offset] = self._kv.get(source + offset, "nobody's")
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            tokens, end = self._tokens[name], starts[name] + output.num_scheduled_tokens[name]
            for at in range(starts[name], end):
                before = self._kv.get(self._slot(name, at - 1), "nobody's") if at else ""
                adapter = _adapter(self.requests[name])
                self._kv[self._slot(name, at)] = kv_of(before, tokens[at], adapter)
            said = [said_behind(self._kv[self._slot(name, end - 1)])] if end >= len(tokens) else []
            tokens.extend(said)
            sampled.append(said)
        told = KVConnectorOutput(invalid_block_ids=failed) if failed else None
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _follow(self, output: Any) -> dict[str, int]:
        """The worker's own books, from what the scheduler sends alone."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[number]
            if name in cached.resumed_req_ids:
                self._tables[name] = []
            self._tables[name].extend(blocks[0] if blocks else ())
            prompt = len(self.requests[name].prompt_token_ids or [])
            del self._tokens[name][prompt + cached.num_output_tokens[number] :]
            starts[name] = cached.num_computed_tokens[number]
        return starts

    def _slot(self, name: str, at: int) -> int:
        return self._tables[name][at // SIZE] * SIZE + at % SIZE


def _adapter(request: Request) -> str:
    return request.lora_request.lora_path if request.lora_request else ""
