"""Draws the pictures of the README and of the docs from real plans and recorded figures.

`python benches/pictures.py` writes them to `docs/pictures`; `--check` writes nothing and fails if a
picture is out of date. No picture is drawn by hand.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent))

import charts
import diagrams
import drawing

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"

PICTURES: dict[str, Callable[[], Axes]] = {
    "edit.svg": diagrams.edit,
    "states.svg": diagrams.states,
    "cover.svg": diagrams.cover,
    "pins.svg": diagrams.pins,
    "goals.svg": charts.goals,
    "peers.svg": charts.peers,
    "reuse.svg": charts.reuse,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures in docs/pictures.")
    parser.add_argument("--check", action="store_true", help="fail if a picture is out of date")
    options = parser.parse_args()
    old = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / name, drawing.svg(draw())
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: python benches/pictures.py", file=sys.stderr)
            old = 1
    return old


if __name__ == "__main__":
    sys.exit(main())
