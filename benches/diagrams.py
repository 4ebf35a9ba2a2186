"""Diagrams of what the index does, each drawn from what a real index returned."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from drawing import (
    BLACK,
    CLASSES,
    COMPUTED,
    EXACT,
    FAINT,
    GREY,
    LIGHT,
    MOVED,
    MOVED_LINE,
    Part,
    arrow,
    bar,
    box,
    canvas,
    label,
    legend,
    minus,
)
from matplotlib.axes import Axes
from workloads.history import Conversation
from workloads.registry import WORKLOADS

import kvtrie

SPACE = kvtrie.Namespace(model="picture", salt=kvtrie.SHARED)
POLICY = kvtrie.ReusePolicy(scope="namespace")

Segment = tuple[int, int, int, str]


def _segments(plan: kvtrie.ReusePlan) -> list[Segment]:
    return [
        (int(one["start"]), int(one["end"]), int(one["delta"]), list(CLASSES)[int(one["class"])])
        for one in plan.segments
    ]


def edit() -> Axes:
    """A chat turn with reasoning, and the next prompt, from which the template dropped it."""
    turn = WORKLOADS["W01"].build(system=500, question=120, reasoning=1_000, answer=900)
    segments = _planned(turn, block_size=16)
    counts = dict.fromkeys(CLASSES, 0)
    for start, end, _, kind in segments:
        counts[kind] += end - start
    exact, fresh = counts["exact"], counts["compute"]

    axes = canvas(9.0, 3.1, (0.165, 0.0, 0.83, 1.0))
    axes.set_xlim(-10, len(turn.cached) + 10)
    axes.set_ylim(-1.05, 2.5)
    label(axes, -40, 2, f"cached: turn 1\n{len(turn.cached):,} tokens")
    bar(axes, 2, _spans(turn))
    label(axes, -40, 1, f"turn 2, prefix cache\n{len(turn.prompt) - exact:,} computed")
    parts = [Part(0, exact, EXACT, "exact")]
    bar(axes, 1, [*parts, Part(exact, len(turn.prompt), COMPUTED, "computed")])
    label(axes, -40, 0, f"turn 2, kvtrie\n{fresh:,} computed")
    for start, end, delta, kind in segments:
        if end > exact:
            word = f"moved by {minus(delta)} tokens" if kind == "approximate" else ""
            parts.append(Part(start, end, CLASSES[kind][0], word if end - start > 200 else ""))
        if kind == "approximate":
            middle = (start + end) / 2
            arrow(axes, (middle - delta, 1.69), (middle, 0.31), MOVED_LINE, -0.12)
    bar(axes, 0, parts)
    legend(axes, dict(CLASSES.values()))
    return axes


def _planned(turn: Conversation, block_size: int) -> list[Segment]:
    cached = kvtrie.TokenSequence(turn.cached, SPACE)
    blocks = turn.num_computed // block_size
    index = kvtrie.RadixIndex(num_blocks=blocks, block_size=block_size, seed=0)
    whole = blocks * block_size
    index.insert(cached, np.arange(blocks), num_computed=whole, source=kvtrie.COMPUTED)
    with index.plan(kvtrie.TokenSequence(turn.prompt, SPACE), POLICY, keep_last=1) as plan:
        return _segments(plan)


def _spans(turn: Conversation) -> list[Part]:
    parts = [Part(0, len(turn.cached), LIGHT)]
    for start, end, kind in turn.spans:
        is_gone = kind == "reasoning"
        colour, ink = (GREY, "white") if is_gone else (LIGHT, BLACK)
        word = f"{kind}: dropped by the template" if is_gone else kind
        parts.append(Part(start, end, colour, word if end - start > 250 else "", ink))
    return parts


@dataclass
class World:
    """A pool of one block, so that counts of the index say which state the block is in."""

    index: kvtrie.RadixIndex = field(
        default_factory=lambda: kvtrie.RadixIndex(num_blocks=1, block_size=4, seed=0)
    )
    pool: kvtrie.BlockAllocator = field(default_factory=lambda: kvtrie.BlockAllocator(1))
    seq: kvtrie.TokenSequence = field(
        default_factory=lambda: kvtrie.TokenSequence([1, 2, 3, 4, 5], SPACE)
    )
    plans: list[kvtrie.ReusePlan] = field(default_factory=list)

    def state(self) -> str:
        stats = self.index.stats()
        found = [
            name
            for name, is_so in (
                ("quarantined", stats.quarantined),
                ("pinned", stats.indexed and stats.pinned),
                ("indexed", stats.indexed and not stats.pinned),
                ("waiting", stats.waiting),
                ("condemned", stats.condemned and not stats.waiting),
            )
            if is_so
        ]
        if len(found) > 1:
            text = f"states: a block is in {found} at once"
            raise RuntimeError(text)
        return found[0] if found else "free" if self.pool.num_free else "held"

    def hold(self) -> None:
        self.plans.append(self.index.plan(self.seq))

    def release(self) -> None:
        while self.plans:
            self.plans.pop().release()

    def insert(self) -> None:
        self.index.insert(self.seq, [0], num_computed=4, source=kvtrie.COMPUTED)


CALLS: dict[str, Callable[[World], object]] = {
    "allocate": lambda world: world.pool.allocate(1),
    "free": lambda world: world.pool.free([0]),
    "insert": World.insert,
    "plan": World.hold,
    "release": World.release,
    "evict": lambda world: world.index.evict(1),
    "discard": lambda world: world.index.discard([0]),
    "remove_spans": lambda world: world.index.remove_spans(world.seq, [(0, 4)]),
    "drop": lambda world: world.index.drop(SPACE),
    "reset": lambda world: world.index.reset(),
    "take_freed": lambda world: world.index.take_freed(),
}

# How to get a block into each state. Before `allocate` the engine has no block to call with.
REACHED = {
    "free": [],
    "held": ["allocate"],
    "indexed": ["allocate", "insert"],
    "pinned": ["allocate", "insert", "plan"],
    "condemned": ["allocate", "insert", "plan", "discard"],
    "waiting": ["allocate", "insert", "plan", "discard", "release"],
}
REFUSED = (kvtrie.OutOfBlocksError, ValueError)


def transitions() -> dict[tuple[str, str], list[str]]:
    """Every call in every state: the calls that lead from one state to another."""
    found: dict[tuple[str, str], list[str]] = {}
    for start, steps in REACHED.items():
        for name, call in CALLS.items():
            world = World()
            for step in steps:
                CALLS[step](world)
            if world.state() != start:
                text = f"states: {', '.join(steps)} lead to {world.state()}, not to {start}"
                raise RuntimeError(text)
            if start == "free" and name != "allocate":
                continue
            try:
                call(world)
            except REFUSED:
                continue
            if world.state() != start:
                found.setdefault((start, world.state()), []).append(name)
    return found


def _quarantines() -> None:
    """Check that quarantine leads to its own state from all states but free."""
    for start, steps in REACHED.items():
        world = World()
        for step in steps:
            CALLS[step](world)
        if start != "free":
            world.index.quarantine([0])
            world.release()
            if world.state() != "quarantined":
                text = f"states: a {start} block is {world.state()} after quarantine and release"
                raise RuntimeError(text)


# Where each state is drawn, and how.
PLACES = {
    "free": (0.0, 2.0),
    "held": (2.2, 2.0),
    "indexed": (5.2, 2.0),
    "pinned": (7.8, 2.0),
    "condemned": (7.8, 0.3),
    "waiting": (2.2, 0.3),
    "quarantined": (0.0, 0.3),
}
BOXES = {
    "free": Part(0, 0, LIGHT, "free", BLACK),
    "held": Part(0, 0, GREY, "held\nby the engine"),
    "indexed": Part(0, 0, EXACT, "indexed"),
    "pinned": Part(0, 0, EXACT, "indexed,\npinned by a plan"),
    "condemned": Part(0, 0, COMPUTED, "condemned:\nbytes must stay"),
    "waiting": Part(0, 0, GREY, "waiting\nto be collected"),
    "quarantined": Part(0, 0, COMPUTED, "quarantined"),
}
SIZE = (1.5, 0.62)
# Of each arrow: start and end as parts of the box (x, y), and where its words are.
ARROWS = {
    ("free", "held"): ((1, 0.5), (-1, 0.5), (1.1, 2.27)),
    ("held", "free"): ((-1, -0.5), (1, -0.5), (1.1, 1.73)),
    ("held", "indexed"): ((1, 0.5), (-1, 0.5), (3.7, 2.27)),
    ("indexed", "held"): ((-1, -0.5), (1, -0.5), (3.7, 1.55)),
    ("indexed", "pinned"): ((1, 0.5), (-1, 0.5), (6.5, 2.27)),
    ("pinned", "indexed"): ((-1, -0.5), (1, -0.5), (6.5, 1.73)),
    ("pinned", "condemned"): ((0, -1), (0, 1), (6.75, 1.15)),
    ("condemned", "waiting"): ((-1, 0), (1, 0), (5.0, 0.45)),
    ("waiting", "held"): ((0, 1), (0, -1), (2.95, 1.15)),
}


def states() -> Axes:
    """The states of a block and the calls that lead from one to another."""
    found = transitions()
    _quarantines()
    if found.keys() != ARROWS.keys():
        text = f"states: the calls lead along {sorted(found)}, the picture has {sorted(ARROWS)}"
        raise RuntimeError(text)
    axes = canvas(9.0, 3.2, (0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-0.95, 8.75)
    axes.set_ylim(-0.2, 2.6)
    for name, part in BOXES.items():
        box(axes, *PLACES[name], SIZE, part)
    for (start, end), (out, into, at) in ARROWS.items():
        arrow(axes, _edge(start, out), _edge(end, into))
        names = found[start, end]
        lines = [", ".join(names[i : i + 2]) for i in range(0, len(names), 2)]
        label(axes, *at, ",\n".join(lines), at="center")
    arrow(axes, (0.0, 1.0), (0.0, 0.61))
    words = "quarantine, once held;\nif it is pinned, at\nthe last release"
    label(axes, 0.0, 1.27, words, at="center")
    return axes


def _edge(name: str, part: tuple[float, float]) -> tuple[float, float]:
    (x, y), (width, height) = PLACES[name], SIZE
    return x + part[0] * width / 2, y + part[1] * height / 2


@dataclass(frozen=True)
class Candidate:
    """A longest common run of the prompt and a conversation, and its place in both."""

    conversation: int
    start: int
    end: int
    source: int


# Numbers of tokens. A conversation is its parts, one after another; head and tail are document 3.
LENGTHS = {"system": 10, "document 1": 16, "document 2": 14, "head": 5, "tail": 9, "note": 8}
LENGTHS |= {"other system": 6, "greeting": 7, "question": 8}
CONVERSATIONS = (
    ("system", "document 1", "document 2"),
    ("other system", "document 2", "head", "tail"),
    ("greeting", "tail", "note"),
)
PROMPT = ("system", "document 2", "head", "tail", "note", "document 1", "question")
MIN_RUN = 8


def _tokens(parts: tuple[str, ...]) -> list[int]:
    firsts = {name: 100 * number for number, name in enumerate(LENGTHS, 1)}
    return [firsts[name] + i for name in parts for i in range(LENGTHS[name])]


def _shown() -> list[tuple[str, int]]:
    sizes = LENGTHS | {"document 3": LENGTHS["head"] + LENGTHS["tail"]}
    names = ["document 3" if name == "head" else name for name in PROMPT if name != "tail"]
    return [(name, sizes[name]) for name in names]


def _candidates(prompt: list[int]) -> list[Candidate]:
    """Every longest run of at least `MIN_RUN` tokens, found by comparing all with all."""
    found = []
    for number, parts in enumerate(CONVERSATIONS):
        cached = _tokens(parts)
        for shift in range(1 - len(cached), len(prompt)):
            equal = [
                0 <= at - shift < len(cached) and cached[at - shift] == token
                for at, token in enumerate(prompt)
            ]
            edges = [at for at, (a, b) in enumerate(pairwise([False, *equal, False])) if a != b]
            found += [
                Candidate(number, start, end, start - shift)
                for start, end in zip(edges[::2], edges[1::2], strict=True)
                if end - start >= MIN_RUN
            ]
    return found


def _chosen(candidates: list[Candidate], segment: Segment, previous: Candidate | None) -> Candidate:
    """The candidate of a segment: of those with its first token, the one in order goes first.

    Then the one that reaches furthest. A run after `previous` in one conversation is in order.
    """
    start, end, delta, _ = segment
    with_it = [one for one in candidates if one.start <= start and start + MIN_RUN <= one.end]

    def key(one: Candidate) -> tuple[bool, int]:
        is_same = previous is not None and one.conversation == previous.conversation
        is_after = previous is not None and one.end - one.start + one.source > previous.source
        return is_same and is_after, one.end

    (taken,) = (one for one in with_it if one.start - one.source == delta)
    if key(taken) != max(map(key, with_it)) or taken.end != end:
        text = f"cover: {segment} is neither in order nor the run that reaches furthest: {with_it}"
        raise RuntimeError(text)
    return taken


def cover() -> Axes:
    prompt = _tokens(PROMPT)
    index = kvtrie.RadixIndex(num_blocks=64, block_size=2, min_run=MIN_RUN, seed=0)
    next_block = 0
    for parts in CONVERSATIONS:
        seq = kvtrie.TokenSequence(_tokens(parts), SPACE)
        blocks = np.arange(next_block, next_block + len(seq) // 2)
        index.insert(seq, blocks, num_computed=2 * len(blocks), source=kvtrie.COMPUTED)
        next_block += len(blocks)
    with index.plan(kvtrie.TokenSequence(prompt, SPACE), POLICY) as plan:
        segments = _segments(plan)
    candidates = _candidates(prompt)
    taken: list[tuple[Segment, Candidate]] = []
    for segment in segments:
        if segment[3] != "compute":
            previous = taken[-1][1] if taken else None
            taken.append((segment, _chosen(candidates, segment, previous)))

    axes = canvas(9.0, 3.7, (0.145, 0.0, 0.85, 1.0))
    axes.set_xlim(-0.3, len(prompt) + 0.3)
    axes.set_ylim(-1.0, 4.5)
    names = ["the plan", *(f"conversation {n}" for n in (3, 2, 1)), "prompt"]
    for row, name in enumerate(names):
        label(axes, -0.8, row, name)
    at = 0
    for name, length in _shown():
        bar(axes, 4, [Part(at, at + length, LIGHT, name, BLACK)])
        at += length
    for one in candidates:
        row = 3 - one.conversation
        bar(axes, row, [Part(one.start, one.end, LIGHT)])
        for (start, end, _, kind), run in taken:
            if run == one:
                bar(axes, row, [Part(start, end, CLASSES[kind][0])])
        first = min((part[0] for part, run in taken if run == one), default=one.end)
        # In the part that is not taken, if there is one.
        middle, ink = (one.start + first) / 2, BLACK
        if first == one.start:
            middle, ink = (one.start + one.end) / 2, "white"
        words = f"at {one.source}: {one.end - one.start} tokens"
        axes.text(middle, row, words, ha="center", va="center", color=ink, fontsize=8.5)
    for start, end, delta, kind in segments:
        word = {"exact": "exact", "compute": "computed"}.get(kind, f"moved {minus(delta)}")
        bar(axes, 0, [Part(start, end, CLASSES[kind][0], word)])
        axes.plot([start, start], [-0.31, 3.69], ls=":", lw=0.9, color=FAINT, zorder=0)
    colours = {colour: text.partition(":")[0] for colour, text in CLASSES.values()}
    colours[LIGHT] = "cached, not taken"
    legend(axes, colours, columns=4)
    return axes


# Each path of the tree by its own blocks: the block before its first, and the row of the drawing.
PATHS = {
    "system": (None, [0, 1], 1.0),
    "chat A": (1, [2, 3, 4, 5, 6], 2.0),
    "another answer": (3, [7, 8], 1.0),
    "chat B": (1, [9, 10, 11, 12], 0.0),
}


ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")


def _block(number: int) -> list[int]:
    return [100 * number + i for i in range(1, 5)]


def _path(last: int) -> list[int]:
    for after, blocks, _ in PATHS.values():
        if last in blocks:
            own = blocks[: blocks.index(last) + 1]
            return own if after is None else _path(after) + own
    raise KeyError(last)


def _sequence(blocks: list[int], extra: int = 0) -> kvtrie.TokenSequence:
    ids = [token for number in blocks for token in _block(number)]
    return kvtrie.TokenSequence([*ids, *range(9_000, 9_000 + extra)], SPACE)


def pins() -> Axes:
    """A tree with two plans: what they pin, what that keeps, and what `evict` takes."""
    index = kvtrie.RadixIndex(num_blocks=16, block_size=4, min_run=8, seed=0)
    for _, blocks, _ in PATHS.values():
        path = _path(blocks[-1])
        index.insert(_sequence(path), path, num_computed=4 * len(path), source=kvtrie.COMPUTED)
    first = index.plan(_sequence(_path(4), extra=6))
    moved = [9_100, 9_101, *_block(10), *_block(11), 9_102]
    second = index.plan(kvtrie.TokenSequence(moved, SPACE), POLICY)
    in_place, sources = first.blocks.tolist(), second.source_blocks.tolist()
    count, pinned = index.num_evictable, index.stats().pinned
    order = index.evict(index.num_blocks).tolist()
    index.check()
    first.release()
    second.release()
    every = sorted(block for _, blocks, _ in PATHS.values() for block in blocks)
    kept = [block for block in every if block not in {*in_place, *sources, *order}]
    if len(order) != count or len({*in_place, *sources}) != pinned:
        text = f"pins: {order} left, {count} could; {in_place} and {sources}, {pinned} pinned"
        raise RuntimeError(text)

    axes = canvas(9.0, 3.3, (0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-0.5, 7.3)
    axes.set_ylim(-0.95, 2.75)
    colours = dict.fromkeys(in_place, EXACT) | dict.fromkeys(sources, MOVED)
    colours |= dict.fromkeys(kept, GREY) | dict.fromkeys(order, LIGHT)
    places: dict[int, tuple[float, float]] = {}
    for after, blocks, row in PATHS.values():
        for block in blocks:
            above = after if block == blocks[0] else block - 1
            places[block] = (0.0 if above is None else places[above][0] + 1, row)
            if above is not None:
                axes.plot(*zip(places[above], places[block], strict=True), color=FAINT, zorder=0)
    for block, (x, y) in places.items():
        ink = BLACK if block in order else "white"
        word = f"block {block}"
        if block in order:
            word += f"\nevicted {ORDINALS[order.index(block)]}"
        box(axes, x, y, (0.84, 0.5), Part(0, 0, colours[block], word, ink))
    for name, (after, blocks, row) in PATHS.items():
        x = places[blocks[-1]][0]
        if after is not None:
            label(axes, x + 0.5, row, name, at="left")
    label(axes, 0.5, 1.42, "system prompt", at="center")
    label(axes, places[in_place[-1]][0], 2.42, "the path of plan 1 ends", at="center")
    middle = sum(places[block][0] for block in sources) / len(sources)
    label(axes, middle, -0.42, "plan 2", at="center")
    words = {EXACT: "pinned: in place", MOVED: "pinned: source of a move"}
    words |= {GREY: "kept: above a pinned block", LIGHT: f"num_evictable: {count}"}
    legend(axes, words, columns=4)
    return axes
