"""Checks vLLM's configuration for kvtrie without vLLM: in a second what takes it minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie import gates
from kvtrie._nearest import hint
from kvtrie.integrations._asked import SNAPSHOTS, SettingsError
from kvtrie.integrations.vllm import _command, _model, _others, _template, _version
from kvtrie.integrations.vllm._others import MINE as CONNECTOR
from kvtrie.integrations.vllm._others import MODULE, MULTI, SCHEDULER, TRANSFER
from kvtrie.integrations.vllm._settings import Settings
from kvtrie.integrations.vllm._transfer_settings import check_transfer

if TYPE_CHECKING:
    from kvtrie.integrations.vllm._model import ModelOptions

_MODULES: Final = {CONNECTOR: MODULE, TRANSFER: f"{MODULE}.transfer"}
# Fields of vLLM's KVTransferConfig and KVEventsConfig.
_TRANSFER: Final = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"),
    *("kv_connector_extra_config", "engine_id", "kv_buffer_device", "kv_port"),
    "enable_permute_local_kv",
)
_EVENTS: Final = (
    *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps"),
    *("hwm", "max_queue_size", "topic"),
)
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_FAILURE: Final = "kv_load_failure_policy"
_POLICIES: Final = ("recompute", "fail")


def check(
    transfer: str,
    *,
    events: str | None = None,
    scheduler: str | None = None,
    chat_template: str | None = None,
    model: ModelOptions | None = None,
) -> list[str]:
    """Check the values of vLLM's ``--kv-transfer-config`` and of what goes with it.

    Args:
        transfer: JSON, as vLLM gets it.
        events: ``--kv-events-config``, if vLLM gets one.
        scheduler: ``--scheduler-cls``, likewise.
        chat_template: ``--chat-template``, likewise.
        model: What vLLM serves; None: what depends on it is not checked.

    Returns:
        What vLLM will do, and what should be changed all the same, a sentence each.

    Raises:
        SettingsError: A value is missing, unknown or invalid.
        UnsupportedError: This vLLM is not among the tested ones, and KV would move; or connectors
            next to kvtrie's are not supported.
        GateError: The gate file cannot be read, or is of another model.
    """
    if _version.installed() is None:
        _version.refuse("vLLM is not installed in this environment: check where it runs")
    found = _mapping(transfer, "--kv-transfer-config", _TRANSFER)
    if found.get("kv_connector") == MULTI:
        mine = _check_multi(found, events, scheduler)
        # vLLM reads what happens to failed copies outside.
        found = {**mine, _FAILURE: found.get(_FAILURE, "fail")}
    name = _one_of(found, "kv_connector", tuple(_MODULES))
    _one_of(found, "kv_connector_module_path", (_MODULES[name],))
    _one_of(found, "kv_role", _ROLES)
    extra = found.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        _refuse(f"--kv-transfer-config: kv_connector_extra_config must be a mapping, not {extra!r}")
    if name == TRANSFER:
        return [*_check_transfer(extra, scheduler), *_on_failure(found)]
    settings = Settings.read(extra)
    if chat_template is not None and settings.chat_template is None:
        settings = replace(settings, chat_template=chat_template)
    _version.check_version(moves=settings.moves)
    how = "tested" if _version.is_tested() else "untested: --probe says whether it looks the same"
    said = [f"vLLM {_version.running()} is {how}", _reuse(settings)]
    settings.check_record()
    settings.check_store()
    template = _template.served(settings)
    if template.text is not None:
        is_option = chat_template is not None and settings.chat_template == chat_template
        said.append(f"chat template: {'--chat-template' if is_option else template.source}")
    theirs = {} if events is None else _mapping(events, "--kv-events-config", _EVENTS)
    _check_events(settings, theirs)
    _check_snapshot(settings, theirs)
    said += [*_on_gaps(settings, scheduler), *_on_failure(found)]
    if model is not None:
        said += _model.check(settings, model)
    return said


def check_command(settings: Settings) -> None:
    """Check what goes with the settings among the options of vLLM's server, as far as they show.

    Raises:
        SettingsError: As `check`.
    """
    if not _command.is_known():
        return
    _check_scheduler(settings, _command.option(_command.SCHEDULER))
    theirs = _command.events_config()
    if theirs is not None:
        _check_events(settings, theirs)
        _check_snapshot(settings, theirs)


def _check_scheduler(settings: Settings, scheduler: str | None) -> None:
    if settings.is_exact and scheduler == SCHEDULER:
        _refuse('"mode": "exact" has no gaps to continue after: omit --scheduler-cls')


def _on_gaps(settings: Settings, scheduler: str | None) -> list[str]:
    _check_scheduler(settings, scheduler)
    if settings.is_exact:
        return []
    if scheduler is None:
        return ["reuse ends at the first gap: --scheduler-cls is not given"]
    if scheduler != SCHEDULER:
        near = hint(scheduler, [SCHEDULER])
        _refuse(f"--scheduler-cls must be {SCHEDULER}, not {scheduler!r}{near}")
    return ["reuse continues after gaps"]


def _on_failure(found: Mapping[str, Any]) -> list[str]:
    if _one_of(found, _FAILURE, _POLICIES, default="fail") == "recompute":
        return []
    why = "a request whose KV cannot be copied ends with an error: set "
    return [f'{why}"kv_load_failure_policy": "recompute"']


def _check_transfer(extra: Mapping[str, Any], scheduler: str | None) -> list[str]:
    _version.check_version(has_modes=False)
    check_transfer(extra)
    if scheduler == SCHEDULER:
        _refuse(f"{TRANSFER} moves nothing between positions: omit --scheduler-cls")
    return [f"vLLM {_version.running()} is tested", "blocks of other engines are checked"]


def probed() -> str:
    """Compare what the connector touches with the installed vLLM, which is imported.

    Raises:
        UnsupportedError: Something is missing; the message has the names.
    """
    try:
        from kvtrie.integrations.vllm import _vllm  # noqa: PLC0415 - seconds
    except ImportError as error:
        _version.lacks(error)
    _vllm.probe()
    return f"vLLM {_vllm.VERSION} has everything that kvtrie touches"


def _check_multi(
    found: Mapping[str, Any], events: str | None, scheduler: str | None
) -> Mapping[str, Any]:
    """Check a `MultiConnector`; returns the configuration of kvtrie's connector in it."""
    among = found.get("kv_connector_extra_config")
    children = among.get("connectors") if isinstance(among, Mapping) else None
    theirs = {} if events is None else _mapping(events, "--kv-events-config", _EVENTS)
    mine = _others.settings_among(children)
    _others.check_names(
        children,
        scheduler=scheduler,
        publishes=bool(theirs.get("enable_kv_cache_events")),
        **_others.said_of(mine),
    )
    checked: list[Mapping[str, Any]] = children or []
    for one in (found, *checked):
        _check_keys(one, "--kv-transfer-config", _TRANSFER)
        _one_of(one, "kv_role", _ROLES)
    return _others.mine_among(checked) or {}


