"""vLLM's engine core with its scheduler and cache manager, over a worker without a model."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

# A release for other machines runs its scheduler as it would on this one.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.vllm.shadow import Shadow
from tests.vllm_scheduler.worker import BLOCK, Worker, lora_of
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvtrie.integrations.vllm import KvtrieConnector

SCHEDULER = "kvtrie.integrations.vllm.KvtrieScheduler"


def connector_config(
    role: str = "kv_both", on_failure: str = "recompute", **extra: object
) -> dict[str, object]:
    """What a user writes behind ``--kv-transfer-config``."""
    return {
        "kv_connector": "KvtrieConnector",
        "kv_connector_module_path": "kvtrie.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": on_failure,
        "kv_connector_extra_config": {"chat_format": None, **extra},
    }


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    has_failed: bool = False


class _SecondRunner(VllmConfig):  # type: ignore[misc] # untyped here
    """vLLM itself decides for it where there is a GPU."""

    use_v2_model_runner = property(lambda _: True)


class Core:
    """An engine core under test.

    Args:
        model: The folder of a model's configuration.
        connector: Settings of the connector; None: plain vLLM.
        gaps: Whether `KvtrieScheduler` resumes reuse behind gaps.
        in_flight: Whether vLLM schedules a step while the one before is under way.
        second_runner: Whether the scheduler works for vLLM's model runner V2.
        blocks: Blocks of the pool, the null block among them.
        shadow: Whether what every slot holds is followed.
        options: More for vLLM.
    """

    def __init__(
        self,
        model: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        gaps: bool = False,
        in_flight: bool = False,
        second_runner: bool = False,
        blocks: int = 200,
        shadow: bool = True,
        **options: Any,
    ) -> None:
        if connector is not None:
            options["kv_transfer_config"] = connector_config(**connector)
        if gaps:
            options["scheduler_cls"] = SCHEDULER
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "dtype": "float32",
            "max_model_len": 2048,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": blocks,
            **options,
        }
        config = EngineArgs(model=str(model), **options).create_engine_config()
        # vLLM turns this off on a CPU, whatever is asked: a real engine there never has it.
        config.scheduler_config.async_scheduling = in_flight
        if second_runner:
            config.__class__ = _SecondRunner
        self.core = EngineCore(config, Worker, log_stats=False)
        self.worker: Worker = self.core.model_executor
        self.scheduler = self.core.scheduler
        self.pool: BlockPool = self.scheduler.kv_cache_manager.block_pool
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, Answer] = {}
        self.num_preempted = 0
        self._number = 0
        self._watch()
        self.shadow: Any = Shadow(cast("Any", self), BLOCK) if shadow else None

    def _watch(self) -> None:
        if self.scheduler.connector is not None:
            add = self.connector._counts.add

            def counting(name: str, count: int = 1) -> None:
                self.counts[name] += count
                add(name, count)

            self.connector._counts.add = counting  # type: ignore[method-assign]
        preempt = self.scheduler._preempt_request

        def preempting(*args: Any, **kwargs: Any) -> None:
            self.num_preempted += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempting
        take = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> list[KVCacheBlock]:
            blocks: list[KVCacheBlock] = take(count)
            self.worker.spoil(block.block_id for block in blocks)
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    @property
    def connector(self) -> KvtrieConnector:
        """The scheduler's half."""
        found: KvtrieConnector = self.scheduler.connector
        return found

    # --- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        mode: str | None = None,
        salt: str | None = None,
        adapter: str | LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: Its prompt.
            max_tokens: How many tokens it says.
            mode: What it says in ``kv_transfer_params``.
            salt: Its tenant.
            adapter: Its LoRA adapter, or that one's name.
            priority: The lower, the sooner.
        """
        self._number += 1
        name = f"request-{self._number}"
        params = None if mode is None else {"kv_transfer_params": {"kvtrie": mode}}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=params)
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            arrival_time=float(self._number),
            block_hasher=self.core.request_block_hasher,
            cache_salt=salt,
            lora_request=lora_of(adapter),
            priority=priority,
        )
        self.answers[name] = Answer()
        self.core.add_request(request)
        return name

    def step(self) -> None:
        """One step of the core, which with steps in flight may bring nothing."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (one for group in (outputs or {}).values() for one in group.outputs):
            answer = self.answers[output.request_id]
            answer.tokens += output.new_token_ids
            answer.finished = output.finish_reason is not None
            answer.has_failed = output.finish_reason == FinishReason.ERROR

    def abort(self, names: Iterable[str]) -> None:
        """Abort requests."""
        self.core.abort_requests(list(names))

    def preempt(self, name: str) -> None:
        """Preempt a running request, as vLLM does when it is short of blocks."""
        request = self.scheduler.requests[name]
        assert request.status == RequestStatus.RUNNING
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def evict(self, tokens: Sequence[int]) -> None:
        """Let vLLM forget the cached blocks of some tokens, as it does when it needs the room."""
        hashes = self.plain_hashes(tokens)
        gone = {
            block.block_id
            for block in self.pool.blocks
            if block.block_hash is not None and get_block_hash(block.block_hash) in hashes
        }
        assert gone
        self.pool.evict_blocks(gone)

    def plain_hashes(
        self, tokens: Sequence[int], adapter: str | LoRARequest | None = None
    ) -> list[bytes]:
        """What vLLM calls the full blocks of these tokens."""
        sampling = SamplingParams(max_tokens=1)
        hasher = self.core.request_block_hasher
        made = Request(
            "hashed",
            list(tokens),
            sampling,
            None,
            block_hasher=hasher,
            lora_request=lora_of(adapter),
        )
        hashes: list[bytes] = made.block_hashes
        return hashes

    @property
    def is_busy(self) -> bool:
        """Whether something is to be done, or under way."""
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def drain(self, limit: int = 20_000) -> None:
        """Step until all is done."""
        for _ in range(limit):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"the core is still busy after {limit} steps")

    def ask(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """One request, to its end; what it says."""
        name = self.add(prompt, **options)
        self.drain()
        return self.answers[name].tokens

    def computed_for(self, prompt: Sequence[int], **options: Any) -> int:
        """How many tokens of a prompt are computed."""
        before = self.worker.num_computed
        self.ask(prompt, max_tokens=1, **options)
        return self.worker.num_computed - before

    def reset_cache(self, *, forces: bool = True, tells: bool = True) -> bool:
        """Forget everything cached.

        Args:
            forces: Whether running requests are preempted for it.
            tells: Whether the connector is told.
        """
        done: bool = self.core.reset_prefix_cache(
            forces, tells and self.scheduler.connector is not None
        )
        return done

    def reset(self) -> None:
        """Become as new."""
        assert self.reset_cache()
        self.counts.clear()
        self.worker.fails = self.worker.drafts = None
        self.worker.num_failed = 0

    # --- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """Every block is free or owned, as often as it is counted, and the index agrees."""
        owners: Counter[int] = Counter()
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                owners.update(block.block_id for block in blocks if not block.is_null)
        # Blocks that steps under way may still write.
        for _, blocks in self.scheduler.deferred_frees:
            owners.update(block.block_id for block in blocks)
        connector = self.scheduler.connector
        if connector is not None:
            for live in self.connector.planner._live.values():
                if live.pending is not None:
                    owners.update(block.block_id for block in live.pending.pinned)
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(set(free)) == len(free), "a block is twice in the free queue"
        assert len(free) == self.pool.get_num_free_blocks()
        are_free = set(free)
        for block in self.pool.blocks[1:]:
            number = block.block_id
            assert block.ref_cnt == owners[number], (number, block.ref_cnt, owners[number])
            assert (number in are_free) == (block.ref_cnt == 0), number
        if connector is not None:
            sources = self.connector.planner.sources
            sources.index.check()
            assert sources.index.stats().indexed == len(sources)
            if self.shadow is not None:
                self.shadow.check_index()

    def check_idle(self) -> None:
        """No request: all blocks are free, and nothing is remembered."""
        self.check()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        if self.scheduler.connector is not None:
            planner = self.connector.planner
            assert not planner._live
            assert not planner._pending
            assert not planner._prefilling
            assert not planner._loads

    def close(self) -> None:
        """Stop the core."""
        self.core.shutdown()
