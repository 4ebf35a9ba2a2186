"""A small engine for models with windows, state and index rows: what docs/groups.md asks of one.

It runs any causal LM of transformers that keeps all it needs in a `DynamicCache`. Between requests
it has rows of tokens in blocks, and states in slots; an index with groups says which of them a
prompt continues with. What the index does not hold is NaN, so logits show what was read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

BLOCK: Final = 4
CHUNK: Final = 8
# Next to groups, a plan copies no partial block in any case.
IN_PLACE: Final = kvtrie.EXACT_ONLY.replace(partial_blocks=False)
WINDOW: Final = "window"
STATE: Final = "state"

# What a layer keeps of each token. Index rows have names of their own.
_ROWS: Final = ("keys", "values", "indexer_keys", "idx_keys")
_KNOWN: Final = (
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
    "MiniMaxM3VLSparseCacheLayer",
)
# What they keep is of all tokens before a position, compressed at absolute positions: a state.
_COMPRESSED: Final = ("DeepseekV4CSACache", "DeepseekV4HCACache")


@dataclass(frozen=True)
class Done:
    """Tokens that were cached, and the logits of all others, ``[tokens - exact, vocabulary]``."""

    exact: int
    logits: Tensor


class SmallEngine:
    """Runs one request at a time: passes of at most ``chunk`` tokens, the last three alone.

    Args:
        model: On the CPU, in eval mode.
        num_blocks: Blocks of group 0, and of the window's group.
        num_slots: Slots of states.
        chunk: Most tokens per pass, at most 8: some models read a state in passes of one alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int = 64,
        num_slots: int = 16,
        chunk: int = CHUNK,
    ) -> None:
        self._model = model
        self._config: Any = model.config.get_text_config(decoder=True)
        self._chunk = chunk
        self._rows: dict[str | None, list[int]] = {None: [], WINDOW: []}
        self._states: list[int] = []
        windows: set[int] = set()
        for number, layer in enumerate(DynamicCache(config=self._config).layers):
            kind = type(layer).__name__
            if kind not in (*_KNOWN, *_COMPRESSED):
                msg = f"layer {number} is a {kind}: what it keeps is not known"
                raise TypeError(msg)
            if kind in _COMPRESSED or isinstance(layer, LinearAttentionLayer):
                self._states.append(number)
            if isinstance(layer, CacheLayerMixin) and kind not in _COMPRESSED:
                window: int | None = getattr(layer, "sliding_window", None)
                self._rows[None if window is None else WINDOW].append(number)
                windows |= set() if window is None else {window}
        groups = []
        if windows:
            (width,) = windows
            # The cache has the rows of a block until it is full.
            assert width > CHUNK + BLOCK
            groups.append(
                kvtrie.Group.window(WINDOW, window=width, num_blocks=num_blocks, block_size=BLOCK)
            )
        if self._states:
            groups.append(kvtrie.Group.state(STATE, num_slots=num_slots))
        self.names = [group.name for group in groups]
        self.index = kvtrie.RadixIndex(num_blocks=num_blocks, block_size=BLOCK, groups=groups)
        self._space = kvtrie.Namespace(model="tiny", salt=kvtrie.SHARED)
        self._free: dict[str | None, list[int]] = {None: list(range(num_blocks))}
        self._free |= {group.name: list(range(group.num_blocks)) for group in groups}
        # Rows by (layer, block), the states of all layers by slot.
        self.blocks: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.slots: dict[int, dict[int, Any]] = {}

    def sequence(self, tokens: Sequence[int]) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(tokens, self._space)

    def run(self, tokens: Sequence[int], stops: Sequence[int] = ()) -> Done:
        """Continue where the index says, keep states at ``stops``, and insert all full blocks."""
        seq, length = self.sequence(tokens), len(tokens)
        offers: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        parts = []
        with self.index.plan(seq, IN_PLACE) as plan:
            exact = at = plan.num_exact
            cache = self._resumed(plan)
            blocks = plan.blocks.tolist()
            while at < length:
                end = self._end(at, length, stops)
                parts.append(self._pass(tokens[at:end], cache, at))
                for block in range(at // BLOCK, end // BLOCK):
                    blocks.append(self._store(None, cache, block, end))
                    if WINDOW in offers:
                        own = self._store(WINDOW, cache, block, end)
                        offers[WINDOW].append((block * BLOCK, own))
                if STATE in offers and end in stops:
                    offers[STATE].append((end, self._save(cache)))
                at = end
            done = self.index.insert(
                seq, blocks, num_computed=length, source=plan, groups=offers, stops=list(stops)
            )
        self._give(None, [*done.duplicates, *done.surplus, *done.freed])
        for name, own_done in done.groups.items():
            self._give(name, [*own_done.duplicates, *own_done.surplus])
        return Done(exact, torch.cat(parts).float())

    def evict(self, n: int, group: str | None = None) -> list[int]:
        """Evict from a group; what leaves other groups with it is free as well."""
        gone: list[int] = self.index.evict(n, group=group).tolist()
        self._give(group, gone)
        for name in self.names:
            self._give(name, self.index.take_freed(group=name))
        return gone

    def layers(self, group: str | None) -> list[int]:
        """The layers whose rows of tokens are in the blocks of a group."""
        return self._rows.get(group, [])

    def num_free(self, group: str | None) -> int:
        return len(self._free[group])

    def _end(self, at: int, length: int, stops: Sequence[int]) -> int:
        alone = length - 3
        if at >= alone:
            return at + 1
        return min(at + self._chunk, alone, *(stop for stop in stops if stop > at), length)

    def _pass(self, tokens: Sequence[int], cache: DynamicCache, at: int) -> Tensor:
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.arange(at, at + len(tokens))[None],
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = out.logits[0]
        return logits

    # --- between the cache and the pools ----------------------------------------------------------

    def _store(self, group: str | None, cache: DynamicCache, block: int, end: int) -> int:
        """Copy a block's rows from a cache, whose last row is that of token ``end - 1``."""
        to = self._free[group].pop()
        first = block * BLOCK - end
        for layer in self._rows[group]:
            kept = cache.layers[layer]
            self.blocks[layer, to] = {
                name: rows[..., rows.shape[-2] + first :, :][..., :BLOCK, :].clone()
                for name in _ROWS
                if (rows := getattr(kept, name, None)) is not None
            }
            assert all(rows.shape[-2] == BLOCK for rows in self.blocks[layer, to].values())
        return to

    def _save(self, cache: DynamicCache) -> int:
        slot = self._free[STATE].pop()
        self.slots[slot] = {}
        for number in self._states:
            state: Any = copy.deepcopy(cache.layers[number])
            if number in (*self._rows[None], *self._rows[WINDOW]):
                # Its rows of tokens are in blocks.
                state.keys = state.values = None
            self.slots[slot][number] = state
        return slot

    def _resumed(self, plan: kvtrie.ReusePlan) -> DynamicCache:
        """The cache after the plan's exact tokens, of what the plan names alone."""
        cache = DynamicCache(config=self._config)
        if not plan.num_exact:
            return cache
        if STATE in self.names:
            slot = plan.state(STATE)
            assert slot is not None
            for number, state in self.slots[slot].items():
                cache.layers[number] = copy.deepcopy(state)
        self._load(cache, None, plan.blocks.tolist(), plan.num_exact)
        if WINDOW in self.names:
            self._load(cache, WINDOW, plan.group(WINDOW)[1].tolist(), plan.num_exact)
        return cache

    def _load(
        self, cache: DynamicCache, group: str | None, blocks: Sequence[int], exact: int
    ) -> None:
        for number in self._rows[group]:
            layer: Any = cache.layers[number]
            for name in self.blocks[number, blocks[0]]:
                rows = torch.cat([self.blocks[number, block][name] for block in blocks], dim=-2)
                if group == WINDOW:
                    rows = rows[..., -(layer.sliding_window - 1) :, :]
                    layer.cumulative_length = exact
                setattr(layer, name, rows)
                layer.dtype, layer.device, layer.is_initialized = rows.dtype, rows.device, True
                if name == "indexer_keys":
                    layer.is_indexer_initialized = True

    def _give(self, group: str | None, ids: Iterable[int]) -> None:
        """Take back ids that the index does not hold."""
        for block in map(int, ids):
            self._free[group].append(block)
            if group == STATE:
                poison(self.slots[block])
            for layer in self.layers(group):
                poison(self.blocks[layer, block])


def poison(kept: Any) -> None:
    """Fill every tensor of rows or of states with NaN."""
    if isinstance(kept, torch.Tensor):
        if kept.is_floating_point():
            kept.fill_(torch.nan)
    elif isinstance(kept, dict):
        for each in kept.values():
            poison(each)
    elif isinstance(kept, LinearAttentionLayer | CacheLayerMixin):
        poison(vars(kept))
