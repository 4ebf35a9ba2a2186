"""SGLang's scheduler and model runner in one process, on a CPU: a job in, what came of it out.

``python -m tests.sglang.engine JOB`` runs mixed requests and prints one JSON object. Requests are
put into the scheduler, and its steps are made one by one.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sglang.processes import forked_together

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 512


@dataclass(frozen=True)
class Job:
    """What to run: requests of conversations that grow, are edited, and share their beginnings."""

    model: str
    backend: str | None = "kvtrie"
    page_size: int = 1
    num_slots: int = 4096
    talks: int = 10
    """Conversations, which go on side by side."""
    turns: int = 6
    """Of each. A reply is a part of the next prompt of its conversation."""
    seed: int = 0
    retract: bool = False
    """Whether running requests are put back into the queue every now and then."""
    policy: str = "fcfs"
    fail: dict[str, int] = field(default_factory=dict)
    """Calls of the index that raise: by name, every how many."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Settings of SGLang's server."""
    settings: str = ""
    """``KVTRIE_SGLANG``: what kvtrie may move."""
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of prompts, for jobs that draw none."""


@dataclass
class Outcome:
    """What a job did."""

    tokens: list[list[int]]
    """Replies, turn by turn of the first conversation, and so on; none of what was aborted."""
    cached: list[int]
    aborted: int
    retracted: int
    chunked: int
    evicted: int
    cache: str
    free: int
    evictable: int
    protected: int
    size: int
    counts: dict[str, int]
    raised: dict[str, int]
    events: list[list[Any]]
    metrics: dict[str, float]
    """``sglang:kvtrie_failures_total``."""
    approximate: int
    """Prompt tokens of approximate KV that no request computed."""
    published: int
    """Pages that events have added and not removed."""
    labelled: int
    """Approximate pages in the index."""


def run(job: Job, timeout: float = 600) -> Outcome:
    """Run a job in a process of its own.

    Raises:
        RuntimeError: It ended with an error; the message has the end of what it printed.
    """
    return Outcome(**scheduled(job, "tests.sglang.engine", timeout=timeout))


def scheduled(job: Job, module: str, *arguments: str, timeout: float = 600) -> Any:
    """What a module prints of a job, under the checks and settings that the job has."""
    (found,) = scheduled_together(job, module, [arguments], timeout)
    return found


def scheduled_together(
    job: Job, module: str, arguments: Sequence[Sequence[str]], timeout: float = 600
) -> list[Any]:
    """As `scheduled`, of several processes at once: one for each list of arguments."""
    more = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2", "KVTRIE_SGLANG": job.settings}
    given = [[*one, json.dumps(asdict(job))] for one in arguments]
    return forked_together(module, given, timeout, **more)


def described(event: Any) -> list[Any]:
    """An event as data. In which order pages are removed in one event says nothing."""
    name = type(event).__name__
    return [name, sorted(event.block_hashes) if name == "BlockRemoved" else repr(event)]


class Failing:
    """An index of which some calls raise."""

    def __init__(self, index: Any, every: dict[str, int], raised: dict[str, int]) -> None:
        self._index, self._every, self._raised = index, every, raised
        self._calls = dict.fromkeys(every, 0)

    def __getattr__(self, name: str) -> Any:
        if name in self._every:
            self._calls[name] += 1
            if self._calls[name] % self._every[name] == 0:
                self._raised[name] = self._raised.get(name, 0) + 1
                msg = f"{name} fails for the test"
                raise RuntimeError(msg)
        return getattr(self._index, name)


class Talk:
    """A conversation: turns that follow from its seed and the model's replies alone."""

    def __init__(self, job: Job, number: int, heads: list[list[int]]) -> None:
        self._rng = Random(f"{job.seed} {number}")
        self._heads = heads
        self._left = job.turns
        self._ids = list(self._rng.choice(heads))
        keys = [(None, None)] * 5 + [("a", None), (None, "a"), ("a", "a")]
        self.extra, self.salt = self._rng.choice(keys)
        self.custom = {"kvtrie": {"session": f"talk {number}"}} if job.settings else None
        self.tokens: list[list[int]] = []
        self.cached: list[int] = []
        self.seen: list[list[int]] = []
        """Prompts with their replies."""
        self.request: Any = None
        self.to_abort = False
        self.steps_to_abort: int | None = None

    def next(self) -> tuple[list[int], int] | None:
        """The next prompt and the length of its reply; None after the last turn."""
        rng = self._rng
        if not self._left:
            return None
        self._left -= 1
        if len(self._ids) > 700 or rng.random() < 0.15:
            self._ids = list(rng.choice(self._heads))
        elif rng.random() < 0.3:
            cut = rng.randrange(len(self._ids))
            del self._ids[cut : cut + rng.randrange(60)]
        self._ids += words(rng, rng.randrange(1, 100))
        self.to_abort = rng.random() < 0.1
        self.steps_to_abort = rng.randrange(12) if self.to_abort else None
        return self._ids, rng.choice((2, 10, 30, 60))

    def ended(self) -> None:
        # Whether it was aborted in time depends on the other requests.
        reply = [] if self.to_abort else list(self.request.output_ids)
        self.tokens.append(reply)
        self.cached.append(self.request.cached_tokens)
        self._ids = self._ids + reply
        self.seen.append(self._ids)
        self.request = None


