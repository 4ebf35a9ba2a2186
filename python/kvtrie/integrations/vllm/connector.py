"""The class that vLLM loads: connects its interface to planner and copies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtrie._core import EXACT_ONLY
from kvtrie.integrations._asked import SettingsError, named
from kvtrie.integrations.vllm import _events, _gate, _support, _template, _version
from kvtrie.integrations.vllm._copies import Copies
from kvtrie.integrations.vllm._exact import ExactPlanner
from kvtrie.integrations.vllm._metadata import StepMetadata, StoreReport
from kvtrie.integrations.vllm._planner import Planner
from kvtrie.integrations.vllm._settings import Settings
from kvtrie.integrations.vllm._snapshots import Snapshots, snapshots
from kvtrie.integrations.vllm._stats import Counts, PromMetrics, Stats
from kvtrie.integrations.vllm._vllm import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    probe,
    probe_connector,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._store_worker import StoreWorker
    from kvtrie.pool.kv_pool import KVPool

_LOG = logging.getLogger("vllm.kvtrie")


def check_early(extra_config: Mapping[str, Any]) -> None:
    """Check what needs no model: vLLM, settings, and that files can be read.

    Raises:
        SettingsError: A setting is unknown or invalid.
        UnsupportedError: This vLLM is not supported.
        GateError: The gate file cannot be read.
    """
    settings = Settings.read(extra_config)
    _support.check_version(moves=settings.moves)
    probe()
    _gate.read(settings)
    _template.served(settings)
    settings.check_record()
    settings.check_store()


def _store_of(
    settings: Settings, vllm_config: VllmConfig, pool: KVPool, counts: Counts
) -> StoreWorker:
    """Open the store, in a worker's half.

    Raises:
        StoreRefused: It is of another model, KV, geometry, key or version, or does not answer.
    """
    from kvtrie.integrations.vllm import _store_worker  # noqa: PLC0415 - needs the extra

    return _store_worker.make(settings, vllm_config, pool, counts)


class KvtrieConnector(KVConnectorBase_V1, SupportsHMA):
    """Reuses KV of vLLM's own pool at other positions and after other prefixes.

    vLLM makes one in its scheduler and one in each worker.

    Args:
        vllm_config: vLLM's configuration; ``kv_connector_extra_config`` holds the `Settings`.
        role: Which half this is.
        kv_cache_config: The groups of KV blocks.

    Raises:
        SettingsError: A setting is unknown or invalid.
        UnsupportedError: This vLLM, model or configuration is not supported.
        UnsupportedRopeError: Approximate reuse is configured, and the model's keys cannot be
            rotated by a delta.
        GateError: The gate file cannot be read, or is for another model.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        probe_connector(self)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        moves = self._settings.moves
        is_exact = self._settings.is_exact
        _support.check(vllm_config, kv_cache_config, moves=moves, is_exact=is_exact)
        if not _version.is_tested():
            _LOG.warning("kvtrie: vLLM %s is untested; it looks the same", _version.running())
        self._decision = _gate.decision_of(self._settings, vllm_config)
        # In shadow mode, too: what moving would refuse has no counts.
        if self._decision.policy.approximate:
            _support.rope_of(vllm_config)
        self._cleared = EXACT_ONLY if self._settings.shadow else self._decision.policy
        self._block_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._has_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._copies_exact_kv = _support.copies_exact_kv(vllm_config, kv_cache_config)
        gives = self._settings.snapshot is not None
        self._is_among_others = _support.check_others(
            vllm_config, moves=moves, is_exact=is_exact, snapshots=gives
        )
        if gives and self._has_groups:
            _version.refuse(
                "an index of workers does not follow models with several groups of KV blocks: "
                'remove "snapshot"'
            )
        if self._is_among_others and not self._copies_exact_kv:
            what = "models with several groups of KV blocks were"
            if not self._has_groups:
                what = f"KV in {vllm_config.cache_config.cache_dtype} was"
            _version.refuse(f"{what} not run next to other connectors: use KvtrieConnector alone")
        self._counts = Counts()
        self._store: StoreWorker | None = None
        if self._settings.stored() is not None:
            _support.check_store(
                vllm_config, kv_cache_config, is_among_others=self._is_among_others
            )
        if self._settings.images:
            _support.check_images(vllm_config, kv_cache_config, is_exact=is_exact)
        self._planner: Planner | ExactPlanner | None = None
        self._snapshots: Snapshots | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._copies: Copies | None = None
        self._not_copied: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped copy is only a cache miss."""
        return False

    # --- scheduler ---------------------------------------------------------------------------

    @property
    def planner(self) -> Any:  # noqa: ANN401 - `Planner`, or `ExactPlanner` in exact mode
        """The scheduler's half."""
        if self._planner is None:
            msg = "KvtrieConnector: no cache manager is bound; this is a worker's half"
            raise RuntimeError(msg)
        return self._planner

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._settings.is_exact:
            self._bind_exact(kv_cache_manager)
        else:
            self._bind(kv_cache_manager)
        # A shadow publishes nothing of its own.
        self._snapshots = snapshots(
            self._settings.snapshot,
            None if self._settings.shadow else self._settings.events,
            self._vllm_config,
            kv_cache_manager.block_pool,
            self._counts,
        )

    def _bind(self, kv_cache_manager: KVCacheManager) -> None:
        _support.check_pool(kv_cache_manager.block_pool, self._block_size)
        events = None if self._settings.shadow else self._settings.events
        publisher = _events.publisher(events, self._vllm_config)
        self._planner = Planner(
            self._vllm_config,
            self._kv_cache_config,
            kv_cache_manager,
            self._settings,
            self._decision,
            self._counts,
            publisher,
        )

    def _bind_exact(self, manager: KVCacheManager) -> None:
        made = ExactPlanner(
            self._vllm_config,
            self._kv_cache_config,
            manager,
            self._settings,
            self._decision,
            self._counts,
        )
        if not self._has_groups:
            _support.check_pool(manager.block_pool, self._block_size)
        self._planner = made

    def on_new_request(self, request: Request) -> None:
        """Register a request."""
        if self._snapshots is not None:
            # Events of reuse, which a client may ask for, are taken back by none: an index would
            # count blocks that are not there any more.
            request.kv_cache_report_mode = "incremental"
        try:
            self.planner.arrive(request)
        except SettingsError as error:
            _LOG.warning("kvtrie: request %s: %s", named(request.request_id), error)
            self._counts.add("requests_refused")
        except Exception:
            self._surprise(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The number of tokens after vLLM's own hit that are copied; None: ask again."""
        try:
            return self.planner.match(request, num_computed_tokens), False
        except Exception:
            self._surprise(request)
            return 0, False

    def update_state_after_alloc(
        self,
        request: Request,
        blocks: KVCacheBlocks,  # noqa: ARG002 - vLLM's interface
        num_external_tokens: int,
    ) -> None:
        """Take the destination blocks."""
        try:
            self.planner.allocated(request, num_external_tokens)
        except Exception:
            # vLLM relies on these tokens: an error is better than an answer from unwritten KV.
            if num_external_tokens:
                raise
            self._surprise(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The copies of this step."""
        # Nothing is caught: a step must not go out without its copies.
        return self.planner.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle copies that failed, and what was loaded from the store."""
        if connector_output.invalid_block_ids:
            self.planner.half.recovery.failed(connector_output.invalid_block_ids)
        report: object = connector_output.kv_connector_worker_meta
        if isinstance(report, StoreReport):
            self.planner.half.reported(report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Index what a request leaves in the cache."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Index what a request leaves in the cache; vLLM frees its blocks as usual."""
        try:
            self.planner.finish(request, block_ids)
        except Exception:
            self._surprise(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """Forget every block."""
        try:
            self.planner.half.reset()
        except Exception:
            _LOG.exception("kvtrie: blocks are not forgotten")
            self._counts.add("errors")
            return False
        return True

    def shutdown(self) -> None:
        """Publish no more events, give no more snapshots, and end the store's threads."""
        if self._planner is not None:
            self._planner.shutdown()
        if self._snapshots is not None:
            self._snapshots.shutdown()
        if self._store is not None:
            self._store.close()

    def _surprise(self, request: Request) -> None:
        _LOG.exception("kvtrie: request %s continues without kvtrie", named(request.request_id))
        self._counts.add("errors")
        self.planner.half.abandon(request.request_id)

    # --- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the worker's tensors."""
        if self._settings.is_exact and not self._copies_exact_kv:
            return
        self._kv_caches = kv_caches
        self._copies = None
        self.restore_kv_caches()

    def unregister_kv_caches(self) -> None:
        """Copy nothing until `restore_kv_caches`: sleep mode unmaps the tensors.

        vLLM resets its prefix cache with it, and with that all blocks that the scheduler's half
        knows.
        """
        if self._store is not None:
            self._store.unmap()
        self._copies = None

    def restore_kv_caches(self) -> None:
        """Take the registered tensors again, after sleep mode has mapped them."""
        if self._copies is None and self._kv_caches:
            self._copies = Copies(
                self._kv_caches,
                self._vllm_config,
                self._kv_cache_config,
                rotates=self._cleared.approximate,
            )
            if self._settings.stored() is not None:
                if self._store is None:
                    self._store = _store_of(
                        self._settings, self._vllm_config, self._copies.pool, self._counts
                    )
                self._store.map(self._copies.pool, self._copies.pool_for_reading)

    def start_load_kv(
        self,
        forward_context: ForwardContext,  # noqa: ARG002 - vLLM's interface
        **kwargs: Any,  # noqa: ANN401, ARG002 - vLLM's interface
    ) -> None:
        """Copy, before the forward pass."""
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            return
        store = None if self._store is None else metadata.store
        if store is not None and self._store is not None:
            self._store.begin(store)
        if self._copies is None:
            self._not_copied.update(block for load in metadata.loads for block in load.blocks)
        elif metadata.loads:
            self._copies.apply(metadata.loads, self._store)
        if store is not None and self._store is not None:
            self._store.end(store)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: copies and forward pass share a stream."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - vLLM's own, of many types
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: KV stays where it is."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose copy failed."""
        failed = self._not_copied
        if self._copies is not None:
            failed |= self._copies.take_failed()
        if not failed:
            return set()
        self._not_copied = set()
        if self._is_among_others:
            msg = f"KvtrieConnector: {len(failed)} blocks were not copied, and another connector "
            msg += "may store what they hold: start vLLM again"
            raise RuntimeError(msg)
        if self._has_groups:
            msg = f"KvtrieConnector: {len(failed)} blocks were not copied, and vLLM computes none "
            msg += "again in a model with several groups of KV blocks: start it again"
            raise RuntimeError(msg)
        self._counts.add("copies_failed", len(failed))
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What was loaded from the store, and written to it."""
        return None if self._store is None else self._store.report()

    # --- before anything is loaded -----------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether CUDA graphs must be cut at every layer: no, all copies come before the first one.

        With CUDA graphs, vLLM calls this before it loads any weights. So errors of `__init__` that
        are visible in the settings are raised here, after seconds.
        """
        check_early(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether copies can follow the mapping of KV: yes. vLLM asks where sleep mode is on."""
        check_early(kv_transfer_config.kv_connector_extra_config)
        return True

    # --- stats -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counters since the last call."""
        if self._planner is not None:
            # vLLM publishes its events next.
            self._planner.sort_events()
            # vLLM asks for it after every step, and has reported the step's failures before.
            self._planner.half.step_is_done()
        if self._snapshots is not None:
            self._snapshots.look()
        return self._counts.take()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """None of its own. vLLM has just taken those of its pool, and publishes them next."""
        if self._snapshots is not None:
            self._snapshots.published()
        return ()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their serialised form."""
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Prometheus metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
