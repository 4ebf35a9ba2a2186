"""How much of the next prompt an engine still has: what a router remembers of conversations.

`TurnTracker` keeps what a decode engine returned: the ids of prompt and answer, how far they are
computed, and the handles by which their KV can be fetched. Given the next prompt, it says which
tokens are the same under the same prefix, which moved, or what to send instead. It holds no KV,
talks to no engine, and needs numpy alone.

The fields of `kv_transfer_params` are those of vLLM 0.32.0's pull connector; see
``kvtrie/_nixl_params.py``.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, get_args

import numpy as np

from kvtrie._core import (
    COMPUTED,
    EXACT_ONLY,
    BlockAllocator,
    ComputedSource,
    Imported,
    KvTrieError,
    Namespace,
    RadixIndex,
    ReusePolicy,
    Span,
    StaleHandleError,
    TokenSequence,
)
from kvtrie._nixl_params import CutParams, checked_params, cut_params, exact_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

__all__ = ["AnswerKind", "TurnAnswer", "TurnTracker"]

AnswerKind = Literal["exact_extension", "common_prefix", "moved_runs", "alias", "start_over"]
"""What `TurnTracker.compare` returns."""

KINDS: Final[tuple[AnswerKind, ...]] = get_args(AnswerKind)

_MAX_BLOCK_SIZE: Final = 1 << 20
_MOST_TURNS_PLANNED: Final = 8
_MOST_TURNS_ALIASED: Final = 64
# Most histories dropped before the lock is released to others.
_MOST_DROPPED: Final = 64

_Key = tuple[Namespace, str | int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnAnswer:
    """How the next prompt relates to what is kept, as `TurnTracker.compare` returns it.

    Attributes:
        kind: `"exact_extension"`: the prompt starts with a whole kept history.
            `"common_prefix"`: it starts as a history does, then differs.
            `"moved_runs"`: it also has runs of a history elsewhere; see `segments`.
            `"alias"`: it is a history without its reasoning, and new tokens; see `send`.
            `"start_over"`: nothing of it is kept, or nothing that is computed.
        num_tokens: Tokens from position 0 of the prompt (of `send` for an alias) whose KV the
            engine has in place. The last `keep_last` tokens never count.
        num_exact: How many of these are exact.
        num_common: Length of the common prefix of prompt and history, computed or not.
        conversation: The id under which the history was kept, or None.
        num_kept: Tokens of that history; 0 without one.
        age: Seconds since it was kept; 0.0 without one.
        kv_transfer_params: vLLM's parameters, cut to blocks of exact tokens of `num_tokens`, or
            None. They are handed out once, because the reader releases the blocks that they name.
        num_transfer_tokens: Tokens from position 0 that they cover.
        transfer_reason: Why there are no parameters; empty if there are.
        payload: What `keep` was given, unchanged.
        manifest: The history's `TransferManifest`, if `keep` was given one.
        send: For an alias, the ids to send instead of the prompt (uint32); else None.
        segments: For moved runs, the source of each prompt token, as in `ReusePlan.segments`
            (positions are those of the history); else None.
    """

    kind: AnswerKind
    num_tokens: int = 0
    num_exact: int = 0
    num_common: int = 0
    conversation: str | None = None
    num_kept: int = 0
    age: float = 0.0
    kv_transfer_params: dict[str, Any] | None = None
    num_transfer_tokens: int = 0
    transfer_reason: str = "nothing is kept"
    payload: object = None
    manifest: object = None
    send: npt.NDArray[np.uint32] | None = None
    segments: npt.NDArray[np.void] | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """One kept history. `places` has one place per token; equal prefixes have equal places."""

    key: _Key
    number: int
    kept_at: float
    seq: TokenSequence
    places: npt.NDArray[np.int32]
    num_computed: int
    source: ComputedSource | Imported
    spans: tuple[Span, ...]
    reasoning: tuple[tuple[int, int], ...]
    params: dict[str, Any] | None
    payload: object
    manifest: object
    params_taken: bool = False

    @property
    def conversation(self) -> str | None:
        """The caller's id, or None."""
        return self.key[1] if isinstance(self.key[1], str) else None

    @property
    def last(self) -> int:
        """The place of its last token."""
        return int(self.places[-1])

    @property
    def before_reasoning(self) -> int | None:
        """The place before its first reasoning token, or None.

        Every path into its reasoning has this place.
        """
        start = next((start for start, _ in self.reasoning if start), None)
        return None if start is None else int(self.places[start - 1])


