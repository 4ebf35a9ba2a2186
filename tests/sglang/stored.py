"""SGLang's scheduler with a store next to its pool: what comes back from it, and what goes wrong.

``python -m tests.sglang.stored WHAT JOB`` prints one JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sglang.edited import Client, apart
from tests.sglang.engine import VOCAB, Job, words

import kvtrie
from kvtrie.store import BackendError
from kvtrie.store.keys import is_run_name

if TYPE_CHECKING:
    import torch


class Faulty:
    """A backend that fails as a test says."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.raises: dict[str, Exception] = {}
        self.delay = 0.0
        self.slow: tuple[str, ...] = ("exists", "read", "put", "delete")
        self.flips = self.swaps = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)

        def inner(*given: Any) -> Any:
            if name in self.slow:
                time.sleep(self.delay)
            if name in self.raises:
                raise self.raises[name]
            if name == "read" and self.swaps:
                given = (self._other(given[0]), *given[1:])
            found = call(*given)
            if name == "read" and self.flips and found is not None and len(found) > 1:
                wrong = bytearray(found[-1])
                wrong[len(wrong) // 2] ^= 1
                return [*found[:-1], memoryview(bytes(wrong))]
            return found

        return inner

    def _other(self, name: str) -> str:
        """Another run, whose length is the same where there is one."""
        values = self._backend.values()
        sizes = {one.name: one.num_bytes for one in values if is_run_name(one.name)}
        found: str = min(
            sizes.keys() - {name}, key=lambda one: (sizes[one] != sizes.get(name), one)
        )
        return found


class Stored(Client):
    """Sends requests one after the other, and lets the pool forget them.

    Steps are not measured unless a test asks for it: what is found is loaded, however slowly here.
    """

    def __init__(self, job: Job, *, measures: bool = False) -> None:
        super().__init__(job)
        self.cache = self.server.cache
        store = self.cache._store
        if store is not None and not measures:
            store._estimate.computed = lambda **_: None

    def send(
        self, ids: list[int], new: int = 8, **more: Any
    ) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """As `Client.send`, where a step may be one in which the prompt waits."""
        store = self.cache._store
        if store is None:
            return super().send(ids, new, **more)
        step = self.server.step

        def steps() -> None:
            step()
            while any(one.waits for one in store._sought.values()):
                step()

        self.server.step = steps  # type: ignore[method-assign]
        try:
            return super().send(ids, new, **more)
        finally:
            self.server.step = step  # type: ignore[method-assign]

    def settle(self) -> None:
        """All that has ended is written."""
        assert self.cache._store.wait(60)

    def flush(self) -> None:
        """The pool loses everything; the store does not."""
        self.settle()
        self.server.step()
        assert self.server.scheduler.flush_cache()

    def tell(
        self, ids: list[int], new: int = 8, **more: Any
    ) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        found = self.send(ids, new, **more)
        self.settle()
        return found

    def report(self) -> dict[str, Any]:
        store = self.cache._store
        if store is None:
            return self.balance()
        counted = {"requests": dict(store.counts), "events": store.store.counts()}
        return self.balance() | counted | {"told": told()}


def told() -> dict[str, float]:
    """``sglang:kvtrie_store…_total``, by event where there is one."""
    from prometheus_client import REGISTRY  # noqa: PLC0415

    start = "sglang:kvtrie_"
    return {
        sample.labels.get("event", sample.name.removeprefix(start).removesuffix("_total")): (
            sample.value
        )
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith(f"{start}store") and sample.name.endswith("_total")
    }


def same(job: Job) -> dict[str, Any]:
    """A prompt, the same after a flush, and the same after others have overwritten the pool."""
    rng = Random(job.seed)
    client = Stored(job)
    ids = words(rng, 203)
    found: dict[str, Any] = {}
    found["first"], first = client.tell(ids, 12)
    client.flush()
    found["flushed"], again = client.tell(ids, 12)
    found["apart"] = apart(first, again)
    evicted = client.server.evicted
    while client.server.evicted - evicted < 2 * client.pool.size:
        client.tell(words(rng, 200), 1)
    found["overwritten"], again = client.tell(ids, 12)
    found["apart overwritten"] = apart(first, again)
    found["with its reply"], _ = client.tell([*ids, *found["first"]["reply"], *words(rng, 30)])
    client.flush()
    longer = [*ids, *found["first"]["reply"], *words(rng, 30)]
    found["next"], _ = client.tell(longer)
    client.flush()
    found["other salt"], _ = client.tell(ids, 12, salt="b")
    client.flush()
    found["other salt again"], _ = client.tell(ids, 12, salt="b")
    return found | client.report()


def faulty(client: Stored) -> Faulty:
    """Puts it between the store and its backend."""
    store = client.cache._store.store
    store._backend = Faulty(store._backend)
    found: Faulty = store._backend
    return found


def once(job: Job) -> dict[str, Any]:
    """A prompt, for a process that has what another one has stored, or has not."""
    client = Stored(job)
    found, _ = client.tell(words(Random(job.seed), 203), 12)
    client.cache._store.close()
    return found | client.report()


def faults(job: Job) -> dict[str, Any]:
    """The store fails in one way after the other; each time the prompt is computed."""
    client = Stored(job)
    ids = words(Random(job.seed), 203)
    first, _ = client.tell(ids, 12)
    backend = faulty(client)
    found: dict[str, Any] = {"first": first}

    def again(name: str) -> None:
        client.flush()
        found[name], _ = client.tell(ids, 12)

    backend.flips = True
    again("corrupt")
    backend.flips = False
    again("stored again")
    again("whole")
    dead = BackendError("it is gone", reason="unreachable")
    for call in ("exists", "read", "put", "delete"):
        for error in (dead, RuntimeError(f"{call} fails for the test"), MemoryError()):
            backend.raises = {call: error}
            again(f"{call} {type(error).__name__}")
    # Nothing that was not stored is written, so no put was tried.
    client.flush()
    backend.raises = {"put": RuntimeError("put fails for the test"), "delete": dead}
    client.tell(words(Random(1), 50), 4)
    backend.raises = {}
    again("well")
    return found | client.report()


def replies(job: Job) -> dict[str, Any]:
    """The replies to what `swapped_and_full` sends, without a store."""
    rng, client = Random(job.seed), Client(job)
    return {"replies": [client.send(words(rng, 203), 12)[0]["reply"] for _ in range(3)]}


def swapped_and_full(job: Job) -> dict[str, Any]:
    """The store returns another of its runs; then it is on a full disk, which is named or not."""
    rng, client = Random(job.seed), Stored(job)
    backend, found = faulty(client), dict[str, Any]()

    def tell(name: str, ids: list[int]) -> None:
        found[name], _ = client.tell(ids, 12)
        client.flush()

    one, two, three = (words(rng, 203) for _ in range(3))
    tell("first", one)
    backend.swaps = True
    tell("swapped", one)
    backend.swaps = False
    tell("whole", one)
    full = os.strerror(errno.ENOSPC)
    for ids, name, error in (
        # What `ObjectBackend` makes of it, and a backend that lets it through.
        (two, "named", BackendError(full, reason="full")),
        (three, "raw", OSError(errno.ENOSPC, full)),
    ):
        backend.raises = {"put": error}
        tell(f"full, {name}", ids)
        tell(f"full, {name}, again", ids)
        backend.raises = {}
        tell(f"room, {name}", ids)
        tell(f"room, {name}, again", ids)
    return found | client.report()


def calls(job: Job) -> dict[str, Any]:
    """Each call of the cache into its store raises."""
    client = Stored(job)
    ids = words(Random(job.seed), 203)
    first, _ = client.tell(ids, 12)
    store = client.cache._store
    found: dict[str, Any] = {"first": first}
    for name in ("promised", "waits", "load", "ended", "computed", "admitted"):
        client.flush()

        def fails(*_: Any, **__: Any) -> Any:
            msg = "it fails for the test"
            raise RuntimeError(msg)

        setattr(store, name, fails)
        found[name], _ = client.send(ids, 12)
        delattr(store, name)
    client.flush()
    # No slot is free for what was loaded; then some are not there, then half of the rows.
    pool, alloc = client.pool, client.pool.alloc
    pool.alloc = lambda count: None if count == 192 else alloc(count)
    found["alloc"], _ = client.tell(ids, 12)
    pool.alloc = alloc
    client.flush()
    found["well"], _ = client.tell(ids, 12)
    return found | client.report()


def slow(job: Job) -> dict[str, Any]:
    """A prompt waits for a slow store while another is served, and no longer than it may."""
    rng = Random(job.seed)
    client = Stored(job, measures=True)
    ids, other = words(rng, 203), words(rng, 40)
    first, _ = client.tell(ids, 12)
    client.flush()
    backend = faulty(client)
    backend.delay = 0.02
    one = client.server.add("waits", ids, 12)
    two = client.server.add("goes", other, 4)
    order: list[str] = []
    began = time.monotonic()
    while len(order) < 2 and time.monotonic() - began < 60:
        client.server.step()
        order += [each.rid for each in (one, two) if each.finished() and each.rid not in order]
    client.server.step()
    client.settle()
    found = {"first": first, "order": order}
    found["waits"] = {"cached": one.cached_tokens, "reply": list(one.output_ids)}
    client.flush()
    backend.delay = 1.5
    found["late"], _ = client.send(ids, 12)
    backend.delay = 0
    client.flush()
    # What was slow is expected to be slow.
    found["slower"], _ = client.tell(ids, 12)
    return found | client.report()


def preempts(job: Job) -> dict[str, Any]:
    """A prompt that the store has takes the place of a running request, and the store is slow."""
    rng = Random(job.seed)
    client = Stored(job)
    ids, other = words(rng, 203), words(rng, 40)
    first, _ = client.tell(ids, 12)
    client.flush()
    faulty(client).delay = 0.2
    runs = client.server.add("runs", other, 30)
    runs.priority = 0
    for _ in range(4):
        client.server.step()
    urgent = client.server.add("urgent", ids, 12)
    urgent.priority = 100
    began = time.monotonic()
    while not (runs.finished() and urgent.finished()) and time.monotonic() - began < 60:
        client.server.step()
    client.server.step()
    client.settle()
    return {
        "preempted": runs.retraction_count,
        "lengths": [len(one.output_ids) for one in (runs, urgent)],
        "same": list(urgent.output_ids) == first["reply"],
        "left": sum(one.waits for one in client.cache._store._sought.values()),
    } | client.report()


def aborts(job: Job) -> dict[str, Any]:
    """A prompt that the store has is aborted after each number of steps."""
    rng = Random(job.seed)
    client = Stored(job)
    ids = words(rng, 503)
    first, _ = client.tell(ids, 12)
    backend = faulty(client)
    cached, held = [], []
    for steps in range(24):
        client.flush()
        # A load that is slow is not tried again.
        backend.slow, backend.delay = ("exists",), 0.03
        request = client.server.add(f"aborted {steps}", ids, 8)
        for _ in range(steps):
            client.server.step()
            time.sleep(0.004)
        client.server.abort(request.rid)
        for _ in range(4):
            client.server.step()
        cached.append(request.cached_tokens)
        held.append(client.cache._store._loader._room._left)
    backend.delay = 0
    client.flush()
    last, _ = client.tell(ids, 12)
    held.append(client.cache._store._loader._room._left)
    return {"first": first, "cached": cached, "last": last, "room": held} | client.report()


def reasoning(job: Job) -> dict[str, Any]:
    """A turn with reasoning, which the template drops from the next user message on."""
    from kvtrie.integrations.sglang._reasoning import Reasoning  # noqa: PLC0415
    from kvtrie.tags import Tagger  # noqa: PLC0415

    rng = Random(job.seed)
    client = Stored(job)
    user, assistant, opens, closes, end = range(3, 8)
    tagger = Tagger.from_ids(
        user=[user], assistant=[assistant], reasoning=([opens], [closes]), end=[end]
    )
    client.cache._reasoning = Reasoning(tagger)
    client.cache._store._tagger = tagger
    said = [[8 + one for one in words(rng, n) if one < VOCAB - 8] for n in (90, 120, 70)]
    question = [user, *said[0], end, assistant]
    dropped, answer = [opens, *said[1], closes], [*said[2], end]
    turn = [*question, *dropped, *answer]
    found: dict[str, Any] = {"lengths": [len(question), len(dropped), len(answer)]}
    for name, custom in (("first", {}), ("kept", {"reasoning": "keep"})):
        found[name], _ = client.tell(turn, 2, salt=name, **custom)
        client.flush()
        found[f"{name} again"], _ = client.tell(turn, 2, salt=name, reuse="exact")
        client.flush()
    found |= client.report()
    vars(client.cache._reasoning)["read"] = None
    client.tell(turn, 2, salt="not read")
    client.flush()
    del vars(client.cache._reasoning)["read"]
    found["not read"], _ = client.tell(turn, 2, salt="not read")
    return found | {"counts not read": dict(client.cache.counts)}


def approximate(job: Job) -> dict[str, Any]:
    """What was computed after moved KV is not found as exact, nor as anything else."""
    rng = Random(job.seed)
    client = Stored(job)
    head, dropped, rest = words(rng, 64), words(rng, 70), words(rng, 150)
    client.tell([*head, *dropped, *rest], session="talk")
    edited = [*head, *rest, *words(rng, 41)]
    found: dict[str, Any] = {}
    found["moved"], _ = client.tell(edited, session="talk")
    client.flush()
    found["edited"], first = client.tell(edited, session="talk")
    client.flush()
    found["exact"], second = client.tell(edited, session="talk", reuse="exact")
    found["apart"] = apart(first, second)
    client.flush()
    found["again"], _ = client.tell(edited, session="talk")
    return found | client.report()


def edited(job: Job) -> dict[str, Any]:  # noqa: PLR0915 - one engine for all
    """A message leaves a history: the rest of it from the pool, then from the store."""
    from kvtrie import gates  # noqa: PLC0415 - in the process of the engine alone

    rng = Random(job.seed)
    client = Stored(job)
    # Without a chat format runs are cut every 16 tokens, so they are those of the edited prompt.
    head, dropped, rest, tail = (words(rng, count) for count in (64, 80, 144, 41))
    original, prompt = [*head, *dropped, *rest], [*head, *rest, *tail]
    backend = faulty(client)
    store, moving = client.cache._store, client.cache._moving
    found: dict[str, Any] = {}
    states = {}

    def labels(salt: str) -> list[tuple[int, ...]]:
        """The prompt's tokens in the index: start, end, class and hops."""
        index = client.cache._index
        seq = kvtrie.TokenSequence(prompt, client.cache._namespaces.of(None, salt))
        policy = kvtrie.ReusePolicy(approximate=True, scope="namespace", max_hops=255)
        with index.plan(seq, policy, pin=False) as plan:
            names = ("start", "end", "class", "hops")
            return [tuple(int(one[name]) for name in names) for one in plan.segments]

    def case(name: str, *, session: str = "talk", salt: str | None = None, **more: Any) -> None:
        client.tell(original, salt=name, session="talk")
        client.flush()
        before = store.counts["store_tokens_moved"]
        found[name], states[name] = client.tell(prompt, salt=salt or name, session=session, **more)
        client.flush()
        found[name]["moved"] = store.counts["store_tokens_moved"] - before

    client.tell(original, salt="pool", session="talk")
    found["pool"], states["pool"] = client.tell(prompt, salt="pool", session="talk")
    found["pool labels"] = labels("pool")
    client.flush()
    case("store")
    case("exact", reuse="exact")
    # The store keeps the place that a run was computed at first.
    found["again"], _ = client.tell(prompt, salt="exact", session="talk")
    client.flush()
    for one, other in (("store", "pool"), ("store", "exact")):
        found[f"{one} {other}"] = apart(states[one], states[other])
    case("other session", session="another")
    case("other salt", salt="of others")
    backend.flips = True
    case("corrupt")
    backend.flips = False
    write = store._pool.scatter
    for name, call in (("load", "load_plan"), ("seek", "seek")):

        def fails(*_: Any, **__: Any) -> Any:
            msg = "it fails for the test"
            raise RuntimeError(msg)

        setattr(store, call, fails)
        case(name)
        delattr(store, call)
    store._pool.scatter = fails
    case("write")
    store._pool.scatter = write
    found["failures"] = dict(client.cache.counts)
    client.cache.counts.clear()
    granted = moving.decision
    for name, most in (("refused", 0), ("cleared", 9)):
        box = gates.Box(cuts=gates.Range(most=most))
        kinds = (gates.Judged(name, box, None),)
        moving.decision = gates.Decision(granted.policy, True, "a test's", kinds)
        case(name)
    moving.decision = granted
    # The next turn after what was loaded: the labels are those of moved KV.
    client.tell(original, salt="next", session="talk")
    client.flush()
    client.tell(prompt, salt="next", session="talk")
    found["store labels"] = labels("next")
    found["match"], _ = client.tell(prompt, salt="next", session="talk", reuse="exact")
    client.flush()
    for steps in range(12):
        client.tell(original, salt=f"aborted {steps}", session="talk")
        client.flush()
        custom = {"kvtrie": {"session": "talk"}}
        request = client.server.add(f"a{steps}", prompt, 8, None, f"aborted {steps}", custom)
        for _ in range(steps):
            client.server.step()
            time.sleep(0.002)
        client.server.abort(request.rid)
        for _ in range(4):
            client.server.step()
    client.flush()
    found["room"] = store._loader._room._left
    store.stop("the test says so")
    case("stopped")
    return found | client.report()


def _edited_history(job: Job) -> tuple[list[int], list[int]]:
    """A history, and what is left of it after an edit."""
    rng = Random(job.seed)
    head, dropped, rest, tail = (words(rng, count) for count in (64, 80, 144, 41))
    return [*head, *dropped, *rest], [*head, *rest, *tail]


def _asked(client: Stored, prompt: list[int]) -> dict[str, Any]:
    """What its conversation, and another one, get for a prompt from the store."""
    found: dict[str, Any] = {}
    for session in ("talk", "another"):
        found[session], _ = client.tell(prompt, session=session, salt="one")
        client.flush()
    return found


def half(job: Job) -> dict[str, Any]:
    """A history, or, where another process has stored it, what is left of it after an edit."""
    client = Stored(job)
    history, prompt = _edited_history(job)
    found: dict[str, Any] = {}
    if client.cache._store.store.num_runs:
        found = _asked(client, prompt)
    else:
        client.tell(history, session="talk", salt="one")
    client.cache._store.close()
    return found | client.report()


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} was not said"
        time.sleep(0.05)