def _reuse(settings: Settings) -> str:
    if settings.is_exact:
        return "exact mode: nothing is moved"
    if settings.shadow and settings.gate in (None, "unchecked"):
        return "shadow mode: counts what would be moved without a gate, and moves nothing"
    if settings.gate is None:
        return "exact reuse only (no gate)"
    if settings.gate == "unchecked":
        return "approximate reuse without a gate, at your own risk"
    try:
        gate = gates.read(settings.gate)
    except OSError as error:
        msg = f"gate {settings.gate}: {error.strerror or error}"
        raise gates.GateError(msg) from error
    said = f"gate {settings.gate}, of {gate.model}: vLLM compares it with what it serves"
    return f"shadow mode: moves nothing; {said}" if settings.shadow else said


def _check_events(settings: Settings, theirs: Mapping[str, Any]) -> None:
    # A shadow publishes nothing of its own.
    if settings.events is None or settings.shadow:
        return
    if not theirs.get("enable_kv_cache_events"):
        _refuse(
            "events needs vLLM's own: --kv-events-config "
            """'{"enable_kv_cache_events": true}', or remove the setting"""
        )
    used = _endpoints(theirs)
    for name in ("endpoint", "replay_endpoint"):
        value = settings.events.get(name)
        if value is not None and value in used:
            _refuse(f"events: {name} {value!r} is in --kv-events-config too: choose another")


def _check_snapshot(settings: Settings, theirs: Mapping[str, Any]) -> None:
    if settings.snapshot is None:
        return
    # vLLM publishes over ZeroMQ where it publishes.
    if not theirs.get("enable_kv_cache_events") or theirs.get("publisher", "zmq") != "zmq":
        _refuse(
            "snapshot needs vLLM's events: --kv-events-config "
            """'{"enable_kv_cache_events": true, "publisher": "zmq"}', or remove the setting"""
        )
    ours = {} if settings.shadow else settings.events or {}
    used = [*_endpoints(theirs), ours.get("endpoint"), ours.get("replay_endpoint")]
    endpoint = settings.snapshot.get("endpoint", SNAPSHOTS)
    if endpoint in used:
        _refuse(f"snapshot: endpoint {endpoint!r} is another one's too: choose another")


def _endpoints(theirs: Mapping[str, Any]) -> list[str | None]:
    """Where vLLM publishes, and where it replays."""
    return [theirs.get("endpoint", "tcp://*:5557"), theirs.get("replay_endpoint")]


def arguments(text: str) -> Mapping[str, Any]:
    """The value of ``--default-chat-template-kwargs``; it may have any keys.

    Raises:
        SettingsError: It is no JSON mapping.
    """
    return _mapping(text, "--default-chat-template-kwargs", None)


def _mapping(text: str, where: str, known: Sequence[str] | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(f"{where} is no JSON: {error}")
    if not isinstance(found, dict):
        _refuse(f"{where} must be a mapping, not {found!r}")
    if known is not None:
        _check_keys(found, where, known)
    return found


def _check_keys(found: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    for name in found:
        if name not in known:
            _refuse(f"{where}: unknown key {name!r}{hint(name, known)}")


def _one_of(
    found: Mapping[str, Any], name: str, known: Sequence[str], *, default: str | None = None
) -> str:
    value = found.get(name, default)
    if value not in known:
        wanted = " or ".join(f'"{one}"' for one in known)
        said = "it is missing" if value is None else f"not {value!r}{hint(value, known)}"
        _refuse(f"--kv-transfer-config: {name} must be {wanted}, {said}")
    return str(value)


def _refuse(why: str) -> NoReturn:
    raise SettingsError(why)
