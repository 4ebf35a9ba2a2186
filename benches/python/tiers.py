"""What a store of runs finds of prompts after agent runs, next to a tier under chained hashes.

    python benches/python/tiers.py [--conversations 24] [--apart 20]

Agents of W11 have three turns of 13 requests each: 12 that call a tool, and one that answers. When
the user speaks again, the template has dropped the reasoning of the turn before. Conversations
begin at random within `--apart` s times their number; pauses are random, 4 s for a tool and 40 s
for a user on average. Within a turn the engine's pool has what was computed before. Between turns
it has lost all, and a tier is asked. Shares are of the prompts of users that speak again.

* `store`: `kvtrie.store.SpanStore` on host memory, under the default policy, with real bytes. A
  prompt is loaded by `SpanLoader` and placed in a pool, rotated; V, which does not rotate, and K of
  exact tokens are compared with what was computed. At the close of a turn its runs are stored, but
  not reasoning, with the marks that the connectors give them. So many blocks are bytes of their KV,
  and headers, seals and marks count. The KV is of one layer, 1 KiB per token.
* `SmolLM2`: the same store and the same bytes, where the budget counts what each value would have
  in the layout of SmolLM2-135M in bfloat16: 30 layers, 22.5 KiB per token.
* `by cost`: as `SmolLM2`, but a run stays the longer after its last use, the more it costs per byte
  to compute again (GreedyDual-Size, Cao and Irani 1997). `in work` is the share of the work that
  computing all of these prompts takes: a token at position p costs 1 + p / 3,456, as attention to
  6 times the hidden size of 576 costs as much as the rest of a layer.
* `last use`: the ceiling of a store that does not know the future. It keeps single tokens by
  content, all that the next prompt has again, and nothing besides KV. What was written or found
  last stays.
* `times used`: as `last use`, but what was found most often stays, and of that what was used last.
* `any order`: the ceiling of all stores. As `last use`, but it knows when each conversation goes
  on, and which end: what is needed last leaves. While a turn runs, its tokens take no room.
* `chained hashes`: a tier of blocks of 16 tokens, each named by all tokens up to its end. It stores
  every full block of every request, reasoning too; the block least recently used leaves, and the
  end of a prompt before its beginning. Its bytes are those of KV alone.

`of last use` is the share of that ceiling which a store finds. MiB are the most that was kept at a
time, and all that was written, of 1 KiB per token; a run or block that has left is written again.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workloads.clients import close_runs
from workloads.shapes import AgentRun
from workloads.writer import Writer

import kvtrie
from kvtrie.pool.kv_pool import KVPool
from kvtrie.store import HostBackend, SpanLoader, SpanShape, SpanStore, StoreKey, rows_of
from kvtrie.store.budget import Budget
from kvtrie.store.contexts import with_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, Literal

    from workloads.history import Conversation, Span

    from kvtrie.store import SpanRows, SpanRun

    Order = Literal["last use", "times used", "any order"]

BLOCK_SIZE = 16
# What a model of few layers takes per token: a header of a run is as large as one token.
LAYOUT = kvtrie.KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=128, dtype="float32", block_size=BLOCK_SIZE
)
ROPE = kvtrie.RopeSpec(
    layers=(kvtrie.rope.Rotary(tuple(10_000 ** (-at / 64) for at in range(64))),), head_dim=128
)
SHAPE = SpanShape.of(LAYOUT)
# Three KV heads of 64 channels, two bytes each.
SMOLLM2 = SpanShape(num_layers=30, num_kv_heads=3, k_bytes=384, v_bytes=384, kv_dtype="bfloat16")
# The position at which attention costs as much as the rest of a layer.
AS_MUCH = 6 * 576
NAMESPACE = kvtrie.Namespace(model="tiers", kv_dtype=LAYOUT.kv_dtype, salt="tenant")
POLICY = kvtrie.ReusePolicy()
BUDGETS = (8_000, 16_000, 32_000, None)
# Seconds.
APART, TOOL_PAUSE, USER_PAUSE = 20.0, 4.0, 40.0
WAIT = 60.0


class Request(NamedTuple):
    """One request: `prompt` tokens of a turn's sequence, the first or the last of its turn."""

    conversation: int
    turn: int
    prompt: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Traffic:
    """Conversations, each with its turns, and all requests in order of time."""

    turns: list[list[Conversation]]
    requests: list[Request]

    @property
    def asked(self) -> int:
        """Prompt tokens of users that speak again."""
        return sum(one.prompt for one in self.requests if one.is_first and one.turn)

    @property
    def work(self) -> float:
        """What it takes to compute them."""
        return sum(work(0, one.prompt) for one in self.requests if one.is_first and one.turn)

    @property
    def num_live(self) -> float:
        """Conversations that have begun and not ended, on average over the requests."""
        at: dict[int, list[int]] = {}
        for number, one in enumerate(self.requests):
            at.setdefault(one.conversation, []).append(number)
        return sum(one[-1] - one[0] + 1 for one in at.values()) / len(self.requests)


