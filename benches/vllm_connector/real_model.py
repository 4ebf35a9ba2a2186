"""A real model in a real engine: tokens computed, time to the first token, and replies.

    make bench-vllm-real     # REAL_VLLM_FLAGS="--gate model.gate.json": one configuration more

For each workload a history of real text is computed. Then comes its next prompt, whose last message
asks for a fact that the history states: once for the time, and for more facts. vLLM alone, and the
connector with its scheduler under each policy, run in processes of their own. Prompts are as long
as the model's positions allow: the scale is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

# ruff: noqa: E402 - after the path
from real import texts
from real.conversations import PLACES, VALUES, WORDINGS
from workloads.history import Piece
from workloads.registry import WORKLOADS, named
from workloads.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.vllm.engine import Engine
    from workloads.history import Conversation

FAMILIES = ("W01", "W03", "W11", "W12", "W13", "W15", "W17", "W19")
MODEL = ROOT / "target" / "models" / "smollm2-135m-instruct"
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "rotated": {"gate": "unchecked"},
    "recompute_share 0.2": {"gate": "unchecked", "policy": {"recompute_share": 0.2}},
}
GATED = "gate"
POSITIONS = 8192
REPLY = 16
BLOCK = 32

_WORDING = WORDINGS["reporting"]
_STEM = "Note: The {} {} is"
OPENS = "The facts are as follows.\n"
# A piece of text that is shorter holds no fact.
_LEAST_TEXT = 48


@dataclass(frozen=True)
class Fact:
    """A sentence without its value, the value, and the tokens of the sentence."""

    place: str
    what: str
    value: str
    sentence: tuple[int, ...]

    @property
    def stem(self) -> str:
        return _STEM.format(self.place, self.what)


class RealWriter(Writer):
    """Writes pieces of real text, each text once, with a fact in every longer one."""

    def __init__(self, corpus: np.ndarray, tokenizer: Any, number: int) -> None:  # noqa: ANN401 - transformers has no types
        super().__init__(0, number)
        self._corpus = corpus
        self._tokenizer = tokenizer
        rng = Random(number)
        self._at = rng.randrange(len(corpus))
        self._places = rng.sample(PLACES, len(PLACES))
        self._values = [rng.sample(values, len(values)) for values in VALUES]
        self.facts: list[Fact] = []

    def ids(self, text: str) -> list[int]:
        return [int(one) for one in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, length: int, kind: str) -> Piece:
        tokens = np.take(self._corpus, range(self._at, self._at + length), mode="wrap")
        self._at = (self._at + length) % len(self._corpus)
        number = len(self.facts)
        if length >= _LEAST_TEXT and kind != "reasoning" and number < len(PLACES):
            at, which = divmod(number, len(VALUES))
            place, value = self._places[number], self._values[which][at]
            fact = Fact(place, _WORDING.facts[which], value, ())
            # Said twice, so that a small model is sure of it.
            sentence = self.ids(f"\n\n{fact.stem} {value}. {fact.stem} {value}.\n\n")
            tokens = tokens.copy()
            tokens[length // 4 : length // 4 + len(sentence)] = sentence
            self.facts.append(replace(fact, sentence=tuple(sentence)))
        return Piece(tokens.astype(np.uint32), kind)

    def mark(self, *names: str, kind: str = "") -> list[Piece]:
        special = {"bos": "<|im_start|>", "eos": "<|im_end|>", "newline": "\n"}
        ids = [self.ids(special.get(name, name))[0] for name in names]
        return [Piece(np.array([one], np.uint32), kind) for one in ids]

    def question(self, fact: Fact) -> list[int]:
        """The last message, and the beginning of the reply: a model without training continues."""
        return self.ids(
            f"<|im_end|>\n<|im_start|>user\nWhat is the {fact.place} {fact.what}? Quote the note."
            f"<|im_end|>\n<|im_start|>assistant\n{OPENS}{fact.stem}"
        )


@dataclass(frozen=True)
class Case:
    """One edited history, the questions about it, and the scale of its texts."""

    history: list[int]
    prompts: list[list[int]]
    values: list[str]
    num_new: int
    scale: float


def case(name: str, number: int, questions: int, corpus: np.ndarray, tokenizer: Any) -> Case:  # noqa: ANN401 - likewise
    """The largest scale, at most 1, at which history and prompt fit with the reply."""
    low, high = 0.0, 1.0
    made = _case(name, number, questions, corpus, tokenizer, high)
    if _length(made) > POSITIONS:
        for _ in range(12):
            middle = (low + high) / 2
            made = _case(name, number, questions, corpus, tokenizer, middle)
            low, high = (middle, high) if _length(made) <= POSITIONS else (low, middle)
        made = _case(name, number, questions, corpus, tokenizer, low)
    return made


def _length(made: Case) -> int:
    return max(len(made.history), *(len(one) for one in made.prompts)) + REPLY


def _case(
    name: str,
    number: int,
    questions: int,
    corpus: np.ndarray,
    tokenizer: Any,  # noqa: ANN401 - likewise
    scale: float,
) -> Case:
    writer = RealWriter(corpus, tokenizer, number)
    workload = WORKLOADS[name]
    found: Conversation = workload.client(writer, workload.shape.scaled(scale))
    prompt = [int(one) for one in found.prompt]
    kept = sum(one.length for one in found.kept)
    text = _text(prompt)
    facts = [one for one in writer.facts if _text(one.sentence) in text]
    facts = Random(number).sample(facts, min(questions, len(facts)))
    prompts = [prompt + writer.question(one) for one in facts]
    return Case(
        [int(one) for one in found.cached[: found.num_computed]],
        prompts,
        [one.value for one in facts],
        len(prompts[0]) - kept,
        scale,
    )


def _text(tokens: Sequence[int]) -> str:
    return " ".join(str(one) for one in tokens) + " "


def workloads() -> list[str]:
    return [name for name in WORKLOADS if name in FAMILIES]


def measure(name: str, settings: dict[str, Any] | None, options: argparse.Namespace) -> None:
    from tests.vllm.engine import Engine  # noqa: PLC0415 - vLLM
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    passages = texts.passages(texts.fetch(options.texts))
    corpus = np.array(tokenizer(" ".join(passages), add_special_tokens=False)["input_ids"])
    engine = Engine(
        options.model,
        connector=settings,
        gaps=settings is not None,
        blocks=3 * POSITIONS // BLOCK,
        block_size=BLOCK,
        shadow=False,
        dtype=options.dtype,
        max_model_len=POSITIONS,
        max_num_batched_tokens=POSITIONS,
    )
    engine.ask(corpus[:100].tolist(), max_tokens=2)
    for workload in options.workloads or workloads():
        for number in range(options.rounds):
            made = case(workload, number, options.questions, corpus, tokenizer)
            row = {
                "workload": workload,
                "scale": made.scale,
                "prompt": len(made.prompts[0]),
                "new": made.num_new,
                **asked(engine, made, f"{workload}-{number}"),
                "load": os.getloadavg()[0],
            }
            row["facts"] = [
                value in tokenizer.decode(reply)
                for value, reply in zip(made.values, row["replies"], strict=True)
            ]
            print("ROW", name, json.dumps(row), flush=True)


def asked(engine: Engine, made: Case, session: str) -> dict[str, Any]:
    """Each prompt next to its history alone: what another question had moved would be in place."""
    given = {"extra_args": {"kv_transfer_params": {"session": session}}}

    def begin() -> None:
        engine.reset()
        engine.ask(made.history, max_tokens=1, **given)

    begin()
    began = time.perf_counter()
    computed = engine.computed_for(made.prompts[0], **given)
    seconds = time.perf_counter() - began
    replies = []
    for prompt in made.prompts:
        begin()
        replies.append(engine.ask(prompt, max_tokens=REPLY, **given).tokens)
    return {"computed": computed, "seconds": seconds, "replies": replies}


def rows(command: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this file
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            name, _, row = line[4:].partition(" {")
            yield name, json.loads("{" + row)
            print(line, end="", file=sys.stderr, flush=True)
    if process.wait():
        sys.exit(process.returncode)


def table(found: dict[str, dict[str, list[dict[str, Any]]]], names: list[str]) -> str:
    lines = [
        "| workload | scale | prompt | new | "
        + " | ".join(f"{name}: computed (s)" for name in names)
        + " | "
        + " | ".join(f"{name}: replies, facts" for name in names)
        + " |",
        "| --- " * (4 + 2 * len(names)) + "|",
    ]
    totals: Counter[str] = Counter()
    for workload, of in found.items():
        plain = of[names[0]]
        cells = []
        for name in names:
            computed = sum(row["computed"] for row in of[name]) / len(of[name])
            seconds = sum(row["seconds"] for row in of[name]) / len(of[name])
            totals[f"{name}: computed"] += round(computed)
            cells.append(f"{computed:,.0f} ({seconds:.2f})")
        for name in names:
            pairs = [
                pair
                for ours, theirs in zip(of[name], plain, strict=True)
                for pair in zip(ours["replies"], theirs["replies"], strict=True)
            ]
            same = sum(ours == theirs for ours, theirs in pairs)
            facts = sum(sum(row["facts"]) for row in of[name])
            totals[f"{name}: same"] += same
            totals[f"{name}: facts"] += facts
            totals[f"{name}: asked"] += len(pairs)
            cells.append(f"{same}/{len(pairs)}, {facts}/{len(pairs)}")
        row = plain[0]
        cells = [f"{row['prompt']:,}", f"{row['new']:,}", *cells]
        lines.append(f"| {named(workload)} | {row['scale']:.2f} | " + " | ".join(cells) + " |")
    said = (
        f"{name}: {totals[f'{name}: computed']:,} computed, {totals[f'{name}: same']} of "
        f"{totals[f'{name}: asked']} replies as vLLM alone, {totals[f'{name}: facts']} facts"
        for name in names
    )
    return "\n".join([*lines, "", *said])


def main() -> None:
    global POSITIONS  # noqa: PLW0603 - a constant of one run
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="one configuration, in this process")
    parser.add_argument("--gate", help="a gate file: one configuration more, as it clears")
    parser.add_argument("--policy", type=json.loads, help="of that one, as JSON; none: the gate's")
    parser.add_argument("--workloads", nargs="*", choices=workloads())
    parser.add_argument("--rounds", type=int, default=1, help="conversations of each workload")
    parser.add_argument("--questions", type=int, default=5, help="about each conversation")
    parser.add_argument("--positions", type=int, default=POSITIONS)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--texts", type=Path, default=texts.FOLDER)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    POSITIONS = options.positions
    wanted = dict(CONFIGURATIONS)
    if options.gate:
        given = {} if options.policy is None else {"policy": options.policy}
        wanted[GATED] = {"gate": options.gate, **given}
    if options.only:
        measure(options.only, wanted[options.only], options)
        return
    if not options.model.is_dir():
        sys.exit(f"{options.model} is not there: `make models` fetches it")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    began = os.getloadavg()
    for name in wanted:
        for _, row in rows([sys.executable, __file__, *sys.argv[1:], "--only", name]):
            found.setdefault(row["workload"], {}).setdefault(name, []).append(row)
    print(table(found, list(wanted)))
    loads = [row["load"] for of in found.values() for some in of.values() for row in some]
    print(f"\nload average: {began[0]:.1f} before, {min(loads):.1f} to {max(loads):.1f} meanwhile")


if __name__ == "__main__":
    main()
