"""KV after an edit, inside SGLang's scheduler and model runner on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.cleared import gate, kind
from tests.sglang.engine import Job, run, scheduled
from tests.vllm import chat, models
from tests.vllm.chat import Chat
from workloads.ceiling import Ceiling
from workloads.registry import WORKLOADS

import kvtrie
from kvtrie import gates
from kvtrie.demo import load_conversations
from kvtrie.engines.transformers import Generator
from kvtrie.gates.boxes import Box, Range
from kvtrie.models.fingerprint import checkpoint_digest, directory_template_id
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


@pytest.mark.parametrize("name", ["match", "pin", "plan", "insert", "take_freed"])
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


@pytest.mark.parametrize("settings", [UNCHECKED, GAPS])
def test_a_match_that_became_exact_meanwhile_is_a_miss(model: str, settings: str) -> None:
    found = edited("meanwhile", Job(model, settings=settings))
    assert found["promised"] == 200
    assert (found["count"], found["is_kept"]) == (0, True)
    # No failure is counted, and no slot is lost.
    balanced(found)


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
    # Of each prompt, what was not reused has a reason.
    for one in requests:
        reused = sum(end - start for start, end, _ in one.reused)
        assert sum(one.computed.values()) == one.num_prompt - reused
    assert original.computed == {"first_seen": original.num_prompt}
    new = found["new"]
    assert moved.computed == {"diverged": new[0] + new[1], "new": new[2]}
    other_salt = requests[2].computed
    assert other_salt == {"other_salt": original.num_prompt}
    # The last one asks for exact reuse, in a namespace that has nothing.
    assert requests[4].computed == {"other_salt": found["length"]}


def test_reasons_are_in_the_metrics(model: str) -> None:
    """Without `"gaps"`, reuse ends at the first gap."""
    job = Job(model, page_size=16, settings=UNCHECKED, overrides={"enable_metrics": True})
    found = edited("several", job)
    balanced(found)
    computed = found["computed"]
    assert computed["after_gap other"] > 0
    assert computed["new other"] > 0
    total = sum(computed.values())
    reused = sum(found[name]["cached"] for name in ("one pass", "passes", "exact"))
    originals = 2 * (64 + 30 + 100 + 25 + 90 + 60)
    assert total == originals + 3 * found["length"] - reused
    assert found["metrics"] == computed


@pytest.mark.parametrize("shadow", [False, True])
def test_of_what_was_interrupted_is_said_what_happened(
    model: str, tmp_path: Path, shadow: bool
) -> None:
    log = tmp_path / "kvtrie.log"
    settings = json.loads(GAPS) | {"shadow": shadow, "record": {"path": str(log)}}
    found = edited("interrupted", Job(model, settings=json.dumps(settings)))
    balanced(found)
    # Of the aborted prompt only two chunks were computed.
    assert found["done"] == 512
    assert found["aborted"] == {"first_seen other": 512}
    # The requests that came back are counted as they were computed first.
    assert found["put back"] > 0
    assert found["replies"] == [40, 40]
    assert found["computed"] == {"first_seen other": 712}
    requests = list(Log(log))
    assert [one.ended for one in requests] == ["aborted", "length", "length"]
    assert [dict(one.computed) for one in requests] == [{"first_seen": n} for n in (512, 100, 100)]
    if shadow:
        wanted = [one.num_prompt for one in requests]
        assert [one.would.computed for one in requests if one.would] == wanted


def agent_run(folder: Path) -> tuple[str, list[int], list[int]]:
    """W11: an agent's run, and the prompt of which its template dropped all reasoning (Qwen3's).

    With a tiny model that has a token for each id.
    """
    made = WORKLOADS["W11"].build(text="worded")
    ids, numbers = np.unique(np.concatenate([made.cached, made.prompt]), return_inverse=True)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=len(ids) + 3,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    numbers = numbers + 3
    count = len(made.cached)
    return str(folder), numbers[:count].tolist(), numbers[count:].tolist()


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_agent_run_without_its_reasoning_is_hardly_computed(
    tmp_path: Path, page_size: int
) -> None:
    """95 % of what is not new, with `rotated` and an unchecked gate."""
    model, run, prompt = agent_run(tmp_path / "llama")
    assert len(prompt) > 6000
    known = Ceiling([run], block_size=page_size, min_run=16).of(prompt)
    job = Job(
        model,
        page_size=page_size,
        num_slots=32_768,
        settings=GAPS,
        prompts=[run, prompt],
        overrides={"chunked_prefill_size": 16_384, "context_length": 16_384},
    )
    found = edited("given", job)
    first, second = found["cached"]
    assert first == 0
    # Exact reuse ends where the first reasoning was.
    assert known.prefix < 0.5 * len(prompt)
    assert second >= 0.95 * known.most
    balanced(found)


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


def engine(**options: Any) -> Generator:
    torch.set_num_threads(2)
    return Generator.from_pretrained(
        REAL, num_blocks=8192, block_size=1, dtype="float32", **options
    )


def embedded(prompts: list[list[int]], **options: Any) -> tuple[list[int], set[float]]:
    """Of each prompt, how many tokens the embedded engine does not compute.

    And which shares of moved runs their policies recompute.
    """
    made = engine(**options)
    cached, shares = [], set()
    for ids in prompts:
        done = made.generate(ids, max_new_tokens=1, session="talk", ignore_eos=True)
        cached.append(done.usage.exact + done.usage.moved)
        if done.usage.moved:
            shares.add(done.decision.policy.recompute_share)
    return cached, shares


def ladder(path: Path) -> str:
    """A gate of the real model: one cut may be rotated alone, more only with recomputed fronts."""
    rotated = kvtrie.ReusePolicy(approximate=True, min_run=16)
    one_cut = kind("one cut", Box(cuts=Range(0, 1)))
    policies = {
        "rotated": (rotated, (one_cut,)),
        "rotated+fronts20": (rotated.replace(recompute_share=0.2), (kind("any edit"),)),
    }
    space = engine().namespace()
    gate(
        model=space.model,
        rope=space.rope,
        measured=tuple(gates.Measured(name, *one) for name, one in policies.items()),
        checkpoint=checkpoint_digest(REAL),
        template=directory_template_id(REAL),
        kv_dtype="float32",
        data="talk",
    ).write(path)
    return str(path)


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
    cached, _ = embedded(prompts, policy=wanted, gate="unchecked")
    assert found["cached"] == cached
    balanced(found)
    assert found["approximate"] > 100


@pytest.mark.skipif(not REAL.is_dir(), reason="SmolLM2-135M-Instruct is not there: `make models`")
def test_under_a_gates_ladder_a_real_model_computes_what_the_embedded_engine_does(
    tmp_path: Path,
) -> None:
    """Without a policy: for each prompt, the cheapest that the gate clears for its edit."""
    prompts, path = real_prompts(), ladder(tmp_path / "gate.json")
    job = Job(
        str(REAL.resolve()),
        num_slots=8192,
        overrides={"skip_tokenizer_init": False, "chunked_prefill_size": 8192},
        settings=json.dumps({"gate": path, "gaps": True}),
        prompts=prompts,
    )
    found = edited("given", job)
    cached, shares = embedded(prompts, gate=gates.read(path))
    assert found["cached"] == cached
    balanced(found)
    assert found["approximate"] > 100
    # The policies of plans that move something are rungs of the ladder.
    assert shares
    assert shares <= {0.0, 0.2}


def test_settings_that_the_operator_left_out_are_those_that_sglang_takes(tmp_path: Path) -> None:
    """The chat format of the model's tokenizer, and a chunk of SGLang's size."""
    left_out = {"skip_tokenizer_init": False, "chunked_prefill_size": None}
    job = Job(str(chat.model(tmp_path / "model")), settings=GAPS, overrides=left_out)
    found = edited("settings", job)
    assert found == {"boundary": "user", "at start": 4096, "in steps": [4096]}
