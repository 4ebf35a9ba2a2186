"""What the scheduler's half sends to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtrie.integrations.vllm._vllm import KVConnectorMetadata

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Load:
    """The copies into one request, and the blocks that they write.

    ``moves`` is None if they could not be made: the workers then report the blocks as failed.
    """

    moves: NDArray[Any] | None
    blocks: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """All copies of one step."""

    loads: list[Load] = field(default_factory=list)
