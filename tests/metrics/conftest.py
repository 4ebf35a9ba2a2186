"""Generators over tiny models, as the tests of the engine have them."""

from __future__ import annotations

from tests.engines.conftest import _one_thread, check_blocks, drain, ids, make, models, tokenizer

__all__ = ["_one_thread", "check_blocks", "drain", "ids", "make", "models", "tokenizer"]
