"""When `make instructions` compares its counts with the record, and when it says why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import instructions
import pytest

if TYPE_CHECKING:
    from pathlib import Path

RECORD = json.loads(instructions.RECORD.read_text(encoding="utf-8"))
ARM = "aarch64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("target", "flags", "why"),
    [
        ("x86_64-unknown-linux-gnu", "fpu sse2 avx avx2 amx_tile", None),
        ("x86_64-unknown-linux-gnu", "fpu sse2 avx", "this processor has no AVX2"),
        (ARM, "", f"it is of {RECORD['target']}, this is {ARM}"),
    ],
    ids=["avx2", "no-avx2", "arm"],
)
def test_counts_are_compared_where_the_record_was_made_for_the_processor(
    target: str, flags: str, why: str | None, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx2\n", encoding="utf-8")
    found = {**RECORD, "target": target}
    assert instructions.incomparable(RECORD, found, cpuinfo) == why
