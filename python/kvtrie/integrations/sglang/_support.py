"""What the cache supports, and may move: checked when SGLang makes it, before a request arrives."""

from __future__ import annotations

import logging
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtrie import gates
from kvtrie._core import SHARED, LayoutError, Namespace, UnsupportedRopeError
from kvtrie.integrations import _asked, _served, _store_identity
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.sglang import _events, _gaps, _snapshots, _waiting
from kvtrie.integrations.sglang._events import ApproximateEvents
from kvtrie.integrations.sglang._moving import Moving, pool_of, unmoved_pool_of
from kvtrie.integrations.sglang._ranks import shared_seed
from kvtrie.integrations.sglang._reasoning import openings_of, tagger_of
from kvtrie.integrations.sglang._recording import RequestLog
from kvtrie.integrations.sglang._resolved import resolved
from kvtrie.integrations.sglang._settings import VARIABLE, SGLangSettings
from kvtrie.integrations.sglang._stored import PoolStore
from kvtrie.integrations.sglang._version import check_version, installed, refuse
from kvtrie.integrations.sglang.cache import KvtrieCache
from kvtrie.rope import RopeSpec
from kvtrie.store import SpanShape, StoreRefused

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from kvtrie.integrations._snapshots import SnapshotSource
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.tags import Tagger

_LOG = logging.getLogger("sglang.kvtrie")

# Settings of SGLang, the values that are supported, and why no others.
_SETTINGS: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "speculative_algorithm": ((None,), "drafts have KV and keys of their own"),
    "radix_eviction_policy": (("lru",), "kvtrie evicts the least recently used pages"),
    "strip_thinking_cache": (
        (False,),
        "it drops the answer with the reasoning; kvtrie keeps both",
    ),
    "enable_hierarchical_cache": ((False,), "pages in host memory are not in the index"),
    "enable_lmcache": ((False,), "LMCache brings a cache of its own"),
    "enable_flexkv": ((False,), "FlexKV brings a cache of its own"),
    "enable_unified_cache_external_linker": ((False,), "its pages are not in the index"),
    "enable_streaming_session": ((False,), "sessions keep pages outside of the cache"),
    "enable_session_radix_cache": ((False,), "sessions keep pages outside of the cache"),
    "disaggregation_mode": (("null",), "prefill and decode in two engines was not tested"),
    "enable_dp_attention": ((False,), "it was not tested"),
    # What SGLang makes of that flag, which it takes back.
    "attn_dp_size": ((1,), "data-parallel attention was not tested"),
    "dp_size": ((1,), "more than one replica in a server was not tested"),
    "pp_size": ((1,), "pipeline stages were not tested"),
    "attn_cp_size": ((1,), "context parallelism was not tested"),
    "disable_radix_cache": ((False,), "there is no cache then"),
}


def make(context: TreeCacheBuildContext) -> KvtrieCache:
    """Check what SGLang was started with, and make its cache.

    Raises:
        SGLangUnsupportedError: Something is not supported; the message names it.
    """
    check_version()
    context = _resolved_context(context)
    for name, (supported, why) in _SETTINGS.items():
        found: Any = getattr(context.server_args, name)
        if found not in supported:
            refuse(f"{name}={found!r} is not supported: {why}")
    for name in ("is_hybrid_swa", "is_hybrid_ssm", "is_dsa"):
        if getattr(context, name):
            refuse(f"models with {_KINDS[name]} are not supported: all layers need full attention")
    if context.disable_radix_cache:  # SGLang's own decision, which is in no setting
        refuse(
            "multimodal models of the Transformers backend are not supported: SGLang keeps no "
            "prefix cache for them"
        )
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    if allocator.page_size != params.page_size:
        refuse(
            f"pages of {allocator.page_size} slots in the pool and {params.page_size} in the cache "
            "are not supported"
        )
    num_pages = allocator.size // params.page_size
    args = context.server_args
    # All ranks have the same settings, so they come here alike; what is read below they may not.
    seed = shared_seed(params, args.tp_size, num_pages)
    tagger = tagger_of(args)
    moving, why, is_gate_of_another = (
        None,
        "exact reuse only (the gate is of another model)",
        False,
    )
    try:
        moving, why = _moving_of(context, tagger)
    except gates.GateMismatchError as error:
        is_gate_of_another = True
        _LOG.warning("kvtrie: exact reuse only: %s", error)
    recording = _recording_of(context, tagger)
    snapshots = _snapshots_of(context, num_pages)
    approximate = None if moving is None else _approximate_events_of(context)
    stored = _stored_of(context, tagger, moving)
    cache = KvtrieCache(
        params,
        num_pages,
        args.model_path,
        tagger,
        moving,
        recording,
        snapshots,
        approximate,
        stored,
        reasoning=_settings().reasoning,
        seed=seed,
        counts_for_all=context.tp_rank == 0,
    )
    if is_gate_of_another:
        cache._count("gate")  # noqa: SLF001 - a failure of making it
    _LOG.info(
        "kvtrie: prefix cache of %d pages of %d tokens, in SGLang %s; %s",
        num_pages,
        params.page_size,
        installed(),
        why,
    )
    return cache