def words(rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


class Server:
    """The scheduler, stepped by hand."""

    def __init__(self, job: Job) -> None:
        import torch  # noqa: PLC0415
        from sglang.srt.managers import scheduler  # noqa: PLC0415
        from sglang.srt.managers.scheduler import (  # noqa: PLC0415
            Scheduler,
            SpawnRanks,
            publish,
            spawn_world_rank,
        )
        from sglang.srt.plugins import load_plugins  # noqa: PLC0415
        from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415

        torch.set_num_threads(1)
        # SGLang reads them from the environment when it is imported.
        vars(scheduler).update(TEST_RETRACT=job.retract, TEST_RETRACT_INTERVAL=23)
        load_plugins()
        if job.backend == "paged":
            _register_paged()
        settings: dict[str, Any] = {
            "model_path": job.model,
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.6,
            "max_total_tokens": job.num_slots,
            "page_size": job.page_size,
            "dtype": "float32",
            "watchdog_timeout": 30000,
            "skip_tokenizer_init": True,
            "radix_cache_backend": job.backend,
            "chunked_prefill_size": 256,
            "max_running_requests": 8,
            "schedule_policy": job.policy,
            "log_level": "error",
        }
        args = ServerArgs(**settings | job.overrides)
        ports = PortArgs.init_new(args)
        ranks = SpawnRanks(
            world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0
        )
        publish(args, role="scheduler", ranks=ranks)
        self.scheduler: Any = Scheduler(args, ports)
        self.cache = self.scheduler.tree_cache
        self.evicted = 0
        evict = self.cache.evict

        def counting(params: Any) -> Any:
            done = evict(params)
            self.evicted += done.num_tokens_evicted
            return done

        self.cache.evict = counting
        self.events: list[list[Any]] = []
        self.published = 0
        take = self.cache.take_events

        def reading() -> Any:
            taken = take()
            self.events += map(described, taken)
            for event in taken:
                sign = 1 if type(event).__name__ == "BlockStored" else -1
                self.published += sign * len(getattr(event, "block_hashes", ()))
            return taken

        self.cache.take_events = reading

    def add(
        self,
        name: str,
        ids: list[int],
        new: int,
        extra: str | None = None,
        salt: str | None = None,
        custom: dict[str, Any] | None = None,
    ) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            max_new_tokens=new, temperature=0.0, ignore_eos=True, custom_params=custom
        )
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=name,
            input_text="",
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=extra,
            cache_salt=salt,
        )
        self.scheduler.process_input_requests([request])
        return next(one for one in self.scheduler.waiting_queue if one.rid == name)

    def abort(self, name: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415

        self.scheduler.abort_request(AbortReq(rid=name))

    def known(self) -> set[int]:
        """Requests that wait or run; one that was aborted while it waited is neither."""
        one = self.scheduler
        batches = [batch for batch in (one.running_batch, one.last_batch) if batch]
        requests = [*one.waiting_queue, *(request for batch in batches for request in batch.reqs)]
        return {id(request) for request in [*requests, one.chunked_req]}

    def step(self) -> None:
        one = self.scheduler
        plan = one.get_next_batch_to_run(running_batch=one.running_batch, last_batch=one.last_batch)
        one.running_batch, batch = plan.running_batch, plan.batch_to_run
        one.cur_batch_for_debug = batch
        if batch:
            one.process_batch_result(batch, one.run_batch(batch))
        else:
            one._sched_idled = True
            one.on_idle()
        one.last_batch = batch


def _register_paged() -> None:
    """SGLang's own cache with a node for each page.

    Its nodes are runs of pages: it evicts whole leaves, and a match that ends in the middle of a
    node makes all of it recent. With a node for each page both are by page, as in kvtrie.
    """
    from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415

    class Paged(RadixCache):
        def _insert_helper(self, *args: Any, **keywords: Any) -> Any:
            known, node = super()._insert_helper(*args, **keywords)
            while len(node.key) > self.page_size:
                front = self._split_node(node.key, node, self.page_size)
                front.last_access_time = node.last_access_time
            return known, node

    register_radix_cache_backend("paged", lambda context: Paged(context.params))


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY  # noqa: PLC0415

    return {
        sample.labels["call"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "sglang:kvtrie_failures_total"
    }


def _main(job: Job) -> Outcome:
    server = Server(job)
    raised: dict[str, int] = {}
    if job.fail:
        server.cache._index = Failing(server.cache._index, job.fail, raised)
    rng = Random(job.seed)
    heads = drawn_heads(rng)
    talks = [Talk(job, number, heads) for number in range(job.talks)]
    met = serve(server, talks, rng, 1000 * job.turns)
    cache, pool = server.cache, server.scheduler.token_to_kv_pool_allocator
    return Outcome(
        tokens=[reply for talk in talks for reply in talk.tokens],
        cached=[count for talk in talks for count in talk.cached],
        aborted=met["aborted"],
        retracted=met["retracted"],
        chunked=met["chunked"],
        evicted=server.evicted,
        cache=type(cache).__name__,
        free=pool.available_size(),
        evictable=cache.evictable_size(),
        protected=cache.protected_size(),
        size=pool.size,
        counts=dict(getattr(cache, "counts", {})),
        raised=raised,
        events=server.events,
        metrics=_metrics(),
        approximate=getattr(cache, "num_approximate", 0),
        published=server.published,
        labelled=cache._index.stats().approximate if hasattr(cache, "_index") else 0,
    )


def drawn_heads(rng: Random) -> list[list[int]]:
    """What conversations begin with."""
    return [words(rng, rng.randrange(60, 300)) for _ in range(4)]


def serve(server: Server, talks: list[Talk], rng: Random, max_steps: int) -> dict[str, int]:
    """Lead conversations side by side to their ends; returns what happened, counted."""
    waiting = list(talks)
    aborted = retracted = chunked = 0
    for step in range(max_steps):
        for talk in rng.sample(waiting, min(len(waiting), rng.randrange(3))):
            waiting.remove(talk)
            if (turn := talk.next()) is not None:
                name = f"request-{step}-{talks.index(talk)}"
                talk.request = server.add(name, *turn, talk.extra, talk.salt, talk.custom)
        running = [one for one in talks if one.request is not None]
        if not running and not waiting:
            break
        for talk in running:
            if talk.steps_to_abort is not None:
                talk.steps_to_abort -= 1
                if talk.steps_to_abort < 0:
                    talk.steps_to_abort = None
                    server.abort(talk.request.rid)
                    aborted += 1
        server.step()
        chunked += server.scheduler.chunked_req is not None
        known = server.known()
        for talk in running:
            if talk.request.finished() or id(talk.request) not in known:
                retracted += talk.request.retraction_count
                talk.ended()
                waiting.append(talk)
    else:
        msg = f"no end: {len(server.scheduler.waiting_queue)} requests wait"
        raise RuntimeError(msg)
    server.step()
    return {"aborted": aborted, "retracted": retracted, "chunked": chunked}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_main(Job(**json.loads(sys.argv[1]))))) + "\n")
    sys.stdout.flush()
    os._exit(0)
