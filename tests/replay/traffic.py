"""Generated traffic in the formats of traces, and a plain simulation of each policy."""

from __future__ import annotations

import gzip
import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Row = dict[str, Any]
Path_ = tuple[int, ...]


def mooncake(seed: int, num: int = 1000, block_size: int = 64) -> list[Row]:
    """Conversations that grow, branch, repeat a prompt, and lose the end of their history."""
    rng = random.Random(seed)
    rows: list[Row] = []
    chats: list[list[int]] = []
    fresh = iter(range(10**9))
    system = [next(fresh) for _ in range(2)]
    for number in range(num):
        if not chats or rng.random() < 0.15:
            chats.append(system[: rng.randrange(3)])
        chat = rng.choice(chats[-6:])
        what = rng.random()
        if what < 0.15 and len(chat) > 3:
            chat = chat[: rng.randrange(1, len(chat))]
            chats.append(chat)
        if what < 0.9:
            chat += [next(fresh) for _ in range(rng.randrange(1, 4))]
        if len(chat) > 14:
            chats.append([])
        # The last block is full, or its id is there though it is not full.
        cut = rng.choice([0, 0, rng.randrange(block_size)]) if chat else 0
        partial = [next(fresh)] if cut else []
        length = len(chat) * block_size + cut
        if not length:
            continue
        ids = [*chat, *partial]
        row = {"timestamp": number, "input_length": length, "output_length": 8, "hash_ids": ids}
        rows.append(row)
    return rows


def bailian(seed: int, num: int = 1000) -> list[Row]:
    """The same in the other format, whose ids name content: one id follows several."""
    rows = []
    for number, row in enumerate(mooncake(seed, num, block_size=16)):
        ids = [one % 97 if index else one for index, one in enumerate(row["hash_ids"])]
        more = {"chat_id": number, "parent_chat_id": -1, "type": "text", "turn": 1}
        rows.append(row | more | {"hash_ids": ids})
    return rows


def write(path: Path, rows: Sequence[Row]) -> Path:
    """A file of rows, compressed if it is called so."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def full_blocks(row: Row, block_size: int) -> Path_:
    """The ids of a prompt's full blocks."""
    return tuple(row["hash_ids"][: row["input_length"] // block_size])


def prefixes(path: Path_) -> list[Path_]:
    """Each block, named by all ids up to its own."""
    return [path[: end + 1] for end in range(len(path))]


def simulated(rows: Sequence[Row], block_size: int, num_blocks: int, policy: str) -> int:
    """Tokens found, block by block: ``lru`` or ``optimum``, without any shortcut."""
    every = [prefixes(full_blocks(row, block_size)) for row in rows]
    uses: dict[Path_, list[int]] = {}
    for now, path in enumerate(every):
        for block in path:
            uses.setdefault(block, []).append(now)
    cached: dict[Path_, int] = {}
    tokens = 0
    for now, (row, path) in enumerate(zip(rows, every, strict=True)):
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        # The last token is computed, whatever is cached.
        tokens += min(found, (row["input_length"] - 1) // block_size) * block_size
        for block in path:
            cached[block] = now
        while len(cached) > num_blocks:
            others = cached.keys() - set(path)
            if policy == "lru":
                gone = min(others, key=lambda one: (cached[one], -len(one)))
            else:
                gone = max(others, key=lambda one: (_next(uses[one], now), len(one)))
            del cached[gone]
    return tokens


def _next(uses: Sequence[int], now: int) -> float:
    return next((one for one in uses if one > now), float("inf"))
