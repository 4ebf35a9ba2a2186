"""A vLLM engine in this process, of which tests see scheduler, pool and tensors."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# One process, so that a test sees both halves of the connector; little memory; no downloads.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise for engines in other processes: vLLM would give each rank the cores of a memory node, and
# there may be only one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from tests.vllm import runner

if runner.RUNS_V2:
    runner.interpret()

from tests.vllm.inside import SCHEDULER, Inside, connector_config
from tests.vllm.shadow import Shadow
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.triton_utils import dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch

    from kvtrie.integrations.vllm.connector import KvtrieConnector
    from kvtrie.pool import KVPool

runner.keep_steps_in_flight()
_register_kernels = dispatcher.register_kernels


def _register_once(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Each engine would look for the same kernels in all modules, most of what its start takes."""
    if not kernels.keys() <= dispatcher._registry.keys():
        _register_kernels(kernels)


dispatcher.register_kernels = _register_once

BLOCK = 32


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    finished: bool = False
    logprobs: list[dict[int, float]] = field(default_factory=list)


class Engine(Inside):
    """An engine under test; plain vLLM if `connector` is None.

    With `gaps`, `KvtrieScheduler` resumes reuse after gaps. With `shadow`, which is slow, what
    every slot holds is followed. The pool has `blocks` blocks, the null block among them.
    """

    def __init__(
        self,
        model: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        gaps: bool = False,
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
            "max_model_len": 4096,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": blocks,
            "seed": 0,
            "async_scheduling": False,
            "disable_log_stats": True,
            **options,
        }
        self.llm = LLM(str(model), **options)
        super().__init__(self.llm.llm_engine.engine_core.engine_core)
        self.num_computed = 0
        self.answers: dict[str, Answer] = {}
        self._names: dict[str, str] = {}
        self._number = 0
        self._watch_steps()
        if self.scheduler.connector is not None:
            self.watch_counts(self.worker)
        if shadow:
            self.shadow = Shadow(self, self.scheduler.block_size)
            runner.watch(self)

    def _watch_steps(self) -> None:
        update = self.scheduler.update_from_output

        def counting(output: Any, *rest: Any) -> Any:
            self.num_computed += output.total_num_scheduled_tokens
            return update(output, *rest)

        self.scheduler.update_from_output = counting

    @property
    def worker(self) -> KvtrieConnector:
        group: Any = kv_transfer_state.get_kv_transfer_group()
        among = getattr(group, "sub_connectors", [group])
        half: KvtrieConnector = next(one for one in among if hasattr(one, "_not_copied"))
        return half

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        mode: str | None = None,
        salt: str | None = None,
        images: Sequence[Any] = (),
        **sampling: Any,
    ) -> str:
        """Queue a request and return its id.

        ``mode``: what it says in ``kv_transfer_params``. ``images``: in the places of their tokens.
        """
        self._number += 1
        name = f"request-{self._number}"
        if mode is not None:
            sampling["extra_args"] = {"kv_transfer_params": {"kvtrie": mode}}
        params = SamplingParams(
            **{
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "detokenize": False,
                **sampling,
            }
        )
        given: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            given["cache_salt"] = salt
        if images:
            given["multi_modal_data"] = {"image": list(images)}
        self.answers[name] = Answer()
        self.llm.llm_engine.add_request(name, given, params)
        return name

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            answer = self.answers[output.request_id]
            first = output.outputs[0]
            answer.tokens = list(first.token_ids)
            answer.num_cached = output.num_cached_tokens or 0
            answer.finished = output.finished
            if first.logprobs:
                answer.logprobs = [
                    {token: one.logprob for token, one in at.items()} for at in first.logprobs
                ]

    def abort(self, names: Iterable[str]) -> None:
        self.llm.llm_engine.abort_request(list(names))

    @property
    def is_busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.is_busy:
                break
            self.step()
        else:
            raise AssertionError(f"the engine is still busy after {limit} steps")
        # With steps in flight, the last one returns in one more step.
        while self.core.batch_queue:
            self.core.step_fn()

    def ask(self, prompt: Sequence[int], **options: Any) -> Answer:
        name = self.add(prompt, **options)
        self.drain()
        return self.answers[name]

    def computed_for(self, prompt: Sequence[int], **options: Any) -> int:
        before = self.num_computed
        self.ask(prompt, max_tokens=1, **options)
        return self.num_computed - before

    @property
    def kv_pool(self) -> KVPool:
        copies = self.worker._copies
        assert copies is not None, "vLLM has registered no KV"
        return copies.pool

    def kv(self, block: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.kv_pool.gather([block], start=0, end=BLOCK)

    def reset(self) -> None:
        self.counts.clear()
        assert self.llm.reset_prefix_cache(reset_connector=self.scheduler.connector is not None)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        kv_transfer_state.ensure_kv_transfer_shutdown()
        del self.llm, self.core, self.scheduler, self.pool
        gc.collect()
