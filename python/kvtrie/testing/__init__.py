"""Helpers for the tests of engines that use kvtrie; see ``docs/testing.md``.

`strategies` needs hypothesis, an optional dependency.
"""
