"""Approximate reuse: the model sees what the plan says, on every kind of RoPE.

The oracle puts a cache together by hand. Moved KV comes from a pass of the bare model over the
cached text *at the position it is moved to*: RoPE depends on distances only. kvtrie's own rotation
is not used.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tests.byte_tokenizer import byte_tokenizer
from tests.cleared import BAD, GOOD, gate, kind
from tests.engines.architectures import WINDOWS
from transformers import DynamicCache

import kvtrie
from kvtrie import gates
from kvtrie.calibrate._steps import Renderer, Scenario
from kvtrie.engines.transformers import Generator, Planned, Request, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from transformers import PreTrainedModel

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]
    Models = Callable[[str], PreTrainedModel]

# As in test_reuse.py; rotation adds one rounding of K.
TOLERANCE = 1e-4
APPROXIMATE = kvtrie.ReusePolicy(min_run=16, scope="namespace")
ROPE_MODELS = (
    "llama-gqa",
    "llama-yarn",
    "qwen3",
    "gpt-neox",
    "falcon-mqa",
    "mixtral",
    "glm",
    "smollm3",
    "deepseek-v3",
    "phi3-longrope",
    "llama-ntk",
    *WINDOWS,
)


def planned(generator: Generator, prompt: list[int]) -> Any:
    """The segments of the plan that a request for the prompt is about to make."""
    seq = kvtrie.TokenSequence(prompt, generator.namespace())
    with generator.index.plan(seq, APPROXIMATE, keep_last=1, pin=False) as plan:
        return plan.segments.copy()


def rows_at(
    model: PreTrainedModel, text: Sequence[int], delta: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    # Without the config it keeps all rows, of layers with a window too.
    cache = DynamicCache()
    positions = torch.arange(len(text)) + delta
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([list(text)]),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
        )
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def assembled(
    model: PreTrainedModel, text: Sequence[int], prompt: Sequence[int], segments: Any
) -> torch.Tensor:
    """The last row of logits of a prompt, with what a plan reuses taken from one cached text."""
    cache = DynamicCache()
    logits = torch.empty(0)
    with torch.inference_mode():
        for part in segments:
            start, end = int(part["start"]), int(part["end"])
            if part["class"] == 2:
                logits = model(
                    input_ids=torch.tensor([list(prompt[start:end])]),
                    position_ids=torch.arange(start, end).unsqueeze(0),
                    past_key_values=cache,
                    use_cache=True,
                ).logits
                continue
            old = int(part["old_start"])
            for number, (k, v) in enumerate(rows_at(model, text, int(part["delta"]))):
                span = slice(old, old + end - start)
                cache.update(k[:, :, span], v[:, :, span], number)
    return logits[0, -1].float()


def edits(text: list[int], new: list[int]) -> dict[str, list[int]]:
    return {
        "one deletion": text[:30] + text[55:] + new[:5],
        "three deletions": text[:21] + text[30:52] + text[70:90] + text[99:] + new[:3],
        "insertions": text[:17] + new[:6] + text[17:60] + new[6:9] + text[60:] + new[9:12],
        "in another order": new[:2] + text[60:100] + new[2:4] + text[5:45] + new[4:6],
        "nothing before": text[40:] + new[:2],
        "twice": text[8:40] + text[8:40] + new[:1],
    }


@pytest.mark.parametrize("architecture", ROPE_MODELS)
def test_logits_equal_those_of_a_cache_put_together_by_hand(
    architecture: str, make: Make, ids: Ids, models: Models, check_drained: Check
) -> None:
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    for name, prompt in edits(text, new).items():
        generator = make(architecture, num_blocks=128, gate="unchecked")
        generator.generate(text, max_new_tokens=1)
        segments = planned(generator, prompt)
        done = generator.generate(
            prompt, max_new_tokens=3, ignore_eos=True, return_logits=True, policy=APPROXIMATE
        )
        assert done.usage.moved >= 60, name
        assert done.usage.computed <= len(prompt) // 4, name
        assert done.logits is not None
        want = assembled(models(architecture), text, prompt, segments)
        torch.testing.assert_close(done.logits[0], want, atol=TOLERANCE, rtol=0, msg=name)
        check_drained(generator)


@pytest.mark.parametrize("architecture", ["llama-gqa", "deepseek-v3"])
def test_unrotated_keys_would_be_noticed(
    architecture: str, make: Make, ids: Ids, models: Models
) -> None:
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    prompt = edits(text, new)["one deletion"]
    generator = make(architecture, num_blocks=128)
    generator.generate(text, max_new_tokens=1)
    segments = planned(generator, prompt)
    want = assembled(models(architecture), text, prompt, segments)
    segments["delta"] = 0
    assert (assembled(models(architecture), text, prompt, segments) - want).abs().max() > 0.01


def test_a_plain_request_never_sees_approximate_kv(
    make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(num_blocks=128, gate="unchecked"), reference()
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "return_logits": True}
    prompt = edits(text, new)["three deletions"]
    moved = generator.generate(prompt, policy=APPROXIMATE, **options)
    assert moved.usage.moved > 0
    # The same prompt again: the exact prefix alone.
    exact = generator.generate(prompt, **options)
    assert (exact.usage.exact, exact.usage.moved) == (21, 0)
    assert exact.tokens == plain.greedy(prompt, 6)
    want = plain.logits(prompt, exact.tokens)
    torch.testing.assert_close(exact.logits, want, atol=TOLERANCE, rtol=0)
    # Its computed blocks have replaced the approximate entries.
    again = generator.generate(prompt, policy=APPROXIMATE, **options)
    assert again.usage.exact == len(prompt) - 1
    assert again.tokens == exact.tokens
    check_drained(generator)


def test_what_a_request_moved_is_reused_in_place_by_the_next_turn(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    generator = make(num_blocks=128, policy=APPROXIMATE, gate="unchecked")
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    prompt = text[:28] + text[56:]
    first = generator.generate(prompt, max_new_tokens=8, ignore_eos=True)
    second = generator.generate([*prompt, *first.tokens, *new[:5]], max_new_tokens=1)
    # The last token has no KV; whole blocks are in place.
    assert second.usage.exact == 28
    assert second.usage.exact + second.usage.moved >= len(prompt) + 4
    check_drained(generator)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_models_whose_kv_cannot_move_are_refused_by_name(
    architecture: str, make: Make, ids: Ids, check_drained: Check
) -> None:
    with pytest.raises(kvtrie.UnsupportedRopeError, match="Generator: the policy is approximate"):
        make(architecture, policy=APPROXIMATE)
    generator = make(architecture)
    with pytest.raises(kvtrie.UnsupportedRopeError, match="Generator: the policy is approximate"):
        generator.submit(ids(9), policy=APPROXIMATE)
    assert generator.num_waiting == 0
    assert generator.generate(ids(9), max_new_tokens=1).usage.computed == 9
    check_drained(generator)


def test_a_config_that_misstates_its_rope_is_refused(models: Models, ids: Ids) -> None:
    model = models("llama-gqa")
    theta = model.config.rope_parameters["rope_theta"]
    model.config.rope_parameters["rope_theta"] = 500.0
    try:
        generator = Generator(model, num_blocks=16, block_size=4)
        with pytest.raises(kvtrie.UnsupportedRopeError, match="layer 0 at another position"):
            generator.submit(ids(9), policy=APPROXIMATE)
    finally:
        model.config.rope_parameters["rope_theta"] = theta


def test_a_model_that_was_cast_is_refused(ids: Ids) -> None:
    """Its frequencies are rounded with its weights: far tokens would be rotated wrongly."""
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=4096,
    )
    for dtype in (torch.bfloat16, torch.float16):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        Generator(model, num_blocks=16, block_size=4, policy=APPROXIMATE, gate="unchecked")
        cast: Any = transformers.AutoModelForCausalLM.from_config(config)
        generator = Generator(cast.to(dtype).eval(), num_blocks=16, block_size=4)
        with pytest.raises(kvtrie.UnsupportedRopeError, match="load it with dtype="):
            generator.submit(ids(9), policy=APPROXIMATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_latents_do_not_hide_the_order_of_pairs(dtype: torch.dtype, models: Models) -> None:
    config = copy.deepcopy(models("deepseek-v3").config)
    config.initializer_range = 0.02
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.weight.data.fill_(32.0)
    rope = Generator(model, num_blocks=16, block_size=4).pool.rope
    assert rope is not None
    assert [layer.interleaved for layer in rope.layers if layer] == [False, False]


def test_keys_that_are_not_numbers_cannot_be_moved(models: Models) -> None:
    model = copy.deepcopy(models("llama-gqa"))
    weight: Any = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    weight.data.fill_(float("nan"))
    generator = Generator(model, num_blocks=16, block_size=4)
    with pytest.raises(kvtrie.UnsupportedRopeError, match="K of layer 1"):
        generator.submit([5, 6], policy=APPROXIMATE)


def test_a_float64_model_can_be_moved(models: Models) -> None:
    config = copy.deepcopy(models("llama-gqa").config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    assert Generator(model, num_blocks=16, block_size=4, policy=APPROXIMATE).pool.rope is not None


def test_a_context_shorter_than_the_probe(ids: Ids) -> None:
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=24, bos_token_id=1
    )
    generator = Generator(
        transformers.AutoModelForCausalLM.from_config(config).eval(), num_blocks=16, block_size=4
    )
    assert generator.generate(ids(9), max_new_tokens=1).usage.computed == 9
    with pytest.raises(kvtrie.UnsupportedRopeError, match="absolute"):
        generator.submit(ids(9), policy=APPROXIMATE)


def measured(generator: Generator, own: gates.Figures, box: gates.Box | None = None) -> gates.Gate:
    space = generator.namespace()
    return gate(
        kind(own=own, box=box),
        policy=APPROXIMATE,
        model=space.model,
        kv_dtype=space.kv_dtype,
        rope=space.rope,
    )


@pytest.mark.parametrize(("own", "is_cleared"), [(GOOD, True), (BAD, False)])
def test_a_gate_decides_what_a_request_may_reuse(
    own: gates.Figures, is_cleared: bool, make: Make, ids: Ids
) -> None:
    generator = make(num_blocks=128, gate=measured(make(), own))
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    request = generator.submit(
        edits(text, new)["one deletion"], max_new_tokens=1, policy=APPROXIMATE
    )
    assert request.decision.is_cleared == is_cleared
    assert request.decision.policy == (APPROXIMATE if is_cleared else kvtrie.EXACT_ONLY)
    # A policy that takes the index's shortest run means the one that was measured.
    unsaid = generator.submit(
        ids(9), max_new_tokens=1, policy=kvtrie.ReusePolicy(scope="namespace")
    )
    assert unsaid.decision.policy == request.decision.policy
    while request.status != "finished":
        generator.step()
    assert (request.usage.moved > 0) == is_cleared


def test_a_plan_of_a_kind_that_is_not_cleared_is_made_again_exact(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    once = gates.Box(cuts=gates.Range(most=1))
    generator = make(num_blocks=128, gate=measured(make(), GOOD, once), policy=APPROXIMATE)
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    twice = [*text[:20], *text[30:60], *text[75:], *new[:3]]
    refused = generator.generate(twice, max_new_tokens=1)
    assert refused.usage.moved == 0
    assert refused.usage.exact >= 16
    assert not refused.decision.is_cleared
    assert "no edit of this kind was measured (2 cuts" in refused.decision.reason
    allowed = generator.generate(edits(text, new)["one deletion"], max_new_tokens=1)
    assert allowed.usage.moved > 0
    assert allowed.decision.is_cleared
    check_drained(generator)


def test_without_a_policy_each_plan_has_the_cheapest_one_that_the_gate_clears(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    space = make().namespace()
    lax = kvtrie.ReusePolicy(min_run=16)
    once, more = gates.Box(cuts=gates.Range(most=1)), gates.Box(cuts=gates.Range(above=1, most=2))
    own = gates.Gate(
        space.model,
        space.kv_dtype,
        space.rope,
        gates.Thresholds(),
        (
            gates.Measured("rotated", lax, (kind("once", once), kind("more", more, BAD))),
            gates.Measured(
                "rotated+fronts20",
                lax.replace(recompute_share=0.2),
                (kind("more", more, replace(GOOD, moved=500, computed=400)),),
            ),
            # Neither is a rung: nothing is recorded, and the index finds no such runs.
            gates.Measured("rotated+run8", lax.replace(min_run=8), (kind("all"),)),
            gates.Measured(
                "rotated+probe30", lax.replace(recompute_share=0.3, repair="probe"), (kind("all"),)
            ),
        ),
    )
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    prompts = {
        "rotated": edits(text, new)["one deletion"],
        "rotated+fronts20": [*text[:20], *text[30:60], *text[75:], *new[:3]],
        "exact": [*text[:20], *text[30:50], *text[60:80], *text[90:], *new[:3]],
    }
    moved = {}
    for name, prompt in prompts.items():
        generator = make(num_blocks=128, gate=own)
        generator.generate(text, max_new_tokens=1, session="chat")
        done = generator.generate(prompt, max_new_tokens=1, session="chat", moved_end=len(prompt))
        moved[name] = done.usage.moved
        assert done.decision.is_cleared == (name != "exact")
        wanted = {"rotated": 0.0, "rotated+fronts20": 0.2, "exact": 0.0}[name]
        assert done.decision.policy.recompute_share == wanted
        # An explicit policy is judged alone.
        single = generator.submit(prompt, max_new_tokens=1, policy=lax, session="chat")
        assert single.decision.policy == lax
        generator.cancel(single)
        check_drained(generator)
    assert moved["exact"] == 0
    assert 0.7 * 75 <= moved["rotated+fronts20"] <= 0.8 * 75
    assert moved["rotated"] > 0


def test_without_a_gate_nothing_is_moved(make: Make, ids: Ids) -> None:
    generator = make(num_blocks=128, policy=APPROXIMATE)
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    prompt = edits(text, new)["one deletion"]
    assert generator.generate(prompt, max_new_tokens=1).usage.moved == 0
    request = generator.submit(prompt, max_new_tokens=1)
    assert not request.decision.is_cleared
    assert "kvtrie calibrate" in request.decision.reason


def test_a_gate_of_another_model_is_refused(make: Make, ids: Ids, check_drained: Check) -> None:
    other = measured(make("qwen3"), GOOD)
    with pytest.raises(gates.GateMismatchError, match="model"):
        make(policy=APPROXIMATE, gate=other)
    with pytest.raises(gates.GateMismatchError, match="model"):
        make(gate=other)
    generator = make(policy=kvtrie.EXACT_ONLY, gate=other)
    with pytest.raises(gates.GateMismatchError, match="model"):
        generator.submit(ids(9), policy=APPROXIMATE)
    with pytest.raises(TypeError, match="gate must be a"):
        make(gate="gate.json")
    check_drained(generator)


def test_moved_runs_come_from_the_session_of_the_request(make: Make, ids: Ids) -> None:
    policy = APPROXIMATE.replace(scope="conversation")
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    prompt = [*new, *text[:100]]
    for session, moved in [("chat-7", 99), ("chat-8", 0), (None, 0)]:
        generator = make(num_blocks=128, policy=policy, gate="unchecked")
        generator.generate(text, max_new_tokens=1, session="chat-7")
        usage = generator.generate(prompt, max_new_tokens=1, session=session).usage
        assert usage.moved == moved, session
        assert generator.index.stats().plans_without_scope == (session is None)


class Ends(Watcher):
    """Where plans were told that the last message begins."""

    def __init__(self) -> None:
        self.found: list[int | None] = []

    def planned(self, request: Request, planned: Planned) -> None:
        del request
        self.found.append(planned.moved_end)


def test_nothing_moves_into_the_last_message_of_a_template_that_no_preset_reads(
    models: Callable[[str], PreTrainedModel],
) -> None:
    """A question's moved tail made a model answer the question before; see `calibrate`, too."""
    tokenizer = byte_tokenizer()
    policy = APPROXIMATE.replace(scope="conversation")
    generator = Generator(
        models("llama-gqa"),
        tokenizer,
        num_blocks=256,
        block_size=4,
        policy=policy,
        gate="unchecked",
    )
    tail = " as the notes say, in a few words of your own, please?"
    first = [{"role": "system", "content": "x"}, {"role": "user", "content": "How is A" + tail}]
    reply = {"role": "assistant", "content": "so"}
    last = [*first, reply, {"role": "user", "content": "Where is B" + tail}]
    generator.generate(first, max_new_tokens=1, session="chat")
    ends = Ends()
    generator.watch(ends)
    assert generator.generate(last, max_new_tokens=1, session="chat").usage.moved == 0
    text = str(tokenizer.apply_chat_template(last, tokenize=False, add_generation_prompt=True))
    want = len(tokenizer.encode(text[: text.rindex("<eos><user>")], add_special_tokens=False))
    assert ends.found == [want]
    # What is measured for a gate is what is served.
    step = Renderer(tokenizer).steps([*last, reply], Scenario("all", least_edits=0))[-1]
    assert step.prompt == list(generator.encode(last))
    assert step.moved_end == want
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    bare = Generator(
        models("llama-gqa"), tokenizer, num_blocks=64, block_size=4, policy=policy, gate="unchecked"
    )
    bare.watch(ends)
    bare.generate(first, max_new_tokens=1)
    assert ends.found == [want, None]


def test_moved_runs_stop_at_moved_end(make: Make, ids: Ids) -> None:
    generator = make(num_blocks=128, policy=APPROXIMATE, gate="unchecked")
    text, new = ids(120).tolist(), ids(40, seed=1).tolist()
    generator.generate(text, max_new_tokens=1)
    prompt = [*new, *text[:100]]
    assert generator.generate(prompt, max_new_tokens=1, moved_end=90).usage.moved == 50
    refused: list[tuple[dict[str, Any], str]] = [
        ({"moved_end": 141}, r"moved_end is 141.*\[0, 140\]"),
        ({"moved_end": -1}, "moved_end is -1"),
        ({"session": ""}, "session has 0 bytes"),
        ({"session": "s" * 257}, "session has 257 bytes"),
    ]
    for options, error in refused:
        with pytest.raises(ValueError, match=error):
            generator.submit(prompt, **options)
    numbered: Any = 7
    with pytest.raises(TypeError, match="session is of type 'int'; it must be a str"):
        generator.submit(prompt, session=numbered)
