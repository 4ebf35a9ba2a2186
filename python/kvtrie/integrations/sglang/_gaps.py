"""Reuse after gaps: the tokens between moved runs, computed before the step that continues after.

SGLang extends a prefix. So a request that reuses KV after gaps is admitted with a prefix that ends
at its last gap, and the gaps in that prefix are computed in a forward pass of their own, right
before the step that computes the rest. In that pass each gap is a row of the batch, and all rows of
a request share its slots. That is sound on attention backends that write the K and V of all tokens
of a layer before they read any, as a row then reads what the rows before it wrote.

Three methods of SGLang are hooked for it (`install`), by its own registry, and only if the operator
asks for it. The tokens of gaps leave less room to requests after it, and are reported as computed.

The pass costs a forward pass over the tokens of the gaps. A request has at most the tokens of one
chunk in gaps (``--chunked-prefill-size``); what comes after more than that is not reused.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from kvtrie.integrations.sglang._moving import num_tokens
from kvtrie.integrations.sglang._resolved import resolved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.tp_worker import TpModelWorker

    from kvtrie.integrations.sglang._moving import Built

BACKENDS: Final = ("fa3", "torch_native", "triton")
"""Attention backends that write K and V of a layer before they read: read in SGLang 0.5.23. Only
``torch_native`` ran."""

_STEP: Final = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
_ADMISSION: Final = "sglang.srt.managers.schedule_policy.PrefillAdder._commit_prefill_admission"
_ALLOCATION: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"


class GapRow(NamedTuple):
    """A gap of a request: the row of the batch that the request has, and the gap's tokens."""

    at: int
    start: int
    end: int


