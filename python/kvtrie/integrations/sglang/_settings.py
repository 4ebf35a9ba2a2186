"""What an operator and a request ask of kvtrie inside SGLang.

SGLang has no flag for settings of a cache from outside. They are in the environment variable
``KVTRIE_SGLANG``: a JSON object, or the path of a file with one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations import _asked
from kvtrie.integrations._asked import SettingsError, shown
from kvtrie.integrations._store_settings import StoreSettings

if TYPE_CHECKING:
    from kvtrie._core import ReusePolicy
    from kvtrie.record import RecordOptions

VARIABLE: Final = "KVTRIE_SGLANG"
PARAMETER: Final = "kvtrie"
"""The key of ``custom_params``; its value is an object with the fields of `Wish`."""

_NEED_GATE: Final = {
    "shadow": "counts what a gate would let move",
    "events": "are of approximate pages, which no request has without one",
}
_REUSE: Final = ("approximate", "exact")
_REASONING: Final = ("evict_first", "keep", "drop")
# SGLang's cache knows no kinds of tokens but dead reasoning.
_POLICY: Final = tuple(one for one in _asked.POLICY_FIELDS if one != "forbid_kinds")


@dataclass(frozen=True, slots=True)
class SGLangSettings:
    """The operator's settings; ``docs/sglang.md`` describes them.

    Attributes:
        gate: A gate file, or ``"unchecked"``; None: nothing is moved.
        policy: Of all requests; None: the cheapest that the gate clears for each plan.
        default: What a request gets that does not ask: ``"approximate"`` or ``"exact"``.
        reasoning: What is done with dead reasoning of a request that does not ask, as in `Wish`.
        gaps: Whether reuse continues after gaps, by hooks in SGLang.
        shadow: Whether what would be moved is only counted.
        record: Where finished requests are recorded: a path, or fields of `RecordOptions`.
        events: Where KV events of approximate pages are published; None: nowhere.
        snapshot: Where snapshots of the KV events are given; None: nowhere.
        store: KV outside the pool: fields of `StoreSettings`; None: there is none.
    """

    gate: str | None = None
    policy: Mapping[str, Any] | None = None
    default: str = "approximate"
    reasoning: str = "evict_first"
    gaps: bool = False
    shadow: bool = False
    record: str | Mapping[str, Any] | None = None
    events: Mapping[str, Any] | None = None
    snapshot: Mapping[str, Any] | None = None
    store: Mapping[str, Any] | None = None

    @classmethod
    def read(cls) -> SGLangSettings:
        """The settings of this process.

        Raises:
            SettingsError: They are no JSON object, or a setting is unknown or invalid.
        """
        given = _given()
        _asked.check_keys(given, [one.name for one in fields(cls)], VARIABLE)
        gate, policy = given.get("gate"), given.get("policy")
        if gate is not None and (not isinstance(gate, str) or not gate):
            msg = f'{VARIABLE}: gate must be a path, or "unchecked", not {gate!r}'
            raise SettingsError(msg)
        if not isinstance(policy, Mapping | None):
            msg = f"{VARIABLE}: policy must be a mapping of fields of kvtrie.ReusePolicy"
            raise SettingsError(msg)
        for name, known in (("default", _REUSE), ("reasoning", _REASONING)):
            if name in given:
                _asked.check_one_of(given[name], known, f"{VARIABLE}: {name}")
        for name in ("gaps", "shadow"):
            if not isinstance(given.get(name, False), bool):
                msg = f"{VARIABLE}: {name} must be true or false, not {given[name]!r}"
                raise SettingsError(msg)
        _asked.check_events(given.get("events"), VARIABLE)
        for name, why in _NEED_GATE.items():
            if given.get(name) and gate is None:
                msg = f'{VARIABLE}: "{name}" {why}: set "gate" too'
                raise SettingsError(msg)
        _asked.check_snapshot(given.get("snapshot"), VARIABLE)
        found = cls(**given)
        found.wanted()
        found.recorded()
        found.stored()
        return found

    @property
    def computes_gaps(self) -> bool:
        """Whether SGLang is hooked."""
        return self.gaps and not self.shadow

    def recorded(self) -> RecordOptions | None:
        """Where finished requests are recorded, and how.

        Raises:
            SettingsError: The setting is invalid.
        """
        return _asked.recorded(self.record, VARIABLE)

    def stored(self) -> StoreSettings | None:
        """The store's settings; None without one.

        Raises:
            SettingsError: A setting is unknown or invalid.
        """
        return StoreSettings.read(self.store, VARIABLE)

    def wanted(self) -> ReusePolicy | None:
        """The operator's policy; None if the gate chooses.

        Raises:
            SettingsError: A field is unknown or invalid.
        """
        if self.policy is None:
            return None
        return _asked.policy_of(self.policy, VARIABLE, _POLICY)


def _given() -> dict[str, Any]:
    """The operator's settings as they are written.

    Raises:
        SettingsError: They are no JSON object, or there is no such file.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{VARIABLE}: {text}: {getattr(error, 'strerror', None) or error}"
            raise SettingsError(msg) from error
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{VARIABLE}: not JSON: {error}"
        raise SettingsError(msg) from error
    if not isinstance(given, dict):
        msg = f"{VARIABLE}: must be a JSON object, not {type(given).__name__}"
        raise SettingsError(msg)
    return given


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for by ``custom_params["kvtrie"]``.

    Attributes:
        reasoning: Whether dead reasoning is evicted first, ``"evict_first"``, like all else,
            ``"keep"``, or when the request ends, ``"drop"``.
        reuse: ``"approximate"`` or ``"exact"``; None: the operator's default.
        session: The id of its conversation.
    """

    reasoning: str = "evict_first"
    reuse: str | None = None
    session: str | None = None

    @classmethod
    def read(cls, custom_params: object, reasoning: str = "evict_first") -> Wish:
        """Check the parameters of a request.

        Args:
            custom_params: They.
            reasoning: The operator's choice, for a request without one.

        Raises:
            SettingsError: A field is unknown or invalid.
        """
        where = f"custom_params: {PARAMETER}"
        given = custom_params.get(PARAMETER) if isinstance(custom_params, Mapping) else None
        if given is None:
            return cls(reasoning)
        if not isinstance(given, Mapping):
            msg = f"{where} must be an object, not {shown(given)}"
            raise SettingsError(msg)
        _asked.check_keys(given, ("reasoning", "reuse", "session"), where)
        for name, known in (("reasoning", _REASONING), ("reuse", _REUSE)):
            if name in given:
                _asked.check_one_of(given[name], known, f"{where}: {name}")
        _asked.session_id(given.get("session"), f"{where}: session")
        return cls(**{"reasoning": reasoning, **given})
