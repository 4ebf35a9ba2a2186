"""Chat formats, rendered by hand: the known truth that taggers are compared with.

Each format renders a conversation as its published template does, in a few lines, and labels every
piece. A small tokenizer makes ids of it; punctuation includes the newlines after it, as in real
vocabularies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvtrie import tags

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = str | None
Piece = tuple[str, Kind]


@dataclass(frozen=True)
class Said:
    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()


class Vocabulary:
    """A tokenizer of words, punctuation, newlines and the delimiters of all presets."""

    def __init__(self, *specials: str) -> None:
        several = {"<function_results>", "</function_results>"}
        several |= {"<｜DSML｜function_calls>", "</｜DSML｜function_calls>"}
        known = set(specials) | {"｜DSML｜", "<|constrain|>", "[gMASK]", "<sop>", "]~!b["}
        known |= {"<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"}
        known |= {"<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"}
        for form in tags.PRESETS.values():
            known |= {text for text, _ in form.delimiters()} - several
        ordered = sorted(known, key=len, reverse=True)
        self._pattern = re.compile(
            "|".join([*map(re.escape, ordered), r" ?\w+", r"\n+", r"[^\w\s]\n*", r"\s"])
        )
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        return [self.id(match.group()) for match in self._pattern.finditer(text)]

    def decode(self, token_ids: Any) -> str:
        return "".join(self._texts[token] for token in token_ids)

    def pieces(self, pieces: list[Piece]) -> tuple[list[int], list[Kind]]:
        """Ids of a rendered text, and the kind of each: that of the piece it begins in."""
        text = "".join(part for part, _ in pieces)
        kinds = [kind for part, kind in pieces for _ in part]
        found = list(self._pattern.finditer(text))
        return [self.id(match.group()) for match in found], [kinds[at.start()] for at in found]


@dataclass(frozen=True)
class Lab:
    """A format with its rendering.

    `render` is a template's text of a history, `asks` what it appends to ask for an answer, `says`
    what the model then generates.
    """

    preset: str
    render: Callable[[list[Said]], list[Piece]]
    asks: Callable[[list[Said]], list[Piece]]
    says: Callable[[Said], list[Piece]]
    in_loop: bool = True
    """Reasoning is kept inside a tool loop."""
    name: str = field(default="")

    def __str__(self) -> str:
        return self.name or self.preset


def last(messages: list[Said], wanted: Callable[[Said], bool]) -> int:
    return max((at for at, message in enumerate(messages) if wanted(message)), default=-1)


def is_user(message: Said) -> bool:
    return message.role == "user"


def is_final(message: Said) -> bool:
    return message.role == "assistant" and not message.calls


def qwen_body(message: Said) -> list[Piece]:
    pieces: list[Piece] = [(message.content, "answer")]
    for number, call in enumerate(message.calls):
        if message.content and not number:
            pieces.append(("\n", "answer"))
        elif number:
            pieces.append(("\n", None))
        pieces.append((f'<tool_call>\n{{"name": "{call}"}}\n</tool_call>', "tool_call"))
    return [*pieces, ("<|im_end|>", None)]


def qwen(messages: list[Said], *, keep: bool = True) -> list[Piece]:
    boundary = last(messages, is_user)
    pieces: list[Piece] = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            pieces.append(("<|im_start|>assistant\n", None))
            if message.reasoning and at > boundary and keep:
                pieces.append((f"<think>\n{message.reasoning}\n</think>\n\n", "reasoning"))
            pieces += qwen_body(message)
        elif message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            pieces.append((f"<|im_start|>user\n{text}<|im_end|>", "tool_result"))
        else:
            text = f"<|im_start|>{message.role}\n{message.content}<|im_end|>"
            pieces.append((text, message.role))
        pieces.append(("\n", None))
    return pieces


QWEN3 = Lab(
    "qwen3",
    qwen,
    lambda _: [("<|im_start|>assistant\n", None)],
    lambda said: [(f"<think>\n{said.reasoning}\n</think>\n\n", "reasoning"), *qwen_body(said)],
)
QWEN3_STUB = Lab(
    "qwen3",
    lambda messages: qwen(messages, keep=False),
    lambda _: [("<|im_start|>assistant\n", None), ("<think>\n\n</think>\n\n", "reasoning")],
    qwen_body,
    in_loop=False,
    name="qwen3-stub",
)
QWQ = Lab(
    "qwen3",
    lambda messages: qwen(messages, keep=False),
    lambda _: [("<|im_start|>assistant\n", None), ("<think>\n", "reasoning")],
    lambda said: [(f"{said.reasoning}\n</think>\n\n", "reasoning"), *qwen_body(said)],
    in_loop=False,
    name="qwq",
)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def deepseek_call(call: str) -> str:
    return f"<｜tool▁call▁begin｜>{call}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"


def deepseek_calls(said: Said) -> list[Piece]:
    if not said.calls:
        return []
    calls = "".join(map(deepseek_call, said.calls))
    return [(f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>", "tool_call")]


def deepseek(
    name: str,
    *,
    outputs: str,
    asks_after: Callable[[Said], bool],
    closed: list[Piece],
    opening: str,
    closing: str,
) -> Lab:
    """R1 and V3.1; `closed` is in place of the reasoning of turns that are over."""

    def render(messages: list[Said]) -> list[Piece]:
        pieces: list[Piece] = [(BOS, "system")]
        for before, message in pairwise([Said("nobody"), *messages]):
            if message.role == "system":
                pieces.append((message.content, "system"))
            elif message.role == "user":
                pieces.append((f"<｜User｜>{message.content}", "user"))
            elif message.role == "tool":
                text = f"<｜tool▁output▁begin｜>{message.content}<｜tool▁output▁end｜>"
                pieces.append((outputs.format(text), "tool_result"))
            else:
                if asks_after(before):
                    pieces += [("<｜Assistant｜>", None), *closed]
                pieces += [(message.content, "answer"), *deepseek_calls(message), (EOS, None)]
        return pieces

    return Lab(
        name,
        render,
        lambda messages: (
            []
            if messages[-1].role == "tool"
            else [("<｜Assistant｜>", None), (opening, "reasoning")]
        ),
        lambda said: [
            (f"{said.reasoning}{closing}", "reasoning"),
            (said.content, "answer"),
            *deepseek_calls(said),
            (EOS, None),
        ],
        in_loop=False,
    )


R1 = deepseek(
    "deepseek-r1",
    outputs="<｜tool▁outputs▁begin｜>{}<｜tool▁outputs▁end｜>",
    asks_after=lambda before: before.role != "tool",
    closed=[],
    opening="<think>\n",
    closing="\n</think>\n\n",
)
V31 = deepseek(
    "deepseek-v3.1",
    outputs="{}",
    asks_after=is_user,
    closed=[("</think>", "reasoning")],
    opening="<think>",
    closing="</think>",
)


def v32_body(said: Said) -> list[Piece]:
    pieces: list[Piece] = [(said.content, "answer")]
    if said.calls:
        calls = "".join(
            f'<｜DSML｜invoke name="{call}">\n</｜DSML｜invoke>\n' for call in said.calls
        )
        pieces.append(("\n\n", "answer" if said.content else None))
        text = f"<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>"
        pieces.append((text, "tool_call"))
    return [*pieces, (EOS, None)]


def v32(messages: list[Said]) -> list[Piece]:
    boundary = last(messages, is_user)
    pieces: list[Piece] = [(BOS, "system")]
    for at, message in enumerate(messages):
        if message.role == "system":
            pieces.append((message.content, "system"))
        elif message.role == "user":
            pieces.append((f"<｜User｜>{message.content}", "user"))
            pieces.append(("<｜Assistant｜>", None))
            pieces.append(("<think>" if at >= boundary else "</think>", "reasoning"))
        elif message.role == "tool":
            text = f"<function_results>\n<result>{message.content}</result>\n</function_results>"
            pieces += [("\n\n", None), (text, "tool_result"), ("\n\n", None)]
            pieces.append(("<think>" if at >= boundary else "</think>", "reasoning"))
        else:
            if at > boundary:
                pieces.append((f"{message.reasoning}</think>", "reasoning"))
            pieces += v32_body(message)
    return pieces


V32 = Lab(
    "deepseek-v3.2",
    v32,
    lambda _: [],
    lambda said: [(f"{said.reasoning}</think>", "reasoning"), *v32_body(said)],
)


def glm_body(said: Said) -> list[Piece]:
    pieces: list[Piece] = []
    if said.content:
        pieces += [("\n", None), (said.content, "answer")]
    for number, call in enumerate(said.calls):
        pieces.append(("\n", "answer" if said.content and not number else None))
        text = f"<tool_call>{call}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"
        pieces.append((text, "tool_call"))
    return pieces


def glm(messages: list[Said]) -> list[Piece]:
    boundary = last(messages, is_user)
    pieces: list[Piece] = [("[gMASK]<sop>", None)]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            reasoning = message.reasoning if at > boundary else ""
            pieces += [("<|assistant|>\n", None), (f"<think>{reasoning}</think>", "reasoning")]
            pieces += glm_body(message)
        elif message.role == "tool":
            text = f"<|observation|>\n<tool_response>\n{message.content}\n</tool_response>"
            pieces.append((text, "tool_result"))
        else:
            pieces.append((f"<|{message.role}|>\n{message.content}", message.role))
    return pieces


GLM = Lab(
    "glm",
    glm,
    lambda _: [("<|assistant|>", None)],
    lambda said: [("\n", None), (f"<think>{said.reasoning}</think>", "reasoning"), *glm_body(said)],
)


def kimi_body(said: Said) -> list[Piece]:
    pieces: list[Piece] = [(said.content, "answer")]
    if said.calls:
        text = "".join(
            f"<|tool_call_begin|>{call}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            for call in said.calls
        )
        pieces.append(
            (f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>", "tool_call")
        )
    return [*pieces, ("<|im_end|>", None)]


def kimi(messages: list[Said]) -> list[Piece]:
    boundary = last(messages, is_final)
    pieces: list[Piece] = [("<|im_system|>tool_declare<|im_middle|>[]<|im_end|>", "system")]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            reasoning = message.reasoning if at > boundary else ""
            pieces.append(("<|im_assistant|>assistant<|im_middle|>", None))
            pieces += [(f"<think>{reasoning}</think>", "reasoning"), *kimi_body(message)]
        elif message.role == "tool":
            text = f"## Return of call\n{message.content}"
            pieces.append((f"<|im_system|>lookup<|im_middle|>{text}<|im_end|>", "tool_result"))
        else:
            text = f"{message.role}<|im_middle|>{message.content}<|im_end|>"
            pieces.append((f"<|im_{message.role}|>{text}", message.role))
    return pieces


KIMI = Lab(
    "kimi-k2",
    kimi,
    lambda _: [("<|im_assistant|>assistant<|im_middle|>", None)],
    lambda said: [(f"<think>{said.reasoning}</think>", "reasoning"), *kimi_body(said)],
)


def minimax_body(said: Said) -> list[Piece]:
    pieces: list[Piece] = [(said.content, "answer")]
    if said.calls:
        text = "".join(f'<invoke name="{call}">\n</invoke>\n' for call in said.calls)
        pieces.append((f"<minimax:tool_call>\n{text}</minimax:tool_call>", "tool_call"))
    return [*pieces, ("[e~[", None)]


def minimax(messages: list[Said]) -> list[Piece]:
    boundary = last(messages, is_user)
    pieces: list[Piece] = [("]~!b[", None)]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            pieces.append(("]~b]ai\n", None))
            if message.reasoning and at > boundary:
                pieces.append((f"<think>\n{message.reasoning}\n</think>\n\n", "reasoning"))
            pieces += minimax_body(message)
        elif message.role == "tool":
            text = f"]~b]tool\n<response>{message.content}</response>[e~["
            pieces.append((text, "tool_result"))
        else:
            pieces.append((f"]~b]{message.role}\n{message.content}[e~[", message.role))
        pieces.append(("\n", None))
    return pieces


MINIMAX = Lab(
    "minimax-m2",
    minimax,
    lambda _: [("]~b]ai\n", None), ("<think>\n", "reasoning")],
    lambda said: [(f"{said.reasoning}\n</think>\n\n", "reasoning"), *minimax_body(said)],
)


def harmony_message(said: Said, *, reasoning: bool, first: str, end: str) -> list[Piece]:
    """One assistant's message of the history, which is several of harmony's."""
    pieces: list[Piece] = []
    head = first
    if reasoning:
        text = f"{head}<|channel|>analysis<|message|>{said.reasoning}<|end|>"
        pieces.append((text, "reasoning"))
        head = "<|start|>assistant"
    for call in said.calls:
        text = f"{head}<|channel|>commentary to=functions.{call} <|constrain|>json"
        pieces.append((f"{text}<|message|>{{}}<|call|>", "tool_call"))
    if not said.calls:
        pieces.append((f"{head}<|channel|>final<|message|>", None))
        pieces += [(said.content, "answer"), (end, None)]
    return pieces


def harmony(messages: list[Said]) -> list[Piece]:
    boundary = last(messages, is_final)
    pieces: list[Piece] = [("<|start|>system<|message|>Reasoning: high<|end|>", "system")]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            pieces += harmony_message(
                message, reasoning=at > boundary, first="<|start|>assistant", end="<|end|>"
            )
        elif message.role == "tool":
            head = "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>"
            pieces.append((f"{head}{message.content}<|end|>", "tool_result"))
        else:
            role = "developer" if message.role == "system" else message.role
            text = f"<|start|>{role}<|message|>{message.content}<|end|>"
            pieces.append((text, message.role))
    return pieces


def harmony_asks(_: list[Said]) -> list[Piece]:
    # The header belongs to the reasoning that follows.
    return [("<|start|>assistant", "reasoning")]


GPT_OSS = Lab(
    "gpt-oss",
    harmony,
    harmony_asks,
    lambda said: harmony_message(said, reasoning=True, first="", end="<|return|>"),
)

LABS = [QWEN3, QWEN3_STUB, QWQ, R1, V31, V32, GLM, KIMI, MINIMAX, GPT_OSS]
