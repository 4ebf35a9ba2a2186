"""The settings in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie._core import EXACT_ONLY
from kvtrie._nearest import hint, nearest
from kvtrie.integrations import _asked
from kvtrie.integrations._asked import (
    SettingsError,
    check_events,
    check_keys,
    check_one_of,
    check_snapshot,
    policy_of,
    session_id,
    shown,
)
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.tags import PRESETS, Tagger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtrie._core import ReusePolicy
    from kvtrie.record import RecordOptions

WHERE: Final = "kv_connector_extra_config"
LAST_HINT: Final = "kvtrie.last"
"""The action of vLLM's ``kv_hints`` that says that a conversation ends."""

# The last one is of `KvtrieNixlConnector`, whose requests may be sent on.
_PARAMS: Final = ("kvtrie", "session", "last", "kvtrie_manifest")
_MAX_PARAMS: Final = 32
_CLOSE: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The connector's configuration; ``docs/vllm.md`` describes the keys."""

    mode: str | None = None
    gate: str | None = None
    default: str = "approximate"
    policy: Mapping[str, Any] | None = None
    chat_format: str | Mapping[str, Any] | None = "auto"
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] | None = None
    dead_thinking: bool = True
    record: str | Mapping[str, Any] | None = None
    shadow: bool = False
    events: Mapping[str, Any] | None = None
    snapshot: Mapping[str, Any] | None = None
    store: Mapping[str, Any] | None = None
    images: bool = False
    # A secret.
    seed: int | None = field(default=None, repr=False)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Check the user's mapping.

        Raises:
            SettingsError: A key is unknown, or a value is invalid.
        """
        known = [one.name for one in fields(cls)]
        check_keys(given, known, WHERE)
        _check_mode(given)
        if given.get("mode") == "exact":
            given = {**given, "default": "exact"}
        settings = cls(**given)
        settings._check()
        return settings

    @property
    def is_exact(self) -> bool:
        """Whether nothing that could be approximate is made at all."""
        return self.mode == "exact"

    @property
    def moves(self) -> bool:
        """Whether KV may be approximate."""
        return self.gate is not None and not self.shadow

    def wanted(self) -> ReusePolicy:
        return policy_of(self.policy or {}, WHERE)

    def recorded(self) -> RecordOptions | None:
        """Where finished requests are recorded, and how.

        Raises:
            SettingsError: The setting is invalid.
        """
        return _asked.recorded(self.record, WHERE)

    def stored(self) -> StoreSettings | None:
        """The store of KV outside the pool; None without one.

        Raises:
            SettingsError: The setting is invalid.
        """
        return StoreSettings.read(self.store, WHERE)

    def check_store(self) -> None:
        """Check that the store's key can be read, and that its backend is installed.

        Raises:
            SettingsError: It is not so.
        """
        found = self.stored()
        if found is not None:
            found.check_files(WHERE)

    def check_record(self) -> None:
        """Check that the log can be written.

        Raises:
            SettingsError: It cannot.
        """
        _asked.check_record(self.recorded(), WHERE)

    def _check(self) -> None:
        # The user's JSON may contain anything.
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        gate, form, arguments = given["gate"], given["chat_format"], given["template_arguments"]
        if gate is not None and (not isinstance(gate, str) or not gate):
            _refuse("gate", gate, 'a path, or "unchecked"')
        check_one_of(given["default"], ("approximate", "exact"), f"{WHERE}: default")
        if not isinstance(given["policy"], Mapping | None):
            _refuse("policy", given["policy"], "a mapping of fields of kvtrie.ReusePolicy")
        _check_format(form)
        template = given["chat_template"]
        if template is not None and (not isinstance(template, str) or not template):
            _refuse("chat_template", template, "the path of a chat template, or its text")
        if not isinstance(arguments, Mapping | None):
            _refuse("template_arguments", arguments, "a mapping of names to values")
        if not isinstance(given["dead_thinking"], bool):
            _refuse("dead_thinking", given["dead_thinking"], "true or false")
        for name in ("shadow", "images"):
            if not isinstance(given[name], bool):
                _refuse(name, given[name], "true or false")
        if given["images"] and gate not in (None, "unchecked"):
            msg = (
                f'{WHERE}: "images": true next to a gate file, which is measured on text alone: '
                'remove "images", or set "gate": "unchecked" and be responsible for the quality'
            )
            raise SettingsError(msg)
        self.recorded()
        check_events(given["events"], WHERE)
        check_snapshot(given["snapshot"], WHERE)
        self.stored()
        seed = given["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int | None):
            _refuse("seed", seed, "an integer from 0 to 2**64-1, or null")
        if seed is not None and not 0 <= seed < 1 << 64:
            _refuse("seed", seed, "an integer from 0 to 2**64-1, or null")
        self.wanted()


def request_policy(
    params: Mapping[str, Any] | None, cleared: ReusePolicy, default: str
) -> ReusePolicy:
    """What one request may reuse, by ``{"kvtrie": "exact" or "approximate"}`` in its parameters.

    Raises:
        SettingsError: It has another value, a parameter is close to one of kvtrie's, or there are
            more than 32.
    """
    said: object = default
    if params:
        _check_params(params)
        said = params.get("kvtrie", default)
    if said == "exact":
        return EXACT_ONLY
    if said == "approximate":
        return cleared
    msg = f'kv_transfer_params: kvtrie must be "exact" or "approximate", not {shown(said)}'
    raise SettingsError(msg)


def _check_params(params: Mapping[str, Any]) -> None:
    """Refuse what is meant for kvtrie and misspelt; other connectors have parameters too.

    It is called in the scheduler, where all requests wait: names are compared if they are few and
    short.
    """
    if len(params) > _MAX_PARAMS:
        # One of them may be a misspelt request for exact reuse.
        msg = f"kv_transfer_params: has {len(params)} keys, kvtrie reads at most {_MAX_PARAMS}"
        raise SettingsError(msg)
    for name in params:
        if name in _PARAMS:
            continue
        # JSON has names alone; a caller in Python may give anything.
        if str(name).startswith("kvtrie") or nearest(str(name), _PARAMS, _CLOSE):
            known = ", ".join(_PARAMS[:-1])
            near = hint(name, _PARAMS)
            msg = f"kv_transfer_params: unknown key {shown(name)}{near} (kvtrie's: {known})"
            raise SettingsError(msg)


def session_of(request: Request) -> str | None:
    """The conversation of a request: ``{"session": ...}`` in its parameters, or vLLM's session id.

    Raises:
        SettingsError: It is not a text of 1 to 256 bytes of UTF-8.
    """
    params, mine = request.kv_transfer_params, None
    if params:
        mine = session_id(params.get("session"), "kv_transfer_params: session")
    return mine or session_id(request.session_id, "session_id")


def is_last(request: Request) -> bool:
    """Whether no request will continue this one, by its parameters or by vLLM's ``kv_hints``.

    Raises:
        SettingsError: ``last`` is not true or false, or a hint for kvtrie is unknown.
    """
    params = request.kv_transfer_params
    said: object = params.get("last", False) if params else False
    if not isinstance(said, bool):
        msg = f"kv_transfer_params: last must be true or false, not {shown(said)}"
        raise SettingsError(msg)
    hints = request.kv_hints
    for action in () if hints is None else hints.actions:
        if action.action_type == LAST_HINT:
            said = True
        elif action.action_type.startswith("kvtrie."):
            msg = f"kv_hints: unknown action {shown(action.action_type)} (known: {LAST_HINT})"
            raise SettingsError(msg)
    return said


def _check_mode(given: Mapping[str, Any]) -> None:
    """Refuse a mode that other settings contradict."""
    mode = given.get("mode")
    if mode is not None:
        check_one_of(mode, ("exact", "approximate"), f"{WHERE}: mode")
    if mode == "approximate" and given.get("gate") is None:
        msg = f'{WHERE}: "mode": "approximate" needs "gate", the model\'s gate file'
        raise SettingsError(msg)
    if mode is not None and given.get("shadow") is True:
        why = "makes approximate KV" if mode == "approximate" else "evicts what would be moved"
        msg = f'{WHERE}: "shadow" only counts, and "mode": "{mode}" {why}: remove one of them'
        raise SettingsError(msg)
    if mode != "exact":
        return
    for name in ("gate", "policy", "events"):
        if given.get(name):
            msg = (
                f'{WHERE}: "mode": "exact" makes nothing approximate: remove "{name}", or the mode'
            )
            raise SettingsError(msg)
    if given.get("default", "exact") != "exact":
        msg = (
            f'{WHERE}: "mode": "exact" serves every request exactly: remove "default", or the mode'
        )
        raise SettingsError(msg)


def _check_format(form: object) -> None:
    """Check what needs no tokenizer."""
    if isinstance(form, Mapping):
        check_keys(form, tuple(signature(Tagger.from_ids).parameters), f"{WHERE}: chat_format")
        try:
            Tagger.from_ids(**form)
        except (TypeError, ValueError) as error:
            msg = f"{WHERE}: chat_format: {error}"
            raise SettingsError(msg) from error
    elif isinstance(form, str) and form not in ("auto", *PRESETS):
        near = hint(form, ("auto", *PRESETS))
        known = f'{", ".join(PRESETS)}, or "auto", token ids, or null'
        msg = f"{WHERE}: chat_format: there is no preset {form!r}{near} (known: {known})"
        raise SettingsError(msg)
    elif not isinstance(form, str | None):
        _refuse("chat_format", form, '"auto", a preset of kvtrie.tags, token ids, or null')


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    msg = f"{WHERE}: {name} must be {wanted}, not {value!r}"
    raise SettingsError(msg)
