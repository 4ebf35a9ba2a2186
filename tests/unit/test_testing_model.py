"""The model that ships for engine authors: its example runs, and its arguments are checked."""

from __future__ import annotations

import doctest
import subprocess
import sys
from typing import Any

import pytest

import kvtrie
from kvtrie.testing import model, strategies
from kvtrie.testing.model import ModelIndex, ModelSequence


@pytest.mark.parametrize("module", [model, strategies])
def test_examples_of_the_docs_run(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_importing_the_model_needs_no_hypothesis() -> None:
    code = "import sys, kvtrie.testing.model; sys.exit('hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_takes_sequences_of_the_package() -> None:
    namespace = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], namespace, items=(kvtrie.Item(1, 3, b"a"),))
    index = ModelIndex(4, 2)
    index.insert(seq, [0, 1], num_computed=4, source=kvtrie.COMPUTED)
    assert index.lookup(seq).num_tokens == 4
    same = ModelSequence([1, 2, 3, 4], namespace, items=(kvtrie.Item(1, 3, b"a"),))
    assert index.lookup(same).num_tokens == 4
    assert index.lookup(ModelSequence([1, 2, 3, 4], namespace)).num_tokens == 0


def test_model_check_finds_a_broken_model() -> None:
    namespace = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    index = ModelIndex(4, 2)
    index.insert(ModelSequence([1, 2], namespace), [0], num_computed=2, source=kvtrie.COMPUTED)
    index.check()
    index._waiting.append(0)
    with pytest.raises(kvtrie.KvTrieError, match="one state"):
        index.check()
