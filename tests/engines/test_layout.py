"""KVLayout: geometry from configs, refusals by name, no torch at import."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtrie._core import LayoutError
from kvtrie.pool import KVGroup, KVLayout
from kvtrie.rope import RopeSpec

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
            "there is no sliding_window",
            id="window-without-a-size",
        ),
        pytest.param(
            {"model_type": "olmo3"},
            "layer 0 is 'sliding_attention' (by the rule of its type), and there is no",
            id="period-without-a-size",
        ),
        pytest.param({"layer_types": ["full_attention"]}, "1 entries for 3", id="layers-missing"),
        pytest.param(
            {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            "4 entries for 3",
            id="layers-too-many",
        ),
        pytest.param({"layer_types": "full"}, "not a list", id="layers-no-list"),
        pytest.param({"sliding_window": 0}, "sliding_window is 0", id="window-of-0"),
        pytest.param({"layer_types": ["linear_attention"] * 3}, "layer 0", id="linear-layer"),
        pytest.param(
            {"layers_block_type": ["mamba"] * 3},
            "layer 0 is 'linear_attention' (layers_block_type): its state is of one prefix",
            id="mamba-layer",
        ),
        pytest.param(
            {"attention_layers": ["global", "local", "global"]}, "layer 1 is 'local'", id="local"
        ),
        pytest.param({"mamba_d_state": 16}, "mamba_d_state", id="mamba"),
        pytest.param({"linear_num_value_heads": 4}, "linear_num_value_heads", id="linear"),
        pytest.param({"attention_chunk_size": 8192}, "attention_chunk_size", id="chunked"),
        pytest.param({"kv_lora_rank": 512}, "MLA", id="mla"),
        pytest.param({"index_head_dim": 128}, "index_head_dim", id="sparse"),
        pytest.param({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3 of 3", id="shared"),
        pytest.param({"is_encoder_decoder": True}, "cross attention", id="encoder-decoder"),
        pytest.param({"add_cross_attention": True}, "cross attention", id="cross"),
        pytest.param({"cross_attention_layers": [1]}, "cross_attention_layers", id="cross-layers"),
        pytest.param({"vision_config": {}}, "vision_config", id="vision"),
        pytest.param({"is_causal": False}, "is_causal=False", id="bidirectional"),
        pytest.param({"prefix_lm": True}, "prefix_lm=True", id="prefix-lm"),
        pytest.param({"rope_scaling": {"type": "dynamic"}}, "'dynamic'", id="dynamic-ntk"),
        pytest.param({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'", id="longrope"),
        pytest.param(
            {"rope_scaling": {"rope_type": None, "type": "longrope"}}, "'longrope'", id="old-name"
        ),
        pytest.param(
            {"model_type": "phi3", "rope_scaling": {"type": "yarn"}}, "LongRoPE's old", id="older"
        ),
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


SLIDING, FULL = "sliding_attention", "full_attention"


def test_layers_with_a_window_are_a_group() -> None:
    kinds = [SLIDING, FULL, SLIDING]
    layout = KVLayout.from_config({**GQA, "layer_types": kinds, "sliding_window": 64})
    assert layout.groups == (
        KVGroup(layers=(0, 2), num_kv_heads=2, head_dim=32, window=64),
        KVGroup(layers=(1,), num_kv_heads=2, head_dim=32),
    )
    assert layout.windows == (64, None, 64)
    assert layout.is_uniform
    # A window keeps the KV of all tokens.
    assert layout.bytes_per_token == KVLayout.from_config(GQA).bytes_per_token


def test_a_window_of_all_layers_and_one_by_pattern() -> None:
    every = KVLayout.from_config({**GQA, "model_type": "mistral", "sliding_window": 64})
    assert every.windows == (64, 64, 64)
    assert every != KVLayout.from_config(GQA)
    some = {**GQA, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}
    assert KVLayout.from_config(some).windows == (64, None, 64)


def test_groups_of_other_shapes() -> None:
    config = {
        **GQA,
        "model_type": "gemma4_text",
        "layer_types": [SLIDING, FULL, SLIDING],
        "sliding_window": 64,
        "head_dim": 32,
        "global_head_dim": 48,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    layout = KVLayout.from_config(config)
    assert [group.shape for group in layout.layers] == [(2, 32, 32), (1, 48, 48), (2, 32, 32)]
    assert not layout.is_uniform
    assert layout.bytes_per_token == 2 * (2 * 2 * 64 + 96)
    by_layer = {**GQA, "per_layer_config": {"01": {"head_dim": 48}}}
    assert [group.head_dim for group in KVLayout.from_config(by_layer).layers] == [32, 48, 32]


def test_layers_that_share_the_kv_of_others_have_none() -> None:
    assert KVLayout.from_config({**GQA, "num_kv_shared_layers": 2}).num_layers == 1


def _group(*layers: int, **changes: Any) -> KVGroup:
    return KVGroup(**{"layers": layers, "num_kv_heads": 2, "head_dim": 32, **changes})


@pytest.mark.parametrize(
    ("groups", "error", "said"),
    [
        (lambda: (_group(0, 1),), LayoutError, r"layers \[0, 1\], not each of 3 once"),
        (lambda: (_group(0, 1, 2), _group(2)), LayoutError, "not each of 3 once"),
        (lambda: (_group(0, 1, 2, head_dim=48),), LayoutError, "the first group"),
        (lambda: [_group(0, 1, 2)], TypeError, "tuple of KVGroup"),
        (list, TypeError, r"tuple of KVGroup, not \[\]"),
        (lambda: None, TypeError, "tuple of KVGroup, not None"),
        (lambda: (_group(1, 0, 2),), ValueError, "ascending"),
        (lambda: (_group(),), ValueError, "at least one"),
        (lambda: (_group(0, 1, 2, window=0),), ValueError, "window must be at least 1, not 0"),
        (lambda: (_group(0, 1, 2, head_dim=True),), TypeError, "head_dim must be an int"),
    ],
)
def test_groups_are_checked(groups: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        KVLayout(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float32", groups=groups())


def _mixed(*groups: KVGroup, **changes: Any) -> KVLayout:
    known: dict[str, Any] = {
        "num_layers": sum(len(group.layers) for group in groups),
        "num_kv_heads": groups[0].num_kv_heads,
        "head_dim": groups[0].head_dim,
        "v_head_dim": groups[0].v_head_dim,
        "dtype": "bfloat16",
        "groups": groups,
    }
    return KVLayout(**(known | changes))


def test_quantised_layers_may_differ_in_shape() -> None:
    layout = _mixed(_group(0), _group(1, head_dim=48), dtype="uint8", quant="int8_per_token_head")
    assert [(group.k_row, group.v_row) for group in layout.layers] == [(36, 36), (52, 52)]
    assert layout.bytes_per_token == 2 * 2 * (36 + 52)
    assert (layout.is_uniform, layout.kv_dtype) == (False, "int8_per_token_head")


def test_groups_may_differ_in_type() -> None:
    """As vLLM with --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window."""
    layout = _mixed(_group(0, 2, 3, window=8), _group(1, quant="fp8_e4m3"))
    types = [(group.dtype, group.quant) for group in layout.layers]
    assert types == [("bfloat16", None), ("uint8", "fp8_e4m3"), *[("bfloat16", None)] * 2]
    assert layout.bytes_per_token == 2 * 64 * (3 * 2 + 1)
    assert not layout.is_uniform
    assert (layout.kv_type, layout.k_row, layout.item_size) == (None, 32, 2)


def test_floats_next_to_a_quantised_layout_are_named() -> None:
    layout = _mixed(
        _group(0), _group(1, dtype="float32"), _group(2), dtype="float8_e4m3fn", quant="fp8_e4m3"
    )
    assert [group.quant for group in layout.layers] == ["fp8_e4m3", None, "fp8_e4m3"]
    assert [group.dtype for group in layout.layers] == ["float8_e4m3fn", "float32", "float8_e4m3fn"]
    assert layout.bytes_per_token == 2 * 64 * (1 + 4 + 1)


def test_a_group_that_names_the_layouts_type_is_as_one_without() -> None:
    groups = _group(0, window=8), _group(1, window=4)
    assert _mixed(*groups) == _mixed(*(replace(one, dtype="bfloat16") for one in groups))
    assert _mixed(_group(0, 1, dtype="bfloat16")).groups == ()
    # Types of groups are as given when the layout's is replaced.
    mixed = _mixed(groups[0], replace(groups[1], quant="int8"))
    assert replace(mixed, dtype="float16").kv_dtype == "float16+int8[1]"


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        (lambda: (_group(0, 3), _group(1, 2, window=8)), "bfloat16"),
        (lambda: (_group(0, 2), _group(1, 3, quant="int8")), "bfloat16+int8[1,3]"),
        (lambda: (_group(1, 3), _group(0, 2, quant="int8")), "int8+bfloat16[1,3]"),
        (lambda: (_group(0), _group(1, 2, 3, dtype="float32")), "bfloat16+float32[1-3]"),
        (
            lambda: (_group(0, 5), _group(3, quant="fp8_e5m2"), _group(1, 2, 4, quant="int8")),
            "bfloat16+int8[1-2,4]+fp8_e5m2[3]",
        ),
    ],
)
def test_a_name_says_which_layers_have_which_type(groups: Any, name: str) -> None:
    assert _mixed(*groups()).kv_dtype == name


_TYPES = ("bfloat16", "float32", "fp8_e4m3", "int8", "fp8_per_token_head")


@given(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=12), st.data())
def test_a_name_is_of_one_assignment_of_types(types: list[str], data: Any) -> None:
    """It depends on nothing else, and is read back by the rule that the docstring states."""
    parts: dict[tuple[str, int], list[int]] = {}
    for layer, name in enumerate(types):
        # Groups of one type may be several.
        parts.setdefault((name, data.draw(st.integers(0, 1))), []).append(layer)
    groups = [
        _group(*layers, window=9 if part else None, **{"quant" if "8" in name else "dtype": name})
        for (name, part), layers in parts.items()
    ]
    first = groups[0]
    layout = _mixed(
        *data.draw(st.permutations(groups[1:]).map(lambda rest: [first, *rest])),
        dtype=first.dtype,
        quant=first.quant,
    )
    base, *others = layout.kv_dtype.split("+")
    read = [base] * len(types)
    for other in others:
        name, _, ranges = other.rstrip("]").partition("[")
        for one in ranges.split(","):
            start, _, end = one.partition("-")
            for layer in range(int(start), int(end or start) + 1):
                read[layer] = name
    assert read == types


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant": "fp8"}, r"KVGroup: layers 1,3-4: KV of 'fp8' is not supported: the name has"),
        ({"quant": "int4"}, "layers 1,3-4: KV of 'int4' is not supported: .*4-bit"),
        ({"dtype": "uint8"}, "layers 1,3-4: a pool of 'uint8' is not supported without quant"),
        ({"dtype": "bfloat16", "quant": "int8"}, "tensors of int8 are int8 or uint8, not 'bfloat1"),
        ({"quant": "fp8_index"}, "layers 1,3-4: fp8_index is one row per token"),
        ({"quant": "fp8_ds_mla"}, "layers 1,3-4: fp8_ds_mla has head_dim 576, not 32"),
    ],
)
def test_a_type_that_a_group_cannot_have_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        _group(1, 3, 4, **changes)


def test_a_layouts_type_that_does_not_fit_a_group_is_refused() -> None:
    with pytest.raises(LayoutError, match="KVGroup: layers 1: fp8_index is one row per token"):
        _mixed(
            _group(0, num_kv_heads=1, v_head_dim=0),
            _group(1),
            dtype="uint8",
            quant="fp8_index",
        )


def test_the_first_group_has_the_layouts_type() -> None:
    said = r"\('bfloat16', None\), those of the first group \(layers 0\) \('uint8', 'int8'\)"
    with pytest.raises(LayoutError, match=said):
        _mixed(_group(0, quant="int8"), _group(1))


def test_unlike_groups_of_an_engine_are_wrapped_one_by_one() -> None:
    groups = _group(0), _group(1, quant="int8")
    with pytest.raises(LayoutError, match=r"bfloat16\+int8\[1\]: wrap the groups one by one"):
        _mixed(*groups, axes="blocks tokens heads (kv dim)")


def test_a_group_without_a_type_says_where_it_is() -> None:
    with pytest.raises(LayoutError, match=r"layers 0,2 have the element type of their layout"):
        _ = _group(0, 2).bytes_per_token


def test_a_layout_with_types_by_group_is_pickled() -> None:
    layout = _mixed(_group(0), _group(1, quant="int8"))
    again = pickle.loads(pickle.dumps(layout))  # noqa: S301 - our own bytes
    assert (again, again.kv_dtype) == (layout, "bfloat16+int8[1]")


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "dtype"]
)
def test_from_config_refuses_missing_field(name: str) -> None:
    with pytest.raises(LayoutError, match=name):
        KVLayout.from_config(without(name))


def test_from_config_refuses_empty_mapping() -> None:
    with pytest.raises(LayoutError, match="num_hidden_layers"):
        KVLayout.from_config({})


@pytest.mark.parametrize("config", ["path/to/model", Path("path/to/model")], ids=["str", "path"])
@pytest.mark.parametrize("kind", [KVLayout, RopeSpec])
def test_from_config_says_that_a_path_is_no_config(
    kind: type[KVLayout | RopeSpec], config: object
) -> None:
    """Regression: it was refused as a config without fields."""
    said = (
        f"{kind.__name__}.from_config: config must be a transformers config, or the mapping read "
        f"from config.json, not {config!r}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        kind.from_config(config)


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
