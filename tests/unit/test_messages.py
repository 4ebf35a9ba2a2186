"""Messages about wrong calls: the call, the argument, the value and the limit; never a salt."""

from __future__ import annotations

import logging
import pickle
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
KEY = b"k" * 16
# Wrong calls are tested, so types are not checked.
API: Any = kvtrie


@dataclass
class World:
    index: Any = field(default_factory=lambda: kvtrie.RadixIndex(8, 2))
    seq: Any = field(default_factory=lambda: kvtrie.TokenSequence([1, 2, 3, 4, 5, 6], NS))
    pool: Any = field(default_factory=lambda: kvtrie.BlockAllocator(4))
    ledger: Any = field(default_factory=lambda: kvtrie.SequenceLedger(2))
    live: Any = field(default_factory=lambda: kvtrie.TokenSequence([1, 2, 3, 4, 5], NS))

    def __post_init__(self) -> None:
        self.index.insert(self.seq, [5, 3, 1], num_computed=6, source=COMPUTED)
        self.plan = self.index.plan(kvtrie.TokenSequence([1, 2, 3, 9, 9], NS))
        self.ledger.begin("a", self.live, [0, 2, 4], num_computed=4)
        self.released = self.index.plan(self.seq)
        self.released.release()

    def insert(self, blocks: Any = (5, 3, 1), **changes: Any) -> Any:
        args: dict[str, Any] = {"num_computed": 6, "source": COMPUTED, **changes}
        return self.index.insert(self.seq, blocks, **args)

    def offer(self, blocks: Any = (5, 3, 1), **changes: Any) -> Any:
        args: dict[str, Any] = {"key": KEY, "num_computed": 6, "block_size": 2, **changes}
        return API.TransferManifest.from_blocks(self.seq, blocks, **args)

    def moves(self, *args: Any) -> Any:
        return self.plan.moves(*args)


def snapshot_without_candidates() -> bytes:
    """Of an index that cannot be made: its `max_candidates` is 0."""
    blob = bytearray(kvtrie.RadixIndex(8).snapshot())
    at = blob.index((64).to_bytes(8, "little"))
    blob[at : at + 8] = bytes(8)
    blob[12:16] = zlib.crc32(blob[:12] + blob[16:]).to_bytes(4, "little")
    return bytes(blob)


