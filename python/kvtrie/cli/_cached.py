"""What counts as cached for a prompt: another prompt, or a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvtrie
from kvtrie.cli._failure import fail, printable

if TYPE_CHECKING:
    from pathlib import Path

SESSION = "compared"
"""The two prompts of a comparison are of one conversation."""


def filled(cached: list[int], block_size: int) -> tuple[kvtrie.RadixIndex, kvtrie.Namespace]:
    """An index that holds a prompt, and its namespace."""
    space = kvtrie.Namespace(model="explain", salt=kvtrie.SHARED)
    count = len(cached) // block_size
    index = kvtrie.RadixIndex(max(1, count), block_size)
    seq = kvtrie.TokenSequence(cached, space)
    blocks = list(range(count))
    index.insert(
        seq, blocks, num_computed=count * block_size, source=kvtrie.COMPUTED, session=SESSION
    )
    return index, space


def restored(snapshot: Path) -> tuple[kvtrie.RadixIndex, bytes]:
    """The index in a file, and its bytes; bad input ends the command."""
    try:
        blob = snapshot.read_bytes()
    except OSError as error:
        fail(f"{snapshot}: {error.strerror or error}")
    try:
        # Nothing reads KV here, so any pool will do.
        pool_id = kvtrie.RadixIndex.pool_of_snapshot(blob)
        return kvtrie.RadixIndex.restore(blob, pool_id=pool_id), blob
    except kvtrie.SnapshotError as error:
        fail(f"{snapshot}: {error}")


def chosen(index: kvtrie.RadixIndex, asked: dict[str, str], snapshot: Path) -> kvtrie.Namespace:
    """The only namespace that has the fields, or one that is made of them."""
    spaces = [
        space
        for space in index.namespaces()
        if all(getattr(space, name) == value for name, value in asked.items())
    ]
    if len(spaces) == 1:
        return spaces[0]
    if spaces:
        models = sorted({printable(space.model) for space in spaces})
        shown = ", ".join(models[:4]) + (", ..." if len(models) > 4 else "")
        fail(
            f"{snapshot}: {len(spaces)} namespaces match, of the models {shown}; say which by "
            "--model, --kv-dtype, --rope, --adapter and --salt"
        )
    if not {"model", "salt"} <= set(asked):
        fail(f"{snapshot}: it has no such namespace; with --model and --salt, one is made")
    # It is empty, but other namespaces of the salt may hold the prompt.
    return kvtrie.Namespace(**asked)
