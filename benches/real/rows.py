"""Rows of an append-only file of JSON lines: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]


class Rows:
    """Rows by key. A line that a kill cut short is ignored, and the next one starts again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = path.read_bytes() if path.exists() else b""
        for line in raw.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "key" in row:
                self.by_key[row["key"]] = row
        self._starts_afresh = raw.endswith(b"\n") or not raw

    def __contains__(self, key: str) -> bool:
        return key in self.by_key

    def add(self, row: Row) -> None:
        """Append a row, which has a ``key``."""
        with self.path.open("a", encoding="utf-8") as file:
            if not self._starts_afresh:
                file.write("\n")
                self._starts_afresh = True
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.by_key[row["key"]] = row
