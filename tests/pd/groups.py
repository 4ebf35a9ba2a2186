"""Transfers between engines with several block groups and without ledgers, every label checked.

Each group has a pool of its own, with blocks of its own size. The sender's KV is computed from
scratch up to some position, or was loaded approximately; the receiver has a prefix, or none.
"""

from __future__ import annotations

import collections
from random import Random
from typing import TYPE_CHECKING

from tests.pd import faults
from tests.pd.driver import KEYS, REASONS, SPACES, Counts, Planner, WrongError, check_grade
from tests.truth.check import APPROXIMATE, EXACT, is_loaded_right, wrong_slots
from tests.truth.labels import LabelledPool, chain

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

Unit = int | tuple[int, int]

NUM_BLOCKS = 256
SIZES = (1, 2, 3, 4, 8)


class Side:
    """One engine's pools, a table per group.

    Its KV is exact up to `exact_until`, and has at most `hops` after it, where it was built under
    `policy`.
    """

    def __init__(self, sizes: dict[int, int], num_tokens: int, rng: Random) -> None:
        self.sizes = sizes
        self.pools = {group: LabelledPool(NUM_BLOCKS, size) for group, size in sizes.items()}
        self.tables = {
            group: rng.sample(range(NUM_BLOCKS), -(-num_tokens // size))
            for group, size in sizes.items()
        }
        self.exact_until = num_tokens
        self.hops = 0
        self.policy: kvtrie.ReusePolicy | None = None
        self.lookahead = 0

    def slots(self, group: int) -> list[int]:
        return self.pools[group].slots(self.tables[group])

    def compute(
        self, ids: Sequence[int], canon: Sequence[int], start: int, end: int, root: int
    ) -> int:
        return sum(
            pool.compute(self.slots(group), ids, canon, start, end, root=root)
            for group, pool in self.pools.items()
        )


class Text:
    """Tokens, some of which represent images; the ids of all images are the same.

    `labels` is what the KV of each token is of: its id, or the image and the place in it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.ids: list[int] = []
        self.labels: list[int] = []
        self.items: list[kvtrie.Item] = []
        for unit in units:
            if isinstance(unit, int):
                self.ids.append(unit)
                self.labels.append(unit)
            else:
                number, length = unit
                start = len(self.ids)
                self.items.append(kvtrie.Item(start, start + length, bytes((number,))))
                self.ids += [3] * length
                self.labels += [10**6 * (1 + number) + offset for offset in range(length)]

    def sequence(self, space: kvtrie.Namespace) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(self.ids, space, items=self.items)


def edited(text: Text, rng: Random) -> Text:
    out = list(text.units)
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(out) + 1)
        if rng.random() < 0.6:
            del out[at : at + rng.randrange(1, 30)]
        else:
            out[at:at] = _units(rng, rng.randrange(1, 12))
    for at, unit in enumerate(out):
        if not isinstance(unit, int) and rng.random() < 0.2:
            out[at] = (rng.randrange(3), unit[1])
    if rng.random() < 0.5:
        out += _units(rng, rng.randrange(1, 12))
    return Text(out or [1])


def written(rng: Random) -> Text:
    length = rng.randrange(1, 110)
    if rng.random() < 0.25:
        phrase = [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        return Text((phrase * length)[:length])
    units = _units(rng, length)
    for _ in range(rng.choice((0, 0, 1, 3))):
        units.insert(rng.randrange(len(units) + 1), (rng.randrange(3), rng.randrange(1, 25)))
    return Text(units)


def _units(rng: Random, length: int) -> list[Unit]:
    return [rng.randrange(5000) for _ in range(length)]


def hop(
    sender: Side,
    sent: Text,
    computed: int,
    wanted: Text,
    rng: Random,
    counts: Counts,
    planner: Planner,
) -> Side:
    root = hash(SPACES[0])
    sizes = sender.sizes
    if rng.random() < 0.5:
        sizes = {group: rng.choice(SIZES) for group in sizes}
    labels = wanted.labels
    length = len(labels)
    receiver = Side(sizes, length, rng)
    canon = chain(labels, root)
    cached = rng.choice((0, 0, rng.randrange(length + 1)))
    receiver.compute(labels, canon, 0, cached, root)
    raw = _manifest(sender, sent, computed)
    fault = rng.choice(("", "", "", "mutated", "truncated", "key", "namespace", "groups"))
    local_tables, local_sizes = dict(receiver.tables), dict(sizes)
    if fault == "mutated":
        raw = faults.mutated(raw, rng)
    elif fault == "truncated":
        raw = faults.truncated(raw, rng)
    elif fault == "groups":
        local_tables[9], local_sizes[9] = local_tables[0], local_sizes[0]
    space = rng.choice(SPACES[1:]) if fault == "namespace" else SPACES[0]
    counts["transfers"] += 1
    keep_last = rng.choice((0, 0, 1, 3))
    policy = sender.policy if sender.policy and rng.random() < 0.5 else _policy(rng)
    pairs: list[tuple[int, ...]] = []
    compute: list[list[int]] = [[cached, length]] if cached < length else []
    receiver.exact_until, receiver.hops = length, 0
    try:
        manifest = kvtrie.TransferManifest.from_bytes(raw)
        transfer = planner(
            manifest,
            wanted.sequence(space),
            local_tables,
            cached=(0, cached),
            key=KEYS[1] if fault == "key" else KEYS[0],
            policy=policy,
            block_size=local_sizes,
            keep_last=keep_last,
        )
    except kvtrie.TransferRefused as refusal:
        if refusal.reason not in REASONS or not str(refusal):
            raise WrongError(f"a refusal without a reason: {refusal!r}") from refusal
        counts[f"refused: {refusal.reason}"] += 1
    else:
        if fault in ("truncated", "key", "namespace", "groups"):
            raise WrongError(f"accepted in spite of: {fault}")
        pairs, compute = transfer.pairs.tolist(), transfer.compute.tolist()
        receiver.exact_until, receiver.hops = transfer.exact_until, transfer.hops
        is_approximate = any(pair[6] != EXACT for pair in pairs)
        receiver.policy = policy if is_approximate else None
        counts["approximate blocks sent on"] += check_grade(manifest, transfer, policy)
    for pair in pairs:
        _load(sender, receiver, pair, labels, canon)
        counts["pairs, groups"] += 1
        counts["tokens loaded, groups"] += pair[4] - pair[3]
    broken = sum(receiver.compute(labels, canon, start, end, root) for start, end in compute)
    if broken:
        raise WrongError(f"{broken} slots were read before they were written")
    _look(receiver, labels, canon)
    return receiver


def _manifest(sender: Side, sent: Text, computed: int) -> bytes:
    source: kvtrie.ComputedSource | kvtrie.Imported = kvtrie.COMPUTED
    if sender.exact_until < computed or sender.hops:
        source = kvtrie.Imported(sender.exact_until, sender.hops, sender.policy)
    manifest = kvtrie.TransferManifest.from_blocks(
        sent.sequence(SPACES[0]),
        sender.tables,
        key=KEYS[0],
        num_computed=computed,
        block_size=sender.sizes,
        source=source,
        num_lookahead=sender.lookahead,
    )
    raw: bytes = manifest.to_bytes()
    return raw


def _load(
    sender: Side, receiver: Side, pair: tuple[int, ...], labels: Sequence[int], canon: Sequence[int]
) -> None:
    group, remote, local, start, end, delta, kind, hops = pair
    theirs, mine = sender.sizes[group], receiver.sizes[group]
    there, here = (start - delta) % theirs, start % mine
    if there + end - start > theirs or here + end - start > mine:
        raise WrongError(f"a pair crosses blocks: {pair}")
    pool, slot = receiver.pools[group], local * mine + here
    pool.load(sender.pools[group], remote * theirs + there, slot, canon[start:end], delta)
    if not is_loaded_right(
        pool,
        slot,
        labels[start:end],
        canon[start:end],
        start,
        exact=kind == EXACT,
        hops=hops,
        root=hash(SPACES[0]),
    ):
        raise WrongError(f"loaded by {pair}: something else than it says")


def _look(receiver: Side, labels: Sequence[int], canon: Sequence[int]) -> None:
    length = len(labels)
    classes = [EXACT] * min(receiver.exact_until, length)
    classes += [APPROXIMATE] * (length - len(classes))
    hops, root = [receiver.hops] * length, hash(SPACES[0])
    for group, pool in receiver.pools.items():
        slots = receiver.slots(group)
        wrong = wrong_slots(pool, slots, labels, canon, classes, hops, root=root)
        if wrong:
            raise WrongError(f"group {group}: {len(wrong)} wrong: {wrong[:5]}")


def _policy(rng: Random) -> kvtrie.ReusePolicy:
    if rng.random() < 0.4:
        return kvtrie.EXACT_ONLY
    return kvtrie.ReusePolicy(
        approximate=True,
        min_run=rng.choice((None, 8, 8)),
        max_hops=rng.choice((1, 2)),
        max_approximate_share=rng.choice((1.0, 0.5)),
        recompute_first=rng.choice((0, 2)),
        recompute_last=rng.choice((0, 2)),
    )


def play(seed: int, planner: Planner | None = None) -> Counts:
    """A text is computed on one side, sent on to a second and from there to a third."""
    rng = Random(seed)
    counts: Counts = collections.Counter()
    root = hash(SPACES[0])
    try:
        text = written(rng)
        length = len(text.ids)
        sizes = {group: rng.choice(SIZES) for group in range(rng.choice((1, 2, 3)))}
        lookahead = rng.choice((0, 0, 1, 5))
        sender = Side(sizes, length + lookahead, rng)
        computed = rng.choice((length, length, rng.randrange(length + 1)))
        sender.compute(text.labels, chain(text.labels, root), 0, computed, root)
        sender.exact_until = computed
        if computed == length:
            sender.lookahead = lookahead
        for _ in range(2):
            wanted = edited(text, rng)
            sender = hop(
                sender, text, computed, wanted, rng, counts, planner or kvtrie.plan_transfer
            )
            text, computed = wanted, len(wanted.ids)
    except Exception as error:
        error.add_note(f"tests.pd.groups.play({seed})")
        raise
    return counts
