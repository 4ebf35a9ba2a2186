"""A vLLM in which something that the connector touches has another name is refused by that name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie.integrations.vllm
from kvtrie.integrations.vllm import _version, _vllm
from kvtrie.integrations.vllm.connector import KvtrieConnector
from kvtrie.integrations.vllm.scheduler import KvtrieScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

OWN = {"AsyncScheduler": _vllm.SCHEDULER, "KVConnectorBase_V1": _vllm.CONNECTOR}
FIELDS = [(owner, name) for owner, names in {**_vllm.FIELDS, **OWN}.items() for name in names]
ADDED = [table for first, table in _vllm.ADDED.items() if _vllm.release() >= first]
METHODS = [
    (owner, name)
    for table in (_vllm.CALLS, _vllm.OVERRIDDEN, *ADDED)
    for owner, calls in table.items()
    for name in calls
]
PARAMETERS = [
    (owner, name, parameter)
    for table in (_vllm.CALLS, _vllm.OVERRIDDEN, *ADDED)
    for owner, calls in table.items()
    for name, parameters in calls.items()
    for parameter in parameters
]


class Without:
    """An object of vLLM in which one name is another."""

    def __init__(self, thing: object, name: str) -> None:
        self.__dict__.update(thing=thing, name=name)

    def __getattr__(self, name: str) -> Any:
        hidden = self.__dict__["name"]
        if name == hidden:
            raise AttributeError(name)
        found = getattr(self.__dict__["thing"], name)
        if name == "__mro__":
            return (SimpleNamespace(**setting_another(self.__dict__["thing"], hidden)),)
        if name == "__dataclass_fields__":
            return {field: one for field, one in found.items() if field != hidden}
        return found


def renamed(owner: str, name: str) -> dict[str, object]:
    found = _vllm.things()
    return found | {owner: Without(found[owner], name)}


def setting_another(one: type, name: str) -> dict[str, Any]:
    """The functions of a class, with another name for an attribute that they set."""
    changed = {}
    for base in one.__mro__:
        for key, value in vars(base).items():
            call = inspect.unwrap(value) if callable(value) else None
            if isinstance(call, FunctionType):
                code = call.__code__
                names = tuple(f"{name}_2" if one == name else one for one in code.co_names)
                changed[f"{base.__name__}.{key}"] = FunctionType(
                    code.replace(co_names=names), {}, key, closure=call.__closure__
                )
    return changed


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


@pytest.mark.parametrize("name", _vllm.CONNECTOR)
def test_a_renamed_attribute_of_the_connector_is_refused(name: str) -> None:
    connector = SimpleNamespace(**dict.fromkeys(_vllm.CONNECTOR))
    _vllm.probe_connector(connector)
    delattr(connector, name)
    with pytest.raises(_version.UnsupportedError, match=rf"the connector of vLLM .* has no {name}"):
        _vllm.probe_connector(connector)


class Transfer(_vllm.KVConnectorBase_V1, _vllm.SupportsHMA):  # type: ignore[misc] # vLLM's
    """A transfer connector."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return {"remote_block_ids": (request, block_ids)}

    def get_num_new_matched_tokens(self, request: Any, num_computed: Any) -> Any: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num: Any) -> Any: ...


NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def test_transfer_connectors_have_what_is_extended() -> None:
    _vllm.probe_transfer(Transfer.__mro__, _vllm.TRANSFER)
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")
    transfer.KvtrieNixlConnector._probe()


