"""Hit rates in a small pool: vLLM alone against exact mode, in vLLM's own scheduler; no model.

    make bench-vllm-pressure

Agents and plain chats share one pool. An agent has a system prompt with tools and three runs, of 43
requests in all: each reasons and calls a tool, whose result the next one brings; the last of a run
answers. The last request has about 142,000 tokens, divided by ``--scale``, as all lengths are. A
chat has one to six turns that reason and answer. When the user speaks again, the template drops the
reasoning of the turn before, as Qwen3's does. Conversations begin at random, their pauses are
random: seconds for tools, half a minute for people; four requests run at once.

The working set is the most blocks at any time that have been computed and will be needed again, by
the tokens alone. Pools are parts of it. The hit rate is the part of all prompt tokens that was not
computed; an unbounded pool gives the most that is possible. Replies are scripted: the scheduler and
its cache manager are vLLM's, the worker computes nothing.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

import transformers
from tests.vllm_scheduler.core import Core
from tests.vllm_scheduler.worker import BLOCK
from tests.vllm_scheduler.worker import Worker as ComputingWorker
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

SYSTEM, USER, ASSISTANT, TOOL, THINK, END_THINK, CALL, END_CALL, END = range(3, 12)
WORDS = range(16, 500)
FORMAT = {
    "system": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "tool": TOOL,
    "reasoning": [THINK, END_THINK],
    "tool_call": [CALL, END_CALL],
    "end": END,
}
AT_ONCE = 4
# Tokens of a reply that a step drafts, always rightly: fewer steps.
DRAFTED = 31
# Of a model whose longest prompt is not scaled.
MAX_LENGTH = 190_000
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "exact mode": {"mode": "exact", "chat_format": FORMAT},
}
PARTS = (0.5, 0.25, 0.12)
KINDS = ("agent", "chat")


@dataclass
class Message:
    tokens: list[int]
    # What is left of it when the next user message comes.
    later: list[int]
    is_generated: bool = False
    is_user: bool = False


@dataclass
class Conversation:
    """Its messages, and the pauses before each request."""

    name: str
    kind: str
    start: float
    messages: list[Message] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    at: int = 0

    def next(self) -> tuple[list[int], list[int]] | None:
        """The next prompt and the reply to it; None at the end."""
        while self.at < len(self.messages) and not self.messages[self.at].is_generated:
            self.at += 1
        if self.at == len(self.messages):
            return None
        last = max(at for at in range(self.at) if self.messages[at].is_user)
        prompt = [
            token
            for at, one in enumerate(self.messages[: self.at])
            for token in (one.tokens if at > last else one.later)
        ]
        reply = self.messages[self.at].tokens
        self.at += 1
        return [*prompt, ASSISTANT], reply[1:]


class Writer:
    def __init__(self, seed: int, scale: float) -> None:
        self.rng = random.Random(seed)
        self._scale = scale

    def words(self, count: float) -> list[int]:
        number = max(2, round(count / self._scale * self.rng.uniform(0.6, 1.4)))
        return self.rng.choices(WORDS, k=number)

    def said(self, role: int, count: float) -> Message:
        tokens = [role, *self.words(count), END]
        return Message(tokens, tokens, is_user=role == USER)

    def reply(self, reasoning: float, answer: float, *, calls: bool) -> Message:
        text = self.words(answer)
        text = [CALL, *text, END_CALL] if calls else text
        reasoned = [THINK, *self.words(reasoning), END_THINK]
        return Message(
            [ASSISTANT, *reasoned, *text, END], [ASSISTANT, *text, END], is_generated=True
        )


def agent(writer: Writer, name: str, start: float, system: Message) -> Conversation:
    one = Conversation(name, "agent", start, [system])
    for length in (14, 14, 15):
        one.messages.append(writer.said(USER, 400))
        for number in range(length):
            is_last = number == length - 1
            one.messages.append(writer.reply(350, 400 if is_last else 90, calls=not is_last))
            if not is_last:
                one.messages.append(writer.said(TOOL, 2_950))
            one.pauses.append(writer.rng.expovariate(1 / (40 if is_last else 4)))
    return one


def chat(writer: Writer, name: str, start: float, system: Message) -> Conversation:
    one = Conversation(name, "chat", start, [system])
    for _ in range(writer.rng.choice((1, 1, 2, 3, 4, 6))):
        one.messages += [writer.said(USER, 200), writer.reply(900, 500, calls=False)]
        one.pauses.append(writer.rng.expovariate(1 / 40))
    return one


def workload(seed: int, scale: float, agents: int, chats: int) -> list[Conversation]:
    writer = Writer(seed, scale)
    tools = [writer.said(SYSTEM, 11_000) for _ in range(3)]
    plain = [writer.said(SYSTEM, 1_200) for _ in range(2)]
    # Long enough that about half of the agents are under way at any time.
    span = agents * 20.0
    rng = writer.rng
    return [
        *(
            agent(writer, f"agent-{at}", rng.uniform(0, span), rng.choice(tools))
            for at in range(agents)
        ),
        *(
            chat(writer, f"chat-{at}", rng.uniform(0, span * 3), rng.choice(plain))
            for at in range(chats)
        ),
    ]


class Worker(ComputingWorker):
    """Samples the tokens that it was given, and computes nothing."""

    replies: dict[str, list[int]]
    computed: dict[str, int]

    def spoil(self, blocks: object) -> None: ...

    def _run(self, output: Any) -> ModelRunnerOutput:  # noqa: ANN401 - vLLM's
        self._follow(output)
        names, said, drafts = [], [], []
        for name, count in output.num_scheduled_tokens.items():
            row, reply = self._rows[name], self.replies[name]
            self.computed[name] += max(0, min(count, row.num_prompt - row.computed))
            row.computed += count
            num_drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            done = len(row.tokens) - row.num_prompt
            is_prefill = row.computed < len(row.tokens)
            new = [] if is_prefill else reply[done : done + num_drafted + 1]
            row.tokens += new
            done += len(new)
            names.append(name)
            said.append(new)
            drafts.append([] if is_prefill else reply[done : min(done + DRAFTED, len(reply) - 1)])
        self._proposed = DraftTokenIds(names, drafts)
        places = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=said)


@dataclass
class Tally:
    prompt: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    computed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    requests: int = 0
    longest: int = 0
    preempted: int = 0
    working_set: int = 0


class WorkingSet:
    """Blocks by their tokens: from when they are computed until they are last needed."""

    def __init__(self) -> None:
        self._seen: dict[int, list[int]] = {}
        self._now = 0

    def add(self, prompt: list[int], reply: list[int]) -> None:
        self._now += 1
        tokens, chain = [*prompt, *reply], 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            interval = self._seen.setdefault(chain, [self._now, self._now])
            if start + BLOCK <= len(prompt):
                interval[1] = self._now

    def largest(self) -> int:
        change: dict[int, int] = defaultdict(int)
        for first, last in self._seen.values():
            if last > first:
                change[first] += 1
                change[last] -= 1
        most = now = 0
        for at in sorted(change):
            now += change[at]
            most = max(most, now)
        return most


def replay(talks: list[Conversation], core: Core, scale: float, watch: WorkingSet | None) -> Tally:
    worker = core.worker
    if not isinstance(worker, Worker):
        msg = f"the engine's worker is a {type(worker).__qualname__}, which no script leads"
        raise TypeError(msg)
    tally = Tally()
    worker.replies, worker.computed = {}, defaultdict(int)
    clock, number = 0.0, 0
    waiting = [(one.start, at, one) for at, one in enumerate(talks)]
    heapq.heapify(waiting)
    running: dict[str, tuple[Request, Conversation]] = {}
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0][0])
        while waiting and len(running) < AT_ONCE and waiting[0][0] <= clock:
            _, _, talk = heapq.heappop(waiting)
            found = talk.next()
            if found is None:
                continue
            prompt, reply = found
            number += 1
            params = SamplingParams(max_tokens=len(reply), stop_token_ids=[END])
            request = Request(
                str(number),
                prompt,
                params,
                None,
                block_hasher=core.core.request_block_hasher,
                session_id=talk.name,
            )
            worker.replies[request.request_id] = reply
            running[request.request_id] = (request, talk)
            tally.prompt[talk.kind] += len(prompt)
            tally.requests += 1
            tally.longest = max(tally.longest, len(prompt))
            if watch is not None:
                watch.add(prompt, reply)
            core.core.add_request(request)
        core.core.post_step(core.core.step_fn()[1])
        clock += 0.1 * scale
        for name, (request, talk) in list(running.items()):
            if request.is_finished():
                del running[name]
                tally.computed[talk.kind] += worker.computed[name]
                pause = talk.pauses.pop(0) if talk.pauses else 0.0
                heapq.heappush(waiting, (clock + pause, number + len(talks), talk))
    tally.preempted = core.num_preempted
    return tally


def measure(seed: int, options: argparse.Namespace) -> None:
    """All configurations on one workload; one line of JSON each."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama"
        transformers.LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            vocab_size=512,
            max_position_embeddings=1 << 20,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ).save_pretrained(model)

        def run(blocks: int, connector: dict[str, Any] | None, watch: WorkingSet | None) -> Tally:
            core = Core(
                model,
                connector=connector,
                blocks=blocks,
                shadow=False,
                worker=Worker,
                max_model_len=int(MAX_LENGTH / options.scale),
                max_num_batched_tokens=options.budget,
                max_num_seqs=AT_ONCE,
                speculative_config={
                    "method": "ngram",
                    "num_speculative_tokens": DRAFTED,
                    "prompt_lookup_max": 2,
                },
            )
            talks = workload(seed, options.scale, options.agents, options.chats)
            tally = replay(talks, core, options.scale, watch)
            core.close()
            return tally

        watch = WorkingSet()
        most = run(60_000, None, watch)
        size = watch.largest()
        report(seed, "unbounded", "vLLM", size, most)
        for part in options.parts:
            for name, connector in CONFIGURATIONS.items():
                report(seed, part, name, size, run(int(size * part), connector, None))


