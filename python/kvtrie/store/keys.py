"""Names and seals of stored runs, all of which need the store's key.

The secret gives one key per tenant, that gives the names of the tenant's runs, and a name with 16
random bytes gives the key of one value. So whoever lacks the secret can neither name a run nor make
a value that is taken for one, and units of two values cannot be mixed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Item, Namespace
    from kvtrie.store.shape import SpanShape

Encryption = Literal["none", "aes-256-gcm"]

VERSION: Final = 2
"""Version of names and values."""
ID_BYTES: Final = 16
HEADER_UNIT: Final = (1 << 64) - 1
"""The number under which the header is sealed; units of KV count from 0."""
CONTEXT_UNIT: Final = HEADER_UNIT - 1
"""The number under which the marks of the prompt are sealed that a run is of."""


def _digest(key: bytes, person: str, *parts: bytes, size: int = 32) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=size, person=f"kvtrie.s.{person}".encode())
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


class StoreKey:
    """The secret of a store's owner.

    Args:
        secret: 16 to 64 bytes, from a random source. Whoever has it can read and write all runs.
        encryption: ``"none"``: values are verified, and whoever can read the store can read them.
            ``"aes-256-gcm"``: they are encrypted as well (needs `cryptography`).

    Raises:
        TypeError: ``secret`` is not bytes.
        ValueError: It is too short or too long, or ``encryption`` is unknown.
        ImportError: `cryptography` is missing.
    """

    def __init__(self, secret: bytes, *, encryption: Encryption = "none") -> None:
        given: object = secret
        if not isinstance(given, bytes):
            msg = f"StoreKey: secret must be bytes, not {type(given).__name__}"
            raise TypeError(msg)
        if not 16 <= len(secret) <= 64:
            msg = f"StoreKey: secret has {len(secret)} bytes; it must have 16 to 64"
            raise ValueError(msg)
        if encryption not in ("none", "aes-256-gcm"):
            msg = f"StoreKey: encryption is {encryption!r}, not 'none' or 'aes-256-gcm'"
            raise ValueError(msg)
        self._secret = secret
        self.encryption: Encryption = encryption
        self._cipher = None if encryption == "none" else _aes_gcm()

    def __repr__(self) -> str:
        """Show no secret."""
        return f"StoreKey(encryption={self.encryption!r})"

    def check(self, text: bytes) -> str:
        """The proof that whoever has the key wrote a text."""
        return _digest(self._secret, "check", text, size=16).hex()

    def tenant(self, salt: object) -> TenantKey:
        """The key of a tenant, by its salt, or of everybody's runs, by `kvtrie.SHARED`."""
        said = (b"tenant", salt.encode()) if isinstance(salt, str) else (b"shared", b"")
        return TenantKey(_digest(self._secret, "tenant", *said), self._cipher)


