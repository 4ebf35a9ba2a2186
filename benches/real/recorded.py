"""What the model itself said about each passage, greedily: replies and reasoning of conversations.

    python -m real.recorded target/models/smollm2-135m-instruct

It writes `benches/real/recorded.jsonl`, of Gemma 3 `recorded_gemma3.jsonl` next to it, one line for
each passage, which is kept: rounding differs between machines, and a conversation must not. It
takes five minutes on one core.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real import texts
from real.cases import HERE, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PATH: Final = HERE / "recorded.jsonl"
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


def write(
    model: Any,  # noqa: ANN401 - transformers has no types for them
    tokenizer: Any,  # noqa: ANN401 - likewise
    passages: Sequence[str],
    path: Path = PATH,
    ends: Sequence[int] = (),
) -> None:
    """Record what the model says; ``ends`` are tokens that end a reply next to the config's."""
    rows: list[dict[str, str]] = []
    for start in range(0, len(passages), BATCH // 2):
        some = passages[start : start + BATCH // 2]
        prompts = [_prompt(tokenizer, text) for text in some]
        said = _greedy(model, tokenizer, prompts + [one + OPEN for one in prompts], ends)
        for at, text in enumerate(some):
            whole = OPEN + said[len(some) + at]
            reasoning = _line(whole.removeprefix("<think>\n").partition("</think>")[0])
            rows.append({"passage": name(text), "reply": _line(said[at]), "reasoning": reasoning})
        print(f"recorded: {len(rows)} of {len(passages)}", flush=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _prompt(tokenizer: Any, text: str) -> str:  # noqa: ANN401 - likewise
    messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _greedy(
    model: Any,  # noqa: ANN401 - likewise
    tokenizer: Any,  # noqa: ANN401 - likewise
    prompts: list[str],
    ends: Sequence[int],
) -> list[str]:
    import torch  # noqa: PLC0415 - reading records needs no torch

    inputs = tokenizer(
        prompts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False
    )
    found = model.generation_config.eos_token_id
    known = found if isinstance(found, list) else [found]
    with torch.inference_mode():
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=MOST_TOKENS, eos_token_id=[*known, *ends]
        )
    new = out[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(new, skip_special_tokens=True))


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    import torch  # noqa: PLC0415 - slow
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - slow

    from kvtrie.engines._products import speed_up  # noqa: PLC0415 - torch

    folder = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    form = form_of(model.config, tokenizer)
    speed_up(model)
    ends = tokenizer.convert_tokens_to_ids(list(form.ends))
    write(model, tokenizer, texts.passages(texts.fetch()), HERE / form.records, ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
