"""What vLLM's own server was started with is read from its command line, and from no other."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _command, _template
from kvtrie.integrations.vllm._settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "/lib/vllm/entrypoints/openai/api_server.py"
MINE = {"kv_connector": "KvtrieConnector", "kv_connector_module_path": "kvtrie.integrations.vllm"}
EXTRA: dict[str, Any] = {"gate": "a.json"}


def started(monkeypatch: pytest.MonkeyPatch, *args: str, program: str = MODULE) -> None:
    monkeypatch.setattr(sys, "argv", [program, *args])


def found() -> list[dict[str, Any]]:
    return _command.settings("KvtrieConnector", "kvtrie.integrations.vllm")


@pytest.mark.parametrize("program", [MODULE, "/usr/bin/vllm", "vllm"])
@pytest.mark.parametrize("name", ["--kv-transfer-config", "--kv_transfer_config"])
def test_the_settings_of_vllms_server(
    monkeypatch: pytest.MonkeyPatch, program: str, name: str
) -> None:
    config = json.dumps({**MINE, "kv_connector_extra_config": EXTRA})
    started(monkeypatch, "serve", "m", name, config, program=program)
    assert found() == [EXTRA]
    started(monkeypatch, f"{name}={config}", program=program)
    assert found() == [EXTRA]
    # The last one counts, as in argparse.
    started(monkeypatch, f"{name}={config}", name, json.dumps(MINE), program=program)
    assert found() == [{}]


def test_the_settings_among_other_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {**MINE, "kv_connector_extra_config": EXTRA}
    among = {"connectors": [mine, {"kv_connector": "OffloadingConnector"}, 3]}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": among}
    started(monkeypatch, "--kv-transfer-config", json.dumps(config))
    assert found() == [EXTRA]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--kv-transfer-config"],
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[]"],
        ["--kv-transfer-config", json.dumps({"kv_connector": "OffloadingConnector"})],
        ["--kv-transfer-config", json.dumps(MINE | {"kv_connector_module_path": "other"})],
        # Spread over several options, or in a file: vLLM puts them together.
        ["--kv-transfer-config", json.dumps(MINE), "--kv-transfer-config.kv_role", "kv_both"],
        ["--config", "serve.yaml", "--kv-transfer-config", json.dumps(MINE)],
    ],
)
def test_what_says_nothing(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    started(monkeypatch, *args)
    assert found() == []


@pytest.mark.parametrize("program", ["bench.py", "", "/home/vllm/serve.py", "/a/vllm.py"])
def test_other_programs_say_nothing(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    started(monkeypatch, "--kv-transfer-config", json.dumps(MINE), program=program)
    assert found() == []
    assert not _command.is_known()


def test_the_served_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    started(monkeypatch, "--chat-template", str(file))
    assert _template.served(Settings.read({})) == ("{{ messages }}", "--chat-template")
    # The setting comes first; it may be the text itself.
    given = Settings.read({"chat_template": "{{ other }}"})
    assert _template.served(given) == ("{{ other }}", "the setting chat_template")
    started(monkeypatch)
    assert _template.served(Settings.read({})) == (None, "the model directory's")
    for args in (["--config", "serve.yaml"], ["--config=serve.yaml"]):
        started(monkeypatch, *args, "--chat-template", str(file))
        text, source = _template.served(Settings.read({}))
        assert text is None
        assert "set chat_template if it has one" in source
    # vLLM ships some templates, and knows them by name.
    package = tmp_path / "vllm"
    shipped = package / "transformers_utils" / "chat_templates"
    shipped.mkdir(parents=True)
    (shipped / "shipped.jinja").write_text("{{ shipped }}")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    started(monkeypatch, "--chat-template", "shipped.jinja")
    assert _template.served(Settings.read({})).text == "{{ shipped }}"
    started(monkeypatch, "--chat-template", str(file), program="chat.py")
    assert _template.served(Settings.read({})).text is None


def test_the_arguments_of_the_served_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not read: reasoning that the server keeps was taken for dropped."""
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    template = "{{ keep }}{{ messages }}"
    for name in ("--default-chat-template-kwargs", "--default_chat_template_kwargs"):
        started(monkeypatch, name, '{"keep": true, "enable_thinking": false}')
        # vLLM drops what the template does not read.
        assert _template.defaults(template) == {"keep": True}
        assert _template.served(Settings.read({})).source == (
            "the model directory's, with --default-chat-template-kwargs"
        )
    assert _template.defaults(template, {"keep": 1, "other": 2}) == {"keep": 1}
    started(monkeypatch)
    assert _template.defaults(template) == {}
    for args in (
        ["--default-chat-template-kwargs", "{"],
        ["--default-chat-template-kwargs.keep", "true"],
        ["--config", "serve.yaml", "--default-chat-template-kwargs", "{}"],
        # They may be in the file.
        ["--config=serve.yaml"],
    ):
        started(monkeypatch, *args)
        assert _template.defaults(template) == {}
        source = _template.served(Settings.read({})).source
        assert source.endswith("is not one JSON text here: set template_arguments)")
        source = _template.served(Settings.read({"template_arguments": {"keep": True}})).source
        assert "template_arguments" not in source
    started(monkeypatch, "--default-chat-template-kwargs", '{"keep": true}', program="chat.py")
    assert _template.defaults(template) == {}


def test_a_template_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, "--chat-template", "built_in.jinja")
    with pytest.raises(
        SettingsError, match=r"'built_in.jinja' is neither .* name its file in this"
    ):
        _template.served(Settings.read({}))
    empty = tmp_path / "empty.jinja"
    empty.touch()
    with pytest.raises(SettingsError, match=r"empty.jinja' is empty$"):
        _template.served(Settings.read({"chat_template": str(empty)}))
    for wrong in (3, "", ["a"]):
        with pytest.raises(SettingsError, match="chat_template must be the path of a chat templ"):
            Settings.read({"chat_template": wrong})
