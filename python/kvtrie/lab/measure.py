"""One conversation under one template, turn by turn, in a real index.

Two indexes get every prompt with its reply. In the first all KV counts as computed: its lookup is
what a prefix cache finds. The second keeps what kvtrie's plans give: moved KV is approximate there,
and stays it. Both have room for everything, so nothing is lost to eviction. A conversation of n
tokens in all costs O(n) in both, and each turn a comparison with the sequences before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie.lab.chats import Chat
    from kvtrie.lab.template import Rendered, Template

_SESSION: Final = "chat"
_SHOWN: Final = 24
_MARK: Final = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what is cached, and why.

    Attributes:
        position: The first token that differs from the cached sequence that has most in common.
        reason: Of ``RadixIndex.explain``.
        kind: What the cached token there is (``reasoning``, ``tool_result``, ...), or ``""``.
        cause: ``reasoning`` (the template dropped it), ``encoding`` (the text goes on as it was,
            but other ids stand for it) or ``text`` (the client or the template changed it).
        before: Text before the position.
        cached: Cached text from the position on.
        prompt: The prompt's.
        movable_after: Tokens after the position that kvtrie moves.
    """

    position: int
    reason: str
    kind: str
    cause: str
    before: str
    cached: str
    prompt: str
    movable_after: int


@dataclass(frozen=True, slots=True)
class LookedUp:
    """One request.

    Attributes:
        prompt: Its tokens.
        prefix: Tokens that a prefix cache finds.
        reused: Tokens that kvtrie reuses, exact or approximate.
        segments: kvtrie's plan as (start, end, class): exact, moved or computed.
        reply: Sampled tokens.
        divergence: None if the prompt continues a cached sequence, or is the first.
        reencoded: The first token at which encoding the text again gives other ids than were
            sampled, in the prompt and its reply; None if there is none.
    """

    prompt: int
    prefix: int
    reused: int
    segments: tuple[tuple[int, int, str], ...]
    reply: int
    divergence: Divergence | None
    reencoded: int | None

    @property
    def movable(self) -> int:
        """Tokens that kvtrie reuses and a prefix cache does not find."""
        return max(0, self.reused - self.prefix)

    @property
    def computed(self) -> int:
        """Prompt tokens that an engine with prefix caching computes."""
        return self.prompt - self.prefix


@dataclass(frozen=True, slots=True)
class ReplayedChat:
    """All turns of a conversation."""

    chat: str
    turns: tuple[LookedUp, ...]

    @property
    def prompt(self) -> int:
        """Prompt tokens."""
        return sum(one.prompt for one in self.turns)

    @property
    def computed_by_prefix(self) -> int:
        """Prompt tokens that an engine with prefix caching computes."""
        return sum(one.computed for one in self.turns)

    @property
    def computed(self) -> int:
        """Prompt tokens that an engine with kvtrie computes."""
        return sum(one.prompt - one.reused for one in self.turns)


def measure(
    template: Template, chat: Chat, *, block_size: int = 16, min_run: int = 16
) -> ReplayedChat:
    """Replay a conversation.

    Args:
        template: What renders it.
        chat: The conversation.
        block_size: Tokens per block.
        min_run: The shortest run that kvtrie moves.

    Raises:
        TemplateError: The template does not render one of its requests.
        ValueError: ``block_size`` or ``min_run`` is out of range.
    """
    rendered = [template.render(chat, one) for one in chat.requests]
    return measure_rendered(template, chat, rendered, block_size=block_size, min_run=min_run)


def measure_rendered(
    template: Template,
    chat: Chat,
    rendered: Sequence[Rendered],
    *,
    block_size: int,
    min_run: int,
) -> ReplayedChat:
    """Replay a conversation of which the prompts are given.

    Args:
        template: What has rendered it.
        chat: The conversation.
        rendered: Its requests.
        block_size: Tokens per block.
        min_run: The shortest run that kvtrie moves.

    Raises:
        ValueError: ``block_size`` or ``min_run`` is out of range.
    """
    reasoned = {str(one.reply.get("reasoning_content") or "")[:_MARK] for one in chat.requests}
    bench = _Replayed(template, rendered, frozenset(reasoned - {""}), block_size, min_run)
    return bench.measured(chat.name)


