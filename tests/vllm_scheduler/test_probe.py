"""A vLLM in which something that the connector touches has another name is refused by that name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie.integrations.vllm
from kvtrie.integrations.vllm import _version, _vllm
from kvtrie.integrations.vllm.connector import KvtrieConnector
from kvtrie.integrations.vllm.scheduler import KvtrieScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

FIELDS = [(owner, name) for owner, names in _vllm.FIELDS.items() for name in names]
METHODS = [
    (owner, name)
    for table in (_vllm.CALLS, _vllm.OVERRIDDEN)
    for owner, calls in table.items()
    for name in calls
]
PARAMETERS = [
    (owner, name, parameter)
    for table in (_vllm.CALLS, _vllm.OVERRIDDEN)
    for owner, calls in table.items()
    for name, parameters in calls.items()
    for parameter in parameters
]


class Without:
    """An object of vLLM in which one name is another."""

    def __init__(self, thing: object, name: str) -> None:
        self.__dict__.update(thing=thing, name=name)

    def __getattr__(self, name: str) -> Any:
        if name == self.__dict__["name"]:
            raise AttributeError(name)
        return getattr(self.__dict__["thing"], name)


def renamed(owner: str, name: str) -> dict[str, object]:
    found = _vllm.things()
    return found | {owner: Without(found[owner], name)}


def with_parameter(owner: str, name: str, parameter: str) -> dict[str, object]:
    """The objects, with a method whose parameter has another name."""
    found = _vllm.things()
    call = getattr(found[owner], name)
    signature = inspect.signature(call)
    changed = [
        one.replace(name=f"{one.name}_2") if one.name == parameter else one
        for one in signature.parameters.values()
        if one.kind != one.VAR_KEYWORD
    ]

    def replaced(*_: Any, **__: Any) -> None: ...

    replaced.__signature__ = signature.replace(parameters=changed)  # type: ignore[attr-defined]
    stand_in = Without(found[owner], "")
    stand_in.__dict__[name] = replaced
    return found | {owner: stand_in}


def test_this_vllm_has_everything() -> None:
    _vllm.probe()


@pytest.mark.parametrize(("owner", "name"), FIELDS)
def test_a_renamed_field_is_refused(owner: str, name: str) -> None:
    with pytest.raises(_version.UnsupportedError, match=rf"has no {owner}\.{name}, which"):
        _vllm.probe(renamed(owner, name))


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_a_renamed_method_is_refused(owner: str, name: str) -> None:
    with pytest.raises(_version.UnsupportedError, match=rf"has no {owner}\.{name}\(\), which"):
        _vllm.probe(renamed(owner, name))


@pytest.mark.parametrize(("owner", "name", "parameter"), PARAMETERS)
def test_a_renamed_parameter_is_refused(owner: str, name: str, parameter: str) -> None:
    with pytest.raises(_version.UnsupportedError, match=rf"{owner}\.{name}\(.*{parameter}"):
        _vllm.probe(with_parameter(owner, name, parameter))


@pytest.mark.parametrize("name", _vllm.SCHEDULER)
def test_a_renamed_attribute_of_the_scheduler_is_refused(name: str) -> None:
    scheduler = SimpleNamespace(**dict.fromkeys(_vllm.SCHEDULER))
    _vllm.probe_scheduler(scheduler)
    delattr(scheduler, name)
    with pytest.raises(_version.UnsupportedError, match=rf"the scheduler of vLLM .* has no {name}"):
        _vllm.probe_scheduler(scheduler)


def test_objects_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(number: int) -> None: ...

    monkeypatch.setattr(_vllm, "Request", made)
    with pytest.raises(_version.UnsupportedError, match="makes its objects in another way"):
        _vllm.probe()


def test_an_engine_is_refused_at_its_start(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = renamed("Request", "num_in_flight_tokens")
    monkeypatch.setattr(_vllm, "things", lambda: found)
    with pytest.raises(_version.UnsupportedError, match=r"has no Request\.num_in_flight_tokens"):
        KvtrieConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(Exception, match=r"has no Request\.num_in_flight_tokens"):
        core(connector={"gate": None}, max_num_seqs=3)


def test_every_method_that_is_overridden_is_known() -> None:
    for owner, mine in (
        ("KVConnectorBase_V1", KvtrieConnector),
        ("AsyncScheduler", KvtrieScheduler),
    ):
        base: Any = _vllm.things()[owner]
        overridden = {
            name for name in vars(mine) if callable(getattr(base, name, None)) and name[:2] != "__"
        }
        known = {*_vllm.OVERRIDDEN[owner], *_vllm.OVERRIDDEN["SupportsHMA"]}
        assert overridden == overridden & known
        if owner == "AsyncScheduler":
            assert overridden == known - {*_vllm.OVERRIDDEN["SupportsHMA"]}


def test_vllm_is_imported_in_one_file() -> None:
    folder = Path(kvtrie.integrations.vllm.__file__).parent
    # Its own connector is in its own module, which needs NIXL's.
    elsewhere = {"transfer.py": {"vllm.distributed.kv_transfer.kv_connector.v1.nixl"}}
    elsewhere["_layouts.py"] = {"vllm.v1.attention.backends"}
    for path in sorted(folder.glob("*.py")):
        if path.name == "_vllm.py":
            continue
        imported = set[str]()
        for node in _run(ast.parse(path.read_text()).body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported.add(str(node.module))
            elif isinstance(node, ast.Import):
                imported.update(one.name for one in node.names if one.name.split(".")[0] == "vllm")
        assert imported == elsewhere.get(path.name, set()), path.name


def _run(body: list[ast.stmt]) -> list[ast.AST]:
    """What is run, without the imports of types."""
    kept = [
        one
        for one in body
        if not (isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test))
    ]
    return [node for one in kept for node in ast.walk(one)]
