"""Transfers between engines with several block groups and without ledgers, every label looked at.

Each group has a pool of its own, with blocks of its own size. The sender's KV is computed from
scratch up to somewhere, or was loaded approximately itself; the receiver has a prefix, or none.
"""

from __future__ import annotations

import collections
from random import Random
from typing import TYPE_CHECKING

from tests.pd.driver import KEYS, REASONS, SPACES, Counts, Planner, WrongError

import kvtrie
from kvtrie.testing.pd import faults
from kvtrie.testing.pd.check import wrong_slots
from kvtrie.testing.pd.labels import LabelledPool, chain

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_BLOCKS = 256
SIZES = (1, 2, 3, 4, 8)


class Side:
    """One engine's pools, a table a group.

    Attributes:
        sizes: Slots a block of each group.
        pools: The pool of each group.
        tables: The request's blocks in each group.
        exact_until: Where its KV stops being exact.
        hops: The most hops of what is not.
    """

    def __init__(self, sizes: dict[int, int], num_tokens: int, rng: Random) -> None:
        """Make tables for so many tokens, of blocks in no order."""
        self.sizes = sizes
        self.pools = {group: LabelledPool(NUM_BLOCKS, size) for group, size in sizes.items()}
        self.tables = {
            group: rng.sample(range(NUM_BLOCKS), -(-num_tokens // size))
            for group, size in sizes.items()
        }
        self.exact_until = num_tokens
        self.hops = 0

    def slots(self, group: int) -> list[int]:
        """The slots of one group's table."""
        return self.pools[group].slots(self.tables[group])

    def compute(
        self, ids: Sequence[int], canon: Sequence[int], start: int, end: int, root: int
    ) -> int:
        """Compute a range in all groups; how many slots before it were unwritten."""
        return sum(
            pool.compute(self.slots(group), ids, canon, start, end, root=root)
            for group, pool in self.pools.items()
        )


def edited(ids: list[int], rng: Random) -> list[int]:
    """Another prompt with much of the same text: holes, insertions, a longer or shorter end."""
    out = list(ids)
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(out) + 1)
        if rng.random() < 0.6:
            del out[at : at + rng.randrange(1, 30)]
        else:
            out[at:at] = [rng.randrange(5000) for _ in range(rng.randrange(1, 12))]
    if rng.random() < 0.5:
        out += [rng.randrange(5000) for _ in range(rng.randrange(1, 12))]
    return out or [1]


def text(rng: Random) -> list[int]:
    """Some tokens, now and then few ids again and again."""
    length = rng.randrange(1, 110)
    if rng.random() < 0.25:
        phrase = [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        return (phrase * length)[:length]
    return [rng.randrange(5000) for _ in range(length)]


def hop(
    sender: Side,
    sent: list[int],
    computed: int,
    wanted: list[int],
    rng: Random,
    counts: Counts,
    planner: Planner,
) -> Side:
    """Send what one side holds to another one, and look at every slot there."""
    root = hash(SPACES[0])
    key, policy = KEYS[0], _policy(rng)
    sizes = sender.sizes
    if rng.random() < 0.5:
        sizes = {group: rng.choice(SIZES) for group in sizes}
    receiver = Side(sizes, len(wanted), rng)
    canon = chain(wanted, root)
    cached = rng.choice((0, 0, rng.randrange(len(wanted) + 1)))
    receiver.compute(wanted, canon, 0, cached, root)
    source: kvtrie.ComputedSource | kvtrie.Imported = kvtrie.COMPUTED
    if sender.exact_until < computed or sender.hops:
        source = kvtrie.Imported(exact_until=sender.exact_until, hops=sender.hops)
    raw = kvtrie.TransferManifest.from_blocks(
        kvtrie.TokenSequence(sent, SPACES[0]),
        sender.tables,
        key=key,
        num_computed=computed,
        block_size=sender.sizes,
        source=source,
    ).to_bytes()
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
    pairs: list[tuple[int, ...]] = []
    compute: list[list[int]] = [[cached, len(wanted)]] if cached < len(wanted) else []
    receiver.exact_until, receiver.hops = len(wanted), 0
    try:
        transfer = planner(
            kvtrie.TransferManifest.from_bytes(raw),
            kvtrie.TokenSequence(wanted, space),
            local_tables,
            cached=(0, cached),
            key=KEYS[1] if fault == "key" else key,
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
    for group, remote, local, start, end, delta, _, _ in pairs:
        theirs, mine = sender.sizes[group], sizes[group]
        receiver.pools[group].load(
            sender.pools[group],
            remote * theirs + (start - delta) % theirs,
            local * mine + start % mine,
            canon[start:end],
            delta,
        )
        counts["pairs, groups"] += 1
    broken = sum(receiver.compute(wanted, canon, start, end, root) for start, end in compute)
    classes = [0] * min(receiver.exact_until, len(wanted))
    classes += [1] * (len(wanted) - len(classes))
    for group, pool in receiver.pools.items():
        wrong = wrong_slots(
            pool,
            receiver.slots(group),
            wanted,
            canon,
            classes,
            [receiver.hops] * len(wanted),
            root=root,
        )
        if wrong or broken:
            raise WrongError(
                f"group {group}: {len(wrong)} wrong, {broken} read before written: {wrong[:5]}"
            )
    loaded = sum(end - start for _, _, _, start, end, _, _, _ in pairs)
    counts["tokens loaded, groups"] += loaded
    return receiver


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
    """A text is computed on one side, sent on to a second and from there to a third.

    Raises:
        WrongError: It found something, and says how to see it again.
    """
    rng = Random(seed)
    counts: Counts = collections.Counter()
    root = hash(SPACES[0])
    try:
        ids = text(rng)
        sender = Side(
            {group: rng.choice(SIZES) for group in range(rng.choice((1, 2, 3)))}, len(ids), rng
        )
        computed = rng.choice((len(ids), len(ids), rng.randrange(len(ids) + 1)))
        sender.compute(ids, chain(ids, root), 0, computed, root)
        sender.exact_until = computed
        for _ in range(2):
            wanted = edited(ids, rng)
            sender = hop(
                sender, ids, computed, wanted, rng, counts, planner or kvtrie.plan_transfer
            )
            ids, computed = wanted, len(wanted)
    except Exception as error:
        error.add_note(f"tests.pd.groups.play({seed})")
        raise
    return counts
