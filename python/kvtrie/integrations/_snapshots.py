"""The source of snapshots: what all published events together say, for subscribers that lack some.

A pool has hashes without tokens, and engines number their batches in another thread. So a snapshot
is not read off the pool. `StreamBlocks` applies the very batches that the engine publishes, in
their order, and the number of a batch is how many came before it: it is what a subscriber that
missed nothing holds after that batch, whenever and in whichever thread it is read.

The scheduler only hands over each batch (`SnapshotSource.hand_over`). A thread applies them and
answers. It pauses every `_AT_ONCE` blocks of a snapshot, and rests nine times as long as each one
took.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import zmq

from kvtrie.integrations._asked import SettingsError

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterable, Iterator, Mapping

_VERSION: Final = 1
# A request waits no longer than this for a call of `shutdown`, and a batch to be applied, in ms.
_TICK: Final = 100
# Blocks after which the thread lets the scheduler's go on: less than a millisecond.
_AT_ONCE: Final = 128
_PAUSE: Final = 1e-4
_REST: Final = 9.0
_LEAST_REST: Final = 0.5
# Seconds between two readings of requests.
_BETWEEN: Final = 0.01
# Requests that wait for one snapshot, and those that are read at once.
_MOST_WAITING: Final = 64
_LONGEST_REQUEST: Final = 64
# Of a conversation that blocks are kept with: a client chooses it, and it may be with each block.
_LONGEST_SESSION: Final = 64
# Answers that one subscriber may leave unread.
_MOST_UNREAD: Final = 2

_Block = tuple[Any, bytes, tuple[Any, ...] | None, tuple[Any, ...]]
"""Hash of the parent, token ids, extra keys, and what the event had once."""


@dataclass(frozen=True, slots=True)
class EventForm:
    """The events of one engine.

    Attributes:
        engine: Its name.
        stored: The class ``BlockStored``.
        removed: The class ``BlockRemoved``.
        cleared: The class ``AllBlocksCleared``.
        shared: Fields that a stored event has once for all of its blocks.
        place: Those of them that a removed event has too.
    """

    engine: str
    stored: Any
    removed: Any
    cleared: Any
    shared: tuple[str, ...]
    place: tuple[str, ...]

    def shared_of(self, event: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a stored event
        """The values of ``shared``, without objects that the garbage collector follows."""
        found = [getattr(event, name) for name in self.shared]
        return tuple([one.value if isinstance(one, Enum) else one for one in found])


class StreamBlocks:
    """The blocks that a stream of events leaves, as a subscriber has them.

    A removed block stays for those that continue it: a hole. There are at most ``most``;
    beyond, all are forgotten, and blocks after them have unknown parents until these come again.
    A snapshot has at most ``most`` holes, and repeats blocks at most ``most`` times.
    """

    def __init__(self, form: EventForm, most: int) -> None:
        self._form = form
        self._most = most
        # Tuples of what the garbage collector does not follow.
        self._blocks: dict[Any, _Block] = {}
        # The conversation that stored a block last, if that is known.
        self._sessions: dict[Any, str] = {}
        self._copies: dict[Any, int] = {}
        self._num_copies = 0
        self._children: dict[Any, int] = {}

    def __len__(self) -> int:
        """The number of blocks, holes among them."""
        return len(self._blocks)

    @property
    def num_copies(self) -> int:
        """Blocks of the pool, each of those that share a hash: the sum of ``copies``, in O(1)."""
        return self._num_copies

    @property
    def copies(self) -> Mapping[Any, int]:
        """How many blocks of the pool have each hash."""
        return self._copies

    def apply(self, events: Iterable[Any]) -> None:
        form = self._form
        for event in events:
            if isinstance(event, form.stored):
                # An index leaves out blocks whose hash covers later tokens.
                if getattr(event, "lookahead_token_ids", None) is None:
                    self._store(event)
            elif isinstance(event, form.removed):
                for one in event.block_hashes:
                    self._remove(one)
            elif isinstance(event, form.cleared):
                self._blocks.clear()
                self._sessions.clear()
                self._copies.clear()
                self._num_copies = 0
                self._children.clear()
        if len(self._blocks) - len(self._copies) > self._most:
            self._forget_holes()

    def _store(self, event: Any) -> None:  # noqa: ANN401 - an engine's
        parent = event.parent_block_hash
        kind = self._form.shared_of(event)
        blocks, copies, children = self._blocks, self._copies, self._children
        extra, session = getattr(event, "extra_keys", None), event.session_id
        if session is not None and len(session) > _LONGEST_SESSION:
            session = None
        try:
            all_tokens = array("I", event.token_ids).tobytes()
        except OverflowError:  # SGLang's ids in the place of images
            all_tokens = array("q", event.token_ids).tobytes()
        width = len(all_tokens) // max(len(event.block_hashes), 1)
        for at, one in enumerate(event.block_hashes):
            if one not in blocks:
                tokens = all_tokens[at * width : (at + 1) * width]
                blocks[one] = (parent, tokens, None if extra is None else extra[at], kind)
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
            copies[one] = copies.get(one, 0) + 1
            if session is None:
                self._sessions.pop(one, None)
            else:
                self._sessions[one] = session
            parent = one
        self._num_copies += len(event.block_hashes)

    def _remove(self, one: Any) -> None:  # noqa: ANN401 - a hash
        count = self._copies.get(one)
        if count is None:
            return
        self._num_copies -= 1
        # Of several copies, it is not known which one is left.
        self._sessions.pop(one, None)
        if count > 1:
            self._copies[one] = count - 1
            return
        del self._copies[one]
        # Holes that nothing continues any more go too.
        while one in self._blocks and one not in self._copies and one not in self._children:
            one = self._take_out(one)

    def _take_out(self, one: Any) -> Any:  # noqa: ANN401 - a hash
        """Forget a block; returns its parent's hash."""
        parent = self._blocks.pop(one)[0]
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
        return parent

    def _forget_holes(self) -> None:
        for one in [one for one in self._blocks if one not in self._copies]:
            self._take_out(one)

    def encoded(self, rank: int | None) -> bytearray:
        """One batch in the engine's form that leaves the same blocks, whatever there was before."""
        import msgspec  # noqa: PLC0415 - comes with the engine, whose events are its structs

        pack = msgspec.msgpack.Encoder().encode
        # [time, events, rank]; the number of events is written last.
        done = bytearray(b"\x93" + pack(time.time()) + b"\xdd\0\0\0\0")
        first, num_events, count = len(done), 1, 0
        done += pack(self._form.cleared())
        for event in self._events():
            done += pack(event)
            num_events += 1
            count += len(event.block_hashes)
            if count >= _AT_ONCE:
                time.sleep(_PAUSE)
                count = 0
        done[first - 4 : first] = num_events.to_bytes(4, "big")
        done += pack(rank)
        return done

    def _events(self) -> Iterator[Any]:
        run: list[Any] = []
        of: list[_Block] = []
        session_of, session = self._sessions.get, None
        for one, block in self._blocks.items():
            is_next = run and run[-1] == block[0] and len(run) < _AT_ONCE
            if not (is_next and of[-1][3] == block[3] and session_of(one) == session):
                if run:
                    yield self._stored(run, of, session)
                run, of, session = [], [], session_of(one)
            run.append(one)
            of.append(block)
        if run:
            yield self._stored(run, of, session)
        left = min(self._most, self._num_copies - len(self._copies))
        for one, count in self._copies.items() if left else ():
            for _ in range(min(count - 1, left)):
                left -= 1
                yield self._stored([one], [self._blocks[one]], session_of(one))
        if len(self._blocks) == len(self._copies):
            return
        form = self._form
        at = [form.shared.index(name) for name in form.place]
        holes: dict[tuple[Any, ...], list[Any]] = {}
        for one, block in self._blocks.items():
            if one not in self._copies:
                holes.setdefault(tuple([block[3][number] for number in at]), []).append(one)
        for place, hashes in holes.items():
            yield form.removed(block_hashes=hashes, **dict(zip(form.place, place, strict=True)))

    def _stored(self, hashes: list[Any], blocks: list[_Block], session: str | None) -> Any:  # noqa: ANN401 - an engine's
        """One event of consecutive blocks, which one conversation stored."""
        given = dict(zip(self._form.shared, blocks[0][3], strict=True), session_id=session)
        extra = [block[2] for block in blocks]
        if any(keys is not None for keys in extra):
            given["extra_keys"] = extra
        return self._form.stored(
            block_hashes=hashes,
            parent_block_hash=blocks[0][0],
            token_ids=[one for block in blocks for one in _ids(block[1], given["block_size"])],
            **given,
        )


