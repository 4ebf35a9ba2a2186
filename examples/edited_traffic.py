"""A client that edits its histories: traffic to record, to calibrate on and to serve.

    python examples/edited_traffic.py http://127.0.0.1:8000 --sessions 48

It needs `kvtrie` and an OpenAI-compatible engine. The first line of its prompts has the time, which
changes with every request, so that no prefix of a conversation can be reused. It asks for sentences
of notes about invented places, two in each conversation; conversations of the same numbers have the
same texts. At the end it says how many tokens of the prompts the engine had cached, if the
engine reports it (vLLM: `--enable-prompt-tokens-details`). Record it, make a gate of the log, and
serve other conversations of it under the gate, such as `--first 1000` (`docs/record.md`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvtrie.calibrate import texts

RULE = "You reply to questions about the notes. Reply with what the notes say."
REPLY_TOKENS = 24


class Usage(NamedTuple):
    """Tokens of one prompt."""

    tokens: int
    cached: int


def call(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request, and return the engine's JSON."""
    place = urlsplit(url)
    with contextlib.closing(HTTPConnection(place.netloc, timeout=1800)) as connection:
        sent = None if body is None else json.dumps(body)
        method = "GET" if sent is None else "POST"
        connection.request(method, place.path + path, sent, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        said = reply.read()
    if reply.status != 200:
        msg = f"{url}{path}: status {reply.status}: {said[:300].decode(errors='replace')}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(said)
    return found


def talk(url: str, model: str, number: int) -> list[Usage]:
    """A conversation: two questions, with the time of each request in the first line."""
    rng = Random(number)
    found = texts.places(rng, 4)
    notes = "\n\n".join(place.note for place in found)
    first, second = rng.sample(found, 2)
    minute = rng.randrange(1200)
    messages: list[dict[str, str]] = [{"role": "system", "content": ""}]
    usages = []
    for before, place in ((f"{notes}\n\n", first), ("", second)):
        # A small model quotes surely; where it invents, the least difference makes other text.
        asked = f"Quote the sentence of the notes that says when {place.title} was opened."
        minute += rng.randint(1, 40)
        messages[0]["content"] = f"It is {minute // 60}:{minute % 60:02}. {RULE}"
        messages.append({"role": "user", "content": f"{before}{asked}"})
        body = {
            "model": model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
            # Without it, nobody knows which request this one continues.
            "kv_transfer_params": {"session": f"chat-{number}"},
        }
        reply = call(url, "/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        usage = reply["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usages.append(Usage(usage["prompt_tokens"], cached))
    return usages


def main(arguments: list[str] | None = None) -> None:
    """Send conversations, some at once."""
    parser = argparse.ArgumentParser(description="Send conversations with edited histories.")
    parser.add_argument("url", help="address of the engine, such as http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=48, help="conversations (default: 48)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--at-once", type=int, default=8, help="at the same time (default: 8)")
    asked = parser.parse_args(arguments)
    model = call(asked.url, "/v1/models")["data"][0]["id"]
    numbers = range(asked.first, asked.first + asked.sessions)
    with ThreadPoolExecutor(asked.at_once) as pool:
        done = list(pool.map(lambda number: talk(asked.url, model, number), numbers))
    for name, usages in zip(("first", "second"), zip(*done, strict=True), strict=True):
        tokens, cached = (sum(one[at] for one in usages) for at in (0, 1))
        print(f"{name} prompts: {len(usages)}, {cached:,} of {tokens:,} tokens cached")


if __name__ == "__main__":
    main()
