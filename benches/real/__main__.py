"""Measures a real model's replies after each kind of edit, under every policy; see `real`.

    python -m real                       # from the repository, with PYTHONPATH=benches:.
    python -m real --quick               # one conversation of each hard kind, a few policies
    python -m real --summary             # no measuring: the tables again, from the rows

Rows go to target/fidelity/rows.jsonl as they are measured; the same command goes on from there. One
core takes under a minute for a conversation of 1k tokens, and minutes for one of 4k or 7k. Figures
of sizes that have no row stay as they were.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real import (
    chains,
    conversations,
    first_token,
    measure,
    policies,
    recorded,
    summary,
    texts,
)
from real.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from real.cases import Tokens
    from real.reader import Reader

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "target" / "models" / "smollm2-135m-instruct"
ROWS: Final = ROOT / "target" / "fidelity" / "rows.jsonl"
FOREIGN_TOKENS: Final = 1024

QUICK: Final = ("exact", "rotated", "foreign", "fronts20", "question20")
LONG: Final = (
    *("exact", "rotated", "unrotated", "foreign", "fronts20", "fronts30"),
    *("probe15", "probe20", "probe28", "oracle20", "oracle30"),
)
"""At 4k and 7k tokens, where a conversation takes minutes."""

PUBLISHED: Final = ("first16", "random20", "blend20", "sink20", "query20")
"""Besides, of the hard kinds at 4k tokens."""

LONGEST: Final = ("strip all", "reorder", "assembled", "strip one", *conversations.EASY)
"""Kinds at 7k tokens. Where results were cleared, the prompt has half of the conversation's length,
and the model's context ends at 8,192."""


