"""Exact reuse of every kind of layer under an index with groups, next to recomputation.

Tiny models with random weights, of types with windows, recurrent state, index rows and compressed
rows, in `SmallEngine`: float32, within 1e-5.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
import transformers
from tests.engines.small_engine import STATE, WINDOW, SmallEngine, poison
from tests.kernels.test_rope_models import Case
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE: Final = 1e-5
SLIDING: Final = 17
# Few of the tokens are attended to. Of fewer index heads, all scores of many tokens are 0.
_INDEXED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "glm_moe_dsa": _INDEXED,
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "minimax_m3_vl_text": {
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_block_size": 2,
        "index_topk_blocks": 4,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1},
}
FULL: Final = ("glm4_moe", "minimax_m2")
WINDOWS: Final = (
    *("cohere2", "exaone4", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss"),
    *("mimo_v2_flash", "ministral3", "olmo3"),
)
STATES: Final = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"),
)
ROWS: Final = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
# Windows and state, in the same layers or next to each other.
BOTH: Final = ("deepseek_v4", "inkling_text")
ALL: Final = (*FULL, *WINDOWS, *STATES, *ROWS, *BOTH)
# transformers reads their state in passes of one token alone.
ONE_BY_ONE: Final = ("jamba",)
# Types of today's models that are not run, and why.
NOT_RUN: Final = {
    "glm5_next_text": "no causal LM of text alone",
    "llama4_text": "the engine keeps no edges of chunks",
    "minimax": "its state is outside the layers of its cache",
    "mistral4": "no causal LM of text alone",
    "step3p5": "no causal LM of text alone",
}


@cache
def model_of(name: str) -> transformers.PreTrainedModel:
    changes = dict(_CHANGES.get(name, {}))
    if hasattr(CONFIG_MAPPING[name](), "sliding_window"):
        changes["sliding_window"] = SLIDING
    config: Any = Case(name, name, tuple(changes.items())).config()
    # Large enough that logits depend on the whole prompt, see the last tests.
    config.initializer_range = 0.05
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    )
    ready: transformers.PreTrainedModel = model.eval().float()
    return ready


class Checked:
    """An engine, each of whose answers is compared with the model without a cache."""

    def __init__(self, name: str) -> None:
        self.engine = SmallEngine(model_of(name), chunk=1 if name in ONE_BY_ONE else 8)
        self._model = model_of(name)

    def difference(self, tokens: Sequence[int], stops: Sequence[int] = ()) -> tuple[int, float]:
        done = self.engine.run(tokens, stops)
        with torch.inference_mode():
            want = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        assert len(done.logits) == len(tokens) - done.exact
        return done.exact, float((done.logits - want[done.exact :]).abs().max())

    def equal(self, tokens: Sequence[int], stops: Sequence[int] = ()) -> int:
        """The tokens that were cached."""
        exact, difference = self.difference(tokens, stops)
        assert difference <= TOLERANCE
        return exact


def drawn(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 60, count).tolist()
    return found


SYSTEM: Final = drawn(18, seed=1)
REASONING: Final = drawn(26, seed=2)
ANSWER: Final = drawn(7, seed=3)
NEXT: Final = drawn(11, seed=4)
# Before the reasoning, and at the end of the turn.
STOPS: Final = (16, 48)


@pytest.mark.parametrize("name", ALL)
def test_a_next_turn_and_deleted_reasoning_equal_recomputation(name: str) -> None:
    checked = Checked(name)
    engine = checked.engine
    turn = [*SYSTEM, *REASONING, *ANSWER]
    assert checked.equal(turn, STOPS) == 0
    # The next turn begins after the last one's blocks.
    assert checked.equal([*turn, *NEXT]) == 48
    # A template deletes the reasoning: states are where the tags said.
    deleted = [*SYSTEM, *ANSWER, *NEXT]
    assert checked.equal(deleted) == 16
    # Nothing is cached under another prompt.
    assert checked.equal([*drawn(9, seed=5), *turn]) == 0
    assert engine.num_free(None) + engine.index.stats().indexed == engine.index.num_blocks
    for group in engine.index.groups:
        indexed = engine.index.group_stats(group.name).indexed
        assert indexed
        assert engine.num_free(group.name) + indexed == group.num_blocks


@pytest.mark.parametrize("name", [*STATES, *BOTH])
def test_without_its_states_a_prompt_is_computed(name: str) -> None:
    checked = Checked(name)
    engine = checked.engine
    turn = [*SYSTEM, *REASONING, *ANSWER]
    checked.equal(turn, STOPS)
    prompt = [*turn, *NEXT]
    assert engine.index.explain(engine.sequence(prompt)).cut_by is None
    states = engine.index.group_stats(STATE).indexed
    assert states == len(STOPS)
    # The later one was used as lately, and is deeper.
    engine.evict(1, STATE)
    assert engine.index.explain(engine.sequence(prompt)).cut_by == (STATE, 16)
    assert checked.equal(prompt, STOPS) == 16
    engine.evict(2, STATE)
    assert engine.index.explain(engine.sequence(prompt)).cut_by == (STATE, 0)
    assert checked.equal(prompt) == 0


@pytest.mark.parametrize("name", [*WINDOWS, *BOTH])
def test_without_its_window_a_prompt_is_computed(name: str) -> None:
    checked = Checked(name)
    engine = checked.engine
    turn = [*SYSTEM, *REASONING, *ANSWER]
    checked.equal(turn, STOPS)
    prompt = [*turn, *NEXT]
    # All that no stop needs, then all: group 0 keeps its blocks.
    engine.evict(4, WINDOW)
    assert checked.equal(prompt) == 48
    engine.evict(99, WINDOW)
    assert engine.index.explain(engine.sequence(prompt)).cut_by == (WINDOW, 0)
    assert checked.equal(prompt) == 0


def test_moved_runs_are_refused_by_name() -> None:
    for name in (*STATES, *BOTH):
        engine = SmallEngine(model_of(name))
        engine.run([*SYSTEM, *REASONING, *ANSWER], STOPS)
        before = engine.index.digest()
        moved = kvtrie.ReusePolicy(approximate=True, scope="namespace")
        with pytest.raises(ValueError, match=f'group "{STATE}"'):
            engine.index.plan(engine.sequence([*ANSWER, *REASONING, *NEXT]), moved)
        assert engine.index.digest() == before


@pytest.mark.parametrize("name", [*STATES, *BOTH])
def test_the_state_of_another_prompt_is_seen_in_logits(name: str) -> None:
    checked = Checked(name)
    engine = checked.engine
    turn = [*SYSTEM, *REASONING, *ANSWER]
    checked.equal(turn, STOPS)
    checked.equal(drawn(51, seed=6), STOPS)
    with engine.index.plan(engine.sequence([*turn, *NEXT])) as plan:
        own = plan.state(STATE)
    with engine.index.plan(engine.sequence([*drawn(51, seed=6), *NEXT])) as plan:
        other = plan.state(STATE)
    assert own is not None
    assert other is not None
    assert own != other
    engine.slots[own] = engine.slots[other]
    exact, difference = checked.difference([*turn, *NEXT])
    assert exact == 48
    assert difference > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_the_rows_that_a_plan_names_are_read(name: str) -> None:
    turn = [*SYSTEM, *REASONING, *ANSWER]
    for group in {None, *SmallEngine(model_of(name)).names} - {STATE}:
        checked = Checked(name)
        engine = checked.engine
        checked.equal(turn, STOPS)
        with engine.index.plan(engine.sequence([*turn, *NEXT])) as plan:
            last = (plan.blocks if group is None else plan.group(group)[1])[-1]
        layers = engine.layers(group)
        for layer in layers:
            poison(engine.blocks[layer, int(last)])
        _, difference = checked.difference([*turn, *NEXT])
        assert np.isnan(difference) == bool(layers)


def test_types_of_todays_models_are_run_or_listed() -> None:
    types = {*ALL, *NOT_RUN}
    assert types & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} == {*ALL, "llama4_text", "minimax"}
    assert [name for name in types if name not in CONFIG_MAPPING] == []
