"""The one file that holds every measured figure, `benches/figures.json`."""

import datetime as dt
import json
import os
import platform
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent / "figures.json"

Row = dict[str, Any]


def record(
    section: str,
    rows: list[Row],
    versions: dict[str, str] | None = None,
    *,
    part: str | None = None,
    path: Path | None = None,
) -> None:
    """Put the rows of one section into the file, with the machine and the date.

    Other sections stay as they are.
    """
    for row in rows:
        missing = {"work", "unit", "kvtrie", *([part] if part else [])} - row.keys()
        if missing:
            text = f"record: a row of {section!r} has no {', '.join(sorted(missing))}: {row}"
            raise ValueError(text)
    where = PATH if path is None else path
    content = load(where)
    kept: list[Row] = []
    if part is not None:
        replaced = {row[part] for row in rows}
        kept = [row for row in content["sections"].get(section, []) if row[part] not in replaced]
    stamp = {"machine": machine(), "date": today()}
    content.update(stamp)
    content["versions"] |= versions or {}
    content["stamps"][section] = stamp
    content["sections"][section] = sorted(kept + rows, key=lambda row: row[part]) if part else rows
    # Atomic: an interrupted run leaves the old file.
    partial = where.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(where)


def load(path: Path | None = None) -> dict[str, Any]:
    """The file's content, or an empty one where there is no file."""
    where = PATH if path is None else path
    empty: dict[str, Any] = {
        "machine": {},
        "date": "",
        "versions": {},
        "stamps": {},
        "sections": {},
    }
    if not where.exists():
        return empty
    content: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    return empty | content


def machine() -> dict[str, str | int]:
    info: dict[str, str | int] = {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": os.cpu_count() or 0,
        "l3": _cache_size(3),
        "memory": _memory(),
        "os": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }
    return {name: value for name, value in info.items() if value}


def today() -> str:
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def _first_value(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _memory() -> str:
    total = _first_value("/proc/meminfo", "MemTotal").split()
    return f"{int(total[0]) / 2**20:.0f} GiB" if total else ""


def _cache_size(level: int) -> str:
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (folder / "level").read_text(encoding="utf-8").strip() == str(level):
                return (folder / "size").read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return ""