# By the name with which the message begins: the call, and what the message must have: first what
# follows the name, then values and limits. Rust has some calls and arguments under other names.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "RadixIndex": [
        (lambda _: API.RadixIndex(0), "num_blocks is 0", "[1, 2147483648]"),
        (lambda _: API.RadixIndex("8"), "num_blocks", "'str'", "an int"),
        (lambda _: API.RadixIndex(8, 5000), "block_size is 5000", "[1, 4096]"),
        (lambda _: API.RadixIndex(8, min_run=7), "min_run is 7", "[8, "),
        (lambda _: API.RadixIndex(8, seed=-1), "seed is -1", "[0, 18446744073709551615]"),
        (lambda _: API.RadixIndex(8, hash_bits=65), "hash_bits is 65", "[0, 64]"),
        (lambda _: API.RadixIndex(8, moved_runs="no"), "moved_runs", "'str'", "a bool"),
        (lambda _: API.RadixIndex(8, True), "block_size", "'bool'", "an int"),
    ],
    "RadixIndex.lookup": [
        (lambda w: w.index.lookup([1]), "seq", "'list'", "a TokenSequence"),
        (lambda w: w.index.lookup(w.seq, keep_last=-1), "keep_last is -1", "[0, "),
        (lambda w: w.index.lookup(w.seq, keep_last=1.0), "keep_last", "'float'", "an int"),
        (lambda w: w.index.lookup(w.seq, keep_last=2**200), "keep_last", "128 bits"),
        (lambda w: w.index.lookup(w.seq, touch=1), "touch", "'int'", "a bool"),
        (lambda w: w.index.lookup(w.seq, start=3), "start is 3", "block size 2", "6 tokens"),
    ],
    "RadixIndex.plan": [
        (lambda w: w.index.plan(w.seq, "exact"), "policy", "'str'", "a ReusePolicy"),
        (
            lambda w: w.index.plan(w.seq, API.ReusePolicy(min_run=9)),
            "the policy's min_run is 9",
            "16",
        ),
        (
            lambda w: w.index.plan(w.seq, API.ReusePolicy(min_run=9), path=w.live),
            "the policy's min_run is 9",
            "16",
        ),
        (
            lambda w: w.index.plan(
                w.seq, path=API.TokenSequence([1], API.Namespace(model="n", salt="s"))
            ),
            "path is of another namespace",
        ),
    ],
    "RadixIndex.insert": [
        (lambda w: w.insert([8, 3, 1]), "blocks[0] is 8", "[0, 8)"),
        (lambda w: w.insert([5, 3, 1.5]), "blocks[2]", "'float'"),
        (lambda w: w.insert(np.array([5, -3, 1])), "blocks[1] is -3", "[0, 8)"),
        (lambda w: w.insert(5), "blocks", "'int'", "a list"),
        (lambda w: w.insert([5]), "blocks has 1 ids", "3"),
        (lambda w: w.insert([5, 1, 3]), "blocks has 1", "backs others at 4"),
        (lambda w: w.insert(num_computed=7), "num_computed is 7", "[0, 6]"),
        (lambda w: w.insert(source="plan"), "source", "'str'", "kvtrie.COMPUTED"),
        (lambda w: w.insert(spans=[(0, 2)]), "spans[0] is of type 'tuple'", "a Span"),
        (lambda w: w.insert(spans=3), "spans", "'int'", "an iterable of Span"),
        (lambda w: w.insert([5]), "blocks has 1 ids; it must have 3"),
        (lambda w: w.insert([7, 7, 1]), "blocks has 7, which is offered twice"),
        (
            lambda w: w.index.insert(w.live, [7, 6], num_computed=4, source=w.released),
            "the plan was released already",
        ),
    ],
    "RadixIndex.tag": [
        (lambda w: w.index.tag(w.seq, [API.Span(0, 7, "a")]), "spans has [0, 7)", "[0, 6]"),
        (lambda w: w.index.tag(w.seq, [None]), "spans[0] is of type 'NoneType'", "a Span"),
    ],
    "RadixIndex.evict": [(lambda w: w.index.evict(-1), "n is -1", "[0, ")],
    "RadixIndex.discard": [(lambda w: w.index.discard([9]), "block_ids[0] is 9", "[0, 8)")],
    "RadixIndex.drop": [(lambda w: w.index.drop("m"), "namespace", "'str'", "a Namespace")],
    "RadixIndex.mark_dead": [
        (lambda w: w.index.mark_dead(w.seq, [(4, 2)]), "ranges has [4, 2)", "[0, 6]"),
        (lambda w: w.index.mark_dead(w.seq, [(0, 4), (2, 6)]), "ranges has [2, 6)", "4"),
        (
            lambda w: w.index.mark_dead(w.seq, [API.Span(0, 2, "a")]),
            "ranges[0] is of type 'Span'",
            "(span.start, span.end)",
        ),
    ],
    "RadixIndex.remove_spans": [
        (
            lambda w: w.index.remove_spans(w.seq, [API.Span(0, 2, "a")]),
            "ranges[0] is of type 'Span'",
            "(span.start, span.end)",
        ),
        (
            lambda w: w.index.remove_spans(w.seq, API.Span(0, 2, "a")),
            "ranges is of type 'Span'",
            "[(span.start, span.end)]",
        ),
        (lambda w: w.index.remove_spans(w.seq, [(0, 1, 2)]), "ranges[0] has 3", "2"),
        (lambda w: w.index.remove_spans(w.seq, [(0, -1)]), "ranges[0]", "-1", "[0, "),
        (lambda w: w.index.remove_spans(w.seq, [], force=0), "force", "'int'", "a bool"),
    ],
    "RadixIndex.explain": [
        (lambda w: w.index.explain(w.seq, context=-2), "context is -2", "[0, "),
        (
            lambda w: w.index.explain(w.seq, policy=API.ReusePolicy(min_run=9)),
            "the policy's min_run is 9",
            "16",
        ),
    ],
    "RadixIndex.restore": [
        (lambda _: API.RadixIndex.restore("x", pool_id=None), "blob", "'str'", "bytes"),
        (
            lambda _: API.RadixIndex.restore(b"", pool_id=None, max_blocks=0),
            "max_blocks is 0",
            "[1, ",
        ),
        (
            lambda _: API.RadixIndex.restore(b"", pool_id=b"x" * 65),
            "pool_id has 65 bytes",
            "1 to 64",
        ),
        (
            lambda _: API.RadixIndex.restore(snapshot_without_candidates(), pool_id=None),
            "RadixIndex: max_candidates is 0; ",
            "at least 1",
        ),
    ],
    "ReusePlan.moves": [
        (lambda w: w.moves([5, 9, 7]), "table[1] is 9", "[0, 8)"),
        (lambda w: w.moves([0, 6, 7]), "table[0] is 0", "must be 5"),
        (lambda w: w.moves([5, 6, 6]), "table has block 6 twice", "once"),
        (lambda w: w.moves([5, 6]), "table has 2 blocks", "need 3"),
        (lambda w: w.moves([5, 6, 3]), "table[2] is 3", "must not be written"),
        (lambda w: w.moves([5, 6, 7], 3, 2), "start and end are 3 and 2", "[0, 5]"),
        (lambda w: w.moves([5, 6, 7], 0, 6), "start and end are 0 and 6", "[0, 5]"),
        (lambda w: w.moves([5, 6, 7], 0, "6"), "end", "'str'", "an int"),
    ],
    "TokenSequence": [
        (lambda _: API.TokenSequence([2**32], NS), "ids[0] is 4294967296", "[0, 4294967296)"),
        (lambda _: API.TokenSequence([1, None], NS), "ids[1]", "'NoneType'"),
        (lambda _: API.TokenSequence("12", NS), "ids", "'str'", "a list"),
        (lambda _: API.TokenSequence([1], "m"), "namespace", "'str'", "a Namespace"),
        (lambda _: API.TokenSequence([1], NS, [3]), "items[0] is of type 'int'", "an Item"),
        (
            lambda _: API.TokenSequence([1], NS, [API.Item(0, 2, b"d")]),
            "items has [0, 2)",
            "[0, 1]",
        ),
    ],
    "TokenSequence.extend": [
        (lambda w: w.seq.extend([-1]), "ids[0] is -1", "[0, 4294967296)"),
        (
            lambda w: w.live.extend([1]),
            "a request of a SequenceLedger has this sequence of 5 tokens",
        ),
    ],
    "TokenSequence.truncate": [
        (lambda w: w.seq.truncate(7), "n is 7", "[0, 6]"),
        (
            lambda w: w.live.truncate(1),
            "a request of a SequenceLedger has this sequence of 5 tokens",
        ),
        (lambda w: w.seq.truncate(7), "n is 7"),
    ],
    "Namespace": [
        (lambda _: API.Namespace(model=3, salt="s"), "model", "'int'", "a str"),
        (lambda _: API.Namespace(model="m", salt=3), "salt", "'int'", "a str"),
        (lambda _: API.Namespace(model="m", salt=""), "the salt is empty"),
        (
            lambda _: API.Namespace(model="m", salt=""),
            "the salt is empty; give each tenant its own, or say SHARED to share KV",
        ),
    ],
    "Span": [
        (lambda _: API.Span(3, 2, "a"), "start and end are 3 and 2"),
        (lambda _: API.Span(0, 2, 3), "kind", "'int'", "a str"),
    ],
    "Item": [
        (lambda _: API.Item(2, 2, b"d"), "start and end are 2 and 2"),
        (lambda _: API.Item(0, 2, "d"), "digest", "'str'", "bytes"),
    ],
    "Imported": [
        (lambda _: kvtrie.Imported(-1), "exact_until is -1", "[0, "),
        (lambda _: kvtrie.Imported(0, 40000), "hops is 40000", "[0, 255]"),
    ],
    "ReusePolicy": [
        (lambda _: API.ReusePolicy(max_hops=-1), "max_hops is -1", "[0, 255]"),
        (
            lambda _: API.ReusePolicy(max_approximate_share=2),
            "max_approximate_share is 2",
            "[0, 1]",
        ),
        (
            lambda _: API.ReusePolicy(max_approximate_share="all"),
            "max_approximate_share",
            "'str'",
            "a float",
        ),
        (lambda _: API.ReusePolicy(forbid_kinds="tool"), "forbid_kinds", "'str'", "a tuple"),
        (
            lambda _: API.ReusePolicy(forbid_kinds=["a", 3]),
            "forbid_kinds[1] is of type 'int'",
            "a str",
        ),
        (lambda _: API.ReusePolicy(forbid_kinds=["a", ""]), "forbid_kinds[1] is empty"),
    ],
    "BlockAllocator.allocate": [
        (lambda w: w.pool.allocate(5), "5 blocks", "of 4"),
        (lambda w: w.pool.allocate(1, w.seq), "evict_from", "'TokenSequence'", "a RadixIndex"),
    ],
    "BlockAllocator.free": [
        (lambda w: w.pool.free([4]), "ids[0] is 4", "[0, 4)"),
        (lambda w: w.pool.free([3]), "ids holds 3", "not handed out"),
    ],
    "SequenceLedger": [(lambda _: API.SequenceLedger(0), "block_size is 0", "[1, 4096]")],
    "SequenceLedger.schedule": [(lambda w: w.ledger.schedule("a", -1), "num_tokens is -1", "[0, ")],
    "SequenceLedger.append": [
        (lambda w: w.ledger.append("a", [2**32]), "ids[0] is 4294967296", "[-1, 4294967295]")
    ],
    "SequenceLedger.tag": [
        (lambda w: w.ledger.tag("a", [3]), "spans[0] is of type 'int'", "a Span")
    ],
    "SequenceLedger.blocks_for": [
        (lambda w: w.ledger.blocks_for("a", 3, 1), "start and end are 3 and 1", "[0, 4]")
    ],
    "TransferManifest.from_ledger": [
        (
            lambda w: API.TransferManifest.from_ledger(w.seq, "a", key=KEY),
            "ledger",
            "'TokenSequence'",
            "a SequenceLedger",
        ),
        (
            lambda w: API.TransferManifest.from_ledger(w.ledger, "a", key=b"k"),
            "the key has 1 bytes",
            "16 to 64",
        ),
    ],
    "plan_transfer": [
        (
            lambda w: API.plan_transfer(b"x", w.seq, [1, 2, 4], key=KEY),
            "manifest",
            "'bytes'",
            "a TransferManifest",
        ),
        (
            lambda w: API.plan_transfer(w.offer(), w.seq, [1], key=KEY),
            "group 0 has 1 blocks, 6 tokens need 3",
        ),
        (
            lambda w: API.plan_transfer(w.offer(), w.seq, [1, 2, -1], key=KEY),
            "local_blocks[2] is -1",
        ),
        (
            lambda w: API.plan_transfer(w.offer(), w.seq, [1, 2, 4], key=KEY * 2),
            "the digest of the run [0, 6) of group 0 is wrong",
        ),
    ],
    "RadixIndex.quarantine": [(lambda w: w.index.quarantine([9]), "block_ids", "[0, 8)")],
    "RadixIndex.pool_of_snapshot": [
        (
            lambda _: API.RadixIndex.pool_of_snapshot(b"something else"),
            "these bytes are no snapshot",
        )
    ],
    "ReusePlan.release": [(lambda w: w.released.release(), "the plan was released already")],
    "ReusePlan.release_sources": [
        (lambda w: w.released.release_sources(), "the plan was released already")
    ],
    "SequenceLedger.final_range": [
        (lambda w: w.ledger.final_range("b"), "the ledger has no such request", "(request 'b')")
    ],
    "SequenceLedger.confirm": [
        (lambda w: w.ledger.confirm("a", 9), "num_computed is 9", "below 4", "(request 'a')")
    ],
    "SequenceLedger.begin": [
        (
            lambda w: w.ledger.begin("b", w.seq, [5, 3, 1], num_computed=1, missing=[(2, 3)]),
            "num_computed is 1 and missing is given",
            "(request 'b')",
        )
    ],
    "TransferManifest.from_blocks": [
        (lambda w: w.offer(blocks=[5]), "group 0 has 1 blocks"),
        (lambda w: w.offer(key=b"k"), "the key has 1 bytes"),
        (lambda w: w.offer(num_computed=7), "num_computed is 7", "[0, 6]"),
        (lambda w: w.offer(num_lookahead=2**32), "num_lookahead is 4294967296", "[0, 4294967289]"),
    ],
    "TransferManifest.from_bytes": [(lambda _: API.TransferManifest.from_bytes(b"x"), "byte 1: ")],
}


