"""Finds the text model in the config of a vision model with M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtrie.models.config import ConfigFields

# The type of the text model of each. What a vision model does with images is its engine's part.
TEXT_OF_VISION: Final[Mapping[str, str]] = {
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# Of the whole model, where its text model does not have its own.
_SHARED: Final = ("dtype", "kv_cache_dtype", "quantization_config")


def text_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of the text model; ``fields`` themselves if this is no such vision model.

    Older files have the fields of the text model next to ``vision_config``.
    """
    kind = TEXT_OF_VISION.get(fields.model_type or "")
    if kind is None:
        return fields
    found = fields.get("text_config")
    if found is None:
        return fields.changed(model_type=kind, vision_config=None)
    text = fields.other({"model_type": kind, **found} if isinstance(found, Mapping) else found)
    missing = [name for name in _SHARED if text.get(name) is None]
    return text.changed(**{name: fields.get(name) for name in missing})
