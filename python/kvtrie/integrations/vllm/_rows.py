"""Several pieces of one prompt in one step: extra rows of the batch that share its blocks.

To vLLM's workers, a row is a request with the blocks of the one whose piece it computes. That is
sound because every layer writes the K and V of all tokens of a step before attention reads any, as
vLLM itself needs where a request hits blocks that another one of the same batch computes. vLLM
samples nothing for a row, because its tokens go on after the piece; the scheduler does not know the
row's id; workers forget it in the next step.

Rows get what a step has left: of sequences, as long as vLLM admits no other request into their
place, and of tokens, which later requests of the step then do without. Each row copies the tokens
before its piece to the worker's input, up to `_MAX_COPIED` in all rows of a step.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.vllm import _version
from kvtrie.integrations.vllm._vllm import NewRequestData, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._ranges import Range

# Tokens that the rows of a step copy, by whether the model runner is V2. For each 100,000 of them
# V1 needs 0.1 ms, from an array; V2 makes lists, and needs 8 ms.
_MAX_COPIED: Final = {False: 1 << 22, True: 1 << 18}
# Characters of a request's id in the names of its rows: a client chooses its length.
_MAX_NAME: Final = 64
_SAMPLING: Final = SamplingParams(temperature=0, max_tokens=1)


def why_not(vllm_config: VllmConfig) -> str | None:
    """Why this engine computes each gap in a step of its own; None if gaps share one."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    logits_processors = model.logits_processors or entry_points(group="vllm.logits_processors")
    reasons = {
        f"vLLM {_version.running()} is untested": not _version.is_tested(),
        "microbatches (--enable-dbo, --ubatch-size)": parallel.use_ubatching,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "a pooling model": model.runner_type == "pooling",
        "M-RoPE": model.uses_mrope,
        "logits processors of your own": bool(logits_processors),
        "--kv-sharing-fast-prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
        "auxiliary outputs, such as routed experts": vllm_config.aux_output_config.enabled,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class GapRows:
    """Gives the rows of one step after another of a scheduler to requests, and sends them."""

    def __init__(self, scheduler: AsyncScheduler) -> None:
        self._scheduler = scheduler
        config = scheduler.vllm_config
        self._max_copied = _MAX_COPIED[config.use_v2_model_runner]
        self._max_admitted: int = scheduler.max_num_active_reqs
        settings = config.scheduler_config
        # vLLM checks both.
        self._max_tokens = min(scheduler.max_num_scheduled_tokens, settings.max_num_batched_tokens)
        self._max_piece = settings.long_prefill_token_threshold or self._max_tokens
        self._is_open = False
        # Of this step: tokens that vLLM schedules, and rows that are promised, with their tokens
        # and what they copy.
        self._num_scheduled = 0
        self._num_rows = self._num_tokens = self._num_copied = 0
        self._kept: list[tuple[Request, list[Range]]] = []
        self._number = 0

    def __len__(self) -> int:
        """The number of requests whose rows are not sent."""
        return len(self._kept)

    @property
    def most(self) -> int:
        """The rows that a step may have."""
        found: int = self._scheduler.max_num_running_reqs
        return found

    def begin(self) -> None:
        self._is_open = True
        self._kept = []
        self._num_scheduled = self._num_rows = self._num_tokens = self._num_copied = 0

    def end(self) -> None:
        """The step is scheduled, or vLLM has failed to."""
        self._is_open = False
        self._scheduler.max_num_active_reqs = self._max_admitted

    def fit(
        self, request: Request, position: int, ranges: Sequence[Range], *, is_running: bool
    ) -> int:
        """How many of these ranges the request may skip, because the gaps before fit as rows.

        The rows are promised for this step, whether or not they are kept. A token is left for the
        request itself.
        """
        if not self._is_open or not _may_have_rows(request):
            return 0
        scheduler = self._scheduler
        active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        rows = scheduler.max_num_running_reqs - active - self._num_rows - (not is_running)
        left = self._max_tokens - self._num_scheduled - self._num_tokens
        tokens = min(left, self._max_piece) - 1
        count = num_rows = num_tokens = num_copied = 0
        for at, (start, end) in enumerate(ranges):
            if position < start:
                copied = (num_rows + 1) * (start + 1)
                if (
                    num_rows >= rows
                    or num_tokens + start - position > tokens
                    or self._num_copied + copied > self._max_copied
                ):
                    break
                num_rows, num_tokens, num_copied = (
                    num_rows + 1,
                    num_tokens + start - position,
                    copied,
                )
            count, position = at + 1, end
        self._num_rows += num_rows
        self._num_tokens += num_tokens
        self._num_copied += num_copied
        if num_rows:
            free = scheduler.max_num_running_reqs - self._num_rows
            scheduler.max_num_active_reqs = min(self._max_admitted, free)
        return count

    def schedule(self, count: int) -> int:
        """How many of these tokens vLLM may schedule for its next request."""
        if self._num_rows:
            left = self._max_tokens - self._num_tokens - self._num_scheduled
            count = max(0, min(count, left))
            if count == left:
                # vLLM counts on the tokens of the rows, and would look up all waiting requests.
                self._scheduler.max_num_active_reqs = 0
        self._num_scheduled += count
        return count

    def keep(self, request: Request, pieces: list[Range]) -> None:
        """Send these pieces of a scheduled request with the step."""
        self._kept.append((request, pieces))

    def send(self, output: SchedulerOutput) -> None:
        """Add the rows to a step that vLLM has scheduled."""
        kept, self._kept = self._kept, []
        for request, pieces in kept:
            end = pieces[-1][1]
            # Shared by all rows, and longer than each by a token at least.
            tokens: Any = request.all_token_ids[: end + 1]
            if not self._scheduler.use_v2_model_runner:
                tokens = array("i", tokens)
            table = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            blocks = (table[: -(-end // self._scheduler.block_size)],)
            whole = NewRequestData.from_request(request, blocks, tokens)
            for start, stop in pieces:
                row = replace(
                    whole,
                    req_id=self._name(request),
                    prompt_token_ids=tokens,
                    sampling_params=_SAMPLING,
                    num_computed_tokens=start,
                )
                output.scheduled_new_reqs.append(row)
                output.num_scheduled_tokens[row.req_id] = stop - start
                output.total_num_scheduled_tokens += stop - start
                # With the next step.
                self._scheduler.finished_req_ids.add(row.req_id)

    def _name(self, request: Request) -> str:
        while True:
            self._number += 1
            name = f"{request.request_id[:_MAX_NAME]}#{self._number}"
            if name not in self._scheduler.requests:
                return name


def _may_have_rows(request: Request) -> bool:
    """Whether nothing is asked of the pieces but their KV; adapters are untested.

    vLLM runs the encoder for the images of a request's own next tokens, not for those of rows.
    """
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.prompt_logprobs is None
        and request.lora_request is None
        and not request.mm_features
    )
