"""Each call inside each method of the cache raises, in SGLang's scheduler and model runner.

``python -m tests.sglang.faults JOB`` prints one JSON object: what came of each method. What is
tried is found, not listed: the public methods are those of the class, and the calls are those that
a method makes of the parts that the cache is made of.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from array import array
from collections import Counter
from functools import wraps
from random import Random
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from tests.sglang.engine import Job, Server, Talk, drawn_heads, serve, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMES = int(os.environ.get("KVTRIE_SGLANG_FAULTS", "1"))
"""How often each call raises."""
MOST_ROUNDS = 6
"""Of requests for one method, until each of its calls has raised so often."""
EVERY = "every method"
APPROXIMATE = -1


def public(cache: type) -> list[str]:
    """The public methods of a cache."""
    return [one for one in dir(cache) if not one.startswith("_") and callable(getattr(cache, one))]


class Injector:
    """Lets calls raise inside one method, each of them a few times, and one in a call of it."""

    def __init__(self) -> None:
        self.method = ""
        self.calls: Counter[str] = Counter()
        """Calls of public methods from outside."""
        self.raised: dict[str, int] = {}
        """By call of a part: its name, and the how manyth it is in a call of the method."""
        self.total = 0
        self.sites: dict[str, set[str]] = {}
        """Of each method, the calls of parts that it has made."""
        self._depth = 0
        self._outer = ""
        self._rng = Random(0)
        self._seen: Counter[str] = Counter()
        self._may = False

    def arm(self, method: str) -> None:
        self.method, self.raised, self.total = method, {}, 0

    @property
    def is_inside(self) -> bool:
        """Whether a method of the cache is under way."""
        return self._depth > 0

    @property
    def has_more(self) -> bool:
        return any(count < TIMES for count in self.raised.values())

    def wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method as it is called from outside."""

        @wraps(method)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            self.calls[name] += 1
            self._seen.clear()
            self._may = self.method in (name, EVERY)
            self._depth, self._outer = 1, name
            try:
                return method(*args, **kwargs)
            finally:
                self._depth, self._may = 0, False

        return inner

    def inner(self, call: str) -> None:
        """A part is called: now it may raise."""
        if not self._depth:
            return
        self._seen[call] += 1
        site = f"{call} {self._seen[call]}"
        self.sites.setdefault(self._outer, set()).add(site)
        if not self._may:
            return
        if self.method == EVERY:
            site, most, chance = self._outer, 1 << 30, 0.05
        else:
            most, chance = TIMES, 0.5
        count = self.raised.setdefault(site, 0)
        if count < most and self._rng.random() < chance:
            self.raised[site] += 1
            self.total += 1
            self._may = False
            msg = f"{site} fails for the test"
            raise RuntimeError(msg)


class Part:
    """A part of the cache, or what it returns, whose calls may raise."""

    def __init__(self, part: Any, name: str, injector: Injector) -> None:
        self.__dict__.update(_part=part, _name=name, _injector=injector)

    def __getattr__(self, name: str) -> Any:
        part, injector = self._part, self._injector
        kind = getattr(type(part), name, None)
        if isinstance(kind, property | GetSetDescriptorType):
            injector.inner(f"{self._name}.{name}")
        found = getattr(part, name)
        if not callable(found) or name.startswith("__"):
            return found

        @wraps(found)
        def inner(*args: Any, **kwargs: Any) -> Any:
            injector.inner(f"{self._name}.{name}")
            return found(*args, **kwargs)

        return inner

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)


class Truth:
    """Which KV is in each slot: for the last of which tokens in which namespace it was computed.

    Before each step it looks at all that the step reads.
    """

    def __init__(self, server: Server) -> None:
        self._pool = server.scheduler.req_to_token_pool
        pool = server.scheduler.token_to_kv_pool_allocator
        self._tags = np.zeros(pool.size + pool.page_size, np.int64)
        self._texts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._copied: WeakSet[Any] = WeakSet()
        self.wrong: list[str] = []
        self.num_read = 0
        worker = server.scheduler.model_worker
        forward = worker.forward_batch_generation

        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            rows = list(self._rows(batch))
            for row in rows:
                self._read(*row)
            done = forward(batch, *args, **kwargs)
            for row in rows:
                self._written(*row)
            return done

        worker.forward_batch_generation = step

    def _rows(self, batch: Any) -> Any:
        is_extend = batch.forward_mode.is_extend()
        for at, req in enumerate(batch.reqs):
            if is_extend:
                start = batch.prefix_lens[at]
                yield req, start, start + batch.extend_lens[at]
            else:
                end = int(batch.seq_lens_cpu[at])
                yield req, end - 1, end

    def _text(self, req: Any, end: int) -> np.ndarray[Any, Any]:
        tags = self._texts.setdefault(req, [hash((req.extra_key, req.cache_salt)) >> 2])
        if len(tags) <= end:
            for token in (req.origin_input_ids + req.output_ids)[len(tags) - 1 : end]:
                tags.append(abs(hash((tags[-1], token))) >> 2)
        return np.array(tags[1 : end + 1], np.int64)

    def _slots(self, req: Any, start: int, end: int) -> Any:
        return self._pool.req_to_token[req.kv.req_pool_idx, start:end].long().numpy()

    def _read(self, req: Any, start: int, end: int) -> None:
        text = self._text(req, end)
        node = req.last_node
        built, own = getattr(node, "built", None), getattr(node, "own", None)
        until = start if built is None else min(start, built.exact_until)
        if own is not None and node not in self._copied:
            self._copied.add(node)
            # Copies and loads are not steps: those that are said to be exact are taken for it.
            first = start - len(own)
            self._tags[self._slots(req, first, start)] = APPROXIMATE
            self._tags[self._slots(req, first, max(first, until))] = text[first : max(first, until)]
        found = self._tags[self._slots(req, 0, until)]
        self.num_read += until
        if not np.array_equal(found, text[:until]):
            at = np.flatnonzero(found != text[:until])
            self.wrong.append(f"{req.rid} reads another's KV at {at[:3].tolist()} of {until}")

    def _written(self, req: Any, start: int, end: int) -> None:
        is_exact = getattr(req.last_node, "built", None) is None
        self._tags[self._slots(req, start, end)] = (
            self._text(req, end)[start:end] if is_exact else APPROXIMATE
        )


