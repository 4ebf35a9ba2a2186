"""A worker without a model: KV is numbers that depend on what a model's KV depends on.

The number of a token is a hash of the token and of all numbers before it, each with the position of
its slot; a sampled token is a hash of all that it reads. So one wrong slot in a request's context
changes its answer, and the answer of an exact request is known without any cache (`continuation`).
In an image, the number is one of the image and of the place in it as well.
A group with a sliding window has numbers of its own, of which only those in the window are read.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

BLOCK: Final = 16
VOCAB: Final = 512

_MASK: Final = (1 << 64) - 1
_TURN: Final = 0x9E3779B97F4A7C15
# Tokens that end a reply in a model; none does here.
_SPECIAL: Final = 3


def _mix(value: int) -> int:
    value = (value + _TURN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_TURN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _read(kv: int, position: int) -> int:
    """What attention reads from one slot."""
    return _mix((kv + position * _TURN) & _MASK)


def _write(seen: int, token: int, window: int | None = None) -> int:
    return _mix(seen ^ _mix(token) ^ (0 if window is None else _mix(window)))


def lora_of(adapter: str | LoRARequest | None) -> LoRARequest | None:
    if not isinstance(adapter, str):
        return adapter
    return LoRARequest(adapter, 1 + sum(adapter.encode()), "/none")


def _start(adapter: LoRARequest | None) -> int:
    start = 0
    if adapter is not None:
        for byte in f"{adapter.lora_name} of {adapter.lora_path}".encode():
            start = _mix(start ^ byte)
    return start


@dataclass(frozen=True)
class Image:
    """An image in a prompt, whose placeholders say nothing of what it shows."""

    start: int
    end: int
    identifier: str
    modality: str = "image"


def _codes(images: Iterable[Image]) -> dict[int, int]:
    """What takes the place of the tokens of images, by position."""
    return {
        at: _mix(int.from_bytes(one.identifier.encode()) + at - one.start) & _MASK
        for one in images
        for at in range(one.start, one.end)
    }


def _named(token: int, window: int | None) -> int:
    """A token and the group of its KV."""
    return token if window is None else token + window * VOCAB


def _say(seen: int) -> int:
    return _SPECIAL + _mix(seen) % (VOCAB - _SPECIAL)


def continuation(
    prompt: Sequence[int],
    count: int,
    *,
    adapter: str | LoRARequest | None = None,
    windows: Sequence[int] = (),
    known: Mapping[int | None, Sequence[int]] | None = None,
    images: Iterable[Image] = (),
) -> list[int]:
    """What follows a prompt.

    ``windows``: those of further groups. ``known``: the KV of the first tokens, by window.
    """
    tokens = list(prompt)
    start, codes = _start(lora_of(adapter)), _codes(images)
    _write_all(tokens, count, start, (None, *windows), known or {}, codes)
    return tokens[len(prompt) :]


def kv_of(tokens: Sequence[int], images: Iterable[Image] = ()) -> list[int]:
    """The KV of a sequence that was computed from its beginning."""
    return _write_all(list(tokens), 0, _start(None), (None,), {}, _codes(images))[None]


def kv_of_groups(tokens: Sequence[int], *windows: int) -> dict[int | None, list[int]]:
    """Likewise of several groups, by their windows."""
    return _write_all(list(tokens), 0, _start(None), (None, *windows), {})


def _write_all(
    tokens: list[int],
    count: int,
    start: int,
    windows: Sequence[int | None],
    known: Mapping[int | None, Sequence[int]],
    codes: Mapping[int, int] | None = None,
) -> dict[int | None, list[int]]:
    """The KV of tokens and of so many that follow, which are added to them."""
    kv: dict[int | None, list[int]] = {window: [] for window in windows}
    read: dict[int | None, list[int]] = {window: [] for window in windows}
    sums = dict.fromkeys(windows, 0)
    for position in range(len(tokens) + count):
        seen = (start + sum(sums.values())) & _MASK
        if position >= len(tokens):
            tokens.append(_say(seen))
        for window in windows:
            before = known.get(window, ())
            is_known = position < len(before)
            token = (codes or {}).get(position, tokens[position])
            now = before[position] if is_known else _write(seen, token, window)
            kv[window].append(now)
            read[window].append(_read(now, position))
            sums[window] += read[window][-1]
            if window is not None and position + 1 >= window:
                sums[window] -= read[window][position + 1 - window]
    return kv


@dataclass(slots=True)
class _Row:
    num_prompt: int
    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    adapter: LoRARequest | None
    features: list[Any]
    codes: dict[int, int]


class Worker(Executor):  # type: ignore[misc] # untyped here
    """Serves vLLM's engine core in place of a model.

    `fails` says of a load whether its copy fails; `drafts` returns the drafts after these tokens,
    given the model's next ones.
    """

    def _init_executor(self) -> None:
        config = self.vllm_config
        self.fails: Callable[[Any], bool] | None = None
        self.drafts: Callable[[list[int]], list[int]] | None = None
        self.num_computed = self.num_moved = self.num_copied = self.num_failed = 0
        # Tokens copied in groups other than that of full attention.
        self.num_carried = 0
        self._rows: dict[str, _Row] = {}
        # Images whose encoder's output is there, and how many were encoded.
        self.encoded: set[str] = set()
        self.num_encoded = 0
        self._waiting: ModelRunnerOutput | None = None
        self._proposed: DraftTokenIds | None = None
        self._kv = np.zeros(0, np.uint64)
        self._position = np.zeros(0, np.int64)
        self._token = np.zeros(0, np.int64)
        self._size = int(config.cache_config.block_size)
        # Model runner V2 reads the scheduler's count for new requests only.
        self._counts_itself = config.use_v2_model_runner

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        spec = FullAttentionSpec(
            block_size=self._size, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        return [{"layers.0": spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC", "LBHNC"]]

    def set_kv_cache_layout(self, *args: Any) -> None: ...

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        # The window of each group of blocks; groups without attention hold nothing here.
        self._windows: dict[int, int | None] = {}
        for number, group in enumerate(kv_cache_configs[0].kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, FullAttentionSpec):
                self._windows[number] = None
            elif isinstance(spec, SlidingWindowSpec):
                self._windows[number] = spec.sliding_window
        slots = kv_cache_configs[0].num_blocks * self._size
        # A request that reads unwritten slots gives another answer.
        self._junk = np.random.default_rng(slots)
        self._kv = self._junk.integers(0, _MASK, slots, np.uint64)
        self._position = self._junk.integers(0, slots, slots)
        # The token of each slot's KV, and of which group it is; -1: none.
        self._token = np.full(slots, -1)

    def spoil(self, blocks: Iterable[int]) -> None:
        """Overwrite blocks that are allocated again, though a real worker keeps their content."""
        for block in blocks:
            inside = slice(block * self._size, (block + 1) * self._size)
            self._kv[inside] = self._junk.integers(0, _MASK, self._size, np.uint64)
            self._token[inside] = -1

    def compile_or_warm_up_model(self) -> None: ...

    def get_kv_connector_handshake_metadata(self) -> list[dict[Any, Any]]:
        return []

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"vLLM asks the worker for {method}")

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def reset_mm_cache(self) -> None: ...

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = self._run(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _done(output) if non_block else output
        self._waiting = output
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        output, self._waiting = self._waiting, None
        return _done(output) if non_block else output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return proposed

    def _run(self, output: Any) -> ModelRunnerOutput:
        self._follow(output)
        self._encode(output)
        failed = self._load(output)
        names = list(output.num_scheduled_tokens)
        # Layer by layer, a model writes all KV of a step before it reads any: a piece that follows
        # others reads them, whatever their order in the batch.
        by_position = sorted(names, key=lambda name: self._rows[name].computed)
        said = {
            name: self._forward(
                self._rows[name],
                output.num_scheduled_tokens[name],
                output.scheduled_spec_decode_tokens.get(name, ()),
            )
            for name in by_position
        }
        sampled = [said[name] for name in names]
        if self.drafts is not None:
            rows = [self._rows[name] for name in names]
            drafts = [
                self.drafts(row.tokens) if said else []
                for row, said in zip(rows, sampled, strict=True)
            ]
            self._proposed = DraftTokenIds(names, drafts)
        failures = KVConnectorOutput(invalid_block_ids=failed) if failed else None
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=failures,
        )

    def _follow(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._rows[new.req_id] = _Row(
                num_prompt=len(new.prompt_token_ids),
                tokens=list(tokens),
                blocks=[list(ids) for ids in new.block_ids],
                computed=new.num_computed_tokens,
                adapter=new.lora_request,
                features=new.mm_features,
                codes=_codes(
                    Image(at.offset, at.offset + at.length, one.identifier)
                    for one in new.mm_features
                    for at in [one.mm_position]
                ),
            )
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            row = self._rows[name]
            blocks = cached.new_block_ids[at]
            if not self._counts_itself:
                row.computed = cached.num_computed_tokens[at]
            if not self._counts_itself and name in cached.resumed_req_ids:
                row.blocks = [list(ids) for ids in blocks]
            elif blocks is not None:
                for mine, ids in zip(row.blocks, blocks, strict=True):
                    mine.extend(ids)
            if self._counts_itself:
                continue
            if name in cached.all_token_ids:
                row.tokens = list(cached.all_token_ids[name])
            # Tokens sampled from KV that was not copied are removed.
            del row.tokens[row.num_prompt + cached.num_output_tokens[at] :]

    def _encode(self, output: Any) -> None:
        self.encoded.difference_update(output.free_encoder_mm_hashes)
        for name, numbers in output.scheduled_encoder_inputs.items():
            for number in numbers:
                feature = self._rows[name].features[number]
                assert feature.data is not None, "the worker has no pixels of an image"
                self.encoded.add(feature.identifier)
                self.num_encoded += 1

    def _load(self, output: Any) -> set[int]:
        failed: set[int] = set()
        for load in getattr(output.kv_connector_metadata, "loads", ()):
            if load.moves is None or (self.fails is not None and self.fails(load)):
                failed.update(load.blocks)
                self.num_failed += 1
                continue
            self._copy(load.moves.tolist())
            for _, moves in load.others:
                self.num_carried += self._copy(moves.tolist(), is_other=True)
        return failed

    def _copy(self, runs: list[tuple[int, int, int, int]], *, is_other: bool = False) -> int:
        # As in a kernel: all reads come before the writes.
        read = [
            (self._kv[at : at + count].copy(), self._position[at : at + count] + delta)
            for at, _, count, delta in runs
        ]
        tokens = [self._token[at : at + count].copy() for at, _, count, _ in runs]
        for (_, at, count, delta), (kv, position), token in zip(runs, read, tokens, strict=True):
            inside = slice(at, at + count)
            self._kv[inside], self._position[inside], self._token[inside] = kv, position, token
            if is_other:
                continue
            if delta:
                self.num_moved += count
            else:
                self.num_copied += count
        return sum(count for _, _, count, _ in runs)

    def _forward(self, row: _Row, count: int, drafted: Sequence[int]) -> list[int]:
        start, end = row.computed, row.computed + count
        known = len(row.tokens)
        tokens = [*row.tokens, *drafted][start:end]
        assert len(tokens) == count, "the scheduler counts on tokens that were never said"
        for feature in row.features:
            first, last = feature.mm_position.offset, feature.mm_position.length
            if start < first + last and first < end:
                assert feature.identifier in self.encoded, "an image is computed, and not encoded"
        slots = {at: self._slots(row.blocks[at], end) for at in self._windows}
        seen = _start(row.adapter)
        for at, window in self._windows.items():
            first = 0 if window is None else max(0, start - window + 1)
            self._look(row, slots[at], first, start, window)
            seen += int(self._reads(slots[at][first:start]).sum(dtype=np.uint64))
        said: list[int] = []
        is_followed = True
        for position, token in zip(range(start, end), tokens, strict=True):
            before = seen
            for at, window in self._windows.items():
                slot = slots[at][position]
                kv = _write(before & _MASK, row.codes.get(position, token), window)
                self._kv[slot], self._position[slot] = kv, position
                self._token[slot] = _named(token, window)
                seen += _read(kv, position)
                left = -1 if window is None else position + 1 - window
                if left >= 0:
                    seen -= int(self._reads(slots[at][left : left + 1])[0])
            # After the last known token, a draft counts as long as the model samples the same.
            if position >= known - 1 and is_followed:
                said.append(_say(seen & _MASK))
                at = position + 1 - known
                is_followed = at < len(drafted) and drafted[at] == said[-1]
        self.num_computed += count
        row.tokens += said
        row.computed = end - (len(drafted) + 1 - len(said) if said else 0)
        return said

    def _look(
        self, row: _Row, slots: NDArray[np.int64], first: int, end: int, window: int | None
    ) -> None:
        """Look at the slots that a piece reads before it."""

    def _reads(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        positions = self._position[slots].astype(np.uint64)
        return _mixed(self._kv[slots] + positions * np.uint64(_TURN))

    def _slots(self, blocks: Sequence[int], end: int) -> NDArray[np.int64]:
        table = np.asarray(blocks[: -(-end // self._size)], np.int64)
        slots = table[:, None] * self._size + np.arange(self._size)
        return slots.reshape(-1)[:end]


class WindowWorker(Worker):
    """Of a model whose layers have full attention and a sliding window by turns.

    What is read must be the KV of the request's tokens, at their positions and of the right group,
    whatever they were computed after.
    """

    WINDOW: Final = 48

    def _look(
        self, row: _Row, slots: NDArray[np.int64], first: int, end: int, window: int | None
    ) -> None:
        read = slots[first:end]
        positions, tokens = np.arange(first, end), row.tokens[first:end]
        assert (self._position[read] == positions).all(), "KV of other positions is read"
        named = [_named(token, window) for token in tokens]
        assert (self._token[read] == named).all(), "KV of other tokens is read"

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        sizes: dict[str, Any] = {"block_size": self._size, "num_kv_heads": 2, "head_size": 32}
        return [
            {
                "layers.0": SlidingWindowSpec(
                    **sizes, dtype=torch.float32, sliding_window=self.WINDOW
                ),
                "layers.1": FullAttentionSpec(**sizes, dtype=torch.float32),
            }
        ]


def _done(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future
