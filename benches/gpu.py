"""What it costs to apply a plan on a GPU, compared with a plain copy and with separate passes.

`python benches/gpu.py` checks first and times only what is right; without a CUDA device it only
checks, on the CPU. `--json benches/gpu.json` writes the figures of `docs/pool.md`, and
`--table benches/gpu.json` prints them as there.

* Moves are runs of up to 1,024 tokens, each with its own delta, between random offsets of block
  tables of 16 tokens per block in random order. Pieces end at the block edges of both.
* *apply* is `KVPool.apply`, all layers, bfloat16 or the named codes. *select + copy* is
  `index_select`, then `index_copy_`, per layer and side, without rotation. *three passes* gathers,
  rotates and scatters one layer at a time, in plain torch; the check compares with it.
* A copy of n bytes counts 2n: read and written. The *ceiling* is the best rate of a
  device-to-device copy of 2 GiB; *copy* is one of as many bytes as the case moves.
* *device* is the time between two events around the work, with enough queued before it that the
  device never waits for the host. *call* is from the call to the end of its work on an idle device.
  *host* is until `apply` returns. Every figure is a median; before each round a buffer larger than
  the L2 cache is overwritten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie.kernels import codes
from kvtrie.models.kv_types import KV_TYPES
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec, Rotary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

BLOCK_SIZE = 16
LONGEST_RUN = 1_024
TOKENS = (256, 1_024, 4_096, 16_384, 32_768)
# What docs/pool.md shows.
SHOWN_TOKENS = (256, 4_096, 32_768)
SHOWN_COLUMNS = (
    *("model", "tokens", "apply_gb_s", "share_of_ceiling", "apply_us", "call_us"),
    *("select_copy_us", "three_passes_us"),
)
ROUNDS = 21
CEILING_BYTES = 2**31
MOVE = np.dtype([(name, "i8") for name in ("source_slot", "dest_slot", "num_tokens", "delta")])
# Pools have room for four times the tokens that are moved, so that blocks are far apart.
SPREAD = 4


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    heads: int
    head_dim: int
    v_head_dim: int
    rotary: Rotary
    quant: str | None = None

    @property
    def form(self) -> codes.CodeForm | None:
        """How K is coded; None for floats."""
        return None if self.quant is None else codes.CodeForm.of(KV_TYPES[self.quant])

    def layout(self, layers: int | None = None) -> KVLayout:
        return KVLayout(
            num_layers=layers or self.layers,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype="bfloat16" if self.quant is None else "uint8",
            block_size=BLOCK_SIZE,
            quant=self.quant,
        )

    def pool(self, num_tokens: int, device: str, layers: int | None = None) -> KVPool:
        layout = self.layout(layers)
        rope = RopeSpec((self.rotary,) * layout.num_layers, self.head_dim)
        num_blocks = SPREAD * -(-num_tokens // BLOCK_SIZE) + 8
        return KVPool(layout, rope, num_blocks=num_blocks, device=device)


def frequencies(theta: float, width: int) -> tuple[float, ...]:
    found = theta ** (-np.arange(0, width, 2) / width)
    return tuple(float(value) for value in found.astype(np.float32))


_LLAMA = (32, 8, 128, 128, Rotary(frequencies(500_000.0, 128)))
SHAPES = (
    Shape("Llama-3-8B", *_LLAMA),
    Shape("Llama-3-8B, fp8_e4m3", *_LLAMA, quant="fp8_e4m3"),
    Shape("Llama-3-8B, fp8_per_token_head", *_LLAMA, quant="fp8_per_token_head"),
    Shape("QwQ-32B", 64, 8, 128, 128, Rotary(frequencies(1_000_000.0, 128))),
    Shape(
        "DeepSeek-MLA",
        61,
        1,
        576,
        0,
        Rotary(frequencies(10_000.0, 64), start=512, interleaved=True),
    ),
)


def random_moves(num_tokens: int, num_blocks: int, seed: int = 0) -> NDArray[np.void]:
    """Runs between random blocks at random alignments, cut at the block edges of both sides."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_blocks).astype(np.int64)
    half = num_blocks // 2
    columns: list[NDArray[np.int64]] = []
    first_source = first_dest = 0
    left = num_tokens
    while left:
        count = min(left, LONGEST_RUN)
        slots = []
        for table, first in ((order[:half], first_source), (order[half:], first_dest)):
            positions = first + int(rng.integers(BLOCK_SIZE)) + np.arange(count)
            slots.append(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        source, dest = slots
        edges = (source[1:] % BLOCK_SIZE == 0) | (dest[1:] % BLOCK_SIZE == 0)
        starts = np.concatenate([[0], np.flatnonzero(edges) + 1])
        lengths = np.diff(np.append(starts, count))
        delta = int(rng.integers(1, 20_000)) * int(rng.choice([-1, 1]))
        columns.append(np.stack([source[starts], dest[starts], lengths, lengths * 0 + delta]))
        # The next run begins in other blocks.
        blocks = -(-count // BLOCK_SIZE) + 1
        first_source += blocks * BLOCK_SIZE
        first_dest += blocks * BLOCK_SIZE
        left -= count
    moves = np.empty(sum(part.shape[1] for part in columns), dtype=MOVE)
    for number, name in enumerate(MOVE.names or ()):
        moves[name] = np.concatenate([part[number] for part in columns])
    return moves


def named_slots(moves: NDArray[np.void], device: str) -> tuple[torch.Tensor, ...]:
    count = moves["num_tokens"]
    inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    source = np.repeat(moves["source_slot"], count) + inside
    dest = np.repeat(moves["dest_slot"], count) + inside
    found = (source, dest, np.repeat(moves["delta"], count))
    return tuple(torch.from_numpy(column).to(device) for column in found)


def rows_of(pool: KVPool) -> list[torch.Tensor]:
    views = [view for side in (pool.k, pool.v) for view in side if view is not None]
    return [view.view(-1, *view.shape[2:]) for view in views]


def fill(shape: Shape, pool: KVPool, seed: int = 0) -> None:
    """Random rows; codes and scales as an engine writes them."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    for number, row in enumerate(rows_of(pool)):
        if shape.form is None:
            row.normal_(generator=generator)
        elif number >= len(pool.k):
            row.random_(generator=generator)
        else:
            # One block after the other: floats take four times the room of codes.
            for part in row.split(2**16):
                numbers = torch.empty((*part.shape[:-1], shape.head_dim), device=pool.device)
                numbers.normal_(generator=generator)
                if shape.form.scales == codes.IN_LAYER:
                    part.copy_(codes.encode(numbers * 32, shape.form.code)[0])
                else:
                    found, scales = codes.quantize(numbers, shape.form)
                    part[..., : shape.head_dim] = found
                    part[..., shape.head_dim :] = scales.unsqueeze(-1).view(torch.uint8)


def select_and_copy(pool: KVPool, slots: Sequence[torch.Tensor]) -> Callable[[], None]:
    source, dest, _ = slots
    rows = rows_of(pool)

    def run() -> None:
        for row in rows:
            row.index_copy_(0, dest, row.index_select(0, source))

    return run


def three_passes(shape: Shape, pool: KVPool, slots: Sequence[torch.Tensor]) -> Callable[[], None]:
    source, dest, delta = slots
    rows = rows_of(pool)
    rotary = shape.rotary
    start, end = rotary.start, rotary.start + rotary.width
    frequency = torch.tensor(rotary.inv_freq, dtype=torch.float64, device=delta.device)
    angles = delta.unsqueeze(1) * frequency
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
    num_layers = len(pool.k)

    def rotate(window: torch.Tensor) -> None:
        if rotary.interleaved:
            one, two = window[..., 0::2], window[..., 1::2]
        else:
            one, two = window.chunk(2, dim=-1)
        first, second = (half.to(torch.float32, copy=True) for half in (one, two))
        one.copy_(first * cos - second * sin)
        two.copy_(second * cos + first * sin)

    def rotate_codes(rows: torch.Tensor, form: codes.CodeForm) -> None:
        bytes_, scale_bytes = rows[..., : shape.head_dim], rows[..., shape.head_dim :]
        numbers = codes.decode(bytes_.contiguous(), form.code)
        rotate(numbers[..., start:end])
        if form.scales == codes.IN_LAYER:
            bytes_[..., start:end] = codes.encode(numbers, form.code)[0][..., start:end]
            return
        scale = scale_bytes.contiguous().view(torch.float32)
        wanted = codes.scale_of(numbers.abs().amax(dim=-1, keepdim=True) * scale, form)
        bytes_.copy_(codes.encode(numbers * (scale / wanted), form.code)[0])
        scale_bytes.copy_(wanted.view(torch.uint8))

    def run() -> None:
        for number, row in enumerate(rows):
            gathered = row.index_select(0, source)
            if number < num_layers:
                if shape.form is None:
                    rotate(gathered[..., start:end])
                else:
                    rotate_codes(gathered, shape.form)
            row.index_copy_(0, dest, gathered)

    return run


def check(device: str, num_tokens: int, num_layers: int) -> list[str]:
    """Apply random plans on a device and compare every byte with three passes on the CPU."""
    wrong = []
    for shape in SHAPES:
        pool, right = (shape.pool(num_tokens, where, num_layers) for where in (device, "cpu"))
        fill(shape, right, seed=num_tokens)
        for row, other in zip(rows_of(pool), rows_of(right), strict=True):
            row.copy_(other)
        moves = random_moves(num_tokens, pool.num_blocks, seed=num_tokens)
        pool.apply(moves, hops=1).synchronize()
        three_passes(shape, right, named_slots(moves, "cpu"))()
        for number, rows in enumerate(zip(rows_of(pool), rows_of(right), strict=True)):
            found, want = (one.cpu().contiguous().view(torch.uint8) for one in rows)
            bad = int((found != want).sum())
            if bad:
                wrong.append(f"{shape.name}: tensor {number} differs in {bad} bytes")
                break
    return wrong


class Clock:
    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        properties = torch.cuda.get_device_properties(0)
        size = max(4 * int(properties.L2_cache_size), 2**28)
        self._waste = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._flush_seconds = self._timed(self._waste.zero_, flushes=4)

    def device(self, work: Callable[[], object]) -> float:
        work()
        host = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = perf_counter()
            work()
            host.append(perf_counter() - start)
        flushes = 2 + int(2 * max(host) / self._flush_seconds)
        return statistics.median(self._timed(work, flushes) for _ in range(self._rounds))

    def call(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds from the call to the end of its work, and to its return."""
        ends, returns = [], []
        for _ in range(self._rounds):
            self._waste.zero_()
            torch.cuda.synchronize()
            start = perf_counter()
            work()
            returns.append(perf_counter() - start)
            torch.cuda.synchronize()
            ends.append(perf_counter() - start)
        return statistics.median(ends), statistics.median(returns)

    def _timed(self, work: Callable[[], object], flushes: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(flushes):
            self._waste.zero_()
        before.record()
        work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1_000


def copy_rate(clock: Clock, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    dest = torch.zeros_like(source)
    return 2 * num_bytes / clock.device(lambda: dest.copy_(source))


def measure(shape: Shape, num_tokens: int, clock: Clock, ceiling: float) -> dict[str, Any]:
    moved = 2 * num_tokens * shape.layout().bytes_per_token
    found = _work(shape, num_tokens, clock)
    # The pool is gone by now.
    torch.cuda.empty_cache()
    rate = moved / found["apply_us"] * 1e6
    return {
        "model": shape.name,
        "tokens": num_tokens,
        "moved_bytes": moved,
        "apply_gb_s": rate / 1e9,
        "share_of_ceiling": rate / ceiling,
        "copy_gb_s": copy_rate(clock, moved // 2) / 1e9,
        **found,
    }


def _work(shape: Shape, num_tokens: int, clock: Clock) -> dict[str, Any]:
    pool = shape.pool(num_tokens, "cuda")
    fill(shape, pool)
    moves = random_moves(num_tokens, pool.num_blocks)
    slots = named_slots(moves, "cuda")
    call, host = clock.call(lambda: pool.apply(moves, hops=1))
    seconds = {
        "apply_us": clock.device(lambda: pool.apply(moves, hops=1)),
        "call_us": call,
        "host_us": host,
        "select_copy_us": clock.device(select_and_copy(pool, slots)),
        "three_passes_us": clock.device(three_passes(shape, pool, slots)),
    }
    return {"moves": len(moves), **{name: value * 1e6 for name, value in seconds.items()}}


COLUMNS = {
    "model": ("model", "{}"),
    "tokens": ("tokens", "{:,}"),
    "moves": ("pieces", "{:,}"),
    "apply_gb_s": ("apply GB/s", "{:,.0f}"),
    "share_of_ceiling": ("of ceiling", "{:.0%}"),
    "copy_gb_s": ("copy GB/s", "{:,.0f}"),
    "apply_us": ("apply µs", "{:,.0f}"),
    "call_us": ("call µs", "{:,.0f}"),
    "host_us": ("host µs", "{:,.0f}"),
    "select_copy_us": ("select + copy µs", "{:,.0f}"),
    "three_passes_us": ("three passes µs", "{:,.0f}"),
}


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str] = tuple(COLUMNS)) -> str:
    titles = " | ".join(COLUMNS[name][0] for name in columns)
    lines = [titles, " | ".join("---" if name == "model" else "--:" for name in columns)]
    cells = ([COLUMNS[name][1].format(row[name]) for name in columns] for row in rows)
    lines += [" | ".join(line) for line in cells]
    return "\n".join(f"| {line} |" for line in lines)


def shown(path: Path) -> str:
    """The table of `docs/pool.md`, and what it was measured on."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["tokens"] in SHOWN_TOKENS]
    measured = (
        f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, {found['date']}; "
        f"the ceiling is {found['ceiling_gb_s']:,.0f} GB/s."
    )
    return f"{table(rows, SHOWN_COLUMNS)}\n\n{measured}"


def timed(tokens: Sequence[int], rounds: int) -> dict[str, Any]:
    clock = Clock(rounds)
    properties = torch.cuda.get_device_properties(0)
    ceiling = copy_rate(clock, CEILING_BYTES)
    torch.cuda.empty_cache()
    rows = []
    for shape in SHAPES:
        for num_tokens in tokens:
            needed = (SPREAD + 4) * num_tokens * shape.layout().bytes_per_token
            free, _ = torch.cuda.mem_get_info()
            if needed > free:
                gib = needed / 2**30
                print(f"{shape.name} with {num_tokens:,} tokens is left out: {gib:.0f} GiB needed")
                continue
            rows.append(measure(shape, num_tokens, clock, ceiling))
    print(table(rows))
    print(f"ceiling: {ceiling / 1e9:,.0f} GB/s read and written, {properties.name}")
    return {
        "device": properties.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "rounds": rounds,
        "ceiling_gb_s": ceiling / 1e9,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="KVPool.apply on a GPU: checks, then times.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens to move")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds a figure")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--table", type=Path, help="print those of this file; measure nothing")
    given = parser.parse_args(arguments)
    if given.table is not None:
        print(shown(given.table))
        return 0
    if min(given.tokens) < 1 or given.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = ((1, 2), (77, 2), (3_000, 3)) if device == "cuda" else ((1, 2), (77, 2))
    wrong = [line for tokens, layers in sizes for line in check(device, tokens, layers)]
    for line in wrong:
        print(f"wrong on {device}: {line}")
    if wrong:
        print("nothing was timed: the copies are wrong")
        return 1
    print(f"checked on {device}: {', '.join(shape.name for shape in SHAPES)}")
    if device == "cpu":
        print("nothing was timed: there is no CUDA device")
        return 0
    found = timed(given.tokens, given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
