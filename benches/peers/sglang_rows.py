"""SGLang compared with kvtrie: every row of its Rust core, and a few of its Python tree."""

import importlib.metadata
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import torch
from workloads.chats import Chat
from workloads.crowds import Crowd
from workloads.documents import BLOCK_SIZE, Tokens, document, other_first_token, other_last_token
from workloads.requests import Requests
from workloads.trees import Tree, branching, grown, one_edge

from peers.harness import (
    Effort,
    Row,
    Side,
    Untyped,
    compare,
    expect,
    pauses,
    report,
    resident_bytes,
)
from peers.ours import COMPUTED, Blocks, Ours
from peers.sglang_cache import PYTHON, RUST, Theirs

ENGINE = "sglang"


def rows(effort: Effort) -> Iterator[Row]:
    torch.set_num_threads(1)
    for scenario in (
        _nodes,
        _lookups,
        _deep_lookups,
        _grown,
        _inserts,
        _evictions,
        _pins,
        _crowd,
        _turns,
        _short_requests,
        _python_core,
    ):
        for row in scenario(effort):
            yield report({"engine": ENGINE, "peer": RUST} | row)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("sglang", "torch")}


def _cached(effort: Effort) -> int:
    return effort.of(16_000_000, 200_000)


def _lookup_sides(
    ours: Ours,
    theirs: Theirs,
    pick: Callable[[], Tokens],
    *,
    found: int | None = None,
    from_numpy: bool = False,
) -> tuple[Side[Untyped], Side[Untyped]]:
    def our_check(query: Untyped, blocks: Untyped) -> None:
        wanted = len(query) if found is None else found
        expect(len(blocks), wanted // BLOCK_SIZE, "kvtrie's blocks")

    def their_check(key: Untyped, answer: Untyped) -> None:
        wanted = len(key) if found is None else found
        expect(len(answer[1]), wanted, "SGLang's indices")

    if from_numpy:
        our_side = Side[Untyped](pick, ours.lookup_tokens, our_check)
    else:
        our_side = Side[Untyped](lambda: ours.sequence(pick()), ours.lookup, our_check)
    return our_side, Side(lambda: theirs.key(pick()), theirs.match, their_check)


def _repeated(sides: tuple[Side[Untyped], Side[Untyped]]) -> tuple[Side[Untyped], Side[Untyped]]:
    """The sides with the peer's key made once: the query repeats, and its key is in the caches."""
    key = sides[1].prepare()
    return sides[0], Side(lambda: key, sides[1].call, sides[1].check)


def _lookups(effort: Effort) -> Iterator[Row]:
    for length in (1_024, 8_192, 102_400):
        yield from _edge_lookups(effort, effort.of(length, length // 8))


def _edge_lookups(effort: Effort, length: int) -> Iterator[Row]:
    crowd = Crowd(_cached(effort), length)
    ours, theirs = Ours(crowd.num_tokens), Theirs(crowd.num_tokens, RUST)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    work = f"lookup with ids out, {length:,} tokens in one edge"
    state = {"tokens": length, "cached": crowd.num_tokens, "goal": 10.0}
    one = crowd[len(crowd) // 2]
    sides = _repeated(_lookup_sides(ours, theirs, lambda: one))
    row = compare(*sides, effort, calls=8, warm=True)
    yield row | state | {"work": f"{work}, warm", "id": f"lookup.edge.{length}.warm"}
    sides = _lookup_sides(ours, theirs, _drawn(crowd))
    # Enough calls that the data is cold and the code is not.
    row = compare(*sides, effort, calls=min(32, max(4, (1 << 16) // length)))
    yield row | state | {"work": f"{work}, cold", "id": f"lookup.edge.{length}.cold"}
    sides = _lookup_sides(ours, theirs, lambda: one, from_numpy=True)
    row = compare(*_repeated(sides), effort, calls=8, warm=True)
    row |= state
    yield row | {
        "work": f"{work}, warm, kvtrie from a uint32 array",
        "id": f"lookup.edge.{length}.numpy",
        "goal": 6.0,
        "note": "kvtrie builds the sequence inside the clock; SGLang's key is ready",
    }
    miss = other_first_token(one)
    sides = _repeated(_lookup_sides(ours, theirs, lambda: miss, found=0))
    row = compare(*sides, effort, calls=8, warm=True)
    row |= state
    yield row | {
        "work": f"miss at token 0 of {length:,}",
        "id": f"miss.first.{length}",
        "goal": 50.0 if length >= 12_800 else None,
    }
    near = other_last_token(one)
    sides = _lookup_sides(ours, theirs, lambda: near, found=length - BLOCK_SIZE)
    row = compare(*_repeated(sides), effort, calls=8, warm=True)
    row |= state
    yield row | {
        "work": f"miss at the last token of {length:,}",
        "id": f"miss.last.{length}",
        "goal": None,
        "note": "SGLang has split its node there at the first such match",
    }


def _drawn(crowd: Crowd) -> Callable[[], Tokens]:
    """Picks members of a crowd in an order unrelated to how they were stored."""
    draw = np.random.default_rng(4)
    return lambda: crowd[int(draw.integers(len(crowd)))]


def _deep_lookups(effort: Effort) -> Iterator[Row]:
    yield from _deep_lookup(effort, "grown", "in edges of 512", grown)
    yield from _deep_lookup(
        effort, "branching", "in edges of 512 with a sibling at each", branching
    )


def _deep_lookup(
    effort: Effort, name: str, what: str, make: Callable[[int, int], Tree]
) -> Iterator[Row]:
    length = effort.of(102_400, 10_240)
    trees = [make(seed, length) for seed in range(max(2, _cached(effort) // length))]
    size = sum(tree.num_blocks for tree in trees) * BLOCK_SIZE
    ours, theirs = Ours(size), Theirs(size, RUST)
    for tree in trees:
        ours.grow(tree)
        theirs.grow(tree)
    work = f"lookup with ids out, {length:,} tokens {what}"
    state = {"tokens": length, "cached": size, "goal": 8.0}
    one = trees[len(trees) // 2].path
    sides = _repeated(_lookup_sides(ours, theirs, lambda: one))
    row = compare(*sides, effort, calls=8, warm=True)
    yield row | state | {"work": f"{work}, warm", "id": f"lookup.{name}.{length}.warm"}
    draw = np.random.default_rng(5)
    sides = _lookup_sides(ours, theirs, lambda: trees[int(draw.integers(len(trees)))].path)
    row = compare(*sides, effort, calls=4)
    yield row | state | {"work": f"{work}, cold", "id": f"lookup.{name}.{length}.cold"}


def _grown(effort: Effort) -> Iterator[Row]:
    length = effort.of(102_400, 10_240)
    steps = 4_000
    path = document(7, length + steps * BLOCK_SIZE)
    ours, theirs = Ours(len(path)), Theirs(len(path), RUST)
    ours.store(path[:length])
    theirs.store(path[:length])
    writer, reader = ours.sequence(path[:length]), ours.sequence(path[:length])
    ours.lookup(writer)
    ours.lookup(reader)
    state = {"tokens": length, "cached": length, "goal": None}
    # Both sides grow by one block per call; what a call adds is made outside the clock.
    our_step, their_step = count(length, BLOCK_SIZE), count(length, BLOCK_SIZE)
    index, room = ours.index, ours.room

    def our_new() -> tuple[int, Tokens, Untyped]:
        start = next(our_step)
        return start, path[start : start + BLOCK_SIZE], room(BLOCK_SIZE)

    def our_insert(new: tuple[int, Tokens, Untyped]) -> object:
        start, ids, blocks = new
        writer.extend(ids)
        return index.insert(
            writer, blocks, num_computed=start + BLOCK_SIZE, start=start, source=COMPUTED
        ).blocks

    def our_check(new: tuple[int, Tokens, Untyped], blocks: Untyped) -> None:
        expect(blocks.tolist(), new[2].tolist(), "kvtrie's blocks")

    # The row of indices that SGLang's scheduler holds for a request.
    held = theirs.match(theirs.key(path[:length]))[1]
    their_row = torch.cat([held, theirs.room(steps * BLOCK_SIZE)])

    def their_new() -> tuple[Untyped, torch.Tensor]:
        end = next(their_step) + BLOCK_SIZE
        return theirs.key(path[:end]), their_row[:end]

    def their_insert(new: tuple[Untyped, torch.Tensor]) -> Untyped:
        return theirs.insert(*new, held=len(new[1]) - BLOCK_SIZE)

    def their_check(new: tuple[Untyped, torch.Tensor], done: Untyped) -> None:
        expect(done.prefix_len, len(new[0]) - BLOCK_SIZE, "SGLang's prefix")

    row = compare(
        Side(our_new, our_insert, our_check),
        Side(their_new, their_insert, their_check),
        effort,
        calls=effort.of(32, 4),
        rounds=21,
    )
    row |= state
    yield row | {
        "work": f"insert one more block at {length:,} tokens, grown sequence",
        "id": "grown.insert",
        "note": "16 new ids in and the block id out; SGLang inserts the whole key again, which "
        "its scheduler does once a chunk of a prompt and at the end, not for each page",
    }
    end = next(our_step)
    begin = count(length, BLOCK_SIZE)

    def our_more() -> tuple[int, Tokens]:
        start = next(begin)
        return start, path[start : start + BLOCK_SIZE]

    def our_lookup(new: tuple[int, Tokens]) -> object:
        start, ids = new
        reader.extend(ids)
        return index.lookup(reader, start=start).blocks

    def one_block(_new: object, blocks: Untyped) -> None:
        expect(len(blocks), 1, "kvtrie's blocks")

    key = theirs.key(path[: length + BLOCK_SIZE])

    def their_blocks(_key: object, answer: Untyped) -> None:
        expect(len(answer[1]), length + BLOCK_SIZE, "SGLang's indices")

    # As many lookups as there are blocks to find, less those of the checked first round.
    calls = effort.of(32, 2)
    possible = (end - length) // BLOCK_SIZE // calls - 2
    row = compare(
        Side(our_more, our_lookup, one_block),
        Side(lambda: key, theirs.match, their_blocks),
        effort,
        calls=calls,
        rounds=min(effort.rounds, possible),
    )
    row |= state
    yield row | {
        "work": f"lookup of 16 more tokens at {length:,}, grown sequence, start=",
        "id": "grown.lookup",
        "note": "16 new ids in and the block id out; SGLang matches from the root",
    }


def _inserts(effort: Effort) -> Iterator[Row]:
    """New documents of 8k into a full cache: each insert has evicted as much."""
    for moved_runs in (False, True):
        yield from _insert(effort, moved_runs=moved_runs)


def _insert(effort: Effort, *, moved_runs: bool) -> Iterator[Row]:
    length = effort.of(8_192, 1_024)
    crowd = Crowd(_cached(effort), length)
    ours = Ours(crowd.num_tokens, moved_runs=moved_runs)
    theirs = Theirs(crowd.num_tokens, RUST)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    our_number, their_number = count(), count()
    state: Row = {"tokens": length, "cached": crowd.num_tokens}
    # One after the other, as a server does: code is in the caches, new documents are not.
    calls = effort.of(8, 2)
    with_or_without = "with" if moved_runs else "without"
    kind = "moved" if moved_runs else "plain"

    def our_fresh() -> Untyped:
        return ours.sequence(crowd.stranger(next(our_number)))

    def their_fresh() -> Untyped:
        return theirs.key(crowd.stranger(next(their_number)))

    def our_insert(new: Untyped) -> Untyped:
        return ours.index.insert(new[0], new[1], num_computed=length, source=COMPUTED).blocks

    def our_check(_new: object, blocks: Untyped) -> None:
        expect(len(blocks), length // BLOCK_SIZE, "kvtrie's blocks")

    def their_check(_new: object, done: Untyped) -> None:
        expect(done.prefix_len, 0, "SGLang's prefix")
        expect(len(theirs.cache.path_device_indices(done.last_device_node)), length, "SGLang's row")

    row = compare(
        Side(lambda: (our_fresh(), ours.room(length)), our_insert, our_check),
        Side(
            lambda: (their_fresh(), theirs.room(length)),
            lambda new: theirs.insert(*new),
            their_check,
        ),
        effort,
        calls=calls,
    )
    row |= state
    yield row | {
        "work": f"insert of {length:,} new tokens, {with_or_without} fingerprints",
        "id": f"insert.{kind}",
        "goal": None if moved_runs else 4.0,
    }

    def our_both(seq: Untyped) -> Untyped:
        blocks = ours.index.evict(length // BLOCK_SIZE)
        return ours.index.insert(seq, blocks, num_computed=length, source=COMPUTED).blocks

    def their_both(key: Untyped) -> Untyped:
        return theirs.insert(key, theirs.room(length))

    row = compare(
        Side(our_fresh, our_both, our_check),
        Side(their_fresh, their_both, their_check),
        effort,
        calls=calls,
    )
    row |= state
    yield row | {
        "work": f"evict and insert {length:,} tokens, {with_or_without} fingerprints",
        "id": f"insert.evict.{kind}",
        "goal": None,
        "kvtrie_goal": 250.0 if moved_runs else None,
    }


def _evictions(effort: Effort) -> Iterator[Row]:
    yield from _eviction(effort, RUST, effort.of(100_000, 2_000), their_rounds=300)


def _eviction(effort: Effort, core: str, leaves: int, their_rounds: int) -> Iterator[Row]:
    length = 64
    crowd = Crowd(leaves * length, length)
    ours, theirs = Ours(crowd.num_tokens), Theirs(crowd.num_tokens, core)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    our_number, their_number = count(), count()

    def our_evict(_nothing: None) -> Untyped:
        return ours.index.evict(length // BLOCK_SIZE)

    def our_check(_nothing: None, blocks: Untyped) -> None:
        expect(len(blocks), length // BLOCK_SIZE, "kvtrie's evicted blocks")

    def our_refill(_nothing: None, blocks: Untyped) -> None:
        seq = ours.sequence(crowd.stranger(next(our_number)))
        ours.index.insert(seq, blocks, num_computed=length, source=COMPUTED)

    def their_evict(_nothing: None) -> int:
        return theirs.evict(length)

    def their_check(_nothing: None, evicted: int) -> None:
        expect(evicted, length, "SGLang's evicted tokens")

    def their_refill(_nothing: None, _done: object) -> None:
        theirs.store(crowd.stranger(next(their_number)))

    row = pauses(
        Side(lambda: None, our_evict, our_check, our_refill),
        Side(lambda: None, their_evict, their_check, their_refill),
        effort,
        rounds=5_000,
        their_rounds=their_rounds,
    )
    yield row | {
        "work": f"evict one leaf of {length} tokens among {leaves:,}",
        "id": "evict.leaf" if core == RUST else "evict.leaf.python",
        "peer": core,
        "tokens": length,
        "cached": crowd.num_tokens,
        "goal": 1000.0 if core == RUST else None,
        "note": "Wall time of single calls; SGLang's freed indices go back to its allocator",
    }


def _pins(effort: Effort) -> Iterator[Row]:
    edges = effort.of(200, 20)
    tree = branching(11, edges * 512)
    size = tree.num_blocks * BLOCK_SIZE
    ours, theirs = Ours(size), Theirs(size, RUST)
    ours.grow(tree)
    theirs.grow(tree)
    seq = ours.sequence(tree.path)
    ours.lookup(seq)
    node, _ = theirs.match(theirs.key(tree.path))
    index, cache = ours.index, theirs.cache
    state = {"tokens": len(tree.path), "cached": size, "goal": 10.0}

    def our_pin(seq: Untyped) -> object:
        plan = index.plan(seq, keep_last=0)
        plan.release()
        return plan

    def our_check(_seq: object, _plan: object) -> None:
        with index.plan(seq, keep_last=0) as plan:
            expect(len(plan.blocks), len(tree.path) // BLOCK_SIZE, "kvtrie's pinned blocks")
            expect(index.stats().pinned > 0, True, "kvtrie pins")
        expect(index.stats().pinned, 0, "kvtrie's pins afterwards")

    def their_pin(node: Untyped) -> None:
        cache.unlock(cache.lock(node))

    def their_check(node: Untyped, _done: object) -> None:
        lock = cache.lock(node)
        expect(cache.protected_size(), len(tree.path), "SGLang's locked tokens")
        cache.unlock(lock)
        expect(cache.protected_size(), 0, "SGLang's locks afterwards")

    row = compare(
        Side(lambda: seq, our_pin, our_check),
        Side(lambda: node, their_pin, their_check),
        effort,
        calls=16,
        warm=True,
    )
    row |= state
    yield row | {
        "work": f"pin and release at depth {edges}",
        "id": "pin.release",
        "note": "kvtrie plans a sequence whose place is known and releases the plan, so it "
        "finds the blocks too; SGLang locks and unlocks a node that it was handed before",
    }

    def our_ids(seq: Untyped) -> Untyped:
        plan = index.plan(seq, keep_last=0)
        blocks = plan.blocks
        plan.release()
        return blocks

    def ids_check(_seq: object, blocks: Untyped) -> None:
        expect(len(blocks), len(tree.path) // BLOCK_SIZE, "kvtrie's blocks")

    def their_ids(node: Untyped) -> Untyped:
        lock = cache.lock(node)
        indices = cache.path_device_indices(node)
        cache.unlock(lock)
        return indices

    def their_ids_check(_node: object, indices: Untyped) -> None:
        expect(len(indices), len(tree.path), "SGLang's indices")

    row = compare(
        Side(lambda: seq, our_ids, ids_check),
        Side(lambda: node, their_ids, their_ids_check),
        effort,
        calls=8,
        warm=True,
    )
    row |= state
    yield row | {
        "work": f"pin, ids out, release at depth {edges}",
        "id": "pin.ids.release",
        "goal": None,
    }


def _crowd(effort: Effort) -> Iterator[Row]:
    length = 64
    leaves = effort.of(100_000, 2_000)
    crowd = Crowd(leaves * length, length)
    ours, theirs = Ours(crowd.num_tokens), Theirs(crowd.num_tokens, RUST)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    state = {"tokens": length, "cached": crowd.num_tokens, "goal": None}
    row = compare(*_lookup_sides(ours, theirs, _drawn(crowd)), effort, calls=64)
    row |= state
    yield row | {
        "work": f"lookup of {length} tokens among {leaves:,} leaves, cold",
        "id": "crowd.lookup",
    }
    our_number, their_number = count(), count()

    def our_new() -> Untyped:
        return ours.sequence(crowd.stranger(next(our_number))), ours.room(length)

    def our_insert(new: Untyped) -> Untyped:
        return ours.index.insert(new[0], new[1], num_computed=length, source=COMPUTED).blocks

    def our_check(new: Untyped, blocks: Untyped) -> None:
        expect(blocks.tolist(), new[1].tolist(), "kvtrie's blocks")

    def their_new() -> Untyped:
        return theirs.key(crowd.stranger(next(their_number))), theirs.room(length)

    def their_check(_new: object, done: Untyped) -> None:
        expect(done.prefix_len, 0, "SGLang's prefix")

    row = compare(
        Side(our_new, our_insert, our_check),
        Side(their_new, lambda new: theirs.insert(*new), their_check),
        effort,
        calls=16,
        rounds=51,
    )
    row |= state
    yield row | {"work": f"insert of {length} tokens among {leaves:,} leaves", "id": "crowd.insert"}


def _turns(effort: Effort) -> Iterator[Row]:
    for length in (8_192, 102_400):
        yield from _turn(effort, RUST, effort.of(length, length // 8), _cached(effort))


def _turn(effort: Effort, core: str, length: int, cached: int) -> Iterator[Row]:
    """Turns of warm chats in a full cache: a turn evicts blocks of unrelated documents."""
    turn = 512
    chats = [
        Chat(number, length, turn) for number in range(effort.of(8 if length > 50_000 else 32, 2))
    ]
    size = cached + len(chats) * length
    crowd = Crowd(cached, effort.of(8_192, 1_024))
    ours, theirs = Ours(size), Theirs(size, core)
    for side in (ours, theirs):
        side.store_all(crowd)
        side.store_all(chat.after(0) for chat in chats)
    our_turn, their_turn = count(len(chats)), count(len(chats))

    def tokens(numbers: Iterator[int]) -> Tokens:
        number = next(numbers)
        return chats[number % len(chats)].after(number // len(chats))

    def our_check(seq: Untyped, answer: Untyped) -> None:
        expect(answer[0], len(seq) - turn, "tokens that kvtrie found")
        expect(len(answer[1]), len(seq) // BLOCK_SIZE, "kvtrie's block table")

    def their_check(key: Untyped, answer: Untyped) -> None:
        expect(answer[0], len(key) - turn, "tokens that SGLang found")
        expect(len(answer[1]), len(key), "SGLang's indices")
        theirs.expect_balance()

    row = compare(
        Side(lambda: ours.sequence(tokens(our_turn)), ours.turn, our_check),
        Side(lambda: theirs.key(tokens(their_turn)), theirs.turn, their_check),
        effort,
        rounds=min(effort.rounds, 64),
    )
    name = "turn" if core == RUST else "turn.python"
    yield row | {
        "work": f"chat turn of {turn} tokens on {length:,}: lookup, pin, evict, insert, release",
        "id": f"{name}.{length}",
        "peer": core,
        "tokens": length,
        "cached": size,
        "goal": None,
        "note": "SGLang evicts a whole document at a time, so most of its turns evict nothing",
    }


def _short_requests(effort: Effort) -> Iterator[Row]:
    requests = Requests(effort.of(256, 32))
    crowd = Crowd(_cached(effort), effort.of(8_192, 1_024))
    size = crowd.num_tokens + requests.count * requests.length
    ours, theirs = Ours(size), Theirs(size, RUST)
    for side in (ours, theirs):
        side.store_all(crowd)
        side.store_all(requests.cached(number) for number in range(requests.count))
    state = {"tokens": requests.length, "cached": size, "goal": 5.0}
    cached = requests.length - requests.fresh

    def prompts(step: int) -> list[Tokens]:
        return [requests.prompt(number, step) for number in range(requests.count)]

    def their_lookups(keys: list[Untyped]) -> list[torch.Tensor]:
        match = theirs.match
        return [match(key)[1] for key in keys]

    def our_lookups(sequences: list[Untyped]) -> list[Blocks]:
        lookup = ours.lookup
        return [lookup(seq) for seq in sequences]

    def our_found(_sequences: object, answer: list[Blocks]) -> None:
        expect([len(ids) for ids in answer], [cached // BLOCK_SIZE] * requests.count, "our blocks")

    def their_found(_keys: object, answer: list[Untyped]) -> None:
        expect([len(indices) for indices in answer], [cached] * requests.count, "SGLang's indices")

    keys = [theirs.key(tokens) for tokens in prompts(0)]
    row = compare(
        Side(lambda: [ours.sequence(tokens) for tokens in prompts(0)], our_lookups, our_found),
        Side(lambda: keys, their_lookups, their_found),
        effort,
    )
    row |= state
    yield row | {
        "work": f"{requests.count} lookups of {requests.length} tokens",
        "id": "many.lookup",
    }
    our_step, their_step = count(1), count(1)

    def their_turns(keys: list[Untyped]) -> list[Untyped]:
        turn = theirs.turn
        return [turn(key) for key in keys]

    def our_check(_sequences: object, answer: Untyped) -> None:
        expect(len(answer[0]), requests.count * cached // BLOCK_SIZE, "kvtrie's blocks in place")
        expect(len(answer[1]), requests.count * requests.fresh // BLOCK_SIZE, "kvtrie's new blocks")

    def their_check(_keys: object, answer: list[Untyped]) -> None:
        expect([found for found, _ in answer], [cached] * requests.count, "SGLang's hits")
        theirs.expect_balance()

    row = compare(
        Side(
            lambda: [ours.sequence(tokens) for tokens in prompts(next(our_step))],
            ours.step,
            our_check,
        ),
        Side(
            lambda: [theirs.key(tokens) for tokens in prompts(next(their_step))],
            their_turns,
            their_check,
        ),
        effort,
        rounds=min(effort.rounds, 51),
    )
    row |= state
    yield row | {
        "work": f"step of {requests.count} requests of {requests.length} tokens, "
        f"{requests.fresh} of them new",
        "id": "many.step",
    }


def _nodes(effort: Effort) -> Iterator[Row]:
    """What a node with one page costs, by the growth of the process; measured before all else."""
    leaves = effort.of(200_000, 20_000)
    crowd = Crowd(leaves * BLOCK_SIZE, BLOCK_SIZE)
    before = resident_bytes()
    theirs = Theirs(crowd.num_tokens, RUST)
    theirs.store_all(crowd)
    their_bytes = (resident_bytes() - before) / leaves
    before = resident_bytes()
    ours = Ours(crowd.num_tokens)
    ours.store_all(crowd)
    our_bytes = (resident_bytes() - before) / leaves
    expect(ours.index.stats().indexed, leaves, "kvtrie's blocks")
    expect(theirs.cache.evictable_size(), crowd.num_tokens, "SGLang's tokens")
    yield {
        "work": f"memory of a leaf with one block of {BLOCK_SIZE} tokens, of {leaves:,}",
        "id": "memory.node",
        "unit": "bytes",
        "kvtrie": our_bytes,
        "theirs": their_bytes,
        "ratio": their_bytes / our_bytes,
        "cached": crowd.num_tokens,
        "goal": None,
        "note": "Growth of the process's resident memory, allocator included; tokens and ids too",
    }


def _python_core(effort: Effort) -> Iterator[Row]:
    """The Python tree on the works in which the two cores differ."""
    length = effort.of(102_400, 10_240)
    yield from _python_lookup(effort, "edge", "in one edge", one_edge(3, length))
    yield from _python_lookup(effort, "grown", "in edges of 512", grown(3, length))
    yield from _eviction(effort, PYTHON, effort.of(100_000, 2_000), their_rounds=30)
    yield from _turn(effort, PYTHON, effort.of(8_192, 1_024), effort.of(1_000_000, 50_000))


def _python_lookup(effort: Effort, name: str, what: str, tree: Tree) -> Iterator[Row]:
    length = len(tree.path)
    ours, theirs = Ours(length), Theirs(length, PYTHON)
    ours.grow(tree)
    theirs.grow(tree)
    sides = _repeated(_lookup_sides(ours, theirs, lambda: tree.path))
    row = compare(*sides, effort, rounds=31, warm=True)
    yield row | {
        "work": f"lookup with ids out, {length:,} tokens {what}, warm",
        "id": f"lookup.{name}.{length}.python",
        "peer": PYTHON,
        "tokens": length,
        "cached": length,
        "goal": None,
    }