def lends(job: Job) -> dict[str, Any]:
    """Stores a history in its own memory, and stays until `borrows` has asked for it."""
    client = Stored(job)
    client.tell(_edited_history(job)[0], session="talk", salt="one")
    folder = Path(json.loads(job.settings)["store"]["key_file"]).parent
    (folder / "stored").touch()
    _wait_for(folder / "asked")
    client.cache._store.close()
    return client.report()


def borrows(job: Job) -> dict[str, Any]:
    """What is left of that history after an edit, as it is in another process's memory."""
    client = Stored(job)
    folder = Path(json.loads(job.settings)["store"]["key_file"]).parent
    _wait_for(folder / "stored")
    found = _asked(client, _edited_history(job)[1])
    (folder / "asked").touch()
    client.cache._store.close()
    return found | client.report()


def last_message(job: Job) -> dict[str, Any]:
    """The last message of a prompt is computed, whatever the store has of it."""
    from kvtrie.integrations.sglang._reasoning import Reasoning  # noqa: PLC0415 - likewise
    from kvtrie.tags import Tagger  # noqa: PLC0415 - likewise

    rng = Random(job.seed)
    client = Stored(job)
    user, assistant, opens, closes, end = range(3, 8)
    tagger = Tagger.from_ids(
        user=[user], assistant=[assistant], reasoning=([opens], [closes]), end=[end]
    )
    client.cache._store._tagger = client.cache._moving._tagger = tagger
    client.cache._reasoning = Reasoning(tagger)

    def said(who: int, count: int) -> list[int]:
        return [who, *(8 + one for one in words(rng, count) if one < VOCAB - 8), end]

    first, dropped = ([*said(user, count), *said(assistant, 40)] for count in (90, 70))
    third = said(user, 120)
    found: dict[str, Any] = {"lengths": [len(first), len(third)]}
    for name, more in (("last", [assistant]), ("not last", [*said(assistant, 40), user, 9])):
        client.tell([*first, *dropped, *third, assistant], salt=name, session="talk")
        client.flush()
        found[name], _ = client.tell([*first, *third, *more], salt=name, session="talk")
        client.flush()
    return found | client.report()


