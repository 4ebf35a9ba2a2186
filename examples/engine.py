"""An engine around the index: a real model, paged KV, and reuse after an edit.

    python examples/engine.py [MODEL]

It needs `kvtrie[transformers]`, and a model directory or the package `kvtrie-demo-models`. `Engine`
is what to copy: plan, allocate, move, compute the gaps, decode, insert, release. It runs one
request at a time; with several, each keeps its plan and its block table between steps.
`docs/engine-loop.md` explains each call.

What is moved is approximate: here a policy allows it, in production a gate does
(`examples/gate_from_traffic.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvtrie
from kvtrie import demo
from kvtrie.models.directory import checked_model_dir
from kvtrie.models.fingerprint import model_id
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Answer:
    """Generated ids, and where the KV of the prompt came from, in tokens."""

    tokens: list[int]
    exact: int
    moved: int
    computed: int


class Engine:
    """Greedy answers of a causal LM with full attention, over one pool of KV blocks."""

    def __init__(self, path: Path, *, num_blocks: int = 512, block_size: int = 16) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
        config, dtype = self.model.config, self.model.dtype
        self.eos = set(np.atleast_1d(config.eos_token_id))  # an id, a list, or None
        layout = kvtrie.KVLayout.from_config(config, block_size=block_size, dtype=dtype)
        self.pool = kvtrie.KVPool(layout, RopeSpec.from_config(config), num_blocks=num_blocks)
        self.index = kvtrie.RadixIndex(num_blocks, block_size)
        self.free = kvtrie.BlockAllocator(num_blocks)
        self.space = kvtrie.Namespace(model=model_id(self.model), salt=kvtrie.SHARED)
        self.block_size = block_size

    def generate(
        self,
        prompt: list[int],
        *,
        session: str,
        policy: kvtrie.ReusePolicy = kvtrie.EXACT_ONLY,
        max_new_tokens: int = 128,
    ) -> Answer:
        """Answer a prompt, and cache it with its answer."""
        if not prompt:
            msg = "the prompt is empty"
            raise ValueError(msg)
        seq = kvtrie.TokenSequence(prompt, self.space)
        with self.index.plan(seq, policy, session=session) as plan:  # pins what it uses
            longest = -(-(len(prompt) + max_new_tokens) // self.block_size)
            new = self.free.allocate(longest - len(plan.blocks), evict_from=self.index)
            table = np.concatenate([plan.blocks, new])
            known = len(plan.blocks) * self.block_size  # KV is complete up to here
            answer: list[int] = []
            try:
                self.pool.apply(plan.moves(table))  # copies KV, and rotates K where it moves
                plan.release_sources()
                for start, end in plan.gaps.tolist():  # the last one ends with the prompt
                    known = start
                    token = self.compute(seq, start, end, table)
                known = len(prompt)
                answer.append(token)
                while token not in self.eos and len(answer) < max_new_tokens:
                    seq.extend([token])
                    token = self.compute(seq, known, known + 1, table)
                    known += 1
                    answer.append(token)
            finally:  # whatever happened: share what is computed, free what is not
                done = self.index.insert(
                    seq, table, num_computed=known, source=plan, session=session
                )
                for blocks in (done.duplicates, done.surplus, done.freed):
                    self.free.free(blocks)
        self.free.free(self.index.take_freed())
        return Answer(answer, plan.num_exact, plan.num_approximate, plan.num_compute)

    @torch.inference_mode()
    def compute(
        self, seq: kvtrie.TokenSequence, start: int, end: int, table: NDArray[np.int32]
    ) -> int:
        """Compute the KV of [start, end) on top of the KV before it; the likeliest next token."""
        past: Any = DynamicCache()
        if start:
            cached: Any = self.pool.gather(table, 0, start)  # K and V: layers, tokens, heads, dim
            for layer, (k, v) in enumerate(zip(*cached, strict=True)):
                past.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
        ids = torch.from_numpy(seq[start:end].astype(np.int64))[None]
        logits = self.model(input_ids=ids, past_key_values=past, use_cache=True).logits
        new = [
            torch.stack([rows[0, :, start:].transpose(0, 1) for rows in each])
            for each in zip(*[(one.keys, one.values) for one in past.layers], strict=True)
        ]
        self.pool.scatter(new[0], new[1], table, start)
        return int(logits[0, -1].argmax())


MOVED = kvtrie.ReusePolicy(approximate=True, recompute_first=4)


def talk(path: Path, policy: kvtrie.ReusePolicy) -> list[tuple[str, Answer]]:
    """A conversation on a new engine; before the last question, all reasoning is dropped."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    engine = Engine(path)
    system, *others = demo.load_conversations()[0].messages
    questions = [one for one in others if one["role"] == "user" and "number" in one["content"]][:4]
    messages, found = [system], []
    for question in questions:
        messages.append(question)
        prompt = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            preserve_thinking=question is not questions[-1],
            return_dict=False,
        )
        answer = engine.generate(prompt, session="chat-1", policy=policy)
        text = tokenizer.decode(answer.tokens).removesuffix(tokenizer.eos_token)
        messages.append({"role": "assistant", "content": text})
        found.append((text.split("</think>")[-1].strip(), answer))
    return found


def main(path: Path) -> None:
    """Talk twice: with exact reuse, and with moved runs."""
    for name, policy in (("exact reuse", kvtrie.EXACT_ONLY), ("moved runs", MOVED)):
        print(f"{name}\n  exact  moved  computed  answer")
        for text, answer in talk(path, policy):
            print(f"  {answer.exact:5}  {answer.moved:5}  {answer.computed:8}  {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An engine around the index.")
    parser.add_argument("model", nargs="?", help="model directory (default: the small model)")
    try:
        path = checked_model_dir(parser.parse_args().model or demo.model_path())
    except FileNotFoundError as error:
        parser.error(str(error))
    main(path)
