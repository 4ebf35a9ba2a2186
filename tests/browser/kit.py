"""A small index with all that a page shows, a log, and pages of them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import kvtrie
from kvtrie.cli.app import app
from kvtrie.record import Finished, Recorder, RecordOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPACE = kvtrie.Namespace(model="example@1", salt="the tenant's secret")
OTHER = kvtrie.Namespace(model="example@1", salt="another secret")
KINDS = ("system", "user", "reasoning", "answer")
BLOCK = 8


def words(count: int, seed: int, low: int = 1000) -> list[int]:
    return Random(seed).choices(range(low, low + 20_000), k=count)


def small(
    words: Callable[[int, int], list[int]] = words,
) -> tuple[kvtrie.RadixIndex, list[int]]:
    """An index with exact, approximate, dead blocks and a hole; and a prompt that was edited.

    Args:
        words: So many tokens of one of many texts.
    """
    index = kvtrie.RadixIndex(512, BLOCK, seed=1, pool_id=b"example")
    free = iter(range(512))
    system = words(64, 1)
    first = [*system, *words(40, 2), *words(96, 3), *words(56, 4)]
    spans = [
        kvtrie.Span(0, 64, "system"),
        kvtrie.Span(64, 104, "user"),
        kvtrie.Span(104, 200, "reasoning"),
        kvtrie.Span(200, 256, "answer"),
    ]

    def put(tokens: list[int], session: str, spans: list[kvtrie.Span]) -> None:
        seq = kvtrie.TokenSequence(tokens, SPACE)
        with index.plan(seq, kvtrie.ReusePolicy(), session=session, keep_last=0) as plan:
            table = [*plan.blocks.tolist(), *(next(free) for _ in range(plan.num_new_blocks))]
            index.insert(
                seq, table, num_computed=len(seq), source=plan, spans=spans, session=session
            )

    put(first, "chat-1", spans)
    put([*first, *words(80, 5)], "chat-1", [kvtrie.Span(256, 336, "user")])
    # The template drops the reasoning: what follows it moves.
    put([*first[:104], *first[200:], *words(64, 6)], "chat-1", [])
    for number in range(24):
        put([*system, *words(40 + 8 * (number % 5), 20 + number)], f"chat-{2 + number}", [])
    branch = [*system, *words(48, 40)]
    put([*branch, *words(48, 41)], "chat-30", [])
    put([*branch, *words(32, 42)], "chat-31", [])
    other = kvtrie.TokenSequence(words(80, 50), OTHER)
    index.insert(other, [next(free) for _ in range(10)], num_computed=80, source=kvtrie.COMPUTED)
    seq = kvtrie.TokenSequence([*first, *words(80, 5)], SPACE)
    index.mark_dead(seq, [(112, 152)])
    index.remove_spans(seq, [(160, 184)])
    prompt = [*first[:104], *first[200:256], *words(64, 6)[:20], *words(24, 60)]
    return index, prompt


SYSTEM = (
    "You are the assistant of a harbour . Answer in one or two sentences . Use the notes about "
    "ferries , tickets and weather . If a note is missing , say so and ask which one to read . "
)
REASONING = (
    "The visitor asks when the ferry leaves . Times change with the season , so I should not "
    "answer from memory . The note about the timetable says that ferries leave at eight , at noon "
    "and at six . On Sundays the first one does not run . I should name the day as well . "
)
ANSWER = (
    "The next ferry leaves at noon from the second quay . A ticket costs nine euros , and children "
    "travel free . Come ten minutes earlier , because the gate closes before it leaves . "
)
SENTENCES = (
    "When does the ferry leave ? ",
    "What does a ticket cost for two adults and a dog ? ",
    "Is the sea calm today , or is it better to wait ? ",
    "Which note is about bicycles ? ",
    "Can I come back in the evening ? ",
    "Where is the second quay , and how long does it take to walk there ? ",
    "My brother travels with a chair on wheels . Who helps him on board ? ",
    "Thanks . And on Sundays ? ",
    "Please write a short message to my family that we are late . ",
    "Are there other places that this ferry goes to ? ",
)


def tokenizer(folder: Path) -> Callable[[int, int], list[int]]:
    """Write a tokenizer of whole words, and return a function like `words` that makes sentences."""
    every = sorted(
        {*SYSTEM.split(), *REASONING.split(), *ANSWER.split(), *"".join(SENTENCES).split()}
    )
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(every)}, every[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))

    def texts(count: int, seed: int) -> list[int]:
        text = {1: SYSTEM, 3: REASONING, 4: ANSWER}.get(seed)
        if text is None:
            text = "".join(Random(seed).sample(SENTENCES, len(SENTENCES)))
        ids: list[int] = made.encode(text * 4).ids
        return ids[:count]

    return texts


def large(edges: int) -> kvtrie.RadixIndex:
    """An index of so many edges, or a few more: conversations that branch off each other."""
    rng = np.random.default_rng(7)
    index = kvtrie.RadixIndex(4 * edges, 16, seed=1)
    paths = [rng.integers(0, 150_000, 64).tolist() for _ in range(50)]
    pick = Random(7)
    used = number = 0
    while True:
        path = pick.choice(paths)
        tokens = [
            *path[: 16 * pick.randrange(1, len(path) // 16 + 1)],
            *rng.integers(0, 150_000, 16 * pick.randrange(1, 5)).tolist(),
        ]
        if len(paths) < edges // 3:
            paths.append(tokens)
        seq = kvtrie.TokenSequence(tokens, SPACE)
        have = index.lookup(seq).num_tokens // 16
        blocks = range(used, used + len(tokens) // 16 - have)
        index.insert(
            seq,
            blocks,
            start=16 * have,
            num_computed=len(tokens),
            source=kvtrie.COMPUTED,
            session=f"chat-{number % 900}",
        )
        used, number = blocks.stop, number + 1
        # Counting takes as long as a thousand inserts.
        if number % 2000 == 0 and index.stats().nodes >= edges:
            return index


def log(path: Path, num: int = 40) -> None:
    """A log of conversations whose histories grow, and are edited every fourth turn."""
    recorder = Recorder(
        RecordOptions(path=str(path), key_file=None), block_size=16, engine="test 1", model="model"
    )
    system = words(96, 1)
    chats: dict[int, list[int]] = {}
    for number in range(num):
        chat, turn = number % 5, number // 5
        before = chats.get(chat, [*system, *words(96, 100 + chat)])
        edited = turn % 4 == 3
        prompt = [*before[:120], *before[160:]] if edited else before
        prompt = [*prompt, *words(48, 1000 + number)]
        exact = 0 if turn == 0 else (112 if edited else len(before) // 16 * 16)
        reused = [(0, exact, "exact")] if exact else []
        if edited:
            reused.append((128, len(prompt) - 56, "moved"))
        left = len(prompt) - sum(end - start for start, end, _ in reused)
        tokens = [*prompt, *words(40, 5000 + number)]
        chats[chat] = tokens
        recorder.put(
            Finished(
                tokens=np.array(tokens, np.uint32),
                num_prompt=len(prompt),
                request_id=f"request-{number}",
                session=f"chat-{chat}",
                arrived=1_700_000_000 + 2.5 * number,
                first_token=0.05 + left / 2000,
                took=0.8,
                ended="stopped",
                spans=[
                    kvtrie.Span(0, 96, "system"),
                    kvtrie.Span(96, len(prompt), "user"),
                    kvtrie.Span(len(prompt), len(tokens), "answer"),
                ],
                reused=reused,
                computed={"diverged" if edited else "new" if exact else "first_seen": left},
            )
        )
    recorder.flush()
    recorder.close()


def page(path: Path, *args: object) -> Path:
    """The page that the command writes."""
    done = CliRunner().invoke(app, ["inspect", *map(str, args), "--html", str(path)])
    assert done.exit_code == 0, done.output
    return path
