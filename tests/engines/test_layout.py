"""KVLayout: geometry from configs, refusals by name, no torch at import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from kvtrie._core import LayoutError
from kvtrie.pool import KVLayout

GQA: dict[str, Any] = {
    "model_type": "some",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "dtype": "bfloat16",
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GQA.items() if key != name}


def test_from_config_mapping_of_gqa() -> None:
    layout = KVLayout.from_config(GQA, block_size=17)
    assert layout == KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=17
    )


def test_bytes_count_k_and_v_of_all_layers() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=17)
    assert layout.item_size == 2
    assert layout.bytes_per_token == 2 * 3 * 2 * 32 * 2
    assert layout.bytes_per_block == layout.bytes_per_token * 17


@pytest.mark.parametrize(
    ("changes", "heads", "dim"),
    [
        pytest.param({}, 2, 32, id="gqa"),
        pytest.param({"num_key_value_heads": None}, 8, 32, id="mha"),
        pytest.param({"head_dim": 48}, 2, 48, id="wide-heads"),
        pytest.param({"multi_query": True}, 1, 32, id="mqa"),
        pytest.param({"sliding_window": None}, 2, 32, id="window-none"),
        pytest.param({"sliding_window": 64, "use_sliding_window": False}, 2, 32, id="window-off"),
        pytest.param({"layer_types": ["full_attention"] * 3}, 2, 32, id="all-full"),
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2, 32, id="yarn"),
        pytest.param({"v_head_dim": 32}, 2, 32, id="v-as-wide"),
    ],
)
def test_from_config_accepts(changes: dict[str, Any], heads: int, dim: int) -> None:
    layout = KVLayout.from_config({**GQA, **changes})
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, heads, dim)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"sliding_window": 64}, "sliding_window=64", id="window"),
        pytest.param(
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer 1 is 'sliding_attention'",
            id="window-layer",
        ),
        pytest.param({"layer_types": ["linear_attention"] * 3}, "layer 0", id="linear-layer"),
        pytest.param({"layers_block_type": ["mamba"] * 3}, "'mamba'", id="mamba-layer"),
        pytest.param({"attention_layers": ["global", "local"]}, "layer 1 is 'local'", id="local"),
        pytest.param({"mamba_d_state": 16}, "mamba_d_state", id="mamba"),
        pytest.param({"linear_num_value_heads": 4}, "linear_num_value_heads", id="linear"),
        pytest.param({"attention_chunk_size": 8192}, "attention_chunk_size", id="chunked"),
        pytest.param({"kv_lora_rank": 512}, "MLA", id="mla"),
        pytest.param({"index_head_dim": 128}, "index_head_dim", id="sparse"),
        pytest.param({"num_kv_shared_layers": 2}, "num_kv_shared_layers", id="shared-kv"),
        pytest.param({"is_encoder_decoder": True}, "cross attention", id="encoder-decoder"),
        pytest.param({"add_cross_attention": True}, "cross attention", id="cross"),
        pytest.param({"cross_attention_layers": [1]}, "cross_attention_layers", id="cross-layers"),
        pytest.param({"vision_config": {}}, "vision_config", id="vision"),
        pytest.param({"is_causal": False}, "is_causal=False", id="bidirectional"),
        pytest.param({"prefix_lm": True}, "prefix_lm=True", id="prefix-lm"),
        pytest.param({"rope_scaling": {"type": "dynamic"}}, "'dynamic'", id="dynamic-ntk"),
        pytest.param({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'", id="longrope"),
        pytest.param(
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "'dynamic'",
            id="dynamic-in-one-layer-type",
        ),
        pytest.param({"rope_scaling": {"mrope_section": [8]}}, "mrope_section", id="m-rope"),
        pytest.param({"v_head_dim": 64}, "v_head_dim", id="v-wider"),
        pytest.param({"num_key_value_heads": [2, 4, 2]}, "layer to layer", id="heads-by-layer"),
        pytest.param({"block_configs": [{}]}, "block_configs", id="geometry-by-layer"),
        pytest.param({"num_key_value_heads": 3}, "8 query heads", id="heads-do-not-divide"),
        pytest.param({"hidden_size": 250}, "250", id="width-does-not-divide"),
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers is 0", id="zero"),
        pytest.param({"num_hidden_layers": True}, "num_hidden_layers is True", id="bool"),
        pytest.param({"num_hidden_layers": "3"}, "num_hidden_layers is '3'", id="text"),
        pytest.param({"dtype": "float8_e4m3fn"}, "float8_e4m3fn", id="float8"),
        pytest.param({"dtype": "int8"}, "int8", id="int8"),
    ],
)
def test_from_config_refuses_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError) as caught:
        KVLayout.from_config({**GQA, **changes})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "dtype"]
)
def test_from_config_refuses_missing_field(name: str) -> None:
    with pytest.raises(LayoutError, match=name):
        KVLayout.from_config(without(name))


def test_from_config_refuses_empty_mapping() -> None:
    with pytest.raises(LayoutError, match="num_attention_heads"):
        KVLayout.from_config({})


def test_from_config_takes_dtype_as_name_or_torch_dtype() -> None:
    for dtype in ("float16", "torch.float16", torch.float16):
        assert KVLayout.from_config(GQA, dtype=dtype).dtype == "float16"


@pytest.mark.parametrize("block_size", [0, -1, 4097])
def test_layout_refuses_block_size_out_of_range(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size.*{block_size}"):
        KVLayout.from_config(GQA, block_size=block_size)


@pytest.mark.parametrize("block_size", [True, 16.0, "16"])
def test_layout_refuses_block_size_of_wrong_type(block_size: Any) -> None:
    with pytest.raises(TypeError, match="block_size"):
        KVLayout.from_config(GQA, block_size=block_size)


def test_import_needs_no_torch() -> None:
    code = "import sys, kvtrie.pool.layout; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