class _Replayed:
    """The two indexes, and every cached sequence."""

    def __init__(
        self,
        template: Template,
        rendered: Sequence[Rendered],
        reasoned: frozenset[str],
        block_size: int,
        min_run: int,
    ) -> None:
        self._template = template
        self._rendered = rendered
        self._block = block_size
        longest = [len(one.ids) + len(one.sampled) for one in rendered]
        num = sum(-(-one // block_size) + 1 for one in longest)
        self._prefix = kvtrie.RadixIndex(num, block_size)
        self._ours = kvtrie.RadixIndex(num, block_size, moved_runs=True, min_run=min_run)
        self._free = [kvtrie.BlockAllocator(num), kvtrie.BlockAllocator(num)]
        self._space = kvtrie.Namespace(model="lab", salt=kvtrie.SHARED)
        self._policy = kvtrie.ReusePolicy(min_run=min_run)
        self._cached: list[NDArray[np.uint32]] = []
        self._reasoned = reasoned

    def measured(self, name: str) -> ReplayedChat:
        return ReplayedChat(name, tuple(self._turn(one) for one in self._rendered))

    def _turn(self, one: Rendered) -> LookedUp:
        ids = np.array(one.ids, dtype=np.uint32)
        prompt = self._sequence(ids)
        prefix = self._prefix.lookup(prompt, keep_last=1).num_tokens
        reason = self._prefix.explain(prompt, session=_SESSION)
        whole = np.concatenate([ids, np.array(one.sampled[:-1], dtype=np.uint32)])
        with self._ours.plan(prompt, self._policy, session=_SESSION) as plan:
            segments = tuple(
                (int(part["start"]), int(part["end"]), _CLASSES[int(part["class"])])
                for part in plan.segments
            )
            reused = len(ids) - plan.num_compute
            self._keep(self._ours, self._free[1], whole, plan)
        turn = LookedUp(
            prompt=len(ids),
            prefix=prefix,
            reused=reused,
            segments=segments,
            reply=len(one.sampled),
            divergence=self._divergence(ids, reason, segments) if self._cached else None,
            reencoded=self._reencoded(one),
        )
        self._keep(self._prefix, self._free[0], whole, kvtrie.COMPUTED)
        self._cached.append(whole)
        return turn

    def _keep(
        self,
        index: kvtrie.RadixIndex,
        free: kvtrie.BlockAllocator,
        whole: NDArray[np.uint32],
        source: kvtrie.ReusePlan | kvtrie.ComputedSource,
    ) -> None:
        """Cache the whole blocks of a prompt with its reply."""
        seq, num = self._sequence(whole), len(whole) // self._block
        known = source.blocks if isinstance(source, kvtrie.ReusePlan) else np.empty(0, np.int32)
        table = np.concatenate([known, free.allocate(num - len(known))])[:num]
        done = index.insert(
            seq, table, num_computed=num * self._block, source=source, session=_SESSION
        )
        free.free(done.duplicates)
        if self._template.tagger is not None:
            spans = self._template.tagger.spans(whole.tolist())
            index.tag(seq, [span for span in spans if span.end <= len(whole)])

    def _sequence(self, ids: NDArray[np.uint32]) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(ids, self._space)

    def _divergence(
        self,
        ids: NDArray[np.uint32],
        why: kvtrie.Explanation,
        segments: Sequence[tuple[int, int, str]],
    ) -> Divergence | None:
        lengths = [_common(ids, one) for one in self._cached]
        nearest = int(np.argmax(lengths))
        cached, at = self._cached[nearest], lengths[nearest]
        if at in (len(cached), len(ids)):
            return None
        kind = self._kind(cached, at)
        return Divergence(
            position=at,
            reason=why.reason,
            kind=kind,
            cause=self._cause(ids, cached, at, kind),
            before=self._template.decode(ids[max(0, at - _SHOWN) : at]),
            cached=self._template.decode(cached[at : at + _SHOWN]),
            prompt=self._template.decode(ids[at : at + _SHOWN]),
            movable_after=sum(
                end - max(start, at)
                for start, end, what in segments
                if what == "moved" and end > at
            ),
        )

    def _kind(self, cached: NDArray[np.uint32], at: int) -> str:
        if self._template.tagger is None:
            return ""
        # A mark that opens a span belongs to it in some formats, and comes before it in others.
        spans = self._template.tagger.spans(cached.tolist())
        return next((one.kind for one in spans if one.start - _MARK <= at < one.end), "")

    def _cause(
        self, ids: NDArray[np.uint32], cached: NDArray[np.uint32], at: int, kind: str
    ) -> str:
        # From a little before: what differs may be the end of a mark.
        some = slice(max(0, at - _MARK), at + 2 * _SHOWN)
        old, new = self._template.decode(cached[some]), self._template.decode(ids[some])
        # Reasoning that is only near may be gone as well.
        is_there = self._template.tagger is None or kind == "reasoning"
        if is_there and any(one in old and one not in new for one in self._reasoned):
            return "reasoning"
        # A sequence that ends early has less text to compare, and a token may end in a character.
        near = slice(max(0, at - _MARK), at + _MARK)
        old, new = (self._template.decode(one[near]).rstrip("\ufffd") for one in (cached, ids))
        least = min(len(old), len(new))
        return "encoding" if old[:least] == new[:least] else "text"

    def _reencoded(self, one: Rendered) -> int | None:
        sampled = [*one.ids, *one.sampled]
        again = self._template.encode(one.prompt + one.text)
        if sampled == again:
            return None
        return _common(np.array(sampled), np.array(again))


_CLASSES: Final = {0: "exact", 1: "moved", 2: "computed"}


def _common(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    num = min(len(one), len(other))
    differs = np.flatnonzero(one[:num] != other[:num])
    return int(differs[0]) if len(differs) else num
