"""The store itself: names runs, verifies every byte, keeps within its budget."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvtrie.store.budget import Budget, TenantLimits
from kvtrie.store.contexts import MAX_MARKS, PrefixMarks
from kvtrie.store.errors import BackendError, StoreRefused
from kvtrie.store.keys import CONTEXT_UNIT, VERSION, is_run_name, space_of
from kvtrie.store.runs import LONGEST, SpanRun, name_runs
from kvtrie.store.shape import HEADER_BYTES, SEAL_BYTES, check_ranges
from kvtrie.store.value import SpanHeader, context_at, read_header, read_range, write_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtrie._core import Namespace, ReusePolicy, Span, TokenSequence
    from kvtrie.store.backends.protocol import Backend
    from kvtrie.store.keys import StoreKey
    from kvtrie.store.shape import SpanRows, SpanShape

_DESCRIPTOR: Final = "kvtrie/store"
_DESCRIPTOR_BYTES: Final = 1024


class SpanStore:
    """KV of runs of tokens, outside the pool.

    A call that cannot reach the backend is a miss, or stores nothing, and is counted; none raises.
    Every byte that is returned was verified with the key. All methods may be called from several
    threads, and wait for the backend: see `SpanLoader` and `SpanWriter`.

    Args:
        backend: Where values are kept.
        key: The owner's secret.
        namespace: Model, KV type and RoPE of the store. Adapter and salt may differ by sequence.
        shape: Geometry of the KV.
        max_bytes: Bytes of all runs that this process knows of. The least recently used leaves.
        limits: What each tenant may keep.
        tenants: Other limits for some, by their salts.
        longest: Tokens of a run at most.
        clock: Seconds since 1970.

    Raises:
        StoreRefused: The store is of another model, KV type, RoPE, geometry, key, encryption or
            version, or does not answer; ``reason`` says which.
        ValueError: A limit is below 1.

    Example:
        >>> import kvtrie, numpy as np
        >>> from kvtrie.store import HostBackend, SpanRows, SpanShape, SpanStore, StoreKey
        >>> space = kvtrie.Namespace(model="m@1", salt="tenant-a")
        >>> shape = SpanShape(
        ...     num_layers=1, num_kv_heads=1, k_bytes=4, v_bytes=4, kv_dtype="float32"
        ... )
        >>> key = StoreKey(b"a secret of 16 bytes or more")
        >>> store = SpanStore(HostBackend(1 << 20), key, space, shape, max_bytes=1 << 20)
        >>> runs = store.runs(kvtrie.TokenSequence(range(40), space), borders=[20])
        >>> rows = SpanRows(np.ones((1, 20, 4), np.uint8), np.zeros((1, 20, 4), np.uint8))
        >>> store.put(runs[0], rows), store.exists(runs)
        (True, [True, False])
        >>> header, good = store.get_ranges(runs[0], [(3, 9)], [into := shape.empty(6)])
        >>> header.is_at(runs[0]), good, bool((into.k == 1).all())
        (True, [True], True)
    """

    def __init__(
        self,
        backend: Backend,
        key: StoreKey,
        namespace: Namespace,
        shape: SpanShape,
        *,
        max_bytes: int,
        limits: TenantLimits | None = None,
        tenants: Mapping[str, TenantLimits] | None = None,
        longest: int = LONGEST,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("longest", longest)):
            if value < 1:
                msg = f"SpanStore: {name} is {value}; it must be at least 1"
                raise ValueError(msg)
        self.shape = shape
        self._backend = backend
        self._key = key
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._limits = limits or TenantLimits()
        self._tenants = {key.tenant(salt).name: one for salt, one in (tenants or {}).items()}
        self._longest = longest
        self._clock = clock
        self._generation = b""
        self._budget = Budget()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Writers of one process, one at a time, so that what is evicted makes room for one.
        self._writing = threading.Lock()
        self._open()

    # --- names ---------------------------------------------------------------------------------

    def runs(
        self, seq: TokenSequence, borders: Iterable[int], spans: Sequence[Span] = ()
    ) -> list[SpanRun]:
        """Cut a sequence into runs and name them; the store is not asked.

        Args:
            seq: Tokens of a request, in a namespace of the store's model, KV type and RoPE.
            borders: Where messages and sections begin and end: `borders_of` a stream of tags.
            spans: The spans of the sequence, for ``SpanRun.kinds``.

        Raises:
            ValueError: The namespace is of another store, or a border is outside the sequence.
        """
        mine, other = self._namespace, seq.namespace
        for field in ("model", "kv_dtype", "rope"):
            if getattr(mine, field) != getattr(other, field):
                msg = (
                    f"SpanStore.runs: the sequence has {field} {getattr(other, field)!r}, "
                    f"the store {getattr(mine, field)!r}"
                )
                raise ValueError(msg)
        space = self._space(seq.namespace)
        return name_runs(self._key, space, seq, borders, spans, longest=self._longest)

    def renew(self, generation: bytes) -> None:
        """Find nothing that was stored before, and give what is stored from now on other names.

        For weights that were replaced while the process runs. What was stored before stays, counts,
        and leaves as it is not used. Runs that were named before keep their names. Processes, and
        stores that are opened later, share what they store only under equal generations.

        Args:
            generation: Bytes that were not given before, such as 16 random ones.
        """
        self._generation = generation

    def _space(self, namespace: Namespace) -> bytes:
        return space_of(namespace, self.shape) + self._generation

    def session_of(self, namespace: Namespace, session: str | None) -> str | None:
        """The digest by which headers name a conversation."""
        return None if session is None else self._key.tenant(namespace.salt).session(session)

    def mark_key(self, namespace: Namespace) -> bytes:
        """The key under which marks of prompts of a namespace are made."""
        return self._key.tenant(namespace.salt).mark_key(self._space(namespace))

    def marks(self, seq: TokenSequence, borders: Iterable[int]) -> PrefixMarks | None:
        """What `put` keeps with the runs of a sequence, so that a gate may judge them.

        Args:
            seq: The sequence.
            borders: Where its runs begin and end.

        Returns:
            None if it has items, or more than 16,384 marks: such runs move under no gate.
        """
        if seq.items:
            return None
        found = PrefixMarks.of(self.mark_key(seq.namespace), seq[:], borders)
        return found if len(found.marks) <= MAX_MARKS else None

    # --- reading -------------------------------------------------------------------------------

    def exists(self, runs: Sequence[SpanRun]) -> list[bool]:
        """Whether runs are stored, in one call of the backend. It promises nothing."""
        if not runs:
            return []
        with self._lock:
            before = [self._budget.entry(run.name) for run in runs]
        try:
            found = self._backend.exists([run.name for run in runs])
        except BackendError as error:
            self.count(f"exists_{error.reason}")
            return [False] * len(runs)
        for run, entry, is_there in zip(runs, before, found, strict=True):
            if entry is not None and not is_there:
                self._forget(run, entry)
        return found

    def get_ranges(
        self,
        run: SpanRun,
        ranges: Sequence[tuple[int, int]],
        into: Sequence[SpanRows],
    ) -> tuple[SpanHeader, list[bool]] | None:
        """Read ranges of a run's tokens, and verify them.

        Args:
            run: Which run.
            ranges: Ranges of its tokens, counted from its first; none reads the header alone.
            into: Rows for each range. Where a range is not good, their bytes mean nothing.

        Returns:
            What is stored, and whether each range is verified; None if the run is not there or its
            header is not verified. Both are counted by reason.

        Raises:
            ValueError: A range is empty or outside the run, or its rows do not fit.
        """
        check_ranges("SpanStore.get_ranges", ranges, run.num_tokens)
        if len(into) != len(ranges):
            msg = f"SpanStore.get_ranges: {len(ranges)} ranges, but rows for {len(into)}"
            raise ValueError(msg)
        for (start, end), rows in zip(ranges, into, strict=True):
            self.shape.check("SpanStore.get_ranges", rows, end - start)
        blocks = [self.shape.blocks_at(start, end) for start, end in ranges]
        wanted = [self.shape.bytes_at(*one, run.num_tokens) for one in blocks]
        with self._lock:
            before = self._budget.entry(run.name)
        try:
            found = self._backend.read(run.name, [(0, HEADER_BYTES), *wanted])
        except BackendError as error:
            self._missed(f"read_{error.reason}", run)
            return None
        if found is None:
            self.count("absent")
            self._forget(run, before)
            return None
        head = read_header(run.key, run.name, found[0])
        if isinstance(head, str):
            self._missed(head, run)
            return None
        header, sealer = head
        if header.num_tokens != run.num_tokens:
            self._missed("forged", run)
            return None
        if header.written < self._clock() - (self._limits_of(run).lifetime or float("inf")):
            self.delete(run)
            self._missed("expired", run)
            return None
        good = []
        for at, (low, high), raw, rows in zip(ranges, wanted, found[1:], into, strict=True):
            if len(raw) != high - low:
                self.count("truncated")
                good.append(False)
                continue
            good.append(read_range(self.shape, sealer, raw, at, rows))
            self.count("read" if good[-1] else "corrupt")
            if good[-1]:
                self.count("read_bytes", len(raw))
        if not all(good):
            self._doubt(run)
        with self._lock:
            self._budget.read(run.name, _exactness(header))
        return header, good

    def get_context(self, run: SpanRun, header: SpanHeader) -> PrefixMarks | None:
        """Read the marks of the prompt that a run was computed in, and verify them.

        Args:
            run: Which run.
            header: What `get_ranges` has returned for it.

        Returns:
            None if it has none or the run was written again since (counted as ``context``), or if
            they cannot be read or are not what was stored (``context_corrupt``).
        """
        if not header.context_bytes:
            self.count("context")
            return None
        at = context_at(self.shape, header)
        try:
            found = self._backend.read(run.name, [(0, HEADER_BYTES), at])
        except BackendError as error:
            self.count(f"read_{error.reason}")
            return None
        head = None if found is None else read_header(run.key, run.name, found[0])
        if isinstance(head, tuple) and head[0] != header:
            self.count("context")
            return None
        raw = None
        if found is not None and isinstance(head, tuple):
            raw = head[1].open(CONTEXT_UNIT, found[1]) if len(found[1]) >= SEAL_BYTES else None
        marks = None if raw is None else PrefixMarks.read(bytes(raw))
        if raw is None or marks is None or run.key.turn(bytes(raw)) != header.turn:
            self.count("context_corrupt")
            self._doubt(run)
            return None
        return marks

    # --- writing -------------------------------------------------------------------------------

    def put(
        self,
        run: SpanRun,
        slots: SpanRows,
        *,
        exact_until: int | None = None,
        hops: int | None = None,
        policy: ReusePolicy | None = None,
        session: str | None = None,
        marks: PrefixMarks | None = None,
    ) -> bool:
        """Store a run, unless what is stored is as exact.

        If so, it counts as used, unless it was read since it was offered last.

        Args:
            run: Which run.
            slots: Its rows, of the position and prefix that it says.
            exact_until: How many of its tokens, from the first, are exact; None for all.
            hops: Most hops of the others, 0 to 255: 0 if they were not moved, but computed after
                approximate KV.
            policy: The policy that the others were built under.
            session: The conversation, as `session_of` names it.
            marks: Those of the sequence that it is of, as `marks` makes them.

        Returns:
            Whether it is stored now by this call. Why not is counted.

        Raises:
            ValueError: The rows do not fit the run, ``exact_until`` is outside it, or ``hops`` is
                missing for others, or given where all are exact.
        """
        num_tokens = run.num_tokens
        self.shape.check("SpanStore.put", slots, num_tokens)
        exact = num_tokens if exact_until is None else exact_until
        if (
            not 0 <= exact <= num_tokens
            or (hops is None) != (exact == num_tokens)
            or not 0 <= (hops or 0) <= 255
        ):
            msg = (
                f"SpanStore.put: exact_until is {exact} and hops {hops} for a run of {num_tokens}; "
                "tokens that are not exact have 0 to 255 hops, and others None"
            )
            raise ValueError(msg)
        exactness = num_tokens - exact, hops or 0
        with self._writing:
            if self._is_as_exact(run, exactness):
                return self._left("known")
            known = self._budget.exactness(run.name)
            if known is None and self._is_there(run, exactness):
                # Its header was read for this offer, not for a prompt.
                with self._lock:
                    self._budget.offered(run.name)
                return self._left("known")
            written = int(self._clock())
            context = b"" if marks is None else marks.tobytes()
            header = SpanHeader(
                start=run.start,
                position=run.position,
                num_tokens=num_tokens,
                prefix=run.prefix,
                exact_until=exact,
                hops=hops or 0,
                policy=policy if exact < num_tokens else None,
                session=session,
                kinds=run.kinds,
                written=written,
                context_bytes=len(context),
                turn=run.key.turn(context) if context else None,
            )
            value = write_value(self.shape, run.key, run.name, header, slots, context)
            size = len(value)
            if not self._make_room(run, size):
                return False
            try:
                self._backend.put(run.name, value)
            except BackendError as error:
                # An older value may be there or not: its bytes count, until it is missed.
                self._doubt(run)
                return self._left(f"put_{error.reason}")
            with self._lock:
                self._budget.add(
                    run.name,
                    num_bytes=size,
                    written=written,
                    exactness=exactness,
                )
        self.count("stored")
        self.count("stored_bytes", size)
        return True

    def is_known(
        self, run: SpanRun, *, exact_until: int | None = None, hops: int | None = None
    ) -> bool:
        """Whether `put` with these labels would leave a run as it is, by what this process knows.

        If so, it is offered, and counts as used as by `put`. The backend is not asked.
        """
        exact = run.num_tokens if exact_until is None else exact_until
        return self._is_as_exact(run, (run.num_tokens - exact, hops or 0))

    def delete(self, run: SpanRun) -> None:
        """Delete a run, if it is stored."""
        self._delete(run.name)

    def sweep(self, most: int | None = None) -> int:
        """Delete the runs that have outlived their tenant's lifetime, and return how many.

        Writers call it in their thread once a minute, while they have nothing to write too; who
        has a store without a writer calls it himself. It deletes what this process knows of: what
        it has written, and what it found when it was opened. What another process has written again
        since stays as long as that says, if the backend knows when (`Backend.written`). It ends at
        the first run that the backend does not delete, which is tried again after all others.

        Args:
            most: Runs that are deleted at most; None for all.
        """
        if self._limits.lifetime is None and all(
            one.lifetime is None for one in self._tenants.values()
        ):
            return 0
        now = self._clock()
        ends = {
            tenant: int(now - one.lifetime) if one.lifetime else 0
            for tenant, one in self._tenants.items()
        }
        default = int(now - self._limits.lifetime) if self._limits.lifetime else 0
        with self._lock:
            old = list(islice(self._budget.older_than(ends, default), most))
        deleted = 0
        for name in old:
            try:
                written = self._backend.written(name)
            except BackendError as error:
                self.count(f"exists_{error.reason}")
                with self._lock:
                    self._budget.postpone(name)
                break
            with self._lock:
                if written is not None:
                    self._budget.rewritten(name, int(written))
                is_old = self._budget.is_old(name, ends, default)
            if is_old and not self._delete(name):
                break
            deleted += is_old
        if deleted:
            self.count("expired", deleted)
        return deleted

    # --- counts --------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the runs that this process knows of."""
        return self._budget.num_bytes

    @property
    def num_runs(self) -> int:
        """How many runs this process knows of."""
        return len(self._budget)

    def counts(self) -> dict[str, int]:
        """What has happened so far, by name; ``docs/store.md`` lists the names."""
        with self._lock:
            return dict(self._counts)

    def count(self, what: str, number: int = 1) -> None:
        """Count what a loader or a writer has met."""
        with self._lock:
            self._counts[what] += number

    def close(self) -> None:
        """End the backend's connection. May be repeated."""
        self._backend.close()

    # --- inside --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Read or write what the store says of itself, and count what is there."""
        mine = self._describe()
        try:
            found = self._backend.read(_DESCRIPTOR, [(0, _DESCRIPTOR_BYTES)])
            if found is None:
                self._backend.put(_DESCRIPTOR, bytearray(mine))
                found = self._backend.read(_DESCRIPTOR, [(0, _DESCRIPTOR_BYTES)])
            if found is None or bytes(found[0]) != mine:
                raise _refusal(b"" if found is None else bytes(found[0]), mine)
            now = self._clock()
            # Whatever else is there is not the store's to count or to delete.
            runs = [
                (now if one.written is None else min(one.written, now), one.name, one.num_bytes)
                for one in self._backend.values()
                if is_run_name(one.name)
            ]
        except BackendError as error:
            msg = f"SpanStore: the backend does not work: {error}"
            raise StoreRefused(msg, reason="unreachable") from error
        # When they were used is not known: those that were written last stay longest.
        for written, name, size in sorted(runs):
            # Another process's: how exact it is, is read when it is asked for.
            self._budget.add(name, num_bytes=max(1, size), written=int(written), exactness=None)

    def _describe(self) -> bytes:
        space = self._namespace
        fields: dict[str, Any] = {
            "version": VERSION,
            "encryption": self._key.encryption,
            "namespace": [space.model, space.kv_dtype, space.rope],
            "geometry": self.shape.fields(),
        }
        check = self._key.check(json.dumps(fields).encode())
        text = json.dumps({"format": "kvtrie.store", **fields, "check": check}).encode()
        if len(text) > _DESCRIPTOR_BYTES:
            limit = _DESCRIPTOR_BYTES
            msg = f"SpanStore: the names of the namespace take {len(text)} bytes of {limit}"
            raise ValueError(msg)
        return text.ljust(_DESCRIPTOR_BYTES)

    def _limits_of(self, run: SpanRun) -> TenantLimits:
        return self._tenants.get(run.tenant, self._limits)

    def _is_as_exact(self, run: SpanRun, exactness: tuple[int, int]) -> bool:
        """Whether this process knows a run to be as exact or more; then it was offered."""
        with self._lock:
            known = self._budget.exactness(run.name)
            if known is None or known > exactness:
                return False
            self._budget.offered(run.name)
        return True

    def _is_there(self, run: SpanRun, exactness: tuple[int, int]) -> bool:
        """Whether another process has stored the run, as exact or more."""
        if not self.exists([run])[0]:
            return False
        found = self.get_ranges(run, [], [])
        if found is None:
            return False
        header, _ = found
        return _exactness(header) <= exactness

    def _make_room(self, run: SpanRun, size: int) -> bool:
        """Evict until a run fits; false if it never does."""
        own = self._limits_of(run).max_bytes or self._max_bytes
        if size > min(own, self._max_bytes):
            return self._left("put_too_large")
        while True:
            with self._lock:
                name = None
                if self._budget.tenant_bytes(run.tenant) + size > own:
                    name = self._budget.leaving(run.tenant)
                elif self._budget.num_bytes + size > self._max_bytes:
                    name = self._budget.leaving(None)
            if name is None:
                return True
            if not self._delete(name):
                return self._left("put_no_room")
            self.count("evicted")

    def _delete(self, name: str) -> bool:
        """Whether a run is deleted now; if not, its bytes count on, and others leave before it."""
        try:
            self._backend.delete(name)
        except BackendError as error:
            self.count(f"delete_{error.reason}")
            with self._lock:
                self._budget.postpone(name)
            return False
        with self._lock:
            self._budget.remove(name)
        return True

    def _missed(self, why: str, run: SpanRun) -> None:
        self.count(why)
        if not why.startswith("read_"):
            self._doubt(run)

    def _forget(self, run: SpanRun, entry: object | None) -> None:
        """Forget a run that is not there, such as one that the backend or another process deleted.

        Unless it was stored since: then its entry is another one.
        """
        with self._lock:
            if entry is not None and self._budget.entry(run.name) is entry:
                self._budget.remove(run.name)

    def _doubt(self, run: SpanRun) -> None:
        """Let the next `put` of a run replace what cannot be verified."""
        with self._lock:
            self._budget.doubt(run.name)

    def _left(self, why: str) -> bool:
        self.count(why)
        return False


def _exactness(header: SpanHeader) -> tuple[int, int]:
    """Approximate tokens and hops; less is more exact."""
    return header.num_tokens - header.exact_until, header.hops


def _refusal(found: bytes, mine: bytes) -> StoreRefused:
    """Why a store that says this of itself cannot be used."""
    wanted = json.loads(mine)
    try:
        said = json.loads(found)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or said.get("format") != "kvtrie.store":
        msg = f"SpanStore: what is there is not a store of kvtrie: {found[:80]!r}"
        return StoreRefused(msg, reason="malformed")
    for field in ("version", "encryption", "namespace", "geometry"):
        if said.get(field) != wanted[field]:
            msg = f"SpanStore: the store has {field} {said.get(field)!r}, not {wanted[field]!r}"
            return StoreRefused(msg, reason=field)
    msg = "SpanStore: the store was made with another key"
    return StoreRefused(msg, reason="key")
