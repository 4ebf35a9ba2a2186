"""`make audit` fails on what it finds, and says what it could not check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.scripts import script

if TYPE_CHECKING:
    from types import ModuleType

KNOWN = {"id": "CVE-1", "fix_versions": ["2.0"]}
NOTHING = {"dependencies": [{"name": "jinja2", "skip_reason": "not found"}]}
CANARY = {"dependencies": [{"name": "jinja2", "version": "3.1.2", "vulns": [KNOWN]}]}


@pytest.fixture
def audit() -> ModuleType:
    return script("tools/audit.py")


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def fake_deny(folder: Path, *, fetch: str = "exit 0", check: str = "exit 0") -> str:
    return program(folder, "cargo-deny", f'case "$1" in fetch) {fetch};; *) {check};; esac')


def fake_service(folder: Path, canary: Any, packages: Any = None) -> Path:
    """A pip-audit with these results for the canary and our lists; text makes it crash."""
    (folder / "canary.json").write_text(json.dumps(canary), encoding="utf-8")
    (folder / "packages.json").write_text(json.dumps(packages), encoding="utf-8")
    program(
        folder,
        "pip-audit",
        f'case "$*" in *canary*) cat {folder}/canary.json;; *) cat {folder}/packages.json;; esac\n'
        "echo 'cannot reach the service' >&2; exit 1",
    )
    return folder


def test_crates_without_the_database_are_checked_for_the_rest(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.crates(fake_deny(tmp_path, fetch="echo 'no such host' >&2; exit 1"))
    assert capsys.readouterr().out.splitlines() == [
        "audit: crates: licences, bans and sources: checked",
        "audit: crates: advisories: not checked (the database could not be fetched)",
    ]


def test_what_hangs_is_given_up(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LIMIT", 0.1)
    assert audit.run("sleep", "60") is None

    monkeypatch.setattr(audit, "LIMIT", 120)
    monkeypatch.setattr(audit, "run", lambda *_: None)
    assert audit.vulnerabilities(Path("tools"))
    assert "not checked (the service took more than 120 s)" in capsys.readouterr().out
    assert not audit.crates("cargo-deny")
    said = capsys.readouterr().out
    assert "cargo deny check licenses bans sources failed\nit took too long\n" in said
    assert "advisories: not checked" in said


@pytest.mark.parametrize("check", ["licenses", "advisories"])
def test_a_crate_that_is_refused_fails(
    audit: ModuleType, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = f'case "$*" in *{check}*) echo refused: this >&2; exit 4;; esac'
    assert not audit.crates(fake_deny(tmp_path, check=refuse))
    said = capsys.readouterr().out
    for manifest in ("Cargo.toml", "fuzz/Cargo.toml", "locks/Cargo.toml"):
        assert f"audit: crates of {manifest}: cargo deny check {check}" in said
    assert "refused: this" in said
    assert "not checked" not in said


@pytest.mark.parametrize(
    ("license_", "allowed"),
    [
        ("MIT", True),
        ("MPL-2.0 AND MIT", True),
        ("DFSG approved; MIT License", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("Other/Proprietary License", False),
        ("UNKNOWN", False),
    ],
)
def test_a_package_needs_terms_that_are_allowed(
    audit: ModuleType,
    license_: str,
    *,
    allowed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [
        {"Name": "thing", "Version": "1.0", "License": license_},
        {"Name": "nvidia-thing", "Version": "1.0", "License": "Other/Proprietary License"},
        {"Name": "codespell", "Version": "1.0", "License": "GPL-2.0-only"},
    ]
    (tmp_path / "found.json").write_text(json.dumps(found), encoding="utf-8")
    program(tmp_path, "pip-licenses", f"cat {tmp_path}/found.json")
    assert audit.licenses(tmp_path) is allowed
    said = capsys.readouterr().out
    refused = f"audit: packages: thing 1.0: the licence {license_!r} is not allowed\n"
    assert said == ("audit: packages: licences of 3: checked\n" if allowed else refused)


@pytest.mark.parametrize(
    ("name", "license_"), [("codespell", "GPL-3.0-only"), ("codespeller", "GPL-2.0-only")]
)
def test_a_command_under_the_gpl_is_excepted_by_name_and_terms(
    audit: ModuleType, name: str, license_: str, tmp_path: Path
) -> None:
    found = [{"Name": name, "Version": "1.0", "License": license_}]
    (tmp_path / "found.json").write_text(json.dumps(found), encoding="utf-8")
    program(tmp_path, "pip-licenses", f"cat {tmp_path}/found.json")
    assert not audit.licenses(tmp_path)


@pytest.mark.parametrize(
    ("canary", "why"),
    [(NOTHING, "the service knows none of jinja2"), (None, "cannot reach the service")],
    ids=["silent", "unreachable"],
)
def test_packages_are_not_called_checked_by_a_service_that_knows_nothing(
    audit: ModuleType, canary: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.vulnerabilities(fake_service(tmp_path, canary))
    said = capsys.readouterr().out
    assert said.startswith(f"audit: packages: known vulnerabilities: not checked ({why}")
    assert said.count("\n") == 1


def test_a_known_vulnerability_fails_and_what_is_not_known_is_named(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"name": "good", "version": "1.0", "vulns": []}
    unknown = {"name": "torch", "skip_reason": "not found"}
    bad = {"name": "bad", "version": "1.0", "vulns": [KNOWN]}
    what = "audit: packages: known vulnerabilities:"

    assert audit.vulnerabilities(fake_service(tmp_path, CANARY, {"dependencies": [good, unknown]}))
    assert capsys.readouterr().out.splitlines() == [
        f"{what} not checked for torch",
        f"{what} checked for 1 packages",
    ]
    assert not audit.vulnerabilities(fake_service(tmp_path, CANARY, {"dependencies": [good, bad]}))
    assert f"{what} bad 1.0: CVE-1, fixed in 2.0" in capsys.readouterr().out
