"""Snapshots of one worker in an object store, as C11 has them: one batch in the engine's own form.

An object is named by what it contains, the worker, the epoch and the last batch that counts, and
is never written over. What it must be is said by the message that names it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvtrie._obstore import first_line
from kvtrie.cluster.streams import ReplicationError
from kvtrie.cluster.subscription import LARGEST_SNAPSHOT

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def _obstore() -> Any:  # noqa: ANN401 - a module
    try:
        import obstore  # noqa: PLC0415 - the extra is asked for when it is needed
        import obstore.exceptions  # noqa: PLC0415 - likewise
    except ModuleNotFoundError as error:
        msg = "snapshots in a store need obstore: pip install 'kvtrie[replicas]'"
        raise ImportError(msg, name="obstore") from error
    return obstore


def check_installed() -> None:
    """Check that obstore is there.

    Raises:
        ImportError: It is missing.
    """
    _obstore()


def name_of(worker: str, epoch: str, number: int) -> str:
    """Return the name of a snapshot."""
    return f"{worker}/{epoch}/{number:020}"


def put(store: ObjectStore, name: str, batch: bytes) -> str:
    """Store a snapshot, unless its name is taken, and return the checksum of what is there.

    Raises:
        ReplicationError: It cannot be stored.
    """
    obstore = _obstore()
    try:
        obstore.put(store, name, batch, mode="create")
    except obstore.exceptions.AlreadyExistsError:
        # Of the same batches, by this bridge or the one before it.
        batch = _read(store, name)
    except (obstore.exceptions.BaseError, OSError) as error:
        msg = f"snapshot {name} cannot be stored: {first_line(error)}"
        raise ReplicationError(msg, reason="snapshot") from error
    return _checksum(batch)


def get(store: ObjectStore, name: str, checksum: str, most: int) -> bytes:
    """Read a snapshot.

    Args:
        store: Where it is.
        name: Its name.
        checksum: What `put` has returned.
        most: Bytes that it may have.

    Raises:
        ReplicationError: It is not there, too large, or other bytes.
    """
    batch = _read(store, name, most)
    found = _checksum(batch)
    if found != checksum:
        msg = f"snapshot {name} has the checksum {found}, not {checksum}"
        raise ReplicationError(msg, reason="snapshot")
    return batch


def delete(store: ObjectStore, name: str) -> None:
    """Delete a snapshot that nobody needs.

    Raises:
        ReplicationError: It cannot be deleted.
    """
    obstore = _obstore()
    try:
        obstore.delete(store, name)
    except (obstore.exceptions.BaseError, OSError) as error:
        msg = f"snapshot {name} cannot be deleted: {first_line(error)}"
        raise ReplicationError(msg, reason="snapshot") from error


def _read(store: ObjectStore, name: str, most: int = LARGEST_SNAPSHOT) -> bytes:
    obstore = _obstore()
    try:
        found = obstore.get(store, name)
        size = found.meta["size"]
        if size <= most:
            return bytes(found.bytes())
    except (obstore.exceptions.BaseError, OSError) as error:
        msg = f"snapshot {name} cannot be read: {first_line(error)}"
        raise ReplicationError(msg, reason="snapshot") from error
    msg = f"snapshot {name} has {size} bytes; the limit is {most}"
    raise ReplicationError(msg, reason="snapshot")


def _checksum(batch: bytes) -> str:
    return hashlib.blake2b(batch, digest_size=16).hexdigest()
