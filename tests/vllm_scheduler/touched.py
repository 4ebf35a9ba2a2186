"""Which attributes of vLLM's objects a folder of modules touches, read from its source.

Types are followed from annotations, which these modules have throughout: of parameters, results,
fields and ``self.name = …``, and from there through vLLM's own annotations and objects. What this
loses is what has no type: `UNTYPED` of ``test_touched.py`` names those places.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_SEQUENCES = {
    *("list", "set", "frozenset", "deque", "Sequence", "Collection", "Iterable", "Iterator"),
    *("KeysView", "ValuesView", "Set"),
}
_MAPPINGS = {"dict", "Mapping", "OrderedDict", "defaultdict", "MutableMapping"}
_SAME = {"list", "sorted", "reversed", "set", "tuple", "deque", "iter"}


@dataclass(frozen=True)
class Many:
    """A sequence or a mapping, by what it holds."""

    of: Any


@dataclass(frozen=True)
class Pair:
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Class:
    """A class itself, not an object of it; of vLLM, or the name of one of the folder's."""

    of: Any


@dataclass(frozen=True)
class Returns:
    """A function or method."""

    of: Any
    owner: type | None = None
    name: str = ""


@dataclass
class _Own:
    """A class of the folder."""

    bases: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Touch:
    """An attribute of a class of vLLM; with ``keyword``, an argument of a method or constructor."""

    owner: type
    name: str
    keyword: str = ""
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}" + (f"({self.keyword}=)" * bool(self.keyword))


class Reader:
    """Reads modules; ``made``: objects of vLLM by class, ``known``: types that nothing declares."""

    def __init__(self, made: Mapping[type, object], known: Mapping[str, Any]) -> None:
        self._made, self._known = made, known
        self.own: dict[str, _Own] = {}
        self.touched: dict[Touch, set[str]] = {}
        self._files: list[_File] = []

    def read(self, paths: Iterable[Path]) -> None:
        self._files = [_File(self, path) for path in paths]
        # Attributes of ``self`` become known in one pass and are used in the next.
        for _ in range(3):
            self.touched.clear()
            for file in self._files:
                file.visit()

    def touch(self, owner: type, name: str, where: str, **more: Any) -> None:
        is_pythons = name.startswith("__") or (issubclass(owner, enum.Enum) and name == "name")
        if not is_pythons:
            self.touched.setdefault(Touch(owner, name, **more), set()).add(where)

    def attribute(self, owner: Any, name: str, where: str, **more: Any) -> Any:
        """The type of an attribute, which is noted if it is vLLM's."""
        if isinstance(owner, str):
            return self._of_own(owner, name, where, **more)
        if isinstance(owner, type):
            self.touch(owner, name, where, **more)
            return self._of_vllm(owner, name)
        if isinstance(owner, Class):
            found = self.attribute(owner.of, name, where, **more)
            return found if isinstance(found, Returns) else owner.of
        return None

    def _of_own(self, owner: str, name: str, where: str, **more: Any) -> Any:
        for one in self.lineage(owner):
            if isinstance(one, str):
                if name in self.own[one].attributes:
                    return self.own[one].attributes[name]
            else:
                return self.attribute(one, name, where, **more)
        return None

    def lineage(self, owner: str) -> list[Any]:
        """The class and its bases: names of the folder's, then classes of vLLM."""
        found, rest = [owner], list[Any]()
        for base in self.own[owner].bases:
            more = self.lineage(base) if isinstance(base, str) else [base]
            found += [one for one in more if isinstance(one, str)]
            rest += [one for one in more if not isinstance(one, str)]
        return [*found, *rest]

    def _of_vllm(self, owner: type, name: str) -> Any:
        key = f"{owner.__name__}.{name}"
        if key in self._known:
            return self._known[key]
        for one in owner.__mro__:
            found: Any = getattr(one, name, None) if name in vars(one) else None
            found = inspect.unwrap(found) if callable(found) else found
            if inspect.isroutine(found):
                said = getattr(found, "__annotations__", {}).get("return")
                return Returns(self.said(said, one), owner, name)
            if isinstance(found := vars(one).get(name), property):
                said = getattr(found.fget, "__annotations__", {}).get("return")
                return self.said(said, one)
            told = self.said(inspect.get_annotations(one).get(name), one)
            if told is not None:
                return told
        value = getattr(self._made.get(owner), name, None)
        if isinstance(value, list | tuple) and value:
            return Many(type(value[0])) if _is_vllm(type(value[0])) else None
        return type(value) if _is_vllm(type(value)) else None

    def said(self, note: Any, owner: type) -> Any:
        """What an annotation of vLLM's means."""
        if isinstance(note, type):
            return note if _is_vllm(note) else None
        try:
            tree = ast.parse(str(note), mode="eval").body
        except SyntaxError:
            return None
        names = vars(sys.modules[owner.__module__])
        made = {one.__name__: one for one in self._made}

        def look(name: str) -> Any:
            found = names.get(name, made.get(name))
            return found if isinstance(found, type) and _is_vllm(found) else None

        return annotated(tree, look)


