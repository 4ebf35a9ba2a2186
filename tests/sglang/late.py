"""An index that subscribes late, next to SGLang's scheduler: ``python -m tests.sglang.late JOB``.

Prints one JSON object: how often the index had more, or less, than the cache finds for a plain
request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections import Counter
from random import Random
from typing import Any

from tests.sglang.engine import Job, Server, Talk, drawn_heads, serve, words

import kvtrie
from kvtrie.cluster import Subscription, subscribe

SECONDS = 60.0
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


class LateIndex:
    """Has one worker, and subscribes when it is made."""

    def __init__(self, job: Job, *, replay: bool) -> None:
        where = json.loads(job.overrides["kv_events_config"])
        self.index = kvtrie.KvIndexer(job.page_size, b"the key of tests")
        self.worker = self.index.add_worker("sglang", SHARED)
        self.subscription: Subscription = subscribe(
            self.index,
            self.worker,
            where["endpoint"],
            where["replay_endpoint"] if replay else None,
            snapshot=json.loads(job.settings)["snapshot"]["endpoint"],
            check_every=0.2,
        )
        self.others: Subscription | None = None
        if (where := json.loads(job.settings).get("events")) is not None:
            self.others = subscribe(
                self.index,
                self.worker,
                where["endpoint"],
                where["replay_endpoint"],
                topic="kvtrie",
                approximate=True,
                check_every=0.2,
            )

    def follows(self, server: Server) -> None:
        """Wait until it has what SGLang and its cache have published."""
        self._follows_exact(server)
        if self.others is None:
            return
        publisher, end = server.cache._events._others._publisher, time.monotonic() + SECONDS
        while (
            publisher._event_queue.unfinished_tasks
            or self.others.state != "live"
            or (self.others._applied != publisher._buffer[-1][0])
        ):
            assert time.monotonic() < end, (self.others, self.others.error)
            time.sleep(0.01)

    def _follows_exact(self, server: Server) -> None:
        publisher = server.scheduler.kv_events_publisher.kv_event_publisher
        source, end = server.cache._snapshots, time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < end, (self.subscription, self.subscription.error)
            last = [number for number, _ in list(publisher._buffer)[-1:]]
            is_out = not publisher._event_queue.unfinished_tasks and last == [source._number]
            has_it = self.subscription._applied == source._number
            if is_out and has_it and self.subscription.state == "live":
                return
            time.sleep(0.01)

    def claims(self, ids: list[int], salt: str | None) -> int:
        space = SHARED if salt is None else SHARED.replace(salt=salt)
        seq = kvtrie.TokenSequence(ids, space)
        scores = self.index.find_matches(seq, kvtrie.ReusePolicy(), keep_last=1)
        assert not scores.uncertain[0]
        return int(scores.exact[0])


def finds(server: Server, ids: list[int], salt: str | None) -> int:
    """What a plain request finds, which computes its last token in any case."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: PLC0415
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415

    key = RadixKey(array("q", ids[:-1]), None, cache_salt=salt)
    return int(server.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)


def probe(rng: Random, seen: list[list[int]]) -> tuple[list[int], str | None]:
    """A prompt that begins as another one of any key and salt."""
    history = rng.choice(seen)
    ids = history[: rng.randrange(1, len(history) + 1)] + words(rng, rng.randrange(1, 3))
    return ids, rng.choice([None, None, "a"])


def compare(
    server: Server, late: LateIndex, seen: list[list[int]], rng: Random, count: int
) -> Counter[str]:
    found: Counter[str] = Counter(probes=count)
    for _ in range(count):
        ids, salt = probe(rng, seen)
        claimed, known = late.claims(ids, salt), finds(server, ids, salt)
        found.update(over=claimed > known, under=claimed < known, found=known > 0)
        found["salted"] += known > 0 and salt is not None
    late.index.check()
    return found


def ask(server: Server, late: LateIndex, seen: list[list[int]], rng: Random) -> Counter[str]:
    """Real requests, one after another: what they report is what the index said before."""
    found: Counter[str] = Counter()
    for number in range(12):
        ids, salt = probe(rng, seen)
        claimed = late.claims(ids, salt)
        request = server.add(f"plain-{number}", ids, 1, None, salt, {"kvtrie": {"reuse": "exact"}})
        while not request.finished():
            server.step()
        server.step()
        server.step()
        known = request.cached_tokens
        found.update(asked=1, over=claimed > known, under=claimed < known, found=known > 0)
        late.follows(server)
    return found


def said(server: Server, talks: list[Talk]) -> Counter[str]:
    """Pages whose conversation is published, and those that it did not have."""
    held, found = server.cache._snapshots._held, Counter[str]()
    seen: dict[str, set[tuple[int, ...]]] = {}
    for talk in talks:
        custom = talk.custom or {"kvtrie": {"session": "none"}}
        pages = seen.setdefault(custom["kvtrie"]["session"], set())
        size = server.cache.page_size
        pages.update(
            tuple(ids[at : at + size]) for ids in talk.seen for at in range(0, len(ids), size)
        )
    for name, session in held._sessions.items():
        ids = array("I", held._blocks[name][1])
        # What an aborted request has generated is nowhere else.
        found["known"] += any(tuple(ids) in pages for pages in seen.values())
        found["own"] += tuple(ids) in seen[session]
    return found


def main(job: Job) -> dict[str, Any]:
    server = Server(job)
    rng = Random(job.seed)
    heads = drawn_heads(rng)
    talks = [Talk(job, number, heads) for number in range(job.talks)]
    serve(server, talks, rng, 1000 * job.turns)
    late = [LateIndex(job, replay=True), LateIndex(job, replay=False)]
    compared = []
    for again in range(2):
        if again:
            evicted = server.evicted
            more = [Talk(job, 100 + number, heads) for number in range(job.talks)]
            serve(server, more, rng, 1000 * job.turns)
            evicted, talks = server.evicted - evicted, talks + more
        seen = [ids for talk in talks for ids in talk.seen]
        for one in late:
            one.follows(server)
            compared.append(compare(server, one, seen, rng, 2500))
    asked = ask(server, late[0], seen, rng)
    late[1].follows(server)
    compared.append(compare(server, late[1], seen, rng, 2500))
    source = server.cache._snapshots
    both = [one for one in server.cache._events._nodes if one is not None]
    nodes = [one for one in both if one.hops is None]
    done = {
        "compared": compared,
        "asked": asked,
        "evicted": evicted,
        "counts": dict(server.cache.counts),
        "subscriptions": [dict(one.subscription.counts) for one in late],
        "number": source._number,
        "pages": len(nodes),
        "copies": sorted(set(source._held.copies.values())),
        "held": len(source._held.copies),
        "labelled": server.cache._index.stats().approximate,
        "published": len(both) - len(nodes),
        "said": said(server, talks),
        "blocks": [one.index.worker_stats(one.worker)["blocks"] for one in late],
        "with_keys": sum(talk.extra is not None for talk in talks),
    }
    for one in late:
        one.subscription.close()
        if one.others is not None:
            one.others.close()
    source.shutdown()
    return done


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Job(**json.loads(sys.argv[1])))) + "\n")
    sys.stdout.flush()
    os._exit(0)
