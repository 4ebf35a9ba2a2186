"""Hit lengths of a model with groups: kvtrie's lookup next to vLLM's `HybridKVCacheCoordinator`.

    make bench-vllm-coordinator

Both sides hold the same documents of 8,192 tokens, in blocks of 16: all blocks of the layers with
full attention, and of the other groups what vLLM keeps by default, which is what a next turn needs:
the last 512 tokens of a window, the last state. Prompts are a next turn, which hits all of a
document, and an edited history, of which 4,096 tokens are cached, but no window or state there, so
that nothing is a hit. All rows alternate the sides in one process, on one thread; figures are
medians of rounds in processor time, the spread is from the 10th to the 90th percentile.

* *lookup*: hit length and blocks of group 0, from what a request has when it arrives. vLLM has its
  block hashes by then, kvtrie a new `TokenSequence`; making either is not in the figure. vLLM
  returns the block objects of all groups, kvtrie the ids of group 0. *One prompt* is the same
  again and again, *random prompts* are of all documents.
* *plan*: kvtrie also pins the blocks of all groups, returns their ids and releases them. vLLM
  returns the ids of all groups and pins nothing.
* *from a list*: the lookup from a list of ints. vLLM's `Request` hashes its blocks, with SHA-256,
  its default, or with xxHash; kvtrie makes the sequence.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A release for other machines looks up as it would there.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from peers.harness import Effort, Side, compare, expect
from peers.ours import NAMESPACE
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from workloads.crowds import Crowd
from workloads.documents import BLOCK_SIZE, Tokens, document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from peers.harness import Row, Untyped

LENGTH: Final = 8_192
WINDOW: Final = 512
HASHES: Final = {"SHA-256": "sha256", "xxHash": "xxhash"}
KINDS: Final = {
    "full + window": ("window",),
    "full + state": ("state",),
    "full + window + state": ("window", "state"),
}
# Seeds of what follows a document.
TAILS: Final = 1 << 50
ONE_TOKEN = SamplingParams(max_tokens=1)
# What the first block is hashed with: once, because vLLM draws it at random.
init_none_hash(get_hash_fn_by_name("sha256"))


@dataclass(frozen=True)
class Prompt:
    """A prompt and how much of it both sides hit."""

    name: str
    tokens: Callable[[int], Tokens]
    hit: int


class VllmGroups:
    """vLLM's manager, with a hybrid coordinator."""

    def __init__(self, groups: tuple[str, ...], documents: Crowd, hashing: str) -> None:
        function = get_hash_fn_by_name(HASHES[hashing])
        self._hasher = get_request_block_hasher(BLOCK_SIZE, function)
        self._number = 0
        attention = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        specs: dict[str, KVCacheSpec] = {
            "full": FullAttentionSpec(**attention),
            "window": SlidingWindowSpec(**attention, sliding_window=WINDOW),
            "state": MambaSpec(
                block_size=BLOCK_SIZE,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            ),
        }
        self.manager = KVCacheManager(
            KVCacheConfig(
                # Of a window, all blocks of a request for as long as it runs.
                num_blocks=(len(documents) * 2 + 4) * (documents.length // BLOCK_SIZE + 1),
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([name], specs[name]) for name in ("full", *groups)
                ],
                prefix_cache_retention_interval=0,
            ),
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self.coordinator = self.manager.coordinator
        expect(type(self.coordinator), HybridKVCacheCoordinator, "vLLM's coordinator")
        for tokens in documents:
            self._store(tokens)

    def request(self, tokens: list[int]) -> Request:
        self._number += 1
        return Request(f"{self._number}", tokens, ONE_TOKEN, None, block_hasher=self._hasher)

    def find(self, request: Request) -> Untyped:
        return self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)

    def find_ids(self, request: Request) -> Untyped:
        blocks, found, _ = self.manager.get_computed_blocks(request)
        return blocks.get_block_ids(), found, 0

    def find_from(self, tokens: list[int]) -> Untyped:
        return self.find(self.request(tokens))

    def _store(self, tokens: Tokens) -> None:
        """Compute a document and one more token, in two steps, as a scheduler does for states."""
        request = self.request([*tokens.tolist(), 0])
        for end in (len(tokens), len(tokens) + 1):
            self.coordinator.new_step_starts()
            new = end - request.num_computed_tokens
            if self.manager.allocate_slots(request, new) is None:
                raise MemoryError("vLLM's pool is too small")  # noqa: EM101 - read by a developer
            request.num_computed_tokens = end
        self.manager.free(request)


