"""Everything of vLLM that the connector touches: its names, and which fields and calls of them.

Modules import vLLM's names from here; types for annotations come from vLLM itself. `probe` compares
`FIELDS` and `CALLS` with the vLLM that runs, so that a renamed field is refused at start-up by its
name, and surprises no request. ``tests/vllm_scheduler/test_probe.py`` renames each of them, and
``test_touched.py`` compares these tables with what the modules here touch.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from vllm import SamplingParams
from vllm import __version__ as VERSION  # noqa: N812 - vLLM's name for it
from vllm.config import (
    AuxOutputConfig,
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    VllmConfig,
    get_layers_from_vllm_config,
)
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    KVCacheEvent,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtrie.integrations.vllm._version import lacks, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "VERSION",
    "AllBlocksCleared",
    "AsyncScheduler",
    "AttentionLayerBase",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "EventBatch",
    "EventPublisherFactory",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVEventsConfig",
    "MLAAttentionSpec",
    "MambaSpec",
    "MultiConnector",
    "NewRequestData",
    "ReasoningParserManager",
    "RequestStatus",
    "SamplingParams",
    "SlidingWindowSpec",
    "SupportsHMA",
    "ZmqEventPublisher",
    "cached_tokenizer_from_config",
    "cpu_isa",
    "create_metric_per_engine",
    "current_platform",
    "extract_layer_index",
    "get_block_hash",
    "get_current_vllm_config_or_none",
    "get_layers_from_vllm_config",
    "maybe_convert_block_hash",
    "nixl_connector",
    "probe",
    "probe_connector",
    "probe_scheduler",
    "probe_transfer",
    "resolve_block_hashes",
]

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Request": (
        *("request_id", "status", "mm_features", "lora_request", "cache_salt", "resumable"),
        *("prompt_token_ids", "prompt_is_token_ids", "all_token_ids", "spec_token_ids"),
        *("num_prompt_tokens", "num_tokens", "num_output_tokens", "num_computed_tokens"),
        *("num_in_flight_tokens", "num_output_placeholders", "num_preemptions"),
        *("num_stale_output_tokens", "drop_stale_output", "prefill_stats", "sampling_params"),
        *("block_hashes", "skip_reading_prefix_cache", "kv_transfer_params"),
        *("session_id", "kv_hints", "arrival_time", "kv_cache_report_mode"),
    ),
    "RequestStatus": ("RUNNING", "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR"),
    "SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("has_sync_kv_loads", "total_num_scheduled_tokens"),
    ),
    "CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    ),
    "NewRequestData": (
        *("req_id", "prompt_token_ids", "prefill_token_ids", "sampling_params"),
        *("num_computed_tokens", "block_ids", "mm_features"),
    ),
    "MultiModalFeatureSpec": ("modality", "identifier", "mm_position"),
    "PlaceholderRange": ("offset", "length", "is_embed"),
    "SamplingParams": ("prompt_logprobs", "max_tokens", "temperature"),
    "KVCacheManager": ("block_pool", "coordinator"),
    "KVCacheBlocks": ("blocks",),
    "BlockPool": (
        *("blocks", "num_gpu_blocks", "hash_block_size", "free_block_queue"),
        *("enable_kv_cache_events", "kv_event_queue", "null_block"),
    ),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "num_free_blocks"),
    "KVCacheBlock": ("block_id", "block_hash", "ref_cnt", "is_null", "next_free_block"),
    "PrefillStats": (),
    "PrefixCacheStats": ("hits", "preempted_hits", "hits_by_source"),
    "CacheHitSource": ("EXTERNAL_UNSPECIFIED",),
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"),
        *("lora_id", "lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "EventBatch": ("ts", "events"),
    "MultiConnector": ("sub_connectors",),
    "KVConnectorStats": ("data",),
    "KVConnectorPromMetrics": ("_counter_cls", "per_engine_labelvalues"),
    "KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta"),
    "LoRARequest": ("lora_name", "lora_path"),
    "KvHintsEnvelope": ("actions",),
    "KvHintAction": ("action_type",),
    "KVCacheConfig": ("kv_cache_groups", "prefix_cache_retention_interval"),
    "KVCacheGroupSpec": ("kv_cache_spec", "layer_names", "is_eagle_group"),
    "FullAttentionSpec": (
        *("block_size", "sliding_window", "attention_chunk_size", "non_causal"),
        *("tokens_per_state", "head_size", "head_size_v", "num_kv_heads"),
    ),
    "SlidingWindowSpec": (
        *("block_size", "sliding_window", "extra_retained_tokens", "tokens_per_state"),
    ),
    "VllmConfig": (
        *("model_config", "cache_config", "parallel_config", "scheduler_config"),
        *("speculative_config", "load_config", "structured_outputs_config"),
        *("kv_transfer_config", "kv_events_config", "use_v2_model_runner", "aux_output_config"),
        "weight_transfer_config",
    ),
    "ModelConfig": (
        *("model", "revision", "dtype", "quantization", "hf_overrides", "hf_text_config"),
        *("use_mla", "uses_mrope", "logits_processors", "runner_type", "enable_sleep_mode"),
        *("max_model_len", "is_mm_prefix_lm"),
    ),
    "CacheConfig": ("enable_prefix_caching", "cache_dtype", "kv_sharing_fast_prefill"),
    "ParallelConfig": (
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
        *("pipeline_parallel_size", "data_parallel_index", "use_ubatching"),
        "tensor_parallel_size",
    ),
    "SchedulerConfig": (
        *("async_scheduling", "scheduler_cls", "max_num_batched_tokens", "max_num_seqs"),
        *("long_prefill_token_threshold", "policy", "disable_chunked_mm_input"),
    ),
    "SpeculativeConfig": ("method",),
    "StructuredOutputsConfig": ("reasoning_parser",),
    "LoadConfig": ("load_format", "download_dir"),
    "KVTransferConfig": ("kv_connector", "kv_connector_extra_config"),
    "KVEventsConfig": ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
    "AuxOutputConfig": ("enabled",),
    "ReasoningParser": ("reasoning_start_str", "reasoning_end_str"),
}
"""Fields that kvtrie reads or sets.

