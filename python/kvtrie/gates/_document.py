"""The gate file: one JSON document, read strictly."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie._core import ReusePolicy
from kvtrie.gates._errors import GateMismatchError, refuse, short
from kvtrie.gates._reader import MAX_TEXT, Reader
from kvtrie.gates.boxes import RANGES, Box, Range
from kvtrie.gates.figures import LIMITS, MAX_CASES, Figures, Thresholds
from kvtrie.gates.verdict import CONTROLS, Control, Kind, Measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.gates.gate import Gate

FORMAT: Final = "kvtrie-gate"
VERSION: Final = 3
MAX_POLICIES: Final = 64
MAX_KINDS: Final = 64
_OLDER: Final = {
    1: "it has no control, no check of full recomputation and no limits for KL and top 1",
    2: "it does not tell kinds of edit apart, and its limits are not relative to exact reuse",
}
CHOOSERS: Final = {"probe": 2, "question": 2, "adaptive": 1}
"""Versions of the choosers that read records: a verdict holds for the one that was measured."""
_POLICY_FIELDS: Final = tuple(inspect.signature(ReusePolicy).parameters)
_LISTS: Final = ("kl_excess", "top1_drop", "losses")
_NUMBERS: Final = tuple(one.name for one in fields(Figures) if one.name not in _LISTS)


def as_text(gate: Gate) -> str:
    """The text of a gate, or a GateError if it could not be read back."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": gate.model,
        "kv_dtype": gate.kv_dtype,
        "rope": gate.rope,
        "checkpoint": gate.checkpoint,
        "template": gate.template,
        "data": gate.data,
        "thresholds": {one.name: getattr(gate.thresholds, one.name) for one in fields(Thresholds)},
        "policies": [
            {
                "name": one.name,
                "policy": {name: _listed(getattr(one.policy, name)) for name in _POLICY_FIELDS},
                **_chooser(one.policy),
                "kinds": [_kind_document(kind, gate.thresholds) for kind in one.kinds],
            }
            for one in gate.measured
        ],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    parse(text, "Gate.to_json")
    return text


def _chooser(policy: ReusePolicy) -> dict[str, int]:
    return {"chooser": CHOOSERS[policy.repair]} if policy.repair in CHOOSERS else {}


def _kind_document(kind: Kind, thresholds: Thresholds) -> dict[str, Any]:
    return {
        "name": kind.name,
        "box": {
            **{name: [limits.above, limits.most] for name, limits in _ranges(kind.box).items()},
            "same_conversation": kind.box.same_conversation,
        },
        "figures": _figures_document(kind.figures),
        "floor": _figures_document(kind.floor),
        "controls": [
            {"name": one.name, "figures": _figures_document(one.figures)} for one in kind.controls
        ],
        "cleared": kind.verdict(thresholds).state == "cleared",
    }


def _ranges(box: Box) -> dict[str, Range]:
    return {name: getattr(box, name) for name in RANGES}


def _figures_document(figures: Figures) -> dict[str, Any]:
    return {one.name: _listed(getattr(figures, one.name)) for one in fields(Figures)}


def _listed(value: Any) -> Any:  # noqa: ANN401 - a field of a policy may be anything
    return list(value) if isinstance(value, tuple) else value


def parse(text: str, where: str) -> dict[str, Any]:
    """The fields of the gate in a text; ``where`` is named in errors."""
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        refuse(where, "it is nested too deeply")
    except ValueError as error:
        refuse(where, str(error).splitlines()[0][:MAX_TEXT])
    found = Reader(document, where)
    if found.take("format") != FORMAT:
        found.refuse(f"its format is not {FORMAT!r}")
    _check_version(found.take("version"), where)
    model, kv_dtype = found.text("model"), found.text("kv_dtype")
    if not model:
        found.refuse("'model' is empty")
    rope, data = found.text("rope", 1 << 16), found.text("data")
    checkpoint, template = found.optional_text("checkpoint"), found.optional_text("template")
    limits = Reader(found.take("thresholds"), f"{where}, thresholds")
    given = {name: limits.take(name) for name in (*LIMITS, "loss_per_kind")}
    limits.close()
    try:
        thresholds = Thresholds(**given)
    except (TypeError, ValueError) as error:
        limits.refuse(str(error))
    measured = tuple(
        _measured(entry, f"{where}, policy {number}", thresholds)
        for number, entry in enumerate(found.items("policies", MAX_POLICIES), start=1)
    )
    found.close()
    return {
        "model": model,
        "kv_dtype": kv_dtype,
        "rope": rope,
        "thresholds": thresholds,
        "measured": measured,
        "data": data,
        "checkpoint": checkpoint,
        "template": template,
    }