class _Marks:
    """Histories by place, and which places have any."""

    def __init__(self, num_places: int) -> None:
        # In the order of their numbers: oldest first.
        self._turns: dict[int, dict[int, _Turn]] = {}
        self._any = np.zeros(num_places, np.bool_)

    def add(self, place: int | None, turn: _Turn) -> None:
        """Register a history at a place; None registers nothing."""
        if place is not None:
            self._turns.setdefault(place, {})[turn.number] = turn
            self._any[place] = True

    def remove(self, place: int | None, turn: _Turn) -> None:
        """Undo `add`."""
        if place is not None:
            turns = self._turns[place]
            del turns[turn.number]
            if not turns:
                del self._turns[place]
                self._any[place] = False

    def newest(self, place: int) -> _Turn | None:
        """The newest history registered at a place."""
        turns = self._turns.get(place)
        return None if turns is None else next(reversed(turns.values()))

    def on(self, path: npt.NDArray[np.int32], most: int | None = None) -> list[_Turn]:
        """Histories registered at any of these places, oldest first; the newest `most` of them.

        A path has few such places: histories that end at different depths have many tokens.
        """
        found: list[_Turn] = []
        for place in path[self._any[path]].tolist():
            found.extend(itertools.islice(reversed(self._turns[place].values()), most))
        found.sort(key=lambda turn: turn.number)
        return found if most is None else found[-most:]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Arguments of `keep`, checked."""

    seq: TokenSequence
    conversation: str | None
    num_computed: int
    source: ComputedSource | Imported
    spans: tuple[Span, ...]
    reasoning: tuple[tuple[int, int], ...]
    params: dict[str, Any] | None
    payload: object
    manifest: object

    @property
    def has_handle(self) -> bool:
        return self.params is not None or self.manifest is not None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a `compare` has read of the tracker under the lock. It does not change afterwards.

    `named` are the histories of the given conversation, or None. `longest` is the history with the
    longest common prefix, if no search is needed. Else `through` is a place of that history with
    its position, and `turns` are all histories of the namespace. `thinking` are those that may be
    an alias.
    """

    path: npt.NDArray[np.int32]
    named: list[_Turn] | None
    longest: _Turn | None
    through: tuple[int, int] | None
    turns: list[_Turn]
    thinking: list[_Turn]