@dataclass
class Found:
    """Tokens of users' prompts that a tier has found, and what it takes to compute them.

    And bytes: written in all, kept at most.
    """

    tokens: int = 0
    work: float = 0.0
    stored_bytes: int = 0
    most_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)


def traffic(
    conversations: int, turns: int, seed: int, scale: float, apart: float = APART
) -> Traffic:
    shape = AgentRun().scaled(scale)
    build = close_runs("qwen3", turns=turns)
    talks = [build(Writer(seed, number), shape) for number in range(conversations)]
    rng = random.Random(seed)
    timed = []
    for number, talk in enumerate(talks):
        now = rng.uniform(0, apart * conversations)
        for turn, one in enumerate(talk):
            # A reply begins with its reasoning.
            prompts = [span.start for span in one.spans if span.kind == "reasoning"]
            for at, prompt in enumerate(prompts):
                is_last = at == len(prompts) - 1
                timed.append((now, Request(number, turn, prompt, at == 0, is_last)))
                now += rng.expovariate(1 / (USER_PAUSE if is_last else TOOL_PAUSE))
    return Traffic(talks, [one for _, one in sorted(timed)])


# --- the store -------------------------------------------------------------------------------


def work(start: int, end: int) -> float:
    """What it takes to compute tokens, in tokens at position 0."""
    return end - start + (end**2 - start**2) / 2 / AS_MUCH


class ByCost(Budget):
    """Runs leave by what it costs to compute them again per byte, and by last use."""

    def __init__(self) -> None:
        super().__init__()
        # Work per byte of each run that was put.
        self.costs: dict[str, float] = {}
        self._credit: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        # The credit of what has left last, and how many uses there were.
        self._least, self._uses = 0.0, 0

    def _touch(self, name: str, tenant: str) -> None:
        super()._touch(name, tenant)
        self._uses += 1
        self._credit[name] = (self._least + self.costs[name], self._uses)
        heapq.heappush(self._heap, (*self._credit[name], name))

    def remove(self, name: str) -> None:
        super().remove(name)
        self._credit.pop(name, None)

    def leaving(self, tenant: str | None) -> str | None:
        del tenant  # there is one
        while self._heap:
            credit, use, name = self._heap[0]
            if self._credit.get(name) == (credit, use):
                self._least = credit
                return name
            heapq.heappop(self._heap)
        return None


class CountedStore(SpanStore):
    """A store of small rows, whose budget counts the bytes of another geometry.

    Args:
        counted: That geometry.
        max_bytes: Bytes in it.
        by_cost: Whether runs leave by cost.
    """

    def __init__(self, counted: SpanShape, max_bytes: int, *, by_cost: bool = False) -> None:
        # Small rows take no more, and what the store says of itself is not of its budget.
        backend = HostBackend(max_bytes + 1024)
        super().__init__(backend, StoreKey(bytes(32)), NAMESPACE, SHAPE, max_bytes=max_bytes)
        self.counted = counted
        if by_cost:
            self._budget = ByCost()
        self._size = 0
        self.stored_bytes = 0

    def put(self, run: SpanRun, slots: SpanRows, **labels: Any) -> bool:  # noqa: ANN401 - those of `SpanStore.put`
        is_stored = super().put(run, slots, **labels)
        if is_stored:
            self.stored_bytes += self._size
            exactness = self._budget.exactness(run.name)
            self._budget.add(run.name, num_bytes=self._size, written=0, exactness=exactness)
        return is_stored

    def _make_room(self, run: SpanRun, size: int) -> bool:
        # Header and marks are the same in both.
        own = SHAPE.num_bytes(run.num_tokens)
        self._size = size - own + self.counted.num_bytes(run.num_tokens)
        if isinstance(self._budget, ByCost):
            self._budget.costs[run.name] = work(run.start, run.end) / self._size
        return super()._make_room(run, self._size)


