"""The check of the site finds each fault that it names, and says when it could not look."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools import site_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parents[2]
PAGE = """<!doctype html><title>Page</title><link rel="icon" href="data:,">
<form><input data-md-component="search-query"><a href="index.html">Home</a></form>
<main><h1>Page</h1><p><img src="one.svg" alt="a square" width="20"></p></main>
<ol></ol>
<script>
document.querySelector("input").addEventListener("input", () => {
  document.querySelector("ol").innerHTML = '<li class="md-search-result__item"><a href="#">1</a>';
});
</script>
"""
SQUARE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'

# What is changed in a sound page, and what the check then says.
FAULTS = {
    "no title": ("<title>Page</title>", "", "no title"),
    "no heading": ("<h1>Page</h1>", "", "0 main headings"),
    "missing image": ("one.svg", "two.svg", "image two.svg is missing"),
    "no alternative text": ("a square", "", "image one.svg has no alternative text"),
    "console": ("<ol></ol>", "<ol></ol><script>console.error('no')</script>", "console: "),
    "missing script": ("<ol></ol>", "<ol></ol><script src='gone.js'></script>", "gone.js failed"),
    "another host": (
        "<ol></ol>",
        "<ol></ol><script src='http://127.0.0.1:9/x.js'></script>",
        "asks another host: http://127.0.0.1:9/x.js",
    ),
    "cut": ("<h1>Page</h1>", f"<h1>{'x' * 80}</h1>", "<h1> is cut at 400 pixels"),
    "too wide": ("<ol></ol>", "<ol></ol><div style='width: 1600px'>.</div>", "the page is 16"),
    "search": ("md-search-result__item", "nothing", "search: 'eviction' has no results"),
}

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    with site_check.started(BROWSER, DRIVER) as one:
        yield one


def _site(folder: Path, page: str) -> Path:
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / "one.svg").write_text(SQUARE, encoding="utf-8")
    return folder


def test_a_sound_site_has_no_faults(chrome: Chrome, tmp_path: Path) -> None:
    assert site_check.check(chrome, _site(tmp_path, PAGE)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, chrome: Chrome, tmp_path: Path) -> None:
    old, new, says = FAULTS[fault]
    assert old in PAGE
    site = _site(tmp_path, PAGE.replace(old, new, 1))
    faults = site_check.check(chrome, site, seconds=1)
    assert any(says in line for line in faults), faults
    # What was found on one page is not found again on the next.
    assert site_check.check(chrome, _site(tmp_path, PAGE)) == []


def test_a_site_without_pages_is_a_fault(chrome: Chrome, tmp_path: Path) -> None:
    assert site_check.check(chrome, tmp_path) == [f"{tmp_path} has no pages"]


def _run(site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools/site_check.py", site],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("chrome")
def test_a_fault_is_printed_and_fails(tmp_path: Path) -> None:
    done = _run(_site(tmp_path, PAGE.replace("one.svg", "two.svg")))
    assert done.returncode == 1
    assert "site: index.html: image two.svg is missing\n" in done.stderr


def test_without_a_browser_it_says_so_and_passes(tmp_path: Path) -> None:
    done = _run(tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "site: not checked: chromium or chromedriver is not installed\n"