@dataclass(frozen=True, slots=True)
class _Found:
    """A result before parameters are handed out."""

    kind: AnswerKind
    turn: _Turn
    num_tokens: int
    num_exact: int
    num_common: int
    send: npt.NDArray[np.uint32] | None = None
    segments: npt.NDArray[np.void] | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of `compare`, checked."""

    prompt: TokenSequence
    conversation: str | None
    policy: ReusePolicy
    alias: bool
    keep_last: int
    take: bool


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

    Tokens are compared, not hashes; every count is exact to the token. What is kept in one
    namespace is never found from another.

    **Threads.** All calls may come from any thread; one lock guards a tracker. `compare` holds it
    to look up the prompt and to hand something out. It compares histories without the lock, so a
    long comparison blocks nobody, and its result is that of the moment of the lookup. Histories
    that expire together are dropped a few at a time. No call runs code of the caller under the
    lock, and forgotten objects are destroyed after it is released. But Python may run a finalizer
    wherever garbage collection starts, and a signal handler between any two lines, also under the
    lock: those that call the tracker may deadlock. After `os.fork`, calls in the child raise
    `StaleHandleError`.

    **Bounds.** A history is forgotten `ttl` seconds after it was kept. Choose less than the engine
    keeps its blocks for (vLLM's ``decoder_kv_blocks_ttl``, 480 by default, counts from the end of
    the request). The least recently used conversations are dropped when `max_tokens` or
    `max_conversations` would be exceeded.

    **Cost.** `compare` reads the prompt once. A plan of moved runs also reads the history, and up
    to eight histories if several may hold the runs. Without a conversation id, the first call after
    a newer history was forgotten may look at all histories of the namespace, each in a fraction of
    a microsecond.

    **vLLM.** `kv_transfer_params` are those that a decode engine with ``bidirectional_kv_xfer``
    returns (`do_remote_decode`), for the prefill of the next turn. vLLM pairs the end of the list
    with the end of what the receiver allocated, so only a list that ends with the common prefix is
    safe. The result is cut to that: whole blocks for a common prefix, in every group, counted from
    the front, with `remote_num_tokens` lowered to match. If no cut is safe, there are no parameters
    and `transfer_reason` says why:

    * They are of a prefill engine (`do_remote_prefill`), or of push mode, whose receiver takes its
      whole prompt.
    * A list does not begin at token 0.
    * The engine uses decode context parallelism.
    * The number of groups is not that of `block_size`.

    Approximate KV is never offered, because vLLM does not label it. Parameters are handed out once,
    because the reader releases all blocks, however few it read. Parameters kept under a
    conversation id go to that conversation alone. Fields that vLLM 0.32.0 does not have are passed
    on unchanged. Sliding-window and state-space groups hold the end of a sequence: do not set
    `block_size` for models with such groups.

    Args:
        ttl: Seconds that a history is kept; may be `math.inf`.
        max_tokens: Most tokens of all histories together, each counted whole, 1 to 2**30.
        max_conversations: Most conversations. Each history without an id counts as one.
        block_size: Tokens per block of the engines that return `kv_transfer_params`: an int for one
            group, or one per group. All groups must be full attention. None: never return
            parameters.
        receiver_block_size: Tokens per block of the engines that receive the parameters, if
            different. Cuts then end at common multiples.
        min_transfer: Fewest tokens for which parameters are handed out. Without conversation ids,
            set it above the length that all conversations share: else the first turn of one takes
            the parameters of another for a system prompt.
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
        _instance(call, "ttl", ttl, (int, float), "a number of seconds")
        if not ttl > 0:
            msg = f"{call}: ttl is {ttl}, not more than 0 seconds"
            raise ValueError(msg)
        _instance(call, "clock", clock, Callable, "callable")  # type: ignore[arg-type] # an ABC
        self._ttl = float(ttl)
        self._clock = clock
        self._max_tokens = _whole(call, "max_tokens", max_tokens, 1, 2**30)
        self._max_conversations = _whole(call, "max_conversations", max_conversations, 1, 2**31)
        self._min_transfer = _whole(call, "min_transfer", min_transfer, 1, 2**31 - 1)
        self._min_run = _whole(call, "min_run", min_run, 8, 2**31 - 1)
        self._block_sizes = _block_sizes(call, block_size)
        self._receiver = (
            None
            if receiver_block_size is None
            else _whole(call, "receiver_block_size", receiver_block_size, 1, _MAX_BLOCK_SIZE)
        )
        self._lock = _OwnLock()
        # A block of the index is one token. Its id names a place in the tree of histories. Twice
        # the room, because a history and the one that it replaces are both there for a moment.
        num_places = 2 * self._max_tokens
        self._index = RadixIndex(num_places, 1, min_run=self._min_run)
        self._places = BlockAllocator(num_places)
        self._uses = np.zeros(num_places, np.int32)
        self._position = np.zeros(num_places, np.int32)
        self._newest = np.zeros(num_places, np.int64)
        # Histories by place: of their last token, of that of histories without an id, and of the
        # token before the first reasoning.
        self._ending = _Marks(num_places)
        self._unnamed = _Marks(num_places)
        self._thinking = _Marks(num_places)
        # Histories by number, oldest first.
        self._turns: OrderedDict[int, _Turn] = OrderedDict()
        self._spaces: dict[Namespace, dict[int, _Turn]] = {}
        self._conversations: OrderedDict[_Key, list[_Turn]] = OrderedDict()
        self._expired: OrderedDict[_Key, float] = OrderedDict()
        self._num_tokens = 0
        self._next = 1
        self._now = -math.inf

    @property
    def ttl(self) -> float:
        """Seconds that a history is kept."""
        return self._ttl

    @property
    def num_conversations(self) -> int:
        """Kept conversations; a history without an id counts as one."""
        with self._lock:
            return len(self._conversations)

    @property
    def num_tokens(self) -> int:
        """Tokens of all kept histories, each counted whole."""
        with self._lock:
            return self._num_tokens

    def __len__(self) -> int:
        """Kept histories, including expired ones until the next call."""
        with self._lock:
            return len(self._turns)

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

        The new history replaces those that it starts with, within its conversation, or among those
        without an id. It does not replace one whose parameters or manifest were not handed out yet
        if it has none itself. All others stay: other answers to one prompt, branches, histories
        from before an edit.

        Args:
            seq: Ids of prompt and answer as the engine computed them, with their namespace. Copied.
            num_computed: Tokens from position 0 whose KV exists. After a decode that is at most
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

        Example:
            >>> import kvtrie
            >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
            >>> tracker = kvtrie.TurnTracker()
            >>> first = kvtrie.TokenSequence([1, 2, 3], space)
            >>> tracker.keep(first, num_computed=2, conversation="c")
            >>> longer = kvtrie.TokenSequence([1, 2, 3, 4, 5], space)
            >>> tracker.keep(longer, num_computed=4, conversation="c")
            >>> len(tracker), tracker.num_tokens
            (1, 5)
        """
        kept = self._checked_kept(
            seq, num_computed, conversation, spans, source, kv_transfer_params, payload, manifest
        )
        now = self._read_clock()
        dead: list[_Turn] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._expire(now, dead)
            self._keep(kept, dead)

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
        """Say how a prompt relates to what is kept.

        With a conversation id, its histories are compared; without one, the history of the
        namespace with the longest common prefix. The result is the first of these that holds: an
        exact extension, an alias if `alias` allows it, moved runs if `policy` allows them, a common
        prefix, starting over.

        Args:
            prompt: The next prompt, in the namespace of the histories.
            conversation: The id of its conversation, or None.
            policy: What may be reused approximately, as for `RadixIndex.plan`. Moved runs are
                approximate; see the model's gate.
            alias: Whether a kept history may be sent with its reasoning, instead of a prompt
                without it. The model then sees the reasoning; its answer may differ.
            keep_last: Tokens at the end that the receiver computes anyway. vLLM loads none of the
                last ``num_prefill_lookahead_tokens - 1``. At least 1 for any engine.
            take: Whether the caller acts on the result. If False, nothing is handed out and nothing
                is touched: the parameters stay for the next call.

        Returns:
            The kind of the prompt, and what the engine has of it.

        Raises:
            StaleHandleError: The conversation has expired or is unknown.
            TypeError: An argument has the wrong type.
            ValueError: `keep_last` is negative, or the policy's `min_run` is below the tracker's.

        Example:
            >>> import kvtrie
            >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
            >>> tracker = kvtrie.TurnTracker()
            >>> history = kvtrie.TokenSequence([1, 2, 70, 71, 3, 4], space)
            >>> reasoning = [kvtrie.Span(2, 4, "reasoning")]
            >>> tracker.keep(history, num_computed=5, spans=reasoning)
            >>> prompt = kvtrie.TokenSequence([1, 2, 3, 4, 5], space)
            >>> tracker.compare(prompt).kind
            'common_prefix'
            >>> tracker.compare(prompt, alias=True).send
            array([ 1,  2, 70, 71,  3,  4,  5], dtype=uint32)
        """
        asked = self._checked_asked(prompt, conversation, policy, alias, keep_last, take)
        now = self._read_clock()
        dead: list[_Turn] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._expire(now, dead)
            seen, now = self._look_up(asked), self._now
        found = self._compare(asked, seen)
        if isinstance(found, TurnAnswer):
            return found
        with self._lock:
            answer = self._answer(found, asked, now)
        # Parameters that are not handed out must not be shared with the caller.
        if take:
            return answer
        return replace(answer, kv_transfer_params=deepcopy(answer.kv_transfer_params))

    def forget(self, conversation: str, namespace: Namespace) -> None:
        """Forget a conversation, for example because its engine is gone.

        Args:
            conversation: Its id.
            namespace: The namespace of its sequences.

        Raises:
            StaleHandleError: It has expired or is unknown.
            TypeError: The id is not a str, or the namespace not a Namespace.

        Example:
            >>> import kvtrie
            >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
            >>> tracker = kvtrie.TurnTracker()
            >>> tracker.keep(kvtrie.TokenSequence([1], space), num_computed=1, conversation="c")
            >>> tracker.forget("c", space)
            >>> len(tracker)
            0
        """
        call = "TurnTracker.forget"
        key = _text(call, "conversation", conversation)
        _instance(call, "namespace", namespace, Namespace, "a Namespace")
        now = self._read_clock()
        dead: list[_Turn] = []
        self._expire_in_parts(now, dead)
        with self._lock:
            self._expire(now, dead)
            turns = list(self._named(call, (namespace, key)))
        for first in range(0, len(turns), _MOST_DROPPED):
            with self._lock:
                for turn in turns[first : first + _MOST_DROPPED]:
                    if turn.number in self._turns:
                        self._drop(turn, dead)

    # Arguments.

    def _checked_kept(
        self,
        seq: TokenSequence,
        num_computed: SupportsIndex,
        conversation: str | None,
        spans: Iterable[Span],
        source: ComputedSource | Imported,
        params: Mapping[str, Any] | None,
        payload: object,
        manifest: object,
    ) -> _Kept:
        call = "TurnTracker.keep"
        copied = _copied(call, "seq", seq)
        size = len(copied)
        if size == 0:
            msg = f"{call}: the history has no token"
            raise ValueError(msg)
        if size > self._max_tokens:
            msg = f"{call}: the history has {size} tokens, and max_tokens is {self._max_tokens}"
            raise ValueError(msg)
        computed = _index(call, "num_computed", num_computed)
        if not 0 <= computed <= size:
            msg = f"{call}: num_computed is {computed}, and the history has {size} tokens"
            raise ValueError(msg)
        if conversation is not None:
            conversation = _text(call, "conversation", conversation)
        _instance(call, "source", source, (ComputedSource, Imported), "COMPUTED or an Imported")
        all_spans = tuple(spans)
        for span in all_spans:
            _instance(call, "an item of spans", span, Span, "a Span")
            if span.end > size:
                msg = f"{call}: {span!r} ends after the {size} tokens of the history"
                raise ValueError(msg)
        checked = None if params is None else checked_params(params, call)
        return _Kept(
            seq=copied,
            conversation=conversation,
            num_computed=computed,
            source=source,
            spans=all_spans,
            reasoning=_reasoning(all_spans),
            params=checked,
            payload=payload,
            manifest=manifest,
        )

    def _checked_asked(
        self,
        prompt: TokenSequence,
        conversation: str | None,
        policy: ReusePolicy,
        alias: bool,
        keep_last: SupportsIndex,
        take: bool,
    ) -> _Asked:
        call = "TurnTracker.compare"
        copied = _copied(call, "prompt", prompt)
        if conversation is not None:
            conversation = _text(call, "conversation", conversation)
        _instance(call, "policy", policy, ReusePolicy, "a ReusePolicy")
        if policy.min_run is not None and policy.min_run < self._min_run:
            msg = (
                f"{call}: the policy's min_run is {policy.min_run}; the tracker finds runs of "
                f"{self._min_run} tokens and more (its min_run)"
            )
            raise ValueError(msg)
        kept_back = _index(call, "keep_last", keep_last)
        if kept_back < 0:
            msg = f"{call}: keep_last is {kept_back}, which is negative"
            raise ValueError(msg)
        for name, value in (("alias", alias), ("take", take)):
            _instance(call, name, value, bool, "a bool")
        return _Asked(copied, conversation, policy, alias, kept_back, take)

    def _read_clock(self) -> float:
        now = self._clock()
        _instance("TurnTracker", "the value of clock", now, (int, float), "a number of seconds")
        if not math.isfinite(now):
            msg = f"TurnTracker: the value of clock is {now}, not a finite number of seconds"
            raise ValueError(msg)
        return float(now)

    def _expire_in_parts(self, now: float, dead: list[_Turn]) -> None:
        """Expire histories a few at a time, so that others get the lock in between."""
        more = True
        while more:
            with self._lock:
                more = self._expire(now, dead, _MOST_DROPPED)

    # Time and room. The lock is held from here on. A dropped history may hold the last reference to
    # its payload, whose finalizer may call the tracker. So it goes to `dead`, a list that the call
    # releases without the lock.

    def _expire(self, now: float, dead: list[_Turn], most: int | None = None) -> bool:
        """Forget what has expired, at most `most` histories; returns whether there may be more."""
        # Threads may read the clock in one order and get here in another.
        self._now = max(self._now, now)
        for _ in itertools.count() if most is None else range(most):
            turn = next(iter(self._turns.values()), None)
            if turn is None or self._now - turn.kept_at < self._ttl:
                break
            if turn.conversation is not None:
                self._expired[turn.key] = turn.kept_at
                self._expired.move_to_end(turn.key)
            self._drop(turn, dead)
        else:
            return True
        while len(self._expired) > self._max_conversations:
            self._expired.popitem(last=False)
        return False

    def _named(self, call: str, key: _Key) -> list[_Turn]:
        """The histories of a conversation; raises an error that says why there are none."""
        turns = self._conversations.get(key)
        if turns is not None:
            return turns
        kept_at = self._expired.get(key)
        if kept_at is not None:
            msg = (
                f"{call}: conversation {key[1]!r} has expired: it was kept "
                f"{self._now - kept_at:.3f} s ago, and ttl is {self._ttl:g} s"
            )
        else:
            msg = (
                f"{call}: conversation {key[1]!r} is unknown in this namespace: it was never "
                f"kept, was forgotten or made room for others, or expired long ago (ttl is "
                f"{self._ttl:g} s)"
            )
        raise StaleHandleError(msg)

    def _drop(self, turn: _Turn, dead: list[_Turn]) -> None:
        """Forget one history; tokens shared with others stay."""
        dead.append(turn)
        del self._turns[turn.number]
        self._num_tokens -= len(turn.places)
        turns = self._conversations[turn.key]
        turns.remove(turn)
        if not turns:
            del self._conversations[turn.key]
        space = self._spaces[turn.key[0]]
        del space[turn.number]
        if not space:
            del self._spaces[turn.key[0]]
        self._ending.remove(turn.last, turn)
        if turn.conversation is None:
            self._unnamed.remove(turn.last, turn)
        self._thinking.remove(turn.before_reasoning, turn)
        self._uses[turn.places] -= 1
        unused = turn.places[self._uses[turn.places] == 0]
        if len(unused):
            self._places.free(self._index.discard(unused))

    def _make_room(
        self, key: _Key, num_tokens: int, leaving: Sequence[_Turn], dead: list[_Turn]
    ) -> None:
        """Drop others until a history of this size fits; `leaving` is dropped anyway."""
        spared = sum(len(turn.places) for turn in leaving)
        empty = {turn.key for turn in leaving} - {key}
        while True:
            too_long = self._num_tokens - spared + num_tokens > self._max_tokens
            num_others = len(self._conversations) - len(empty) - (key in self._conversations)
            if not too_long and num_others < self._max_conversations:
                return
            self._drop(self._least_recent(key, leaving), dead)

    def _least_recent(self, key: _Key, leaving: Sequence[_Turn]) -> _Turn:
        """The oldest history of the conversation used least recently; those of `key` come last."""
        others = (turns for each, turns in self._conversations.items() if each != key)
        for turns in itertools.chain(others, [self._conversations.get(key, [])]):
            for turn in turns:
                if turn not in leaving:
                    return turn
        # A history is no longer than the bound, so it fits alone.
        msg = "TurnTracker.keep: no history is left to make room with; please report this"
        raise KvTrieError(msg)

    # Keeping.

    def _keep(self, kept: _Kept, dead: list[_Turn]) -> None:
        space = kept.seq.namespace
        key: _Key = (space, self._next if kept.conversation is None else kept.conversation)
        path = self._index.lookup(kept.seq).blocks
        leaving = self._replaced(kept, path)
        self._make_room(key, len(kept.seq), leaving, dead)
        # Dropped histories may have been on the path.
        path = self._index.lookup(kept.seq).blocks
        fresh = self._places.allocate(len(kept.seq) - len(path))
        places = np.concatenate([path, fresh])
        self._index.insert(
            kept.seq, fresh, num_computed=len(kept.seq), start=len(path), source=COMPUTED
        )
        turn = _Turn(
            key=key,
            number=self._next,
            kept_at=self._now,
            seq=kept.seq,
            places=places,
            num_computed=kept.num_computed,
            source=kept.source,
            spans=kept.spans,
            reasoning=kept.reasoning,
            params=kept.params,
            payload=kept.payload,
            manifest=kept.manifest,
        )
        self._next += 1
        self._uses[places] += 1
        self._newest[places] = turn.number
        self._position[fresh] = np.arange(len(path), len(places), dtype=np.int32)
        self._ending.add(turn.last, turn)
        if kept.conversation is None:
            self._unnamed.add(turn.last, turn)
        self._thinking.add(turn.before_reasoning, turn)
        self._turns[turn.number] = turn
        self._spaces.setdefault(space, {})[turn.number] = turn
        self._conversations.setdefault(key, []).append(turn)
        self._conversations.move_to_end(key)
        self._expired.pop(key, None)
        self._num_tokens += len(places)
        for old in leaving:
            self._drop(old, dead)

    def _replaced(self, kept: _Kept, path: npt.NDArray[np.int32]) -> list[_Turn]:
        """Histories that the new one starts with and replaces."""
        if kept.conversation is None:
            # The last place of a history is on the path of every longer one.
            turns = self._unnamed.on(path)
        else:
            key = (kept.seq.namespace, kept.conversation)
            turns = [
                turn
                for turn in self._conversations.get(key, ())
                if len(turn.places) <= len(path) and path[len(turn.places) - 1] == turn.last
            ]
        return [
            turn
            for turn in turns
            if kept.has_handle
            or (turn.manifest is None and (turn.params is None or turn.params_taken))
        ]

    # Comparing. Reads under the lock come first, then the work without it.

    def _look_up(self, asked: _Asked) -> _Seen:
        namespace = asked.prompt.namespace
        named: list[_Turn] | None = None
        if asked.conversation is not None:
            named = list(self._named("TurnTracker.compare", (namespace, asked.conversation)))
        path = self._index.lookup(asked.prompt).blocks
        longest: _Turn | None = None
        through: tuple[int, int] | None = None
        turns: list[_Turn] = []
        if named is None and len(path):
            place = int(path[-1])
            longest = self._ending.newest(place) or self._known_through(namespace, place)
            if longest is None:
                through = (place, len(path) - 1)
                turns = list(self._spaces[namespace].values())
        thinking: list[_Turn] = []
        if asked.alias:
            # Before the first dropped reasoning, the prompt equals the history.
            thinking = self._thinking.on(path, _MOST_TURNS_ALIASED) if named is None else named
        return _Seen(path, named, longest, through, turns, thinking)

    def _known_through(self, namespace: Namespace, place: int) -> _Turn | None:
        """The newest history with this place, unless it was forgotten."""
        return self._spaces.get(namespace, {}).get(int(self._newest[place]))

    def _compare(self, asked: _Asked, seen: _Seen) -> _Found | TurnAnswer:
        path = seen.path
        turn = self._longest(seen)
        common = 0 if turn is None else _common(path, turn.places)
        if turn is not None and common == len(turn.places):
            num_tokens, num_exact = self._in_place(turn, common, len(asked.prompt), asked)
            if num_tokens:
                return _Found("exact_extension", turn, num_tokens, num_exact, common)
        if asked.alias:
            found = self._alias(asked, seen.thinking)
            if found is not None:
                aliased, send = found
                num_tokens, num_exact = self._in_place(
                    aliased, len(aliased.places), len(send), asked
                )
                if num_tokens:
                    shared = _common(path, aliased.places)
                    return _Found("alias", aliased, num_tokens, num_exact, shared, send=send)
        if asked.policy.approximate:
            moved = self._moved(asked, seen, turn)
            if moved is not None:
                source, segments = moved
                num_tokens, num_exact = _leading(segments)
                shared = _common(path, source.places)
                return _Found(
                    "moved_runs", source, num_tokens, num_exact, shared, segments=segments
                )
        if turn is not None:
            num_tokens, num_exact = self._in_place(turn, common, len(asked.prompt), asked)
            if num_tokens:
                return _Found("common_prefix", turn, num_tokens, num_exact, common)
        return TurnAnswer(kind="start_over", num_common=common)

    def _longest(self, seen: _Seen) -> _Turn | None:
        """The history with the longest common prefix; on a tie a whole one, then the newest."""
        if seen.named is not None:
            turns = [(_common(seen.path, turn.places), turn) for turn in seen.named]
            common, turn = max(
                turns, key=lambda each: (each[0], each[0] == len(each[1].places), each[1].number)
            )
            return turn if common else None
        if seen.through is None:
            return seen.longest
        return self._searched(seen.turns, *seen.through)

    def _searched(self, turns: list[_Turn], place: int, position: int) -> _Turn | None:
        """The newest of these histories with a place; remembered for the next call."""
        for turn in reversed(turns):
            if len(turn.places) > position and turn.places[position] == place:
                with self._lock:
                    # The place may have been freed and allocated again.
                    if turn.number in self._turns and int(self._newest[place]) not in self._turns:
                        self._newest[place] = turn.number
                return turn
        return None

    def _in_place(self, turn: _Turn, common: int, size: int, asked: _Asked) -> tuple[int, int]:
        """Tokens at the front that may be used in place, and how many of them are exact."""
        usable = max(0, min(common, turn.num_computed, size - asked.keep_last))
        if isinstance(turn.source, ComputedSource):
            return usable, usable
        exact = min(usable, turn.source.exact_until)
        policy = asked.policy
        allowed = (
            policy.approximate
            and turn.source.hops <= policy.max_hops
            and not policy.forbid_kinds
            and usable - exact <= policy.max_approximate_share * size
        )
        return (usable if allowed else exact), exact

    def _alias(
        self, asked: _Asked, turns: list[_Turn]
    ) -> tuple[_Turn, npt.NDArray[np.uint32]] | None:
        """A history whose text without reasoning begins the prompt, and what to send."""
        if asked.prompt.items:
            return None
        prompt = asked.prompt[:]
        best: tuple[int, int] = (0, 0)
        found = None
        for turn in turns:
            if not turn.reasoning or turn.seq.items or (len(turn.places), turn.number) < best:
                continue
            consumed = _without_reasoning(turn, prompt)
            if consumed is not None:
                best = (len(turn.places), turn.number)
                found = (turn, np.concatenate([turn.seq[:], prompt[consumed:]]))
        return found

    def _moved(
        self, asked: _Asked, seen: _Seen, longest: _Turn | None
    ) -> tuple[_Turn, npt.NDArray[np.void]] | None:
        """The history with the most reuse through moved runs, and the plan's segments."""
        named = seen.named
        turns = self._sources(asked) if named is None else named[-_MOST_TURNS_PLANNED:]
        if longest is not None and longest not in turns:
            turns = [*turns, longest]
        best: tuple[int, int] = (0, 0)
        found = None
        for turn in turns:
            segments, reused = self._planned(turn, asked)
            moved = segments[
                (segments["class"] == 1) & (segments["start"] >= _common(seen.path, turn.places))
            ]
            if len(moved) and (reused, turn.number) > best:
                best = (reused, turn.number)
                found = (turn, segments)
        return found

    def _sources(self, asked: _Asked) -> list[_Turn]:
        """Histories that hold runs of the prompt, most tokens first."""
        namespace = asked.prompt.namespace
        plan = self._index.plan(asked.prompt, asked.policy, keep_last=asked.keep_last, pin=False)
        places = plan.source_blocks
        plan.release()
        # A place of a history forgotten since then leads to no history or to another one. That does
        # no harm: each history is planned separately.
        with self._lock:
            newest, firsts, counts = np.unique(
                self._newest[places], return_index=True, return_counts=True
            )
            most = np.argsort(-counts, kind="stable")[:_MOST_TURNS_PLANNED]
            space = self._spaces.get(namespace, {})
            known = [space.get(number) for number in newest[most].tolist()]
            asked_for = [
                (int(place), int(self._position[place])) for place in places[firsts[most]].tolist()
            ]
            turns = [] if all(known) else list(space.values())
        found: list[_Turn] = []
        for each, (place, position) in zip(known, asked_for, strict=True):
            turn = each or self._searched(turns, place, position)
            if turn is not None and turn not in found:
                found.append(turn)
        return found

    def _planned(self, turn: _Turn, asked: _Asked) -> tuple[npt.NDArray[np.void], int]:
        """The source of the prompt's tokens in one history, and how many are reused."""
        size = len(turn.places)
        index = RadixIndex(size, 1, min_run=self._min_run)
        index.insert(
            turn.seq,
            np.arange(size, dtype=np.int32),
            num_computed=turn.num_computed,
            source=turn.source,
            spans=turn.spans,
        )
        plan = index.plan(asked.prompt, asked.policy, keep_last=asked.keep_last, pin=False)
        segments, reused = plan.segments, plan.num_exact + plan.num_approximate
        plan.release()
        return segments, reused

    def _answer(self, found: _Found, asked: _Asked, now: float) -> TurnAnswer:
        """Hand out a result. The lock is held."""
        turn, kind, num_exact = found.turn, found.kind, found.num_exact
        if turn.params is None:
            cut = CutParams(None, 0, "none were kept")
        elif turn.conversation is not None and asked.conversation is None:
            cut = CutParams(None, 0, f"they are those of conversation {turn.conversation!r}")
        elif turn.params_taken:
            cut = CutParams(
                None, 0, "they were handed out before, and their reader has released them"
            )
        else:
            cut = cut_params(
                turn.params,
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
            turn.params_taken |= cut.params is not None
            if turn.key in self._conversations:
                self._conversations.move_to_end(turn.key)
        return TurnAnswer(
            kind=kind,
            num_tokens=found.num_tokens,
            num_exact=num_exact,
            num_common=found.num_common,
            conversation=turn.conversation,
            num_kept=len(turn.places),
            age=now - turn.kept_at,
            kv_transfer_params=cut.params,
            num_transfer_tokens=cut.num_tokens,
            transfer_reason=cut.reason,
            payload=turn.payload,
            manifest=turn.manifest,
            send=found.send,
            segments=found.segments,
        )


def _common(path: npt.NDArray[np.int32], places: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix of two paths."""
    size = min(len(path), len(places))
    differ = path[:size] != places[:size]
    return int(differ.argmax()) if differ.any() else size


def _leading(segments: npt.NDArray[np.void]) -> tuple[int, int]:
    """Tokens that a plan uses in place, and how many of them are exact."""
    end = exact = 0
    for start, stop, delta, label in segments[["start", "end", "delta", "class"]].tolist():
        if start != end or delta != 0 or label == 2:
            break
        end = stop
        exact = stop if label == 0 and exact == start else exact
    return end, exact


def _without_reasoning(turn: _Turn, prompt: npt.NDArray[np.uint32]) -> int | None:
    """Length of the part of a prompt that is this history without some of its reasoning, or None.

    First all reasoning is dropped; then only reasoning that the prompt does not have.
    """
    tokens = turn.seq[:]
    for keep_some in (False, True):
        read = at = removed = 0
        for start, end in (*turn.reasoning, (len(tokens), len(tokens))):
            if not np.array_equal(tokens[at:start], prompt[read : read + start - at]):
                break
            read += start - at
            at = end
            if keep_some and np.array_equal(tokens[start:end], prompt[read : read + end - start]):
                read += end - start
            else:
                removed += end - start
        else:
            if removed:
                return read
    return None


def _reasoning(spans: tuple[Span, ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of reasoning, ascending; ranges that touch or overlap are merged."""
    merged: list[tuple[int, int]] = []
    for span in sorted(
        (span for span in spans if span.kind == "reasoning" and span.start < span.end),
        key=lambda span: (span.start, span.end),
    ):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return tuple(merged)


def _instance(
    call: str, name: str, value: object, kind: type | tuple[type, ...], what: str
) -> None:
    """Refuse a value of another type. A bool is not an int.

    The type counts, not `__class__`: no attribute of a foreign object is read later.
    """
    if not issubclass(type(value), kind) or (isinstance(value, bool) and kind is not bool):
        msg = f"{call}: {name} is {value!r}, not {what}"
        raise TypeError(msg)


def _copied(call: str, name: str, seq: TokenSequence) -> TokenSequence:
    _instance(call, name, seq, TokenSequence, "a TokenSequence")
    return TokenSequence(seq[:], seq.namespace, seq.items)


def _index(call: str, name: str, value: SupportsIndex) -> int:
    """An exact int, because a subclass's comparisons would run under the lock."""
    _instance(call, name, value, SupportsIndex, "an int")
    return operator.index(value)


def _text(call: str, name: str, value: str) -> str:
    """An exact str of the same characters, because a subclass's hash would run under the lock."""
    _instance(call, name, value, str, "a str")
    return exact_text(value)


def _whole(call: str, name: str, value: SupportsIndex, least: int, most: int) -> int:
    number = _index(call, name, value)
    if not least <= number <= most:
        msg = f"{call}: {name} is {number}; it must be in [{least}, {most}]"
        raise ValueError(msg)
    return number


def _block_sizes(call: str, value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    sizes = list(value) if isinstance(value, Sequence) else [value]
    if not sizes:
        msg = f"{call}: block_size is empty; it must have one size per block group"
        raise ValueError(msg)
    return tuple(_whole(call, "block_size", size, 1, _MAX_BLOCK_SIZE) for size in sizes)