def _ids(kept: bytes, count: int) -> array[int]:
    """So many token ids, of 32 bits or of 64."""
    return array("I" if len(kept) == 4 * count else "q", kept)


class SnapshotSource:
    """Answers who asks for a snapshot, in a thread of its own.

    A request is ``[b"", b"state"]`` or ``[b"", b"snapshot"]``, an answer ``[b"", header]``, for the
    second with the batch of `StreamBlocks.encoded` after it. ``header`` is JSON: ``version``,
    ``incarnation``, which is random and one engine's from start to end, and ``number``, that of the
    last batch that counts, -1 if there was none.

    Args:
        endpoint: Where.
        form: The engine's events.
        rank: The data-parallel rank that the engine's batches have.
        most: Blocks that the engine's pool has.
        where: What an operator reads in front of ``snapshot``.
        log: The engine's.

    Raises:
        SettingsError: The endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        form: EventForm,
        *,
        rank: int,
        most: int,
        where: str,
        log: logging.Logger,
    ) -> None:
        self.incarnation = secrets.token_hex(16)
        self.counts: Counter[str] = Counter()
        self._engine = form.engine
        self._rank = rank
        self._most = most
        self._log = log
        self._held = StreamBlocks(form, most)
        self._number = -1
        # What the engine took, and the thread has not applied.
        self._batches: deque[list[Any]] = deque()
        self._waiting: dict[bytes, None] = {}
        self._rests_until = 0.0
        self._has_failed = self._is_counted = False
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.SNDHWM, _MOST_UNREAD)
        self._router.set(zmq.RCVHWM, _MOST_WAITING)
        self._router.set(zmq.MAXMSGSIZE, _LONGEST_REQUEST)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            msg = f"{where}: snapshot: endpoint {endpoint!r}: {error}"
            raise SettingsError(msg) from error
        self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kvtrie-snapshots", daemon=True)
        self._thread.start()
        log.info("kvtrie: snapshots of the KV events at %s", self.endpoint)

    # --- the scheduler's thread --------------------------------------------------------------

    def hand_over(self, batch: list[Any]) -> bool:
        """Take over the events that the engine publishes next as one batch, if there are any.

        Returns:
            True in the first call after an error has ended it, else False: the caller counts it.
        """
        if self._has_failed:
            is_news, self._is_counted = not self._is_counted, True
            return is_news
        if batch:
            self._batches.append(batch)
        return False

    def fail(self, why: str) -> None:
        """Give no more snapshots."""
        if not self._has_failed:
            self._has_failed = True
            self._log.error("kvtrie: %s; no more snapshots are given", why)

    def shutdown(self) -> None:
        self._stop.set()
        self._thread.join()

    # --- the other thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stop.is_set() or self._has_failed):
                self._step()
        except Exception:  # noqa: BLE001 - the engine goes on, and it is counted
            self._has_failed = True
            self._log.exception("kvtrie: no more snapshots are given")
        finally:
            self._batches.clear()
            self._context.destroy(linger=0)

    def _step(self) -> None:
        asked = []
        if self._router.poll(_TICK):
            for _ in range(_MOST_WAITING):
                try:
                    asked.append(self._router.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
        # After the requests: who asks has seen nothing that is not among them.
        while self._batches:
            self._held.apply(self._batches.popleft())
            self._number += 1
        if self._held.num_copies > self._most:
            msg = f"{self._engine} published more blocks than its pool has"
            raise RuntimeError(msg)
        header = self._header() if asked else b""
        for frames in asked:
            self._take(frames, header)
        if self._waiting and time.monotonic() >= self._rests_until:
            self._answer()
        if asked:
            self._stop.wait(_BETWEEN)

    def _take(self, frames: list[bytes], header: bytes) -> None:
        if frames[1:] == [b"", b"state"]:
            self.counts["states"] += 1
            self._router.send_multipart([frames[0], b"", header])
        elif frames[1:] != [b"", b"snapshot"] or len(self._waiting) >= _MOST_WAITING:
            self.counts["refused"] += 1
        else:
            self._waiting[frames[0]] = None

    def _answer(self) -> None:
        """Make one snapshot for all who wait."""
        begun = time.monotonic()
        header, batch = self._header(), self._held.encoded(self._rank)
        for client in self._waiting:
            # Who has left gets nothing, and who does not read gets no more.
            self._router.send_multipart([client, b"", header, batch], copy=False)
        self.counts["made"] += 1
        self.counts["sent"] += len(self._waiting)
        self._waiting.clear()
        now = time.monotonic()
        self._rests_until = now + max(_LEAST_REST, _REST * (now - begun))

    def _header(self) -> bytes:
        said = {"version": _VERSION, "incarnation": self.incarnation, "number": self._number}
        return json.dumps(said).encode()
