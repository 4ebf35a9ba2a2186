"""Counts of prompts: where the KV of each token came from, and why the rest is computed."""

from __future__ import annotations

import operator
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import EXACT_ONLY
from kvtrie.metrics.reasons import NAMES, Context, label

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsIndex

    from numpy.typing import NDArray

    from kvtrie._core import RadixIndex, ReusePlan, ReusePolicy, SharedSalt, Span, TokenSequence

OTHER: Final = "other"
"""The kind of tokens between messages, and of all tokens without spans."""

REUSES: Final = ("exact", "moved", "recomputed")
"""Sources of KV, by the class of a plan's segments."""

_MAX_FIRST_BLOCKS: Final = 1024
_MAX_KINDS: Final = 64


@dataclass(slots=True)
class PromptTotals:
    """Tokens so far.

    Attributes:
        prompt: Prompt tokens by source (`"exact"`, `"moved"`, `"recomputed"`) and kind.
        computed: Those of the last source by reason and kind.
        copied: Tokens that were copied to other blocks, by source.
    """

    prompt: Counter[tuple[str, str]] = field(default_factory=Counter)
    computed: Counter[tuple[str, str]] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)


class Prompts:
    """Counts the prompts of an engine, from its plans.

    Calls may come from any thread. Memory is bounded: the first 64 kinds of spans are counted, all
    others as `"other"`, and the salts of the latest 1,024 first blocks are remembered.

    Args:
        index: The index that makes the plans.

    Example:
        >>> import kvtrie
        >>> from kvtrie.metrics import Prompts
        >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> first = kvtrie.TokenSequence([1, 2, 3, 4, 5], space)
        >>> done = index.insert(first, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
        >>> prompts = Prompts(index)
        >>> edited = kvtrie.TokenSequence([1, 2, 9, 4, 5], space)
        >>> with index.plan(edited) as plan:
        ...     prompts.count(edited, plan)
        {'diverged': 3}
        >>> prompts.totals().prompt[("exact", "other")]
        2
    """

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._totals = PromptTotals()
        self._names = [OTHER]
        self._salts: OrderedDict[int, str | SharedSalt] = OrderedDict()

    @property
    def index(self) -> RadixIndex:
        """The index that makes the plans."""
        return self._index

    def count(
        self,
        seq: TokenSequence,
        plan: ReusePlan,
        policy: ReusePolicy = EXACT_ONLY,
        *,
        session: str | None = None,
        moved_end: SupportsIndex | None = None,
        keep_last: SupportsIndex = 1,
        spans: Iterable[Span] = (),
    ) -> dict[str, int]:
        """Count a prompt once, when it is admitted, before blocks are evicted for it.

        A preempted request that is planned again is not counted again.

        Args:
            seq: The prompt.
            plan: Its plan, not released, and with the tokens that are recomputed (`recompute`).
            policy: As the plan was given it; likewise the next three.
            session: The id of the conversation.
            moved_end: Position from which on moved runs supply no token.
            keep_last: Tokens at the end that are computed in any case.
            spans: Kinds of the tokens; of nested spans the inner one counts.

        Returns:
            The computed tokens by reason (`REASONS`).

        Raises:
            StaleHandleError: The plan was released.
            ValueError: The prompt does not have the plan's length.
        """
        context = Context(
            policy=policy,
            asked=policy,
            session=session,
            moved_end=None if moved_end is None else operator.index(moved_end),
            keep_last=operator.index(keep_last),
        )
        return self.add(seq, plan, self.look(seq, plan, context), spans)

    def look(self, seq: TokenSequence, plan: ReusePlan, context: Context) -> NDArray[np.int8]:
        """The reason of each token, should it be computed; nothing is counted."""
        length = plan.num_exact + plan.num_approximate + plan.num_compute
        if len(seq) != length:
            msg = f"Prompts.count: the prompt has {len(seq)} tokens, the plan {length}"
            raise ValueError(msg)
        return label(
            self._index, seq, plan, replace(context, has_other_salt=lambda: self._is_other(seq))
        )

    def add(
        self,
        seq: TokenSequence,
        plan: ReusePlan,
        labels: NDArray[np.int8],
        spans: Iterable[Span] = (),
    ) -> dict[str, int]:
        """Count a prompt with the reasons that `look` gave; returns its computed ones."""
        reuse = np.empty(len(seq), np.int64)
        for start, end, how in plan.segments[["start", "end", "class"]].tolist():
            reuse[start:end] = how
        copied = np.bincount(
            reuse[len(plan.blocks) * self._index.block_size :], minlength=len(REUSES)
        )
        is_computed = reuse == REUSES.index("recomputed")
        with self._lock:
            names = self._names
            kinds = kinds_of(names, len(seq), spans)
            computed = by_kind(labels[is_computed], kinds[is_computed], NAMES, names)
            self._totals.prompt.update(by_kind(reuse, kinds, REUSES, names))
            self._totals.computed.update(computed)
            self._totals.copied.update(exact=int(copied[0]), moved=int(copied[1]))
            self._salts[self._first_block(seq)] = seq.namespace.salt
            self._salts.move_to_end(self._first_block(seq))
            if len(self._salts) > _MAX_FIRST_BLOCKS:
                self._salts.popitem(last=False)
        found: Counter[str] = Counter()
        for (reason, _), number in computed.items():
            found[reason] += number
        return dict(found)

    def totals(self) -> PromptTotals:
        """A copy of the counts, all of one moment."""
        with self._lock:
            now = self._totals
            return PromptTotals(now.prompt.copy(), now.computed.copy(), now.copied.copy())

    def _is_other(self, seq: TokenSequence) -> bool:
        with self._lock:
            salt = self._salts.get(self._first_block(seq), seq.namespace.salt)
        return salt != seq.namespace.salt

    def _first_block(self, seq: TokenSequence) -> int:
        return hash(seq[: self._index.block_size].tobytes())


def kinds_of(names: list[str], num_tokens: int, spans: Iterable[Span]) -> NDArray[np.int64]:
    """The number of each token's kind in ``names``, to which the first 64 kinds are added."""
    kinds = np.zeros(num_tokens, np.int64)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.kind not in names and len(names) < _MAX_KINDS:
            names.append(span.kind)
        number = names.index(span.kind) if span.kind in names else 0
        kinds[span.start : span.end] = number
    return kinds


def by_kind(
    what: NDArray[np.integer],
    kinds: NDArray[np.int64],
    labels: tuple[str, ...],
    names: list[str],
) -> Counter[tuple[str, str]]:
    """Tokens by label and kind, of the code of each token's label and the number of its kind."""
    numbers = np.bincount(kinds * len(labels) + what)
    found: Counter[tuple[str, str]] = Counter()
    for at in np.flatnonzero(numbers).tolist():
        kind, code = divmod(at, len(labels))
        found[labels[code], names[kind]] = int(numbers[at])
    return found
