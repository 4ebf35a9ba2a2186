"""Keys under M-RoPE with an image inside the run, before it, and deleted, against transformers.

Positions are those that each vision model gives its own tokens (``get_rope_index``).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.test_rope_models import CASE, _error, _model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvtrie.kernels.reference import rotate
from kvtrie.models.rope_families import FAMILIES
from kvtrie.models.vision import TEXT_OF_VISION
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

MODELS = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm_ocr": "GlmOcrModel",
    "paddleocr_vl": "PaddleOCRVLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen2_vl": "Qwen2VLModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
}
# An image of 8 x 12 tokens takes 12 positions.
ROWS, COLUMNS = 8, 12
TOKENS = ROWS * COLUMNS
TEXT, IMAGE = 0, 1

by_type = pytest.mark.parametrize("name", sorted(TEXT_OF_VISION))


@cache
def _vision(name: str) -> Any:
    """The whole model without weights: its positions depend on its config alone."""
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    text = CASE[TEXT_OF_VISION[name]].config().to_dict()
    config: Any = CONFIG_MAPPING[name]
    with torch.device("meta"):
        return getattr(module, MODELS[name])._from_config(config(text_config=text))


def _positions(name: str, kinds: list[int]) -> Tensor:
    """``[3, 1, tokens]``; each run of ``IMAGE`` is one image."""
    model = _vision(name)
    types = torch.tensor([kinds])
    merge = model.config.vision_config.spatial_merge_size
    grids = torch.tensor([[1, ROWS * merge, COLUMNS * merge]] * (kinds.count(IMAGE) // TOKENS))
    found, _ = model.get_rope_index(
        torch.ones_like(types), image_grid_thw=grids, mm_token_type_ids=types
    )
    assert found.shape == (3, 1, len(kinds))
    positions: Tensor = found
    return positions


def _keys(name: str, embeddings: Tensor, positions: Tensor) -> list[Tensor]:
    model = _model(CASE[TEXT_OF_VISION[name]])
    with torch.no_grad():
        done = model(inputs_embeds=embeddings[None], position_ids=positions, use_cache=True)
    return [
        layer.keys[0]
        for layer in done.past_key_values.layers
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    ]


def _random(count: int, seed: int) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


# Text, an image, and text again: what is moved.
RUN = [TEXT] * 7 + [IMAGE] * TOKENS + [TEXT] * 9
HEAD, BLOCK = [TEXT] * 5, [TEXT] * 3 + [IMAGE] * TOKENS + [TEXT] * 2


def test_each_vision_type_has_a_text_type_with_positions_of_items() -> None:
    assert set(TEXT_OF_VISION.values()) == {
        name for name, family in FAMILIES.items() if family.item_positions
    }
    assert set(MODELS) == set(TEXT_OF_VISION)


@pytest.mark.parametrize("shift", [811, -137])
@by_type
def test_a_run_with_an_image_inside(name: str, shift: int) -> None:
    """In all layers, from the same context: every axis of every token shifts by one number."""
    spec = RopeSpec.from_config(CASE[TEXT_OF_VISION[name]].config())
    assert spec.item_positions
    embeddings, positions = _random(len(RUN), 1), _positions(name, RUN) + 200
    assert (positions[0] != positions[2]).any()
    old, new = (_keys(name, embeddings, at) for at in (positions, positions + shift))
    assert len(old) == len(spec.layers)
    for layer, keys in enumerate(old):
        assert _error(rotate(keys, spec, shift, layer), new[layer]) < 1e-4
        assert _error(rotate(keys, spec, shift - TOKENS + COLUMNS, layer), new[layer]) > 1e-2


@pytest.mark.parametrize(
    # Of the others, no layer with attention is before the first one with state.
    "name",
    [name for name in sorted(TEXT_OF_VISION) if not name.startswith("qwen3_5")],
)
def test_a_run_after_an_image_that_comes_or_goes(name: str) -> None:
    """The first layer, whose keys depend on no context; the run has an image of its own."""
    spec = RopeSpec.from_config(CASE[TEXT_OF_VISION[name]].config())
    run, head, block = (_random(len(one), n) for n, one in enumerate((RUN, HEAD, BLOCK)))
    kinds = {"short": HEAD + RUN, "long": HEAD + BLOCK + RUN}
    rows = {"short": torch.cat([head, run]), "long": torch.cat([head, block, run])}
    at = {which: _positions(name, of) for which, of in kinds.items()}
    keys = {which: _keys(name, rows[which], at[which])[0][:, -len(RUN) :] for which in kinds}
    (moved,) = (at["long"][..., -len(RUN) :] - at["short"][..., -len(RUN) :]).unique().tolist()
    assert moved == len(BLOCK) - TOKENS + COLUMNS
    assert _error(rotate(keys["short"], spec, moved), keys["long"]) < 1e-4
    assert _error(rotate(keys["long"], spec, -moved), keys["short"]) < 1e-4
    # The difference of tokens is not how far it moved.
    assert _error(rotate(keys["short"], spec, len(BLOCK)), keys["long"]) > 1e-2
    assert _error(rotate(keys["long"], spec, -len(BLOCK)), keys["short"]) > 1e-2


@by_type
def test_the_config_of_the_vision_model_is_read_as_that_of_its_text_model(name: str) -> None:
    config = _vision(name).config
    spec = RopeSpec.from_config(CASE[TEXT_OF_VISION[name]].config())
    assert RopeSpec.from_config(config) == spec
    nested = config.to_dict()
    assert RopeSpec.from_config(nested) == spec
    flat = {**nested, **nested["text_config"], "model_type": name, "text_config": None}
    assert RopeSpec.from_config(flat) == spec
    without_type = {key: one for key, one in nested["text_config"].items() if key != "model_type"}
    assert RopeSpec.from_config({**nested, "text_config": without_type}) == spec
