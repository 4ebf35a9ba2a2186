"""What the connector does not support is refused when vLLM starts, with the reason."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1 import kv_cache_interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtrie.calibrate import shipped
from kvtrie.integrations.vllm import _support

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}


def full(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**SIZES, **more)


def groups(*specs: Any, **more: Any) -> KVCacheConfig:
    made = [KVCacheGroupSpec([f"layer.{at}"], spec, **more) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made)


@pytest.fixture(scope="module")
def served() -> Any:
    options = {"skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(model=str(shipped.model_path("gqa")), **options).create_engine_config()


@pytest.fixture
def config(served: Any) -> Any:
    """The parts that are asked, so that a test can say something else of each."""
    names = (
        *("cache_config", "parallel_config", "speculative_config"),
        *("aux_output_config", "kv_events_config", "scheduler_config"),
    )
    parts = {name: getattr(served, name) for name in names}
    parallel = dict(vars(parts["parallel_config"]))
    return SimpleNamespace(
        **parts
        | {
            "cache_config": SimpleNamespace(**vars(parts["cache_config"])),
            "model_config": SimpleNamespace(use_mla=False),
            "parallel_config": SimpleNamespace(**parallel),
        }
    )


def test_full_attention_is_supported(config: Any) -> None:
    _support.check(config, groups(full()))
    latent = SIZES | {"num_kv_heads": 1, "head_size": 576}
    _support.check(config, groups(MLAAttentionSpec(**latent)))


def change(part: str, name: str, value: object) -> Callable[[Any], None]:
    return lambda config: setattr(getattr(config, part), name, value)


def speculate(method: str) -> Callable[[Any], None]:
    return lambda config: setattr(config, "speculative_config", SimpleNamespace(method=method))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (change("cache_config", "enable_prefix_caching", False), "--enable-prefix-caching"),
        (
            change("cache_config", "cache_dtype", "fp8"),
            '--kv-cache-dtype fp8 is not one of auto.*: set "mode": "exact"',
        ),
        (
            change("model_config", "use_mla", True),
            "latent attention .MLA., which vLLM runs on a CPU",
        ),
        (change("parallel_config", "decode_context_parallel_size", 2), "set decode_context_par"),
        (change("parallel_config", "prefill_context_parallel_size", 2), "set prefill_context_p"),
        (change("parallel_config", "pipeline_parallel_size", 2), "tensor parallelism is supp"),
        (speculate("eagle"), "'eagle' has its own KV"),
        (speculate("mtp"), "'mtp' has its own KV"),
        (speculate("draft_model"), "'draft_model' has its own KV"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_is_refused(config: Any, changed: Callable[[Any], None], why: str) -> None:
    changed(config)
    with pytest.raises(_support.UnsupportedError, match=why):
        _support.check(config, groups(full()))


def test_exact_mode_takes_quantised_kv_and_copies_nothing_of_it(config: Any) -> None:
    assert _support.copies_exact_kv(config, groups(full()))
    assert not _support.copies_exact_kv(config, groups(full(), full()))
    config.cache_config.cache_dtype = "fp8"
    _support.check(config, groups(full()), moves=False, is_exact=True)
    assert not _support.copies_exact_kv(config, groups(full()))
    with pytest.raises(_support.UnsupportedError, match='dtype is fp8: remove "store"'):
        _support.check_store(config, groups(full()), is_among_others=False)
    # A connector without modes has none to advise.
    with pytest.raises(_support.UnsupportedError, match=r"bfloat16, float32$"):
        _support.check(config, groups(full()), moves=False, has_modes=False)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_kv_and_tensor_parallelism_are_supported(config: Any, method: str) -> None:
    speculate(method)(config)
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.data_parallel_size = 2
    _support.check(config, groups(full()))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (groups(full(), MambaSpec(32, ((4,),), (torch.float32,))), "of the kind MambaSpec"),
        (groups(SlidingWindowSpec(**SIZES, sliding_window=64)), "SlidingWindowSpec"),
        (groups(ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)), "ChunkedLocal"),
        (groups(MambaSpec(32, ((4,),), (torch.float32,))), "MambaSpec"),
        (groups(full(sliding_window=64)), "sliding window of 64"),
        (groups(full(attention_chunk_size=64)), "chunked attention"),
        (groups(full(non_causal=True)), "not causal"),
        (groups(full(), is_eagle_group=True), "turn speculative decoding off"),
    ],
    ids=["hybrid", "window", "chunked", "state-space", "hidden", "local", "encoder", "draft"],
)
def test_kv_of_another_kind_is_refused(config: Any, found: KVCacheConfig, why: str) -> None:
    with pytest.raises(_support.UnsupportedError, match=why):
        _support.check(config, found)


WINDOW = SlidingWindowSpec(**SIZES, sliding_window=64)


def below_full_attention() -> list[type[FullAttentionSpec]]:
    found: list[type[FullAttentionSpec]] = []
    new = [FullAttentionSpec]
    while new:
        new = [one for kind in new for one in kind.__subclasses__()]
        found += new
    known = kv_cache_interface.__name__
    return [one for one in found if one is not MLAAttentionSpec and one.__module__ == known]


@pytest.mark.parametrize("kind", below_full_attention())
def test_kinds_below_full_attention_are_refused(config: Any, kind: type[FullAttentionSpec]) -> None:
    """Each keeps something else: a part of the tokens, sinks, or hidden states."""
    needed = [one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING]
    spec = kind(**{name: SIZES.get(name, 64) for name in needed})
    assert spec.sliding_window is None
    assert spec.tokens_per_state == 1
    for found in (groups(spec), groups(spec, WINDOW), groups(full(), spec)):
        with pytest.raises(_support.UnsupportedError, match=kind.__name__):
            _support.check(config, found)
    with pytest.raises(_support.UnsupportedError, match=f"full attention .*{kind.__name__}"):
        _support.check(config, groups(spec, WINDOW), is_exact=True, moves=False)
    _support.check(config, groups(full(), WINDOW))


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0"])
def test_another_version_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(_support.UnsupportedError, match="not among the tested versions"):
        _support.check(config, groups(full()))
    _support.check(config, groups(full()), moves=False)


def test_a_pool_that_is_hashed_in_smaller_pieces_is_refused() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    _support.check_pool(pool, 16)
    with pytest.raises(_support.UnsupportedError, match="hashes 16 tokens of its blocks of 32"):
        _support.check_pool(pool, 32)
