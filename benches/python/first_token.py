"""Time to the first token of a real model whose context was edited, by what is reused and repaired.

A conversation of about 4,400 tokens drops six passages of reasoning (as W11). ``exact`` reuses
the exact prefix, which ends before the first of them; ``rotated`` everything that moved; the others
also compute a share of the moved tokens, chosen in the time shown. Times are CPU time of one
thread, so a busy machine does not change them much. The text is this repository's documentation:
times depend on lengths, not on words.

    python benches/python/first_token.py [--model DIRECTORY] [--tokens 4400]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import kvtrie
from kvtrie.engines.transformers import Generator

ROOT = Path(__file__).resolve().parents[2]
NUM_PASSAGES, PASSAGE, HEAD, QUESTION = 6, 150, 40, 31
ROTATED = kvtrie.ReusePolicy(scope="namespace")
POLICIES = {
    "exact": kvtrie.EXACT_ONLY,
    "rotated": ROTATED,
    **{
        f"{name} {share}": kvtrie.ReusePolicy(scope="namespace", recompute_share=share, repair=name)
        for share in (0.2, 0.32)
        for name in ("fronts", "ngrams", "probe", "question")
    },
}


def texts(generator: Generator, count: int) -> tuple[list[int], list[int]]:
    """What is cached, with the passages, and the prompt, without them."""
    words = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = list(generator.encode(words))
    head, ids = ids[:HEAD], ids[HEAD:]
    turns = (count - HEAD - QUESTION) // NUM_PASSAGES
    cached, prompt = list(head), list(head)
    for _ in range(NUM_PASSAGES):
        reasoning, turn, ids = ids[:PASSAGE], ids[PASSAGE : PASSAGE + turns], ids[PASSAGE + turns :]
        cached += reasoning + turn
        prompt += turn
    return cached, prompt + ids[:QUESTION]


def main() -> None:
    """Print one line per policy: median of the first token's time, and what was computed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="target/models/smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=4400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="*", default=list(POLICIES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = Generator.from_pretrained(
        given.model, num_blocks=1200, dtype=given.dtype, gate="unchecked", records="model"
    )
    cached, prompt = texts(generator, given.tokens)
    generator.generate(cached, max_new_tokens=1)
    # The check of sparse passes is made once, and is no part of a first token.
    generator.generate(
        [*cached[:64], *cached[80:160]], max_new_tokens=1, policy=POLICIES["rotated"]
    )
    seq = kvtrie.TokenSequence(prompt, generator.namespace())
    baseline = 0.0
    print(f"{'policy':>14}  first token  sooner  computed")
    for name in given.only:
        seconds, computed = [], 0
        for _ in range(given.repeat):
            start = time.process_time()
            done = generator.generate(prompt, max_new_tokens=1, policy=POLICIES[name])
            seconds.append(time.process_time() - start)
            computed = done.usage.computed
            own = (HEAD // 16 * 16, len(prompt))
            generator.allocator.free(generator.index.remove_spans(seq, [own]).freed)
        median = statistics.median(seconds)
        baseline = baseline or median
        print(
            f"{name:>14}  {median:9.3f} s  {baseline / median:5.1f}x  "
            f"{computed / len(prompt):8.1%}",
            flush=True,
        )
    print(f"{len(prompt)} tokens; {generator.repair_counts}")


if __name__ == "__main__":
    main()
