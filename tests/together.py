"""Threads of a test."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def together(work: Callable[[int], None], count: int = 4) -> None:
    """Run in threads that start at the same time; the first failure is the test's."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def body(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
