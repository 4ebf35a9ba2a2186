"""Opens every page of the built site in headless Chromium, from disk, as a reader without a server.

    python tools/site_check.py SITE [--screenshots FOLDER]

A page must have a title, one main heading, its images with an alternative text, no error in the
console, no request that fails or goes to another host, and nothing cut, in two widths. A search for
a word must have results. Without Chromium or its driver one line says so, and the check passes.
"""

import argparse
import base64
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WIDE, NARROW = 1280, 400
WORD = "eviction"
PICTURE = "pictures/edit.svg"
SHOWN = ("index", "concepts", "engine-loop", "benchmarks", "design")
# A picture is taken of no more than this much of a page, in pixels.
TALLEST = 5_000

IS_READ = "return document.readyState === 'complete' && document.querySelector('h1') !== null"

FAULTS = """
const faults = [];
if (!document.title.trim()) faults.push("no title");
const heads = document.querySelectorAll("h1");
if (heads.length !== 1) faults.push(`${heads.length} main headings`);
for (const image of document.images) {
  const name = image.getAttribute("src");
  if (!image.complete || !image.naturalWidth) faults.push(`image ${name} is missing`);
  if (!image.alt.trim()) faults.push(`image ${name} has no alternative text`);
}
return faults;
"""

CUT = """
const width = document.documentElement.clientWidth;
const scrolls = (element) => {
  for (; element && element !== document.body; element = element.parentElement) {
    if (["auto", "scroll"].includes(getComputedStyle(element).overflowX)) return true;
  }
  return false;
};
for (const element of document.querySelectorAll("h1, main *")) {
  const box = element.getBoundingClientRect();
  const right = box.left + Math.max(box.width, element.scrollWidth);
  if (box.width && right > width + 1 && !scrolls(element)) {
    const text = element.textContent.trim().slice(0, 40);
    return [`<${element.localName}> is cut at ${width} pixels: ${text}`];
  }
}
const all = document.documentElement.scrollWidth;
return all > width ? [`the page is ${all} pixels wide in a window of ${width}`] : [];
"""


def main() -> int:
    """Check the site; the exit status says whether a fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="the folder of the built site")
    parser.add_argument("--screenshots", type=Path, help="write screenshots to this folder")
    options = parser.parse_args()
    site: Path = options.site.resolve()
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        print("site: not checked: chromium or chromedriver is not installed")
        return 0
    with started(browser, driver) as chrome:
        faults = check(chrome, site)
        if options.screenshots is not None and not faults:
            options.screenshots.mkdir(exist_ok=True)
            shots(chrome, site, options.screenshots.resolve())
    for fault in faults:
        print(f"site: {fault}", file=sys.stderr)
    if not faults:
        print(f"site: {len(pages(site))} pages render; search works without a server")
    return int(bool(faults))


def pages(site: Path) -> list[Path]:
    """Every page but the one that a server sends for addresses that do not exist."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def check(chrome: Chrome, site: Path, *, seconds: float = 15) -> list[str]:
    """What is wrong with the site, in one line each; a search may take so many seconds."""
    faults = [] if pages(site) else [f"{site} has no pages"]
    for page in pages(site):
        name = page.relative_to(site).as_posix()
        _size(chrome, WIDE, 900)
        chrome.get(page.as_uri())
        # On a busy machine `get` returns while the page is still read.
        with suppress(TimeoutException):
            WebDriverWait(chrome, seconds).until(lambda one: one.execute_script(IS_READ))
        found: list[str] = chrome.execute_script(FAULTS)
        found += chrome.execute_script(CUT)
        _size(chrome, NARROW, 900)
        found += chrome.execute_script(CUT)
        found += _console(chrome) + _requests(chrome)
        faults += [f"{name}: {fault}" for fault in dict.fromkeys(found)]
    if (site / "index.html").exists():
        faults += _search(chrome, site / "index.html", seconds)
    return faults


def shots(chrome: Chrome, site: Path, folder: Path) -> None:
    for scheme in ("light", "dark"):
        with _scheme(chrome, scheme), tempfile.TemporaryDirectory() as scratch:
            alone = Path(scratch) / "picture.html"
            colour = {"light": "#ffffff", "dark": "#0d1117"}[scheme]
            image = f'<img src="{(site / PICTURE).as_uri()}" width="880">'
            style = f"color-scheme: {scheme}; background: {colour}"
            alone.write_text(f'<body style="{style}">{image}', encoding="utf-8")
            _shot(chrome, alone, 900, folder / f"picture-{scheme}.png")
            for name in SHOWN:
                _shot(chrome, site / f"{name}.html", WIDE, folder / f"{name}-{scheme}.png")
    for name in SHOWN:
        _shot(chrome, site / f"{name}.html", NARROW, folder / f"{name}-narrow.png")


@contextmanager
def started(browser: str, driver: str, *, keeps_logs: bool = True) -> Iterator[Chrome]:
    """A headless browser; it keeps its console and its requests, which takes time, or nothing."""
    options = ChromeOptions()
    options.binary_location = browser
    # Root in a container has no sandbox, and /dev/shm is small there.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    if keeps_logs:
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options, Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@contextmanager
def _scheme(chrome: Chrome, scheme: str) -> Iterator[None]:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    yield
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def _size(chrome: Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _console(chrome: Chrome) -> list[str]:
    lines: list[dict[str, Any]] = chrome.get_log("browser")
    return [f"console: {line['message']}" for line in lines if line["level"] == "SEVERE"]


def _requests(chrome: Chrome) -> list[str]:
    faults, asked = [], {}
    for line in chrome.get_log("performance"):
        event = json.loads(line["message"])["message"]
        values = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            url = asked[values["requestId"]] = values["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                faults.append(f"asks another host: {url}")
        elif event["method"] == "Network.loadingFailed" and not values.get("canceled"):
            url = asked.get(values["requestId"], "a request")
            faults.append(f"{url} failed: {values['errorText']}")
    return faults


def _search(chrome: Chrome, page: Path, seconds: float) -> list[str]:
    """Type a word; the theme lists pages that have it."""
    _size(chrome, WIDE, 900)
    chrome.get(page.as_uri())
    faults = []
    try:
        field = chrome.find_element("css selector", "[data-md-component=search-query]")
        chrome.execute_script("arguments[0].focus()", field)
        field.send_keys(WORD)
        WebDriverWait(chrome, seconds).until(
            lambda one: one.find_elements("css selector", ".md-search-result__item a[href]")
        )
    except TimeoutException:
        faults.append(f"{WORD!r} has no results after {seconds:g} s")
    except WebDriverException as error:
        faults.append(f"{error.msg}")
    return [f"search: {fault}" for fault in faults + _console(chrome) + _requests(chrome)]


def _shot(chrome: Chrome, page: Path, width: int, path: Path) -> None:
    _size(chrome, width, 900)
    chrome.get(page.as_uri())
    height = chrome.execute_script("return document.documentElement.scrollHeight")
    _size(chrome, width, min(height, TALLEST))
    shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    sys.exit(main())
