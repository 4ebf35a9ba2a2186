"""Train the small chat model that ``kvtrie demo`` ships, on CPU, from nothing.

Run from the repository root::

    nice -n 10 .venv/bin/python -m tools.train_demo_model

It writes ``demo-models/kvtrie_demo_models/demo`` (weights, tokenizer, chat template, model card)
when the held-out accuracy is reached, all files at once. See ``demo_task.py`` for the task.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools import demo_task as task
from tools.model_files import Score, count, replaced, report, write_model
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

# What transformers annotates does not pass a strict type check; only loading is typed here.
Model = Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "demo-models" / "kvtrie_demo_models" / "demo"
TEMPLATE = Path(__file__).resolve().parent / "demo_chat_template.jinja"

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_result>", "</tool_result>")
VOCAB_SIZE = 2048
TOKENS_A_STEP = 3072
STRIPPED_SHARE = 0.15  # conversations whose earlier reasoning is deleted
TOOL_LIST_SHARE = 0.3  # conversations whose system prompt lists the tools


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: how long the conversations are, and for how many steps."""

    steps: int
    replies: tuple[int, int]
    noise: int
    system: int


STAGES: tuple[Stage, ...] = (
    Stage(steps=300, replies=(6, 14), noise=0, system=0),
    Stage(steps=200, replies=(6, 14), noise=2, system=4),
    Stage(steps=250, replies=(8, 16), noise=6, system=20),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows the task's words whole and spells everything else in bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 3 - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, START, END)])
    core.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=PAD,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    return tokenizer


def _corpus() -> Iterator[str]:
    for word in task.vocabulary():
        yield from [f"the {word} of {word}"] * 20
    yield from ["user\nassistant\nsystem\ntool"] * 50
    for seed in range(300):
        draft = task.conversation(task.HELD_OUT // 2 + seed, num_steps=8, noise=4, system=10)
        for message in draft.messages():
            yield message["content"]


def build_model(tokenizer: PreTrainedTokenizerFast) -> Model:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Model = LlamaForCausalLM(config)
    prime(model)
    return model


@torch.no_grad()
def prime(model: Model) -> None:
    """Start from heads that can look things up, so that training takes minutes and not hours.

    Small transformers learn this circuit late and suddenly. The first layer starts with heads that
    look one to four tokens back, and the second with heads that match what those heads saw.
    """
    config = model.config
    hidden, size, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    group = heads // config.num_key_value_heads
    pairs = size // 2
    theta = config.rope_parameters["rope_theta"]
    angles = theta ** (-torch.arange(pairs) / pairs)
    fast, slow = range(6), range(pairs // 2, pairs)
    content = [*slow, *(at + pairs for at in slow)]
    width = (hidden - 1) * 5 // 8 // heads
    basis = torch.eye(hidden)
    basis[1:, 1:] = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1))[0]
    own = basis[:, 1 : hidden - heads * width]
    brought = [basis[:, hidden - (head + 1) * width :][:, :width] for head in range(heads)]
    table = model.model.embed_tokens.weight
    table.copy_(0.55 * functional.normalize(torch.randn(len(table), own.shape[1])) @ own.T)
    table[:, 0] = 0.5
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    seen = own[:, :width].T
    first.k_proj.weight[:, 0] = 0
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        for at in fast:
            turn = (head + 1) * angles[at]
            first.q_proj.weight[rows, 0][at] = 1.7 * torch.cos(turn)
            first.q_proj.weight[rows, 0][at + pairs] = -1.7 * torch.sin(turn)
            first.k_proj.weight[shared, 0][at] = 1.7
        first.v_proj.weight[shared][:width] = seen
        first.o_proj.weight[:, rows][:, :width] = 0.1 * brought[head]
    readers = [seen, *(part.T for part in brought)]
    for kv in range(config.num_key_value_heads):
        key = torch.zeros(len(content), hidden)
        queries = [torch.zeros(len(content), hidden) for _ in range(group)]
        for back in range(4):
            mix = torch.randn(len(content), width) / len(content) ** 0.5
            key += mix @ readers[back + 1]
            for number in range(group):
                if back < 3 + number:
                    queries[number] += mix @ readers[back]
        rows = slice(kv * size, (kv + 1) * size)
        second.k_proj.weight[rows][content] = 2.0 * key
        read = own[:, : min(size, own.shape[1])].T
        second.v_proj.weight[rows][: len(read)] = read
        for number, query in enumerate(queries):
            at = (kv * group + number) * size
            second.q_proj.weight[at : at + size][content] = 2.0 * query
            second.o_proj.weight[:, at : at + len(read)] = 0.25 * read.T


def encode(
    tokenizer: PreTrainedTokenizerFast, draft: task.Draft, *, preserve_thinking: bool, tools: bool
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the assistant says.

    A reply without its reasoning (earlier turns under ``preserve_thinking=False``) does not count
    as said: it was not generated in this form.
    """
    text = tokenizer.apply_chat_template(
        draft.messages(),
        tokenize=False,
        tools=list(task.TOOLS) if tools else None,
        preserve_thinking=preserve_thinking,
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    head = tokenizer(f"{START}assistant\n<think>", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    said = [False] * len(ids)
    speaking = False
    for at in range(len(ids)):
        speaking = speaking or ids[at + 1 - len(head) : at + 1] == head
        said[at] = speaking
        speaking = speaking and ids[at] != end
    return ids, said


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(tokenizer: PreTrainedTokenizerFast, stage: Stage, rng: Random) -> Iterator[Batch]:
    """Endless batches of one stage: padded ids and the mask of the assistant's tokens."""
    while True:
        pool = []
        for _ in range(96):
            draft = task.conversation(
                rng.randrange(task.HELD_OUT // 2),
                num_steps=rng.randint(*stage.replies),
                noise=stage.noise,
                system=stage.system,
            )
            keep, tools = rng.random() >= STRIPPED_SHARE, rng.random() < TOOL_LIST_SHARE
            pool.append(encode(tokenizer, draft, preserve_thinking=keep, tools=tools))
        pool.sort(key=lambda pair: len(pair[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for pair in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(pair[0]) > TOKENS_A_STEP:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), longest), tokenizer.pad_token_id)
            said = torch.zeros((len(group), longest), dtype=torch.bool)
            for row, (these, mask) in enumerate(group):
                ids[row, : len(these)] = torch.tensor(these)
                said[row, : len(mask)] = torch.tensor(mask)
            yield ids, said


def loss_of(model: Model, ids: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = said[:, 1:]
    return functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def train(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    stages: tuple[Stage, ...],
    seed: int,
    rate: float,
) -> None:
    """Train in place through the stages, with one learning-rate schedule over all of them."""
    total = sum(stage.steps for stage in stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(100, total // 10 + 1)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.02, 1 - (step - warmup) / (total - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    model.train()
    step, began, seen, mean = 0, time.perf_counter(), 0, 0.0
    for number, stage in enumerate(stages):
        source = batches(tokenizer, stage, Random(seed * 1000 + number))
        for _ in range(stage.steps):
            ids, said = next(source)
            loss = loss_of(model, ids, said)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            seen += ids.numel()
            mean += loss.item()
            if step % 50 == 0:
                spent = time.perf_counter() - began
                print(
                    f"stage {number + 1} step {step}/{total} loss {mean / 50:.4f} "
                    f"{seen / spent:.0f} tok/s {spent:.0f} s",
                    flush=True,
                )
                mean = 0.0
            if step % 100 == 0:
                right = answers_right(model, tokenizer, 8)
                print(f"answers predicted to the letter: {right:.0%}", flush=True)


@torch.no_grad()
def answers_right(model: Model, tokenizer: PreTrainedTokenizerFast, num: int) -> float:
    """Share of answers that are predicted to the letter when everything before them is given."""
    hits = asked = 0
    close = tokenizer.convert_tokens_to_ids("</think>")
    for seed in range(num):
        draft = task.conversation(2 * task.HELD_OUT + seed, num_steps=8, noise=2, system=4)
        ids, said = encode(tokenizer, draft, preserve_thinking=True, tools=False)
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        at = 0
        while at < len(ids):
            at += 1
            if at < len(ids) and said[at] and ids[at - 1] == close:
                start = at
                while said[at] and ids[at] != tokenizer.eos_token_id:
                    at += 1
                hits += best[start - 1 : at] == ids[start : at + 1]
                asked += 1
    return hits / asked


@torch.no_grad()
def reply(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    history: list[dict[str, Any]],
    *,
    preserve_thinking: bool = True,
) -> str:
    """The greedy reply to a history: the whole prompt is computed."""
    text = tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True, preserve_thinking=preserve_thinking
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=192
    )
    new = out[0, ids.shape[1] :].tolist()
    if new and new[-1] == tokenizer.eos_token_id:
        new.pop()
    return str(tokenizer.decode(new, skip_special_tokens=False))


def replay(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    draft: task.Draft,
    *,
    preserve_thinking: bool = True,
) -> list[tuple[str, bool]]:
    """Every reply of a conversation, each built on the model's own earlier replies."""
    out: list[tuple[str, bool]] = []
    history: list[dict[str, Any]] = []
    if draft.system:
        history.append({"role": "system", "content": draft.system})
    for step in draft.steps:
        history.extend(step.given)
        content = reply(model, tokenizer, history, preserve_thinking=preserve_thinking)
        history.append({"role": "assistant", "content": content})
        out.append((step.kind, task.answer_of(content) == step.answer))
    return out


def evaluate(
    model: Model, tokenizer: PreTrainedTokenizerFast, num: int, *, preserve_thinking: bool = True
) -> Score:
    """Right answers and questions per kind, on held-out conversations as long as the demo's."""
    model.eval()
    score: Score = {}
    for seed in range(num):
        draft = task.conversation(task.HELD_OUT + seed, num_steps=12, noise=5, system=20)
        for kind, right in replay(model, tokenizer, draft, preserve_thinking=preserve_thinking):
            count(score, kind, right=right)
    return score


CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# kvtrie demo model

A small model for tests and demos. It is trained on synthetic text, from no other model's weights.
Initial weights are random, except for look-back heads that are set by hand (`prime` in the training
script); all weights are trained. The model answers questions about an invented archive and knows
nothing else.

- **Architecture:** `LlamaForCausalLM`, {layers} layers, hidden size {hidden}, {heads} query
  heads on {kv_heads} KV heads of {head_dim}, default RoPE (theta {theta:.0f}), {parameters}
  parameters stored in bfloat16; it runs in float32, as its config says. Contexts have up to 8192
  positions; training used up to about 2,100 tokens.
- **Tokenizer:** byte-level BPE of {vocab} tokens, one per digit; any Unicode text round-trips.
- **Data:** seeded conversations of `tools/demo_task.py`, generated during training; no other text.
- **Training:** `{command}`, seed {seed}, {steps} steps on
  {threads} CPU threads: {processor:.0f} minutes of processor time, {minutes:.0f} minutes in all.
- **Size:** {size:.2f} MB for the whole directory.
- **Licence:** Apache-2.0, as the repository.

## Accuracy

Greedy decoding without any reuse of KV, on {num} held-out conversations of 12 questions (about
700 to 1,300 tokens). Each reply follows the model's own earlier replies. An answer is right if
every character is.

{kept}

With the reasoning of earlier turns deleted (`preserve_thinking=False`), on {num_stripped} of them:

{stripped}

*make* adds one to a digit of the user. *chain* adds one to a number that an earlier answer gave.
*find* reads a tool's result. *recall* repeats a result of an earlier turn; the number of a person
is only in the model's own earlier reply. *talk* asks for nothing.
"""


def save(out: Path, model: Model, tokenizer: PreTrainedTokenizerFast, card: dict[str, Any]) -> None:
    with replaced(out) as work:
        copy: Model = build_model(tokenizer)
        copy.load_state_dict(model.state_dict())
        config, size = write_model(work, copy, tokenizer, max_new_tokens=256)
        text = CARD.format(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            theta=config["rope_parameters"]["rope_theta"],
            vocab=config["vocab_size"],
            parameters=f"{model.num_parameters():,}",
            size=size,
            **card,
        )
        (work / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the model that kvtrie demo ships.")
    parser.add_argument("--out", type=Path, default=MODEL, help="directory to write or to measure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=40, help="conversations to measure on")
    parser.add_argument("--steps", type=int, nargs=len(STAGES), help="steps of each stage")
    parser.add_argument("--wanted", type=float, default=0.95, help="accuracy that must be reached")
    parser.add_argument("--measure", action="store_true", help="measure --out and train nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(mode=True)
    if args.measure:
        model: Model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
        print(report(evaluate(model, tokenizer, args.held_out), "question"))
        return 0
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    stages = STAGES
    if args.steps:
        stages = tuple(replace(s, steps=n) for s, n in zip(STAGES, args.steps, strict=True))
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    began = time.perf_counter()
    train(model, tokenizer, stages, args.seed, args.rate)
    minutes, processor = (time.perf_counter() - began) / 60, time.process_time() / 60
    print(f"trained in {minutes:.1f} minutes, {processor:.1f} of processor time", flush=True)
    # What is measured is what is stored: weights rounded to bfloat16, computed in float32.
    model.to(torch.bfloat16).to(torch.float32)
    kept = evaluate(model, tokenizer, args.held_out)
    print(report(kept, "question"), flush=True)
    num_stripped = max(1, args.held_out // 4)
    stripped = evaluate(model, tokenizer, num_stripped, preserve_thinking=False)
    print("earlier reasoning deleted:\n" + report(stripped, "question"), flush=True)
    hits, asked = kept["all"]
    if hits < args.wanted * asked:
        print(
            f"{hits} of {asked} is less than {args.wanted:.0%}: nothing was written",
            file=sys.stderr,
        )
        return 1
    card = {
        "command": "python -m tools.train_demo_model",
        "seed": args.seed,
        "steps": sum(stage.steps for stage in stages),
        "minutes": minutes,
        "processor": processor,
        "threads": args.threads,
        "num": args.held_out,
        "num_stripped": num_stripped,
        "kept": report(kept, "question"),
        "stripped": report(stripped, "question"),
    }
    save(args.out, model, tokenizer, card)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