def _is_vllm(one: type) -> bool:
    return one.__module__.split(".")[0] == "vllm"


def annotated(node: ast.expr | None, look: Any) -> Any:
    """The type that an annotation says."""
    match node:
        case ast.Constant(value=str(text)):
            return annotated(ast.parse(text, mode="eval").body, look)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return look(name)
        case ast.BinOp(left=left, right=right):
            found = annotated(left, look)
            return annotated(right, look) if found is None else found
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            told = [annotated(one, look) for one in parts]
            if name in _SEQUENCES:
                return Many(told[0])
            if name in _MAPPINGS:
                return Many(told[-1])
            if name == "tuple":
                open_ended = len(parts) == 2 and isinstance(parts[1], ast.Constant)
                return Many(told[0]) if open_ended else Pair(tuple(told))
            if name == "Callable":
                return Returns(told[-1])
            if name == "type":
                return None if told[0] is None else Class(told[0])
            return told[0]
    return None


class _File:
    def __init__(self, reader: Reader, path: Path) -> None:
        self._reader, self._where = reader, path.name
        self._tree = ast.parse(path.read_text())
        self.names: dict[str, Any] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                self._imported(str(node.module), node.names)
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                reader.own[node.name] = _Own([])

    def _imported(self, module: str, names: list[ast.alias]) -> None:
        try:
            found = importlib.import_module(module)
        except ImportError:
            # Of a build, or of another package.
            return
        for one in names:
            value = getattr(found, one.name, None)
            if isinstance(value, type):
                self.names[one.asname or one.name] = value

    def look(self, name: str) -> Any:
        if name in self._reader.own:
            return name
        return self.names.get(name)

    def visit(self) -> None:
        shared = importlib.import_module("kvtrie.integrations.vllm._vllm")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).endswith("._vllm"):
                for one in node.names:
                    value = getattr(shared, one.name)
                    if isinstance(value, type):
                        self.names[one.asname or one.name] = value
                    elif inspect.isfunction(value) and value.__module__.startswith("vllm."):
                        said = value.__annotations__.get("return")
                        self.names[one.name] = Returns(self._reader.said(said, type))
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                own = self._reader.own[node.name]
                own.bases = [base for one in node.bases if (base := annotated(one, self.look))]
                self._members(node, own)
            elif isinstance(node, ast.FunctionDef):
                self.names[node.name] = Returns(annotated(node.returns, self.look))
        _Body(self, self._reader, self._where, {}, None).run(self._tree.body)

    def _members(self, node: ast.ClassDef, own: _Own) -> None:
        for one in node.body:
            match one:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=note):
                    own.attributes[name] = annotated(note, self.look)
                case ast.FunctionDef(name=name, returns=returns, decorator_list=marks):
                    said = annotated(returns, self.look)
                    is_value = any(isinstance(m, ast.Name) and m.id == "property" for m in marks)
                    own.attributes[name] = said if is_value else Returns(said)