def store_of_runs(
    asked: Traffic, budget: int | None, counted: SpanShape = SHAPE, *, by_cost: bool = False
) -> Found:
    max_bytes = 1 << 40 if budget is None else budget * BLOCK_SIZE * counted.token_bytes
    store = CountedStore(counted, max_bytes, by_cost=by_cost)
    loader = SpanLoader(store)
    longest = max(len(one.cached) for talk in asked.turns for one in talk)
    num_blocks = longest // BLOCK_SIZE + 1
    pool = KVPool(LAYOUT, ROPE, num_blocks=num_blocks)
    table = np.arange(num_blocks)
    found = Found()
    running: dict[int, Engine] = {}
    for request in asked.requests:
        number, talk = request.conversation, asked.turns[request.conversation]
        if request.is_first:
            engine = Engine(store, loader, pool, table, f"conversation {number}")
            spans = talk[request.turn - 1].prompt_spans if request.turn else ()
            ranges = engine.ask(talk[request.turn].cached[: request.prompt], spans)
            if request.turn:
                found.tokens += sum(end - start for start, end in ranges)
                found.work += sum(work(start, end) for start, end in ranges)
            running[number] = engine
        if request.is_last:
            running.pop(number).close(talk[request.turn])
            found.most_bytes = max(found.most_bytes, store.num_bytes)
    loader.close()
    found.counts = store.counts()
    found.stored_bytes = store.stored_bytes
    return found


