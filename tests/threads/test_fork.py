"""After `os.fork` inherited handles raise, whatever other threads did; the child's own work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is POSIX only")

# Each script ends with status 0; a child that hangs is ended by its parent, which then fails.
START = """
import gc, os, signal, sys, threading, time, warnings
import numpy as np
import kvtrie
from kvtrie import COMPUTED, StaleHandleError

warnings.simplefilter("error")
# Python itself warns of a fork with other threads, from 3.12 on: these tests do that.
warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
NS = kvtrie.Namespace(model="m", salt="tenant")

def in_child(body, seconds=20.0):
    \"\"\"Run in a forked child, which has so long; its exit status.\"\"\"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"

def refused(call):
    try:
        call()
    except StaleHandleError as error:
        assert "os.fork" in str(error), error
    else:
        raise AssertionError(f"{call} did not raise")

def own():
    index, pool = kvtrie.RadixIndex(8, 2), kvtrie.BlockAllocator(8)
    seq = kvtrie.TokenSequence([1, 2, 3], NS)
    with index.plan(seq) as plan:
        index.insert(seq, pool.allocate(2), num_computed=3, source=plan)
    assert index.lookup(seq).num_tokens == 2
"""

DURING_A_CALL = (
    START
    + """
size = 400_000
index, pool = kvtrie.RadixIndex(size, 1), kvtrie.BlockAllocator(size)
ledger = kvtrie.SequenceLedger(1)
seq = kvtrie.TokenSequence(np.arange(size, dtype=np.uint32), NS)
index.insert(seq, pool.allocate(size), num_computed=size, source=COMPUTED)
ledger.begin("a", seq, [])
plan = index.plan(kvtrie.TokenSequence([1], NS))
stop = threading.Event()

def work():
    while not stop.is_set():
        index.check()

thread = threading.Thread(target=work)
thread.start()

def child():
    refused(index.stats)
    refused(lambda: len(seq))
    refused(lambda: pool.num_free)
    refused(lambda: len(ledger))
    refused(plan.release)
    own()

found = []
for turn in range(6):
    # Nearly all the time the thread is inside the call, and holds the index's lock.
    time.sleep(0.02)
    found.append(in_child(child))
stop.set()
thread.join()
assert found == [0] * 6, found
# The parent's handles are as they were.
index.check()
plan.release()
"""
)

EVERY_CALL = (
    START
    + """
index, pool = kvtrie.RadixIndex(8, 2), kvtrie.BlockAllocator(8)
ledger = kvtrie.SequenceLedger(2)
seq = kvtrie.TokenSequence([1, 2, 3, 4], NS)
index.insert(seq, [0, 1], num_computed=4, source=COMPUTED)
live = kvtrie.TokenSequence([1, 2, 3, 5], NS)
plan, loose = index.plan(live), index.plan(live, pin=False)
found, slots = index.lookup(live), kvtrie.SlotTable(8, 2)
pin = index.pin(found)
ledger.begin("a", kvtrie.TokenSequence([1, 2, 3, 5], NS), [5, 6], num_computed=4)

def child():
    fresh = kvtrie.TokenSequence([1, 2, 3], NS)
    calls = [
        lambda: index.match([1, 2, 3], NS),
        lambda: index.pin(found),
        pin.release,
        lambda: slots.take(1),
        lambda: slots.give_back([0]),
        lambda: slots.num_free,
        index.snapshot,
        lambda: index.explain(fresh),
        lambda: index.lookup(fresh),
        lambda: index.plan(fresh),
        lambda: index.insert(fresh, [3], num_computed=2, source=COMPUTED),
        index.take_freed,
        lambda: index.evict(1),
        lambda: index.discard([0]),
        lambda: index.mark_dead(fresh, [(0, 2)]),
        lambda: index.remove_spans(fresh, [(0, 2)]),
        lambda: index.drop(NS),
        index.reset,
        lambda: index.num_evictable,
        index.namespaces,
        lambda: index.kinds,
        lambda: index.tag(fresh, []),
        lambda: index.tags(fresh),
        index.stats,
        index.digest,
        index.check,
        lambda: repr(index),
        lambda: plan.blocks,
        lambda: plan.source_blocks,
        lambda: plan.moves([0, 6]),
        plan.validate,
        plan.release,
        plan.release_sources,
        plan.__enter__,
        lambda: plan.__exit__(None, None, None),
        lambda: seq.extend([1]),
        lambda: seq.truncate(1),
        lambda: seq.items,
        lambda: seq[0],
        lambda: seq[:],
        lambda: iter(seq),
        lambda: len(seq),
        lambda: repr(seq),
        lambda: pool.allocate(1),
        lambda: pool.free([0]),
        lambda: pool.num_free,
        lambda: repr(pool),
        lambda: len(ledger),
        lambda: "a" in ledger,
        lambda: ledger.begin("b", fresh, [7]),
        lambda: ledger.schedule("a", 1),
        lambda: ledger.commit("a", kvtrie.RadixIndex(8, 2)),
        lambda: ledger.finish("a", kvtrie.RadixIndex(8, 2)),
        lambda: ledger.forget("a"),
        lambda: ledger.blocks("a"),
    ]
    for call in calls:
        refused(call)
    # Sequences of the parent in an index of the child.
    mine = kvtrie.RadixIndex(8, 2)
    refused(lambda: mine.lookup(seq))
    # What never changes is read as before.
    assert (index.num_blocks, index.block_size) == (8, 2)
    assert (seq.namespace, plan.num_exact) == (NS, 3)
    own()

assert in_child(child) == 0
assert plan.blocks.tolist() == [0] and ledger.blocks("a").tolist() == [5, 6] and len(seq) == 4
plan.release()
loose.release()
pin.release()
"""
)

DROPPED = (
    START
    + """
index = kvtrie.RadixIndex(8, 2)
seq = kvtrie.TokenSequence([1, 2, 3, 4], NS)
index.insert(seq, [0, 1], num_computed=4, source=COMPUTED)
plan = index.plan(seq)
pin = index.pin(index.lookup(seq))
ledger = kvtrie.SequenceLedger(2)
ledger.begin("a", kvtrie.TokenSequence([1, 2, 3, 4], NS), [0, 1], source=index.plan(seq))

def child():
    global index, seq, plan, pin, ledger
    said = []
    warnings.showwarning = lambda *args, **kwargs: said.append(args)
    warnings.simplefilter("always")
    sys.unraisablehook = said.append
    index = seq = plan = pin = ledger = None
    gc.collect()
    assert said == [], said
    # The child's own plans still warn.
    mine = kvtrie.RadixIndex(8, 2)
    mine.plan(kvtrie.TokenSequence([1], NS))
    assert len(said) == 1, said
    # Of two generations each has its own.
    assert in_child(lambda: refused(mine.stats)) == 0
    mine.check()

assert in_child(child) == 0
assert index.stats().live_plans == 3
ledger.forget("a")
plan.release()
pin.release()
"""
)


TRACKER = (
    START
    + """
from kvtrie.router import TurnTracker

tracker = TurnTracker(max_tokens=1000)

def child():
    refused(lambda: len(tracker))
    own()

# As another thread would hold it at the moment of the fork.
with tracker._lock:
    assert in_child(child) == 0
assert len(tracker) == 0
"""
)


@pytest.mark.parametrize(
    "code",
    [DURING_A_CALL, EVERY_CALL, DROPPED, TRACKER],
    ids=["during a call", "every call", "dropped", "tracker"],
)
def test_handles_of_the_parent_raise_in_a_forked_child(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=180, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