class IndexGroups:
    """kvtrie's index, with what vLLM keeps of each document."""

    def __init__(self, groups: tuple[str, ...], documents: Crowd) -> None:
        self.groups = groups
        self._length = documents.length
        self._blocks = self._length // BLOCK_SIZE
        # Blocks that reach into the last tokens of a window.
        self._window = -(-(WINDOW - 1) // BLOCK_SIZE)
        made = {
            "window": kvtrie.Group.window(
                "window", window=WINDOW, num_blocks=len(documents) * self._window
            ),
            "state": kvtrie.Group.state("state", num_slots=len(documents)),
        }
        self.index = kvtrie.RadixIndex(
            len(documents) * self._blocks,
            BLOCK_SIZE,
            moved_runs=False,
            seed=0,
            groups=[made[name] for name in groups],
        )
        for number, tokens in enumerate(documents):
            self._store(number, tokens)

    def sequence(self, tokens: Tokens | list[int]) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(tokens, NAMESPACE)

    def lookup(self, seq: kvtrie.TokenSequence) -> Untyped:
        match = self.index.lookup(seq, keep_last=1)
        return match.blocks, match.num_tokens

    def lookup_from(self, tokens: list[int]) -> Untyped:
        return self.lookup(kvtrie.TokenSequence(tokens, NAMESPACE))

    def plan(self, seq: kvtrie.TokenSequence) -> Untyped:
        plan = self.index.plan(seq, kvtrie.EXACT_ONLY, keep_last=1)
        ids = [plan.group(name) if name == "window" else plan.state(name) for name in self.groups]
        answer = (plan.blocks, *ids), plan.num_exact
        plan.release()
        return answer

    def _store(self, number: int, tokens: Tokens) -> None:
        first = self._blocks - self._window
        offers = {
            "window": [
                ((first + block) * BLOCK_SIZE, number * self._window + block)
                for block in range(self._window)
            ],
            "state": [(self._length, number)],
        }
        self.index.insert(
            self.sequence(tokens),
            np.arange(number * self._blocks, (number + 1) * self._blocks, dtype=np.int32),
            num_computed=self._length,
            source=kvtrie.COMPUTED,
            groups={name: offers[name] for name in self.groups},
        )


def rows(effort: Effort, num_documents: int, kinds: Iterable[str]) -> Iterator[Row]:
    length = effort.of(LENGTH, LENGTH // 8)
    crowd = Crowd(num_documents * length, length)
    draw = np.random.default_rng(4)

    def turn(number: int) -> Tokens:
        return np.concatenate([crowd[number], document(TAILS + number, 100)])

    def edited(number: int) -> Tokens:
        rest = document(TAILS + number, length // 2)
        return np.concatenate([crowd[number][: length // 2], rest])

    prompts = (Prompt("a next turn", turn, length), Prompt("an edited history", edited, 0))
    for kind in kinds:
        groups = KINDS[kind]
        ours = IndexGroups(groups, crowd)
        theirs = {name: VllmGroups(groups, crowd, name) for name in HASHES}
        for prompt in prompts:
            for row in _of(ours, theirs, prompt, effort, lambda: int(draw.integers(len(crowd)))):
                yield row | {"kind": kind, "prompt": prompt.name}


def _of(
    ours: IndexGroups,
    theirs: dict[str, VllmGroups],
    prompt: Prompt,
    effort: Effort,
    drawn: Callable[[], int],
) -> Iterator[Row]:
    def our_check(_argument: object, answer: Untyped) -> None:
        expect(answer[1], prompt.hit, "kvtrie's hit")

    def their_check(_argument: object, answer: Untyped) -> None:
        expect(answer[1], prompt.hit, "vLLM's hit")

    vllm = theirs["SHA-256"]
    one = prompt.tokens(0)
    listed = one.tolist()
    request = vllm.request(listed)
    row = compare(
        Side(lambda: ours.sequence(one), ours.lookup, our_check),
        Side(lambda: request, vllm.find, their_check),
        effort,
        calls=4,
    )
    yield row | {"work": "lookup, one prompt"}
    row = compare(
        Side(lambda: ours.sequence(prompt.tokens(drawn())), ours.lookup, our_check),
        Side(lambda: vllm.request(prompt.tokens(drawn()).tolist()), vllm.find, their_check),
        effort,
        calls=4,
    )
    yield row | {"work": "lookup, random prompts"}
    if prompt.hit:
        row = compare(
            Side(lambda: ours.sequence(one), ours.plan, our_check),
            Side(lambda: request, vllm.find_ids, their_check),
            effort,
            calls=4,
        )
        yield row | {"work": "plan, one prompt"}
    for name, hashed in theirs.items():
        row = compare(
            Side(lambda: listed, ours.lookup_from, our_check),
            Side(lambda: listed, hashed.find_from, their_check),
            effort,
        )
        yield row | {"work": f"from a list, {name}"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="vLLM's coordinator next to kvtrie's groups.")
    parser.add_argument("--rounds", type=int, default=101, help="rounds of each row")
    parser.add_argument("--documents", type=int, default=122, help="documents cached")
    parser.add_argument("--kind", choices=KINDS, help="one kind of groups; all if left out")
    parser.add_argument("--quick", action="store_true", help="a few short documents, three rounds")
    options = parser.parse_args(arguments)
    num_documents = 3 if options.quick else options.documents
    print(f"{num_documents} documents cached; medians in us (10th to 90th percentile)\n")
    print("| groups | prompt | work | kvtrie | vLLM | ratio |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    kinds = [options.kind] if options.kind else KINDS
    for row in rows(Effort(rounds=options.rounds, quick=options.quick), num_documents, kinds):
        sides = " | ".join(
            f"{row[side]:.2f} ({row[f'{side}_p10']:.2f} to {row[f'{side}_p90']:.2f})"
            for side in ("kvtrie", "theirs")
        )
        what = " | ".join((row["kind"], row["prompt"], row["work"]))
        print(f"| {what} | {sides} | {row['ratio']:.1f} |", flush=True)


if __name__ == "__main__":
    # Of the whole process: not in `main`, which a test calls.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