def parts_of(cache: Any, injector: Injector) -> None:
    """Put what lets calls raise between a cache and its parts, and theirs."""
    for name, part in list(vars(cache).items()):
        if type(part).__module__.split(".")[0] != "kvtrie" or not name.startswith("_"):
            continue
        for inner, deeper in list(vars(part).items()) if hasattr(part, "__dict__") else ():
            # The table of slots, and what records events.
            if callable(getattr(deeper, "take", None)) and not isinstance(
                deeper, np.ndarray | Part
            ):
                setattr(part, inner, Part(deeper, f"{name}.{inner}", injector))
        setattr(cache, name, Part(part, name, injector))


LAST = "release_host_resources"
"""What ends the store, which the others need."""
DIRECT = {
    "all_values_flatten",
    "dec_lock_ref",
    "dfs_weight_order",
    "full_evictable_size",
    "full_protected_size",
    "inc_lock_ref",
    "insert",
    "pretty_print",
    "release_aborted_request",
    "reset",
    "total_size",
    "touch_prefix",
}


def direct(server: Server, method: str, ids: list[int]) -> None:
    """Call a method that SGLang's scheduler does not call of such requests."""
    import torch  # noqa: PLC0415 - inside SGLang's process
    from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: PLC0415 - likewise
        CacheRequestHandle,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415 - likewise

    cache, pool = server.cache, server.scheduler.token_to_kv_pool_allocator
    key = RadixKey(array("q", ids))

    def found() -> Any:
        return cache.match_prefix(MatchPrefixParams(key=key)).last_device_node

    def locked() -> None:
        node = found()
        cache.inc_lock_ref(node)
        cache.dec_lock_ref(node)

    def inserted() -> None:
        node = found()
        slots = cache.path_device_indices(node)
        more = pool.alloc(len(ids) // pool.page_size * pool.page_size - len(slots))
        if more is not None:
            done = cache.insert(InsertParams(key=key, value=torch.cat([slots, more])))
            if done.last_device_node is cache.root_node and len(more):
                pool.free_segment(more, start_pos=len(slots))  # it took nothing

    calls: dict[str, Callable[[], Any]] = {
        "insert": inserted,
        "inc_lock_ref": locked,
        "dec_lock_ref": locked,
        "touch_prefix": lambda: cache.touch_prefix(key),
        "dfs_weight_order": lambda: cache.dfs_weight_order([found(), cache.root_node, found()]),
        "release_aborted_request": lambda: cache.release_aborted_request(
            CacheRequestHandle("of nobody", 0)
        ),
        "reset": server.scheduler.flush_cache,
    }
    if method in calls:
        calls[method]()
    elif method in DIRECT or method == LAST:
        getattr(cache, method)()


class Runs:
    """The same requests again and again, while one method after the other fails."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.server = Server(job)
        self.truth = Truth(self.server)
        self.injector = Injector()
        self.cache = self.server.cache
        self.methods = public(type(self.cache))
        self.claimed: Counter[Any] = Counter()
        """Pages that events have added, and have not removed."""
        take = self.cache.take_events

        def reading() -> Any:
            taken = take()
            for event in taken:
                if type(event).__name__ == "AllBlocksCleared":
                    self.claimed.clear()
                else:
                    added = 1 if type(event).__name__ == "BlockStored" else -1
                    self.claimed.update(dict.fromkeys(event.block_hashes, added))
            return taken

        self.cache.take_events = reading
        for name in self.methods:
            setattr(self.cache, name, self.injector.wrapped(name, getattr(self.cache, name)))

    def requests(self) -> list[list[int]]:
        """Conversations; returns their replies."""
        parts_of(self.cache, self.injector)
        rng = Random(self.job.seed)
        heads = drawn_heads(rng)
        talks = [Talk(self.job, number, heads) for number in range(self.job.talks)]
        serve(self.server, talks, rng, 1000 * self.job.turns)
        return [reply for talk in talks for reply in talk.tokens]

    def of(self, method: str, called: Sequence[str], most: int) -> dict[str, Any]:
        """What comes of requests, and of direct calls, while a method fails."""
        injector, cache = self.injector, self.cache
        before, calls = Counter(cache.counts), injector.calls.copy()
        injector.arm(method)
        replies = []
        for number in range(most):
            replies.append(self.requests())
            for again, name in enumerate([*called] * (4 + 2 * TIMES)):
                parts_of(cache, injector)
                direct(self.server, name, words(Random(f"{number} {again}"), 40))
                self.server.step()
            is_called = not method or method == EVERY or injector.calls[method] > calls[method]
            if (method != EVERY and not injector.has_more) or not is_called:
                break
        raised, total = dict(injector.raised), injector.total
        injector.arm("")
        counts = Counter(cache.counts) - before
        return {
            "called": dict(injector.calls - calls),
            "raised": raised,
            "total": total,
            "counts": dict(counts),
            "replies": replies,
            "wrong": self.truth.wrong[:3],
        } | self.balance()

    def aborts(self) -> dict[str, Any]:
        """A prompt of several chunks is aborted after each number of steps, next to another one."""
        parts_of(self.cache, self.injector)
        rng = Random(self.job.seed)
        ids, other = words(rng, 300), words(rng, 90)
        found: dict[str, Any] = {"balances": [], "outputs": [], "cached": []}
        for steps in range(100):
            # Before it, a prompt with the same beginning, or with another one.
            self._sent(ids if steps % 2 else [*words(rng, 30), *ids], f"before {steps}")
            one = self._added([*ids, *words(rng, 30)], f"aborted {steps}")
            two = self._added(other, f"goes on {steps}")
            for _ in range(steps):
                self.server.step()
            is_over = one.finished()
            self.server.abort(one.rid)
            self._ends(two)
            found["cached"].append(one.cached_tokens)
            found["outputs"].append(list(two.output_ids))
            found["balances"].append(self.balance())
            if is_over:
                break
        return found | {"wrong": self.truth.wrong[:3]}

    def _added(self, ids: list[int], name: str) -> Any:
        custom = {"kvtrie": {"session": "talk"}} if self.job.settings else None
        return self.server.add(name, ids, 4, custom=custom)

    def _ends(self, request: Any) -> None:
        for _ in range(200):
            if request.finished():
                return
            self.server.step()
        msg = f"{request.rid} does not end"
        raise RuntimeError(msg)

    def _sent(self, ids: list[int], name: str) -> None:
        self._ends(self._added(ids, name))

    def full(self) -> dict[str, Any]:
        """The pool has no room for what the cache itself allocates."""
        pool = self.server.scheduler.token_to_kv_pool_allocator
        alloc, refused = pool.alloc, Counter[str]()

        def none(count: int) -> Any:
            if self.injector.is_inside:
                refused["alloc"] += 1
                return None
            return alloc(count)

        pool.alloc = none
        try:
            found = self.of("", (), 1)
        finally:
            pool.alloc = alloc
        return found | {"refused": refused["alloc"]}

    def balance(self) -> dict[str, Any]:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415 - likewise

        server, cache = self.server, self.cache
        pool = server.scheduler.token_to_kv_pool_allocator
        for _ in range(3):
            server.step()
        kept = {
            "protected": cache.protected_size(),
            "lost": pool.size - pool.available_size() - cache.evictable_size(),
        }
        # Whatever is cached can be given back.
        cache.evict(EvictParams(num_tokens=pool.size))
        kept |= {"not evicted": pool.size - pool.available_size(), "held": cache.total_size()}
        server.step()
        return kept | {"claimed": len(+self.claimed)}


def main(job: Job) -> dict[str, Any]:
    runs = Runs(job)
    directly = sorted(DIRECT & set(runs.methods))
    found: dict[str, Any] = {}

    def tried(name: str, what: Callable[..., Any], *args: Any) -> bool:
        sys.stderr.write(f"{name}\n")
        sys.stderr.flush()
        try:
            found[name] = what(*args)
        except Exception:  # noqa: BLE001 - the server is dead
            raised = runs.injector.raised
            found[name] = {"died": traceback.format_exc()[-4000:], "raised": raised}
            return False
        return True

    def all_tried() -> bool:
        """Every method that is met, also those that are first met while another one fails."""
        while left := [one for one in runs.injector.sites if one not in {*found, LAST}]:
            if not all(tried(one, runs.of, one, [one], MOST_ROUNDS) for one in left):
                return False
        return True

    _ = (
        tried("", runs.of, "", directly, 2)
        and all_tried()
        and tried(EVERY, runs.of, EVERY, directly, 3)
        and tried("aborts", runs.aborts)
        and tried("full", runs.full)
        and all_tried()
        and tried(LAST, runs.of, LAST, [LAST], MOST_ROUNDS)
    )
    sites = {name: sorted(one) for name, one in runs.injector.sites.items()}
    return {"methods": runs.methods, "found": found, "read": runs.truth.num_read, "sites": sites}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Job(**json.loads(sys.argv[1])))) + "\n")
    sys.stdout.flush()
    os._exit(0)