Of classes that are not made here, those that are declared, or that one of their methods sets.
"""

CALLS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Request": {"update_block_hashes": ()},
    "NewRequestData": {
        "from_request": ("request", "block_ids", "prefill_token_ids", "uses_mrope"),
    },
    "KVCacheManager": {"get_block_ids": ("request_id",), "evict_blocks": ("block_ids",)},
    "KVCacheCoordinator": {
        "find_longest_cache_hit": ("block_hashes", "max_cache_hit_length"),
    },
    "BlockPool": {
        "get_cached_block": ("block_hash", "kv_cache_group_ids"),
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
        "unpin_blocks": ("blocks", "on_reuse"),
        "evict_blocks": ("block_ids",),
        "get_num_free_blocks": (),
    },
    "FreeKVCacheBlockQueue": {
        "remove": ("block",),
        "prepend_n": ("blocks",),
        "append_n": ("blocks",),
    },
    "PrefillStats": {
        "set": ("num_prompt_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    },
    "EventPublisherFactory": {"create": ("config", "data_parallel_rank")},
    "EventPublisher": {"publish": ("events",), "shutdown": ()},
    "ZmqEventPublisher": {"offset_endpoint_port": ("endpoint", "data_parallel_rank")},
    "KVConnectorStats": {"to_dict": ()},
    "ReasoningParserManager": {"get_reasoning_parser": ("name",)},
    "AttentionLayerBase": {"get_attn_backend": ()},
    "AttentionBackend": {"get_name": ()},
    "Platform": {"is_cpu": ()},
}
"""Methods that kvtrie calls, and their parameters."""

OVERRIDDEN: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "KVConnectorBase_V1": {
        "bind_kv_cache_manager": ("kv_cache_manager",),
        "on_new_request": ("request",),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "update_connector_output": ("connector_output",),
        "request_finished": ("request", "block_ids"),
        "reset_cache": (),
        "shutdown": (),
        "register_kv_caches": ("kv_caches",),
        "start_load_kv": ("forward_context",),
        "wait_for_layer_load": ("layer_name",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
        "wait_for_save": (),
        "get_block_ids_with_load_errors": (),
        "build_connector_worker_meta": (),
        "requires_piecewise_for_cudagraph": ("extra_config",),
        "get_kv_connector_stats": (),
        "take_events": (),
        "build_kv_connector_stats": ("data",),
        "build_prom_metrics": (
            *("vllm_config", "metric_types", "labelnames"),
            "per_engine_labelvalues",
        ),
    },
    "SupportsHMA": {"request_finished_all_groups": ("request", "block_ids")},
    "KVConnectorWorkerMetadata": {"aggregate": ("other",)},
    "KVConnectorStats": {"reset": (), "aggregate": ("other",), "reduce": (), "is_empty": ()},
    "KVConnectorPromMetrics": {"observe": ("transfer_stats_data", "engine_idx")},
    "AsyncScheduler": {
        "schedule": (),
        "_preempt_request": ("request", "timestamp"),
        "_try_schedule_encoder_inputs": (
            *("request", "num_computed_tokens", "num_new_tokens"),
            "encoder_compute_budget",
        ),
        "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
    },
}
"""Methods that vLLM calls: all its required parameters, in their order."""

ADDED: Final[Mapping[tuple[int, int], Mapping[str, Mapping[str, tuple[str, ...]]]]] = {
    (0, 33): {
        "KVConnectorBase_V1": {
            "supports_sleep_mode": ("kv_transfer_config",),
            "unregister_kv_caches": (),
            "restore_kv_caches": (),
        },
    },
}
"""Methods that vLLM calls from a release on: as `OVERRIDDEN`, and absent before."""

CONNECTOR: Final = (
    *("_vllm_config", "_kv_cache_config", "_kv_transfer_config"),
    "_get_connector_metadata",
)
"""Attributes that `KvtrieConnector` uses of the connector that it is."""

TRANSFER: Final = (
    *("request_finished_all_groups", "get_num_new_matched_tokens"),
    "update_state_after_alloc",
)
"""Methods that `CheckedTransfer` extends; a connector that does not have them is never checked."""

TRANSFER_STATS: Final = (
    *("get_kv_connector_stats", "build_kv_connector_stats"),
    "build_prom_metrics",
)
"""Likewise of a connector with stats of its own, as NIXL's."""

