"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

# Two threads at most, before torch is imported anywhere: the suite runs on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# No test downloads anything: a test that needs a model uses the one in the package.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell that runs the tests in the background makes them and their children ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A failing example prints how to reproduce it. No deadline: the machine is shared, and the timeout
# stops slow steps. HYPOTHESIS_PROFILE=long runs twenty times as many examples.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", settings.get_profile("default"), max_examples=2_000, stateful_step_count=200
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second core, and lose much on a busy machine."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    if find_spec("torch") is None:
        reason = "torch is not installed"
    else:
        import torch  # noqa: PLC0415 - only where a test needs it

        if torch.cuda.is_available():
            return
        reason = "torch finds no CUDA device"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
