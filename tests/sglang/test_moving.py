"""KV after an edit, inside SGLang's scheduler and model runner on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.sglang.engine import Job, run, scheduled
from tests.vllm import models
from tests.vllm.chat import Chat

import kvtrie
from kvtrie.demo import load_conversations
from kvtrie.engines.transformers import Generator
from kvtrie.record.reader import Log

UNCHECKED = '{"gate": "unchecked"}'
GAPS = '{"gate": "unchecked", "gaps": true}'
ROOT = Path(__file__).parents[2]
REAL = ROOT / "target" / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("models") / "llama"))


def edited(what: str, job: Job) -> Any:
    return scheduled(job, "tests.sglang.edited", what)


def balanced(found: dict[str, Any]) -> None:
    assert found["counts"] == {}
    assert (found["lost"], found["protected"]) == (0, 0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_cut(model: str, page_size: int) -> None:
    found = edited("one", Job(model, page_size=page_size, settings=UNCHECKED))
    head, reasoning, rest, reply = found["lengths"]
    # The last token of a reply has no KV, and a page that is not full is not cached.
    source = (head + reasoning + rest + reply - 1) // page_size * page_size
    assert found["moved"]["cached"] == (source - reasoning) // page_size * page_size
    exact = found["exact"]["cached"]
    assert exact == head // page_size * page_size
    # The first layer has seen the tokens alone, so there only rounding differs; later ones differ.
    (first, *_, last) = found["apart"]
    assert first[0] <= 1e-4
    assert first[1] <= 1e-5
    assert last[1] > 1e-3
    assert found["again"]["cached"] > found["moved"]["cached"]
    assert found["again apart"][0][0] <= 1e-4
    # The exact request has computed all of it, and others find that, and nothing else.
    assert found["other talk"]["cached"] > exact
    assert found["other salt"]["cached"] == 0
    assert found["next"]["cached"] >= found["again"]["cached"]
    assert found["approximate"] > 0
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_several_cuts_with_new_text_in_between(model: str, page_size: int) -> None:
    found = edited("several", Job(model, page_size=page_size, settings=GAPS))
    (first, second, last), length = found["new"], found["length"]
    expected = (length - last) // page_size * page_size - first - second
    assert found["one pass"]["cached"] == found["passes"]["cached"] == expected
    # One pass with a row for each gap; both rows read what the other wrote in the same layer.
    assert found["rows"] == [2]
    assert max(max(pair) for pair in found["passes apart"]) <= 1e-4
    assert found["one pass"]["reply"] == found["passes"]["reply"]
    assert found["exact"]["cached"] == 0
    assert found["apart"][0][0] <= 1e-4
    assert found["apart"][-1][1] > 1e-3
    balanced(found)


def test_without_the_setting_reuse_ends_at_the_first_gap(model: str) -> None:
    found = edited("several", Job(model, settings=UNCHECKED))
    assert found["one pass"]["cached"] == 64 + 100
    assert found["rows"] == []
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_small_pool(model: str, page_size: int) -> None:
    job = Job(model, page_size=page_size, num_slots=1800, talks=5, turns=8, settings=UNCHECKED)
    found = edited("many", job)
    balanced(found)
    assert found["approximate"] > 1000
    assert found["evicted"] > 1000
    alone = edited("many", replace(job, settings=""))
    assert (alone["approximate"], alone["indexed"]) == (0, 0)
    assert sum(found["cached"]) > sum(alone["cached"])


@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_requests_in_a_small_pool(model: str, page_size: int) -> None:
    """Chunks, retraction, aborts, salts and gaps at once, under SGLang's strict check."""
    job = Job(model, page_size=page_size, num_slots=2600, turns=8, retract=True, settings=GAPS)
    found = run(job)
    assert found.counts == {}
    assert found.protected == 0
    assert found.free + found.evictable == found.size
    assert found.approximate > 300
    assert min(found.evicted, found.chunked, found.retracted, found.aborted) > 2


def test_events_are_of_exact_pages_alone(model: str) -> None:
    # Nobody listens.
    events = {"kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://events"}'}
    job = Job(model, page_size=4, num_slots=2600, turns=8, settings=GAPS, overrides=events)
    found = run(job)
    assert found.counts == {}
    assert found.labelled > 10
    assert found.published == found.evictable // 4 - found.labelled > 100


