"""vLLM's engine core with its scheduler and cache manager, over a worker without a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# A release for other machines runs its scheduler as it would on this one.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.vllm.inside import SCHEDULER, Inside, connector_config
from tests.vllm.shadow import Shadow
from tests.vllm_scheduler.worker import BLOCK, Worker, lora_of
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.vllm_scheduler.worker import Image
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.metrics.stats import PrefillStats


# Tokens of images whose encoder's output is kept, and that a step may encode.
ENCODED = 120


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    has_failed: bool = False
    prefill: PrefillStats | None = None


def features_of(images: Iterable[Image]) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem(),
            modality=image.modality,
            identifier=image.identifier,
            mm_position=PlaceholderRange(image.start, image.end - image.start),
        )
        for image in images
    ]


class _SecondRunner(VllmConfig):  # type: ignore[misc] # untyped here
    """vLLM itself decides for it where there is a GPU."""

    use_v2_model_runner = property(lambda _: True)


class Core(Inside):
    """An engine core under test, without the connector if `connector` is None.

    With `gaps`, `KvtrieScheduler` resumes reuse after gaps. `in_flight`: vLLM schedules a step
    while the one before is under way. `second_runner`: the scheduler works for vLLM's model runner
    V2.
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
        log_stats: bool = False,
        worker: type[Worker] = Worker,
        **options: Any,
    ) -> None:
        if connector is not None:
            options["kv_transfer_config"] = connector_config(**{"chat_format": None, **connector})
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
        # vLLM always disables this on a CPU: a real engine there never has it.
        config.scheduler_config.async_scheduling = in_flight
        if second_runner:
            config.__class__ = _SecondRunner
        super().__init__(EngineCore(config, worker, log_stats=log_stats))
        self.worker: Worker = self.core.model_executor
        self.answers: dict[str, Answer] = {}
        self.num_preempted = 0
        # The model has no encoder, so vLLM makes room for none of its outputs.
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODED)
        self.scheduler.max_num_encoder_input_tokens = ENCODED
        self.hits = PrefixCacheStats()
        self._number = 0
        self._watch()
        if shadow:
            self.shadow = Shadow(self, BLOCK)

    def _watch(self) -> None:
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

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        mode: str | None = None,
        salt: str | None = None,
        adapter: str | LoRARequest | None = None,
        priority: int = 0,
        images: Sequence[Image] = (),
        **given: Any,
    ) -> str:
        self._number += 1
        name = f"request-{self._number}"
        params = None if mode is None else {"kv_transfer_params": {"kvtrie": mode}}
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=params, **given
        )
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
            mm_features=features_of(images),
        )
        self.answers[name] = Answer()
        self.core.add_request(request)
        return name

    def step(self) -> None:
        """One step of the core, which with steps in flight may bring nothing."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        groups = (outputs or {}).values()
        for stats in (group.scheduler_stats for group in groups):
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                self._add_hits(stats.connector_prefix_cache_stats)
        for output in (one for group in groups for one in group.outputs):
            answer = self.answers[output.request_id]
            if output.prefill_stats is not None:
                assert answer.prefill is None
                answer.prefill = output.prefill_stats
            answer.tokens += output.new_token_ids
            answer.finished = output.finish_reason is not None
            answer.has_failed = output.finish_reason == FinishReason.ERROR

    def _add_hits(self, one: PrefixCacheStats) -> None:
        hits = self.hits
        hits.queries += one.queries
        hits.hits += one.hits
        hits.preempted_hits += one.preempted_hits
        for source, count in one.hits_by_source.items():
            hits.hits_by_source[source] = hits.hits_by_source.get(source, 0) + count

    def abort(self, names: Iterable[str]) -> None:
        self.core.abort_requests(list(names))

    @property
    def is_busy(self) -> bool:
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"the core is still busy after {limit} steps")

    def ask(self, prompt: Sequence[int], **options: Any) -> list[int]:
        name = self.add(prompt, **options)
        self.drain()
        return self.answers[name].tokens

    def computed_for(self, prompt: Sequence[int], **options: Any) -> int:
        before = self.worker.num_computed
        self.ask(prompt, max_tokens=1, **options)
        return self.worker.num_computed - before

    def forget_encoded(self) -> None:
        """Drop what the encoder has made of images."""
        self.scheduler.reset_encoder_cache()
        self.worker.encoded.clear()

    def reset_cache(self, *, forces: bool = True, connector: bool = True) -> bool:
        done: bool = self.core.reset_prefix_cache(
            forces, connector and self.scheduler.connector is not None
        )
        return done

    def reset(self) -> None:
        assert self.reset_cache()
        self.forget_encoded()
        self.counts.clear()
        self.hits = PrefixCacheStats()
        self.worker.fails = self.worker.drafts = None
        self.worker.num_failed = 0

    def close(self) -> None:
        self.core.shutdown()