class Suite:
    """The model, the text and the rows of one run.

    Args:
        folder: Of the model.
        dtype: A torch name.
        rows: The file of the rows.
        device: A torch name. Rows name it, and are of no other; without it they are of this CPU.
    """

    def __init__(self, folder: Path, dtype: str, rows: Path, device: str | None = None) -> None:
        import torch  # noqa: PLC0415 - slow
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - slow
        from transformers.utils import logging  # noqa: PLC0415 - slow

        from kvtrie.engines._products import is_slow, speed_up  # noqa: PLC0415 - torch
        from kvtrie.models.fingerprint import checkpoint_digest  # noqa: PLC0415 - for order
        from real.cases import HERE, Renderer, form_of  # noqa: PLC0415 - for order
        from real.reader import Reader  # noqa: PLC0415 - torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._where = device or "cpu"
        model = model.to(self._where).eval()
        speed_up(model)
        form = form_of(model.config, tokenizer)
        self.passages = recorded.load(texts.fetch(), HERE / form.records)
        ends = tokenizer.convert_tokens_to_ids(list(form.ends))
        self.reader: Reader = Reader(model, ends)
        self.renderer = Renderer(tokenizer, form)
        self.model = f"{folder.name}@{checkpoint_digest(folder)}"
        self.dtype = dtype
        self._about = {"model": self.model, "dtype": dtype}
        if is_slow(next(model.parameters())):
            # Rows of other arithmetic are others.
            self._about["products"] = "float32"
        if device is not None:
            is_gpu = self.reader.device.type == "cuda"
            self._about["device"] = torch.cuda.get_device_name(device) if is_gpu else device
        self.folder = folder
        self.rows = Rows(rows)
        text = " ".join(one.text for one in self.passages)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][-FOREIGN_TOKENS:]
        self._foreign_ids = list(ids)
        self._foreign: Any = None

    def foreign(self) -> Any:  # noqa: ANN401 - ids and their KV
        if self._foreign is None:
            self._foreign = (self._foreign_ids, self.reader.full(self._foreign_ids)[0])
        return self._foreign

    def case(self, kind: str, size: str, wording: str, seed: int) -> Tokens:
        writer = conversations.Writer(self.passages, wording, seed, conversations.SIZES[size])
        return self.renderer.tokens(conversations.KINDS[kind](writer))

    def key(self, *parts: str) -> str:
        """Of a row: whatever its figures depend on."""
        return measure.key([*self._about.values(), measure.versions(), *parts])

    def measure(
        self,
        kind: str,
        size: str,
        wording: str,
        seed: int,
        names: tuple[str, ...],
        known: Mapping[str, policies.Policy] = policies.POLICIES,
    ) -> None:
        """The rows of one case that are missing."""
        case = self.case(kind, size, wording, seed)
        plan = measure.plan_digest(self.reader, case)
        keys = {name: self.key(case.digest, plan, name) for name in names}
        missing = {name: known[name] for name, key in keys.items() if key not in self.rows}
        if not missing:
            return
        began = time.monotonic()
        about = {
            "kind": kind,
            "size": size,
            "set": wording,
            "seed": seed,
            "plan": f"{case.digest}.{plan}",
            **self._about,
        }
        for name, row in measure.rows(self.reader, case, missing, self.foreign()):
            self.rows.add({"key": keys[name], **about, "policy": name, **row})
        print(
            f"fidelity: {wording} {size} {kind}, seed {seed}: {len(missing)} policies, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )

    def chain(self, wording: str, seed: int, names: tuple[str, ...]) -> None:
        """Ten edits in a row, and each of them alone; a row for each step of both."""
        size = conversations.SIZES["1k"]
        writer = conversations.Writer(self.passages, wording, seed, size)
        steps = [self.renderer.tokens(one) for one in conversations.ten_edits(writer)]
        digest = measure.key([one.digest for one in steps])
        about = {"size": "1k", "set": wording, "seed": seed, "plan": digest}
        about |= self._about
        truths: list[Any] = []
        began = time.monotonic()

        def keys(kind: str, name: str) -> list[str]:
            return [self.key(kind, digest, name, str(step)) for step in range(len(steps))]

        in_a_row = {name: policies.POLICIES[name] for name in names}
        in_a_row[policies.ONE_HOP.name] = policies.ONE_HOP
        for name, policy in in_a_row.items():
            own = keys("chain", name)
            if all(key in self.rows for key in own):
                continue
            truths = truths or [measure.reference(self.reader, one) for one in steps]
            found = chains.rows(self.reader, steps, truths, policy)
            for step, (key, row) in enumerate(zip(own, found, strict=True)):
                about |= {"kind": "ten", "step": step + 1, "policy": name}
                self.rows.add({"key": key, **about, **row})
        alone = {name: keys("alone", name) for name in (*names, *policies.CONTROLS)}
        for step, case in enumerate(steps):
            missing = {
                name: policies.POLICIES[name]
                for name, own in alone.items()
                if own[step] not in self.rows
            }
            if not missing:
                continue
            truths = truths or [measure.reference(self.reader, one) for one in steps]
            rows = measure.rows(self.reader, case, missing, self.foreign(), truths[step])
            for name, row in rows:
                about |= {"kind": "alone", "step": step + 1, "policy": name}
                self.rows.add({"key": alone[name][step], **about, **row})
        if truths:
            print(
                f"fidelity: {wording} ten edits, seed {seed}, {time.monotonic() - began:.0f} s",
                flush=True,
            )

    def first_tokens(self, size: str, wording: str, seed: int, names: tuple[str, ...]) -> None:
        """The first token after W11's edit, under each policy, as often as `first_token` says."""
        case = self.case("strip all", size, wording, seed)
        keys = {
            (name, repeat): self.key("first token", first_token.VERSION, case.digest, name, repeat)
            for repeat in map(str, range(first_token.REPEATS))
            for name in names
        }
        missing = [one for one, key in keys.items() if key not in self.rows]
        if not missing:
            return
        about = {"kind": "first token", "size": size, "set": wording, "seed": seed}
        about |= {"plan": case.digest, **self._about}
        if self._where == "cpu":
            about |= {"processor": first_token.processor()}
        wanted = [name for name, _ in missing]
        found = first_token.rows(self.folder, self.dtype, case, wanted, self._where)
        for (name, repeat), row in zip(missing, found, strict=True):
            own = {"key": keys[name, repeat], "policy": name, "repeat": int(repeat)}
            self.rows.add({**own, **about, **row})
            print(f"fidelity: first token, {size}, {name}: {row['seconds']} s", flush=True)


def work(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Kind, size and number of each case, in an order in which a run that stops early says most."""
    if options.quick:
        yield from ((kind, "1k", 0) for kind in ("strip all", "prune", "reorder", "assembled"))
        return
    for number in range(options.cases):
        kinds = (*conversations.HARD, *(conversations.EASY if number < options.easy else ()))
        yield from ((kind, "1k", number) for kind in kinds)
        if number < options.long:
            yield from ((kind, "4k", number) for kind in conversations.KINDS)
        if number < options.longest:
            yield from ((kind, "7k", number) for kind in LONGEST)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four conversations, five policies")
    parser.add_argument("--summary", action="store_true", help="only write the tables again")
    parser.add_argument("--set", choices=list(conversations.SETS), default="reporting")
    parser.add_argument("--cases", type=int, default=6, help="of each hard kind at 1k tokens")
    parser.add_argument("--easy", type=int, default=3, help="of each easy kind")
    parser.add_argument("--long", type=int, default=3, help="of each kind at 4k tokens")
    parser.add_argument("--longest", type=int, default=2, help="of each kind at 7k tokens")
    parser.add_argument("--chains", type=int, default=3, help="of ten edits in a row")
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--sizes", default="1k,4k,7k", help="only these sizes")
    parser.add_argument("--policies", default="", help="only these, separated by commas")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if not options.summary:
        try:
            suite = Suite(options.model, options.dtype, options.rows)
        except texts.TextError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 3
        wanted = tuple(filter(None, options.policies.split(",")))
        first = conversations.SETS[options.set]
        for kind, size, number in work(options):
            kinds = options.kinds.split(",") if options.kinds else [kind]
            if size not in options.sizes.split(",") or kind not in kinds:
                continue
            names = LONG if size != "1k" else tuple(policies.POLICIES)
            if size == "4k" and kind in conversations.HARD:
                names += PUBLISHED
            if options.quick:
                names = QUICK
            suite.measure(kind, size, options.set, first + number + 1, wanted or names)
        only = options.kinds.split(",") if options.kinds else ["ten"]
        if not options.quick and "ten" in only and "1k" in options.sizes.split(","):
            for number in range(options.chains):
                suite.chain(options.set, first + 500 + number, wanted or chains.POLICIES)
        if not options.quick and "first token" in (options.kinds or "first token").split(","):
            for size in ("4k", "7k"):
                if size not in options.sizes.split(","):
                    continue
                suite.first_tokens(size, options.set, first + 1, tuple(first_token.POLICIES))
    return summary.main(options.rows, quick=options.quick, wording=options.set, dtype=options.dtype)


if __name__ == "__main__":
    sys.exit(main())
