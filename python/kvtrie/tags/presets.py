"""The chat formats that kvtrie knows by name.

They come from published chat templates, named in `sources`. `dataclasses.replace` makes a variant.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvtrie.tags.formats import Channels, Format, MessageStart, Pair

if TYPE_CHECKING:
    from collections.abc import Mapping

QWEN3: Final = Format(
    name="qwen3",
    starts=(
        MessageStart(
            delimiter="<|im_start|>",
            names=(
                ("system", "system"),
                ("user", "user"),
                ("assistant", "assistant"),
                ("tool", "tool"),
            ),
        ),
    ),
    ends=("<|im_end|>", "<|endoftext|>"),
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>"),
        Pair(kind="tool_call", open="<tool_call>", close="</tool_call>"),
    ),
    wrapped=("<tool_response>", "</tool_response>"),
    optional=frozenset({"<|endoftext|>"}),
    sources=(
        "Qwen/Qwen3-8B tokenizer_config.json (chat_template)",
        "ggml-org/llama.cpp models/templates/Qwen-QwQ-32B.jinja",
    ),
)

_DEEPSEEK_ENDS: Final = ("<｜end▁of▁sentence｜>",)
_DEEPSEEK_STARTS: Final = (
    MessageStart(delimiter="<｜begin▁of▁sentence｜>", role="system"),
    MessageStart(delimiter="<｜User｜>", role="user"),
    MessageStart(delimiter="<｜Assistant｜>", role="assistant"),
)

DEEPSEEK_R1: Final = Format(
    name="deepseek-r1",
    starts=(
        *_DEEPSEEK_STARTS,
        MessageStart(
            delimiter="<｜tool▁outputs▁begin｜>",
            role="tool",
            end="<｜tool▁outputs▁end｜>",
            then="assistant",
        ),
    ),
    ends=_DEEPSEEK_ENDS,
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>"),
        Pair(kind="tool_call", open="<｜tool▁calls▁begin｜>", close="<｜tool▁calls▁end｜>"),
    ),
    initial="system",
    sources=(
        "deepseek-ai/DeepSeek-R1 tokenizer_config.json (chat_template)",
        "ggml-org/llama.cpp models/templates/llama-cpp-deepseek-r1.jinja",
    ),
)

DEEPSEEK_V31: Final = Format(
    name="deepseek-v3.1",
    starts=(
        *_DEEPSEEK_STARTS,
        MessageStart(
            delimiter="<｜tool▁output▁begin｜>",
            role="tool",
            end="<｜tool▁output▁end｜>",
            then="assistant",
        ),
    ),
    ends=_DEEPSEEK_ENDS,
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>", drops="to_close"),
        Pair(kind="tool_call", open="<｜tool▁calls▁begin｜>", close="<｜tool▁calls▁end｜>"),
    ),
    initial="system",
    sources=("ggml-org/llama.cpp models/templates/deepseek-ai-DeepSeek-V3.1.jinja",),
)

DEEPSEEK_V32: Final = Format(
    name="deepseek-v3.2",
    starts=(
        *_DEEPSEEK_STARTS,
        MessageStart(
            delimiter="<function_results>",
            role="tool",
            end="</function_results>",
            then="assistant",
            text=True,
        ),
    ),
    ends=_DEEPSEEK_ENDS,
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>", drops="to_close"),
        Pair(kind="tool_call", open="<｜DSML｜function_calls>", close="</｜DSML｜function_calls>"),
    ),
    initial="system",
    sources=(
        "deepseek-ai/DeepSeek-V3.2 encoding/encoding_dsv32.py",
        "ggml-org/llama.cpp models/templates/DeepSeek-V3.2.jinja",
    ),
)

GLM: Final = Format(
    name="glm",
    starts=(
        MessageStart(delimiter="<|system|>", role="system"),
        MessageStart(delimiter="<|user|>", role="user"),
        MessageStart(delimiter="<|assistant|>", role="assistant"),
        MessageStart(delimiter="<|observation|>", role="tool"),
    ),
    ends=("<|endoftext|>",),
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>", drops="body"),
        Pair(kind="tool_call", open="<tool_call>", close="</tool_call>"),
    ),
    optional=frozenset({"<|endoftext|>"}),
    sources=(
        "ggml-org/llama.cpp models/templates/GLM-4.6.jinja",
        "ggml-org/llama.cpp models/templates/glm_4_5.jinja",
    ),
)

KIMI_K2: Final = Format(
    name="kimi-k2",
    starts=(
        MessageStart(delimiter="<|im_user|>", role="user", header_end="<|im_middle|>"),
        MessageStart(delimiter="<|im_assistant|>", role="assistant", header_end="<|im_middle|>"),
        # A tool result is a system message with the tool's name in its header.
        MessageStart(
            delimiter="<|im_system|>",
            role="tool",
            names=(("system", "system"), ("tool_declare", "system")),
            header_end="<|im_middle|>",
        ),
    ),
    ends=("<|im_end|>", "[EOS]"),
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>", drops="body"),
        Pair(
            kind="tool_call",
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
            ends_reasoning=True,
        ),
    ),
    boundary="final",
    optional=frozenset({"[EOS]"}),
    sources=(
        "ggml-org/llama.cpp models/templates/moonshotai-Kimi-K2-Thinking.jinja",
        "vllm-project/vllm vllm/reasoning/kimi_k2_reasoning_parser.py",
    ),
)

MINIMAX_M2: Final = Format(
    name="minimax-m2",
    starts=(
        MessageStart(
            delimiter="]~b]",
            names=(
                ("system", "system"),
                ("user", "user"),
                ("ai", "assistant"),
                ("tool", "tool"),
            ),
        ),
    ),
    ends=("[e~[",),
    pairs=(
        Pair(kind="reasoning", open="<think>", close="</think>"),
        Pair(kind="tool_call", open="<minimax:tool_call>", close="</minimax:tool_call>"),
    ),
    sources=("ggml-org/llama.cpp models/templates/MiniMax-M2.jinja",),
)

GPT_OSS: Final = Format(
    name="gpt-oss",
    starts=(
        # The role of a tool result is the tool's name.
        MessageStart(
            delimiter="<|start|>",
            role="tool",
            names=(
                ("system", "system"),
                ("developer", "system"),
                ("user", "user"),
                ("assistant", "assistant"),
            ),
            header_end="<|message|>",
        ),
    ),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    channels=Channels(
        delimiter="<|channel|>",
        kinds=(("analysis", "reasoning"), ("commentary", "answer"), ("final", "answer")),
        final="final",
        recipient=" to=",
    ),
    boundary="final",
    sources=(
        "openai/openai-cookbook articles/openai-harmony.md",
        "ggml-org/llama.cpp models/templates/openai-gpt-oss-120b.jinja",
    ),
)

PRESETS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        form.name: form
        for form in (
            QWEN3,
            DEEPSEEK_R1,
            DEEPSEEK_V31,
            DEEPSEEK_V32,
            GLM,
            KIMI_K2,
            MINIMAX_M2,
            GPT_OSS,
        )
    }
)
"""Every preset by its name."""


def preset(name: str) -> Format:
    """The format of this name.

    Args:
        name: One of `PRESETS`.

    Raises:
        ValueError: There is no such preset.
    """
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        msg = f"preset: {name!r} is not a preset; the presets are {', '.join(PRESETS)}"
        raise ValueError(msg) from None
