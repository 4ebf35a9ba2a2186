"""Conversations of one workload that fill a cache of a given size."""

from collections.abc import Callable
from dataclasses import dataclass

from workloads.history import Conversation
from workloads.registry import Workload


@dataclass(frozen=True)
class Population:
    """Conversations that are all cached, some of which ask for their next turn."""

    conversations: tuple[Conversation, ...]
    num_asked: int

    @property
    def asked(self) -> tuple[Conversation, ...]:
        return self.conversations[: self.num_asked]

    @property
    def num_cached(self) -> int:
        return sum(len(each.cached) for each in self.conversations)


def population(
    workload: Workload,
    *,
    conversations: int = 200,
    cached_tokens: int = 1_000_000,
    prompt_tokens: int | None = None,
    asked: int = 1,
    seed: int = 0,
    text: str = "uniform",
    shared: bool = False,
) -> Population:
    """Fill a cache with conversations of about equal length."""

    def build(number: int, scale: float) -> Conversation:
        return workload.build(number, seed=seed, scale=scale, text=text, shared=shared)

    built: list[Conversation] = []
    if prompt_tokens is not None:
        scale = _fitted(lambda scale: len(workload.build(scale=scale).prompt), prompt_tokens)
        built = [build(number, scale) for number in range(min(asked, conversations))]
    left = conversations - len(built)
    room = cached_tokens - sum(len(each.cached) for each in built)
    if left:
        if room < left * 64:
            message = (
                f"population: {room:,} of {cached_tokens:,} tokens are left for {left} "
                f"conversations next to {len(built)} that are asked"
            )
            raise ValueError(message)
        scale = _fitted(lambda scale: len(workload.build(scale=scale).cached), room / left)
        built += [build(number, scale) for number in range(len(built), conversations)]
    return Population(tuple(built), conversations if prompt_tokens is None else asked)


def _fitted(length: Callable[[float], int], wanted: float) -> float:
    """The scale at which a length is about `wanted`; markers do not grow with it."""
    scale = wanted / length(1.0)
    for _ in range(4):
        scale *= wanted / length(scale)
    return scale