class Engine:
    """One turn of a conversation in an engine whose pool has nothing of it at the start."""

    def __init__(
        self,
        store: CountedStore,
        loader: SpanLoader,
        pool: KVPool,
        table: np.ndarray,
        session: str,
    ) -> None:
        self._store, self._loader, self._pool, self._table = store, loader, pool, table
        self._session = session
        self._hops: list[tuple[int, int, int]] = []

    def ask(self, ids: np.ndarray, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Load a prompt, compute the rest, and return what was loaded."""
        seq = kvtrie.TokenSequence(ids, NAMESPACE)
        index = kvtrie.RadixIndex(num_blocks=len(self._table), block_size=BLOCK_SIZE)
        with index.plan(seq, POLICY, keep_last=1) as plan:
            runs = self._store.runs(seq, borders(spans, len(ids)))
            load = self._loader.start(plan, seq, runs, POLICY, session=self._session)
            if not load.wait(WAIT):
                msg = f"tiers: a load had not ended after {WAIT:.0f} s"
                raise RuntimeError(msg)
            placed = load.place(self._pool, self._table)
        for one in placed.spans:
            k, v = self._pool.gather(self._table, one.start, one.end)
            want_k, want_v = computed(ids, one.start, one.end)
            if (
                v is None
                or not torch.equal(v, want_v)
                or (one.is_exact and not torch.equal(k, want_k))
            ):
                msg = f"tiers: tokens [{one.start}, {one.end}) have other KV than was stored"
                raise RuntimeError(msg)
            if not one.is_exact:
                self._hops.append((one.start, one.end, one.hops))
        for start, end in placed.compute:
            self._pool.scatter(*computed(ids, start, end), self._table, start)
        self._prompt = len(ids)
        # The pool is another conversation's until this turn ends.
        self._kv = self._pool.gather(self._table, 0, len(ids))
        return [(one.start, one.end) for one in placed.spans]

    def close(self, turn: Conversation) -> None:
        """Compute the rest of the turn, and store its runs."""
        ids = turn.cached[: turn.num_computed]
        self._pool.scatter(*self._kv, self._table, 0)
        self._pool.scatter(*computed(ids, self._prompt, len(ids)), self._table, self._prompt)
        seq = kvtrie.TokenSequence(ids, NAMESPACE)
        tags = [kvtrie.Span(s.start, min(s.end, len(ids)), s.kind) for s in turn.spans]
        session = self._store.session_of(NAMESPACE, self._session)
        runs = self._store.runs(seq, borders(turn.spans, len(ids)), tags)
        marks = self._store.marks(seq, [at for run in runs for at in (run.start, run.end)])
        # As the connectors do it: which runs have marks is a matter of what is written.
        wanted = []
        for run in runs:
            exact, hops = self._label(run)
            is_known = self._store.is_known(run, exact_until=exact, hops=hops)
            if "reasoning" not in run.kinds and not is_known:
                wanted.append((run, exact, hops))
        sizes = [self._store.counted.num_bytes(run.num_tokens) for run, _, _ in wanted]
        has_marks = with_marks(sizes, 0 if marks is None else len(marks.tobytes()))
        for (run, exact, hops), is_marked in zip(wanted, has_marks, strict=True):
            self._store.put(
                run,
                rows_of(self._pool, self._table, run.start, run.end),
                exact_until=exact,
                hops=hops,
                policy=POLICY,
                session=session,
                marks=marks if is_marked else None,
            )

    def _label(self, run: SpanRun) -> tuple[int, int | None]:
        """How many tokens of a run are exact, and the hops of the others."""
        first = min((start for start, _, _ in self._hops), default=run.end)
        exact = min(max(first - run.start, 0), run.num_tokens)
        hops = [h for start, end, h in self._hops if start < run.end and run.start < end]
        return exact, max(hops, default=0) if exact < run.num_tokens else None


def borders(spans: Sequence[Span], length: int) -> list[int]:
    return [at for one in spans for at in (one.start, one.end) if at <= length]


def computed(ids: np.ndarray, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """KV that is known by token and position; V by the token alone."""
    token = torch.from_numpy(ids[start:end].astype(np.float32))[None, :, None, None]
    position = torch.arange(start, end, dtype=torch.float32)[None, :, None, None]
    channel = torch.arange(LAYOUT.head_dim, dtype=torch.float32)
    return token + channel + position / 8, token - channel


# --- what others could find ------------------------------------------------------------------


class Group(NamedTuple):
    """Tokens of a conversation that the same turns have."""

    conversation: int
    first: int
    last: int


def groups(asked: Traffic) -> dict[Group, int]:
    """How many tokens each turn computes that the next prompt has again, by when they are gone."""
    found: dict[Group, int] = {}
    for number, talk in enumerate(asked.turns):
        born = np.zeros(0, np.int64)
        for turn, one in enumerate(talk):
            cached = np.full(len(one.cached), turn)
            cached[: len(born)] = born
            stays = np.zeros(len(cached), bool)
            born = np.full(len(one.prompt), turn + 1)
            for kept in one.kept:
                stays[kept.old_start : kept.old_end] = True
                born[kept.start : kept.end] = cached[kept.old_start : kept.old_end]
            is_last = turn == len(talk) - 1
            for last, some in ((turn, cached[~stays]), (turn + 1, cached[stays & is_last])):
                for first, count in zip(*np.unique(some, return_counts=True), strict=True):
                    # What is dropped at once, as reasoning is, no store keeps.
                    if first < last:
                        found[Group(number, int(first), last)] = int(count)
    return found


def by_content(asked: Traffic, budget: int | None, order: Order) -> Found:
    """A store of single tokens, from the close of one turn to the next."""
    knows = order == "any order"
    room = sys.maxsize if budget is None else budget * BLOCK_SIZE
    sizes = groups(asked)
    starts = {(r.conversation, r.turn): at for at, r in enumerate(asked.requests) if r.is_first}
    closed: dict[int, int] = {}
    used: dict[Group, int] = {}
    times: dict[Group, int] = {}
    kept: dict[Group, int] = {}
    found = Found()

    def leaves(group: Group) -> tuple[int, int]:
        """The group with the most leaves first."""
        number = group.conversation
        if order == "last use":
            return -used[group], 0
        if order == "times used":
            return -times.get(group, 0), -used[group]
        return starts.get((number, closed[number] + 1), sys.maxsize), 0

    for at, request in enumerate(asked.requests):
        mine = [group for group in sizes if group.conversation == request.conversation]
        if request.is_first:
            for group in mine:
                if group.last >= request.turn and kept.get(group):
                    found.tokens += kept[group]
                    used[group] = at
                    times[group] = times.get(group, 0) + 1
            if knows:
                # Until the turn ends the engine has them.
                for group in mine:
                    kept.pop(group, None)
        if request.is_last:
            closed[request.conversation] = request.turn
            for group in mine:
                new = sizes[group] - kept.get(group, 0)
                if group.first <= request.turn < group.last and new:
                    found.stored_bytes += new * SHAPE.token_bytes
                    kept[group], used[group] = sizes[group], at
            over = sum(kept.values()) - room
            for group in sorted(kept, key=leaves, reverse=True):
                gone = max(0, min(over, kept[group]))
                kept[group] -= gone
                over -= gone
            found.most_bytes = max(found.most_bytes, sum(kept.values()) * SHAPE.token_bytes)
    return found


def chained(asked: Traffic, budget: int | None) -> Found:
    """Blocks under chained hashes; the least recently used leaves."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = Found()
    block_bytes = BLOCK_SIZE * SHAPE.token_bytes
    for request in asked.requests:
        ids = asked.turns[request.conversation][request.turn].cached
        names = list(chain(ids))
        prompt = names[: request.prompt // BLOCK_SIZE]
        if request.is_first and request.turn:
            hits = next((at for at, one in enumerate(prompt) if one not in kept), len(prompt))
            found.tokens += hits * BLOCK_SIZE
        blocks = names if request.is_last else prompt
        found.stored_bytes += sum(one not in kept for one in blocks) * block_bytes
        for one in reversed(blocks):
            kept[one] = None
            kept.move_to_end(one)
        while budget is not None and len(kept) > budget:
            kept.popitem(last=False)
        found.most_bytes = max(found.most_bytes, len(kept) * block_bytes)
    return found


def chain(ids: np.ndarray) -> Iterator[int]:
    """A name for each full block: of its tokens and all before."""
    name = 0
    whole = ids[: len(ids) // BLOCK_SIZE * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
    for block in whole:
        name = hash((name, block.tobytes()))
        yield name


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--apart", type=float, default=APART, help="seconds")
    parser.add_argument("--budgets", nargs="+", type=_budget, default=BUDGETS, help="blocks")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    asked = traffic(
        options.conversations, options.turns, options.seed, options.scale, options.apart
    )
    print(
        f"{len(asked.requests)} requests; prompts of {asked.asked:,} tokens after agent runs; "
        f"{asked.num_live:.1f} conversations at a time\n"
    )
    print(HEAD)
    for budget in options.budgets:
        print(row(budget, asked, measured(asked, budget)), flush=True)


def measured(asked: Traffic, budget: int | None) -> dict[str, Found]:
    """What each tier of so many blocks finds."""
    return {
        "store": store_of_runs(asked, budget),
        "SmolLM2": store_of_runs(asked, budget, SMOLLM2),
        "by cost": store_of_runs(asked, budget, SMOLLM2, by_cost=True),
        "any order": by_content(asked, budget, "any order"),
        "last use": by_content(asked, budget, "last use"),
        "times used": by_content(asked, budget, "times used"),
        "chained hashes": chained(asked, budget),
    }


STORES = ("store", "SmolLM2")
HEAD = f"""\
| blocks | store | of last use | SmolLM2 | of last use | in work | by cost | in work | last use \
| times used | any order | chained hashes | MiB, store | MiB, chained |
{"| ---: " * 14}|"""


def row(budget: int | None, asked: Traffic, found: dict[str, Found]) -> str:
    """A row in Markdown."""
    share = {name: f"{one.tokens / asked.asked:.1%}" for name, one in found.items()}
    in_work = {name: f"{found[name].work / asked.work:.1%}" for name in ("SmolLM2", "by cost")}
    most = max(1, found["last use"].tokens)
    stores = [(share[name], f"{found[name].tokens / most:.1%}") for name in STORES]
    sizes = [
        f"{found[name].most_bytes / 2**20:,.0f}, {found[name].stored_bytes / 2**20:,.0f}"
        for name in ("store", "chained hashes")
    ]
    cells = [
        "unlimited" if budget is None else f"{budget:,}",
        *(cell for one in stores for cell in one),
        *(in_work["SmolLM2"], share["by cost"], in_work["by cost"]),
        *(share[one] for one in ("last use", "times used", "any order", "chained hashes")),
        *sizes,
    ]
    return f"| {' | '.join(cells)} |"


def _budget(text: str) -> int | None:
    return None if text == "unlimited" else int(text)


if __name__ == "__main__":
    main()
