"""Times the frames of a page of 100,000 edges: `python -m tests.browser.fluidity`.

The tree is zoomed with the wheel at five places, from everything to single blocks and back, and
dragged in between, one step per frame, as fast as the browser shows frames. Reported are the times
from frame to frame, the longest task of the page's thread, and the times of the pictures alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from selenium.webdriver.support.ui import WebDriverWait
from tests.browser.kit import large, page
from tools import site_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from selenium.webdriver import Chrome

EDGES, PLACES = 100_000, 5
# A browser names tasks that are longer; below it, no wait is noticed.
LONG_TASK = 50

# Calls back with the times between frames, the long tasks, and the times of the pictures.
FRAMES = """
const [places, done] = arguments;
const canvas = document.getElementById("tree"), box = canvas.getBoundingClientRect();
const tasks = [], frames = [], pictures = [], drawn = [];
new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)))
  .observe({ type: "longtask" });
const wheel = (deltaY) => (x, y) => canvas.dispatchEvent(
  new WheelEvent("wheel", { deltaY, clientX: x, clientY: y, bubbles: true, cancelable: true }));
let pressed = null;
const drag = (step) => (x, y) => {
  if (step === 0) pressed = [x, y];
  const at = { clientX: pressed[0] - 12 * step, clientY: pressed[1] - 5 * step, pointerId: 1 };
  if (step === 0) canvas.dispatchEvent(new PointerEvent("pointerdown", at));
  canvas.dispatchEvent(new PointerEvent(step === 19 ? "pointerup" : "pointermove", at));
};
// No pointer of a device can be captured.
canvas.setPointerCapture = () => {};
const steps = [];
for (let place = 0; place < places; place += 1) {
  const x = box.left + box.width * (0.04 + 0.03 * place);
  const y = box.top + box.height * (place + 0.5) / places;
  const add = (many, act) => {
    for (let at = 0; at < many; at += 1) steps.push(() => act(at)(x, y));
  };
  add(30, () => wheel(-60));
  add(20, drag);
  add(20, () => wheel(-60));
  add(20, drag);
  add(50, () => wheel(60));
}
let before = null, at = 0;
const next = (now) => {
  if (before !== null) {
    frames.push(now - before);
    pictures.push(Number(canvas.dataset.drawMs));
    drawn.push(Number(canvas.dataset.drawn));
  }
  before = now;
  if (at < steps.length) { steps[at](); at += 1; requestAnimationFrame(next); }
  else setTimeout(() => done({ frames, tasks, pictures, drawn }), 200);
};
requestAnimationFrame(next);
"""


@dataclass(frozen=True, slots=True)
class Fluidity:
    """Times in milliseconds while a tree is zoomed and dragged.

    Attributes:
        frames: From frame to frame.
        pictures: Of each picture alone.
        tasks: Of tasks of the page's thread, if they are longer than 50.
        least: The fewest boxes of a picture: edges, or several of less than a pixel.
        most: The most.
    """

    frames: tuple[float, ...]
    pictures: tuple[float, ...]
    tasks: tuple[float, ...]
    least: int
    most: int

    @property
    def longest_task(self) -> str:
        return f"{max(self.tasks):.0f} ms" if self.tasks else f"at most {LONG_TASK} ms"


def fluidity(chrome: Chrome, places: int = PLACES) -> Fluidity:
    """Zoom and drag the tree of the page that is open."""
    chrome.set_script_timeout(300)
    found = chrome.execute_async_script(FRAMES, places)
    return Fluidity(
        tuple(found["frames"]),
        tuple(found["pictures"]),
        tuple(found["tasks"]),
        int(min(found["drawn"])),
        int(max(found["drawn"])),
    )


def main() -> int:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.stdout.write("not timed: chromium or chromedriver is not installed\n")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        index = large(EDGES)
        (folder / "large").write_bytes(index.snapshot())
        made = page(folder / "large.html", folder / "large")
        with site_check.started(browser, driver, keeps_logs=False) as chrome:
            chrome.set_window_size(1280, 900)
            chrome.get(made.as_uri())
            script = "return document.documentElement.dataset.loaded"
            WebDriverWait(chrome, 120).until(lambda one: one.execute_script(script))
            found = fluidity(chrome)
            release = chrome.capabilities["browserVersion"]
    sys.stdout.write(
        f"Chromium {release}, {platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}: {index.stats().nodes:,} edges, {len(found.frames)} frames.\n"
        f"From frame to frame {spread(found.frames)}, longest task {found.longest_task}.\n"
        f"Pictures of {found.least:,} to {found.most:,} boxes {spread(found.pictures)}.\n"
    )
    return 0


def spread(times: Sequence[float]) -> str:
    """The median, and below which 95 % and all of some times are."""
    parts = statistics.quantiles(times, n=100)
    return f"{parts[49]:.1f} ms (95 %: {parts[94]:.1f}, all: {max(times):.1f})"


if __name__ == "__main__":
    sys.exit(main())