@pytest.mark.parametrize(
    ("name", "call", "begins", "parts"),
    [(name, call, begins, parts) for name in CALLS for call, begins, *parts in CALLS[name]],
)
def test_a_message_names_call_argument_value_and_limit(
    name: str, call: Callable[[World], object], begins: str, parts: list[str]
) -> None:
    world = World()
    before = world.index.digest()
    with pytest.raises((TypeError, ValueError, kvtrie.KvTrieError)) as raised:
        call(world)
    message = str(raised.value)
    assert message.startswith(f"{name}: {begins}"), message
    for part in parts:
        assert part in message, message
    assert not re.search(r"\d\.\.|\.\.=|Some\(|::|\bExact\b", message), message
    assert world.index.digest() == before
    world.plan.release()


def test_a_range_is_a_list_of_integers() -> None:
    seq = kvtrie.TokenSequence(range(9), NS)
    seq.extend(range(20, 10, -5))
    assert seq[:].tolist() == [*range(9), 20, 15]
    index = kvtrie.RadixIndex(8, 2)
    done = index.insert(seq, range(4), num_computed=9, source=COMPUTED)
    assert done.blocks.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"ids\[2\] is -1; it must be in \[0, 4294967296\)"):
        kvtrie.TokenSequence(range(1, -3, -1), NS)


