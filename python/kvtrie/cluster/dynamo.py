"""Which worker of a Dynamo deployment holds how much of a prompt, from its `RouterEvent`s as JSON.

The events have no tokens. Each block has two hashes of 64 bits: `block_hash`, the engine's name of
the block with all before it, and `tokens_hash`, XXH3 of the block's own token ids, whose seed is
made of the adapter and the cache namespace. So a `KvIndexer` gets the second in place of tokens,
as two of them, and a prompt is hashed in the same way. Names and types of the fields are those of
``lib/kv-router/src/protocols.rs`` in ai-dynamo/dynamo, the values those that ai-dynamo-runtime
1.6.1 computes.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvtrie._core import SHARED, EventError, KvIndexer, Namespace, StaleHandleError, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

# Of a block without an adapter and a cache namespace.
_SEED: Final = 1337
# Two of 32 bits are one hash.
_HALVES: Final = 2
_MEDIA: Final = {"device": "GPU", "host_pinned": "CPU_PINNED", "disk": "DISK"}
_FIRST_NUMBERS: Final = (0, 1)
_LARGEST: Final = (1 << 64) - 1


class DynamoWorker(NamedTuple):
    """A worker of Dynamo: each data-parallel rank is one.

    Attributes:
        worker_id: The instance's id.
        dp_rank: Its data-parallel rank.
    """

    worker_id: int
    dp_rank: int = 0


@dataclass(frozen=True)
class DynamoScores:
    """How much of a prompt each worker holds. All arrays are in the order of `workers`.

    Attributes:
        workers: The workers, in the order in which their first events came.
        exact: Tokens from position 0 in blocks that the worker holds, in any tier (uint32).
        tier: The slowest tier that one of them is loaded from: 0 device, 1 host, 2 disk, 3 anything
            else (uint8).
        uncertain: Whether events of the worker may be missing (bool).
    """

    workers: tuple[DynamoWorker, ...]
    exact: npt.NDArray[np.uint32]
    tier: npt.NDArray[np.uint8]
    uncertain: npt.NDArray[np.bool_]


@dataclass
class _Known:
    """What is known of a worker."""

    number: int  # in the index
    last: int | None = None  # the number of its last event
    is_complete: bool = False
    # Whether a dump has said what it holds, and not after which event.
    is_dumped: bool = False
    # Whether it has refused blocks that may be anywhere in the worker's cache.
    lacks: bool = False


class _RouterEvent(NamedTuple):
    """An event that has been read."""

    worker: DynamoWorker
    number: int
    kind: str  # as it is counted
    read: list[dict[str, Any]]  # what it is for an index
    num_blocks: int = 1


class DynamoIndexer:
    """Which of many workers holds how much of a prompt, from Dynamo's `RouterEvent`s.

    Workers are added by their events. All calls may be made from any thread. The extra ``dynamo``
    has what it needs.

    Args:
        block_size: Dynamo's `kv_block_size`, in tokens.
        key: 16 to 64 secret bytes, as for `KvIndexer`.
        namespace: The model that the events are of. Its salt must be `SHARED` and its adapter None:
            the hashes cover both, and a prompt says which it has.
        max_workers: Most workers at a time.
        max_blocks: Most blocks that one worker may add, and hold.
        max_parked: Most blocks of a worker whose parent is not known yet.
        max_event_bytes: Largest event.

    Attributes:
        counts: `stored` and `removed` blocks, `cleared`, `gaps` in the numbers of a worker,
            `resyncs`: numbers that went back, and events that were left out: `refused_domain`
            (of another owner than the worker), `refused_position` (blocks without a parent that are
            not at position 0) and `refused_type`.

    Raises:
        ImportError: msgpack or xxhash is missing.
        TypeError: An argument has the wrong type.
        ValueError: A number is outside its limits, or the namespace has an adapter or a salt.

    Example:
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> index = kvtrie.cluster.DynamoIndexer(4, b"a secret of yours", space)
        >>> index.apply(
        ...     '{"worker_id": 7, "event": {"event_id": 1, "data": {"stored": {"parent_hash": null,'
        ...     ' "blocks": [{"block_hash": 11, "tokens_hash": 14643705804678351452}]}}}}'
        ... )
        DynamoWorker(worker_id=7, dp_rank=0)
        >>> index.find_matches(kvtrie.TokenSequence([1, 2, 3, 4, 5], space)).exact
        array([4], dtype=uint32)
    """

    def __init__(
        self,
        block_size: int,
        key: bytes,
        namespace: Namespace,
        *,
        max_workers: int = 1024,
        max_blocks: int = 16_777_216,
        max_parked: int = 8192,
        max_event_bytes: int = 1 << 26,
    ) -> None:
        call = "DynamoIndexer"
        try:
            import msgpack  # noqa: PLC0415 - the extra is asked for when it is needed
            import xxhash  # noqa: PLC0415 - likewise
        except ModuleNotFoundError as error:
            msg = f"{call} needs {error.name}: pip install 'kvtrie[dynamo]'"
            raise ImportError(msg, name=error.name) from error
        self._pack = msgpack.packb
        self._hash = xxhash.xxh3_64_intdigest
        _check(call, "namespace", namespace, Namespace, "a Namespace")
        if namespace.adapter is not None or namespace.salt is not SHARED:
            msg = (
                f"{call}: namespace is {namespace!r}; it must have no adapter and the salt SHARED"
                " (a prompt's own namespace names its adapter and its salt)"
            )
            raise ValueError(msg)
        for name, value, least, most in (
            ("block_size", block_size, 1, 1 << 20),
            ("max_workers", max_workers, 1, 1 << 14),
            ("max_event_bytes", max_event_bytes, 1, 1 << 28),
        ):
            _check(call, name, value, int, "an int")
            if not least <= value <= most:
                msg = f"{call}: {name} is {value}; it must be in [{least}, {most}]"
                raise ValueError(msg)
        self.counts: Counter[str] = Counter()
        self._block_size = block_size
        self._namespace = namespace
        self._max_workers = max_workers
        self._max_event_bytes = max_event_bytes
        # An event in JSON is longer than what it becomes: a block has 60 bytes there, and 30 here.
        self._index = KvIndexer(
            _HALVES,
            key,
            moved_runs=False,
            max_workers=max_workers,
            max_blocks=max_blocks,
            max_parked=max_parked,
            max_batch_bytes=max(1024, 2 * max_event_bytes),
        )
        self._known: dict[DynamoWorker, _Known] = {}
        self._lock = threading.Lock()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def workers(self) -> tuple[DynamoWorker, ...]:
        """The workers, in the order in which their first events came."""
        return tuple(self._known)

    def apply(self, event: bytes | str) -> DynamoWorker:
        """Apply one `RouterEvent`.

        The numbers of a worker's events begin at 1 and have no gap. After a gap the worker is
        uncertain until it clears its cache, and for good if it has a slower tier than the device. A
        number that goes back forgets what the worker held as well.

        Args:
            event: The event as JSON.

        Returns:
            The worker that it is of.

        Raises:
            EventError: It cannot be read, or is of one worker too many. Nothing is applied.
            TypeError: It is neither bytes nor a str.
        """
        read = self._read(event)
        with self._lock:
            known = self._of(read.worker)
            if known.last is None and not known.is_dumped:
                known.is_complete = read.number in _FIRST_NUMBERS
            # What a dump has was left by one event at least.
            elif read.number <= (_FIRST_NUMBERS[-1] if known.last is None else known.last):
                self._forget(known)
                self.counts["resyncs"] += 1
            elif known.last is not None and read.number > known.last + 1:
                known.is_complete = False
                self.counts["gaps"] += 1
            known.last = read.number
            self._apply(known, read)
        return read.worker

    def restore(self, events: Iterable[bytes | str]) -> tuple[DynamoWorker, ...]:
        """Take the events of a dump of Dynamo's tree, in place of what their workers held.

        A dump does not say which event was its last. So the workers are uncertain until they clear
        their caches. An event that is a worker's first goes back, and forgets what the dump said.

        Args:
            events: The events as JSON. Their numbers are those of the dump and are not looked at.

        Returns:
            The workers that the dump has.

        Raises:
            EventError: One cannot be read, or is of one worker too many. Nothing is applied.
            TypeError: One is neither bytes nor a str.
        """
        read = [self._read(event) for event in events]
        named = dict.fromkeys(one.worker for one in read)
        with self._lock:
            added = len(named.keys() - self._known.keys())
            if len(self._known) + added > self._max_workers:
                raise self._too_many(len(self._known) + added)
            for worker in named:
                known = self._of(worker)
                self._forget(known)
                known.is_dumped = True
            for one in read:
                self._apply(self._known[one.worker], one)
        return tuple(named)

    def remove_worker(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Remove a worker. The next search does not know it.

        Args:
            worker_id: The instance's id.
            dp_rank: One of its data-parallel ranks, or None for all.

        Raises:
            StaleHandleError: No event has named it.
        """
        with self._lock:
            gone = [
                worker
                for worker in self._known
                if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank)
            ]
            if not gone:
                msg = f"DynamoIndexer.remove_worker: there is no worker {worker_id}, rank {dp_rank}"
                raise StaleHandleError(msg)
            for worker in gone:
                self._index.remove_worker(self._known.pop(worker).number)

    def find_matches(self, seq: TokenSequence, *, keep_last: int = 0) -> DynamoScores:
        """Find how much of a prompt each worker holds, in whole blocks.

        It ends before the prompt's first item. Runs elsewhere in the cache are not looked for.

        Args:
            seq: The prompt. The adapter of its namespace is Dynamo's LoRA name, its salt Dynamo's
                cache namespace; with `SHARED` there is none.
            keep_last: Tokens at the end that do not count: an engine computes the last one.

        Raises:
            TypeError: `seq` is not a `TokenSequence`, or `keep_last` not an int.
            ValueError: `keep_last` is negative.
        """
        call = "DynamoIndexer.find_matches"
        _check(call, "seq", seq, TokenSequence, "a TokenSequence")
        _check(call, "keep_last", keep_last, int, "an int")
        if keep_last < 0:
            msg = f"{call}: keep_last is {keep_last}; it must be 0 or more"
            raise ValueError(msg)
        items = seq.items
        end = min(len(seq) - keep_last, items[0].start if items else len(seq))
        space = seq.namespace
        halves = TokenSequence(
            self._halves(seq[: max(0, end)], space), space.replace(adapter=None, salt=SHARED)
        )
        with self._lock:
            found = self._index.find_matches(halves)
            workers = tuple(self._known)
        return DynamoScores(
            workers=workers,
            exact=found.exact // np.uint32(_HALVES) * np.uint32(self._block_size),
            tier=found.tier,
            uncertain=found.uncertain,
        )

    def check(self) -> None:
        """Check every invariant of the index, for tests.

        Raises:
            KvTrieError: One is broken.
        """
        self._index.check()

    def _halves(self, tokens: npt.NDArray[np.uint32], space: Namespace) -> npt.NDArray[np.uint32]:
        """The hashes of whole blocks, two numbers each."""
        seed = _SEED
        if space.adapter is not None:
            seed += self._hash(space.adapter.encode(), 0)
        if isinstance(space.salt, str):
            seed += self._hash(space.salt.encode(), 1)
        seed &= _LARGEST
        size = 4 * self._block_size
        raw = tokens.astype("<u4").tobytes()
        hashes = [
            self._hash(raw[at : at + size], seed) for at in range(0, len(raw) - size + 1, size)
        ]
        return np.array(hashes, dtype="<u8").view("<u4").astype(np.uint32)

    def _read(self, event: bytes | str) -> _RouterEvent:
        call = "DynamoIndexer"
        _check(call, "event", event, (bytes, str), "bytes or a str")
        if len(event) > self._max_event_bytes:
            msg = f"{call}: the event has {len(event)} bytes; the limit is {self._max_event_bytes}"
            raise _refusal(msg, "limit")
        try:
            document = json.loads(event)
        except (ValueError, RecursionError) as error:
            msg = f"{call}: the event is not JSON: {error}"
            raise _refusal(msg, "malformed") from error
        fields = _object(document, "the event")
        inner = _object(fields.get("event"), "event")
        rank = inner.get("dp_rank", 0)
        worker = DynamoWorker(
            _uint(fields.get("worker_id"), "worker_id"), _uint(rank, "dp_rank", (1 << 32) - 1)
        )
        number = _uint(inner.get("event_id"), "event_id")
        if fields.get("residency_domain", "worker") != "worker":
            return _RouterEvent(worker, number, "refused_domain", [])
        medium = _medium(fields.get("storage_tier", "device"))
        return _RouterEvent(worker, number, *_mutation(inner.get("data"), medium))

    def _of(self, worker: DynamoWorker) -> _Known:
        known = self._known.get(worker)
        if known is None:
            if len(self._known) >= self._max_workers:
                raise self._too_many(len(self._known) + 1)
            name = f"{worker.worker_id}/{worker.dp_rank}"
            known = _Known(self._index.add_worker(name, self._namespace))
            self._index.set_uncertain(known.number, True)
            self._known[worker] = known
        return known

    def _too_many(self, count: int) -> EventError:
        return _refusal(
            f"DynamoIndexer: {count} workers; the limit is {self._max_workers}", "limit"
        )

    def _forget(self, known: _Known) -> None:
        self._index.clear_worker(known.number)
        known.is_complete = known.lacks = False

    def _apply(self, known: _Known, event: _RouterEvent) -> None:
        self.counts[event.kind] += event.num_blocks
        # What another owner holds is not the worker's.
        known.lacks |= event.kind in ("refused_position", "refused_type")
        if event.read:
            self._index.apply(known.number, self._pack([0.0, event.read]))
        if event.kind == "cleared":
            has_slower = self._index.worker_stats(known.number)["slower_tiers"]
            known.is_complete = known.is_complete or not has_slower
            known.lacks = False
        self._index.set_uncertain(known.number, known.lacks or not known.is_complete)


