"""What the training scripts share: scores as tables, and model directories written all at once."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

Score = dict[str, tuple[int, int]]
"""Right answers and questions, by kind; ``all`` is the sum."""


def count(score: Score, kind: str, *, right: bool) -> None:
    for name in (kind, "all"):
        hits, asked = score.get(name, (0, 0))
        score[name] = (hits + right, asked + 1)


def report(score: Score, what: str) -> str:
    names = sorted(score, key=lambda name: (name == "all", name))
    rows = [f"| {name} | {score[name][0]} of {score[name][1]} |" for name in names]
    return "\n".join((f"| {what} | right |", "|---|---|", *rows))


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A folder to fill, which then replaces ``out``; an error changes nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".train-") as folder:
        work, old = Path(folder) / "new", Path(folder) / "old"
        work.mkdir()
        yield work
        work.chmod(0o755)
        for file in work.iterdir():
            file.chmod(0o644)
        if out.exists():
            out.rename(old)
        work.rename(out)


def write_model(
    work: Path,
    model: Any,  # noqa: ANN401 - what transformers annotates does not pass a strict type check
    tokenizer: PreTrainedTokenizerFast,
    max_new_tokens: int,
) -> tuple[dict[str, Any], float]:
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(work)
    tokenizer.save_pretrained(work)
    config: dict[str, Any] = json.loads((work / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"  # what plain loading should compute in
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (work / "config.json").write_text(text, encoding="utf-8")
    return config, sum(file.stat().st_size for file in work.iterdir()) / 1e6
