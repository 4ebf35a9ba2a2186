"""Train the three small models that ``kvtrie calibrate`` ships, on CPU, from nothing.

Run from the repository root, one kind of attention at a time or all::

    OMP_NUM_THREADS=1 nice -n 10 .venv/bin/python -m tools.train_recall_models [gqa partial mla]

Each writes ``demo-models/kvtrie_demo_models/<kind>`` (weights, tokenizer, chat template, model
card) when the accuracy that is wanted is reached on held-out conversations, all files at once. See
``kvtrie.calibrate.recall`` for the task.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tools.model_files import Score, count, replaced, report, write_model
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvtrie.calibrate import recall

if TYPE_CHECKING:
    from collections.abc import Iterator

# What transformers annotates does not pass a strict type check; only loading is typed here.
Model = Any

ROOT: Final = Path(__file__).resolve().parent.parent
MODELS: Final = ROOT / "demo-models" / "kvtrie_demo_models"
TEMPLATE: Final = Path(__file__).resolve().parent / "recall_chat_template.jinja"

PAD, START, END, THINK, DONE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"
UNKNOWN: Final = "[UNK]"
ROLES: Final = ("system", "user", "assistant")

HIDDEN: Final = 128
HEADS: Final = 4
WINDOW: Final = 10  # exchanges of a conversation, as the sliding window keeps them
BATCH: Final = 12  # conversations of one step
KEPT_SHARE: Final = 0.25  # conversations that show their earlier reasoning, as tool loops do
DRAWN_WEIGHT: Final = 0.05  # reasoning is drawn: only its distribution can be predicted


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the task; any other word is unknown."""
    special = (PAD, START, END, THINK, DONE)
    words = [*special, *ROLES, UNKNOWN, *recall.vocabulary()]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, START, END)])
    core.add_tokens([AddedToken(text, normalized=False) for text in (THINK, DONE)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=PAD,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )


def _common(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def gqa(tokenizer: PreTrainedTokenizerFast) -> Model:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = LlamaConfig(
        **_common(tokenizer), num_key_value_heads=2, head_dim=32, rope_parameters=rope
    )
    return LlamaForCausalLM(config)


def partial(tokenizer: PreTrainedTokenizerFast) -> Model:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = GlmConfig(
        **_common(tokenizer),
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=False,
        rope_parameters=rope,
    )
    return GlmForCausalLM(config)


def mla(tokenizer: PreTrainedTokenizerFast) -> Model:
    """A latent that is not rotated, and one rotary key for all heads, under YaRN."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = DeepseekV3Config(
        **_common(tokenizer),
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=3,
        num_mtp_layers=0,
        n_routed_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        rope_parameters=rope,
    )
    return DeepseekV3ForCausalLM(config)


@dataclass(frozen=True)
class Kind:
    build: Any
    architecture: str
    says: str
    steps: int


KINDS: Final = {
    "gqa": Kind(gqa, "LlamaForCausalLM", "GQA, 4 heads on 2, NeoX pairs, head size 32", 600),
    "partial": Kind(
        partial,
        "GlmForCausalLM",
        "GQA, 4 heads on 2, interleaved pairs in half of 32 channels",
        600,
    ),
    "mla": Kind(mla, "DeepseekV3ForCausalLM", "MLA, latent of 96 and rotary key of 16, YaRN", 600),
}


class Wiring:
    """Sets single heads of a model by hand, for any kind of attention.

    Matrices on the residual stream after the norm say what a head compares (``match``), copies
    (``read``) and where to (``write``).
    """

    def __init__(self, model: Model) -> None:
        config = model.config
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.is_mla = hasattr(config, "kv_lora_rank")
        self.group = config.num_attention_heads // config.num_key_value_heads
        if self.is_mla:
            self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
            self.size = self.nope + config.qk_rope_head_dim
            start, pairs, interleaved = self.nope, config.qk_rope_head_dim // 2, True
            self.content = list(range(self.nope))
        else:
            self.size = self.value = config.head_dim
            interleaved = isinstance(model, GlmForCausalLM)
            rotary = config.head_dim // (2 if interleaved else 1)
            start, pairs = 0, rotary // 2
            # Channels that rotate slowly or not at all can compare contents at any distance.
            self.content = [
                *range(rotary, self.size),
                *(at + rotary // 2 * half for half in (0, 1) for at in range(9, 16)),
            ]
            if interleaved:
                self.content = list(range(rotary, self.size))
        step = (2, 1) if interleaved else (1, pairs)
        self.pairs = [(start + at * step[0], start + at * step[0] + step[1]) for at in range(pairs)]
        self.pairs = self.pairs[: 6 if interleaved else 8]
        angles: torch.Tensor = model.model.rotary_emb.inv_freq
        self.angles = angles[: len(self.pairs)].double()

    def query(
        self, layer: int, head: int, *, back: int | None, match: torch.Tensor, gain: float
    ) -> None:
        """What a head looks for: a distance (where ``match`` is one row), or contents."""
        rows = self.layers[layer].q_proj.weight[head * self.size : (head + 1) * self.size]
        rows.zero_()
        if back is None:
            rows[self.content[: len(match)]] = gain * match
            return
        for (one, two), angle in zip(self.pairs, self.angles.tolist(), strict=True):
            turn = torch.tensor(back * angle)
            rows[one] = gain * torch.cos(turn) * match[0]
            rows[two] = -gain * torch.sin(turn) * match[0]

    def key(
        self, layer: int, head: int, *, place: torch.Tensor | None, match: torch.Tensor | None
    ) -> None:
        """What a token matches: the same at every place, or contents."""
        attention = self.layers[layer]
        if self.is_mla:
            low = attention.kv_a_proj_with_mqa.weight
            if place is not None:
                rank = len(low) - (self.size - self.nope)
                low[rank:] = 0
                for one, _ in self.pairs:
                    low[rank + one - self.nope] = place[0]
            if match is not None:
                rows = attention.kv_b_proj.weight[head * (self.nope + self.value) :]
                rows[: self.nope] = 0
                rows[: len(match)] = match @ low[: rows.shape[1]].T
            return
        kv = head // self.group
        rows = attention.k_proj.weight[kv * self.size : (kv + 1) * self.size]
        if place is not None or match is not None:
            rows.zero_()
        if place is not None:
            for one, _ in self.pairs:
                rows[one] = place[0]
        if match is not None:
            rows[self.content[: len(match)]] = match

    def copy(self, layer: int, head: int, *, read: torch.Tensor, write: torch.Tensor) -> None:
        attention = self.layers[layer]
        if self.is_mla:
            low = attention.kv_a_proj_with_mqa.weight
            first = head * (self.nope + self.value) + self.nope
            rows = attention.kv_b_proj.weight[first : first + self.value]
            rows.zero_()
            rows[: len(read)] = read @ low[: rows.shape[1]].T
        else:
            kv = head // self.group
            rows = attention.v_proj.weight[kv * self.size : (kv + 1) * self.size]
            rows.zero_()
            rows[: len(read)] = read
        out = attention.o_proj.weight[:, head * self.value : (head + 1) * self.value]
        out.zero_()
        out[:, : write.shape[1]] = write


@torch.no_grad()
def prime(model: Model, tokenizer: PreTrainedTokenizerFast, distance: int) -> None:
    """Start from heads that can look things up, so that training takes minutes and not hours.

    Small transformers learn such circuits late and suddenly. Heads of the first layer start by
    looking one, two and four tokens back; two heads of the second match what those saw, and two
    look back from the start of a reply, to the last list and to the name in the question.
    """
    wiring = Wiring(model)
    width = 19
    basis = torch.eye(HIDDEN)
    basis[1:, 1:] = torch.linalg.qr(torch.randn(HIDDEN - 1, HIDDEN - 1))[0]
    constant = basis[:, :1].T
    own = basis[:, 1 : HIDDEN - HEADS * width]
    brought = [basis[:, HIDDEN - (head + 1) * width :][:, :width] for head in range(HEADS)]
    table = model.model.embed_tokens.weight
    table.copy_(0.55 * functional.normalize(torch.randn(len(table), own.shape[1])) @ own.T)
    table[:, 0] = 0.5
    assistant = tokenizer.get_vocab()["assistant"]
    speaker = functional.normalize(table[assistant : assistant + 1, 1:])
    speaker = torch.cat([torch.zeros(1, 1), speaker], dim=1)
    if wiring.is_mla:
        for attention in wiring.layers:
            low = attention.kv_a_proj_with_mqa.weight
            rank = model.config.kv_lora_rank
            low[:rank] = torch.cat([own, *brought], dim=1).T[:rank]
    seen = own[:, :width].T
    read = own[:, : wiring.value].T
    for head, back in enumerate((1, 2, 4, 4)):
        wiring.query(0, head, back=back, match=constant, gain=1.1)
        wiring.key(0, head, place=1.1 * constant, match=None)
        wiring.copy(0, head, read=seen, write=0.1 * brought[head])
    size = len(wiring.content)
    one, two = (torch.randn(size, width) / size**0.5 for _ in range(2))
    before = [part.T for part in brought]
    for head in (0, 1):
        wiring.key(1, head, place=None, match=2.0 * (one @ before[0] + two @ before[1]))
        match = one @ seen + (two @ before[0] if head else 0)
        wiring.query(1, head, back=None, match=match, gain=2.0)
        wiring.copy(1, head, read=read, write=0.25 * read.T)
    for head, back in ((2, distance), (3, 4)):
        wiring.key(1, head, place=1.1 * constant, match=None)
        wiring.query(1, head, back=back, match=speaker, gain=1.1)
        wiring.copy(1, head, read=read, write=0.25 * read.T)


@dataclass(frozen=True)
class Lesson:
    """One conversation as the chat template shows it while its last reply is written.

    Attributes:
        ids: Token ids.
        weights: What predicting each of them counts.
        kinds: Of each reply that the conversation alone determines: what is asked, and its range.
    """

    ids: list[int]
    weights: list[float]
    kinds: list[tuple[str, int, int]]


class Writer:
    """Turns conversations into lessons, as tokenizer and chat template would (a test compares)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._ids = tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        return [self._ids[word] for word in text.split()]

    def lesson(self, messages: list[dict[str, Any]], *, keep: bool = False) -> Lesson:
        ids: list[int] = []
        weights: list[float] = []
        kinds: list[tuple[str, int, int]] = []
        asked = ""
        for number, message in enumerate(messages):
            head = self.encode(f"{START} {message['role']}")
            body = self.encode(f"{message['content']} {END}")
            reasoning = message.get("reasoning_content")
            is_last = number == len(messages) - 1
            shown = (
                self.encode(f"{THINK} {reasoning} {DONE}")
                if reasoning and (is_last or keep)
                else []
            )
            ids += [*head, *shown, *body]
            known = bool(message.get("scored")) or bool(shown)
            weights += [0.0] * len(head)
            weights += [1.0, *[DRAWN_WEIGHT] * (len(shown) - 1)] if shown else []
            weights += [1.0 if known else 0.0] * len(body)
            if known:
                kind = "copy" if shown else "again" if asked == recall.AGAIN else "which"
                kinds.append((kind, len(ids) - len(body), len(ids)))
            asked = message["content"]
        return Lesson(ids, weights, kinds)


def drafts(rng: Random, *, least: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Endless conversations of at most a window, their oldest exchange sometimes missing."""
    while True:
        exchanges = rng.randint(2, WINDOW)
        missing = rng.random() < 0.5
        messages = recall.conversation(least + rng.randrange(10**8), exchanges + missing)
        messages = [messages[0], *messages[1 + 2 * missing :]]
        yield [_answerable(messages, number) for number in range(len(messages))]


def _answerable(messages: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The message, not scored if what it repeats is in the dropped oldest exchange."""
    message = messages[number]
    earlier = " ".join(one["content"] for one in messages[:number] if one["role"] == "assistant")
    if message["content"].removesuffix(" .") in earlier:
        return message
    return {name: value for name, value in message.items() if name != "scored"}


def batches(
    writer: Writer, rng: Random, pad: int, kept_share: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches: padded ids, and the weights of predicting them."""
    source = drafts(rng)
    while True:
        pool = [
            writer.lesson(next(source), keep=rng.random() < kept_share) for _ in range(8 * BATCH)
        ]
        pool.sort(key=_length)
        groups = [pool[at : at + BATCH] for at in range(0, len(pool), BATCH)]
        rng.shuffle(groups)
        for group in groups:
            longest = max(map(_length, group))
            ids = torch.full((len(group), longest), pad)
            weights = torch.zeros(len(group), longest)
            for row, lesson in enumerate(group):
                ids[row, : len(lesson.ids)] = torch.tensor(lesson.ids)
                weights[row, : len(lesson.ids)] = torch.tensor(lesson.weights)
            yield ids, weights


def _length(lesson: Lesson) -> int:
    return len(lesson.ids)


def loss_of(model: Model, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = weights[:, 1:] > 0
    each = functional.cross_entropy(
        model.lm_head(hidden[wanted]), ids[:, 1:][wanted], reduction="none"
    )
    share = weights[:, 1:][wanted]
    return (each * share).sum() / share.sum()


def train(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    seed: int,
    rate: float,
    kept_share: float,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(50, steps // 10 + 1)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.02, 1 - (step - warmup) / (steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    writer = Writer(tokenizer)
    source = batches(writer, Random(seed), tokenizer.pad_token_id, kept_share)
    model.train()
    began, mean = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        loss = loss_of(model, *next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean += loss.item()
        if step % 25 == 0:
            spent = time.perf_counter() - began
            print(f"step {step}/{steps} loss {mean / 25:.4f} {spent:.0f} s", flush=True)
            mean = 0.0
        if step % 50 == 0:
            print(report(evaluate(model, writer, 40), "reply"), flush=True)


@torch.no_grad()
def evaluate(model: Model, writer: Writer, num: int) -> Score:
    """Right replies and replies per kind on held-out conversations.

    Each is predicted to the letter, with the right text before it: greedy decoding gives the same
    tokens as long as they are right.
    """
    model.eval()
    score: Score = {}
    source = drafts(Random(1), least=2 * recall.HELD_OUT)
    for _ in range(num):
        lesson = writer.lesson(next(source))
        best = model(input_ids=torch.tensor([lesson.ids])).logits[0].argmax(-1).tolist()
        for kind, start, end in lesson.kinds:
            right = best[start - 1 : end - 1] == lesson.ids[start:end]
            count(score, kind, right=right)
    model.train()
    return score


CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# kvtrie recall model, {kind}

A small model on which kvtrie measures what reuse of KV costs. It is trained on synthetic text, from
no other model's weights. Initial weights are random, except for look-back heads that are set by
hand (`prime` in the training script); all weights are trained. The model repeats lists of names and
numbers and knows nothing else.

- **Architecture:** `{architecture}`, {says}; 3 layers, hidden size
  {hidden}, {parameters} parameters stored in bfloat16; it runs in float32, as its config says.
- **Tokenizer:** {vocab} words of the task, one token each; any other word is unknown.
- **Data:** seeded conversations of `kvtrie.calibrate.recall`, generated during training;
  {kept_share:.0%} of them keep earlier reasoning in the prompt.
- **Training:** `python -m tools.train_recall_models {kind}`, seed {seed}, {steps} steps on one CPU
  thread: {processor:.1f} minutes of processor time, {minutes:.1f} minutes in all.
- **Size:** {size:.2f} MB for the whole directory.
- **Licence:** Apache-2.0, as the repository.

## Accuracy

Without any reuse of KV, on {num} held-out conversations of 2 to 10 exchanges. A reply is right if
each of its tokens is the likeliest one after the right text before it.

{score}

*again* repeats the last list. *which* gives the number of one name of an earlier list. *copy*
writes the list of the reasoning into the answer.
"""


def save(out: Path, model: Model, tokenizer: PreTrainedTokenizerFast, card: dict[str, Any]) -> None:
    with replaced(out) as work:
        config, size = write_model(work, model, tokenizer, max_new_tokens=64)
        text = CARD.format(
            hidden=config["hidden_size"],
            vocab=len(tokenizer),
            parameters=f"{model.num_parameters():,}",
            size=size,
            **card,
        )
        (work / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def run(name: str, args: argparse.Namespace) -> bool:
    """Train, measure and save one model, and return whether it was good enough."""
    kind = KINDS[name]
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    writer = Writer(tokenizer)
    model = kind.build(tokenizer)
    distance = len(writer.encode(f"{START} assistant {START} user {recall.AGAIN} {END} {END}"))
    distance += len(writer.encode("Ada 10 " * recall.PAIRS + ".")) - 2
    prime(model, tokenizer, distance)
    print(f"{name}: {model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    print(report(evaluate(model, writer, 40), "reply"), flush=True)
    began, busy = time.perf_counter(), time.process_time()
    steps = args.steps or kind.steps
    train(model, tokenizer, steps=steps, seed=args.seed, rate=args.rate, kept_share=args.kept_share)
    minutes, processor = (time.perf_counter() - began) / 60, (time.process_time() - busy) / 60
    print(f"trained in {minutes:.1f} minutes, {processor:.1f} of processor time", flush=True)
    # What is measured is what is stored: weights rounded to bfloat16, computed in float32.
    model.to(torch.bfloat16).to(torch.float32)
    score = evaluate(model, writer, args.held_out)
    print(report(score, "reply"), flush=True)
    hits, asked = score["all"]
    if hits < args.wanted * asked:
        print(f"{name}: {hits} of {asked} is less than {args.wanted:.0%}", file=sys.stderr)
        return False
    card = {
        "kind": name,
        "architecture": kind.architecture,
        "says": kind.says,
        "seed": args.seed,
        "steps": steps,
        "kept_share": args.kept_share,
        "minutes": minutes,
        "processor": processor,
        "num": args.held_out,
        "score": report(score, "reply"),
    }
    save(args.out / name, model, tokenizer, card)
    print(f"wrote {args.out / name}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the models that kvtrie calibrate ships.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (all)")
    parser.add_argument("--out", type=Path, default=MODELS, help="directory of the directories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--held-out", type=int, default=300, help="conversations to measure on")
    parser.add_argument("--steps", type=int, help="steps of training, not each kind's own")
    parser.add_argument(
        "--kept-share",
        type=float,
        default=KEPT_SHARE,
        help="conversations that show their earlier reasoning; 0: the models never see any",
    )
    parser.add_argument("--wanted", type=float, default=0.97, help="accuracy that must be reached")
    args = parser.parse_args()
    unknown = [name for name in args.kinds if name not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r} (known: {', '.join(KINDS)})")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    results = [run(name, args) for name in args.kinds or KINDS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
