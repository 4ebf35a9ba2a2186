"""A gate from recorded traffic: record with token ids, calibrate, serve under the gate.

    python examples/gate_from_traffic.py [SESSIONS]

It needs `kvtrie[cli,transformers]` and the package `kvtrie-demo-models` (`docs/examples.md`). A
log of digests cannot be calibrated on, because nothing can be computed from digests; the first part
shows how that is refused. A log of token ids is as secret as the text: a tokenizer makes text of
it. For a model directory of yours the same is two commands (`docs/record.md`).

The traffic is that of the task which the small model knows: lists that are drawn in reasoning and
asked for later. Its chat template drops the reasoning before the last question, so answers move.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoTokenizer

from kvtrie import gates, lab, tags
from kvtrie.calibrate import logged, measure, recall, shipped
from kvtrie.demo import Conversation
from kvtrie.engines.transformers import Generator
from kvtrie.record import Finished, Recorder, RecordOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK_SIZE = 16


class Traffic:
    """What an engine has served: sessions of prompts and replies, as token ids."""

    def __init__(self) -> None:
        self.model = shipped.model_path("gqa")
        tokenizer: Any = AutoTokenizer.from_pretrained(self.model, local_files_only=True)
        self.template = lab.Template(tokenizer)
        mark = self.template.encode
        # The model has no tool calls, so no preset fits, and its delimiters are given.
        self.tagger = tags.Tagger.from_ids(
            system=mark("<|im_start|>system"),
            user=mark("<|im_start|>user"),
            assistant=mark("<|im_start|>assistant"),
            end=mark("<|im_end|>"),
            reasoning=(mark("<think>"), mark("</think>")),
        )

    def session(self, seed: int) -> list[tuple[list[int], list[int]]]:
        """Prompts and replies of one conversation."""
        chat = lab.from_conversation(Conversation(tuple(recall.conversation(seed, 4))), str(seed))
        rendered = [self.template.render(chat, request) for request in chat.requests]
        return [(one.ids, one.sampled) for one in rendered]

    def record(self, path: Path, seeds: Iterable[int], *, content: str) -> None:
        """Write a log, as an engine does: one `put` when a request ends."""
        recorder = Recorder(RecordOptions(path=str(path), content=content), block_size=BLOCK_SIZE)
        for seed in seeds:
            for turn, (prompt, reply) in enumerate(self.session(seed)):
                recorder.put(
                    Finished(
                        tokens=np.array(prompt + reply, np.uint32),
                        num_prompt=len(prompt),
                        request_id=f"{seed}-{turn}",
                        session=f"chat-{seed}",  # without it, nobody knows what was edited
                        arrived=60.0 * turn,
                        took=1.0,
                        ended="stopped",
                        spans=self.tagger.spans(prompt + reply),  # nothing moves into the question
                    )
                )
            recorder.flush()
        recorder.close()

    def moved_end(self, prompt: list[int]) -> int | None:
        """Where the question begins."""
        stream = self.tagger.stream()
        stream.feed(prompt)
        return stream.moved_end


def serve(traffic: Traffic, gate: gates.Gate, seed: int) -> None:
    """Serve a conversation that was not recorded, under the gate."""
    engine = Generator.from_pretrained(
        traffic.model, num_blocks=256, block_size=BLOCK_SIZE, gate=gate
    )
    for turn, (prompt, reply) in enumerate(traffic.session(seed), start=1):
        name, end = f"chat-{seed}", traffic.moved_end(prompt)
        done = engine.generate(prompt, session=name, moved_end=end, max_new_tokens=1)
        used = done.usage
        print(f"  turn {turn}: {used.exact} exact, {used.moved} moved, {used.computed} computed")
        if not done.decision.is_cleared:
            print(f"    {done.decision.reason}")
        # The recorded reply continues the conversation, so its KV is computed here.
        engine.generate([*prompt, *reply[:-1]], session=name, moved_end=end, max_new_tokens=1)


def main(sessions: int, folder: Path) -> gates.Gate:
    """Record, calibrate, write the gate file, and serve under it."""
    traffic = Traffic()
    log, out = folder / "traffic.log", folder / "model.gate.json"

    digests = folder / "digests.log"
    traffic.record(digests, range(2), content="digests")
    try:
        logged.sessions(digests)
    except measure.CalibrationError as error:
        print(f"refused: {str(error).removeprefix(f'{folder}/')}")

    traffic.record(log, range(sessions), content="tokens")
    found = logged.sessions(log)
    print(f"recorded: {len(found)} sessions, {log.stat().st_size:,} bytes")

    report = measure.calibrate(
        traffic.model, policies=["rotated"], conversations=found, data=log.name
    )
    report.gate(gates.Thresholds()).write(out)
    gate = gates.read(out)
    for policy in gate.measured:
        for kind in policy.kinds:
            reason = kind.verdict(gate.thresholds).reason
            shown = "cleared" if reason is None else f"not cleared: {reason}"
            print(f"{policy.name}, {kind.name}: {shown}")

    print("served under the gate:")
    serve(traffic, gate, recall.HELD_OUT)
    return gate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A gate from recorded traffic.")
    parser.add_argument("sessions", nargs="?", type=int, default=48, help="default: 48")
    with tempfile.TemporaryDirectory() as name:
        try:
            main(parser.parse_args().sessions, Path(name))
        except (FileNotFoundError, measure.CalibrationError) as error:
            parser.error(str(error))
