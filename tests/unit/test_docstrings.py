"""What the extension says about itself: signatures, and docstrings that cover them.

The examples in the docstrings are run by tests/docs/test_examples.py.
"""

from __future__ import annotations

import inspect
import re

import pytest

import kvtrie
from kvtrie import _core

CLASSES = [
    value
    for name in kvtrie.__all__
    if inspect.isclass(value := getattr(_core, name, None)) and not issubclass(value, BaseException)
]
# In the order of their names: a type's own depends on the seed of hashes.
METHODS = [
    pytest.param(getattr(cls, name), id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, value in sorted(vars(cls).items())
    if not name.startswith("_") and inspect.ismethoddescriptor(value)
]
PROPERTIES = [
    pytest.param(value, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, value in sorted(vars(cls).items())
    if not name.startswith("_") and inspect.isgetsetdescriptor(value)
]
NO_CONSTRUCTOR = {
    "BlockRun",
    "ComputedSource",
    "Explanation",
    "ExplanationContext",
    "Group",
    "GroupInsertResult",
    "GroupStats",
    "IndexStats",
    "InsertResult",
    "Match",
    "MovedRun",
    "NamespaceDifference",
    "OverlapScores",
    "Pin",
    "PromptDigests",
    "Removed",
    "ReusePlan",
    "RolledBack",
    "SharedSalt",
    "TransferManifest",
    "TransferPlan",
    "WouldSave",
}


def arguments(doc: str) -> list[str]:
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return re.findall(r"^    (\w+):", section.group(1), re.MULTILINE) if section else []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class_explains_its_arguments_and_has_an_example(cls: type) -> None:
    doc = inspect.getdoc(cls)
    assert doc is not None
    assert "\nExample:\n    >>> " in doc
    if cls.__name__ in NO_CONSTRUCTOR:
        with pytest.raises(TypeError, match="cannot create"):
            cls()
        return
    assert arguments(doc) == list(inspect.signature(cls).parameters)
    assert "\nRaises:\n" in doc


@pytest.mark.parametrize("method", METHODS)
def test_method_explains_its_arguments_and_has_an_example(method: object) -> None:
    assert callable(method)
    doc = inspect.getdoc(method)
    assert doc is not None
    assert "\nExample:\n    >>> " in doc
    parameters = list(inspect.signature(method).parameters)
    # A static method has no self.
    if hasattr(method, "__objclass__"):
        assert parameters.pop(0) == "self"
    assert arguments(doc) == parameters


@pytest.mark.parametrize("value", PROPERTIES)
def test_property_has_a_docstring(value: object) -> None:
    assert inspect.getdoc(value)


@pytest.mark.parametrize("value", [*CLASSES, *METHODS, *PROPERTIES])
def test_docstring_fits_a_line_of_100(value: object) -> None:
    doc = inspect.getdoc(value)
    assert doc is not None
    assert max(map(len, doc.splitlines())) <= 100


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class_is_final_and_lives_in_the_package(cls: type) -> None:
    assert cls.__module__ == "kvtrie"
    assert getattr(kvtrie, cls.__name__) is cls
    with pytest.raises(TypeError):
        type("Sub", (cls,), {})
