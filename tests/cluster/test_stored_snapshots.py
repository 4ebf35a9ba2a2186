"""Snapshots in an object store of one process, and in a server of S3: names are taken once."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, S3Store
from tests.s3_server import S3Bucket

from kvtrie.cluster import ReplicationError, snapshots

NAME = snapshots.name_of("w", "an epoch", 7)


def checksum(batch: bytes) -> str:
    return hashlib.blake2b(batch, digest_size=16).hexdigest()


def s3(bucket: S3Bucket, name: str | None = None, seconds: float = 5.0) -> Any:
    limit = timedelta(seconds=seconds)
    return S3Store(
        bucket.name if name is None else name,
        client_options={"timeout": limit, "allow_http": True},
        retry_config={"max_retries": 1, "retry_timeout": limit},
    )


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_writers_at_one_time_agree_on_what_is_stored(kind: str) -> None:
    with S3Bucket() as bucket, ThreadPoolExecutor(8) as threads:
        store = MemoryStore() if kind == "memory" else s3(bucket)
        batches = [bytes([number]) * 1_000 for number in range(8)]
        said = set(threads.map(lambda batch: snapshots.put(store, NAME, batch), batches))
        (one,) = said
        stored = bytes(obstore.get(store, NAME).bytes())
        assert stored in batches
        assert one == checksum(stored)
        assert snapshots.get(store, NAME, one, 1_000) == stored
        with pytest.raises(ReplicationError, match=r"has 1000 bytes; the limit is 999$"):
            snapshots.get(store, NAME, one, 999)
        snapshots.delete(store, NAME)
        assert snapshots.put(store, NAME, b"another") == checksum(b"another")


def test_snapshot_whose_answer_was_lost_is_its_own() -> None:
    """The name is taken when obstore tries again: by the snapshot itself."""
    with S3Bucket() as bucket:
        store = s3(bucket)
        bucket.relay.drops = 1
        assert snapshots.put(store, NAME, b"a batch") == checksum(b"a batch")
        assert bucket.relay.drops == 0
        assert bytes(obstore.get(store, NAME).bytes()) == b"a batch"


@pytest.mark.parametrize("why", ["killed", "stalled", "wrong bucket", "wrong key"])
def test_s3_that_takes_nothing_is_an_error_of_one_line(why: str) -> None:
    """obstore adds many lines of its own structures, which were in the errors of replicas."""
    with S3Bucket() as bucket:
        store = s3(bucket, "nobody-has-it" if why == "wrong bucket" else None, seconds=0.3)
        code = {"wrong bucket": "NoSuchBucket", "wrong key": "InvalidAccessKeyId"}.get(why, "")
        if why == "killed":
            bucket.kill()
        elif why == "stalled":
            bucket.relay.stall()
        with bucket.checks_keys(enabled=why == "wrong key"):
            for call, at in (
                (lambda: snapshots.put(store, NAME, b"a batch"), "stored"),
                (lambda: snapshots.get(store, NAME, "checksum", 100), "read"),
            ):
                with pytest.raises(ReplicationError, match=f"^snapshot w/.* be {at}: ") as raised:
                    call()
                assert raised.value.reason == "snapshot"
                assert str(raised.value).endswith(code)
                assert len(str(raised.value).splitlines()) == 1
