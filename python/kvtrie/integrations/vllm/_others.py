"""Which connectors may run next to this one, under vLLM's `MultiConnector`.

Another connector sees every request and block. Approximate blocks have hashes that no tokens have
(`_lineage`), so a connector that stores a block under the hash that vLLM's pool has for it never
stores approximate KV as exact. One that keeps the hashes it has seen first, makes its own from
tokens, or sends blocks by their numbers does. What is accepted was run in kvtrie's tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.vllm import _command
from kvtrie.integrations.vllm._version import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

MULTI: Final = "MultiConnector"
MINE: Final = "KvtrieConnector"
MODULE: Final = "kvtrie.integrations.vllm"
TRANSFER: Final = "KvtrieNixlConnector"
SCHEDULER: Final = f"{MODULE}.KvtrieScheduler"

COVERED: Final = ("SimpleCPUOffloadConnector",)
"""Connectors that store a block under the hash that vLLM's pool has for it."""

_BY_TOKENS: Final = "it stores KV under the tokens that it belongs to, approximate KV too"
_SENDS: Final = "it sends blocks to engines that take them for exact"
_WHY: Final[Mapping[str, str]] = {
    "OffloadingConnector": "it keeps the hashes that a request had before kvtrie gave its "
    "approximate blocks others",
    "ExampleConnector": _BY_TOKENS,
    "LMCacheConnectorV1": _BY_TOKENS,
    "LMCacheMPConnector": _BY_TOKENS,
    "NixlConnector": _SENDS,
    "NixlPullConnector": _SENDS,
    "NixlPushConnector": _SENDS,
    "MooncakeConnector": _SENDS,
    "MoRIIOConnector": _SENDS,
    "KvtrieNixlConnector": _SENDS,
}


def check_names(
    given: object,
    *,
    scheduler: object,
    publishes: bool,
    moves: bool,
    is_exact: bool,
    snapshots: bool,
) -> None:
    """Check ``connectors`` of a `MultiConnector`.

    Args:
        given: The list.
        scheduler: ``--scheduler-cls``, a name or a class.
        publishes: Whether ``--kv-events-config`` switches events on.
        moves: Whether KV may be approximate.
        is_exact: Whether the mode is exact.
        snapshots: Whether snapshots of the events are given.

    Raises:
        UnsupportedError: One of them may store or send approximate KV as exact, write to a block
            that is still copied from, or publish what a snapshot lacks; the message has its name
            and the reason.
    """
    children = given if isinstance(given, list) else []
    names = [one.get("kv_connector") if isinstance(one, dict) else None for one in children]
    _check_order(names, is_exact=is_exact)
    for one, name in zip(children, names, strict=True):
        module = one.get("kv_connector_module_path") if isinstance(one, dict) else None
        if name != MINE:
            _check_other(str(name), module)
    if snapshots:
        refuse(
            f"under {MULTI} the others publish events of their own, which a snapshot lacks: "
            'remove "snapshot"'
        )
    if is_exact:
        # No block has a hash of kvtrie's, and every source is kept until its copy is made.
        if _name_of(scheduler) == SCHEDULER:
            refuse('"mode": "exact" has no gaps to continue after: omit --scheduler-cls')
        return
    if _name_of(scheduler) != SCHEDULER:
        refuse(
            f"under {MULTI} only KvtrieScheduler keeps blocks that are copied from until the copy "
            f"is made: add --scheduler-cls {SCHEDULER}"
        )
    if moves and publishes:
        refuse(
            f"under {MULTI} {' and '.join(map(str, names[1:]))} would publish approximate blocks "
            'as exact ones: remove --kv-events-config, or "gate"'
        )


def check_command() -> None:
    """Check the connectors that vLLM's server was started with, if it has several.

    Raises:
        UnsupportedError: As `check_names`.
    """
    found = _command.transfer_config()
    if found is None or found.get("kv_connector") != MULTI or not _command.is_known():
        return
    among = found.get("kv_connector_extra_config")
    children = among.get("connectors") if isinstance(among, dict) else None
    mine = settings_among(children)
    check_names(
        children,
        scheduler=_command.option(_command.SCHEDULER),
        publishes=_command.publishes(),
        **said_of(mine),
    )


def said_of(mine: Mapping[str, Any]) -> dict[str, bool]:
    """What `check_names` asks of kvtrie's settings, before they are read."""
    return {
        "moves": mine.get("gate") is not None and not mine.get("shadow"),
        "is_exact": mine.get("mode") == "exact",
        "snapshots": mine.get("snapshot") is not None,
    }


def settings_among(children: object) -> Mapping[str, Any]:
    """The settings of kvtrie's among several connectors."""
    mine = mine_among(children)
    extra = mine.get("kv_connector_extra_config") if mine is not None else None
    return extra if isinstance(extra, dict) else {}


def mine_among(children: object) -> Mapping[str, Any] | None:
    """The configuration of kvtrie's among several connectors; None if there is none."""
    given = children if isinstance(children, list) else []
    found = [one for one in given if isinstance(one, dict) and one.get("kv_connector") == MINE]
    return found[0] if found else None


def check_children(children: Sequence[object]) -> Any:  # noqa: ANN401 - KvtrieConnector, which imports vLLM
    """The `KvtrieConnector` among the connectors that vLLM has made; checked as by their names."""
    kinds = [type(one) for one in children]
    _check_order([kind.__name__ for kind in kinds], is_exact=False)
    for kind in kinds[1:]:
        inside = kind.__module__.startswith("vllm.")
        _check_other(kind.__name__, None if inside else kind.__module__)
    return children[0]


def check_around(
    current: VllmConfig | None,
    mine: VllmConfig,
    *,
    moves: bool,
    is_exact: bool,
    snapshots: bool = False,
) -> bool:
    """Whether a worker's half is among others; ``current`` is the configuration around it.

    Raises:
        UnsupportedError: As `check_names`, or the connector around it is another one.
    """
    around = current.kv_transfer_config if current is not None else None
    own = mine.kv_transfer_config
    if around is None or own is None or around.kv_connector == own.kv_connector:
        return False
    if around.kv_connector != MULTI:
        refuse(
            f"{around.kv_connector} holds connectors that may store or send approximate KV as "
            f"exact: use KvtrieConnector alone, or {MULTI}"
        )
    events = mine.kv_events_config
    check_names(
        around.kv_connector_extra_config.get("connectors"),
        scheduler=mine.scheduler_config.scheduler_cls,
        publishes=events is not None and events.enable_kv_cache_events,
        moves=moves,
        is_exact=is_exact,
        snapshots=snapshots,
    )
    return True


def _check_order(names: Sequence[object], *, is_exact: bool) -> None:
    if is_exact and names.count(MINE) != 1:
        refuse(f'list {MINE} once in "connectors" of {MULTI}')
    if not is_exact and (not names or names[0] != MINE or names.count(MINE) != 1):
        refuse(
            f'list {MINE} once, and first, in "connectors" of {MULTI}: others must see the hashes '
            "that it gives to blocks"
        )


def _check_other(name: str, module: str | None) -> None:
    if name in COVERED and module is None:
        return
    why = "it was not run next to kvtrie" if module is not None else _WHY.get(name)
    refuse(
        f"{name} next to it is not supported: {why or 'it was not run next to kvtrie'}; "
        f"{', '.join(COVERED)} is"
    )


def _name_of(scheduler: object) -> str:
    if isinstance(scheduler, type):
        return f"{scheduler.__module__.removesuffix('.scheduler')}.{scheduler.__qualname__}"
    return str(scheduler)
