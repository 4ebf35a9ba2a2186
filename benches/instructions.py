"""Counts the instructions of six key operations with valgrind, and compares with the record.

    python benches/instructions.py                    compare with benches/instructions.json
    python benches/instructions.py --update           write that file
    python benches/instructions.py --top insert       in which functions and files they are spent

Unlike a time, a count is the same on a busy machine, so it shows a change of a few percent. It does
not show caches: read it together with the times. Needs cargo and valgrind.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parent / "instructions.json"
ROOT = RECORD.parent.parent

TOLERANCE = 0.03

# From a size that depends on the processor's caches, glibc copies memory by one instruction that
# counts as one per repetition. With that size out of reach, copies count the same on every
# processor that has AVX2 (valgrind hides anything wider).
TUNABLES = ":".join(
    f"glibc.cpu.{name}=0x7fffffff"
    for name in ("x86_rep_movsb_threshold", "x86_non_temporal_threshold")
)


@dataclass(frozen=True)
class Operation:
    name: str
    work: str
    calls: int


OPERATIONS = (
    Operation("lookup", "lookup of 8,192 tokens, ids out, fresh sequence", 32),
    Operation("grouped", "the same with a window of 512 tokens as a second group", 32),
    Operation("grown", "16 more tokens at 102,400, extend and lookup", 512),
    Operation("insert", "insert of 8,192 new tokens", 32),
    Operation("evict", "evict one leaf of 64 tokens among 10^4", 2_000),
    Operation("plan", "plan and release of 8,192 tokens, fresh sequence", 32),
)


class MeasureError(Exception):
    """A count could not be taken; the message is one sentence."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        text = f"{name} is missing"
        raise MeasureError(text)
    return path


