"""Events over real sockets when much goes wrong at once: no score that is certain is old."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.cluster.publisher import CLEARED, SIZE, Publisher, packed, removed, stored
from tests.cluster.test_snapshots import Sourced
from tests.cluster.test_subscription import KEY, NS, SECONDS, Fed, block, until

import kvtrie
from kvtrie.cluster import subscribe, subscription

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 20
DEFAULT = signature(subscribe).parameters["check_every"].default


class Truth:
    """An engine with the blocks of the prompt: what it has, and what it says of that."""

    def __init__(self, publisher: Publisher, rng: Random) -> None:
        self._publisher, self._rng = publisher, rng
        self.index = kvtrie.KvIndexer(SIZE, KEY)
        self.worker = self.index.add_worker("w", NS)
        self.held: set[int] = set()

    @property
    def exact(self) -> int:
        return SIZE * next(one for one in range(BLOCKS + 1) if one not in self.held)

    def say(self, *events: dict[str, Any], lost: bool = False) -> None:
        self.index.apply(self.worker, packed(*events))
        self._publisher.send(*events, lost=lost)

    def fill(self) -> None:
        for number in range(BLOCKS):
            self.held.add(number)
            self.say(block(number))

    def change(self, *, lost: bool) -> None:
        number = self._rng.randrange(BLOCKS)
        if self._rng.random() < 0.01:
            self.held.clear()
            self.say(CLEARED, lost=lost)
        elif number in self.held:
            self.held.remove(number)
            self.say(removed(number), lost=lost)
        else:
            # All before it as well, as an engine computes them.
            new = [one for one in range(number + 1) if one not in self.held]
            self.held.update(new)
            self.say(*map(block, new), lost=lost)

    def digest(self) -> int:
        return int(self.index.digest(self.worker))

    def is_reached_by(self, fed: Fed) -> None:
        until(lambda: fed.index.digest(fed.worker) == self.digest(), fed.__repr__)


@pytest.mark.parametrize("source", ["replay", "snapshots", "both"])
def test_three_replicas_agree_after_one_batch_in_ten_was_lost(source: str) -> None:
    rng, healed = Random(source), list[float]()
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher())
        feds: list[Fed] = [
            stack.enter_context(
                Fed(publisher, check_every=DEFAULT)
                if source == "replay"
                else Sourced(publisher, replay=source == "both", check_every=DEFAULT)
            )
            for _ in range(3)
        ]
        for fed in feds:
            fed.becomes(0)
        truth = Truth(publisher, rng)
        truth.fill()
        num_lost = 0
        for number in range(10):
            for _ in range(40):
                lost = rng.random() < 0.1
                num_lost += lost
                truth.change(lost=lost)
                if rng.random() < 0.1:
                    time.sleep(0.002)
            # It heals: a batch arrives, or the last one is lost and the engine is quiet.
            truth.change(lost=number % 2 == 1)
            begun = time.monotonic()
            for fed in feds:
                fed.becomes(truth.exact)
                truth.is_reached_by(fed)
                assert fed.scores() == (truth.exact, False)
            healed.append(time.monotonic() - begun)
        print(f"healed in {median(healed):.2f} s, {max(healed):.2f} at most")  # noqa: T201 - with -s
        assert num_lost > 20
        for fed in feds:
            fed.index.check()
            assert fed.subscription.counts["gaps"] + fed.subscription.counts["snapshots"] > 5


@contextmanager
def engine(
    others: int, blocks: int, endpoint: str = "tcp://127.0.0.1:0", replay: str = "tcp://127.0.0.1:0"
) -> Iterator[Alone]:
    command = [sys.executable, "-m", "tests.cluster.killed", endpoint, replay]
    process = subprocess.Popen(
        [*command, str(others), str(blocks)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Alone(*json.loads(process.stdout.readline()))
    finally:
        # As kill -9 does.
        process.kill()
        process.communicate()


class Alone(NamedTuple):
    """Where an engine in a process of its own publishes."""

    endpoint: str
    replay: str


@pytest.mark.parametrize("others", [0, 30], ids=["lower number", "higher number"])
def test_killed_engine_holds_nothing_in_three_replicas(others: int) -> None:
    with ExitStack() as stack:
        with engine(0, 9) as one:
            feds = [stack.enter_context(Fed(one)) for _ in range(3)]
            for fed in feds:
                fed.becomes(18)
        for fed in feds:
            fed.becomes(0, uncertain=True)
            assert fed.subscription.wait("stale", 0)
        # It starts again, with other blocks and fewer of the prompt's.
        with engine(others, 2, *one):
            truth = kvtrie.KvIndexer(SIZE, KEY)
            worker = truth.add_worker("w", NS)
            for number in range(others):
                truth.apply(worker, packed(stored([100 + number], None, [1_000 + number, 1])))
            truth.apply(worker, packed(block(0), block(1)))
            end = time.monotonic() + SECONDS
            while any(fed.scores()[1] for fed in feds):
                assert time.monotonic() < end, feds
                # Not its old self, at no moment.
                assert {score for fed in feds for score in [fed.scores()[0]]} <= {0, 2, 4}
                time.sleep(0.002)
            until(lambda: {fed.scores() for fed in feds} == {(4, False)}, feds.__repr__)
            assert {fed.index.digest(fed.worker) for fed in feds} == {truth.digest(worker)}


class Sleeper:
    """A router in a process of its own."""

    def __init__(self, publisher: Publisher, *, replay: bool, snapshot: bool) -> None:
        ends = [publisher.replay if replay else "", publisher.snapshot if snapshot else ""]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.sleeper", publisher.endpoint, *ends],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> tuple[int, bool, str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        exact, uncertain, state, digest = json.loads(self.process.stdout.readline())
        return exact, uncertain, state, digest

    @contextmanager
    def asleep(self) -> Iterator[None]:
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("can_restore", [True, False], ids=["snapshots", "a short replay"])
def test_router_that_sleeps_through_20000_batches_has_no_old_score(can_restore: bool) -> None:
    """Its scores were certain, and those of before, until its thread had read the first of them."""
    # The kernel alone would keep all of them for it.
    with Publisher(kernel_buffer=1 << 16) as publisher, ExitStack() as stack:
        sleeper = Sleeper(publisher, replay=not can_restore, snapshot=can_restore)
        stack.callback(sleeper.close)
        until(lambda: sleeper.ask()[:3] == (0, False, "live"), sleeper.ask)
        truth = Truth(publisher, Random(0))
        truth.fill()
        until(lambda: sleeper.ask()[:2] == (truth.exact, False), sleeper.ask)
        with sleeper.asleep():
            began = time.monotonic()
            truth.held.discard(3)
            truth.say(removed(3))
            for number in range(20_000):
                # Of another conversation, one block at a time.
                known = BLOCKS + number % 50
                truth.say(stored([known], None, [known, known]))
            time.sleep(max(0.0, began + 1.2 * subscription._CERTAIN_FOR / 1e3 - time.monotonic()))
        end = time.monotonic() + SECONDS
        answers = []
        while time.monotonic() < end:
            exact, uncertain, state, digest = sleeper.ask()
            answers.append((exact, uncertain, state))
            assert uncertain or exact == truth.exact, answers
            if not uncertain or (not can_restore and state == "gapped" and len(answers) > 200):
                break
        assert answers[0][1]
        assert uncertain is not can_restore, answers[-1]
        if can_restore:
            assert digest == truth.digest()
