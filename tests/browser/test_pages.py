"""The pages of ``kvtrie lab`` and ``kvtrie replay`` in a real browser, from disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.browser.test_inspector import BROWSER, DRIVER, shot, sound
from tests.tags.templates import QWEN3, tokenizer_of
from tools import site_check
from typer.testing import CliRunner

from kvtrie.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="chromium or chromedriver is not installed"
)
LONG = "a-name-without-spaces-" * 6


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    assert BROWSER is not None
    assert DRIVER is not None
    with site_check.started(BROWSER, DRIVER) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    model, trace = folder / LONG, folder / f"{LONG}.jsonl"
    model.mkdir()
    tokenizer_of("qwen3", QWEN3).save_pretrained(model)
    lines = [{"input_length": 1024 * n, "hash_ids": list(range(2 * n))} for n in (1, 2, 3)]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = {"lab": folder / "lab.html", "replay": folder / "replay.html"}
    for name, source in (("lab", model), ("replay", trace)):
        more = ["--bytes-per-token", "131072"] if name == "replay" else []
        done = CliRunner().invoke(app, [name, str(source), "--html", str(found[name]), *more])
        assert done.exit_code == 0, done.output
    return found


@pytest.mark.parametrize("name", ["lab", "replay"])
def test_nothing_is_cut_in_a_wide_or_a_narrow_window(
    chrome: Chrome, pages: dict[str, Path], name: str
) -> None:
    """Regression: tables made the whole page wider than a narrow window."""
    for width in (1280, 400):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chrome.get(pages[name].as_uri())
        for one in chrome.find_elements("css selector", "summary"):
            one.click()
        assert chrome.execute_script(site_check.CUT) == []
        shot(chrome, f"{name}-{width}")
    sound(chrome)
