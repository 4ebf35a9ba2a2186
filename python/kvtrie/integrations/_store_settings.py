"""The setting ``store``: KV outside the pool, by the content of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

from kvtrie.integrations._asked import SettingsError, check_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvtrie._core import Namespace
    from kvtrie.store import Backend, Estimate, SpanLoader, SpanShape, SpanStore, StoreKey

HOST: Final = "host"
_MOONCAKE: Final = "mooncake://"
_LEAST: Final = 16
_MOST: Final = 64
# The descriptor of a store is no run, and needs room too.
_SPARE: Final = 1 << 16
# Requests that may wait for the store at a time, and loads for a thread; tenants share them.
MAX_WAITING: Final = 64
# A run of 256 tokens of a model of 70B takes 84 MB.
_BUFFER: Final = 128 << 20

_WHOLE: Final = ("max_bytes", "tenant_bytes", "threads", "load_bytes", "run_tokens")
_FROM_ZERO: Final = ("min_tokens", "turns")
_ABOVE_ZERO: Final = ("lifetime", "wait", "prefill_tokens_per_s")
_WANTED: Final = '"host", a folder, a URL such as "s3://bucket", or "mooncake://HOST:PORT"'


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The keys of ``store``; ``docs/vllm.md`` and ``docs/sglang.md`` describe them."""

    backend: str
    key_file: str | None = None
    encrypt: bool = False
    model: str | None = None
    max_bytes: int = 4 << 30
    tenant_bytes: int | None = None
    lifetime: float | None = None
    run_tokens: int = 256
    turns: int = 64
    threads: int = 4
    load_bytes: int = 2 << 30
    wait: float = 2.0
    min_tokens: int = 64
    prefill_tokens_per_s: float | None = None

    @classmethod
    def read(cls, given: object, where: str) -> StoreSettings | None:
        """Check the user's mapping; None without one.

        Raises:
            SettingsError: A key is unknown, or a value is invalid.
        """
        if given is None:
            return None
        where = f"{where}: store"
        if not isinstance(given, Mapping):
            msg = f'{where} must be a mapping such as {{"backend": "host"}}, not {given!r}'
            raise SettingsError(msg)
        check_keys(given, [one.name for one in fields(cls)], where)
        found = cls(**{"backend": None, **given})
        found._check(where)
        return found

    def _check(self, where: str) -> None:
        def refuse(name: str, wanted: str) -> NoReturn:
            msg = f"{where}: {name} must be {wanted}, not {getattr(self, name)!r}"
            raise SettingsError(msg)

        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        _check_backend(given["backend"], where, refuse)
        for name in ("key_file", "model"):
            if given[name] is not None and (not isinstance(given[name], str) or not given[name]):
                refuse(name, "the path of a file" if name == "key_file" else "a name")
        if given["key_file"] is None and given["backend"] != HOST:
            refuse("key_file", "the path of a file with the store's key, the same for all engines")
        if not isinstance(given["encrypt"], bool):
            refuse("encrypt", "true or false")
        for name in (*_WHOLE, *_FROM_ZERO):
            value, least = given[name], 0 if name in _FROM_ZERO else 1
            if value is None and name == "tenant_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                refuse(name, f"an integer from {least}")
        for name in _ABOVE_ZERO:
            value = given[name]
            if value is None and name != "wait":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                refuse(name, "a number above 0")
        if given["lifetime"] is not None and given["lifetime"] < 1:
            refuse("lifetime", "at least 1 second")

    def check_files(self, where: str) -> None:
        """Check that the key can be read, and that what the backend needs is installed.

        Raises:
            SettingsError: It is not so.
        """
        self.key(where)
        needs = None if self.backend == HOST else "obstore"
        if self.backend.startswith(_MOONCAKE):
            needs = "mooncake"
        if needs is not None and find_spec(needs) is None:
            msg = f"{where}: store: backend {self.backend!r} needs {needs}: see docs/store.md"
            raise SettingsError(msg)

    def key(self, where: str) -> StoreKey:
        """The store's key. Without a file, that of this process alone.

        Raises:
            SettingsError: It cannot be read, or is too short or too long.
        """
        from kvtrie.store import StoreKey  # noqa: PLC0415 - needs numpy

        secret = os.urandom(32)
        if self.key_file is not None:
            try:
                secret = Path(self.key_file).read_bytes()
            except OSError as error:
                msg = f"{where}: store: key_file {self.key_file}: {error.strerror or error}"
                raise SettingsError(msg) from error
        if not _LEAST <= len(secret) <= _MOST:
            msg = (
                f"{where}: store: key_file {self.key_file} has {len(secret)} bytes, a key has "
                f"{_LEAST} to {_MOST}"
            )
            raise SettingsError(msg)
        try:
            return StoreKey(secret, encryption="aes-256-gcm" if self.encrypt else "none")
        except ImportError as error:
            msg = f"{where}: store: encrypt: {error}"
            raise SettingsError(msg) from error

    def open_backend(self) -> Backend:
        """Open what keeps the runs.

        Raises:
            BackendError: It does not answer, or cannot be opened.
            ImportError: What it needs is not installed.
        """
        from kvtrie.store import (  # noqa: PLC0415 - each needs a package of its own
            HostBackend,
            MooncakeBackend,
            ObjectBackend,
        )

        if self.backend == HOST:
            return HostBackend(self.max_bytes + _SPARE)
        if self.backend.startswith(_MOONCAKE):
            master = self.backend.removeprefix(_MOONCAKE)
            return MooncakeBackend(master, segment_bytes=self.max_bytes, buffer_bytes=_BUFFER)
        is_folder = self.backend.startswith("/")
        return ObjectBackend.from_url(f"file://{self.backend}" if is_folder else self.backend)

    def open(self, space: Namespace, shape: SpanShape, where: str) -> SpanStore:
        """Open the store of a model.

        Args:
            space: The model's namespace.
            shape: The geometry of its KV.
            where: What a message begins with.

        Raises:
            StoreRefused: It is of another model, KV, geometry, key or version, or does not answer.
            SettingsError: The key cannot be read.
            ImportError: What the backend needs is not installed.
        """
        from kvtrie.store import (  # noqa: PLC0415 - needs numpy
            BackendError,
            SpanStore,
            StoreRefused,
            TenantLimits,
        )

        try:
            return SpanStore(
                self.open_backend(),
                self.key(where),
                space,
                shape,
                max_bytes=self.max_bytes,
                limits=TenantLimits(max_bytes=self.tenant_bytes, lifetime=self.lifetime),
                longest=self.run_tokens,
            )
        except (BackendError, StoreRefused) as error:
            msg = f"{where}: store: {error}"
            raise StoreRefused(msg, reason=error.reason) from error

    def loader(self, store: SpanStore, estimate: Estimate, device: torch.device) -> SpanLoader:
        """Make what loads runs for an engine, whose tenants share it.

        Args:
            store: From where.
            estimate: Decides between loading and recomputing.
            device: That of the engine's pool. For CUDA rows arrive in pinned memory, from which
                whole runs are copied without a stage in between.
        """
        from kvtrie.store import SpanLoader  # noqa: PLC0415 - needs torch

        return SpanLoader(
            store,
            estimate=estimate,
            threads=self.threads,
            max_waiting=MAX_WAITING,
            pinned=device.type == "cuda",
            max_bytes=self.load_bytes,
            is_shared=True,
        )


def _check_backend(backend: object, where: str, refuse: Callable[[str, str], NoReturn]) -> None:
    if not isinstance(backend, str) or not (
        backend == HOST or backend.startswith("/") or "://" in backend
    ):
        refuse("backend", _WANTED)
    if "@" in urlsplit(backend).netloc:
        # The value would be in logs.
        msg = f"{where}: backend must have no password: object stores take it from variables"
        raise SettingsError(msg)
