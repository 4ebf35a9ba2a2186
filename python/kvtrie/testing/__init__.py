"""Helpers for the tests of engines that use kvtrie.

`kvtrie.testing.model` is a naive model of the index to compare with. `kvtrie.testing.ceiling`
computes how much of a prompt could be reused at most. `kvtrie.testing.pd` moves labelled KV between
two engines under the rules of several engines. `kvtrie.testing.strategies` generates inputs for
property tests with hypothesis, an optional dependency.
"""
