"""What the halves of the connector send each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtrie.integrations.vllm._vllm import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie._core import ReusePolicy
    from kvtrie.integrations._turns import StorePrompt, TurnToWrite
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.store import PlacedSpan, PromptContexts


@dataclass(frozen=True, slots=True)
class Load:
    """The copies into one request, and the blocks that they write.

    ``moves`` is None if they could not be made: the workers then report the blocks as failed.
    ``stored`` are ranges of its tokens whose KV the worker's half has loaded under ``ticket``;
    ``first`` is the position of the first block. ``others`` are copies in other groups of blocks,
    with the number of the group.
    """

    moves: NDArray[Any] | None
    blocks: tuple[int, ...]
    stored: tuple[Range, ...] = ()
    request_id: str = ""
    first: int = 0
    ticket: int = 0
    others: tuple[tuple[int, NDArray[Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Seek:
    """What is looked for in the store for a request that waits.

    ``ticket`` is its number, which no other has: an id of a request may be used again. ``judges``
    says whether moved runs are judged by what they were computed after.
    """

    ticket: int
    prompt: StorePrompt
    gaps: tuple[Range, ...]
    policy: ReusePolicy
    moved_end: int | None
    to_first_gap: bool
    judges: bool = False


@dataclass(slots=True)
class StoreStep:
    """What a step does with the store.

    Attributes:
        seeks: Loads that begin.
        turns: What is to be written.
        overwritten: Blocks that this step writes.
        drops: Tickets whose loaded rows are not needed, after the copies of this step.
        prefills: Tokens and seconds of steps.
        generation: Under what runs are named from now on; None: as before.
        waits: Whether the step computes nothing, while requests wait for the store.
    """

    seeks: list[Seek] = field(default_factory=list)
    turns: list[TurnToWrite] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    prefills: list[tuple[int, float]] = field(default_factory=list)
    generation: bytes | None = None
    waits: bool = False


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """All copies of one step."""

    loads: list[Load] = field(default_factory=list)
    store: StoreStep | None = None


@dataclass(frozen=True, slots=True)
class FoundSpans:
    """What has been loaded under a ticket, and what its moved spans are judged by."""

    spans: tuple[PlacedSpan, ...]
    contexts: PromptContexts | None = None


@dataclass(slots=True)
class StoreReport(KVConnectorWorkerMetadata):
    """What has happened with the store since the last report.

    Attributes:
        found: What has been loaded, by ticket.
        num_written: Turns that were written, or given up.
    """

    found: dict[int, FoundSpans] = field(default_factory=dict)
    num_written: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add what another worker says: there is one, or each has the same."""
        if isinstance(other, StoreReport):
            self.found |= other.found
            self.num_written += other.num_written
        return self
