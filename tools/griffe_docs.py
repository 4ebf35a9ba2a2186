"""Griffe extensions: what the reference has to know about this package's docstrings and stub."""

from __future__ import annotations

import re

import griffe

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class NewSignature(griffe.Extension):
    """Show the parameters of `__new__` where the reference shows those of `__init__`.

    Compiled classes have no `__init__` of their own.
    """

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Give a class without `__init__` one that reads like its `__new__`."""
        new = cls.members.get("__new__")
        if not isinstance(new, griffe.Function) or "__init__" in cls.members:
            return
        init = griffe.Function(
            "__init__",
            parameters=griffe.Parameters(*list(new.parameters)[1:]),
            parent=cls,
            lineno=new.lineno,
            endlineno=new.endlineno,
        )
        cls.set_member("__init__", init)


class ExampleSections(griffe.Extension):
    """Show `Example:` as code, as griffe shows `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Rename the section before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
