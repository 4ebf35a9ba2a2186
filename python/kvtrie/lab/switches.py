"""What a template reads besides messages, and which values it knows, from its syntax tree.

A template says of most names what they may be. It compares them with literals, gives them a text
where they are not defined, joins them to text, or loops over them. A name of which nothing is known
but that it is true or false is a switch with these two values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

try:
    from jinja2 import TemplateError as JinjaError
    from jinja2 import meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    _MISSING = "kvtrie.lab needs jinja2: pip install 'kvtrie[cli]'"
    raise ImportError(_MISSING, name="jinja2") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

# What OpenAI's API takes; templates join it to text.
_KNOWN: Final = {"reasoning_effort": ("low", "medium", "high")}
_MOST_VALUES: Final = 4
_DEFAULT: Final = ("default", "d")


@dataclass
class Use:
    """How a template uses one name.

    Attributes:
        literals: Texts and numbers that it is compared with.
        defaults: Its text where it is not defined.
        elements: What its elements are compared with.
        is_text: It is joined to text, or has a text where it is not defined.
        is_list: It is looped over.
        is_own: The template sets it, and does not ask whether it is defined.
    """

    literals: list[Any] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
    is_text: bool = False
    is_list: bool = False
    is_own: bool = False

    def values(self, name: str) -> list[Any]:
        """Values to try; none if the template knows none."""
        if self.is_list:
            return [self.elements] if self.elements else []
        literals = [*_KNOWN.get(name, ()), *self.literals]
        if literals:
            return list(dict.fromkeys([*literals, *self.defaults]))[:_MOST_VALUES]
        return [] if self.is_text else [True, False]


def uses(template: str | dict[str, str]) -> dict[str, Use]:
    """The names that a template, or any of several, reads and does not define itself."""
    found: dict[str, Use] = {}
    for one in template.values() if isinstance(template, dict) else [template]:
        try:
            tree = _environment().parse(one)
            for name in meta.find_undeclared_variables(tree):
                found.setdefault(name, Use())
            _look(tree, found)
        except (JinjaError, RecursionError):
            # Rendering it says why.
            continue
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )


def _look(tree: nodes.Template, found: dict[str, Use]) -> None:
    for name, literals in _compared(tree):
        if name in found:
            found[name].literals += literals
    for name, default in _defaults(tree):
        if name in found:
            found[name].is_text = True
            found[name].defaults.append(default)
    asked = {_name(one.node) for one in tree.find_all(nodes.Test) if one.name == "defined"}
    asked |= {_name(one.node) for one in tree.find_all(nodes.Filter) if one.name in _DEFAULT}
    for assign in tree.find_all(nodes.Assign):
        name = _name(assign.target)
        if name in found and name not in asked:
            found[name].is_own = True
    for loop in tree.find_all(nodes.For):
        name, element = _name(loop.iter), _name(loop.target)
        if name in found:
            found[name].is_list = True
            known = (literals for other, literals in _compared(loop) if other == element)
            every = dict.fromkeys(one for literals in known for one in literals)
            found[name].elements += [one for one in every if one not in found[name].elements]
    for sides in _joined(tree):
        for name in map(_name, sides) if any(_text(one) is not None for one in sides) else ():
            if name in found:
                found[name].is_text = True


def _defaults(tree: nodes.Node) -> Iterator[tuple[str, str]]:
    """Names and the text that each gets where it is not defined."""
    for assign in tree.find_all(nodes.Assign):
        if (text := _text(assign.node)) is not None:
            yield _name(assign.target), text
    for one in tree.find_all(nodes.Filter):
        if one.name in _DEFAULT and one.node is not None and one.args:
            text = _text(one.args[0])
            if text is not None:
                yield _name(one.node), text


def _compared(tree: nodes.Node) -> Iterator[tuple[str, list[Any]]]:
    """Names and the literals that each is compared with."""
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(one.expr for one in compare.ops)]
        literals = [one for side in sides for one in _literals(side)]
        for name in map(_name, sides):
            if name and literals:
                yield name, literals


def _joined(tree: nodes.Node) -> Iterator[list[nodes.Expr]]:
    for add in tree.find_all(nodes.Add):
        yield [add.left, add.right]
    for concat in tree.find_all(nodes.Concat):
        yield list(concat.nodes)


def _name(node: nodes.Node | None) -> str:
    """The name that an expression is about: ``x``, ``x | lower``, ``x or []``."""
    while True:
        if isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        elif isinstance(node, nodes.Or):
            node = node.left
        else:
            break
    return node.name if isinstance(node, nodes.Name) else ""


def _literals(node: nodes.Expr) -> list[Any]:
    """Texts and numbers; true, false and none say nothing of other values."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return [one for item in node.items for one in _literals(item)]
    value = node.value if isinstance(node, nodes.Const) else None
    # The search for names folds lists of constants into one.
    every = value if isinstance(value, list | tuple) else [value]
    return [
        one for one in every if isinstance(one, str | int | float) and not isinstance(one, bool)
    ]


def _text(node: nodes.Node) -> str | None:
    value = node.value if isinstance(node, nodes.Const) else None
    return value if isinstance(value, str) else None
