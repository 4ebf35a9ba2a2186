"""Prefix hits of chats whose replies the model spelled otherwise than the encoder does.

    python benches/python/splice.py TOKENIZER... [--conversations 1000]

A tokenizer is a Hugging Face folder. Of each conversation's replies, one token in ten is sampled in
smaller pieces; the next prompt is the text of the chat template. Prompts are looked up in an index
that has all that was computed, in blocks of 16: as encoded, and as `TurnTracker.splice` makes them.
In every second conversation replies begin with reasoning that the client does not send back.

Tokens are counted; nothing is timed, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvtrie
from kvtrie.calibrate import texts
from kvtrie.router import PromptSplicer, TurnTracker

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK_SIZE = 16
TURNS = 4
SPACE = kvtrie.Namespace(model="bench", salt=kvtrie.SHARED)
# For a tokenizer without a chat template of its own.
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content ~ eos_token }}"
    "{%- else -%}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)


@dataclass
class Found:
    """Over all prompts after the first of a conversation, in tokens and prompts."""

    prompts: int = 0
    tokens: int = 0
    plain_hits: int = 0
    spliced_hits: int = 0
    equal_texts: int = 0
    replies: int = 0
    respelled: int = 0


def tokenizer_of(path: Path) -> Any:  # noqa: ANN401 - transformers has no types for them
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def sampled(splicer: PromptSplicer, text: str, source: random.Random) -> npt.NDArray[np.uint32]:
    """Ids of a text, one word in ten in smaller pieces; the same text when decoded."""
    ids: list[int] = []
    for one in splicer.encode(text).tolist():
        piece = splicer.decode(np.array([one], np.uint32))
        parts = [one]
        if len(piece) > 2 and source.random() < 0.1:
            at = source.randrange(1, len(piece))
            halves = np.concatenate([splicer.encode(piece[:at]), splicer.encode(piece[at:])])
            if splicer.decode(halves) == piece:
                parts = halves.tolist()
        ids += parts
    return np.array(ids, np.uint32)


def hit(index: kvtrie.RadixIndex, ids: npt.NDArray[np.uint32]) -> int:
    return index.lookup(kvtrie.TokenSequence(ids, SPACE), keep_last=1).num_tokens


def converse(
    tokenizer: Any,  # noqa: ANN401 - transformers has no types for them
    splicer: PromptSplicer,
    seed: int,
    found: Found,
) -> None:
    source = random.Random(seed)
    places = texts.places(source, TURNS)
    index = kvtrie.RadixIndex(4096, BLOCK_SIZE)
    free = kvtrie.BlockAllocator(4096)
    tracker = TurnTracker()
    messages: list[dict[str, str]] = []
    for turn, place in enumerate(places):
        messages.append({"role": "user", "content": f"{place.note} {place.question(source)}"})
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
        ids = tracker.splice(text, splicer, SPACE, conversation="chat").ids
        if turn:
            plain = splicer.encode(text)
            found.prompts += 1
            found.tokens += len(plain)
            found.plain_hits += hit(index, plain)
            found.spliced_hits += hit(index, ids)
            found.equal_texts += splicer.decode(ids) == splicer.decode(plain)
        musing = f"{texts.musing(source, 3)}\n\n" if seed % 2 else ""
        reply = sampled(splicer, musing + place.answer, source)
        found.replies += 1
        found.respelled += not np.array_equal(reply, splicer.encode(musing + place.answer))
        messages.append({"role": "assistant", "content": place.answer})
        whole = np.concatenate([ids, reply, [tokenizer.eos_token_id]]).astype(np.uint32)
        history = kvtrie.TokenSequence(whole, SPACE)
        tracker.keep(history, num_computed=len(whole) - 1, conversation="chat")
        known = index.lookup(history).num_tokens // BLOCK_SIZE
        num = (len(whole) - 1) // BLOCK_SIZE
        table = np.concatenate([index.lookup(history).blocks, free.allocate(num - known)])
        index.insert(history, table, num_computed=num * BLOCK_SIZE, source=kvtrie.COMPUTED)


def measured(path: Path, conversations: int) -> Found:
    tokenizer = tokenizer_of(path)
    splicer = PromptSplicer(tokenizer)
    found = Found()
    for seed in range(conversations):
        converse(tokenizer, splicer, seed, found)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokenizers", nargs="+", type=Path)
    parser.add_argument("--conversations", type=int, default=1000)
    options = parser.parse_args(argv)
    columns = "tokenizer | prompts | same text | respelled replies | prefix hit, encoded | spliced"
    print(f"| {columns} |")
    print("|---|--:|--:|--:|--:|--:|")
    for path in options.tokenizers:
        found = measured(path, options.conversations)
        hits = [one / found.tokens for one in (found.plain_hits, found.spliced_hits)]
        print(
            f"| {path.name} | {found.prompts:,} | {found.equal_texts / found.prompts:.1%} | "
            f"{found.respelled / found.replies:.1%} | {hits[0]:.1%} | {hits[1]:.1%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