def _settings() -> SGLangSettings:
    """The operator's settings.

    Raises:
        SGLangUnsupportedError: One is unknown or invalid.
    """
    try:
        return SGLangSettings.read()
    except SettingsError as error:
        refuse(str(error))


def _resolved_context(context: TreeCacheBuildContext) -> TreeCacheBuildContext:
    """A context whose settings are those that the server runs with."""
    context = copy(context)
    context.server_args = resolved(context.server_args)
    return context


def _moving_of(context: TreeCacheBuildContext, tagger: Tagger | None) -> tuple[Moving | None, str]:
    """What may continue a match, and why, in the words of the log.

    Raises:
        GateMismatchError: The gate is of another model, KV type, RoPE setting or chat template.
        SGLangUnsupportedError: A setting is invalid, or the gate cannot be read.
    """
    try:
        settings = SGLangSettings.read()
        if settings.gate is None:
            return None, "exact reuse only (no gate)"
        kvcache = context.params.token_to_kv_pool_allocator.get_kvcache()
        decision = _served.decide(settings.gate, settings.wanted(), _model(context, kvcache))
    except gates.GateMismatchError:
        raise
    except (SettingsError, gates.GateError, UnicodeError) as error:
        refuse(str(error))
    if not decision.policy.approximate:
        _LOG.warning("kvtrie: exact reuse only: %s", decision.reason)
        return None, f"exact reuse only (gate: {settings.gate})"
    try:
        pool = pool_of(kvcache, context.model_config.hf_text_config)
    except (LayoutError, UnsupportedRopeError) as error:
        _LOG.warning("kvtrie: exact reuse only: %s", error)
        return None, "exact reuse only (its KV cannot be moved)"
    why_not = _why_not_moved(context)
    if why_not is not None:
        _LOG.warning("kvtrie: exact reuse only: %s", why_not)
        return None, "exact reuse only (its KV is not moved)"
    _LOG.info("kvtrie: %s", decision.reason)
    moving = Moving(
        decision,
        tagger,
        pool,
        _stream_of(context, pool),
        settings.default,
        is_checked=settings.gate != _served.UNCHECKED,
        max_in_gaps=_max_in_gaps(context, settings) if settings.gaps else 0,
        is_shadow=settings.shadow,
        openings=openings_of(context.server_args) if tagger is None else None,
    )
    who = "" if settings.default == "approximate" else ", for requests that opt in"
    what = "exact reuse only, and a count of" if settings.shadow else "approximate"
    gaps = "after gaps too" if settings.gaps else "up to the first gap"
    return moving, f"{what} reuse {gaps} (gate: {settings.gate}){who}"


def _stream_of(context: TreeCacheBuildContext, pool: KVPool) -> Any:  # noqa: ANN401 - of a device's module
    """The stream of the steps; None: that of the scheduler, which calls the cache."""
    if pool.device.type == "cpu" or context.server_args.disable_overlap_schedule:
        return None
    return context.tp_worker.model_runner.forward_stream


def _stored_of(
    context: TreeCacheBuildContext, tagger: Tagger | None, moving: Moving | None
) -> PoolStore | None:
    """The store next to the pool; None: there is none.

    Raises:
        SGLangUnsupportedError: The setting is invalid, or there can be no store here.
    """
    where = f"{VARIABLE}: store"
    try:
        given = SGLangSettings.read().stored()
        if given is None:
            return None
        given.check_files(VARIABLE)
        model = context.model_config
        why_not = _why_not_stored(context)
        if why_not is not None:
            refuse(f"{where}: {why_not}")
        kvcache = context.params.token_to_kv_pool_allocator.get_kvcache()
        pool, for_reading = unmoved_pool_of(kvcache), unmoved_pool_of(kvcache)
        served = _model(context, kvcache)
        name = _store_identity.identity(
            given,
            served,
            model.hf_text_config,
            VARIABLE,
            dtype=str(model.dtype).removeprefix("torch."),
            context=model.context_len,
        )
        # Another engine computes with other kernels, which was not compared.
        space = Namespace(model=f"{name} sglang", kv_dtype=served.kv_dtype, salt=SHARED)
        store = given.open(space, SpanShape.of(pool.layout), VARIABLE)
    except (SettingsError, StoreRefused) as error:
        refuse(str(error))
    except (ImportError, LayoutError) as error:
        refuse(f"{where}: {error}")
    _LOG.info("kvtrie: store %s: %d runs of this model", given.backend, store.num_runs)
    if moving is not None:
        pool = moving.pool  # whose keys can be rotated
    return PoolStore(
        store,
        given,
        space,
        pool,
        for_reading,
        page_size=context.params.page_size,
        stream=_stream_of(context, pool),
        tagger=tagger,
    )


