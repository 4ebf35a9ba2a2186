"""Helpers for the tests of engines that use kvtrie.

`kvtrie.testing.model` is a naive model of the index to compare with.
`kvtrie.testing.strategies` generates inputs for property tests with hypothesis, an optional
dependency.
"""