def why_not(
    args: Any,  # noqa: ANN401 - SGLang's ServerArgs
    worker: TpModelWorker,
    *,
    is_shadow: bool,
) -> str | None:
    """Why gaps are not computed in this server; None if they are.

    Args:
        args: How SGLang was started.
        worker: What runs its steps.
        is_shadow: Whether they are only counted, for which nothing is hooked.
    """
    backend = worker.model_runner.prefill_attention_backend_str
    reasons = {
        "SGLang could not be hooked; its log says why": not (is_shadow or is_installed(worker)),
        f"the attention backend {backend} is not among {', '.join(BACKENDS)}": (
            backend not in BACKENDS
        ),
        "--enable-two-batch-overlap splits batches": args.enable_two_batch_overlap,
        "--enable-mixed-chunk mixes prefill and decoding": args.enable_mixed_chunk,
        "--enable-watermark reads the prompts of each batch": args.enable_watermark,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def install() -> None:
    """Hook what computes and accounts for gaps; SGLang applies it when its plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(_STEP, _before, HookType.BEFORE)
    HookRegistry.register(_ADMISSION, _admitted, HookType.AFTER)
    HookRegistry.register(_ALLOCATION, _prepared, HookType.AFTER)


def is_installed(worker: TpModelWorker) -> bool:
    """Whether SGLang has applied the hooks, and a worker runs the hooked method.

    SGLang logs what it cannot hook, and goes on.
    """
    from sglang.srt.managers.tp_worker import TpModelWorker as Hooked  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    method = getattr(type(worker), "forward_batch_generation", None)
    ours = method is Hooked.forward_batch_generation
    applied = HookRegistry._patched  # noqa: SLF001 - there is no other way to ask
    return ours and {_STEP, _ADMISSION, _ALLOCATION} <= applied


def _admitted(_: None, adder: PrefillAdder, request: Req, *__: object, **___: object) -> None:
    """Charge the step for the gaps of a request, and report them as computed, not as found."""
    built = _built(request)
    if built is None or not built.gaps:
        return
    count = num_tokens(built.gaps)
    adder.rem_input_tokens -= count
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens -= count
    adder.log_input_tokens += count
    adder.log_hit_tokens -= count
    if request.retracted_stain:
        adder.reprocessed_log_input_tokens += count
        adder.reprocessed_log_hit_tokens -= count
    else:
        adder.log_device_hit_tokens -= count


def _prepared(_: None, batch: ScheduleBatch) -> None:
    """Take gaps out of the cached tokens that SGLang reports by tier."""
    for request, start in zip(batch.reqs, batch.prefix_lens, strict=True):
        built = _built(request)
        if built is not None and start == built.end and not request.retracted_stain:
            request.cached_tokens_device -= num_tokens(built.gaps)


def _built(request: Req) -> Built | None:
    """What is known of a request's KV: nothing under another cache, or where all is exact."""
    built: Built | None = getattr(request.last_node, "built", None)
    return built


def _before(worker: TpModelWorker, batch: ScheduleBatch | None, *_: object, **__: object) -> None:
    """Compute the gaps of requests that are in a step for the first time."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415

    if batch is None or batch.forward_mode != ForwardMode.EXTEND:
        return
    waiting = [
        GapRow(at, start, end)
        for at, request in enumerate(batch.reqs)
        # In a later chunk they are computed.
        if (built := _built(request)) is not None and batch.prefix_lens[at] == built.end
        for start, end in built.gaps
    ]
    if not waiting:
        return
    chunk = resolved(worker.model_runner.server_args).chunked_prefill_size
    for rows in _passes(waiting, batch.req_to_token_pool.size, chunk):
        _compute(worker, batch, rows)


def _passes(
    rows: Sequence[GapRow], most_rows: int, most_tokens: int | None
) -> Iterator[list[GapRow]]:
    """Rows in their order, as many in a pass as SGLang's buffers are made for."""
    part: list[GapRow] = []
    count = 0
    for row in rows:
        length = row.end - row.start
        is_full = most_tokens is not None and most_tokens > 0 and count + length > most_tokens
        if part and (len(part) == most_rows or is_full):
            yield part
            part, count = [], 0
        part.append(row)
        count += length
    if part:
        yield part


def _compute(worker: TpModelWorker, batch: ScheduleBatch, rows: Sequence[GapRow]) -> None:
    """One forward pass that writes the K and V of gaps, and samples nothing."""
    from sglang.srt.model_executor.forward_batch_info import (  # noqa: PLC0415
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    runner = worker.model_runner
    device = runner.device
    at, ends = (torch.tensor([row[n] for row in rows]) for n in (0, 2))
    lengths = [row.end - row.start for row in rows]
    requests = [batch.reqs[row.at] for row in rows]
    texts = zip(requests, rows, strict=True)
    ids = np.concatenate([one.full_untruncated_fill_ids[row.start : row.end] for one, row in texts])
    # Where each token of the rows is: which request of the pool, and which position.
    slots = batch.req_pool_indices.index_select(0, _sent(at, device))
    repeats = _sent(torch.tensor(lengths), device)
    spread = torch.repeat_interleave(slots, repeats, output_size=len(ids))
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])

    part = copy(batch)
    part.forward_mode = ForwardMode.EXTEND
    part.reqs = requests
    part.input_ids = _sent(torch.from_numpy(ids), device)
    part.prefill_input_ids_cpu = None
    part.req_pool_indices = slots
    part.req_pool_indices_cpu = batch.req_pool_indices_cpu[at]
    part.prefix_lens = [row.start for row in rows]
    part.extend_lens = lengths
    part.extend_num_tokens = len(ids)
    part.seq_lens = _sent(ends, device)
    part.seq_lens_cpu = ends
    part.seq_lens_sum = int(ends.sum())
    part.orig_seq_lens = part.seq_lens.to(torch.int32)
    part.out_cache_loc = batch.req_to_token_pool.req_to_token[
        spread, _sent(torch.from_numpy(positions), device)
    ].long()
    part.return_logprob = False
    part.top_logprobs_nums = part.token_ids_logprobs = None
    part.extend_logprob_start_lens = lengths
    part.extend_input_logprob_token_ids = None
    part.input_embeds = part.replace_embeds = part.replace_positions = None
    part.is_prefill_only = True
    part.sampling_info = part.spec_info = None
    part.has_grammar = False
    part.multimodal_inputs = [None] * len(rows)
    runner.forward(
        ForwardBatch.init_new(
            part,
            runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
    )


def _sent(tensor: torch.Tensor, device: Any) -> torch.Tensor:  # noqa: ANN401 - SGLang's, a text
    """A tensor on a device, without waiting for the step that runs there."""
    from sglang.srt.utils.common import is_pin_memory_available  # noqa: PLC0415

    pin = is_pin_memory_available(device)
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)
