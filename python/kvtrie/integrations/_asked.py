"""What operators and requests write for an integration: checked, with the nearest known name."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from kvtrie._core import ReusePolicy
from kvtrie._nearest import hint
from kvtrie.record import RecordOptions, RecordOptionsError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SESSION: Final = 256
"""Bytes of the longest id of a conversation."""
SNAPSHOTS: Final = "tcp://127.0.0.1:5559"
"""Where snapshots of KV events are given, without another endpoint."""
_EVENTS: Final[Mapping[str, type]] = {
    "endpoint": str,
    "replay_endpoint": str,
    "topic": str,
    "buffer_steps": int,
    "hwm": int,
    "max_queue_size": int,
}
"""Settings of a publisher of KV events, by the names that vLLM and SGLang give them."""
TOPIC: Final = "kvtrie"
"""Where events of approximate blocks are published, without another topic."""
MOVED: Final = "moved"
"""Of an event's class: the block holds KV that was copied from another context or position."""
AFTER_MOVED: Final = "after_moved"
"""Likewise: the block was computed after such KV."""
MAX_SHOWN: Final = 80
"""Characters of a value that a message shows."""
POLICY_FIELDS: Final = (
    "min_run",
    "max_hops",
    "max_approximate_share",
    "recompute_first",
    "recompute_last",
    "forbid_kinds",
    "max_cuts",
    "max_lost_context",
    "max_new_context",
    "scope",
    "shared_prefix",
    "recompute_share",
    "partial_blocks",
)


class SettingsError(ValueError):
    """A setting that is unknown or invalid; the message says what to write instead."""


class _Short(reprlib.Repr):
    """The first entries of a value; in a dict's own order, so that not all are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT: Final = _Short()


def shown(value: object) -> str:
    """A value for a message: its beginning, and how much there is, if it is long.

    A request's values may have any size, and messages are logged.
    """
    if isinstance(value, str):
        if len(value) <= MAX_SHOWN:
            return repr(value)
        return f"{value[:MAX_SHOWN]!r}... ({len(value)} characters)"
    text = _SHORT.repr(value)
    size = f" ({len(value)} entries)" if isinstance(value, Mapping | list | tuple) else ""
    if len(text) > MAX_SHOWN:
        return f"{text[:MAX_SHOWN]}...{size}"
    return f"{text}{size}" if "..." in text else text


def named(request_id: str) -> str:
    """A request's id for a log line: a client may choose it, of any length."""
    if len(request_id) <= MAX_SHOWN and request_id.isprintable():
        return request_id
    return shown(request_id)


def check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse keys that are not known.

    Raises:
        SettingsError: There is one.
    """
    for key in given:
        if key not in known:
            near = hint(key, known)
            msg = f"{where}: unknown key {shown(key)}{near} (known: {', '.join(known)})"
            raise SettingsError(msg)


def check_one_of(value: object, known: Sequence[str], where: str) -> None:
    """Refuse a value that is not known.

    Raises:
        SettingsError: It is not among ``known``.
    """
    if not isinstance(value, str) or value not in known:
        wanted = " or ".join(f'"{one}"' for one in known)
        msg = f"{where} must be {wanted}, not {shown(value)}{hint(value, known)}"
        raise SettingsError(msg)


def policy_of(
    given: Mapping[str, Any], where: str, known: Sequence[str] = POLICY_FIELDS
) -> ReusePolicy:
    """An approximate policy of the given fields.

    Raises:
        SettingsError: A field is not known, or has a bad value.
    """
    check_keys(given, known, f"{where}: policy")
    try:
        return ReusePolicy(approximate=True, **given)
    except (TypeError, ValueError) as error:
        msg = f"{where}: policy: {error}"
        raise SettingsError(msg) from error


def recorded(given: str | Mapping[str, Any] | None, where: str) -> RecordOptions | None:
    """Where finished requests are recorded, and how; None: nowhere.

    Raises:
        SettingsError: The setting is invalid.
    """
    if given is None:
        return None
    try:
        return RecordOptions.read(given)
    except RecordOptionsError as error:
        msg = f"{where}: record: {error}"
        raise SettingsError(msg) from error


def check_record(options: RecordOptions | None, where: str) -> None:
    """Check that a log can be written.

    Raises:
        SettingsError: It cannot.
    """
    try:
        if options is not None:
            options.check_files()
    except RecordOptionsError as error:
        msg = f"{where}: record: {error}"
        raise SettingsError(msg) from error


def check_snapshot(given: object, where: str) -> None:
    """Check where snapshots of KV events are given; None: nowhere.

    Raises:
        SettingsError: The setting is invalid.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        wanted = f'a mapping such as {{"endpoint": "{SNAPSHOTS}"}}'
        msg = f"{where}: snapshot must be {wanted}, not {given!r}"
        raise SettingsError(msg)
    check_keys(given, ("endpoint",), f"{where}: snapshot")
    value = given.get("endpoint", SNAPSHOTS)
    if not is_address(value):
        wanted = f'an address of ZeroMQ such as "{SNAPSHOTS}"'
        msg = f"{where}: snapshot: endpoint must be {wanted}, not {value!r}"
        raise SettingsError(msg)


def check_events(given: object, where: str) -> None:
    """Check where events of approximate blocks are published; None: nowhere.

    Raises:
        SettingsError: The setting is invalid.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        wanted = 'a mapping such as {"endpoint": "tcp://*:5558"}'
        msg = f"{where}: events must be {wanted}, not {given!r}"
        raise SettingsError(msg)
    check_keys(given, tuple(_EVENTS), f"{where}: events")
    for name, kind in _EVENTS.items():
        if name not in given and name != "endpoint":
            continue
        value, form = given.get(name), 'an address of ZeroMQ such as "tcp://*:5558"'
        is_right = is_address(value)
        if name == "topic":
            form, is_right = "a topic", isinstance(value, str) and bool(value)
        elif kind is int:
            form = "an integer from 1"
            is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_right:
            msg = f"{where}: events: {name} must be {form}, not {value!r}"
            raise SettingsError(msg)


def is_address(given: object) -> bool:
    """Whether this has the form of an address of ZeroMQ, which begins with a transport."""
    return isinstance(given, str) and "://" in given


def session_id(given: object, where: str) -> str | None:
    """The id of a conversation.

    Raises:
        SettingsError: It is not a text of 1 to 256 bytes of UTF-8.
    """
    if given is None:
        return None
    try:
        is_valid = (
            isinstance(given, str)
            and len(given) <= MAX_SESSION
            and 1 <= len(given.encode()) <= MAX_SESSION
        )
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON allows
        is_valid = False
    if not is_valid:
        msg = f"{where} must be a text of 1 to {MAX_SESSION} bytes of UTF-8"
        raise SettingsError(msg)
    return cast("str", given)