def build() -> Path:
    command = [
        tool("cargo"),
        "build",
        "--release",
        "--package",
        "kvtrie-benches",
        "--bin",
        "operation",
    ]
    done = subprocess.run(  # noqa: S603 - a command of our own
        [*command, "--quiet", "--message-format", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        text = "the benchmark binary could not be built"
        raise MeasureError(text)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "operation":
            return Path(message["executable"])
    text = "cargo names no binary for the target `operation`"
    raise MeasureError(text)


def callgrind(binary: Path, operation: Operation, calls: int, out: Path, *options: str) -> None:
    """Runs `calls` calls of an operation under callgrind.

    The preparation is the same for every number of calls.
    """
    command = [
        tool("valgrind"),
        "--quiet",
        "--tool=callgrind",
        f"--callgrind-out-file={out}",
        *options,
    ]
    arguments = [operation.name, str(calls), str(2 * operation.calls)]
    done = subprocess.run(  # noqa: S603 - a command of our own
        [*command, str(binary), *arguments],
        env={**os.environ, "GLIBC_TUNABLES": TUNABLES, "LC_ALL": "C"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        text = f"valgrind failed on {operation.name}: {done.stderr.strip()}"
        raise MeasureError(text)


def total(out: Path) -> int:
    found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        text = f"{out.name} has no total"
        raise MeasureError(text)
    return int(found[1])


def count(binary: Path, operation: Operation) -> float:
    """Instructions of one call: those of N more calls, divided by N."""
    with tempfile.TemporaryDirectory() as folder:
        totals = []
        for calls in (operation.calls, 2 * operation.calls):
            out = Path(folder) / f"callgrind.{calls}"
            callgrind(binary, operation, calls, out)
            totals.append(total(out))
    each = (totals[1] - totals[0]) / operation.calls
    if each <= 0:
        text = f"{operation.name}: {operation.calls} more calls added no instructions"
        raise MeasureError(text)
    return round(each, 1)


def toolchain() -> dict[str, str]:
    """What a count depends on besides the code: the compiler, and the C library's copies."""
    lines = subprocess.run(  # noqa: S603 - a command of our own
        [tool("rustc"), "--version", "--verbose"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    about = dict(line.split(": ", 1) for line in lines if ": " in line)
    library = " ".join(platform.libc_ver())
    return {"rustc": about["release"], "target": about["host"], "libc": library}


def count_all() -> dict[str, Any]:
    binary = build()
    counts = {operation.name: count(binary, operation) for operation in OPERATIONS}
    return {**toolchain(), "instructions": counts}


def incomparable(
    recorded: dict[str, Any], found: dict[str, Any], cpuinfo: Path = Path("/proc/cpuinfo")
) -> str | None:
    """Why counts of this processor cannot be compared with the record; None if they can."""
    if found["target"] != recorded["target"]:
        return f"it is of {recorded['target']}, this is {found['target']}"
    # Without AVX2 the C library copies by more and other instructions.
    if found["target"].startswith("x86_64") and not re.search(
        r"^flags\s*:.*\bavx2\b", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE
    ):
        return "this processor has no AVX2"
    return None


def compare(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One sentence for every count that left the tolerance, and why that may be."""
    messages = []
    before, now = recorded["instructions"], found["instructions"]
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now:
            where = "measured" if name in now else "recorded"
            messages.append(f"{name} is only {where}.")
            continue
        change = now[name] / before[name] - 1
        if abs(change) > TOLERANCE:
            messages.append(
                f"{name} takes {now[name]:,.0f} instructions, {change:+.1%} against the"
                f" recorded {before[name]:,.0f} ({TOLERANCE:.0%} is allowed either way)."
            )
    if messages:
        messages += [
            f"{key} is {found[key]} here; the record was made with {recorded.get(key)}."
            for key in ("rustc", "target", "libc")
            if found[key] != recorded.get(key)
        ]
        messages.append(
            "If the change is meant, renew the record: python benches/instructions.py --update"
        )
    return messages


def top(operation: Operation, lines: int) -> str:
    """Where the instructions of an operation go: by source file and by function, most first."""
    binary = build()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.top"
        # Only instructions inside this function are counted, not the preparation.
        only = "--toggle-collect=operation::perform*"
        callgrind(binary, operation, operation.calls, out, only)
        report = subprocess.run(  # noqa: S603 - a command of our own
            [tool("callgrind_annotate"), "--threshold=100", "--auto=no", str(out)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        calls, everything = operation.calls, total(out)
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in report.splitlines():
        found = re.match(r"\s*([\d,]+) \([ \d.]+%\)  ([^:=][^:]*):(.*?)(?: \[[^]]*\])?$", line)
        if found:
            spent = int(found[1].replace(",", ""))
            files[source(found[2])] += spent
            functions[found[3]] += spent
    text = [f"{operation.work}: {everything / calls:,.1f} instructions a call"]
    for title, spenders in (("source file", files), ("function, with what is inlined", functions)):
        text.append(f"\n{'a call':>12} {'share':>7}  {title}")
        text += [
            f"{spent / calls:>12,.1f} {spent / everything:>7.1%}  {name}"
            for name, spent in spenders.most_common(lines)
        ]
    return "\n".join(text)


def source(path: str) -> str:
    """A source file's name without the folders that differ from machine to machine."""
    path = path.replace(f"{ROOT}/", "")
    path = re.sub(r"^/rustc/[0-9a-f]+/library/", "std: ", path)
    return re.sub(r"^\S*/registry/src/[^/]+/", "", path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the record")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON lines")
    names = [operation.name for operation in OPERATIONS]
    parser.add_argument("--top", choices=names, help="where the instructions of one operation go")
    parser.add_argument("--lines", type=int, default=12, help="lines of each table of --top")
    parser.add_argument(
        "--allow-missing", action="store_true", help="succeed where valgrind is not installed"
    )
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("instructions: valgrind is missing, which counts them.", file=sys.stderr)
        return 0 if options.allow_missing else 1
    try:
        if options.top:
            print(top(OPERATIONS[names.index(options.top)], options.lines))
            return 0
        found = count_all()
    except MeasureError as error:
        print(f"instructions: {error}.", file=sys.stderr)
        return 1
    for operation in OPERATIONS:
        each = found["instructions"][operation.name]
        row = {"work": operation.work, "unit": "instructions", "kvtrie": each}
        print(json.dumps(row) if options.json else f"{operation.work:<52}{each:>12,.1f}")
    if options.update:
        RECORD.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0
    if not RECORD.exists():
        print("instructions: no record; make it with --update.", file=sys.stderr)
        return 1
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    why = incomparable(recorded, found)
    if why is not None:
        print(f"instructions: not compared with the record: {why}.")
        return 0
    messages = compare(recorded, found)
    for message in messages:
        print(f"instructions: {message}", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
