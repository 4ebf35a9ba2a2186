"""Requests that wait for the store, as SGLang lets them wait for its own HiCache.

SGLang asks its own caches whether a prefetch has ended before it admits a request, but no other
cache. So `install` hooks, by SGLang's registry and only where the operator asks for a store: the
admission of a request, which is put off while others are admitted; the replacement of weights,
after which the store is neither read nor written; and the two ends of a step, by which it is
measured how fast prompts are computed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.sglang import _stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.io_struct import CheckWeightsReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

_ADMISSION: Final = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
_STEP: Final = "sglang.srt.managers.scheduler.Scheduler.run_batch"
_RESULT: Final = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
_UPDATER: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
_WEIGHTS: Final = tuple(
    f"{_UPDATER}.{name}"
    for name in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
    )
)
_CHECK: Final = f"{_UPDATER}.check_weights"
# On the result of a step: when it began, and the tokens of prompts in it.
_MARK: Final = "kvtrie_step"


def install() -> None:
    """Hook what the store needs; SGLang applies it when its plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - SGLang's

    HookRegistry.register(_ADMISSION, _admit, HookType.AROUND)
    HookRegistry.register(_STEP, _step, HookType.AROUND)
    HookRegistry.register(_RESULT, _result, HookType.AFTER)
    for one in _WEIGHTS:
        HookRegistry.register(one, _replaced, HookType.BEFORE)
    HookRegistry.register(_CHECK, _checked, HookType.BEFORE)


def is_installed() -> bool:
    """Whether SGLang has applied the hooks: it logs what it cannot hook, and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415 - SGLang's

    applied = HookRegistry._patched  # noqa: SLF001 - there is no other way to ask
    return bool({_ADMISSION, _STEP, _RESULT, _CHECK, *_WEIGHTS} <= applied)


def _admit(
    original: Callable[..., Any],
    adder: PrefillAdder,
    req: Req,
    *args: object,
    **kwargs: object,
) -> Any:  # noqa: ANN401 - SGLang's verdict on the next request
    """Put a request off that waits for the store, or let it wait no longer."""
    cache = adder.tree_cache
    waits = getattr(cache, "waits", None)
    if waits is not None:
        running, may_wait = adder.running_batch, _may_wait(adder)
        is_idle = not adder.can_run_list and (running is None or not running.reqs)
        if waits(req, adder, is_idle=is_idle and may_wait):
            if may_wait:
                from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: PLC0415 - SGLang's

                return AddReqResult.CONTINUE
            # Nothing is loaded for it any more; otherwise this leaves it as it is.
            cache.release_aborted_request(req.cache_request_handle)
    return original(adder, req, *args, **kwargs)


def _may_wait(adder: PrefillAdder) -> bool:
    """Whether a request may wait: it has not taken the place of others in this round.

    Running requests are preempted for it before it is admitted, and would be again in each round.
    Where there are adapters, the scheduler counts it among those that run, and its adapter, or the
    lack of one, takes a place in the step.
    """
    from sglang.srt.runtime_context import get_lora  # noqa: PLC0415 - SGLang's

    return not adder.preempt_list and not get_lora().enable_lora


def _step(
    original: Callable[..., Any],
    scheduler: Scheduler,
    batch: ScheduleBatch,
    *args: object,
    **kwargs: object,
) -> Any:  # noqa: ANN401 - SGLang's result
    began, mode, count = time.monotonic(), batch.forward_mode, 0
    if mode is not None and mode.is_extend():
        count = batch.extend_num_tokens or 0
    result = original(scheduler, batch, *args, **kwargs)
    with suppress(AttributeError):
        setattr(result, _MARK, (began, count))
    return result


def _result(_: None, scheduler: Scheduler, __: ScheduleBatch, result: object) -> None:
    computed = getattr(scheduler.tree_cache, "computed_prefill", None)
    if computed is not None and hasattr(result, _MARK):
        began, count = getattr(result, _MARK)
        computed(count, began)


def _replaced(*_: object, **__: object) -> None:
    _stored.stop_all("the weights are replaced")


def _checked(_: object, request: CheckWeightsReqInput) -> None:
    """One action of the check of weights overwrites them, with random ones."""
    if request.action == "reset_tensors":
        _stored.stop_all("the weights are reset")
