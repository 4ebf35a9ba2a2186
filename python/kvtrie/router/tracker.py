"""The tracker: its calls, and what they hold the lock for."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex

import numpy as np

from kvtrie._core import (
    COMPUTED,
    EXACT_ONLY,
    ComputedSource,
    Imported,
    Namespace,
    ReusePolicy,
    Span,
    StaleHandleError,
    TokenSequence,
)
from kvtrie.router import comparison
from kvtrie.router.answer import TurnAnswer
from kvtrie.router.arguments import (
    MAX_BLOCK_SIZE,
    CompareArguments,
    block_sizes,
    checked_compare,
    checked_keep,
    instance,
    text,
    whole,
)
from kvtrie.router.comparison import Comparison
from kvtrie.router.history import session_of
from kvtrie.router.nixl_params import CutParams, cut_params
from kvtrie.router.splicing import PromptSplicer, SplicedPrompt
from kvtrie.router.store import HistoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from kvtrie.router.comparison import Seen
    from kvtrie.router.history import History
    from kvtrie.router.stats import TrackerStats

_MOST_PLANNED: Final = 8
# Of a history that no id names, a splice looks at so many tokens, and so many for each of the
# prompt's: it may be another client's, who chose its length.
_LEAST_SPLICED: Final = 16_384
_SPLICED_EACH: Final = 4
# Dropped before the lock is released to others.
_MOST_DROPPED: Final = 64


class _OwnLock:
    """A lock that raises in a forked child, which may lack the thread that holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            msg = (
                "TurnTracker: the tracker was made before os.fork, in the parent; the child must "
                "make its own"
            )
            raise StaleHandleError(msg)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TurnTracker:
    """Keeps what decode engines returned, and says how the next prompt relates to it.

    It keeps ids, how far they are computed, and the handles of their KV; no KV. Tokens are
    compared, not hashes; every count is exact to the token. Namespaces are separate.

    **Threads.** All calls may come from any thread. One lock guards a tracker; histories are
    compared without it, and the result is that of the moment of the lookup. No call runs code of
    the caller under the lock. But Python may run a finalizer wherever garbage collection starts,
    and a signal handler between any two lines: those that call the tracker may deadlock. After
    `os.fork`, calls in the child raise `StaleHandleError`.

    **Cost.** `compare` reads the prompt once. A plan of moved runs also reads the history, and up
    to eight if several may hold the runs. Without a conversation id, the first call after a newer
    history was forgotten may look at all histories of the namespace, each in a fraction of a
    microsecond.

    **vLLM.** `kv_transfer_params` are those of a decode engine with ``bidirectional_kv_xfer``. They
    are cut to a list that is safe to read, and handed out once. Approximate KV is never offered,
    because vLLM does not label it.

    Args:
        ttl: Seconds that a history is kept; may be `math.inf`. Choose less than the engine keeps
            its blocks for (vLLM's ``decoder_kv_blocks_ttl``, 480 by default, counts from the end of
            the request).
        max_tokens: Most tokens of all histories together, each counted whole, 1 to 2**30. The least
            recently used conversations are dropped to keep this limit and the next, those of the
            namespace first that has most.
        max_conversations: Most conversations. Each history without an id counts as one.
        block_size: Tokens per block of the engines that return `kv_transfer_params`: an int for one
            group, or one per group. All groups must be full attention: sliding-window and
            state-space groups hold the end of a sequence. None: never return parameters.
        receiver_block_size: Tokens per block of the engines that receive the parameters, if
            different. Cuts then end at common multiples.
        min_transfer: Fewest tokens for which parameters are handed out. Without conversation ids,
            set it above the length that all conversations share.
        min_run: Shortest moved run in tokens, at least 8.
        clock: Returns seconds, never decreasing.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> import kvtrie
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> tracker = kvtrie.TurnTracker()
        >>> history = kvtrie.TokenSequence([1, 2, 3, 40, 41, 42], space)
        >>> tracker.keep(history, num_computed=5, conversation="c")
        >>> prompt = kvtrie.TokenSequence([1, 2, 3, 40, 41, 42, 50], space)
        >>> answer = tracker.compare(prompt, conversation="c")
        >>> answer.kind, answer.num_common, answer.num_tokens
        ('exact_extension', 6, 5)
        >>> tracker.forget("c", space)
        >>> len(tracker)
        0
    """

    def __init__(
        self,
        *,
        ttl: float = 450.0,
        max_tokens: int = 4_194_304,
        max_conversations: int = 65_536,
        block_size: int | Sequence[int] | None = None,
        receiver_block_size: int | None = None,
        min_transfer: int = 1,
        min_run: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        call = "TurnTracker"
        instance(call, "ttl", ttl, (int, float), "a number of seconds")
        if not ttl > 0:
            msg = f"{call}: ttl is {ttl}, not more than 0 seconds"
            raise ValueError(msg)
        instance(call, "clock", clock, Callable, "callable")  # type: ignore[arg-type] # an ABC
        self._ttl = float(ttl)
        self._clock = clock
        self._max_tokens = whole(call, "max_tokens", max_tokens, 1, 2**30)
        max_conversations = whole(call, "max_conversations", max_conversations, 1, 2**31)
        self._min_transfer = whole(call, "min_transfer", min_transfer, 1, 2**31 - 1)
        self._min_run = whole(call, "min_run", min_run, 8, 2**31 - 1)
        self._block_sizes = block_sizes(call, block_size)
        self._receiver = (
            None
            if receiver_block_size is None
            else whole(call, "receiver_block_size", receiver_block_size, 1, MAX_BLOCK_SIZE)
        )
        self._lock = _OwnLock()
        self._store = HistoryStore(
            ttl=self._ttl,
            max_tokens=self._max_tokens,
            max_conversations=max_conversations,
            min_run=self._min_run,
        )

    @property
    def ttl(self) -> float:
        """Seconds that a history is kept."""
        return self._ttl

    @property
    def num_conversations(self) -> int:
        """Kept conversations; a history without an id counts as one."""
        with self._lock:
            return len(self._store.conversations)

    @property
    def num_tokens(self) -> int:
        """Tokens of all kept histories, each counted whole."""
        with self._lock:
            return self._store.num_tokens

    def __len__(self) -> int:
        """Kept histories, including expired ones until the next call."""
        with self._lock:
            return len(self._store.by_number)

    def stats(self) -> TrackerStats:
        """Counters of the tracker, all of one moment.

        Example:
            >>> kvtrie.TurnTracker().stats().histories
            0
        """
        with self._lock:
            now = self._store.stats
            return replace(
                now,
                conversations=len(self._store.conversations),
                histories=len(self._store.by_number),
                history_tokens=self._store.num_tokens,
                dropped=copy(now.dropped),
                unknown=copy(now.unknown),
                answers=copy(now.answers),
                splices=copy(now.splices),
            )

    def keep(
        self,
        seq: TokenSequence,
        *,
        num_computed: SupportsIndex,
        conversation: str | None = None,
        spans: Iterable[Span] = (),
        source: ComputedSource | Imported = COMPUTED,
        kv_transfer_params: Mapping[str, Any] | None = None,
        payload: object = None,
        manifest: object = None,
    ) -> None:
        """Keep a history: the prompt and the answer of a finished request.

        It replaces those that it starts with, within its conversation, or among those without an
        id; but not one whose parameters or manifest were not handed out yet, if it has none itself.
        All others stay: other answers to one prompt, branches, histories from before an edit.

        Args:
            seq: Ids of prompt and answer as the engine computed them. Copied.
            num_computed: Tokens from position 0 whose KV exists: after a decode at most
                ``len(seq) - 1``, because the last sampled token has none.
            conversation: Its id, or None. Of a subclass of `str` only the characters count.
            spans: Kinds of the tokens. Spans of kind ``"reasoning"`` must be exactly the tokens
                that the chat template deletes (`Section.dropped` of a tagger).
            source: `kvtrie.COMPUTED`, or `kvtrie.Imported` if the KV is approximate from some
                position.
            kv_transfer_params: What a vLLM engine returned. Deep-copied.
            payload: Any object; returned unchanged.
            manifest: A `TransferManifest`; returned unchanged.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The history is empty or longer than `max_tokens`, `num_computed` or a span
                is beyond it, or a field of the parameters is malformed. Nothing has changed.
        """
        kept = checked_keep(
            seq,
            num_computed,
            conversation,
            spans,
            source,
            kv_transfer_params,
            payload,
            manifest,
            self._max_tokens,
        )
        now = self._read_clock()
        dead: list[History] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._store.expire(now, dead)
            self._store.keep(kept, dead)

    def compare(
        self,
        prompt: TokenSequence,
        *,
        conversation: str | None = None,
        policy: ReusePolicy = EXACT_ONLY,
        alias: bool = False,
        keep_last: SupportsIndex = 1,
        take: bool = True,
    ) -> TurnAnswer:
        """Say how a prompt relates to what is kept; ``docs/router.md`` has the order of the kinds.

        With a conversation id, its histories are compared; without one, the history of the
        namespace with the longest common prefix.

        Args:
            prompt: The next prompt, in the namespace of the histories.
            conversation: The id of its conversation, or None.
            policy: What may be reused approximately, as for `RadixIndex.plan`.
            alias: Whether a kept history may be sent with its reasoning, instead of a prompt
                without it. The model then sees the reasoning; its answer may differ.
            keep_last: Tokens at the end that the receiver computes anyway. vLLM loads none of the
                last ``num_prefill_lookahead_tokens - 1``. At least 1 for any engine.
            take: Whether the caller acts on the result. If False, nothing is handed out and nothing
                is touched: the parameters stay for the next call.

        Raises:
            StaleHandleError: The conversation has expired or is unknown.
            TypeError: An argument has the wrong type.
            ValueError: `keep_last` is negative, or the policy's `min_run` is below the tracker's.

        Example:
            >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
            >>> history = kvtrie.TokenSequence([1, 2, 70, 71, 3, 4], space)
            >>> tracker = kvtrie.TurnTracker()
            >>> tracker.keep(history, num_computed=5, spans=[kvtrie.Span(2, 4, "reasoning")])
            >>> prompt = kvtrie.TokenSequence([1, 2, 3, 4, 5], space)
            >>> tracker.compare(prompt, alias=True).send
            array([ 1,  2, 70, 71,  3,  4,  5], dtype=uint32)
        """
        asked = checked_compare(prompt, conversation, policy, alias, keep_last, take, self._min_run)
        now = self._read_clock()
        dead: list[History] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._store.expire(now, dead)
            seen, now = self._store.look_up(asked), self._store.now
        found = self._compare(asked, seen)
        with self._lock:
            answer = found
            if isinstance(answer, Comparison):
                answer = self._answer(answer, asked, now)
            if take:
                self._count(answer, asked)
        # Parameters that stay must not be shared with the caller.
        if take:
            return answer
        return replace(answer, kv_transfer_params=deepcopy(answer.kv_transfer_params))

    def splice(
        self,
        rendered: str,
        splicer: PromptSplicer,
        namespace: Namespace,
        *,
        conversation: str | None = None,
    ) -> SplicedPrompt:
        """Encode a rendered prompt with the ids that an engine used, where the text is the same.

        With a conversation id, they are of one of its eight newest histories; without one, of the
        history with the longest common prefix, of whose beginning 16,384 tokens and four for each
        token of the prompt are looked at. Histories with items are left out. Nothing is touched or
        handed out: call `compare` with the result.

        Args:
            rendered: The prompt's text, as the chat template renders it.
            splicer: Of the model's tokenizer.
            namespace: The namespace of the histories.
            conversation: Its id, or None. One that has expired or is unknown is no error: the
                prompt is encoded, and the outcome says so.

        Raises:
            TypeError: An argument has the wrong type.
        """
        call = "TurnTracker.splice"
        rendered = text(call, "rendered", rendered)
        instance(call, "splicer", splicer, PromptSplicer, "a PromptSplicer")
        instance(call, "namespace", namespace, Namespace, "a Namespace")
        if conversation is not None:
            conversation = text(call, "conversation", conversation)
        now = self._read_clock()
        dead: list[History] = []
        self._expire_in_parts(now, dead)
        most: int | None = None
        if conversation is None:
            plain = TokenSequence(splicer.encode(rendered), namespace)
            asked = CompareArguments(plain, None, EXACT_ONLY, alias=False, keep_last=0, take=False)
            with self._lock:
                self._store.expire(now, dead)
                seen = self._store.look_up(asked)
            longest = self._longest(seen)
            histories = [] if longest is None else [longest]
            most = _LEAST_SPLICED + _SPLICED_EACH * len(plain)
            missing: Literal["expired", "unknown"] | None = None
        else:
            with self._lock:
                self._store.expire(now, dead)
                missing = self._store.missing((namespace, conversation))
                kept = self._store.conversations.get((namespace, conversation), [])
                histories = kept[: -_MOST_PLANNED - 1 : -1]
        found = splicer.splice(rendered, [one.seq[:most] for one in histories if not one.seq.items])
        if missing is not None:
            found = replace(found, outcome=missing)
        with self._lock:
            self._store.stats.splices[found.outcome] += 1
            self._store.stats.spliced_tokens += found.num_kept
        return found

    def forget(self, conversation: str, namespace: Namespace) -> None:
        """Forget a conversation, for example because its engine is gone.

        Args:
            conversation: Its id.
            namespace: The namespace of its sequences.

        Raises:
            StaleHandleError: It has expired or is unknown.
            TypeError: The id is not a str, or the namespace not a Namespace.
        """
        call = "TurnTracker.forget"
        key = text(call, "conversation", conversation)
        instance(call, "namespace", namespace, Namespace, "a Namespace")
        now = self._read_clock()
        dead: list[History] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._store.expire(now, dead)
            histories = list(self._store.named(call, (namespace, key)))
        for first in range(0, len(histories), _MOST_DROPPED):
            with self._lock:
                for history in histories[first : first + _MOST_DROPPED]:
                    if history.number in self._store.by_number:
                        self._store.drop(history, dead, "forgotten")

    def _read_clock(self) -> float:
        now = self._clock()
        instance("TurnTracker", "the value of clock", now, (int, float), "a number of seconds")
        if not math.isfinite(now):
            msg = f"TurnTracker: the value of clock is {now}, not a finite number of seconds"
            raise ValueError(msg)
        return float(now)

    def _expire_in_parts(self, now: float, dead: list[History]) -> None:
        more = True
        while more:
            with self._lock:
                more = self._store.expire(now, dead, _MOST_DROPPED)

    def _compare(self, asked: CompareArguments, seen: Seen) -> Comparison | TurnAnswer:
        path = seen.path
        history = self._longest(seen)
        common = 0 if history is None else comparison.common(path, history.places)
        if history is not None and common == len(history.places):
            num_tokens, num_exact = comparison.in_place(history, common, len(asked.prompt), asked)
            if num_tokens:
                return Comparison("exact_extension", history, num_tokens, num_exact, common)
        if asked.alias:
            found = comparison.alias(asked, seen.may_alias)
            if found is not None:
                aliased, send = found
                num_tokens, num_exact = comparison.in_place(
                    aliased, len(aliased.places), len(send), asked
                )
                if num_tokens:
                    shared = comparison.common(path, aliased.places)
                    return Comparison("alias", aliased, num_tokens, num_exact, shared, send=send)
        if asked.policy.approximate:
            moved = self._moved(asked, seen, history)
            if moved is not None:
                source, segments = moved
                num_tokens, num_exact = comparison.leading(segments)
                shared = comparison.common(path, source.places)
                return Comparison(
                    "moved_runs", source, num_tokens, num_exact, shared, segments=segments
                )
        if history is not None:
            num_tokens, num_exact = comparison.in_place(history, common, len(asked.prompt), asked)
            if num_tokens:
                return Comparison("common_prefix", history, num_tokens, num_exact, common)
        return TurnAnswer(kind="start_over", num_common=common)

    def _longest(self, seen: Seen) -> History | None:
        """The history with the longest common prefix; on a tie a whole one, then the newest."""
        if seen.named is not None:
            histories = [
                (comparison.common(seen.path, history.places), history) for history in seen.named
            ]
            common, history = max(
                histories,
                key=lambda each: (each[0], each[0] == len(each[1].places), each[1].number),
            )
            return history if common else None
        if seen.through is None:
            return seen.longest
        return self._searched(seen.histories, *seen.through)

    def _searched(self, histories: list[History], place: int, position: int) -> History | None:
        """The newest history with a place, recorded for the next call."""
        for history in reversed(histories):
            if len(history.places) > position and history.places[position] == place:
                with self._lock:
                    # The place may have been freed and allocated again.
                    if (
                        history.number in self._store.by_number
                        and int(self._store.newest[place]) not in self._store.by_number
                    ):
                        self._store.newest[place] = history.number
                return history
        return None

    def _moved(
        self, asked: CompareArguments, seen: Seen, longest: History | None
    ) -> tuple[History, npt.NDArray[np.void]] | None:
        """The history with the most reuse, and the plan's segments."""
        named = seen.named
        histories = self._sources(asked) if named is None else named[-_MOST_PLANNED:]
        if longest is not None and longest not in histories:
            histories = [*histories, longest]
        if named is None and asked.policy.scope == "conversation":
            least = asked.policy.shared_prefix
            histories = [
                history
                for history in histories
                if comparison.common(seen.path, history.places) >= least
            ]
        best: tuple[int, int] = (0, 0)
        found = None
        for history in histories:
            is_kept = functools.partial(self._store.by_number.__contains__, history.number)
            segments, reused = comparison.planned(
                history, asked, self._store.index, is_kept=is_kept
            )
            moved = segments[
                (segments["class"] == 1)
                & (segments["start"] >= comparison.common(seen.path, history.places))
            ]
            if len(moved) and (reused, history.number) > best:
                best = (reused, history.number)
                found = (history, segments)
        return found

    def _sources(self, asked: CompareArguments) -> list[History]:
        """Histories from which a plan takes moved runs, most tokens first."""
        namespace = asked.prompt.namespace
        plan = self._store.index.plan(
            asked.prompt,
            asked.policy,
            keep_last=asked.keep_last,
            pin=False,
            session=session_of(asked.conversation),
        )
        places = plan.source_blocks
        plan.release()
        # A history forgotten since then is no error: each history is planned separately.
        with self._lock:
            newest, firsts, counts = np.unique(
                self._store.newest[places], return_index=True, return_counts=True
            )
            most = np.argsort(-counts, kind="stable")[:_MOST_PLANNED]
            space = self._store.spaces.get(namespace, {})
            known = [space.get(number) for number in newest[most].tolist()]
            asked_for = [
                (int(place), int(self._store.position[place]))
                for place in places[firsts[most]].tolist()
            ]
            histories = [] if all(known) else list(space.values())
        found: list[History] = []
        for each, (place, position) in zip(known, asked_for, strict=True):
            history = each or self._searched(histories, place, position)
            if history is not None and history not in found:
                found.append(history)
        return found

    def _count(self, answer: TurnAnswer, asked: CompareArguments) -> None:
        stats = self._store.stats
        stats.answers[answer.kind] += 1
        stats.prompt_tokens += len(asked.prompt if answer.send is None else answer.send)
        stats.exact_tokens += answer.num_exact
        stats.approximate_tokens += answer.num_tokens - answer.num_exact
        stats.transfers += answer.kv_transfer_params is not None

    def _answer(self, found: Comparison, asked: CompareArguments, now: float) -> TurnAnswer:
        """The result with its parameters; the caller holds the lock."""
        history, kind, num_exact = found.history, found.kind, found.num_exact
        if history.params is None:
            cut = CutParams(None, 0, "none were kept")
        elif history.conversation is not None and asked.conversation is None:
            cut = CutParams(None, 0, f"they are those of conversation {history.conversation!r}")
        elif history.params_taken:
            cut = CutParams(
                None, 0, "they were handed out before, and their reader has released them"
            )
        else:
            cut = cut_params(
                history.params,
                num_exact,
                block_sizes=self._block_sizes,
                receiver_block_size=self._receiver,
                partial_block=kind in ("exact_extension", "alias"),
            )
            if cut.params is not None and cut.num_tokens < self._min_transfer:
                least = self._min_transfer
                cut = CutParams(
                    None, 0, f"they cover {cut.num_tokens} tokens, and min_transfer is {least}"
                )
        if asked.take:
            history.params_taken |= cut.params is not None
            self._store.use(history.key)
        return TurnAnswer(
            kind=kind,
            num_tokens=found.num_tokens,
            num_exact=num_exact,
            num_common=found.num_common,
            conversation=history.conversation,
            num_kept=len(history.places),
            age=now - history.kept_at,
            kv_transfer_params=cut.params,
            num_transfer_tokens=cut.num_tokens,
            transfer_reason=cut.reason,
            payload=history.payload,
            manifest=history.manifest,
            send=found.send,
            segments=found.segments,
        )