@pytest.mark.parametrize("name", ["lookup", "plan", "insert", "take_freed"])
def test_calls_of_the_index_that_fail(model: str, name: str) -> None:
    job = Job(model, page_size=4, num_slots=1800, talks=5, turns=8, fail={name: 7}, settings=GAPS)
    found = edited("many", job)
    assert found["raised"][name] > 5
    assert found["counts"]
    assert (found["lost"], found["protected"]) == (0, 0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_abort_after_any_number_of_steps(model: str, page_size: int) -> None:
    """Before its copies, between its chunks, and after its first token."""
    found = edited("aborts", Job(model, page_size=page_size, settings=GAPS))
    balanced(found)
    assert found["aborted"][0] == 0
    assert set(found["aborted"][1:]) == {found["last"]}
    assert found["last"] > 300


def test_copies_that_fail_give_their_slots_back(model: str) -> None:
    found = edited("copies", Job(model, settings=GAPS))
    assert found["raised"] == {"copy": 4}
    assert found["counts"] == {"_loaded": 2}
    assert (found["lost"], found["protected"]) == (0, 0)
    assert found["cached"] == [64, 264, 64, 264]


def test_shadow_mode_counts_and_moves_nothing(model: str, tmp_path: Path) -> None:
    job = Job(model, settings=GAPS)
    moved = edited("several", job)
    log = tmp_path / "kvtrie.log"
    settings = json.loads(GAPS) | {"shadow": True, "record": {"path": str(log)}}
    found = edited("several", replace(job, settings=json.dumps(settings)))
    balanced(found)
    # Each edited prompt finds its first tokens, as without kvtrie's gate.
    assert found["one pass"]["cached"] == found["passes"]["cached"] == 64
    assert (found["approximate"], found["indexed"], found["rows"]) == (0, 0, [])
    first, *_ = [one.would for one in Log(log) if one.would is not None and one.would.moved]
    assert first.exact + first.moved == moved["one pass"]["cached"]
    assert first.computed == found["length"] - moved["one pass"]["cached"]
    assert first.after_gaps > 0
    assert found["would"]["moved"] >= 2 * first.moved


def test_requests_are_recorded_with_what_they_reused(model: str, tmp_path: Path) -> None:
    log = tmp_path / "kvtrie.log"
    settings = json.loads(GAPS) | {"record": {"path": str(log), "content": "tokens"}}
    found = edited("several", Job(model, settings=json.dumps(settings)))
    balanced(found)
    requests = list(Log(log))
    assert len(requests) == 5
    assert len({one.space for one in requests}) == 3
    original, moved, *_ = requests
    assert original.reused == ()
    assert sum(end - start for start, end, _ in moved.reused) == found["one pass"]["cached"]
    assert {kind for *_, kind in moved.reused} == {"exact", "moved"}
    assert moved.reused[0] == (0, 64, "exact")
    assert moved.num_prompt == found["length"]
    assert moved.tokens is not None
    assert moved.tokens[moved.num_prompt :].tolist() == found["one pass"]["reply"]
    assert 0 < (moved.first_token or 0) <= moved.took
    assert moved.ended == "length"


def real_prompts() -> list[list[int]]:
    """A conversation turn by turn: each prompt, and then all that its reply leaves in the cache.

    The template drops the reasoning of earlier turns.
    """
    chat = Chat(transformers.AutoTokenizer.from_pretrained(REAL))
    (conversation,) = load_conversations(ROOT / "tools" / "real_conversation.jsonl")
    history: list[dict[str, Any]] = []
    prompts = []
    for turn in conversation.turns():
        history += turn.given
        prompts.append(chat.prompt(history))
        reply = conversation.messages[len(history)]
        said = f"<think>\n{reply.get('reasoning_content', '')}\n</think>\n\n{reply['content']}"
        prompts.append(chat.prompt(history, reply=f"{said}<|im_end|>\n"))
        history.append(reply)
    return prompts


def embedded(prompts: list[list[int]], **options: Any) -> list[int]:
    """Of each prompt, how many tokens the embedded engine does not compute."""
    torch.set_num_threads(2)
    engine = Generator.from_pretrained(
        REAL, num_blocks=8192, block_size=1, dtype="float32", **options
    )
    done = [
        engine.generate(ids, max_new_tokens=1, session="talk", ignore_eos=True) for ids in prompts
    ]
    return [one.usage.exact + one.usage.moved for one in done]


@pytest.mark.skipif(not REAL.is_dir(), reason="SmolLM2-135M-Instruct is not there: `make models`")
@pytest.mark.parametrize("share", [None, 0.2])
def test_a_real_model_reuses_what_the_embedded_engine_does(share: float | None) -> None:
    prompts = real_prompts()
    policy: dict[str, Any] = {} if share is None else {"recompute_share": share}
    settings = json.dumps({"gate": "unchecked", "gaps": True, "policy": policy})
    overrides = {"skip_tokenizer_init": False, "chunked_prefill_size": 8192}
    job = Job(
        str(REAL.resolve()),
        num_slots=8192,
        overrides=overrides,
        settings=settings,
        prompts=prompts,
    )
    found = edited("given", job)
    wanted = kvtrie.ReusePolicy(approximate=True, min_run=16, **policy)
    assert found["cached"] == embedded(prompts, policy=wanted, gate="unchecked")
    balanced(found)
    assert found["approximate"] > 100
