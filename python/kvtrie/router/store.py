"""The kept histories: what a `TurnTracker` reads and changes under its lock.

A dropped history may hold the last reference to its payload, whose finalizer may call the tracker.
So the call releases `dead`, a list of them, without the lock.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvtrie._core import (
    COMPUTED,
    BlockAllocator,
    KvTrieError,
    Namespace,
    RadixIndex,
    StaleHandleError,
)
from kvtrie.router.comparison import Seen
from kvtrie.router.history import HistoriesByPlace, History, Key, session_of
from kvtrie.router.namespace_counts import NamespaceCounts
from kvtrie.router.stats import TrackerStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvtrie.router.arguments import CompareArguments, KeepArguments

_MOST_ALIASED: Final = 64


class HistoryStore:
    """Histories within bounds, and the tree of their tokens."""

    def __init__(
        self, *, ttl: float, max_tokens: int, max_conversations: int, min_run: int
    ) -> None:
        self._ttl = ttl
        self._max_tokens = max_tokens
        self._max_conversations = max_conversations
        # A block is one token; its id names a place. Twice the room, because a history and the one
        # that it replaces are both there for a moment.
        num_places = 2 * max_tokens
        self.index = RadixIndex(num_places, 1, min_run=min_run)
        self.allocator = BlockAllocator(num_places)
        self.uses = np.zeros(num_places, np.int32)
        self.position = np.zeros(num_places, np.int32)
        self.newest = np.zeros(num_places, np.int64)
        # By last token; the same without an id; by the token before the first reasoning.
        self.ending = HistoriesByPlace(num_places)
        self.unnamed = HistoriesByPlace(num_places)
        self.before_reasoning = HistoriesByPlace(num_places)
        # Oldest first.
        self.by_number: OrderedDict[int, History] = OrderedDict()
        self.spaces: dict[Namespace, dict[int, History]] = {}
        self.conversations: dict[Key, list[History]] = {}
        # Least recently used first.
        self._order: dict[Namespace, OrderedDict[Key, None]] = {}
        # Of each namespace.
        self._tokens = NamespaceCounts()
        self._num_conversations = NamespaceCounts()
        self.expired: OrderedDict[Key, float] = OrderedDict()
        self.num_tokens = 0
        self.stats = TrackerStats()
        self._next = 1
        self.now = -math.inf

    def expire(self, now: float, dead: list[History], most: int | None = None) -> bool:
        """Forget what has expired, at most `most` histories; returns whether there may be more."""
        # Threads may read the clock in one order and get here in another.
        self.now = max(self.now, now)
        for _ in itertools.count() if most is None else range(most):
            history = next(iter(self.by_number.values()), None)
            if history is None or self.now - history.kept_at < self._ttl:
                break
            if history.conversation is not None:
                self.expired[history.key] = history.kept_at
                self.expired.move_to_end(history.key)
            self.drop(history, dead, "expired")
        else:
            return True
        while len(self.expired) > self._max_conversations:
            self.expired.popitem(last=False)
        return False

    def named(self, call: str, key: Key) -> list[History]:
        """The histories of a conversation, or an error that says why there are none."""
        missing = self.missing(key)
        if missing is None:
            return self.conversations[key]
        if missing == "expired":
            kept_at = self.expired[key]
            msg = (
                f"{call}: conversation {key[1]!r} has expired: it was kept "
                f"{self.now - kept_at:.3f} s ago, and ttl is {self._ttl:g} s"
            )
        else:
            msg = (
                f"{call}: conversation {key[1]!r} is unknown in this namespace: it was never "
                f"kept, was forgotten or made room for others, or expired long ago (ttl is "
                f"{self._ttl:g} s)"
            )
        raise StaleHandleError(msg)

    def missing(self, key: Key) -> Literal["expired", "unknown"] | None:
        """Why there is no such conversation, counted; None if there is."""
        if key in self.conversations:
            return None
        why: Literal["expired", "unknown"] = "expired" if key in self.expired else "unknown"
        self.stats.unknown[why] += 1
        return why

    def drop(self, history: History, dead: list[History], cause: str) -> None:
        """Forget one history; tokens shared with others stay."""
        dead.append(history)
        self.stats.dropped[cause] += 1
        del self.by_number[history.number]
        namespace = history.key[0]
        self.num_tokens -= len(history.places)
        self._tokens.add(namespace, -len(history.places))
        histories = self.conversations[history.key]
        histories.remove(history)
        if not histories:
            del self.conversations[history.key], self._order[namespace][history.key]
            self._num_conversations.add(namespace, -1)
        space = self.spaces[namespace]
        del space[history.number]
        if not space:
            del self.spaces[namespace], self._order[namespace]
        self.ending.remove(history.last, history)
        if history.conversation is None:
            self.unnamed.remove(history.last, history)
        self.before_reasoning.remove(history.before_reasoning, history)
        self.uses[history.places] -= 1
        unused = history.places[self.uses[history.places] == 0]
        if len(unused):
            self.allocator.free(self.index.discard(unused))

    def use(self, key: Key) -> None:
        """Count a use of a conversation, if it is there."""
        if key in self.conversations:
            self._order[key[0]].move_to_end(key)

    def _make_room(
        self, key: Key, num_tokens: int, leaving: Sequence[History], dead: list[History]
    ) -> None:
        """Drop histories until a new one fits; the caller drops `leaving`.

        They are of the namespace that has most of what is short, the new history included.
        """
        own = key[0]
        spared = sum(len(history.places) for history in leaving)
        # Conversations that do not count: its own, and those that leave.
        uncounted = len({history.key for history in leaving} - {key}) + (key in self.conversations)
        while True:
            too_long = self.num_tokens - spared + num_tokens > self._max_tokens
            if not too_long and len(self.conversations) - uncounted < self._max_conversations:
                return
            shares, less, more = (
                (self._tokens, spared, num_tokens)
                if too_long
                else (self._num_conversations, uncounted, 1)
            )
            other = shares.largest(besides=own)
            held = shares.of(own) - less
            if held and (other is None or held + more >= shares.of(other)):
                other = own
            had_key = key in self.conversations
            history = self._least_recent(own if other is None else other, key, leaving)
            self.drop(history, dead, "room")
            uncounted -= had_key and key not in self.conversations

    def _least_recent(self, namespace: Namespace, key: Key, leaving: Sequence[History]) -> History:
        """The oldest of the conversation that was used longest ago; those of `key` come last."""
        others = (each for each in self._order.get(namespace, ()) if each != key)
        for each in itertools.chain(others, [key]):
            for history in self.conversations.get(each, ()):
                if history not in leaving:
                    return history
        # A history is no longer than the bound, so it fits alone.
        msg = "TurnTracker.keep: no history is left to make room with; please report this"
        raise KvTrieError(msg)

    def keep(self, kept: KeepArguments, dead: list[History]) -> None:
        """Add a history; drop those that it replaces or that leave it no room."""
        space = kept.seq.namespace
        key: Key = (space, self._next if kept.conversation is None else kept.conversation)
        path = self.index.lookup(kept.seq).blocks
        leaving = self._replaced(kept, path)
        self._make_room(key, len(kept.seq), leaving, dead)
        # Dropped histories may have been on the path.
        path = self.index.lookup(kept.seq).blocks
        fresh = self.allocator.allocate(len(kept.seq) - len(path))
        places = np.concatenate([path, fresh])
        self.index.insert(
            kept.seq,
            fresh,
            num_computed=len(kept.seq),
            start=len(path),
            source=COMPUTED,
            session=session_of(kept.conversation),
        )
        history = History(
            key=key,
            number=self._next,
            kept_at=self.now,
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
        self.uses[places] += 1
        self.newest[places] = history.number
        self.position[fresh] = np.arange(len(path), len(places), dtype=np.int32)
        self.ending.add(history.last, history)
        if kept.conversation is None:
            self.unnamed.add(history.last, history)
        self.before_reasoning.add(history.before_reasoning, history)
        self.by_number[history.number] = history
        self.spaces.setdefault(space, {})[history.number] = history
        if key not in self.conversations:
            self.conversations[key] = []
            self._num_conversations.add(space, 1)
        self.conversations[key].append(history)
        order = self._order.setdefault(space, OrderedDict())
        order[key] = None
        order.move_to_end(key)
        self._tokens.add(space, len(places))
        self.expired.pop(key, None)
        self.num_tokens += len(places)
        self.stats.kept += 1
        for old in leaving:
            self.drop(old, dead, "replaced")

    def _replaced(self, kept: KeepArguments, path: npt.NDArray[np.int32]) -> list[History]:
        if kept.conversation is None:
            # The last place of a history is on the path of every longer one.
            histories = self.unnamed.on(path)
        else:
            key = (kept.seq.namespace, kept.conversation)
            histories = [
                history
                for history in self.conversations.get(key, ())
                if len(history.places) <= len(path)
                and path[len(history.places) - 1] == history.last
            ]
        return [
            history
            for history in histories
            if kept.has_handle
            or (history.manifest is None and (history.params is None or history.params_taken))
        ]

    def look_up(self, asked: CompareArguments) -> Seen:
        """Read what a comparison needs."""
        namespace = asked.prompt.namespace
        named: list[History] | None = None
        if asked.conversation is not None:
            named = list(self.named("TurnTracker.compare", (namespace, asked.conversation)))
        path = self.index.lookup(asked.prompt).blocks
        longest: History | None = None
        through: tuple[int, int] | None = None
        histories: list[History] = []
        if named is None and len(path):
            place = int(path[-1])
            longest = self.ending.newest(place) or self._known_through(namespace, place)
            if longest is None:
                through = (place, len(path) - 1)
                histories = list(self.spaces[namespace].values())
        may_alias: list[History] = []
        if asked.alias:
            # Before the first dropped reasoning, the prompt equals the history.
            may_alias = self.before_reasoning.on(path, _MOST_ALIASED) if named is None else named
        return Seen(path, named, longest, through, histories, may_alias)

    def _known_through(self, namespace: Namespace, place: int) -> History | None:
        return self.spaces.get(namespace, {}).get(int(self.newest[place]))
