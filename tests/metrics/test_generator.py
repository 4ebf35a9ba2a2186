"""A generator's metrics, next to what its model, its pool and its requests show."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.metrics.scraped import counters, scrape, total

import kvtrie
from kvtrie.engines._coding import KVCoding
from kvtrie.engines._scheduler import Scheduler
from kvtrie.metrics import Collector
from kvtrie.pool import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

    from kvtrie.engines.transformers import Generator, Request

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Models = Callable[[str], Any]

WIDE = kvtrie.ReusePolicy(scope="namespace", min_run=16)
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}


class Seen:
    """Counts what happens where it happens: in the model, the pool and the scheduler."""

    def __init__(self, generator: Generator, patch: pytest.MonkeyPatch) -> None:
        self.num_forward = self.num_copied = self.num_preempted = 0
        model: Any = generator.model
        forward, apply, preempt = model.forward, KVPool.apply, Scheduler._preempt

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_forward += kwargs["input_ids"].numel()
            return forward(*args, **kwargs)

        def copying(pool: KVPool, moves: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_copied += int(moves["num_tokens"].sum())
            return apply(pool, moves, *args, **kwargs)

        def preempting(*args: Any) -> None:
            self.num_preempted += 1
            preempt(*args)

        # The check of sparse passes runs the model, too.
        assert generator._scheduler._runner.is_sparse in (True, False)
        patch.setattr(model, "forward", counted)
        patch.setattr(KVPool, "apply", copying)
        patch.setattr(Scheduler, "_preempt", preempting)


@pytest.mark.parametrize("num_blocks", [200, 34], ids=["roomy", "preempting"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_figure_is_what_happened(  # noqa: PLR0915 - one run, all its figures
    num_blocks: int, seed: int, make: Make, drain: Callable[[Generator], None]
) -> None:
    rng = random.Random(seed)
    generator = make(num_blocks=num_blocks, gate="unchecked", prefill_chunk=9)
    collector = Collector(generator=generator)
    texts = [[rng.randrange(3, 60) for _ in range(60)] for _ in range(3)]
    requests: list[Request] = []
    before = scrape(collector)
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(generator, patch)
        for _ in range(160):
            act = rng.random()
            if act < 0.25:
                text = rng.choice(texts)
                first, last = sorted(rng.sample(range(len(text)), 2))
                prompt = text[:first] + text[last:] + [rng.randrange(3, 60)]
                policy = rng.choice([kvtrie.EXACT_ONLY, WIDE, WIDE.replace(recompute_first=2)])
                requests.append(generator.submit(prompt, policy=policy, **OPTIONS))
            elif act < 0.3 and requests:
                generator.cancel(rng.choice(requests))
            else:
                generator.step()
            if act > 0.9:
                now = scrape(collector)
                assert all(now[key] >= value for key, value in counters(before).items())
                assert total(now, "kvtrie_requests_running") == generator.num_running
                assert total(now, "kvtrie_requests_waiting") == generator.num_waiting
                before = now
        drain(generator)
    now = scrape(collector)
    admitted = [request for request in requests if request.usage.prompt]
    name = "kvtrie_prompt_tokens_total"
    assert total(now, name, reuse="exact") == sum(one.usage.exact for one in admitted) > 0
    assert total(now, name, reuse="moved") == sum(one.usage.moved for one in admitted) > 0
    computed = sum(one.usage.computed for one in admitted)
    assert total(now, name, reuse="recomputed") == computed > 0
    assert total(now, "kvtrie_computed_tokens_total") == computed
    assert total(now, "kvtrie_forward_tokens_total") == seen.num_forward > computed
    assert total(now, "kvtrie_preemptions_total") == seen.num_preempted
    assert bool(seen.num_preempted) == (num_blocks < 100)
    copied = [total(now, f"kvtrie_tokens_{how}_total") for how in ("exact", "moved")]
    if not seen.num_preempted:
        # A preempted request copies again, which is no reuse.
        assert sum(copied) == seen.num_copied
    assert sum(copied) <= seen.num_copied
    tokens = sum(len(request.tokens) for request in requests)
    assert total(now, "kvtrie_generation_tokens_total") == tokens
    ends = Counter(request.finish_reason for request in requests)
    for how in ("stop", "length", "cancelled", "error"):
        assert total(now, "kvtrie_requests_total", finish_reason=how) == ends[how]
    assert ends["length"] > 5
    waited = "kvtrie_time_to_first_token_seconds"
    answered = sum(bool(request.tokens) for request in requests)
    assert total(now, f"{waited}_count") == answered
    assert total(now, f"{waited}_bucket", le="+Inf") == answered
    counts, stats = generator.block_counts(), generator.index.stats()
    assert total(now, "kvtrie_free_blocks") == counts.free
    assert total(now, "kvtrie_pool_blocks") == counts.total
    assert total(now, "kvtrie_index_blocks") == counts.indexed
    assert total(now, "kvtrie_index_blocks", **{"class": "approximate"}) == stats.approximate


def test_time_in_phases_is_within_the_time_of_the_requests(make: Make, ids: Ids) -> None:
    generator = make()
    collector = Collector(generator=generator)
    generator.generate(ids(40), **OPTIONS)
    generator.generate(ids(40)[:30], **OPTIONS)
    now = scrape(collector)
    assert total(now, "kvtrie_phases_total", phase="plan") == 2
    assert total(now, "kvtrie_phases_total", phase="copy") == 2
    assert total(now, "kvtrie_phases_total", phase="compute") == 2
    # The first token is of the prompt's pass; the last one is never run.
    assert total(now, "kvtrie_phases_total", phase="decode") == 2 * 5
    for phase in ("plan", "copy", "compute", "decode", "insert"):
        assert 0 < total(now, "kvtrie_phase_seconds_total", phase=phase) < 60


def test_a_request_that_fails_is_counted_once(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make()
    collector = Collector(generator=generator)
    ledger = generator._store.ledger
    store = generator._store

    class Failing:
        """A ledger whose `finish` fails, after the answer's last token."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ledger, name)

        def __contains__(self, item: object) -> bool:
            return item in ledger

        def finish(self, *_: object) -> None:
            raise RuntimeError("injected")

    faulty = type(store)(
        index=store.index,
        allocator=store.allocator,
        pool=store.pool,
        ledger=Failing(),  # type: ignore[arg-type] # a stand-in
        repair=store.repair,
    )
    monkeypatch.setattr(generator, "_store", faulty)
    monkeypatch.setattr(generator._scheduler, "_store", faulty)
    with pytest.raises(RuntimeError, match="injected"):
        generator.generate(ids(9), **OPTIONS)
    now = scrape(collector)
    assert total(now, "kvtrie_requests_total") == 1
    assert total(now, "kvtrie_requests_total", finish_reason="error") == 1


