"""vLLM's transfer between prefill and decode engines, with every block checked by its tokens.

vLLM's receiver trims a list of block ids by count: one more block on either side, and it loads the
wrong blocks without an error. The sender here adds a `kvtrie.TransferManifest`. The receiver loads
the blocks that follow its own prefix and hold its tokens, and computes everything else. The
connector still moves the bytes. ``docs/vllm.md`` has the configuration.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from kvtrie._core import (
    SHARED,
    Namespace,
    TokenSequence,
    TransferManifest,
    TransferRefused,
    plan_transfer,
)
from kvtrie.integrations import _store_identity
from kvtrie.integrations._asked import named
from kvtrie.integrations.vllm import _gate, _support
from kvtrie.integrations.vllm._outcomes import (
    OUTCOMES,
    THEIRS,
    TransferPromMetrics,
    TransferStats,
)
from kvtrie.integrations.vllm._requests import adapter_of
from kvtrie.integrations.vllm._settings import WHERE, Settings
from kvtrie.integrations.vllm._transfer_settings import MODEL, check_transfer
from kvtrie.integrations.vllm._vllm import (
    TRANSFER,
    TRANSFER_STATS,
    KVCacheBlocks,
    nixl_connector,
    probe_transfer,
)
from kvtrie.models.fingerprint import checkpoint_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_LOG = logging.getLogger("vllm.kvtrie")

MANIFEST: Final = "kvtrie_manifest"
_BLOCKS: Final = "remote_block_ids"
# Characters of a manifest: some, and for each token of a prompt as many as a block of one takes.
_MANIFEST_LEAST: Final = 1 << 16
_MANIFEST_PER_TOKEN: Final = 64


class CheckedTransfer:
    """A mixin before a transfer connector of vLLM, which checks what it loads.

    The connector must name its blocks in ``remote_block_ids`` of ``kv_transfer_params`` (one list
    per group), and take ``KVCacheBlocks`` to load into. Its KV must be exact.

    A manifest is of exact KV alone, so it says no policy: the engine computed the KV, or loaded it
    under `kvtrie.EXACT_ONLY`. `KvtrieConnector`, whose KV may be approximate, is refused next to
    any connector that sends blocks.

    Attributes:
        outcomes: Requests by outcome, each counted once, when it is admitted: ``"whole"``,
            ``"part"``, ``"nothing"`` (no block holds the tokens that follow), ``"no manifest"``,
            ``"not only token ids"`` (it has images or embeddings, which a manifest does not have),
            ``"error"``, and the reasons of `kvtrie.TransferRefused`. At the sender: ``"not sent"``,
            if the manifest could not be made. In Prometheus ``vllm:kvtrie_transfers``.

    Raises:
        SettingsError: There is no key, or it is invalid; or the model's weights cannot be read,
            and it has no name.
        UnsupportedError: Blocks cannot be identified by their tokens, or the connector has not the
            methods that are extended.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        _support.check(vllm_config, kv_cache_config, has_modes=False)
        self._probe()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._key = check_transfer(extra)
        self._space = _names(extra.get(MODEL), vllm_config)
        self._size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._promised: dict[str, tuple[int, int]] = {}
        self.outcomes: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        # vLLM may ask any number of times before it admits a request.
        self._found: dict[str, tuple[str, str | None]] = {}
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg] # the connector's

    @classmethod
    def _probe(cls) -> None:
        probe_transfer(_below(cls), TRANSFER)

    # --- the sender --------------------------------------------------------------------------

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Add the manifest of the blocks that wait to be fetched."""
        self._promised.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        result: tuple[bool, dict[str, Any] | None]
        result = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]  # a mixin
        delay, params = result
        if params and params.get(_BLOCKS) and not _is_token_ids(request):
            _LOG.warning(
                "kvtrie: request %s is sent without manifest: images", named(request.request_id)
            )
            self._count("not sent")
        elif params and params.get(_BLOCKS):
            try:
                params[MANIFEST] = self._manifest(request, block_ids[0])
            except Exception:
                _LOG.exception(
                    "kvtrie: request %s is sent without manifest", named(request.request_id)
                )
                self._count("not sent")
        return delay, params

    def _manifest(self, request: Request, block_ids: list[int]) -> str:
        seq = TokenSequence(list(request.all_token_ids), self._namespace(request))
        # Tokens in flight are not written yet; the last sampled token never is.
        done = request.num_computed_tokens - request.num_in_flight_tokens
        done = max(0, min(done, len(seq), len(block_ids) * self._size))
        manifest = TransferManifest.from_blocks(
            seq, block_ids, key=self._key, num_computed=done, block_size=self._size
        )
        return base64.b64encode(manifest.to_bytes()).decode()

    # --- the receiver ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the connector would load that are those of the request."""
        found: tuple[int | None, bool]
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]  # a mixin
        count, is_async = found
        self._promised.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        if not count:
            return count, is_async
        remote, end = self._loadable(request, num_computed_tokens, num_computed_tokens + count)
        if end <= num_computed_tokens:
            return 0, False
        # The connector trims this by count; it already has the right length.
        request.kv_transfer_params[_BLOCKS] = [remote]
        self._promised[request.request_id] = (num_computed_tokens, end)
        return end - num_computed_tokens, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load into the blocks of the promised positions, and into no others."""
        self._admitted(request)
        promised = self._promised.get(request.request_id)
        if promised is not None and num_external_tokens:
            first, last = promised[0] // self._size, -(-promised[1] // self._size)
            blocks = KVCacheBlocks(tuple(list(group)[first:last] for group in blocks.blocks))
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]  # a mixin

    def _loadable(self, request: Request, start: int, stop: int) -> tuple[list[int], int]:
        """The sender's blocks for the tokens from ``start`` on, and the end of their tokens."""
        if not _is_token_ids(request):
            self._tell(request, "not only token ids", "it has images or embeddings")
            return [], start
        prompt = request.prompt_token_ids or []
        ids, said = prompt[:stop], request.kv_transfer_params.get(MANIFEST)
        # It is read each time that vLLM asks, and whoever sends the request has written it.
        most = _MANIFEST_LEAST + _MANIFEST_PER_TOKEN * len(prompt)
        if isinstance(said, str) and len(said) > most:
            why = f"its manifest has {len(said)} characters, and {most} are read for its prompt"
            self._tell(request, "malformed", why)
            return [], start
        try:
            manifest = _read(said)
            if manifest is None:
                self._tell(request, "no manifest", "its sender runs without kvtrie")
                return [], start
            seq = TokenSequence(list(ids), self._namespace(request))
            # No block is allocated yet: positions identify the local ones.
            plan = plan_transfer(
                manifest, seq, cached=(0, start), key=self._key, block_size=self._size
            )
        except TransferRefused as error:
            self._tell(request, error.reason, str(error))
            return [], start
        except Exception:
            _LOG.exception("kvtrie: request %s computes its prompt", named(request.request_id))
            self._tell(request, "error", None)
            return [], start
        remote, end = [], start
        for pair in plan.pairs:
            # Contiguous, from the first missing token.
            if int(pair["start"]) != end or (end > start and end % self._size):
                break
            remote.append(int(pair["remote"]))
            end = int(pair["end"])
        if end < stop and end % self._size:
            # Only the last block may be loaded in part.
            remote.pop()
            end = max(start, end // self._size * self._size)
        if end == start:
            self._tell(request, "nothing", "no block holds the tokens that follow")
        else:
            self._tell(request, "whole" if end == stop else "part", None)
        return remote, end

    def _tell(self, request: Request, outcome: str, why: str | None) -> None:
        self._found[request.request_id] = outcome, why

    def _admitted(self, request: Request) -> None:
        outcome, why = self._found.pop(request.request_id, (None, None))
        if outcome is not None:
            self._count(outcome)
        if why is not None:
            _LOG.warning(
                "kvtrie: request %s computes its prompt: %s", named(request.request_id), why
            )

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._since[outcome] += 1

    def _namespace(self, request: Request) -> Namespace:
        return Namespace(
            adapter=adapter_of(request), salt=request.cache_salt or SHARED, **self._space
        )

    # --- before anything is loaded -----------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """What the connector says; vLLM asks before it loads weights, so settings are checked."""
        check_transfer(extra_config)
        said: bool = super().requires_piecewise_for_cudagraph(extra_config)  # type: ignore[misc]  # a mixin
        return said

    # --- stats -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The outcomes since the last call, and the connector's own stats."""
        theirs: KVConnectorStats | None
        theirs = super().get_kv_connector_stats()  # type: ignore[misc]  # a mixin
        since, self._since = self._since, Counter()
        if not since and (theirs is None or theirs.is_empty()):
            return None
        return TransferStats(theirs=theirs, outcomes=dict(since))

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their serialised form."""
        data = data or {}
        theirs = data.get(THEIRS)
        if theirs is not None:
            theirs = super().build_kv_connector_stats(theirs)  # type: ignore[misc]  # a mixin
        return TransferStats(theirs=theirs, outcomes=dict(data.get(OUTCOMES, {})))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferPromMetrics:
        """Prometheus metrics."""
        given = vllm_config, metric_types, labelnames, per_engine_labelvalues
        theirs = super().build_prom_metrics(*given)  # type: ignore[misc]  # a mixin
        return TransferPromMetrics(*given, theirs)


NixlConnector: Any = nixl_connector()


class KvtrieNixlConnector(CheckedTransfer, NixlConnector):
    """vLLM's connector over NIXL, with every block checked by its tokens."""

    @classmethod
    def _probe(cls) -> None:
        probe_transfer(_below(cls), (*TRANSFER, *TRANSFER_STATS), word=_BLOCKS)


def _names(name: str | None, vllm_config: VllmConfig) -> dict[str, Any]:
    """Whose KV a manifest is of: two engines of one path may serve other weights.

    All bytes of the weights are not read: that takes minutes where they are large, and vLLM gives
    an engine ten to start.
    """
    served = _gate.engine_model(Settings(), vllm_config)
    config = vllm_config.model_config
    model = _store_identity.model_identity(
        name,
        served,
        config.hf_text_config,
        (WHERE, MODEL),
        digest=checkpoint_digest,
        dtype=str(config.dtype).removeprefix("torch."),
        context=config.max_model_len,
        overrides=config.hf_overrides,
    )
    return {"model": model, "kv_dtype": served.kv_dtype}


def _is_token_ids(request: Request) -> bool:
    """Whether token ids are all that its KV depends on."""
    return not (
        request.mm_features or request.prompt_token_ids is None or request.prompt_is_token_ids
    )


def _below(one: type) -> list[type]:
    """The classes that `CheckedTransfer` extends in another."""
    lineage = one.__mro__
    return list(lineage[lineage.index(CheckedTransfer) + 1 :])


def _read(said: object) -> TransferManifest | None:
    if not isinstance(said, str):
        return None
    try:
        raw = base64.b64decode(said, validate=True)
    except binascii.Error:
        raw = b""
    return TransferManifest.from_bytes(raw)
