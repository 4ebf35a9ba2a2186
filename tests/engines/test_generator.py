"""Generator: what it accepts, how answers end, and its properties."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

import kvtrie
from kvtrie._core import LayoutError
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Models = Callable[[str], PreTrainedModel]

CHAT = [{"role": "user", "content": "hé"}]


def fresh(models: Models) -> PreTrainedModel:
    config = copy.deepcopy(models("llama-gqa").config)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.fixture
def talk(models: Models, tokenizer: PreTrainedTokenizerBase) -> Generator:
    return Generator(models("llama-gqa"), tokenizer, num_blocks=64, block_size=4)


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda ids: ids.tolist(), id="list"),
        pytest.param(lambda ids: tuple(ids.tolist()), id="tuple"),
        pytest.param(lambda ids: ids.astype(np.uint16), id="numpy"),
        pytest.param(torch.from_numpy, id="tensor"),
    ],
)
def test_prompt_ids_come_in_many_forms(convert: Any, make: Make, ids: Ids) -> None:
    want = make().generate(ids(9), max_new_tokens=3).tokens
    assert make().generate(convert(ids(9)), max_new_tokens=3).tokens == want


def test_messages_go_through_the_chat_template(
    talk: Generator, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = "<user>hé<eos><assistant>"
    assert talk.encode(CHAT) == tokenizer(plain)["input_ids"]
    assert talk.encode(tuple(CHAT)) == talk.encode(CHAT)
    assert talk.encode("hé") == tokenizer("hé")["input_ids"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    with_more = talk.encode(CHAT, tools=tools, chat_template_kwargs={"prefix": "P"})
    text = str(tokenizer.decode(list(with_more)))
    assert text.endswith("P" + plain)
    assert json.loads(text.partition("P<user>")[0]) == tools
    done = talk.generate(CHAT, max_new_tokens=2, tools=tools, chat_template_kwargs={"prefix": "P"})
    assert done.usage.prompt == len(with_more)


def test_text_of_events_is_the_text_of_the_answer(
    talk: Generator, tokenizer: PreTrainedTokenizerBase
) -> None:
    events = list(talk.stream(CHAT, max_new_tokens=40, temperature=1.0, seed=3))
    text = "".join(event.text for event in events)
    tokens = events[-1].request.tokens
    assert [event.token for event in events] == tokens
    assert text == events[-1].request.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(text) > 10
    assert all(event.usage == events[0].usage for event in events)
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]


def test_answer_ends_with_the_end_of_sequence(
    make: Make, ids: Ids, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make().generate(ids(9), max_new_tokens=12, ignore_eos=True).tokens
    # Three tokens, and those before them are others.
    at = next(n for n in range(3, 12) if whole[n] not in whole[:n])
    for eos in (whole[at], [299, whole[at]]):
        monkeypatch.setattr(models("llama-gqa").generation_config, "eos_token_id", eos)
        generator = make()
        done = generator.generate(ids(9), max_new_tokens=12)
        assert (done.tokens, done.finish_reason) == (whole[: at + 1], "stop")
        # The last token was never run through the model.
        assert generator.index.stats().indexed == (9 + at) // 4
        done = generator.generate(ids(9), max_new_tokens=12, ignore_eos=True)
        assert (done.tokens, done.finish_reason) == (whole, "length")


def test_the_index_has_a_seed_of_its_own(models: Models) -> None:
    model = models("llama-gqa")
    one, two = (Generator(model, num_blocks=8, seed=5).index.seed for _ in range(2))
    assert one != two
    assert Generator(model, num_blocks=8, seed=5, index_seed=7).index.seed == 7


def test_end_of_sequence_of_the_tokenizer_is_the_fallback(
    models: Models, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama-gqa")
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert Generator(model, tokenizer, num_blocks=8)._eos_ids == {2}
    assert Generator(model, num_blocks=8)._eos_ids == frozenset()


def test_answer_ends_with_a_stop_id(make: Make, ids: Ids) -> None:
    whole = make().generate(ids(9), max_new_tokens=12, ignore_eos=True).tokens
    at = next(n for n in range(3, 12) if whole[n] not in whole[:n])
    done = make().generate(
        ids(9), max_new_tokens=12, ignore_eos=True, stop_token_ids=[whole[at], 299]
    )
    assert (done.tokens, done.finish_reason) == (whole[: at + 1], "stop")


def test_answer_ends_with_the_context(make: Make, ids: Ids) -> None:
    generator = make("gpt2", num_blocks=200)
    done = generator.generate(ids(505), max_new_tokens=100, ignore_eos=True)
    # 512 positions; the token after the last of them is never computed.
    assert (len(done.tokens), done.finish_reason) == (8, "length")
    assert len(generator.generate(ids(512), max_new_tokens=100).tokens) == 1
    with pytest.raises(ValueError, match="513 prompt tokens, the model takes 512"):
        generator.generate(ids(513))


def test_sampling_repeats_with_the_seed(make: Make, ids: Ids) -> None:
    def run(**options: Any) -> list[int]:
        seed = options.pop("engine_seed", 0)
        return (
            make(seed=seed)
            .generate(ids(9), max_new_tokens=12, temperature=1.5, ignore_eos=True, **options)
            .tokens
        )

    assert run() == run()
    assert run(seed=5) == run(seed=5) == run(seed=5, engine_seed=9)
    assert len({tuple(run()), tuple(run(seed=5)), tuple(run(engine_seed=9))}) == 3


def test_requests_of_one_engine_sample_apart(make: Make, ids: Ids) -> None:
    generator = make()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    one = generator.generate(ids(9), **options)
    assert one.tokens != generator.generate(ids(9), **options).tokens


def test_logits_come_only_when_asked_for(make: Make, ids: Ids) -> None:
    generator = make()
    assert generator.generate(ids(9), max_new_tokens=2).logits is None
    logits = generator.generate(ids(9), max_new_tokens=2, return_logits=True).logits
    assert logits is not None
    assert (logits.shape, logits.dtype) == ((2, 300), torch.float32)


@pytest.mark.parametrize(
    ("prompt", "error", "named"),
    [
        ([], ValueError, "empty"),
        ([5, 300], ValueError, "300.*vocabulary of 300"),
        ([5, -1], ValueError, "-1"),
        ([5, 2**32], ValueError, "4294967296"),
        ([1.5], TypeError, "1.5|float"),
        ([True], TypeError, "True|bool"),
        (CHAT, ValueError, "tokenizer"),
        ("text", ValueError, "tokenizer"),
    ],
)
def test_bad_prompts_are_refused(
    prompt: Any, error: type[Exception], named: str, make: Make
) -> None:
    generator = make()
    with pytest.raises(error, match=named):
        generator.submit(prompt)
    assert generator.num_waiting == 0


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens.*0"),
        ({"max_new_tokens": 1.5}, TypeError, "float"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_p": 0}, ValueError, "top_p"),
    ],
)
def test_bad_options_are_refused(
    options: Any, error: type[Exception], named: str, make: Make, ids: Ids
) -> None:
    generator = make()
    with pytest.raises(error, match=named):
        generator.submit(ids(5), **{"max_new_tokens": 4, **options})
    assert generator.num_waiting == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("slat", "salt"),
        ("sesion", "session"),  # codespell:ignore sesion: misspelt on purpose
        ("polcy", "policy"),  # codespell:ignore polcy: likewise
        ("max_new_token", "max_new_tokens"),
    ],
)
@pytest.mark.parametrize("method", ["submit", "stream", "generate"])
def test_a_misspelt_option_is_refused(
    method: str, name: str, meant: str, make: Make, ids: Ids
) -> None:
    """Under a misspelt salt, tenants would share their KV."""
    generator = make()
    said = f"Generator.{method}: unknown option {name!r}; did you mean {meant!r}?"
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        getattr(generator, method)(ids(5), **{name: "x"})
    assert (generator.num_waiting, generator.index.stats().indexed) == (0, 0)


def test_an_option_that_is_like_none_is_refused_with_all_that_are_known(
    make: Make, ids: Ids
) -> None:
    options: Any = {"beam_width": 4}
    with pytest.raises(
        TypeError, match=r"'beam_width'; known are max_new_tokens, .*salt.*, images"
    ):
        make().generate(ids(5), **options)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ],
    ids=str,
)
def test_a_message_without_content_is_refused(talk: Generator, message: dict[str, Any]) -> None:
    """As `kvtrie demo` refuses it; the template would write "None", or nothing."""
    with pytest.raises(ValueError, match=r"Generator: prompt\[1\] is a message without content"):
        talk.submit([CHAT[0], message])
    assert talk.num_waiting == 0


def test_a_call_of_a_tool_needs_no_content(talk: Generator) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert talk.encode([dict(CHAT[0]), asked])


def test_a_completion_says_why_an_approximate_policy_reused_exactly(
    models: Models, ids: Ids
) -> None:
    """Without a gate the policy becomes exact, and the completion says why."""
    policy = kvtrie.ReusePolicy(scope="namespace")
    generator = Generator(models("llama-gqa"), num_blocks=64, block_size=4)
    done = generator.generate(ids(9), max_new_tokens=1, policy=policy)
    assert not done.decision.is_cleared
    assert done.decision.policy == kvtrie.EXACT_ONLY
    assert "there is no gate" in done.decision.reason
    done = generator.generate(ids(9), max_new_tokens=1)
    assert done.decision.is_cleared
    assert done.decision.reason == "exact reuse needs no clearance"


def test_messages_without_chat_template_are_refused(
    models: Models, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    generator = Generator(models("llama-gqa"), tokenizer, num_blocks=8)
    with pytest.raises(ValueError, match="no chat template"):
        generator.submit(CHAT)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"prefill_chunk": 0}, ValueError, "prefill_chunk.*0"),
        ({"num_blocks": 0}, ValueError, "num_blocks"),
        ({"block_size": 0}, ValueError, "block_size.*0"),
        ({"block_size": 4097}, ValueError, "block_size.*4097"),
        ({"salt": ""}, ValueError, "salt"),
    ],
)
def test_bad_arguments_are_refused(
    options: Any, error: type[Exception], named: str, make: Make
) -> None:
    with pytest.raises(error, match=named):
        make(**options)


def test_model_in_training_mode_is_refused(models: Models) -> None:
    model = fresh(models).train()
    with pytest.raises(ValueError, match="eval"):
        Generator(model, num_blocks=8)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        pytest.param(
            lambda: transformers.Llama4TextConfig(
                vocab_size=50,
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=32,
                intermediate_size_mlp=32,
                num_local_experts=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            ),
            "edges of its chunks are absolute",
            id="chunks",
        ),
        pytest.param(
            lambda: transformers.BertConfig(
                num_hidden_layers=2, hidden_size=48, vocab_size=50, initializer_range=0.2
            ),
            "depends on later tokens",
            id="bidirectional",
        ),
        pytest.param(
            lambda: transformers.OpenAIGPTConfig(n_layer=1, n_embd=48, vocab_size=50),
            "transformers Cache",
            id="no-cache",
        ),
        pytest.param(
            lambda: transformers.MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=50),
            "linear_attention",
            id="state-space",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_held_are_refused(config: Any, named: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with pytest.raises(LayoutError, match=named):
        Generator(model, num_blocks=8)


def test_config_that_misstates_the_model_is_detected(models: Models) -> None:
    model = fresh(models).eval()
    model.config.num_key_value_heads = 4
    with pytest.raises(LayoutError, match="layer 0 has K of shape"):
        Generator(model, num_blocks=8)


def test_namespace_names_what_kv_depends_on(models: Models, make: Make) -> None:
    ns = make().namespace()
    assert ns == make().namespace() == make().namespace("generator")
    assert ns.kv_dtype == "float32"
    assert ns.adapter is None
    assert make(salt="other").namespace() != ns
    assert make(adapter="lora-1").namespace().adapter == "lora-1"
    assert make("llama-yarn").namespace().rope != ns.rope
    twin = fresh(models).eval()
    assert Generator(twin, num_blocks=8).namespace().model != ns.model
    twin.load_state_dict(models("llama-gqa").state_dict())
    assert Generator(twin, num_blocks=8).namespace().model == ns.model
    half = fresh(models)
    half.load_state_dict(models("llama-gqa").state_dict())
    assert Generator(half.bfloat16().eval(), num_blocks=8).namespace().kv_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_element_types_give_the_same_answers_with_reuse(
    dtype: torch.dtype, models: Models, ids: Ids
) -> None:
    model: Any = fresh(models)
    generator = Generator(model.to(dtype).eval(), num_blocks=64, block_size=4)
    assert generator.pool.dtype == dtype
    one = generator.generate(ids(22), max_new_tokens=4, return_logits=True)
    two = generator.generate(ids(22), max_new_tokens=4, return_logits=True)
    # 22 + 3 tokens with KV: the sixth block is full too, and its first token is the prompt's.
    assert (one.usage.exact, two.usage.exact) == (0, 21)
    # Half precision: three decimal digits of logits below 10. The first row is enough.
    atol = {torch.float64: 1e-9, torch.float16: 0.05, torch.bfloat16: 0.3}[dtype]
    assert one.logits is not None
    assert two.logits is not None
    torch.testing.assert_close(one.logits[0], two.logits[0], atol=atol, rtol=0)


def test_from_pretrained_reads_a_directory(
    tmp_path: Path, models: Models, tokenizer: PreTrainedTokenizerBase, ids: Ids, make: Make
) -> None:
    models("llama-gqa").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = Generator.from_pretrained(tmp_path, num_blocks=64, block_size=4)
    assert generator.namespace().model.startswith(f"{tmp_path.name}@")
    assert generator.encode(CHAT) == tokenizer("<user>hé<eos><assistant>")["input_ids"]
    want = make().generate(ids(9), max_new_tokens=5, ignore_eos=True).tokens
    assert generator.generate(ids(9), max_new_tokens=5, ignore_eos=True).tokens == want
    half = Generator.from_pretrained(str(tmp_path), num_blocks=8, dtype=torch.bfloat16)
    assert half.pool.layout.dtype == "bfloat16"


def test_from_pretrained_refuses_what_is_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Generator.from_pretrained(tmp_path, num_blocks=8)
    with pytest.raises(FileNotFoundError, match="not downloaded"):
        Generator.from_pretrained("some-org/some-model", num_blocks=8)


@pytest.mark.cuda
def test_answers_on_a_gpu_are_the_same(models: Models, ids: Ids, reference: Any) -> None:
    model: Any = fresh(models)
    model.load_state_dict(models("llama-gqa").state_dict())
    generator = Generator(model.cuda().eval(), num_blocks=64, block_size=4)
    want = reference().greedy(ids(22).tolist(), 8)
    for exact in (0, 21):
        done = generator.generate(ids(22), max_new_tokens=8, ignore_eos=True)
        assert (done.tokens, min(done.usage.exact, 21)) == (want, exact)