@pytest.mark.parametrize("method", _vllm.TRANSFER)
def test_a_renamed_method_of_a_transfer_connector_is_refused(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.delattr(Transfer, method)
    with pytest.raises(_version.UnsupportedError, match=rf"has no Transfer\.{method}\("):
        _vllm.probe_transfer(Transfer.__mro__, _vllm.TRANSFER)


@pytest.mark.parametrize("method", [*_vllm.TRANSFER, *_vllm.TRANSFER_STATS])
def test_a_renamed_method_of_nixls_connector_is_refused(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")
    owner = next(one for one in transfer.NixlConnector.__mro__ if method in vars(one))
    assert owner.__module__.startswith(NIXL)
    monkeypatch.delattr(owner, method)
    with pytest.raises(_version.UnsupportedError, match=rf"has no Nixl\w+\.{method}\("):
        transfer.KvtrieNixlConnector._probe()


def test_a_method_of_nixls_connector_with_another_argument_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")

    def taking_more(self: Any, request: Any, block_ids: Any, more: Any) -> None: ...

    name = "request_finished_all_groups"
    monkeypatch.setattr(transfer.NixlConnector, name, taking_more)
    with pytest.raises(_version.UnsupportedError, match=rf"{name}\(request, block_ids\), which"):
        transfer.KvtrieNixlConnector._probe()


def test_another_key_for_nixls_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")
    monkeypatch.setattr(transfer, "_BLOCKS", "remote_block_ids_2")
    with pytest.raises(_version.UnsupportedError, match="'remote_block_ids_2' in the package of"):
        transfer.KvtrieNixlConnector._probe()


def test_a_transfer_connector_is_refused_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")
    monkeypatch.setattr(transfer._support, "check", lambda *_, **__: None)
    monkeypatch.delattr(Transfer, "update_state_after_alloc")
    checked: Any = type("Checked", (transfer.CheckedTransfer, Transfer), {})
    checked.__abstractmethods__ = frozenset()
    with pytest.raises(_version.UnsupportedError, match=r"Transfer\.update_state_after_alloc\("):
        checked(SimpleNamespace(), None, SimpleNamespace())


def _run(body: list[ast.stmt]) -> list[ast.AST]:
    """What is run, without the imports of types."""
    kept = [
        one
        for one in body
        if not (isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test))
    ]
    return [node for one in kept for node in ast.walk(one)]


def imported() -> list[tuple[str, str]]:
    """What `_vllm` imports of vLLM."""
    tree = ast.parse(Path(_vllm.__file__).read_text())
    return [
        (str(node.module), one.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm"
        for one in node.names
    ]


@pytest.mark.parametrize(("module", "name"), imported())
def test_a_renamed_import_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    without = ModuleType(module)
    # vLLM's own package loads its names when they are asked for.
    known = {one: getattr(_vllm, one) for _, one in imported() if hasattr(_vllm, one)}
    known["__version__"] = _vllm.VERSION
    without.__dict__.update(known | vars(sys.modules[module]))
    without.__dict__.pop("__getattr__", None)
    without.__dict__.pop(name, None)
    spec = importlib.util.spec_from_file_location("another_vllm", _vllm.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, without)
    with pytest.raises(ImportError) as error:
        spec.loader.exec_module(again)
    with pytest.raises(_version.UnsupportedError, match=rf"lacks what .* '{name}'"):
        _version.lacks(error.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (_vllm.nixl_connector, "NixlConnector"),
        (lambda: _vllm.cpu_isa(None, 16, 64), "_get_attn_isa"),
    ],
    ids=["NixlConnector", "_get_attn_isa"],
)
def test_a_renamed_import_that_few_need_is_refused(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], name: str
) -> None:
    module = NIXL if name == "NixlConnector" else "vllm.v1.attention.backends.cpu_attn"
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(_version.UnsupportedError, match=rf"lacks what .* '{name}'"):
        call()


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
        known.update(name for table in ADDED for name in table.get(owner, ()))
        assert overridden == overridden & known
        if owner == "AsyncScheduler":
            assert overridden == known - {*_vllm.OVERRIDDEN["SupportsHMA"]}


def test_vllm_is_imported_in_one_file() -> None:
    folder = Path(kvtrie.integrations.vllm.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if path.name == "_vllm.py":
            continue
        imported = set[str]()
        for node in _run(ast.parse(path.read_text()).body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported.add(str(node.module))
            elif isinstance(node, ast.Import):
                imported.update(one.name for one in node.names if one.name.split(".")[0] == "vllm")
        assert imported == set(), path.name


def test_a_method_that_a_release_added_is_needed_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = ("restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches")
    found = _vllm.things()
    base = found["KVConnectorBase_V1"]
    if _vllm.release() < (0, 33):
        assert not any(hasattr(base, name) for name in hooks)
        monkeypatch.setattr(_vllm, "VERSION", "0.33.1")
        with pytest.raises(_version.UnsupportedError, match=r"\.restore_kv_caches\(\)"):
            _vllm.probe()
    else:
        assert all(hasattr(base, name) for name in hooks)
        monkeypatch.setattr(_vllm, "VERSION", "0.32.9")
        _vllm.probe(found | {"KVConnectorBase_V1": Without(base, "restore_kv_caches")})
    assert all(callable(vars(KvtrieConnector)[name]) for name in hooks if name[0] != "s")


def test_a_vllm_is_compared_when_it_looks_the_connector_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = renamed("Request", "num_in_flight_tokens")
    monkeypatch.setattr(_vllm, "things", lambda: found)
    with pytest.raises(_version.UnsupportedError, match=r"has no Request\.num_in_flight_tokens"):
        _ = kvtrie.integrations.vllm.KvtrieConnector
