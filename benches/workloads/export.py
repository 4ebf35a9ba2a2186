"""Writes conversations for programs in other languages, by the ids of `registry.py`.

The file is a row of little-endian u32: the word `KVTW`, the version 1, the number of conversations;
then, for each, how many tokens are cached, how many of them have KV and how many the next prompt
has, followed by the cached tokens and the prompt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workloads.populations import population
from workloads.registry import WORKLOADS
from workloads.texts import TEXTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workloads.documents import Tokens
    from workloads.history import Conversation

MAGIC = int.from_bytes(b"KVTW", "little")
VERSION = 1


def write(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations to a file, all or nothing."""
    every = list(conversations)
    parts: list[Tokens] = [np.array([MAGIC, VERSION, len(every)], dtype=np.uint32)]
    for each in every:
        head = [len(each.cached), each.num_computed, len(each.prompt)]
        parts += [np.array(head, dtype=np.uint32), each.cached, each.prompt]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    np.concatenate(parts).astype("<u4").tofile(partial)
    partial.replace(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write conversations of a workload to a file.")
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--cached-tokens", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompts that are asked")
    parser.add_argument("--asked", type=int, default=1, help="how many prompts of that length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", choices=tuple(TEXTS), default="uniform")
    parser.add_argument("--shared", action="store_true", help="with shared boilerplate")
    parser.add_argument("--out", type=Path, help="default: target/workloads/<workload>.bin")
    options = parser.parse_args(arguments)
    made = population(
        WORKLOADS[options.workload],
        conversations=options.conversations,
        cached_tokens=options.cached_tokens,
        prompt_tokens=options.prompt_tokens,
        asked=options.asked,
        seed=options.seed,
        text=options.text,
        shared=options.shared,
    )
    root = Path(__file__).resolve().parents[2]
    path = options.out or root / "target" / "workloads" / f"{options.workload}.bin"
    write(path, made.conversations)
    print(f"{path}: {len(made.conversations)} conversations, {made.num_cached:,} cached tokens")


if __name__ == "__main__":
    main()
