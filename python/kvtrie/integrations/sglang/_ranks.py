"""The seed that all ranks of tensor parallelism share: their indexes then decide alike.

SGLang has a scheduler with a cache for each rank, and gives all of them the same requests. Which of
equal choices an index makes depends on its seed, and a seed is a secret that SGLang does not have.
So rank 0 draws one when the caches are made, and sends it over the group that SGLang gives them.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed

from kvtrie.integrations.sglang._version import refuse

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_SEED_BYTES: Final = 8


def shared_seed(params: CacheInitParams, num_ranks: int, num_pages: int) -> int | None:
    """The seed of this rank's index; None with one rank, which draws its own.

    All ranks must call it, and it waits for them: the group's timeout is SGLang's.

    Args:
        params: What SGLang makes caches of; ``tp_cache_group`` has the ranks.
        num_ranks: SGLang's number of ranks.
        num_pages: Pages of this rank's pool.

    Raises:
        SGLangUnsupportedError: The ranks cannot share a seed, or their pools differ.
    """
    if num_ranks == 1:
        return None
    group = params.tp_cache_group
    if group is None:
        refuse(
            f"tp_size={num_ranks} is not supported without a group of the ranks: SGLang gave none"
        )
    message = torch.tensor(
        [*secrets.token_bytes(_SEED_BYTES), *num_pages.to_bytes(_SEED_BYTES, "little")],
        dtype=torch.uint8,
    )
    try:
        size = distributed.get_world_size(group)
        if size == num_ranks:
            distributed.broadcast(message, distributed.get_global_rank(group, 0), group=group)
    except (RuntimeError, ValueError) as error:  # gloo's errors are among them
        text = str(error).strip().splitlines()
        refuse(
            f"tp_size={num_ranks} is not supported here: rank 0 could not send its seed to the "
            f"others: {text[0] if text else type(error).__name__}"
        )
    if size != num_ranks:
        refuse(f"tp_size={num_ranks} is not supported over a group of {size} ranks")
    sent = bytes(message.tolist())
    theirs = int.from_bytes(sent[_SEED_BYTES:], "little")
    if theirs != num_pages:
        refuse(
            f"tp_size={num_ranks} is not supported over unequal pools: {num_pages} pages here, and "
            f"{theirs} at rank 0"
        )
    return int.from_bytes(sent[:_SEED_BYTES], "little")
