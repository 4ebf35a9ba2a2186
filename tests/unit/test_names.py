"""A class name means one thing in the package, with or without an underscore."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import kvtrie

ROOT = Path(kvtrie.__file__).parent


def test_no_class_name_means_two_things() -> None:
    found = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
