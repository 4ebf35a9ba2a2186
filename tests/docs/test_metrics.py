"""Every metric and reason that the pages for operators name exists, and none is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "kvtrie" / "integrations" / "vllm"
PAGES = [ROOT / "docs" / name for name in ("production.md", "vllm.md")]
OURS = re.compile(r"\bvllm:kvtrie_(\w+)")
REASON = re.compile(r'\breason="(\w+)"')
# vLLM's own, as its releases 0.32 and 0.33 name them; tests/vllm_scheduler compares them with it.
THEIRS = {
    "time_to_first_token_seconds",
    "prompt_tokens_by_source",
    "prompt_tokens_by_source_total",
    "external_prefix_cache_hits",
    "request_prefill_kv_computed_tokens",
}


def constant(module: str, name: str) -> list[str]:
    """The keys of a dictionary in a module that needs vLLM to be imported."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    names = {
        one.target.id: one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    found = names[name]
    assert isinstance(found, ast.Dict)
    keys = []
    for key in found.keys:
        value = names[key.id] if isinstance(key, ast.Name) else key
        assert isinstance(value, ast.Constant)
        keys.append(str(value.value))
    return keys


METRICS = {*constant("_stats", "NAMES"), *constant("_stats", "LABELLED"), "transfers"}
REASONS = constant("_reasons", "REASONS")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {one.removesuffix("_total") for one in OURS.findall(text)} - {"NAME"}
    assert named <= METRICS, named - METRICS
    theirs = set(re.findall(r"\bvllm:(?!kvtrie_)(\w+)", text))
    assert theirs <= THEIRS, theirs - THEIRS
    assert set(REASON.findall(text)) <= set(REASONS)


def test_every_metric_and_reason_is_described() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert [name for name in sorted(METRICS) if f"`{name}_total`" not in text] == []
    section = text.partition("### Why tokens are computed")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == REASONS