SCHEDULER: Final = (
    *("connector", "connector_prefix_cache_stats", "defer_block_free", "running", "requests"),
    *("finished_req_ids", "max_num_active_reqs", "max_num_running_reqs"),
    *("max_num_scheduled_tokens", "num_waiting_for_streaming_input", "vllm_config"),
    *("kv_cache_manager", "block_size", "use_v2_model_runner"),
)
"""Attributes that `KvtrieScheduler` uses of the scheduler that it is."""


_DECLARED: Final = (
    *(BlockStored, BlockRemoved, KVConnectorOutput, LoRARequest, MultiConnector),
    *(KvHintsEnvelope, KvHintAction, KVCacheManager, KVCacheBlocks, EventBatch),
    *(EventPublisher, EventPublisherFactory, ZmqEventPublisher),
    *(KVConnectorStats, KVConnectorPromMetrics, KVConnectorWorkerMetadata),
    *(AttentionLayerBase, AttentionBackend, ReasoningParser, ReasoningParserManager),
    *(KVCacheConfig, KVCacheGroupSpec, KVCacheCoordinator),
    *(FullAttentionSpec, SlidingWindowSpec),
    *(MultiModalFeatureSpec, PlaceholderRange),
    *(VllmConfig, ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig),
    *(StructuredOutputsConfig, LoadConfig, KVTransferConfig, KVEventsConfig, AuxOutputConfig),
)


