"""What the model itself said about each passage, greedily: replies and reasoning of conversations.

    python -m real.recorded target/models/smollm2-135m-instruct

It writes `benches/real/recorded.jsonl`, one line for each passage, which is kept: rounding differs
between machines, and a conversation must not. It takes five minutes on one core.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

PATH: Final = Path(__file__).resolve().parent / "recorded.jsonl"
QUESTION: Final = "What does this text say?"
OPEN: Final = "<think>\nThe user"
MOST_TOKENS: Final = 28
BATCH: Final = 32


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage with the model's own reply to it, and reasoning about it."""

    text: str
    reply: str
    reasoning: str


def load(paths: list[Path], path: Path = PATH) -> list[Passage]:
    """The passages of the texts that have a record, in the order of the texts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = {row["passage"]: row for row in map(json.loads, lines)}
    found = []
    for text in texts.passages(paths):
        row = said.get(name(text))
        if row is not None:
            found.append(Passage(text, row["reply"], row["reasoning"]))
    return found


def name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(model: Any, tokenizer: Any, passages: Sequence[str], path: Path = PATH) -> None:  # noqa: ANN401 - transformers has no types for them
    rows: list[dict[str, str]] = []
    for start in range(0, len(passages), BATCH // 2):
        some = passages[start : start + BATCH // 2]
        prompts = [_prompt(tokenizer, text) for text in some]
        said = _greedy(model, tokenizer, prompts + [one + OPEN for one in prompts])
        for at, text in enumerate(some):
            whole = OPEN.removeprefix("<think>\n") + said[len(some) + at]
            reasoning = whole.partition("</think>")[0]
            rows.append({"passage": name(text), "reply": said[at], "reasoning": reasoning})
        print(f"recorded: {len(rows)} of {len(passages)}", flush=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _prompt(tokenizer: Any, text: str) -> str:  # noqa: ANN401 - likewise
    messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _greedy(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:  # noqa: ANN401 - likewise
    import torch  # noqa: PLC0415 - reading records needs no torch

    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [
        " ".join(text.split()) for text in tokenizer.batch_decode(new, skip_special_tokens=True)
    ]


def main() -> int:
    import torch  # noqa: PLC0415 - slow
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - slow

    folder = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write(model, tokenizer, texts.passages(texts.fetch()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
