"""What examples in docstrings of the extension may use (docs/reference.md)."""

import pytest

import kvtrie


@pytest.fixture(autouse=True)
def _names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["kvtrie"] = kvtrie
