"""Edited conversations in SGLang's scheduler: what was reused, and the K and V that were read.

``python -m tests.sglang.edited JOB.json`` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sglang.engine import Failing, Job, Server, words

if TYPE_CHECKING:
    import torch


class Client:
    """Sends requests one after the other."""

    def __init__(self, job: Job) -> None:
        self.server = Server(job)
        self.pool = self.server.scheduler.token_to_kv_pool_allocator
        self._number = 0

    def send(
        self, ids: list[int], new: int = 8, *, salt: str | None = None, **custom: Any
    ) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """What came of a prompt, and K and V of each layer as its first step has read them."""
        self._number += 1
        given = {"kvtrie": custom} if custom else None
        request = self.server.add(f"r{self._number}", ids, new, None, salt, given)
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(200):
            self.server.step()
            if not rows and request.kv.holds_kv and request.output_ids:
                rows = self._rows(request, len(ids))
            if request.finished():
                break
        self.server.step()
        reply = list(request.output_ids)
        return {"cached": request.cached_tokens, "reply": reply}, rows

    def _rows(self, request: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        kv = self.pool.get_kvcache()
        at = self.server.scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :count]
        pairs = zip(kv.k_buffer, kv.v_buffer, strict=True)
        return [(k[at.long()].clone(), v[at.long()].clone()) for k, v in pairs]

    def balance(self) -> dict[str, Any]:
        cache = self.server.cache
        if cache._recording is not None:
            cache._recording._recorder.flush()
        return {
            "lost": self.pool.size - self.pool.available_size() - cache.evictable_size(),
            "protected": cache.protected_size(),
            "counts": dict(cache.counts),
            "approximate": cache.num_approximate,
            "indexed": cache._index.stats().approximate,
            "would": dict(cache.would),
            "computed": {" ".join(one): count for one, count in cache.computed.items()},
            "metrics": _computed_metrics(),
        }


def _computed_metrics() -> dict[str, float]:
    """``sglang:kvtrie_computed_tokens_total``."""
    from prometheus_client import REGISTRY  # noqa: PLC0415

    return {
        f"{sample.labels['reason']} {sample.labels['kind']}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "sglang:kvtrie_computed_tokens_total"
    }


def apart(
    ones: list[tuple[torch.Tensor, torch.Tensor]], others: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[list[float]]:
    """The largest difference of K and of V in each layer."""
    return [
        [float((a - b).abs().max()) for a, b in zip(one, other, strict=True)]
        for one, other in zip(ones, others, strict=True)
    ]


def one_edit(job: Job) -> dict[str, Any]:
    """Reasoning leaves a history; then the same prompt again, by others, and the next turn."""
    rng = Random(job.seed)
    client = Client(job)
    head, reasoning, rest = words(rng, 64), words(rng, 70), words(rng, 150)
    first, _ = client.send([*head, *reasoning, *rest], session="talk")
    edited = [*head, *rest, *first["reply"], *words(rng, 30)]
    lengths = [len(one) for one in (head, reasoning, rest, first["reply"])]
    found: dict[str, Any] = {"lengths": lengths}
    found["moved"], moved = client.send(edited, session="talk")
    found["exact"], exact = client.send(edited, reuse="exact", session="talk")
    found["apart"] = apart(moved, exact)
    found["again"], again = client.send(edited, session="talk")
    found["again apart"] = apart(again, exact)
    found["other talk"], _ = client.send(edited, session="another")
    found["other salt"], _ = client.send(edited, salt="b", session="talk")
    longer = [*edited, *found["moved"]["reply"], *words(rng, 40)]
    found["next"], _ = client.send(longer, session="talk")
    return found | client.balance()


def several_cuts(job: Job) -> dict[str, Any]:
    """Reasoning leaves a history twice and new text comes in, with the gaps computed in one pass.

    Once more in a namespace of its own, with each gap in a pass of its own; and as a whole.
    """
    from kvtrie.integrations.sglang import _gaps  # noqa: PLC0415 - inside SGLang's process

    rng = Random(job.seed)
    client = Client(job)
    head, first, second, last = (words(rng, count) for count in (64, 100, 90, 60))
    new = words(rng, 20), words(rng, 1), words(rng, 30)
    original = [*head, *words(rng, 30), *first, *words(rng, 25), *second, *last]
    edited = [*head, *first, *new[0], *second, *new[1], *last, *new[2]]
    passes: list[int] = []
    made: Any = _gaps._passes

    def counted(*given: Any) -> Any:
        for rows in made(*given):
            passes.append(len(rows))
            yield rows

    def one_by_one(*given: Any) -> Any:
        return ([row] for row in given[0])

    found: dict[str, Any] = {"length": len(edited), "new": [len(one) for one in new]}
    states = {}
    for salt, passed in (("one pass", counted), ("passes", one_by_one)):
        vars(_gaps)["_passes"] = passed
        client.send(original, salt=salt, session="talk")
        found[salt], states[salt] = client.send(edited, salt=salt, session="talk")
    found["exact"], exact = client.send(edited, reuse="exact")
    found["passes apart"] = apart(states["one pass"], states["passes"])
    found["apart"] = apart(states["one pass"], exact)
    return found | {"rows": passes} | client.balance()


def settings(job: Job) -> dict[str, Any]:
    """What kvtrie takes from the settings of its server, at the start and in a pass of gaps."""
    from kvtrie.integrations.sglang import _gaps  # noqa: PLC0415 - inside SGLang's process

    rng = Random(job.seed)
    client = Client(job)
    head, first, second, new = (words(rng, count) for count in (64, 100, 90, 20))
    sizes: list[int | None] = []
    made: Any = _gaps._passes

    def counted(*given: Any) -> Any:
        sizes.append(given[2])
        return made(*given)

    vars(_gaps)["_passes"] = counted
    client.send([*head, *words(rng, 30), *first, *words(rng, 25), *second], session="talk")
    client.send([*head, *first, *new, *second, *words(rng, 30)], session="talk")
    cache = client.server.cache
    return {
        "boundary": None if cache._tagger is None else cache._tagger.format.boundary,
        "at start": cache._moving._max_in_gaps,
        "in steps": sizes,
    }


def given(job: Job) -> dict[str, Any]:
    """Prompts one after the other, of one conversation: how many of their tokens were cached."""
    client = Client(job)
    cached = [client.send(ids, 1, session="talk")[0]["cached"] for ids in job.prompts]
    return {"cached": cached} | client.balance()


def aborts(job: Job) -> dict[str, Any]:
    """An edited prompt is aborted after each number of steps, and in the end it is not."""
    rng = Random(job.seed)
    client = Client(job)
    head, reasoning, rest = words(rng, 64), words(rng, 70), words(rng, 300)
    client.send([*head, *reasoning, *rest], session="talk")
    found = []
    for steps in range(10):
        edited = [*head, *rest, *words(rng, 300)]
        request = client.server.add(
            f"aborted {steps}", edited, 8, custom={"kvtrie": {"session": "talk"}}
        )
        for _ in range(steps):
            client.server.step()
        client.server.abort(request.rid)
        for _ in range(3):
            client.server.step()
        found.append(request.cached_tokens)
    last, _ = client.send([*head, *rest, *words(rng, 300)], session="talk")
    return {"aborted": found, "last": last["cached"]} | client.balance()


def interrupted(job: Job) -> dict[str, Any]:
    """A prompt is aborted after two of its chunks; of two requests, one is put back into the queue.

    Nothing is cached before.
    """
    from sglang.srt.managers import scheduler  # noqa: PLC0415 - inside SGLang's process

    rng = Random(job.seed)
    client = Client(job)
    cache, step = client.server.cache, client.server.step
    request = client.server.add("aborted", words(rng, 1000), 8)
    step()
    step()
    done = request.extend_end
    client.server.abort(request.rid)
    step()
    found = {"done": done, "aborted": {" ".join(one): n for one, n in cache.computed.items()}}
    both = [client.server.add(f"r{number}", words(rng, 100), 40) for number in range(2)]
    for steps, is_on in ((6, False), (2, True), (90, False)):
        vars(scheduler).update(TEST_RETRACT=is_on, TEST_RETRACT_INTERVAL=1)
        for _ in range(steps):
            step()
    found["put back"] = sum(one.retraction_count for one in both)
    found["replies"] = [len(one.output_ids) for one in both]
    return found | client.balance()


def meanwhile(job: Job) -> dict[str, Any]:
    """Between a match and its admission, another request computes what would be copied."""
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams  # noqa: PLC0415

    rng = Random(job.seed)
    client = Client(job)
    cache = client.server.cache
    head, rest = words(rng, 64), words(rng, 200)
    client.send([*head, *words(rng, 50), *rest], session="talk")
    edited = [*head, *rest, *words(rng, 30)]
    request = client.server.add("late", edited, 8, custom={"kvtrie": {"session": "talk"}})
    client.server.scheduler.waiting_queue.remove(request)
    request.init_next_round_input(cache)
    promised = request.host_hit_length
    client.send(edited, reuse="exact")
    params = InitLoadBackParams(
        best_match_node=request.best_match_node, host_hit_length=promised, req=request
    )
    count, node = cache.init_load_back(params)
    is_kept = node is request.best_match_node
    return {"promised": promised, "count": count, "is_kept": is_kept} | client.balance()


def failing_copies(job: Job) -> dict[str, Any]:
    """Every second copy raises, when its slots are allocated."""
    client = Client(job)
    moving, raised = client.server.cache._moving, {"copy": 0}
    copy = moving.copy

    def failing(moves: Any) -> None:
        raised["copy"] += 1
        if raised["copy"] % 2:
            msg = "copy fails for the test"
            raise RuntimeError(msg)
        copy(moves)

    moving.copy = failing
    rng = Random(job.seed)
    head, rest = words(rng, 64), words(rng, 200)
    cached = []
    for salt in "abcd":
        client.send([*head, *words(rng, 50), *rest], salt=salt, session="talk")
        done, _ = client.send([*head, *rest, *words(rng, 30)], salt=salt, session="talk")
        cached.append(done["cached"])
    return {"cached": cached, "raised": raised} | client.balance()


def many_edits(job: Job) -> dict[str, Any]:
    """Conversations side by side in a pool too small for them, cut in the middle every turn."""
    rng = Random(job.seed)
    client = Client(job)
    raised: dict[str, int] = {}
    if job.fail:
        client.server.cache._index = Failing(client.server.cache._index, job.fail, raised)
    talks = [words(rng, 100) for _ in range(job.talks)]
    cached = []
    for _ in range(job.turns):
        for number, ids in enumerate(talks):
            if len(ids) > 200:
                cut = rng.randrange(16, len(ids) - 100)
                del ids[cut : cut + rng.randrange(10, 60)]
            ids.extend(words(rng, rng.randrange(20, 60)))
            done, _ = client.send(ids, rng.choice((2, 30)), session=f"talk {number}")
            cached.append(done["cached"])
            ids.extend(done["reply"])
    return {"cached": cached, "raised": raised, "evicted": client.server.evicted} | client.balance()


if __name__ == "__main__":
    jobs = {
        "one": one_edit,
        "several": several_cuts,
        "settings": settings,
        "given": given,
        "aborts": aborts,
        "interrupted": interrupted,
        "meanwhile": meanwhile,
        "copies": failing_copies,
        "many": many_edits,
    }
    done = jobs[sys.argv[1]](Job(**json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(done) + "\n")
    sys.stdout.flush()
    os._exit(0)
