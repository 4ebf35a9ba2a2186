"""Guards around methods of the cache: an exception in one would end SGLang's scheduler.

It is given to the cache's ``_failed``, which counts it, and the method returns what it returns when
nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Call = Callable[[Any, Any], _R]


def nothing(_: object) -> Any:  # noqa: ANN401 - of a method that may answer nothing
    return None


def guarded(otherwise: Callable[[Any], _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Of a method of the cache: count an exception, and answer what ``otherwise`` says of it."""

    def guard(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(method)
        def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # it would end the scheduler
                cache: Any = args[0]
                cache._failed(method.__name__, error)  # noqa: SLF001 - its own
                return otherwise(cache)

        return inner

    return guard


def guarded_call(otherwise: Callable[[Any], _R]) -> Callable[[_Call[_R]], _Call[_R]]:
    """As `guarded`, of a method with one argument: without ``*args`` a call takes less time."""

    def guard(method: _Call[_R]) -> _Call[_R]:
        @wraps(method)
        def inner(cache: Any, params: Any) -> _R:  # noqa: ANN401 - a cache, and SGLang's
            try:
                return method(cache, params)
            except Exception as error:  # it would end the scheduler
                cache._failed(method.__name__, error)  # noqa: SLF001 - its own
                return otherwise(cache)

        return inner

    return guard
