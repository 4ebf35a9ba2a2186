"""The table of model types is that of the pinned transformers, and state is refused everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.kernels.test_rope_models import CASE
from tools import model_table

from kvtrie import LayoutError
from kvtrie.engines.transformers import Generator
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec

PAGE = model_table.PAGE.read_text(encoding="utf-8")
STATE = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "zamba2",
)


def test_the_table_is_what_configs_say() -> None:
    assert model_table.differences(PAGE) == []
    changed = PAGE.replace("| 22 window 4096 + 4 full |", "| 26 full |")
    assert changed != PAGE
    assert model_table.differences(changed) == ["gemma3_text"]
    without = "\n".join(line for line in PAGE.splitlines() if not line.startswith("| gpt_oss |"))
    assert model_table.differences(without) == ["gpt_oss"]


def test_every_refusal_has_a_reason() -> None:
    rows = [row for row in map(model_table._columns, PAGE.splitlines()) if len(row) == 4]
    said = [text for row in rows for text in row[1:3] if text.startswith("no")]
    assert len(said) > 100
    assert [text for text in said if not text.startswith("no: ")] == []


def test_glm_4_5_is_read_with_the_heads_of_published_models() -> None:
    assert model_table.read("glm4_moe") == ("46 full", "yes")
    assert model_table.read("glm4v_moe_text") == ("46 full", "yes")


def test_no_tiny_model_differs_and_none_with_state_runs() -> None:
    rows = {
        columns[0]: columns[1:]
        for columns in map(model_table._columns, PAGE.splitlines())
        if len(columns) == 4
    }
    assert not [name for name, columns in rows.items() if "differs" in columns[2]]
    assert sum(columns[2] == "equal" for columns in rows.values()) > 60
    for name in STATE:
        assert rows[name][1].startswith("no"), name
        assert rows[name][0].startswith("no"), name


@pytest.mark.parametrize("model_type", STATE)
def test_a_model_with_state_is_refused_by_engine_and_pool(model_type: str) -> None:
    config: Any = CASE[model_type].config()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(LayoutError, match=r"state|linear"):
        Generator(model, num_blocks=4)
    spec = RopeSpec.from_config(config)
    assert spec.state_layers
    layout = KVLayout(
        num_layers=len(spec.layers), num_kv_heads=1, head_dim=spec.head_dim, dtype="float32"
    )
    with pytest.raises(LayoutError, match=r"recurrent state in \d of its layers"):
        KVPool(layout, spec, num_blocks=1)
