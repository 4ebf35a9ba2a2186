"""What the examples run on: the index and its model alike."""

from __future__ import annotations

from typing import Any

import pytest
from tests.property.kit import Kit

import kvtrie
from kvtrie.testing.model import ModelAllocator, ModelIndex, ModelSequence


@pytest.fixture(params=["model", "index"])
def kit(request: pytest.FixtureRequest) -> Kit:
    if request.param == "model":
        return Kit(ModelIndex, ModelSequence, ModelAllocator)
    return Kit(kvtrie.RadixIndex, kvtrie.TokenSequence, kvtrie.BlockAllocator)


@pytest.fixture
def index(kit: Kit) -> Any:
    return kit.index()
