"""The source of snapshots: what all published events together say, for subscribers that lack some.

vLLM's pool has hashes without tokens, and vLLM numbers its batches in another thread. So a snapshot
is not read off the pool. `StreamBlocks` applies the very batches that vLLM publishes, in their
order, and the number of a batch is how many came before it: it is what a subscriber that missed
nothing holds after that batch, whenever and in whichever thread it is read.

The scheduler only hands over each batch (`Snapshots.published`). A thread applies them and answers.
It pauses every `_AT_ONCE` blocks of a snapshot, and rests nine times as long as each one took.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from array import array
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm._settings import SNAPSHOTS, WHERE
from kvtrie.integrations.vllm._vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ZmqEventPublisher,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool

    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")

_VERSION: Final = 1
# A request waits no longer than this for a call of `close`, and a batch to be applied, in ms.
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
# Answers that one subscriber may leave unread.
_MOST_UNREAD: Final = 2

_Kind = tuple[int, int | None, str | None, str | None, int | None]
"""Block size, number and name of the adapter, medium and group of an event."""
_Block = tuple[Any, bytes, tuple[Any, ...] | None, _Kind]
"""Hash of the parent, token ids, extra keys, and what the event had once."""


class StreamBlocks:
    """The blocks that a stream of events leaves, as a subscriber has them.

    A removed block stays for those that continue it: a hole. There are at most ``most``;
    beyond, all are forgotten, and blocks after them have unknown parents until these come again.
    A snapshot has at most ``most`` holes, and repeats blocks at most ``most`` times.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Tuples of what the garbage collector does not follow.
        self._blocks: dict[Any, _Block] = {}
        self._copies: dict[Any, int] = {}
        self._children: dict[Any, int] = {}

    def __len__(self) -> int:
        """The number of blocks, holes among them."""
        return len(self._blocks)

    @property
    def copies(self) -> Mapping[Any, int]:
        """How many blocks of the pool have each hash."""
        return self._copies

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                # An index leaves out blocks whose hash covers later tokens.
                if getattr(event, "lookahead_token_ids", None) is None:
                    self._store(event)
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    self._remove(one)
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                self._copies.clear()
                self._children.clear()
        if len(self._blocks) - len(self._copies) > self._most:
            self._forget_holes()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        kind = (event.block_size, event.lora_id, event.lora_name, event.medium, event.group_idx)
        blocks, copies, children = self._blocks, self._copies, self._children
        extra, all_tokens = event.extra_keys, array("I", event.token_ids).tobytes()
        width = len(all_tokens) // max(len(event.block_hashes), 1)
        for at, one in enumerate(event.block_hashes):
            if one not in blocks:
                tokens = all_tokens[at * width : (at + 1) * width]
                blocks[one] = (parent, tokens, None if extra is None else extra[at], kind)
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
            copies[one] = copies.get(one, 0) + 1
            parent = one

    def _remove(self, one: Any) -> None:  # noqa: ANN401 - a hash
        count = self._copies.get(one)
        if count is None:
            return
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
        """One batch in vLLM's form that leaves the same blocks, whatever there was before."""
        pack = msgspec.msgpack.Encoder().encode
        # [time, events, rank]; the number of events is written last.
        done = bytearray(b"\x93" + pack(time.time()) + b"\xdd\0\0\0\0")
        first, num_events, count = len(done), 1, 0
        done += pack(AllBlocksCleared())
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

    def _events(self) -> Iterator[BlockStored | BlockRemoved]:
        run: list[Any] = []
        of: list[_Block] = []
        for one, block in self._blocks.items():
            parent, kind = block[0], block[3]
            if run and (run[-1] != parent or of[-1][3] != kind or len(run) == _AT_ONCE):
                yield _stored(run, of)
                run, of = [], []
            run.append(one)
            of.append(block)
        if run:
            yield _stored(run, of)
        left = min(self._most, sum(self._copies.values()) - len(self._copies))
        for one, count in self._copies.items() if left else ():
            for _ in range(min(count - 1, left)):
                left -= 1
                yield _stored([one], [self._blocks[one]])
        if len(self._blocks) == len(self._copies):
            return
        holes: dict[tuple[str | None, int | None], list[Any]] = {}
        for one, block in self._blocks.items():
            if one not in self._copies:
                holes.setdefault(block[3][3:], []).append(one)
        for (medium, group), hashes in holes.items():
            yield BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def _stored(hashes: list[Any], blocks: list[_Block]) -> BlockStored:
    """One event of consecutive blocks."""
    size, lora_id, lora_name, medium, group = blocks[0][3]
    tokens = array("I", b"".join(block[1] for block in blocks))
    extra = [block[2] for block in blocks]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=blocks[0][0],
        token_ids=tokens.tolist(),
        block_size=size,
        lora_id=lora_id,
        medium=medium,
        lora_name=lora_name,
        extra_keys=None if all(keys is None for keys in extra) else extra,
        group_idx=group,
    )


