"""A worker's half: the copies of one step, on its own tensors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtrie._core import LayoutError
from kvtrie.integrations._asked import named
from kvtrie.integrations.vllm._layouts import locate
from kvtrie.integrations.vllm._support import is_whole, rope_of
from kvtrie.integrations.vllm._vllm import (
    AttentionLayerBase,
    extract_layer_index,
    get_layers_from_vllm_config,
)
from kvtrie.pool.kv_pool import KVPool
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtrie.integrations.vllm._metadata import Load
    from kvtrie.integrations.vllm._store_worker import StoreWorker

_LOG = logging.getLogger("vllm.kvtrie")


class Copies:
    """Carries out loads before a forward pass, on tensors of vLLM's layout."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        rotates: bool,
    ) -> None:
        rope = rope_of(vllm_config) if rotates else None
        groups = kv_cache_config.kv_cache_groups
        names = [_in_order(one.layer_names) for one in groups]
        # One of each group; they share blocks, of which each belongs to one group at a time.
        self._pools: list[KVPool] = []
        whole = []
        for number, one in enumerate(groups):
            mine = [tensors[name] for name in names[number] if name in tensors]
            layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names[number])
            backends = {layer.get_attn_backend().get_name() for layer in layers.values()}
            views, layout = locate(mine, one.kv_cache_spec, backends)
            rotation = _rope_of_group(rope, names, number)
            self._pools.append(KVPool.wrap(views, layout, rotation))
            if is_whole(one.kv_cache_spec):
                whole.append((self._pools[-1], KVPool.wrap(views, layout, rotation)))
        # The second is of the same tensors: a pool keeps numbers between its calls, which are of
        # one thread.
        self.pool, self.pool_for_reading = whole[0]
        self._failed: set[int] = set()

    def apply(self, loads: Sequence[Load], store: StoreWorker | None = None) -> None:
        """Copy on the current stream, before the forward pass. vLLM computes failed blocks.

        ``store``: what has loaded the tokens that come from the store.
        """
        for load in loads:
            if load.moves is None:
                self._failed.update(load.blocks)
                continue
            try:
                self.pool.apply(load.moves)
                for number, moves in load.others:
                    self._pools[number].apply(moves)
                if load.stored:
                    _write_stored(load, store)
            except Exception:
                _LOG.exception("kvtrie: a copy failed; vLLM computes %d blocks", len(load.blocks))
                self._failed.update(load.blocks)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def _write_stored(load: Load, store: StoreWorker | None) -> None:
    if store is None:
        msg = f"request {named(load.request_id)} expects tokens of a store, and there is none"
        raise RuntimeError(msg)
    store.write(load)


def _in_order(names: Sequence[str]) -> list[str]:
    """Layers in the order of the model: each may rotate its keys differently."""
    try:
        return sorted(names, key=extract_layer_index)
    except (AssertionError, ValueError) as error:
        msg = f"KvtrieConnector: the order of the model's layers is unknown: {error}"
        raise LayoutError(msg) from error


def _rope_of_group(
    rope: RopeSpec | None, groups: Sequence[Sequence[str]], number: int
) -> RopeSpec | None:
    """How the keys of one group's layers rotate; layers of different kinds may do so differently.

    Raises:
        LayoutError: It is not known which of the model's layers the group has.
    """
    if rope is None or len(groups) == 1:
        return rope
    names = _in_order([name for names in groups for name in names])
    if len(names) != len(rope.layers):
        msg = f"KvtrieConnector: {len(names)} layers have KV blocks, and {len(rope.layers)} rotate"
        raise LayoutError(msg)
    numbers = [names.index(name) for name in groups[number]]
    dims = tuple(rope.dims[at] for at in numbers)
    return RopeSpec(
        layers=tuple(rope.layers[at] for at in numbers), head_dim=max(dims), head_dims=dims
    )
