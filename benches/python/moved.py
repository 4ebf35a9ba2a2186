"""What it costs to find moved runs, also in texts that are hard to search.

`python benches/python/moved.py` prints and records it. A round is one plan with all its outputs and
its release, from a new `TokenSequence`; the figure is the median.

* *W11 agent.close* is the prompt of an agent's run of which all reasoning was dropped.
* *Nothing to find*: tokens that are cached nowhere; of recorded text (`lmcache_agent.tar.gz`), what
  other sessions do not share in runs of 16.
* *Near misses*: runs of 15 cached tokens, one short of `min_run`, with an unknown token between. Of
  a run's windows of eight tokens every ninth is kept, so a window is found in as many places only
  where a run has nine times as many.
* *Repetitive* texts: one token, a period of 2 or 17 tokens, a book twice. Eight sequences of a text
  are cached, each after its own head, and the prompt is the text after a new head.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import BLOCK_SIZE, QUICK, sequence
from workloads.ceiling import Ceiling, coverage
from workloads.documents import VOCABULARY, Tokens, document
from workloads.populations import population
from workloads.registry import WORKLOADS, named

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POLICY = kvtrie.ReusePolicy(scope="namespace")
MIN_RUN = 16
ROUNDS = 3 if QUICK else 201
CACHED = 60_000 if QUICK else 1_000_000
# Cached tokens of the index in which prompts of agent.close are planned.
POPULATIONS = (60_000,) if QUICK else (1_000_000, 10_000_000)
PROMPT = 5_000 if QUICK else 20_000
LONG = 10_000 if QUICK else 100_000
REPETITIVE = 4_096 if QUICK else 32_768
COPIES = 8
PERIODS = (1, 2, 17)
# Places of each run that is one token too short; the last gives each kept window 64.
PLACES = (1, 64, 64 * (MIN_RUN - 7))
# Seeds apart from those of other benchmarks.
SEEDS = 1 << 60

_PIECES = re.compile(r" ?[A-Za-z]{1,6}|\d{1,3}| ?[^\sA-Za-z\d]{1,3}|\s+")


@dataclass(frozen=True)
class Planned:
    blocks: int
    segments: np.ndarray[tuple[int], np.dtype[np.void]]
    gaps: int
    sources: int
    dropped: int


def planned(index: kvtrie.RadixIndex, seq: kvtrie.TokenSequence) -> Planned:
    """Plan a prompt, read all outputs, release."""
    plan = index.plan(seq, POLICY)
    answer = Planned(
        plan.blocks.size,
        plan.segments,
        plan.gaps.size,
        plan.source_blocks.size,
        plan.candidates_dropped,
    )
    plan.release()
    return answer


def filled(texts: Iterator[Tokens] | Sequence[Tokens], num_tokens: int) -> kvtrie.RadixIndex:
    """An index with the whole blocks of the texts."""
    index = kvtrie.RadixIndex(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, min_run=MIN_RUN, seed=0)
    pool = kvtrie.BlockAllocator(num_tokens // BLOCK_SIZE + 1)
    for ids in texts:
        blocks = pool.allocate(len(ids) // BLOCK_SIZE)
        done = index.insert(sequence(ids), blocks, num_computed=len(ids), source=kvtrie.COMPUTED)
        pool.free(done.duplicates)
    return index


def row(work: str, seconds: Sequence[float], tokens: int, **notes: object) -> figures.Row:
    """One row of the table."""
    p10, p90 = np.percentile(seconds, [10, 90]) * 1e6
    figure = {
        "kvtrie": statistics.median(seconds) * 1e6,
        "kvtrie_p10": float(p10),
        "kvtrie_p90": float(p90),
        "ns_per_token": statistics.median(seconds) * 1e9 / tokens,
    }
    short = {key: float(f"{value:.4g}") for key, value in figure.items()}
    return {"work": work, "unit": "us", **short, "rounds": len(seconds), "tokens": tokens, **notes}


def plans(
    work: str, index: kvtrie.RadixIndex, prompts: Sequence[Tokens], **notes: object
) -> figures.Row:
    """Time plans of prompts in turn."""
    seconds = []
    dropped = planned(index, sequence(prompts[0])).dropped
    for ids in itertools.islice(itertools.cycle(prompts), ROUNDS):
        seq = sequence(ids)
        began = perf_counter()
        planned(index, seq)
        seconds.append(perf_counter() - began)
    tokens = round(statistics.mean(map(len, prompts)))
    return row(work, seconds, tokens, candidates_dropped=dropped, **notes)


def agent_runs() -> Iterator[figures.Row]:
    for cached in POPULATIONS:
        made = population(
            WORKLOADS["W11"],
            conversations=20 if QUICK else cached // 5_000,
            cached_tokens=cached,
            prompt_tokens=PROMPT,
            asked=2 if QUICK else 8,
        )
        texts = [each.cached[: each.num_computed] for each in made.conversations]
        index = filled(texts, made.num_cached)
        prompts = [each.prompt for each in made.asked]
        # Conversations share no text, so those that ask determine the ceiling.
        ceiling = Ceiling(texts[: len(prompts)], block_size=BLOCK_SIZE)
        shares = [
            coverage(planned(index, sequence(ids)).segments, ceiling.of(ids, keep_last=1))
            for ids in prompts
        ]
        notes = {"cached": cached, "coverage": min(shares)}
        name = f"plan of {PROMPT:,} tokens of W11 with {cached:,} cached"
        yield plans(f"{name}, warm", index, prompts[:1], **notes)
        yield plans(f"{name}, prompts in turn", index, prompts, **notes)
        stats = index.stats()
        yield {
            "work": f"memory of W11, {len(texts):,} conversations, {cached:,} tokens cached",
            "unit": "bytes per token",
            "kvtrie": float(f"{stats.bytes / (stats.indexed * BLOCK_SIZE):.4g}"),
        }


def strangers() -> Iterator[figures.Row]:
    each = CACHED // 200
    index = filled([document(SEEDS + number, each) for number in range(200)], CACHED)
    prompts = [document(SEEDS - 1 - number, LONG) for number in range(4)]
    expect_nothing(index, prompts)
    yield plans(
        f"plan of {LONG:,} tokens with nothing to find with {CACHED:,} cached",
        index,
        prompts,
        cached=CACHED,
    )


def expect_nothing(index: kvtrie.RadixIndex, prompts: Sequence[Tokens]) -> None:
    """Raise if a plan finds a moved run."""
    for ids in prompts:
        segments = planned(index, sequence(ids)).segments
        if (segments["class"] == 1).any():
            message = f"moved: {segments[segments['class'] == 1][:4]} were found, not nothing"
            raise RuntimeError(message)


def recorded(path: Path) -> Iterator[figures.Row]:
    """A prompt of recorded text of which nothing is cached, in an index of other recorded text."""
    sessions = list(tokenised(path))
    # The prompt comes from the longest session; all others are cached.
    asked = max(sessions, key=lambda texts: sum(map(len, texts)))
    texts = [ids for session in sessions if session is not asked for ids in session]
    index = filled(texts, sum(map(len, texts)))
    cached = index.stats().indexed * BLOCK_SIZE
    ceiling = Ceiling(texts, block_size=BLOCK_SIZE, min_run=MIN_RUN)
    ids = np.concatenate(asked)
    while (matched := ceiling.of(ids).matched).any():
        ids = ids[~matched]
    prompt = np.resize(ids, LONG)
    # Where the text is repeated, the seam may match cached text by chance.
    while (matched := ceiling.of(prompt).matched).any():
        prompt = np.resize(prompt[~matched], LONG)
    expect_nothing(index, [prompt])
    yield plans(
        f"plan of {LONG:,} tokens of recorded text with nothing to find",
        index,
        [prompt],
        cached=cached,
        distinct=min(len(ids), LONG),
    )


def tokenised(path: Path) -> Iterator[list[Tokens]]:
    """The token ids of each session, one array per request: what was sent and what came back."""
    names: dict[str, int] = {}
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            lines = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            if lines is None:
                continue
            session = []
            for line in lines:
                request = json.loads(line)
                text = f"{request['input']}{request['output']}"
                pieces = _PIECES.findall(text)
                session.append(
                    np.array(
                        [names.setdefault(piece, len(names)) for piece in pieces], dtype=np.uint32
                    )
                )
            if session:
                yield session


def near_misses() -> Iterator[figures.Row]:
    for places in PLACES:
        run = MIN_RUN - 1
        count = max(1, CACHED // (MIN_RUN * places))
        runs = document(SEEDS + places, count * run).reshape(count, run)
        # Each copy of all runs has its own order, with an unknown token after each run.
        rng = np.random.default_rng(places)
        copies = [
            with_strangers(runs[rng.permutation(count)], VOCABULARY + 2 * number)
            for number in range(places)
        ]
        text = np.concatenate(copies)
        index = filled(list(np.array_split(text, 200)), len(text))
        prompts = [
            with_strangers(runs[rng.integers(0, count, LONG // MIN_RUN)], VOCABULARY + 1)
            for _ in range(4)
        ]
        expect_nothing(index, prompts)
        yield plans(
            f"plan of {LONG:,} tokens in runs of {run} that are cached in {places} places each",
            index,
            prompts,
            cached=len(text),
            places=places,
        )


def with_strangers(runs: Tokens, stranger: int) -> Tokens:
    strange = np.arange(len(runs), dtype=np.uint32) * np.uint32(4096) + np.uint32(stranger)
    return np.concatenate([runs, strange[:, None]], axis=1).ravel()


def repetitive() -> Iterator[figures.Row]:
    length = REPETITIVE
    half = document(SEEDS + 99, length // 2)
    texts: dict[str, Callable[[int], Tokens]] = {
        "random text": lambda number: document(SEEDS + 100 + number, length)
    }
    for period in PERIODS:
        once = document(SEEDS + 200 + period, period)
        name = "one token" if period == 1 else f"a period of {period} tokens"
        texts[name] = lambda _number, once=once: np.resize(once, length)  # type: ignore[misc] # mypy gives a default no type
    texts["a book twice"] = lambda _number: np.concatenate([half, half])
    for name, text in texts.items():
        heads = [document(SEEDS + 300 + number, MIN_RUN) for number in range(COPIES + 1)]
        cached = [np.concatenate([heads[number], text(number)]) for number in range(COPIES)]
        num_tokens = sum(map(len, cached))
        prompt = np.concatenate([heads[COPIES], text(0)])
        seconds = []
        for _ in range(max(3, ROUNDS // 10)):
            index = kvtrie.RadixIndex(num_tokens // BLOCK_SIZE, BLOCK_SIZE, min_run=MIN_RUN, seed=0)
            seqs = [sequence(ids) for ids in cached]
            each = len(cached[0]) // BLOCK_SIZE
            began = perf_counter()
            for number, seq in enumerate(seqs):
                ids = np.arange(number * each, (number + 1) * each, dtype=np.int32)
                index.insert(seq, ids, num_computed=len(seq), source=kvtrie.COMPUTED)
            # The first plan does the work that inserts have deferred.
            index.plan(sequence(heads[0]), POLICY).release()
            seconds.append(perf_counter() - began)
        yield row(f"insert {COPIES} sequences of {length:,} tokens: {name}", seconds, num_tokens)
        yield {
            "work": f"memory of {COPIES} sequences of {length:,} tokens: {name}",
            "unit": "bytes per token",
            "kvtrie": float(f"{index.stats().bytes / num_tokens:.4g}"),
        }
        yield plans(f"plan of {length:,} tokens: {name}", index, [prompt])
        if name == "a book twice":
            index = filled([np.concatenate([heads[0], half])], num_tokens)
            yield plans(f"plan of {length:,} tokens: {name}, cached once", index, [prompt])


def main(arguments: list[str] | None = None) -> None:
    default = Path(__file__).resolve().parents[3] / "shared" / "traces" / "lmcache_agent.tar.gz"
    parser = argparse.ArgumentParser(description="What it costs to find moved runs.")
    parser.add_argument("--text", type=Path, default=default, help="archive of recorded text")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options = parser.parse_args(arguments)
    groups = [agent_runs(), strangers(), near_misses(), repetitive()]
    if options.text.is_file():
        groups.insert(2, recorded(options.text))
    else:
        print(f"moved: skipped recorded text: there is no {options.text.name} in the traces folder")
    rows = []
    gc.disable()
    try:
        for figure in itertools.chain(*groups):
            rows.append(figure)
            dropped = figure.get("candidates_dropped")
            print(
                f"{named(figure['work']):<116}{figure['kvtrie']:>12,.1f} {figure['unit']}"
                + (f"{figure['ns_per_token']:>9,.1f} ns per token" if "tokens" in figure else "")
                + (f", dropped {dropped:,}" if dropped else ""),
                flush=True,
            )
    finally:
        gc.enable()
    if not options.dry_run:
        names = ("kvtrie", "numpy")
        figures.record("moved", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