class Snapshots:
    """Answers who asks for a snapshot, in a thread of its own.

    A request is ``[b"", b"state"]`` or ``[b"", b"snapshot"]``, an answer ``[b"", header]``, for the
    second with the batch of `StreamBlocks.encoded` after it. ``header`` is JSON: ``version``,
    ``incarnation``, which is random and one engine's from start to end, and ``number``, that of the
    last batch that counts, -1 if there was none.

    Args:
        endpoint: Where.
        rank: The data-parallel rank that vLLM's batches have.
        pool: vLLM's pool.
        counts: Where an error is counted.

    Raises:
        SettingsError: The endpoint cannot be used.
    """

    def __init__(self, endpoint: str, rank: int, pool: BlockPool, counts: Counts) -> None:
        self.incarnation = secrets.token_hex(16)
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._pool = pool
        self._errors = counts
        self._held = StreamBlocks(pool.num_gpu_blocks)
        self._number = -1
        # What vLLM takes next, and what it took and the thread has not applied.
        self._next: list[Any] | None = None
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
            msg = f"{WHERE}: snapshot: endpoint {endpoint!r}: {error}"
            raise SettingsError(msg) from error
        self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kvtrie-snapshots", daemon=True)
        self._thread.start()
        _LOG.info("kvtrie: snapshots of the KV events at %s", self.endpoint)

    # --- the scheduler's thread --------------------------------------------------------------

    def look(self) -> None:
        """Note the events that wait in the pool, just before vLLM takes them."""
        self._next = self._pool.kv_event_queue

    def published(self) -> None:
        """Take over the batch that vLLM has just taken, and publishes next if it is not empty."""
        taken, self._next = self._next, None
        if self._has_failed:
            if not self._is_counted:
                self._is_counted = True
                self._errors.add("errors")
        elif taken is None or taken is self._pool.kv_event_queue:
            self._has_failed = True
            _LOG.error("kvtrie: vLLM took KV events unseen; no more snapshots are given")
        elif taken:
            self._batches.append(taken)

    def shutdown(self) -> None:
        self._stop.set()
        self._thread.join()

    # --- the other thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stop.is_set() or self._has_failed):
                self._step()
        except Exception:
            self._has_failed = True
            _LOG.exception("kvtrie: no more snapshots are given")
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
        if sum(self._held.copies.values()) > self._pool.num_gpu_blocks:
            msg = "vLLM published more blocks than its pool has"
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


def snapshots(
    given: Mapping[str, Any] | None,
    others: Mapping[str, Any] | None,
    vllm_config: VllmConfig,
    pool: BlockPool,
    counts: Counts,
) -> Snapshots | None:
    """The source of snapshots; None without the setting ``snapshot``.

    Args:
        given: The setting.
        others: The setting ``events``.
        vllm_config: vLLM's configuration.
        pool: vLLM's pool.
        counts: Where an error is counted.

    Raises:
        SettingsError: vLLM publishes no events over ZeroMQ, or the endpoint cannot be used.
    """
    if given is None:
        return None
    theirs = vllm_config.kv_events_config
    if theirs is None or not theirs.enable_kv_cache_events or theirs.publisher != "zmq":
        msg = f"{WHERE}: snapshot needs vLLM's events: start it with --kv-events-config "
        msg += """'{"enable_kv_cache_events": true, "publisher": "zmq"}', or remove the setting"""
        raise SettingsError(msg)
    endpoint: str = given.get("endpoint", SNAPSHOTS)
    taken = [theirs.endpoint, theirs.replay_endpoint]
    taken += [(others or {}).get(name) for name in ("endpoint", "replay_endpoint")]
    if endpoint in taken:
        msg = f"{WHERE}: snapshot: endpoint {endpoint!r} is another one's too: choose another"
        raise SettingsError(msg)
    rank = vllm_config.parallel_config.data_parallel_index
    try:
        offset = ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
    except ValueError as error:
        msg = f"{WHERE}: snapshot: endpoint {endpoint!r}: {error}"
        raise SettingsError(msg) from error
    return Snapshots(offset, rank, pool, counts)
