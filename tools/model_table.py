"""Writes docs/models.md: what kvtrie reuses of every causal LM type of the pinned transformers.

    python -m tools.model_table [--check]

A row is read from the default config of a type (its layers, and whether its keys can be moved), and
from a tiny model of it with random weights (whether a second turn through the embedded engine has
the logits of the model without a cache). ``--check`` builds no model: it compares what configs say
with the page, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from tests.kernels.test_rope_models import Case
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvtrie import EXACT_ONLY, KvTrieError
from kvtrie.models.rope_families import FAMILIES
from kvtrie.pool import KVLayout
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "models.md"
START: Final = "<!-- made by tools/model_table.py: start -->"
END: Final = "<!-- made by tools/model_table.py: end -->"
# float32 where a model does not run in float64: its positions, say, are in float32.
TOLERANCES: Final = {torch.float64: 1e-5, torch.float32: 1e-4}
MOST_WEIGHTS: Final = 20_000_000
# What published configs say where the default of the class is no model: 4096 channels of 96 heads.
PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
}
_HEAD: Final = "| type | layers | moved runs | a tiny model |\n| --- | --- | --- | --- |"


class Row(NamedTuple):
    """What a config says of a type: its layers, and moved runs; a refusal begins with "no"."""

    layers: str
    moved: str


def types() -> list[str]:
    """Causal LMs of transformers, and types that kvtrie reads without one."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})


def read(model_type: str) -> Row:
    """The row of a type, from its default config."""
    try:
        config: Any = CONFIG_MAPPING[model_type](**PUBLISHED.get(model_type, {}))
    except Exception as error:  # noqa: BLE001 - what a class raises without arguments is its own
        why = f"no: it has no default config ({type(error).__name__})"
        return Row(why, why)
    if model_type == "llama4_text":
        moved = "no: chunks have absolute edges"
    else:
        try:
            spec = RopeSpec.from_config(config, regime="short")
            moved = "yes"
            if not any(spec.layers):
                moved = "yes, not rotated"
            elif None in spec.layers or len(set(spec.layers)) > 1:
                moved = "yes, by layer"
            if spec.state_layers:
                moved = "no: state cannot be moved; its attention layers could"
        except KvTrieError as error:
            moved = f"no: {_reason(error)}"
    try:
        layout = KVLayout.from_config(config, dtype="bfloat16", regime="short")
    except KvTrieError as error:
        why = f"no: {_reason(error)}"
        return Row(why, moved if moved.startswith("no") else why)
    return Row(_groups(layout), moved)


def _reason(error: Exception) -> str:
    said = str(error).split(" model: ", 1)[-1].replace("|", "/")
    if "give interleaved=" in said:
        return "the order of its pairs is unknown (interleaved=)"
    return said.partition("; give ")[0].partition("; only text")[0]


def _groups(layout: KVLayout) -> str:
    """How many layers of each kind; the tiny one by default has others."""
    said = []
    for group in layout.groups or layout.layers[:1]:
        count = len(group.layers)
        what = "full" if group.window is None else f"window {group.window}"
        said.append(f"{count} {what}")
    shapes = "" if layout.is_uniform else ", of unlike heads"
    return " + ".join(said) + shapes


def tiny(model_type: str) -> str:
    """How a tiny random model of a type does in the embedded engine."""
    found = _tiny(model_type, torch.float64)
    if found.startswith("not run"):
        again = _tiny(model_type, torch.float32)
        return again.replace("equal", "equal in float32")
    return found


def _tiny(model_type: str, dtype: torch.dtype) -> str:
    from kvtrie.engines.transformers import Generator  # noqa: PLC0415 - only here

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "not built: no causal LM of text alone"
    try:
        config = Case(model_type, model_type).config()
        with torch.device("meta"):
            sizes = transformers.AutoModelForCausalLM.from_config(config)
        count = sum(weight.numel() for weight in sizes.parameters())
        if count > MOST_WEIGHTS:
            return "not built: its sizes have other names"
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        )
        model = model.eval().to(dtype)
    except Exception as error:  # noqa: BLE001 - what a class raises at these sizes is its own
        return f"not built: {type(error).__name__}"
    try:
        generator = Generator(model, num_blocks=64, block_size=4)
    except KvTrieError as error:
        return f"refused: {_reason(error)}"
    except Exception as error:  # noqa: BLE001 - a model that cannot run without other inputs
        return f"not run: {type(error).__name__}"
    try:
        prompt = np.random.default_rng(0).integers(3, 60, 40).tolist()
        generator.generate(prompt[:24], max_new_tokens=1, policy=EXACT_ONLY)
        done = generator.generate(
            prompt, max_new_tokens=3, ignore_eos=True, return_logits=True, policy=EXACT_ONLY
        )
        with torch.inference_mode():
            whole = torch.tensor([[*prompt, *done.tokens[:-1]]])
            want = model(input_ids=whole, use_cache=False).logits[0, -3:].to(dtype)
    except Exception as error:  # noqa: BLE001 - as above
        return f"not run: {type(error).__name__}"
    if done.logits is None or done.usage.exact != 24:
        return f"differs: {done.usage.exact} of 24 tokens reused"
    miss = float((done.logits - want).abs().max())
    if not miss <= TOLERANCES[dtype]:
        return f"differs by {miss:.1e}"
    return "equal" if generator.pool.rope is not None else "equal; not moved"


def table(*, models: bool) -> Iterator[str]:
    """The rows of the page."""
    for name in types():
        row = read(name)
        found = "-"
        if models and not row.layers.startswith("no"):
            found = tiny(name)
            print(name, found, flush=True)
        yield f"| {name} | {row.layers} | {row.moved} | {found} |"


def _columns(line: str) -> list[str]:
    return [part.strip() for part in line.strip("|").split("|")]


def differences(page: str) -> list[str]:
    """Rows that the page lacks or has otherwise, by what configs say."""
    body = page.partition(START)[2].partition(END)[0]
    rows = {_columns(line)[0]: _columns(line)[1:3] for line in body.splitlines() if "|" in line}
    wanted = {_columns(line)[0]: _columns(line)[1:3] for line in table(models=False)}
    wrong = [name for name, columns in wanted.items() if rows.get(name) != columns]
    return wrong + sorted(set(rows) - set(wanted) - {"type", "---"})


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="The table of docs/models.md.")
    parser.add_argument("--check", action="store_true", help="compare with the page; no models")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if given.check:
        wrong = differences(PAGE.read_text(encoding="utf-8"))
        if wrong:
            print(f"docs/models.md differs in {', '.join(wrong)}: run python -m tools.model_table")
        return int(bool(wrong))
    made = "\n".join([START, "", _HEAD, *table(models=True), "", END])
    page = PAGE.read_text(encoding="utf-8")
    page = re.sub(f"{re.escape(START)}.*{re.escape(END)}", lambda _: made, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