SECRET = "s3cr3t-of-tenant"  # noqa: S105 - of nobody
HIDDEN = kvtrie.Namespace(model="m", adapter="a", salt=SECRET)


def test_no_repr_shows_the_salt() -> None:
    shown = "Namespace(model='m', kv_dtype='auto', rope='default', adapter='a', salt=<redacted>)"
    assert repr(HIDDEN) == str(HIDDEN) == shown
    assert repr(NS).endswith("salt=SHARED)")
    # The repr does not depend on the salt.
    assert repr(kvtrie.Namespace(model="m", adapter="a", salt="other")) == shown
    assert HIDDEN.salt == SECRET
    assert pickle.loads(pickle.dumps(HIDDEN)) == HIDDEN  # noqa: S301 - our own


def test_nothing_that_is_made_in_a_namespace_shows_the_salt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    index = kvtrie.RadixIndex(8, 2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], HIDDEN)
    done = index.insert(seq, [5, 3], num_computed=4, source=COMPUTED)
    other = kvtrie.Namespace(model="n", salt=SECRET)
    plan = index.plan(kvtrie.TokenSequence([1, 2, 9], HIDDEN))
    why = index.explain(kvtrie.TokenSequence([1, 2, 3, 4], other))
    ledger = kvtrie.SequenceLedger(2)
    ledger.begin("a", seq, [5, 3], num_computed=4)
    manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
    things = [
        seq,
        done,
        plan,
        why,
        why.other_namespace,
        ledger,
        manifest,
        index,
        index.namespaces(),
    ]
    plan.release()
    for thing in (*things, plan):
        assert SECRET not in f"{thing} {thing!r}"
    wrong: list[Callable[[], object]] = [
        lambda: kvtrie.Namespace(model="", salt=SECRET),
        lambda: kvtrie.TokenSequence(HIDDEN, HIDDEN),  # type: ignore[arg-type]  # refused
        lambda: index.lookup(HIDDEN),  # type: ignore[arg-type]  # refused
        lambda: index.plan(HIDDEN),  # type: ignore[arg-type]  # refused
        lambda: index.insert(seq, [5, 3], num_computed=4, source=plan),
        lambda: kvtrie.plan_transfer(manifest, kvtrie.TokenSequence([1], NS), [1], key=KEY),
        lambda: kvtrie.plan_transfer(
            manifest,
            kvtrie.TokenSequence([1], kvtrie.Namespace(model="m", adapter="a", salt="x")),
            [1],
            key=KEY,
        ),
        lambda: kvtrie.plan_transfer(manifest, kvtrie.TokenSequence([1], other), [1], key=KEY),
        lambda: kvtrie.RadixIndex.restore(index.snapshot()[:-9], pool_id=index.pool_id),
        lambda: ledger.begin("a", seq, [5, 3]),
        lambda: ledger.begin("b", seq, [5, 3]),
    ]
    for call in wrong:
        with pytest.raises((TypeError, ValueError, kvtrie.KvTrieError)) as raised:
            call()
        assert SECRET not in f"{raised.value!r} {raised.value}"
    assert SECRET not in caplog.text