class TenantKey:
    """Names and seals the runs of one tenant. `StoreKey.tenant` makes it.

    Attributes:
        name: What the store's keys of the tenant begin with. It says nothing of the salt.
    """

    def __init__(self, key: bytes, cipher: Any) -> None:  # noqa: ANN401 - a class of cryptography
        self._key = key
        self._cipher = cipher
        self.name = _digest(key, "id", size=8).hex()

    def run_name(self, space: bytes, tokens: NDArray[np.uint32], items: bytes) -> str:
        """The name of a run: `space_of` where it is, its tokens and `items_of` it."""
        said = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
        return f"{self.name}/{_digest(self._key, 'name', space, said, items).hex()}"

    def session(self, session: str) -> str:
        """A digest of a conversation's id."""
        return _digest(self._key, "session", session.encode(), size=16).hex()

    def mark_key(self, space: bytes) -> bytes:
        """Under which `PrefixMarks` are made."""
        return _digest(self._key, "marks", space)

    def turn(self, marks: bytes) -> str:
        """The name of marks."""
        return _digest(self._key, "turn", marks, size=16).hex()

    def prefixes(
        self, space: bytes, tokens: NDArray[np.uint32], items: Sequence[Item], starts: Sequence[int]
    ) -> list[str]:
        """Digests of all tokens before each of ascending positions."""
        whole = np.ascontiguousarray(tokens, dtype="<u4")
        said = hashlib.blake2b(
            _digest(self._key, "space", space),
            key=self._key,
            digest_size=16,
            person=b"kvtrie.s.prefix",
        )
        # Apart from the tokens, so that it does not matter where a prompt is cut.
        of_items = hashlib.blake2b(key=self._key, digest_size=16, person=b"kvtrie.s.items")
        found, done, passed = [], 0, 0
        for start in starts:
            said.update(whole[done:start].tobytes())
            done = start
            while passed < len(items) and items[passed].end <= start:
                of_items.update(items_of(items[passed : passed + 1], 0, start))
                passed += 1
            here, items_here = said.copy(), of_items.copy()
            if passed < len(items) and items[passed].start < start:
                items_here.update(items_of(items[passed : passed + 1], 0, start))
            here.update(items_here.digest())
            found.append(here.hexdigest())
        return found

    def sealer(self, name: str, value_id: bytes) -> Sealer:
        """What seals and opens the units of one value."""
        return Sealer(_digest(self._key, "value", name.encode(), value_id), self._cipher)


class Sealer:
    """Seals the units of one value, each under its number, once."""

    def __init__(self, key: bytes, cipher: Any) -> None:  # noqa: ANN401 - a class of cryptography
        self._key = key
        self._cipher = None if cipher is None else cipher(key)

    def seal(self, number: int, unit: bytes) -> bytes:
        """The unit with 16 bytes more."""
        if self._cipher is not None:
            sealed: bytes = self._cipher.encrypt(number.to_bytes(12, "little"), unit, None)
            return sealed
        return unit + self._proof(number, unit)

    def open(self, number: int, sealed: memoryview) -> bytes | memoryview | None:
        """The unit, or None if it is not what was sealed under this number."""
        if self._cipher is not None:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

            try:
                unit: bytes = self._cipher.decrypt(number.to_bytes(12, "little"), sealed, None)
            except InvalidTag:
                return None
            return unit
        unit_bytes, proof = sealed[:-16], sealed[-16:]
        return unit_bytes if hmac.compare_digest(proof, self._proof(number, unit_bytes)) else None

    def _proof(self, number: int, unit: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(
            number.to_bytes(8, "little"), key=self._key, digest_size=16, person=b"kvtrie.s.unit"
        )
        digest.update(unit)
        return digest.digest()


def is_run_name(name: str) -> bool:
    """Whether a name in a backend is one that `TenantKey.run_name` may have made."""
    return re.fullmatch("[0-9a-f]{16}/[0-9a-f]{64}", name) is not None


def space_of(namespace: Namespace, shape: SpanShape) -> bytes:
    """What KV depends on besides tokens and salt, as names and digests have it."""
    own = [VERSION, namespace.model, namespace.kv_dtype, namespace.rope, namespace.adapter]
    return json.dumps([*own, shape.fields()]).encode()


def items_of(items: Sequence[Item], start: int, end: int) -> bytes:
    """The items that overlap tokens ``[start, end)``, as names and digests have them."""
    parts = []
    for item in items:
        first, last = max(item.start, start), min(item.end, end)
        if first < last:
            whole = item.positions or 0, item.num_tokens or 0
            at = first - start, last - start, first - item.start
            parts.append(struct.pack("<6Q", *at, *whole, len(item.digest)) + item.digest)
    return struct.pack("<Q", len(parts)) + b"".join(parts)


def _aes_gcm() -> Any:  # noqa: ANN401 - a class of cryptography
    try:
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415 - an extra
            AESGCM,
        )
    except ModuleNotFoundError as error:
        msg = "StoreKey: encryption needs cryptography: pip install 'kvtrie[store]'"
        raise ImportError(msg, name="cryptography") from error
    return AESGCM
