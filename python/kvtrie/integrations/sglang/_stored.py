"""The store next to SGLang's pool: what finished requests leave there, and what prompts find.

It is for prompts whose KV the pool has lost, or another process has computed. When a request ends,
a thread copies what later prompts may have out of its pages, and writes it to the store. A prompt
that the pool does not cover is looked up once, in threads, and waits for that as a request waits
for the prefetch of SGLang's own HiCache: others are admitted meanwhile, and it holds no page. What
has arrived, and continues the exact match without a gap at its own positions, is promised to
SGLang, and written into pages of the request when it is admitted. With a gate, moved runs are
loaded too; they are laid over the plan of the pool (`kvtrie.integrations.sglang._moving`).

What it promises: a page that was loaded as exact has the verified bytes of KV that was computed
exactly, at the same positions after the same tokens, by the same model and in the same namespace.
So it is in the index as exact, like what the request computes, once a step has read it. Moved runs
are verified too, their keys are rotated, and they are approximate, with a hop more than in the
store; what is computed after them is approximate too. Whatever is late, missing or corrupt is
computed. Nothing here waits for the store on the scheduler's path, but for the copy of at most 256
tokens out of pages that are about to be overwritten.

What it costs on that path: for a prompt that is looked up, a copy of its tokens and the step in
which it waits; for one that is loaded, the copies into its pages, one for each moved run, whose
keys are rotated up to 2,048 tokens at a time; in each round in which it then waits for room, the
spans of at most 1,024 runs laid over its plan; for a request that ends, a set of its pages and a
copy of the tokens in its last page if that is not full. On a GPU the copies into its pages wait for
the step that is under way.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from kvtrie._core import EXACT_ONLY, SHARED, TokenSequence
from kvtrie.integrations._filled_plan import APPROXIMATE, common, inside
from kvtrie.integrations._sections import read_sections
from kvtrie.integrations._store_settings import HOST, MAX_WAITING
from kvtrie.integrations._turns import (
    MOST_RUNS,
    StorePrompt,
    TurnToWrite,
    TurnWriter,
    borders_of,
    sought_runs,
)
from kvtrie.integrations.sglang._ids import only_text
from kvtrie.store import Estimate, SpanRows
from kvtrie.store.placing import rows_from
from kvtrie.store.runs import Gone, gone_of, pieces
from kvtrie.store.threads import Shares
from kvtrie.tags import TurnPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req

    from kvtrie._core import Namespace, ReusePolicy
    from kvtrie.integrations._filled_plan import FilledPlan, Range
    from kvtrie.integrations._store_settings import StoreSettings
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.store import PlacedSpan, PromptContexts, SpanLoad, SpanStore, TakenSpans
    from kvtrie.tags import Stream, Tagger

_LOG: Final = logging.getLogger("sglang.kvtrie")
# Seconds that a scheduler with nothing else to do waits for a load: else it would run without
# pause, and keep the threads from running.
_PAUSE: Final = 0.002
# Fewer tokens in a step say little of how fast a prompt is computed.
_LEAST_PREFILL: Final = 64
_TURN: Final = TurnPolicy()

_OPEN: Final[weakref.WeakSet[PoolStore]] = weakref.WeakSet()


class Wanted(NamedTuple):
    """What of a prompt is looked up besides exact runs.

    Attributes:
        gaps: Its tokens that the pool lacks, ascending.
        policy: What may be used of moved runs.
        session: The id of its conversation.
        moved_end: Where its last message begins, which no moved run supplies.
        goes_on: Whether more than what continues the beginning of the first gap is of use.
        judges: Whether moved runs are judged by what they were computed after.
    """

    gaps: tuple[Range, ...]
    policy: ReusePolicy
    session: str | None
    moved_end: int | None
    goes_on: bool
    judges: bool


class FoundRuns(NamedTuple):
    """What was loaded for a prompt, without the rows.

    Attributes:
        spans: Its tokens, ascending.
        contexts: What moved spans are judged by.
        policy: What they were looked up under.
    """

    spans: tuple[PlacedSpan, ...]
    contexts: PromptContexts | None
    policy: ReusePolicy


class _Lookup:
    """A request that was looked up."""

    def __init__(self, rid: str, tenant: str | None) -> None:
        self.rid = rid
        self.tenant = tenant
        self.since = time.monotonic()
        self.load: SpanLoad | None = None
        self.taken: TakenSpans | None = None
        """What has arrived, until it is in pages."""
        self.arrived: FoundRuns | None = None
        """The same without the rows; None if there is none, or none of it may move."""
        self.policy: ReusePolicy = EXACT_ONLY
        self.repairs = False
        self.waits = True

    def cancel(self) -> None:
        self.taken = self.arrived = None
        if self.load is not None:
            self.load.cancel()


class PoolStore:
    """Looks prompts up, loads what was found, and writes what finished requests leave.

    Args:
        store: The store.
        settings: Its settings.
        space: Its namespace.
        pool: SGLang's K and V, a slot a block.
        for_reading: The same tensors, for another thread.
        page_size: Tokens of a page.
        stream: SGLang's forward stream; None where steps run on the caller's stream.
        tagger: The model's chat format; None: prompts are cut by length alone, and all is kept.
    """

    def __init__(
        self,
        store: SpanStore,
        settings: StoreSettings,
        space: Namespace,
        pool: KVPool,
        for_reading: KVPool,
        *,
        page_size: int,
        stream: Any = None,  # noqa: ANN401 - of a device's module
        tagger: Tagger | None = None,
    ) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        """Requests and tokens; what the store itself counts is in ``store.counts()``."""
        self.tell: Callable[[str, str | None, int], None] | None = None
        """Takes news of counts: a name, the event for ``store``, and by how much."""
        self._settings = settings
        self._space = space
        self._pool = pool
        self._page_size = page_size
        self._stream = stream
        self._tagger = tagger
        self._estimate = Estimate(prefill_tokens_per_s=settings.prefill_tokens_per_s)
        self._places = Shares(MAX_WAITING)
        self._sought: weakref.WeakKeyDictionary[Req, _Lookup] = weakref.WeakKeyDictionary()
        # Of requests that are gone without a word.
        self._lost: deque[_Lookup] = deque()
        self._is_stopped = False
        self._last = 0.0
        self._arrival = threading.Event()
        self._paused: Callable[[], object] | None = None
        self._told: Counter[tuple[str, str | None]] = Counter()
        self._telling = threading.Lock()
        self._loader = settings.loader(store, self._estimate, pool.device)
        self._turns = TurnWriter(
            store,
            self._sequence,
            max(1, settings.turns),
            _LOG,
            block_size=page_size,
            ended=self.tell_news,
        )
        self._turns.pool = for_reading
        _OPEN.add(self)

    # --- loading -------------------------------------------------------------------------------

    @property
    def is_in_host(self) -> bool:
        """Whether the store is memory of this process."""
        return self._settings.backend == HOST

    def arrived(self, request: Req) -> FoundRuns | None:
        """What has arrived for a request that may use moved runs; None: nothing, or not yet."""
        while self._lost:
            self._drop(self._lost.popleft())
        found = self._sought.get(request)
        if found is None:
            return None
        if found.waits and found.load is not None and found.load.is_done:
            self._take(found)
        return found.arrived

    def seek(
        self, request: Req, seq: TokenSequence, known: int, covered: int, wanted: Wanted | None
    ) -> None:
        """Look a request up, once, if enough of it is missing.

        Args:
            request: The request.
            seq: The whole pages of its prompt.
            known: Tokens of the exact match.
            covered: Tokens after it that are reused in any case.
            wanted: What it lacks; None: exact runs alone, from the exact match on.
        """
        if request in self._sought:
            return
        missing = len(seq) - known - covered
        if wanted is None:
            wanted = Wanted(
                ((known, len(seq)),), EXACT_ONLY, None, None, goes_on=False, judges=False
            )
        else:
            missing = sum(end - start for start, end in wanted.gaps)
        if missing >= max(1, self._settings.min_tokens) and self._may_use(request):
            self._seek(request, seq, wanted)

    def repairs(self, request: Req) -> None:
        """Count, once, that a request that was looked up can use no moved run of the store."""
        found = self._sought.get(request)
        if found is not None and not found.repairs:
            found.repairs = True
            self._count("store_repair")
            self.tell_news()

    def promised(self, request: Req, seq: TokenSequence, known: int) -> int:
        """Tokens in whole pages that have arrived and continue an exact match as exact.

        Args:
            request: The request.
            seq: The whole pages of its prompt.
            known: Tokens of the exact match.
        """
        found = self._sought.get(request)
        if found is None or found.taken is None:
            return 0
        at = known
        for span in found.taken.spans:
            if not span.is_exact or span.start > at:
                break
            at = max(at, span.end)
        return max(0, min(at, len(seq)) // self._page_size * self._page_size - known)

    def waits(self, request: Req, round_: object, *, is_idle: bool) -> bool:
        """Whether a request waits for the store, before it is admitted. It does not for long.

        Args:
            request: The request.
            round_: The scheduler's round: an object of its own in each.
            is_idle: Whether the scheduler has nothing else to do.
        """
        found = self._sought.get(request)
        if found is None or not found.waits:
            return False
        if time.monotonic() - found.since > self._settings.wait:
            self._count("store_late")
            self._drop(found)
            self.tell_news()
            return False
        if is_idle and (self._paused is None or self._paused() is not round_):
            self._paused = weakref.ref(round_)
            self._arrival.wait(_PAUSE)
            self._arrival.clear()
        return True

    def load(self, request: Req, own: torch.Tensor, known: int) -> None:
        """Write what was promised into slots of the request, on the stream that reads them.

        Args:
            request: The request.
            own: Its slots after the exact match.
            known: Tokens of the exact match.

        Raises:
            RuntimeError: Not all of it is there.
        """
        found = self._sought.get(request)
        taken = None if found is None else found.taken
        count, written = len(own), 0
        if taken is not None:
            table = own.numpy(force=True)
            with self._on_stream():
                written = taken.write(self._pool, table, [(known, known + count)], first=known)
        if written != count:
            msg = f"{written} of {count} tokens from {known} on are loaded"
            raise RuntimeError(msg)
        self._count("store_tokens_exact", count)
        self.store.count("placed_exact", count)

    def load_plan(self, request: Req, plan: FilledPlan, own: torch.Tensor, known: int) -> int:
        """Write what a plan has from the store into slots of the request, rotated.

        Args:
            request: The request.
            plan: The plan, which may reach further than the slots.
            own: Its slots after the exact match.
            known: Tokens of the exact match.

        Returns:
            How many tokens were written.

        Raises:
            RuntimeError: Not all of it is there.
        """
        ranges = inside(plan.stored, (known, known + len(own)))
        if not ranges:
            return 0
        found = self._sought.get(request)
        taken = None if found is None else found.taken
        count, written = sum(end - start for start, end in ranges), 0
        if taken is not None:
            with self._on_stream():
                written = taken.write(self._pool, own.numpy(force=True), ranges, first=known)
        if written != count:
            msg = f"{written} of {count} tokens of {len(ranges)} ranges are loaded"
            raise RuntimeError(msg)
        approximate = [(row[0], row[1]) for row in plan.segments.tolist() if row[4] == APPROXIMATE]
        moved = sum(end - start for start, end, _ in common(ranges, approximate))
        for name, label, number in (
            ("store_tokens_exact", "placed_exact", count - moved),
            ("store_tokens_moved", "placed_approximate", moved),
        ):
            self._count(name, number)
            self.store.count(label, number)
        return count

    def admitted(self, request: Req) -> None:
        """Nothing more is loaded for a request."""
        found = self._sought.get(request)
        if found is not None:
            self._drop(found)

    def aborted(self, rid: str) -> None:
        """Nothing is loaded for a request, whose id this was."""
        for found in [one for one in self._sought.values() if one.rid == rid]:
            self._drop(found)

    def _may_use(self, request: Req) -> bool:
        return not self._is_stopped and not request.retraction_count and self._may_store(request)

    def _seek(self, request: Req, seq: TokenSequence, wanted: Wanted) -> None:
        if self.is_in_host and not self.store.num_runs:
            return  # nobody else writes there
        # The last run of a prompt is named by all of it, though not all of it is asked for.
        ids = only_text(request.full_untruncated_fill_ids)
        if ids is None:
            return
        salt = seq.namespace.salt
        tenant = salt if isinstance(salt, str) else None
        found = _Lookup(request.rid, tenant)
        if not self._places.take(tenant):
            found.waits = False
            self._sought[request] = found
            self._count("store_busy")
            self.tell_news()
            return
        prompt = StorePrompt(ids, tenant, (), (), wanted.session)
        named = self._sequence(prompt)
        self._sought[request] = found
        self._count("store_requests")
        found.policy = wanted.policy
        found.load = self._loader.seek(
            named,
            wanted.gaps,
            lambda: sought_runs(self.store, named, self._cut(prompt), wanted.gaps),
            wanted.policy,
            session=wanted.session,
            moved_end=wanted.moved_end,
            to_first_gap=not wanted.goes_on,
            contexts=wanted.judges,
            shared_prefix=wanted.policy.shared_prefix * self._page_size,
            done=self._has_arrived,
        )
        weakref.finalize(request, self._lost.append, found).atexit = False

    def _cut(self, prompt: StorePrompt) -> StorePrompt:
        """A prompt with the borders of its messages, if they are read; called in a thread."""
        if self._tagger is None:
            return prompt
        stream = read_sections(self._tagger, np.asarray(prompt.tokens))
        if stream is None:
            return prompt
        return StorePrompt(prompt.tokens, prompt.salt, self._borders(stream), (), prompt.session)

    def _borders(self, stream: Stream) -> tuple[int, ...]:
        return tuple(sorted(one for one in borders_of(stream) if one <= len(stream)))

    def _sequence(self, prompt: StorePrompt) -> TokenSequence:
        salt = SHARED if prompt.salt is None else prompt.salt
        return TokenSequence(prompt.tokens, self._space.replace(salt=salt))

    def _take(self, found: _Lookup) -> None:
        """What has arrived for a request that waits no more."""
        self._leave(found)
        taken = None if found.load is None else found.load.take(self._pool)
        if taken is None or not taken.spans:
            found.cancel()
            return
        found.taken = taken
        if found.policy.approximate:
            found.arrived = FoundRuns(taken.spans, taken.contexts, found.policy)
        self._count("store_found")

    def _leave(self, found: _Lookup) -> None:
        if found.waits:
            found.waits = False
            self._places.give(found.tenant)

    def _drop(self, found: _Lookup) -> None:
        self._leave(found)
        found.cancel()

    def _has_arrived(self) -> None:
        self._arrival.set()
        self.tell_news()

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        on_stream: AbstractContextManager[Any] = torch.get_device_module(self._pool.device).stream(
            self._stream
        )
        return on_stream

    # --- writing -------------------------------------------------------------------------------

    def ended(
        self,
        request: Req,
        blocks: NDArray[np.int32],
        slots: torch.Tensor,
        after: torch.Tensor,
        space: Namespace,
        *,
        stream: Stream | None,
        keeps: bool,
        session: str | None,
    ) -> None:
        """Have written what later prompts may have of a request that has ended.

        Args:
            request: The request.
            blocks: Its exact pages in the index, whose KV is there until `left` says otherwise.
            slots: Theirs, one a token.
            after: Slots of the tokens after them, which leave now.
            space: The namespace of the request.
            stream: Prompt and reply in the model's chat format, finished; None without one.
            keeps: Whether the template keeps reasoning.
            session: The id of the conversation.
        """
        if not self._settings.turns or self._is_stopped or not self._may_store(request):
            return
        num_paged = len(blocks) * self._page_size
        done = num_paged + len(after)
        ids = only_text(request.full_untruncated_fill_ids[:done])
        if ids is None:
            return
        borders = (
            () if stream is None else tuple(one for one in self._borders(stream) if one <= done)
        )
        gone = Gone(()) if stream is None or keeps else gone_of(stream, _TURN)
        wanted = tuple(
            (start, end, end - start, None)
            for start, end in pieces(done, borders, longest=self._settings.run_tokens)
            if start < end and not gone.has_some_of(start, end)
        )
        if not wanted:
            return
        if len(wanted) > MOST_RUNS:
            self.store.count("too_many", len(wanted) - MOST_RUNS)
            wanted = wanted[:MOST_RUNS]
        salt = space.salt
        prompt = StorePrompt(ids, salt if isinstance(salt, str) else None, borders, (), session)
        turn = TurnToWrite(prompt, tuple(blocks.tolist()), wanted, EXACT_ONLY, slots)
        rows = None
        if len(after) and wanted[-1][1] > num_paged:
            # It would wait for the step that is under way on the other stream.
            table = after.numpy(force=True)
            with self._on_stream():
                kv = self._pool.gather(table, 0, len(table))

            def rows() -> SpanRows:
                return rows_from(*kv)

        self._turns.offer_slots(turn, rows, num_paged, self._ready())

    def left(self, blocks: NDArray[np.int32]) -> None:
        """Slots of pages are handed out: what was not read of them is given up."""
        if self._turns.is_idle:
            return
        try:
            self._turns.overwritten(blocks.tolist())
        except BaseException:
            # What is not given up would be stored as what it was.
            self._turns.pool = None
            raise

    def give_up(self) -> None:
        """Read no page of any request that has ended; none is read any more."""
        try:
            self._turns.give_up()
        except BaseException:
            self._turns.pool = None
            raise

    def _may_store(self, request: Req) -> bool:
        return (
            request.lora_id is None
            and request.input_embeds is None
            and request.positional_embed_overrides is None
            and request.multimodal_inputs is None
        )

    def _ready(self) -> Callable[[], None]:
        """Waits, in a thread, for what is queued now: steps that write, and copies of slots."""
        device = self._pool.device
        if device.type == "cpu":
            return lambda: None
        module = torch.get_device_module(device)
        events = [module.Event(), module.Event()]
        events[0].record()
        events[1].record(self._stream or module.current_stream())

        def wait() -> None:
            for one in events:
                one.synchronize()

        return wait

    # --- all -----------------------------------------------------------------------------------

    def computed(self, num_tokens: int, began: float) -> None:
        """Measure how fast prompts are computed, by a step that has ended.

        Args:
            num_tokens: Tokens of prompts in it.
            began: When it was queued; it may have begun when the one before ended.
        """
        now = time.monotonic()
        began, self._last = max(began, self._last), now
        if num_tokens >= _LEAST_PREFILL:
            self._estimate.computed(num_tokens=num_tokens, seconds=now - began)

    def stop(self, why: str) -> None:
        """Neither read nor write from now on; once."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._count("store_stopped")
        _LOG.warning("kvtrie: store: it is neither read nor written from now on: %s", why)
        self.give_up()
        for found in list(self._sought.values()):
            self._drop(found)
        # No load or turn ends that would tell it.
        self.tell_news()

    def wait(self, timeout: float) -> bool:
        """Wait until no turn waits to be written, at most so many seconds; whether that is so."""
        return self._turns.wait(timeout)

    def close(self) -> None:
        """End the threads; turns that wait for them are written, if that takes no more than 5 s."""
        self._turns.close()
        self._loader.close(timeout=1.0)
        self.tell_news()
        self.store.close()

    def tell_news(self) -> None:
        """Tell what was counted since the last time; in any thread."""
        tell = self.tell
        if tell is None:
            return
        with self._telling:
            now: Counter[tuple[str, str | None]] = Counter()
            for name, number in dict(self.counts).items():
                now[name, None] = number
            for event, number in self.store.counts().items():
                now["store", event] = number
            for (name, what), number in now.items():
                more = number - self._told[name, what]
                if more:
                    self._told[name, what] = number
                    tell(name, what, more)

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number


def stop_all(why: str) -> None:
    """Stop the stores of this process."""
    for one in list(_OPEN):
        one.stop(why)