def nixl_connector() -> Any:  # noqa: ANN401 - a class of vLLM's
    """The connector over NIXL, whose package is imported for it alone.

    Raises:
        UnsupportedError: There is none under this name.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: PLC0415
            NixlConnector,
        )
    except ImportError as error:
        lacks(error)
    return NixlConnector


def cpu_isa(dtype: object, block_size: int, head_dim: int) -> str | None:
    """The instruction set of the CPU build's attention.

    Raises:
        UnsupportedError: This vLLM does not say.
    """
    try:
        from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - of the CPU build alone
            _get_attn_isa,
        )
    except ImportError as error:
        lacks(error)
    isa: str | None = _get_attn_isa(dtype, block_size, head_dim)
    return isa


def things() -> dict[str, object]:
    """One of each of `FIELDS`, `CALLS` and `OVERRIDDEN`, made as vLLM makes them."""
    pool = BlockPool(2, enable_caching=True, hash_block_size=16)
    request = Request("probe", [1], SamplingParams(max_tokens=1), None)
    output = SchedulerOutput.make_empty()
    return {
        "Request": request,
        "RequestStatus": RequestStatus,
        "SchedulerOutput": output,
        "CachedRequestData": output.scheduled_cached_reqs,
        "NewRequestData": NewRequestData.from_request(request, ([1],)),
        "SamplingParams": request.sampling_params,
        "BlockPool": pool,
        "FreeKVCacheBlockQueue": pool.free_block_queue,
        "KVCacheBlock": pool.blocks[0],
        "PrefillStats": PrefillStats(),
        "PrefixCacheStats": PrefixCacheStats(),
        "CacheHitSource": CacheHitSource,
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "SupportsHMA": SupportsHMA,
        "AsyncScheduler": AsyncScheduler,
        "Platform": current_platform,
        **{one.__name__: one for one in _DECLARED},
    }


def probe(given: Mapping[str, object] | None = None) -> None:
    """Compare what the connector touches with this vLLM; ``given``: its objects, for tests.

    Raises:
        UnsupportedError: Something is missing; the message has the names.
    """
    if given is None:
        try:
            given = things()
        except (AttributeError, TypeError) as error:
            refuse(f"vLLM {VERSION} makes its objects in another way: {error}")
    missing = [*_fields(given), *_calls(given), *_overridden(given)]
    if missing:
        refuse(f"vLLM {VERSION} has no {', '.join(missing)}, which kvtrie needs")


def release() -> tuple[int, ...]:
    """The minor version that the names are compared with, (0, 33) say."""
    return tuple(int(part) for part in re.findall(r"\d+", VERSION)[:2])


def probe_scheduler(scheduler: object) -> None:
    _probe_own(scheduler, "scheduler", SCHEDULER)


def probe_connector(connector: object) -> None:
    _probe_own(connector, "connector", CONNECTOR)


def probe_transfer(below: Sequence[type], methods: Iterable[str], word: str | None = None) -> None:
    """Compare a transfer connector with what is extended of it.

    Args:
        below: It and its bases, as in the order of resolution.
        methods: What it must implement itself, for vLLM's base class does nothing.
        word: A key that its modules must use.

    Raises:
        UnsupportedError: Something is missing; the message has the names.
    """
    name = below[0].__name__
    own = [one for one in below if one not in (*KVConnectorBase_V1.__mro__, SupportsHMA)]
    known = {**OVERRIDDEN["KVConnectorBase_V1"], **OVERRIDDEN["SupportsHMA"]}
    missing = [
        f"{name}.{method}({', '.join(known[method])})"
        for method in methods
        if not any(method in vars(one) for one in own)
        or not _takes(getattr(own[0], method), len(known[method]))
    ]
    if word is not None and not any(_says(code, word) for code in _codes_of_package(own[0])):
        missing.append(f"{word!r} in the package of {name}")
    if missing:
        refuse(f"vLLM {VERSION} has no {', '.join(missing)}, which kvtrie needs")


def _takes(call: Callable[..., object], count: int) -> bool:
    """Whether a method can be called with so many arguments."""
    given = [None] * (count + (not inspect.ismethod(call)))
    try:
        inspect.signature(call).bind(*given)
    except TypeError:
        return False
    return True


def _codes_of_package(one: type) -> Iterator[CodeType]:
    package = one.__module__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            yield from _codes(value for value in vars(module).values() if isinstance(value, type))


def _says(code: CodeType, word: str) -> bool:
    # A call's keywords and a literal's keys are tuples.
    return any(word == one or (isinstance(one, tuple) and word in one) for one in code.co_consts)


def _probe_own(mine: object, what: str, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(mine, name)]
    if missing:
        refuse(f"the {what} of vLLM {VERSION} has no {', '.join(missing)}")


def _fields(given: Mapping[str, object]) -> Iterator[str]:
    tables = (*FIELDS.items(), ("AsyncScheduler", SCHEDULER), ("KVConnectorBase_V1", CONNECTOR))
    for owner, names in tables:
        for name in names:
            thing = given[owner]
            declared = getattr(thing, "__dataclass_fields__", ())
            if not hasattr(thing, name) and name not in declared and not _sets(thing, name):
                yield f"{owner}.{name}"


def _sets(thing: object, name: str) -> bool:
    """Whether a method of a class sets an attribute of this name."""
    codes = _codes(getattr(thing, "__mro__", ()))
    return any(name in code.co_names and name in _set_by(code) for code in codes)


@cache
def _set_by(code: CodeType) -> frozenset[str]:
    """The attributes that a method sets; kept, since each part of vLLM that starts is probed."""
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def _codes(classes: Iterable[type]) -> Iterator[CodeType]:
    for one in classes:
        for value in vars(one).values():
            found = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if isinstance(found, CodeType):
                yield found


def _calls(given: Mapping[str, object]) -> Iterator[str]:
    for owner, calls in CALLS.items():
        for name, wanted in calls.items():
            has = _parameters(given[owner], name)
            if has is None:
                yield f"{owner}.{name}()"
            else:
                takes_any = any(one.kind == one.VAR_KEYWORD for one in has.values())
                lost = [one for one in wanted if one not in has and not takes_any]
                yield from (f"{owner}.{name}({one}=)" for one in lost)


def _overridden(given: Mapping[str, object]) -> Iterator[str]:
    tables = [OVERRIDDEN, *(table for first, table in ADDED.items() if release() >= first)]
    for owner, methods in (pair for table in tables for pair in table.items()):
        for name, wanted in methods.items():
            has = _parameters(given[owner], name)
            if has is None:
                yield f"{owner}.{name}()"
                continue
            required = [
                one.name
                for one in has.values()
                if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
                and (one.default is one.empty or one.name in wanted)
            ]
            if required != list(wanted):
                yield f"{owner}.{name}({', '.join(wanted)}), but ({', '.join(required)})"


def _parameters(owner: object, name: str) -> Mapping[str, inspect.Parameter] | None:
    call: Any = getattr(owner, name, None)
    if not callable(call):
        return None
    found = dict(inspect.signature(call).parameters)
    found.pop("self", None)
    return found