def test_reasons_of_a_generator(make: Make, ids: Ids) -> None:
    prompt = ids(60).tolist()
    generator = make(gate="unchecked", policy=WIDE)
    collector = Collector(generator=generator)

    def computed() -> dict[str, float]:
        found = {
            dict(labels)["reason"]: value
            for (name, labels), value in scrape(collector).items()
            if name == "kvtrie_computed_tokens_total"
        }
        new = {name: value - known.get(name, 0) for name, value in found.items()}
        known.update(found)
        return {name: value for name, value in new.items() if value}

    known: dict[str, float] = {}
    generator.generate(prompt, **OPTIONS)
    assert computed() == {"first_seen": 60}
    edited = [*prompt[:20], *prompt[28:], 7, 8]
    generator.generate(edited, policy=kvtrie.EXACT_ONLY, **OPTIONS)
    assert computed() == {"exact_asked": 32, "new": 2}
    assert generator.generate(edited[4:], **OPTIONS).usage.moved > 0
    assert set(computed()) <= {"new", "diverged", "last_token"}
    generator.generate(prompt, salt="other", **OPTIONS)
    assert computed() == {"other_salt": 60}


def test_elements_that_saturate_are_counted(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [0]
    encode = KVCoding.encode

    def counted(coding: KVCoding, rows: torch.Tensor, layer: int, side: int) -> torch.Tensor:
        # 448 is the largest code; 480 would be the next.
        codes = rows.double() / coding.scales[layer][side]
        seen[0] += int((codes.abs() > (448 + 480) / 2).sum())
        return encode(coding, rows, layer, side)

    def narrow(_model: object, layout: kvtrie.KVLayout, _where: str) -> Any:
        return ((1e-4, 2e-4),) * layout.num_layers

    monkeypatch.setattr(KVCoding, "encode", counted)
    monkeypatch.setattr("kvtrie.engines._coding._of_checkpoint", narrow)
    generator = make(kv_dtype="fp8_e4m3")
    collector = Collector(generator=generator)
    name, before = "kvtrie_saturated_elements_total", 0.0
    assert (name, ()) in scrape(collector)
    for seed in range(3):
        generator.generate(ids(20, seed=seed), **OPTIONS)
        now = total(scrape(collector), name)
        assert now == seen[0] > before
        before = now
    plain = make()
    plain.generate(ids(20), **OPTIONS)
    assert scrape(Collector(generator=plain))[name, ()] == 0


def test_tokens_have_kinds_where_the_template_is_known(
    models: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    from kvtrie.engines.transformers import Generator  # noqa: PLC0415 - torch, as in the fixtures

    generator = Generator(models("llama-gqa"), tokenizer, num_blocks=64, block_size=4)
    collector = Collector(generator=generator)
    done = generator.generate([{"role": "user", "content": "hello there"}], max_new_tokens=2)
    now = scrape(collector)
    # This template is of no known format.
    assert total(now, "kvtrie_prompt_tokens_total", kind="other") == done.usage.prompt


def test_requests_before_the_collector_and_after_its_end_are_not_counted(
    make: Make, ids: Ids
) -> None:
    generator = make()
    generator.generate(ids(9), **OPTIONS)
    running = generator.submit(ids(12), **OPTIONS)
    generator.step()
    collector = Collector(generator=generator)
    while running.status != "finished":
        generator.step()
    assert total(scrape(collector), "kvtrie_requests_total") == 0
    generator.generate(ids(9), **OPTIONS)
    collector.close()
    generator.generate(ids(9), **OPTIONS)
    now = scrape(collector)
    assert total(now, "kvtrie_requests_total") == 1
    assert total(now, "kvtrie_prompt_tokens_total") == 9
    assert total(now, "kvtrie_requests_running") == 0