def _check_version(version: object, where: str) -> None:
    if type(version) is int and version in _OLDER:
        msg = (
            f"{where}: version {version} clears nothing, because {_OLDER[version]}: run `kvtrie "
            "calibrate` again"
        )
        raise GateMismatchError(msg)
    if type(version) is not int or version != VERSION:
        msg = f"{where}: version {short(version)} is not supported, only {VERSION} is"
        raise GateMismatchError(msg)


def _check_chooser(version: object, repair: str, where: str) -> None:
    if version != CHOOSERS[repair]:
        msg = (
            f"{where}: it was measured with version {short(1 if version is None else version)} of "
            f"the chooser {repair!r}, this kvtrie has version {CHOOSERS[repair]}: run `kvtrie "
            "calibrate` again"
        )
        raise GateMismatchError(msg)


def _measured(entry: object, where: str, thresholds: Thresholds) -> Measured:
    found = Reader(entry, where)
    name = found.text("name")
    policy = _policy(found.take("policy"), where)
    if policy.repair in CHOOSERS:
        _check_chooser(found.optional("chooser"), policy.repair, where)
    kinds = tuple(
        _kind(one, f"{where}, kind {number}", thresholds)
        for number, one in enumerate(found.items("kinds", MAX_KINDS, least=0), start=1)
    )
    found.close()
    try:
        return Measured(name, policy, kinds)
    except ValueError as error:
        found.refuse(str(error))


def _kind(entry: object, where: str, thresholds: Thresholds) -> Kind:
    found = Reader(entry, where)
    name = found.text("name")
    box = _box(found.take("box"), f"{where}, box")
    figures, floor = (
        _figures(found.take(part), f"{where}, {part}") for part in ("figures", "floor")
    )
    controls = tuple(
        _control(one, f"{where}, control {number}")
        for number, one in enumerate(found.items("controls", len(CONTROLS), least=0), start=1)
    )
    if len({one.name for one in controls}) != len(controls):
        found.refuse(f"'controls' has {controls[0].name!r} twice")
    is_cleared = found.take("cleared")
    found.close()
    kind = Kind(name, box, figures, floor, controls)
    flaw = kind.flaw()
    if flaw is not None:
        found.refuse(flaw)
    if is_cleared is not (kind.verdict(thresholds).state == "cleared"):
        found.refuse(f"'cleared' is {short(is_cleared)}, the figures say otherwise")
    return kind


def _box(value: object, where: str) -> Box:
    found = Reader(value, where)
    given: dict[str, Any] = {}
    for name in RANGES:
        pair = found.take(name)
        if not isinstance(pair, list) or len(pair) != 2:
            found.refuse(f"{name!r} must be two limits, not {short(pair)}")
        try:
            given[name] = Range(*pair)
        except (TypeError, ValueError) as error:
            found.refuse(f"{name!r}: {error}")
    whose = found.take("same_conversation")
    if whose is not None and not isinstance(whose, bool):
        found.refuse(f"'same_conversation' must be true, false or null, not {short(whose)}")
    found.close()
    return Box(same_conversation=whose, **given)


def _control(entry: object, where: str) -> Control:
    found = Reader(entry, where)
    name = found.text("name")
    figures = _figures(found.take("figures"), where)
    found.close()
    try:
        return Control(name, figures)
    except ValueError as error:
        found.refuse(str(error))


def _figures(value: object, where: str) -> Figures:
    found = Reader(value, where)
    given: dict[str, Any] = {name: found.take(name) for name in _NUMBERS}
    for name in _LISTS:
        given[name] = tuple(found.items(name, MAX_CASES, least=0))
    found.close()
    figures = Figures(**given)
    flaw = figures.flaw()
    if flaw is not None:
        found.refuse(flaw)
    return figures


def _policy(value: object, where: str) -> ReusePolicy:
    found = Reader(value, f"{where}, policy")
    given = {name: found.take(name) for name in _POLICY_FIELDS}
    found.close()
    for name in ("approximate", "partial_blocks"):
        if not isinstance(given[name], bool):
            found.refuse(f"{name!r} must be true or false, not {short(given[name])}")
    if given["min_run"] is None:
        found.refuse("'min_run' must be a number: the shortest run that was used")
    kinds = given["forbid_kinds"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        found.refuse(f"'forbid_kinds' must be a list of texts, not {short(kinds)}")
    try:
        policy = ReusePolicy(**given)
    except (TypeError, ValueError, OverflowError) as error:
        found.refuse(str(error))
    if not policy.approximate:
        found.refuse("an exact policy needs no clearance")
    return policy


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a field occurs twice"
        raise ValueError(msg)
    return found


def _no_constant(name: str) -> NoReturn:
    msg = f"{name} is not a JSON number"
    raise ValueError(msg)
