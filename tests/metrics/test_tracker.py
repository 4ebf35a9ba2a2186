"""A tracker's metrics, next to counts of its calls and answers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tests.metrics.scraped import counters, scrape, total

import kvtrie
from kvtrie.metrics import Collector
from kvtrie.router.answer import KINDS

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
PARAMS = {"do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "d"}
PARAMS |= {"remote_request_id": "r", "remote_host": "10.0.0.1", "remote_port": 5600}


def seq(*ids: int) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, NS)


def test_each_cause_of_a_drop() -> None:
    now = [0.0]
    tracker = kvtrie.TurnTracker(ttl=10, max_conversations=3, clock=lambda: now[0])
    collector = Collector(tracker=tracker)

    def dropped() -> dict[str, float]:
        series = scrape(collector)
        causes = ("expired", "room", "replaced", "forgotten")
        return {
            cause: total(series, "kvtrie_tracker_dropped_total", cause=cause) for cause in causes
        }

    for name in "abc":
        tracker.keep(seq(1, 2, ord(name)), num_computed=2, conversation=name)
    assert dropped() == {"expired": 0, "room": 0, "replaced": 0, "forgotten": 0}
    tracker.keep(seq(1, 2, ord("a"), 9), num_computed=3, conversation="a")
    assert dropped()["replaced"] == 1
    tracker.keep(seq(5, 6), num_computed=2, conversation="d")
    assert dropped()["room"] == 1
    tracker.forget("d", NS)
    assert dropped()["forgotten"] == 1
    now[0] = 20.0
    with pytest.raises(kvtrie.StaleHandleError, match="expired"):
        tracker.compare(seq(1, 2), conversation="a")
    with pytest.raises(kvtrie.StaleHandleError, match="unknown"):
        tracker.compare(seq(1, 2), conversation="zz")
    assert dropped() == {"expired": 2, "room": 1, "replaced": 1, "forgotten": 1}
    series = scrape(collector)
    assert total(series, "kvtrie_tracker_kept_total") == 5
    assert total(series, "kvtrie_tracker_histories") == 0
    unknown = "kvtrie_tracker_unknown_total"
    assert total(series, unknown, cause="expired") == total(series, unknown, cause="unknown") == 1


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_what_happened(  # noqa: PLR0915 - one run, all its figures
    seed: int,
) -> None:
    rng = Random(seed)
    now = [0.0]
    tracker = kvtrie.TurnTracker(
        ttl=50, max_tokens=2_000, max_conversations=12, block_size=2, clock=lambda: now[0]
    )
    collector = Collector(tracker=tracker)
    answers: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    num_kept = prompt = exact = approximate = transfers = 0
    texts: list[list[int]] = [[rng.randrange(9) for _ in range(80)]]
    policy = kvtrie.ReusePolicy(scope="namespace", min_run=16)
    before = scrape(collector)
    for step in range(500):
        # Four times nobody asks for longer than a history lives, and then somebody new does.
        newcomer = step % 120 == 119
        now[0] += 51 if newcomer else rng.random()
        base = rng.choice(texts)
        cut = rng.randrange(1, len(base) + 1)
        skip = rng.choice([0, 0, 7])
        ids = [*base[:cut], *base[cut + skip :], *(rng.randrange(9) for _ in range(5))][-150:]
        conversation = None if newcomer else rng.choice([None, *"abcdefgh"])
        act = 1.0 if newcomer else rng.random()
        if act < 0.3:
            num_computed = rng.randrange(len(ids))
            blocks = list(range(1, -(-len(ids) // 2) + 2))
            returned = PARAMS | {
                "remote_num_tokens": num_computed,
                "remote_block_ids": [blocks],
            }
            tracker.keep(
                seq(*ids),
                num_computed=num_computed,
                conversation=conversation,
                source=kvtrie.Imported(len(ids) // 3) if rng.random() < 0.5 else kvtrie.COMPUTED,
                spans=[kvtrie.Span(3, 6, "reasoning")] if len(ids) > 6 else (),
                kv_transfer_params=rng.choice([None, returned]),
            )
            num_kept += 1
            texts = [*texts[-10:], ids]
        elif act < 0.33 and conversation is not None:
            try:
                tracker.forget(conversation, NS)
            except kvtrie.StaleHandleError as error:
                unknown["expired" if "has expired" in str(error) else "unknown"] += 1
        else:
            take = newcomer or rng.random() < 0.8
            try:
                answer = tracker.compare(
                    seq(*ids),
                    conversation=conversation,
                    policy=rng.choice([kvtrie.EXACT_ONLY, policy]),
                    alias=rng.random() < 0.3,
                    take=take,
                )
            except kvtrie.StaleHandleError as error:
                unknown["expired" if "has expired" in str(error) else "unknown"] += 1
            else:
                if take:
                    answers[answer.kind] += 1
                    prompt += len(ids) if answer.send is None else len(answer.send)
                    exact += answer.num_exact
                    approximate += answer.num_tokens - answer.num_exact
                    transfers += answer.kv_transfer_params is not None
        series = scrape(collector)
        assert all(series[key] >= value for key, value in counters(before).items())
        before = series
    for kind in KINDS:
        assert total(before, "kvtrie_tracker_answers_total", answer=kind) == answers[kind]
    assert len(answers) >= 4
    for cause in ("expired", "unknown"):
        assert total(before, "kvtrie_tracker_unknown_total", cause=cause) == unknown[cause] > 0
    assert total(before, "kvtrie_tracker_prompt_tokens_total") == prompt
    tokens = "kvtrie_tracker_tokens_total"
    assert total(before, tokens, **{"class": "exact"}) == exact > 0
    assert total(before, tokens, **{"class": "approximate"}) == approximate > 0
    assert total(before, "kvtrie_tracker_transfers_total") == transfers > 0
    assert total(before, "kvtrie_tracker_kept_total") == num_kept
    num_dropped = total(before, "kvtrie_tracker_dropped_total")
    assert total(before, "kvtrie_tracker_histories") == len(tracker) == num_kept - num_dropped
    assert total(before, "kvtrie_tracker_conversations") == tracker.num_conversations
    assert total(before, "kvtrie_tracker_history_tokens") == tracker.num_tokens
    for cause in ("expired", "room", "replaced"):
        assert total(before, "kvtrie_tracker_dropped_total", cause=cause) > 0