def _mutation(data: object, medium: str) -> tuple[str, list[dict[str, Any]], int]:
    """The last three fields of an event.

    A repeated `stored` adds no copy: Dynamo's publishers pass each one on, and `removed` once, when
    the last copy is gone. So what is stored is removed before.
    """
    if data == "cleared":
        return "cleared", [{"type": "AllBlocksCleared"}], 1
    fields = _object(data, "data")
    if len(fields) != 1:
        msg = f"DynamoIndexer: data has {len(fields)} entries, not one"
        raise _refusal(msg, "malformed")
    kind, content = next(iter(fields.items()))
    if kind == "removed":
        hashes = _hashes(_object(content, "removed").get("block_hashes"), "block_hashes")
        gone = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        return "removed", [gone], len(hashes)
    if kind != "stored":
        return "refused_type", [], 1
    stored = _object(content, "stored")
    parent = stored.get("parent_hash")
    if parent is not None:
        parent = _uint(parent, "parent_hash")
    elif _uint(stored.get("start_position") or 0, "start_position"):
        return "refused_position", [], 1
    blocks = [_object(block, "a block") for block in _list(stored.get("blocks"), "blocks")]
    hashes = _hashes([block.get("block_hash") for block in blocks], "block_hash")
    contents = _hashes([block.get("tokens_hash") for block in blocks], "tokens_hash")
    tokens = np.array(contents, dtype="<u8").view("<u4").tolist()
    before = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    after = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": _HALVES,
        "medium": medium,
    }
    return "stored", [before, after], len(hashes)


def _medium(tier: object) -> str:
    if not isinstance(tier, str):
        msg = f"DynamoIndexer: storage_tier is {tier!r}, not a str"
        raise _refusal(msg, "malformed")
    return _MEDIA.get(tier, "EXTERNAL")


def _refusal(message: str, reason: str) -> EventError:
    error = EventError(message)
    error.reason = reason
    return error


def _check(call: str, name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        msg = f"{call}: {name} is {_short(value)}, not {words}"
        raise TypeError(msg)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        msg = f"DynamoIndexer: {name} is {_short(value)}, not an object"
        raise _refusal(msg, "malformed")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        msg = f"DynamoIndexer: {name} is {_short(value)}, not an array"
        raise _refusal(msg, "malformed")
    return value


def _hashes(value: object, name: str) -> list[int]:
    return [_uint(one, name) for one in _list(value, name)]


def _uint(value: object, name: str, most: int = _LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        msg = f"DynamoIndexer: {name} is {_short(value)}; it must be an integer in [0, {most}]"
        raise _refusal(msg, "malformed")
    return value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
