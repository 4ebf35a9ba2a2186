"""Which SGLang this is; nothing else of it is imported here."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final, NoReturn

TESTED: Final = ("0.5.23",)
"""Tested versions. SGLang changes its cache's interface in the last number too."""

_RELEASE: Final = re.compile(r"(\d+\.\d+\.\d+)(\.post\d+)?")

BACKEND: Final = "kvtrie"
"""The name for ``--radix-cache-backend``."""


class SGLangUnsupportedError(ValueError):
    """SGLang, its model or its settings are outside what the cache supports."""


def installed() -> str:
    """The version of SGLang by its package."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def is_tested() -> bool:
    # Builds of a release, as 0.5.23.post1 or 0.5.23+cpu, have its interface.
    release = _RELEASE.fullmatch(installed().split("+")[0])
    return release is not None and release[1] in TESTED


def check_version() -> None:
    """Refuse an untested SGLang.

    Raises:
        SGLangUnsupportedError: It is not among the tested versions.
    """
    if not is_tested():
        refuse(
            f"SGLang {installed()} is not among the tested versions: install "
            f"{' or '.join(TESTED)}, or a kvtrie that supports this one"
        )


def refuse(why: str) -> NoReturn:
    msg = f"--radix-cache-backend {BACKEND}: {why}"
    raise SGLangUnsupportedError(msg)
