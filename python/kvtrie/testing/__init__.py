"""Helpers for the tests of engines that use kvtrie.

`kvtrie.testing.model` is a naive model of the index to compare with, `kvtrie.testing.strategies`
makes inputs for property tests with hypothesis, which is an optional dependency.
"""
