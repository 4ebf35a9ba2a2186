"""Gate files: what is written is read again, and hostile files are refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.cleared import BAD, DETECTED, FLOOR, GOOD, UNDETECTED, gate, kind

import kvtrie
from kvtrie import gates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FEW = gates.Box(cuts=gates.Range(most=1), same_conversation=True)
MANY = gates.Box(cuts=gates.Range(above=1), new_context=gates.Range(most=0.1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.json"


@pytest.fixture
def document() -> dict[str, Any]:
    given = gate(kind("few", FEW), kind("many", MANY, BAD, controls=(DETECTED, UNDETECTED)))
    loaded: dict[str, Any] = json.loads(given.to_json())
    return loaded


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def test_read_what_was_written_is_equal(path: Path) -> None:
    policy = kvtrie.ReusePolicy(
        min_run=24, max_hops=3, max_approximate_share=0.5, recompute_last=2, forbid_kinds=["answer"]
    )
    limits = gates.Thresholds(max_loss=0.02, max_kl=0.5, min_top1=0.9, loss_per_kind=True)
    wrote = gate(
        kind("few", FEW),
        kind("many", MANY, BAD),
        policy=policy,
        thresholds=limits,
        data="talk",
        checkpoint="12ab",
        template="34cd",
    )
    wrote.write(path)
    assert gates.read(path) == wrote
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.json"]
    assert [one["cleared"] for one in json.loads(wrote.to_json())["policies"][0]["kinds"]] == [
        False,
        False,
    ]
    assert gate().cleared() == gate().measured


def test_write_that_fails_leaves_the_old_file(path: Path) -> None:
    gate().write(path)
    before = path.read_bytes()
    with pytest.raises(gates.GateError, match="NaN"):
        gate(kind(own=replace(GOOD, kl_mean=float("nan")))).write(path)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        gate().write(path.parent / "none" / "gate.json")
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.json"]


def test_write_replaces_the_file_of_a_link_and_no_device(path: Path) -> None:
    link, pipe = path.parent / "link.json", path.parent / "pipe"
    link.symlink_to(path)
    gate().write(link)
    assert link.is_symlink()
    assert gates.read(path) == gate()
    os.mkfifo(pipe)
    for target in (pipe, path.parent):
        with pytest.raises(OSError, match="not a regular file"):
            gate().write(target)
    assert pipe.is_fifo()


KIND = ("policies", 0, "kinds", 0)


def put(*where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        *outer, last = where
        for name in outer:
            document = document[name]
        document[last] = value

    return change


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format": (put("format", value="other"), "its format is not"),
    "unknown field": (put("extra", value=1), "unknown field 'extra'"),
    "no model": (put("model", value=""), "'model' is empty"),
    "long model": (put("model", value="m" * 600), "'model' must be text"),
    "no policies": (put("policies", value=[]), "a list of 1 to 64"),
    "limit": (put("thresholds", "max_kl", value=-1), "max_kl must be finite"),
    "limit as text": (put("thresholds", "loss_per_kind", value="no"), "must be True or False"),
    "policy field": (put("policies", 0, "policy", "min_run", value=None), "'min_run' must be a nu"),
    "exact policy": (
        put("policies", 0, "policy", "approximate", value=False),
        "needs no clearance",
    ),
    "policy range": (put("policies", 0, "policy", "max_hops", value=-1), "max_hops"),
    "policy huge": (
        put("policies", 0, "policy", "recompute_first", value=10**30),
        "recompute_first|int",
    ),
    "forbid": (put("policies", 0, "policy", "forbid_kinds", value=[1]), "a list of texts"),
    "kind twice": (put("policies", 0, "kinds", 1, "name", value="few"), "the name 'few'"),
    "boxes meet": (put("policies", 0, "kinds", 1, "box", "cuts", value=[None, None]), "meet"),
    "range": (put(*KIND, "box", "cuts", value=[2, 1]), "nothing is above 2"),
    "range of one": (put(*KIND, "box", "cuts", value=[2]), "must be two limits"),
    "range of text": (put(*KIND, "box", "cuts", value=[None, "9"]), "must be a number or None"),
    "whose": (put(*KIND, "box", "same_conversation", value=1), "true, false or null"),
    "box field": (put(*KIND, "box", "weight", value=1), "unknown field 'weight'"),
    "count": (put(*KIND, "figures", "positions", value=1.5), "'positions' must be a count"),
    "list": (put(*KIND, "figures", "losses", value=[0.0] * 20_000), "a list of 0 to 16384"),
    "list of text": (put(*KIND, "figures", "kl_excess", value=["0"]), "'kl_excess' must be fin"),
    "other replies": (put(*KIND, "figures", "positions", value=900), "it is of the replies"),
    "floor": (put(*KIND, "floor", "right_full", value=61), "more than the 60 questions"),
    "control": (put(*KIND, "controls", 0, "name", value="rotated"), "must be one of drop"),
    "control twice": (
        put(
            *KIND,
            "controls",
            value=2 * [json.loads(gate().to_json())["policies"][0]["kinds"][0]["controls"][0]],
        ),
        "'controls' has 'drop' twice",
    ),
    "cleared by hand": (put("policies", 0, "kinds", 1, "cleared", value=True), "say otherwise"),
    "not cleared": (put(*KIND, "cleared", value=False), "'cleared' is False, the figures say"),
    "cleared as number": (put(*KIND, "cleared", value=1), "say otherwise"),
}


@pytest.mark.parametrize(("change", "said"), HOSTILE.values(), ids=HOSTILE)
def test_read_file_that_was_changed_is_refused(
    path: Path, document: dict[str, Any], change: Callable[[dict[str, Any]], None], said: str
) -> None:
    change(document)
    write(path, document)
    with pytest.raises(gates.GateError, match=said):
        gates.read(path)


def test_read_every_missing_field_is_named(path: Path, document: dict[str, Any]) -> None:
    places: list[Any] = [
        document,
        document["thresholds"],
        document["policies"][0],
        document["policies"][0]["policy"],
        document["policies"][0]["kinds"][0],
        document["policies"][0]["kinds"][0]["box"],
        document["policies"][0]["kinds"][0]["floor"],
    ]
    for place in places:
        for name in list(place):
            if name in ("checkpoint", "template"):
                continue
            kept = place.pop(name)
            write(path, document)
            with pytest.raises(gates.GateError, match=f"'{name}' is missing"):
                gates.read(path)
            place[name] = kept


HOSTILE_BYTES = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "null": b"null",
    "bytes": b"\xff\xfe",
    "nan": b'{"format": NaN}',
    "twice": b'{"format": "kvtrie-gate", "format": "kvtrie-gate"}',
    "deep": b"[" * 100_000,
    "long number": b"9" * 5_000,
    "deep objects": b'{"a":' * 50_000,
    "large": b" " * (gates.MAX_BYTES + 1),
}


@pytest.mark.parametrize("raw", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_read_hostile_bytes_are_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(gates.GateError):
        gates.read(path)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (1, "it has no control, no check of full recomputation and no limits for KL and top 1"),
        (2, "it does not tell kinds of edit apart, and its limits are not relative to exact reuse"),
    ],
)
def test_read_older_versions_are_refused_by_name(
    path: Path, document: dict[str, Any], version: int, why: str
) -> None:
    document["version"] = version
    write(path, document)
    with pytest.raises(gates.GateMismatchError) as caught:
        gates.read(path)
    assert str(caught.value) == (
        f"{path}: version {version} clears nothing, because {why}: run `kvtrie calibrate` again"
    )


@pytest.mark.parametrize("version", [None, 1, 3])
def test_read_another_chooser_is_refused(path: Path, document: Any, version: Any) -> None:
    entry = document["policies"][0]
    entry["policy"] |= {"repair": "probe", "recompute_share": 0.2, "recompute_first": 0}
    entry["chooser"] = 2
    write(path, document)
    kept = gates.read(path)
    assert kept.measured[0].policy.repair == "probe"
    kept.write(path)
    assert gates.read(path) == kept
    entry["chooser"] = version
    write(path, document)
    shown = 1 if version is None else version
    with pytest.raises(gates.GateMismatchError, match=f"version {shown} of the chooser 'probe'"):
        gates.read(path)


@pytest.mark.parametrize("version", [0, 4, True, 3.0, "3", None, 10**30])
def test_read_another_version_is_refused(path: Path, version: Any, document: Any) -> None:
    document["version"] = version
    write(path, document)
    with pytest.raises(gates.GateMismatchError, match="version"):
        gates.read(path)


def test_read_no_such_file_is_an_os_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gates.read(path)


def test_floor_of_the_helper_is_of_exact_reuse() -> None:
    assert FLOOR.flaw() is None
    assert GOOD.flaw(FLOOR) is None