def _why_not_stored(context: TreeCacheBuildContext) -> str | None:
    """Why there can be no store in this server; None if there can."""
    args = context.server_args
    reasons = {
        f"tp_size={args.tp_size} is not supported: the ranks would have to agree on what arrived": (
            args.tp_size > 1
        ),
        "--enable-memory-saver is not supported: it unmaps pages that a thread reads": (
            args.enable_memory_saver
        ),
        # The store's name has none of these.
        "--kt-weight-path is not supported: experts have other weights than the model's": (
            args.kt_weight_path is not None
        ),
        "--kt-max-deferred-experts-per-token is not supported: it changes what is computed": (
            args.kt_max_deferred_experts_per_token is not None
        ),
        "--forward-hooks is not supported: it changes what is computed": bool(args.forward_hooks),
        "--enable-w4a4-mxfp4-megamoe is not supported: it changes what is computed": (
            args.enable_w4a4_mxfp4_megamoe
        ),
        "SGLang could not be hooked; its log says why": not _waiting.is_installed(),
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    return found or _why_not_moved(context)


def _why_not_moved(context: TreeCacheBuildContext) -> str | None:
    """Why nothing is moved in this server, whatever the gate says; None if it is."""
    args = context.server_args
    reasons = {
        f"tp_size={args.tp_size}: moves on more than one rank were not tested": args.tp_size > 1,
        "the model generates nothing (embeddings, rewards)": (
            args.is_embedding or not context.model_config.is_generation
        ),
        "--dllm-algorithm: a block of a diffusion model attends to what follows": (
            args.dllm_algorithm is not None
        ),
        "--enable-pdmux runs prefill by another way": args.enable_pdmux,
        "--enable-return-routed-experts reads what is stored for each slot": (
            args.enable_return_routed_experts
        ),
        "--enable-return-indexer-topk reads what is stored for each slot": (
            args.enable_return_indexer_topk
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _recording_of(context: TreeCacheBuildContext, tagger: Tagger | None) -> RequestLog | None:
    """Where finished requests are recorded.

    Raises:
        SGLangUnsupportedError: The setting is invalid, or the log cannot be written.
    """
    try:
        options = SGLangSettings.read().recorded()
        _asked.check_record(options, VARIABLE)
    except SettingsError as error:
        refuse(str(error))
    if options is None or context.tp_rank != 0:
        return None  # one rank records for all
    return RequestLog(options, context.params.page_size, context.server_args.model_path, tagger)


def _snapshots_of(context: TreeCacheBuildContext, num_pages: int) -> SnapshotSource | None:
    """Where snapshots of the KV events are given; None: nowhere.

    Raises:
        SGLangUnsupportedError: The setting is invalid, or the endpoint cannot be used.
    """
    try:
        endpoint = _snapshots.check(SGLangSettings.read().snapshot, context.server_args)
        # One rank publishes for all.
        if endpoint is None or not context.params.enable_kv_cache_events:
            return None
        return _snapshots.source(endpoint, num_pages)
    except SettingsError as error:
        refuse(str(error))


def _approximate_events_of(context: TreeCacheBuildContext) -> ApproximateEvents | None:
    """Where the events of approximate pages are published; None: nowhere.

    Raises:
        SGLangUnsupportedError: The endpoint cannot be used.
    """
    given = _settings().events
    if given is None:
        return None
    try:
        _events.check(given, context.server_args)
        if not context.params.enable_kv_cache_events:
            return None  # one rank publishes for all
        return ApproximateEvents(context.params, _events.publisher(given))
    except SettingsError as error:
        refuse(str(error))


def _max_in_gaps(context: TreeCacheBuildContext, settings: SGLangSettings) -> int:
    """How many tokens of a prompt are computed in gaps: a chunk.

    Raises:
        SGLangUnsupportedError: Gaps are not computed in this server.
    """
    args = context.server_args
    why = _gaps.why_not(args, context.tp_worker, is_shadow=settings.shadow)
    if why is not None:
        refuse(f'{VARIABLE}: "gaps": true is not supported: {why}')
    chunk: int | None = args.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else int(args.max_prefill_tokens)


def _model(
    context: TreeCacheBuildContext,
    kvcache: Any,  # noqa: ANN401 - one of SGLang's pools
) -> _served.EngineModel:
    args, template = context.server_args, None
    if args.chat_template is not None:
        # A file, or the name of one of SGLang's own templates, which no model directory has.
        path = Path(args.chat_template)
        template = path.read_text(encoding="utf-8") if path.is_file() else args.chat_template
    return _served.EngineModel(
        engine="SGLang",
        where=VARIABLE,
        model=args.model_path,
        load_format=args.load_format,
        quantization=args.quantization,
        kv_dtype=str(kvcache.dtype).removeprefix("torch."),
        rope=(
            None
            if args.json_model_override_args in (None, "", "{}")
            else lambda: RopeSpec.from_config(context.model_config.hf_text_config)
        ),
        template=template,
        revision=args.revision,
        cache_dir=args.download_dir,
    )


_KINDS: Final = {
    "is_hybrid_swa": "sliding windows",
    "is_hybrid_ssm": "states",
    "is_dsa": "sparse attention",
}
