"""Times the first picture of a page of 100,000 edges: `python -m tests.browser.first_paint`.

The browser has shown another page before, as that of a reader has. Times are from the start of the
navigation to the frame after the first picture, the median of five, with the processor time of all
processes of the browser up to a second after it.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from selenium.webdriver.support.ui import WebDriverWait
from tests.browser.kit import large, page
from tools import site_check

import kvtrie

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

EDGES, TIMES = 100_000, 5


def main() -> int:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.stdout.write("not timed: chromium or chromedriver is not installed\n")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        index = large(EDGES)
        (folder / "large").write_bytes(index.snapshot())
        (folder / "small").write_bytes(kvtrie.RadixIndex(8).snapshot())
        first, second = (
            page(folder / f"{name}.html", folder / name) for name in ("small", "large")
        )
        with site_check.started(browser, driver, keeps_logs=False) as chrome:
            chrome.set_window_size(1280, 900)
            shown(chrome, first)
            found = [shown(chrome, second) for _ in range(TIMES)]
            release = chrome.capabilities["browserVersion"]
        paints, used = zip(*found, strict=True)
        sys.stdout.write(
            f"Chromium {release}, {platform.machine()}, load {os.getloadavg()[0]:.1f}: "
            f"{index.stats().nodes:,} edges, page of {second.stat().st_size / 1e6:.1f} MB: first "
            f"picture after {statistics.median(paints):.0f} ms ({min(paints):.0f} to "
            f"{max(paints):.0f}), {statistics.median(used):.2f} s of processor time\n"
        )
    return 0


def shown(chrome: Chrome, path: Path) -> tuple[float, float]:
    """Milliseconds to the first picture, and seconds of the browser's processor time."""
    chrome.get("about:blank")
    before = seconds()
    chrome.get(path.as_uri())
    script = "return document.documentElement.dataset.firstPaint"
    first = WebDriverWait(chrome, 60).until(lambda one: one.execute_script(script))
    time.sleep(1)
    return float(first), seconds() - before


def seconds() -> float:
    """Processor time of every process that is called so."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text(encoding="utf-8").rpartition(")")
        except OSError:
            continue
        if name.endswith("(chromium"):
            total += sum(map(int, rest.split()[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
