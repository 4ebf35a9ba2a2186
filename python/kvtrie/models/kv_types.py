"""Quantised KV by name: which channels of a row are codes, and why a type is refused.

A stored row of K is bytes. What rotates decides what a move must do:

* ``layer``: every channel is a code of one byte; the scale is one number per layer or head. Source
  and destination have the same scale, so it cancels, and no move needs its value.
* ``row``: as before, and the row ends with a float32 scale of its own.
* ``block``: as ``row``, but all scales of a block come after all of its codes.
* ``tail``: codes and scales do not rotate; the channels that rotate are bfloat16, last in the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvtrie.models.config import config_field

if TYPE_CHECKING:
    from collections.abc import Iterator

Codes = Literal["e4m3", "e5m2", "int8"]
Scales = Literal["layer", "row", "block", "tail"]

SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class KVType:
    """How a quantised pool stores K and V.

    Attributes:
        name: As vLLM's ``kv_cache_dtype`` has it, where it has it; gates and namespaces key on it.
        codes: What a byte of K is.
        scales: Where the scales are, as the module says.
        dtypes: Element types that engines give the tensors.
        head_dim: The only width of K, if there is one.
        k_bytes: Bytes of a row of K of that width.
        is_single: One row per token: one head, and no V.
        is_power_of_two: Scales are powers of two.
    """

    name: str
    codes: Codes
    scales: Scales
    dtypes: tuple[str, ...]
    head_dim: int | None = None
    k_bytes: int | None = None
    is_single: bool = False
    is_power_of_two: bool = False

    @property
    def requantizes(self) -> bool:
        """Whether a rotation rounds codes again, and not only bfloat16."""
        return self.scales != "tail"

    def k_row(self, head_dim: int) -> int:
        """Bytes of a head's row of K."""
        if self.k_bytes is not None:
            return self.k_bytes
        return head_dim + (SCALE_BYTES if self.scales == "row" else 0)

    def v_row(self, v_head_dim: int) -> int:
        """Bytes of a head's row of V; of ``block`` scales, which have its place, those of one."""
        if self.scales == "block":
            return SCALE_BYTES
        if v_head_dim == 0:
            return 0
        return v_head_dim + (SCALE_BYTES if self.scales == "row" else 0)


_E4M3: Final = ("uint8", "float8_e4m3fn")
_E5M2: Final = ("uint8", "float8_e5m2")
_INT8: Final = ("int8", "uint8")

# The bfloat16 tail of fp8_ds_mla: 64 channels after 512 codes, which have four float32 scales.
DS_MLA_LATENT: Final = 512
DS_MLA_DIM: Final = DS_MLA_LATENT + 64
DS_MLA_TAIL: Final = DS_MLA_LATENT + 4 * SCALE_BYTES
DS_MLA_BYTES: Final = DS_MLA_TAIL + 2 * 64

KV_TYPES: Final = {
    one.name: one
    for one in (
        KVType("fp8_e4m3", "e4m3", "layer", _E4M3),
        KVType("fp8_e5m2", "e5m2", "layer", _E5M2),
        KVType("int8", "int8", "layer", _INT8),
        KVType("fp8_per_token_head", "e4m3", "row", _E4M3),
        KVType("int8_per_token_head", "int8", "row", _INT8),
        KVType(
            "fp8_ds_mla",
            "e4m3",
            "tail",
            _E4M3,
            head_dim=DS_MLA_DIM,
            k_bytes=DS_MLA_BYTES,
            is_single=True,
        ),
        KVType("fp8_index", "e4m3", "block", _E4M3, is_single=True, is_power_of_two=True),
    )
}

# The beginning of a name, and why such KV is refused. The first that fits counts.
_REFUSED: Final = (
    ("fp8_inc", "its number format is another one"),
    ("nvfp4_ds_mla", "its RoPE channels are quantised too, without a scale"),
    ("turboquant", "K is transformed before it is rounded, so its codes do not rotate"),
    ("ultraquant", "groups of 4-bit codes share a scale"),
    ("int4_per_token_head", "K is transformed before it is rounded, so its codes do not rotate"),
    ("nvfp4", "groups of 4-bit codes share a scale"),
    ("mxfp", "groups of codes share a scale"),
    ("int4", "what rounding 4-bit codes again costs was not measured"),
    ("uint4", "what rounding 4-bit codes again costs was not measured"),
    ("fp4", "what rounding 4-bit codes again costs was not measured"),
)
_FNUZ: Final = "fnuz"

_PLAIN: Final = ("auto", "bfloat16", "float16", "float32", "float64")
_FIELDS: Final = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype")


def refusal(name: object) -> str | None:
    """Why a pool cannot hold KV of this type; None if it can."""
    if isinstance(name, str) and name in KV_TYPES:
        return None
    text = str(name).lower()
    if _FNUZ in text:
        return "its number format has another bias"
    if text in ("fp8", "float8"):
        return (
            "the name has several formats: name fp8_e4m3, fp8_e5m2 or, of DeepSeek's sparse MLA, "
            "fp8_ds_mla"
        )
    for beginning, why in _REFUSED:
        if text.startswith(beginning):
            return why
    return f"it is unknown; known are {', '.join(KV_TYPES)}"


def quantized_fields(config: object) -> Iterator[tuple[str, object]]:
    """The fields of a model's config that say that its KV is quantised, and their values."""
    value = config_field(config, "kv_cache_dtype")
    if not _is_plain(value):
        yield "kv_cache_dtype", value
    quantization = config_field(config, "quantization_config")
    for name in _FIELDS:
        value = config_field(quantization, name)
        if not _is_plain(value):
            yield f"quantization_config.{name}", value


def _is_plain(value: object) -> bool:
    return value is None or str(value).removeprefix("torch.").lower() in _PLAIN