def weights(job: Job) -> dict[str, Any]:
    """Weights are replaced, with the cache flushed or not."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput  # noqa: PLC0415

    client = Stored(job)
    ids = words(Random(job.seed), 203)
    first, _ = client.tell(ids, 12)
    client.flush()
    other = UpdateWeightFromDiskReqInput(
        model_path=job.overrides["served_model_name"], load_format="auto", flush_cache=False
    )
    done = client.server.scheduler.weight_updater.update_weights_from_disk(other)
    assert done.success, done.message
    second, _ = client.tell(ids, 12)
    client.flush()
    third, _ = client.tell(ids, 12)
    return {"first": first, "second": second, "third": third} | client.report()


def reset(job: Job) -> dict[str, Any]:
    """Weights are read for a snapshot, then reset to random ones."""
    import torch  # noqa: PLC0415
    from sglang.srt.managers.io_struct import CheckWeightsReqInput  # noqa: PLC0415

    client = Stored(job)
    ids = words(Random(job.seed), 203)
    found: dict[str, Any] = {}
    found["first"], _ = client.tell(ids, 12)
    for name in ("snapshot", "reset_tensors"):
        client.flush()
        with torch.no_grad():  # as the scheduler's loop is
            done = client.server.scheduler.weight_updater.check_weights(
                CheckWeightsReqInput(action=name)
            )
        assert done.success, done.message
        found[name], _ = client.tell(ids, 12)
    return found | client.report()


def overwritten(job: Job) -> dict[str, Any]:
    """The thread that writes is held while its pages are evicted, and written to by others."""
    rng = Random(job.seed)
    client = Stored(job)
    ids = words(rng, 203)
    goes, began = threading.Event(), threading.Event()
    backend = faulty(client)
    put = backend._backend.put

    def held(*given: Any) -> None:
        began.set()
        assert goes.wait(60)
        put(*given)

    backend._backend.put = held
    first, _ = client.send(ids, 12)
    assert began.wait(60)
    for _ in range(12):
        client.send(words(rng, 200), 1)
    goes.set()
    client.flush()
    again, rows = client.tell(ids, 12)
    client.flush()
    last, others = client.tell(ids, 12)
    found = {"first": first, "again": again, "last": last, "apart": apart(rows, others)}
    return found | client.report()


def mixed(job: Job) -> dict[str, Any]:
    """The requests of `tests.sglang.engine`, then those of the same conversations once more."""
    from tests.sglang.engine import Talk, drawn_heads, serve  # noqa: PLC0415

    client = Stored(job)
    found: dict[str, Any] = {"tokens": [], "cached": []}
    met: dict[str, int] = {}
    for _ in range(2):
        rng = Random(job.seed)
        heads = drawn_heads(rng)
        talks = [Talk(job, number, heads) for number in range(job.talks)]
        for name, count in serve(client.server, talks, rng, 100_000 * job.turns).items():
            met[name] = met.get(name, 0) + count
        found["tokens"].append([reply for talk in talks for reply in talk.tokens])
        found["cached"].append(sum(count for talk in talks for count in talk.cached))
        client.flush()
    return found | {"met": met, "evicted": client.server.evicted} | client.report()


if __name__ == "__main__":
    jobs = {
        one.__name__: one
        for one in (
            *(same, once, faults, calls, slow, preempts, aborts),
            *(weights, reset, overwritten, mixed, reasoning, approximate),
            *(edited, half, last_message, replies, swapped_and_full),
            *(lends, borrows),
        )
    }
    done = jobs[sys.argv[1]](Job(**json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(done) + "\n")
    sys.stdout.flush()
    os._exit(0)