def report(seed: int, part: float | str, name: str, size: int, tally: Tally) -> None:
    row = {"seed": seed, "part": part, "name": name, "working_set": size}
    row |= {f"{kind}_prompt": tally.prompt[kind] for kind in KINDS}
    row |= {f"{kind}_computed": tally.computed[kind] for kind in KINDS}
    row |= {"requests": tally.requests, "longest": tally.longest, "preempted": tally.preempted}
    print("ROW", json.dumps(row), flush=True)


def rate(rows: list[dict[str, Any]], kinds: tuple[str, ...]) -> float:
    prompt: int = sum(row[f"{kind}_prompt"] for row in rows for kind in kinds)
    computed: int = sum(row[f"{kind}_computed"] for row in rows for kind in kinds)
    return 1 - computed / prompt


def summary(rows: list[dict[str, Any]]) -> None:
    parts = sorted(
        {row["part"] for row in rows}, key=lambda part: -(part if part != "unbounded" else 9)
    )
    print("| pool | configuration | hit rate, % | agents | chats | by seed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for part in parts:
        for name in CONFIGURATIONS:
            found = [row for row in rows if row["part"] == part and row["name"] == name]
            if not found:
                continue
            cells = [rate(found, KINDS), rate(found, ("agent",)), rate(found, ("chat",))]
            seeds = ", ".join(f"{100 * rate([row], KINDS):.1f}" for row in found)
            text = " | ".join(f"{100 * cell:.1f}" for cell in cells)
            print(
                f"| {part if part == 'unbounded' else f'{part:.0%}'} | {name} | {text} | {seeds} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=32, help="divides all lengths")
    parser.add_argument("--agents", type=int, default=48)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is not None:
        measure(options.seed, options)
        return
    rows = []
    for seed in range(options.seeds):
        done = subprocess.run(  # noqa: S603 - this script
            [sys.executable, __file__, *sys.argv[1:], "--seed", str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                print(line, file=sys.stderr, flush=True)
                rows.append(json.loads(line[4:]))
    summary(rows)


if __name__ == "__main__":
    main()