class _Body(ast.NodeVisitor):
    """One function, or a module, in the order of its statements."""

    def __init__(
        self, file: _File, reader: Reader, where: str, names: dict[str, Any], owner: str | None
    ) -> None:
        self._file, self._reader, self._where = file, reader, where
        self._names, self._owner = names, owner

    def run(self, body: list[ast.stmt]) -> None:
        for one in body:
            self.visit(one)

    # --- statements ------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        _Body(self._file, self._reader, self._where, dict(self._names), node.name).run(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        names = dict(self._names)
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for one in given:
            names[one.arg] = annotated(one.annotation, self._file.look)
        if self._owner is not None and given and given[0].arg in ("self", "cls"):
            is_class = given[0].arg == "cls"
            names[given[0].arg] = Class(self._owner) if is_class else self._owner
        _Body(self._file, self._reader, self._where, names, self._owner).run(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.type_of(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.type_of(node.value)
        if isinstance(node.target, ast.Name | ast.Attribute) and (
            isinstance(node.target, ast.Attribute) or self._owner is None or self._names
        ):
            self._bind(node.target, annotated(node.annotation, self._file.look))

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, _item(self.type_of(node.iter)))
        self.run([*node.body, *node.orelse])

    def visit_With(self, node: ast.With) -> None:
        for one in node.items:
            value = self.type_of(one.context_expr)
            if one.optional_vars is not None:
                self._bind(one.optional_vars, value)
        self.run(node.body)

    def generic_visit(self, node: ast.AST) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.expr):
                self.type_of(one)
            else:
                self.visit(one)

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                if value is not None or name not in self._names:
                    self._names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                same = isinstance(value, Pair) and len(value.parts) == len(parts)
                values = value.parts if same else [_item(value)] * len(parts)
                for one, its in zip(parts, values, strict=True):
                    self._bind(one, its)
            case ast.Starred(value=inner):
                self._bind(inner, value)
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if self._is_mine(name):
                own = self._reader.own[str(self._owner)]
                if own.attributes.get(name) is None:
                    own.attributes[name] = value
            case _:
                self.type_of(target)

    def _is_mine(self, name: str) -> bool:
        """Whether ``self.name`` is an attribute of the folder's, not one of vLLM's that is set."""
        if self._owner is None:
            return False
        for one in self._reader.lineage(self._owner):
            if isinstance(one, str):
                if name in self._reader.own[one].attributes:
                    return True
            elif hasattr(self._reader._made.get(one, one), name):
                return False
        return True

    # --- expressions -----------------------------------------------------------------------------

    def type_of(self, node: ast.expr) -> Any:  # noqa: PLR0912 - a branch per kind of expression
        match node:
            case ast.Name(id=name):
                if name in self._names:
                    return self._names[name]
                found = self._file.look(name)
                return Class(found) if isinstance(found, type | str) else found
            case ast.Attribute(value=value, attr=name):
                return self._reader.attribute(self.type_of(value), name, self._where)
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=inner):
                found = self.type_of(value)
                self.type_of(inner)
                if isinstance(found, Pair) and isinstance(inner, ast.Constant):
                    return found.parts[int(str(inner.value))]
                return found if isinstance(inner, ast.Slice) else _item(found)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.IfExp(test=test, body=one, orelse=other):
                self.type_of(test)
                return _first([self.type_of(one), self.type_of(other)])
            case ast.BoolOp(values=values):
                return _first([self.type_of(one) for one in values])
            case ast.NamedExpr(target=target, value=value):
                found = self.type_of(value)
                self._bind(target, found)
                return found
            case ast.List(elts=parts) | ast.Set(elts=parts):
                return Many(_first([self.type_of(one) for one in parts]))
            case ast.Tuple(elts=parts) if parts:
                return Pair(tuple(self.type_of(one) for one in parts))
            case ast.Dict(values=values):
                for key in node.keys:
                    if key is not None:
                        self.type_of(key)
                return Many(_first([self.type_of(one) for one in values]))
            case ast.Starred(value=value):
                return _item(self.type_of(value))
            case ast.Lambda(args=args, body=body):
                for argument in args.args:
                    self._names.setdefault(argument.arg, None)
                return Returns(self.type_of(body))
            case ast.BinOp(left=left, right=right):
                return _first([self.type_of(left), self.type_of(right)])
        self.generic_visit(node)
        return None

    def _comprehension(self, node: Any) -> Any:
        for one in node.generators:
            self._bind(one.target, _item(self.type_of(one.iter)))
            for test in one.ifs:
                self.type_of(test)
        if isinstance(node, ast.DictComp):
            self.type_of(node.key)
            return Many(self.type_of(node.value))
        return Many(self.type_of(node.elt))

    def _call(self, node: ast.Call) -> Any:  # noqa: PLR0912 - a branch per kind of call
        given = [self.type_of(one) for one in node.args]
        for one in node.keywords:
            self.type_of(one.value)
        match node.func:
            case ast.Name(id="super"):
                bases = self._reader.lineage(str(self._owner))[1:]
                return next(iter(bases), None)
            case ast.Name(id="isinstance"):
                tested, kind = node.args[0], given[1]
                if isinstance(tested, ast.Name) and isinstance(kind, Class):
                    self._names[tested.id] = kind.of
                return None
            case ast.Name(id="getattr" | "hasattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    is_optional = len(node.args) > 2
                    return self._reader.attribute(
                        given[0], str(name.value), self._where, is_optional=is_optional
                    )
                return None
            case ast.Name(id="replace"):
                self._keywords(node, given[0], "")
                return given[0]
            case ast.Name(id="enumerate"):
                return Many(Pair((None, _item(given[0]))))
            case ast.Name(id="zip"):
                return Many(Pair(tuple(_item(one) for one in given)))
            case ast.Name(id="next" | "max" | "min"):
                return _item(given[0])
            case ast.Name(id=name) if name in _SAME:
                return given[0] if given else None
            case ast.Attribute(value=value, attr="items") if isinstance(
                found := self.type_of(value), Many
            ):
                return Many(Pair((None, found.of)))
            case ast.Attribute(value=value, attr="values" | "copy") if isinstance(
                found := self.type_of(value), Many
            ):
                return found
            case ast.Attribute(value=value, attr="get" | "pop" | "popleft") if isinstance(
                found := self.type_of(value), Many
            ):
                return found.of
        made = self.type_of(node.func)
        if isinstance(made, Class):
            self._keywords(node, made.of, "")
            return made.of
        if isinstance(made, Returns):
            if made.owner is not None:
                self._keywords(node, made.owner, made.name)
            return made.of
        return None

    def _keywords(self, node: ast.Call, owner: Any, method: str) -> None:
        if not isinstance(owner, type):
            return
        for one in node.keywords:
            if one.arg is None:
                continue
            if method:
                self._reader.touch(owner, method, self._where, keyword=one.arg)
            else:
                self._reader.touch(owner, one.arg, self._where)


def _item(of: Any) -> Any:
    if isinstance(of, Pair):
        return _first(list(of.parts))
    return of.of if isinstance(of, Many) else None


def _first(found: list[Any]) -> Any:
    return next((one for one in found if one is not None), None)
