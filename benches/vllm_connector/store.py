"""What the store saves of an edited history that the pool has lost: a real model, in two engines.

    make bench-vllm-store    # STORE_VLLM_FLAGS="--backend mooncake --positions 8192"
    make bench-vllm-store    # STORE_VLLM_FLAGS="--backend s3://runs --policies rotated"

An agent's run (W11 agent.close), whose reasoning the template drops when the user speaks again. The
history is computed, and stored in the background. Then comes the next prompt, of one tenant each:

* `pool`: the pool has the history;
* `store`: other prompts, which are stored too, have overwritten the whole pool;
* `second`: another engine process, started afterwards, has the store alone; not of host memory;
* `recomputed`: nobody has it.

The reply begins with a fact that the history states, without its value. Tokens computed, seconds to
the first token, and tokens that came from the store, of the first fact, and how far the log
probabilities of the first token are from those that the pool's plan gives: the largest difference
among the tokens that are in the top 20 of both. It is rounding alone where both plans move the same
tokens, which ``reused`` of each row says. Then replies of 16 greedy
tokens to more facts, which find the prompt in place, next to those from the pool. Markers of the
format are special tokens of the tokenizer, which no text has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

# ruff: noqa: E402 - after the path
import numpy as np
from real import texts
from vllm_connector.real_model import MODEL, OPENS, RealWriter, rows
from workloads.history import Piece
from workloads.registry import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.engine import Engine

WORKLOAD = "W11"
POLICIES: dict[str, dict[str, Any]] = {
    "rotated": {},
    "recompute_share 0.2": {"recompute_share": 0.2},
}
REPLY = 16
QUESTIONS = 8
BLOCK = 32
TOP = 20
SESSION: dict[str, Any] = {"extra_args": {"kv_transfer_params": {"session": "chat-7"}}}
_SPECIAL = {
    "bos": "<|im_start|>",
    "eos": "<|im_end|>",
    "newline": "\n",
    "blank": "\n\n",
    "user": "<issue_start>",
    "assistant": "<issue_comment>",
    "think": "<jupyter_start>",
    "end_think": "<jupyter_text>",
    "call": "<jupyter_code>",
    "end_call": "<jupyter_output>",
    "result": "<file_sep>",
    "end_result": "<filename>",
}


class MarkedWriter(RealWriter):
    """Writes real text between markers that no text has."""

    def mark(self, *names: str, kind: str = "") -> list[Piece]:
        return [Piece(np.array(self.ids(_SPECIAL[name]), np.uint32), kind) for name in names]

    def format(self) -> dict[str, Any]:
        """The format as `kvtrie.tags.Tagger.from_ids` takes it."""
        ids = {name: self.ids(text) for name, text in _SPECIAL.items()}
        return {
            "system": ids["bos"],
            "user": ids["user"],
            "assistant": ids["assistant"],
            "tool": ids["result"],
            "end": ids["eos"],
            "reasoning": [ids["think"], ids["end_think"]],
            "tool_call": [ids["call"], ids["end_call"]],
            "newlines": [ids["newline"][0], ids["blank"][0]],
        }


def history(corpus: np.ndarray, tokenizer: Any, positions: int) -> dict[str, Any]:  # noqa: ANN401 - transformers has no types
    """The largest scale, at most 1, at which history and prompt fit with the reply."""
    low, high = 0.0, 1.0
    for _ in range(12):
        scale = (low + high) / 2
        made = _history(corpus, tokenizer, scale)
        longest = max(len(made["history"]), *(len(one) for one in made["prompts"]))
        fits = longest + REPLY <= positions
        low, high = (scale, high) if fits else (low, scale)
    return _history(corpus, tokenizer, low)


def _history(corpus: np.ndarray, tokenizer: Any, scale: float) -> dict[str, Any]:  # noqa: ANN401 - likewise
    writer = MarkedWriter(corpus, tokenizer, 0)
    workload = WORKLOADS[WORKLOAD]
    found = workload.client(writer, workload.shape.scaled(scale))
    ids = found.cached[: found.num_computed], found.prompt
    # The pool knows whole blocks alone, and the store more: with text in the head that makes the
    # last one whole, both have all of the last answer. Its end has no KV, as when it was sampled.
    fill = corpus[: -len(ids[0]) % BLOCK]
    cached, prompt = ([int(at) for at in (one[0], *fill, *one[1:])] for one in ids)
    said = " ".join(map(str, prompt))
    facts = [one for one in writer.facts if " ".join(map(str, one.sentence)) in said]
    begun = [[*prompt, *writer.ids(f"{OPENS}{one.stem}")] for one in facts[:QUESTIONS]]
    return {
        "history": cached,
        "prompts": begun or [prompt],
        "new": len((begun or [prompt])[0]) - len(fill) - sum(one.length for one in found.kept),
        "format": writer.format(),
        "scale": scale,
    }


def start(options: argparse.Namespace, made: dict[str, Any], policy: dict[str, Any]) -> Engine:
    from tests.vllm.engine import Engine  # noqa: PLC0415 - vLLM

    store = {
        "backend": options.at,
        "key_file": options.key_file,
        "max_bytes": 4 << 30,
        # Those that overwrite the pool are one tenant, and leave the others' runs alone.
        "tenant_bytes": 1 << 30,
        "wait": 60.0,
    }
    settings = {
        "gate": "unchecked",
        "policy": policy,
        "chat_format": made["format"],
        "store": store,
    }
    engine = Engine(
        options.model,
        connector=settings,
        gaps=True,
        blocks=4 * options.positions // BLOCK,
        block_size=BLOCK,
        shadow=False,
        dtype=options.dtype,
        max_model_len=options.positions,
        max_num_batched_tokens=options.positions,
    )
    engine.ask(made["history"][:100], max_tokens=2, salt="warm-up")
    return engine


def settle(engine: Engine) -> float:
    """Wait until the turn is stored; the seconds that it took."""
    began = time.perf_counter()
    engine.core.step_fn()
    store = engine.worker._store  # noqa: SLF001 - the worker's half, which vLLM does not show
    assert store is not None
    if not store.wait(600):
        msg = "the turn is not stored"
        raise TimeoutError(msg)
    return time.perf_counter() - began


def overwrite(engine: Engine, corpus: np.ndarray, positions: int) -> None:
    """Serve other prompts until no block of the pool has what it has."""
    had = {block.block_hash for block in engine.pool.blocks if block.block_hash is not None}
    draw = np.random.default_rng(0)
    for _ in range(4 * engine.pool.num_gpu_blocks * BLOCK // positions):
        engine.ask(draw.choice(corpus, positions - 1).tolist(), max_tokens=1, salt="others")
        settle(engine)
        if had.isdisjoint(block.block_hash for block in engine.pool.blocks):
            return
    msg = "the pool is not overwritten"
    raise RuntimeError(msg)


def asked(engine: Engine, prompts: list[list[int]], salt: str) -> dict[str, Any]:
    prompt, *others = prompts
    before, computed = dict(engine.counts), engine.num_computed
    began = time.perf_counter()
    name = engine.add(prompt, max_tokens=REPLY, salt=salt, logprobs=TOP, **SESSION)
    while not engine.answers[name].tokens:
        engine.step()
    seconds = time.perf_counter() - began
    computed = engine.num_computed - computed
    engine.drain()
    stored, reused = (
        {
            kind: engine.counts[f"{counted}_{kind}"] - before.get(f"{counted}_{kind}", 0)
            for kind in ("exact", "moved")
        }
        for counted in ("store_tokens", "tokens")
    )
    return {
        "computed": computed,
        "seconds": seconds,
        "replies": [
            engine.answers[name].tokens,
            *(engine.ask(one, max_tokens=REPLY, salt=salt, **SESSION).tokens for one in others),
        ],
        "from the store": stored,
        # By kvtrie; the beginning of the prompt that vLLM's own cache has is in neither.
        "reused": reused,
        "first token": {str(token): one for token, one in engine.answers[name].logprobs[0].items()},
        "errors": engine.counts["errors"],
        "load": os.getloadavg()[0],
    }


def measure(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    passages = texts.passages(texts.fetch(options.texts))
    corpus = np.array(tokenizer(" ".join(passages), add_special_tokens=False)["input_ids"])
    made = history(corpus, tokenizer, options.positions)
    prompts = made["prompts"]
    engine = start(options, made, POLICIES[options.policy])

    def say(name: str, row: dict[str, Any]) -> None:
        said = {"prompt": len(prompts[0]), "new": made["new"], "scale": made["scale"], **row}
        print("ROW", name, json.dumps({"policy": options.policy, **said}), flush=True)

    if options.second:
        say("second", asked(engine, prompts, "second"))
        return
    for salt in ("pool", "store") if options.backend == "host" else ("pool", "store", "second"):
        engine.ask(made["history"], max_tokens=1, salt=salt, **SESSION)
        seconds = settle(engine)
        if salt == "pool":
            say("pool", asked(engine, prompts, salt))
    settle(engine)
    overwrite(engine, corpus, options.positions)
    say("store", {**asked(engine, prompts, "store"), "seconds to store a turn": seconds})
    say("recomputed", asked(engine, prompts, "nobody"))
    if options.backend == "mooncake":
        # It keeps a value in the memory of the client that has written it, so this one stays.
        sys.stdout.flush()
        subprocess.run([sys.executable, *sys.argv, "--second"], check=True)  # noqa: S603 - this file
    engine.close()


@contextmanager
def place(backend: str) -> Iterator[tuple[str, str]]:
    """Where the runs are kept, and the file of the key."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_bytes(os.urandom(32))
        if backend != "mooncake":
            yield str(Path(folder) / "kv") if backend == "folder" else backend, str(key)
            return
        from tests.store.kit import MooncakeMaster  # noqa: PLC0415 - needs pytest

        with MooncakeMaster() as master:
            yield f"mooncake://{master.address}", str(key)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--backend",
        default="folder",
        help="folder, host, mooncake, or the URL of an empty bucket, of one policy: s3://runs",
    )
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--texts", type=Path, default=texts.FOLDER)
    parser.add_argument("--dtype", default="float32")
    for name in ("--policy", "--at", "--key-file"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.policy:
        measure(options)
        return
    is_url = "://" in options.backend
    if not is_url and options.backend not in ("folder", "host", "mooncake"):
        parser.error(f"--backend is {options.backend!r}: folder, host, mooncake or a URL")
    if is_url and len(options.policies) != 1:
        parser.error("--policies: the bucket of one run is of one key, so of one policy")
    if not options.model.is_dir():
        sys.exit(f"{options.model} is not there: `make models` fetches it")
    found: list[tuple[str, dict[str, Any]]] = []
    for policy in options.policies:
        with place(options.backend) as (at, key):
            command = [sys.executable, __file__, *sys.argv[1:], "--policy", policy]
            command += ["--at", at, "--key-file", key]
            found += rows(command)
            if is_url or options.backend == "folder":
                found += rows([*command, "--second"])
    print(table(found))


def table(found: list[tuple[str, dict[str, Any]]]) -> str:
    pools = {row["policy"]: row for name, row in found if name == "pool"}
    names = (
        *("policy", "from", "prompt", "new", "computed", "of it besides new, % of the prompt"),
        *("from the store, exact and moved", "first token (s)"),
        f"log probabilities from the pool's (tokens in the top {TOP} of both)",
        "replies as from the pool",
    )
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for name, row in found:
        more = row["computed"] - row["new"]
        pool = pools[row["policy"]]
        pairs = zip(row["replies"], pool["replies"], strict=True)
        likely, others = row["first token"], pool["first token"]
        both = likely.keys() & others.keys()
        apart = max((abs(likely[one] - others[one]) for one in both), default=float("nan"))
        same = sum(ours == theirs for ours, theirs in pairs)
        stored = row["from the store"]
        cells = [
            *(row["policy"], name, f"{row['prompt']:,}", f"{row['new']:,}", f"{row['computed']:,}"),
            f"{100 * more / row['prompt']:.1f}",
            f"{stored['exact']:,}, {stored['moved']:,}",
            f"{row['seconds']:.2f}",
            f"{apart:.1e} ({len(both)})",
            f"{same} of {len(row['replies'])}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    loads = [row["load"] for _, row in found]
    errors = sum(row["errors"] for _, row in found)
    said = f"load average {min(loads):.1f} to {max(loads):.1f}; errors: {errors}"
    return "\n".join([*lines, "", said])


if __name__ == "__main__":
    main()
