"""Models whose layers differ in window, base, heads or width: groups of one pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.engines.architectures import WINDOWS
from transformers import DynamicCache

import kvtrie
from kvtrie import LayoutError
from kvtrie.engines._runner import Runner
from kvtrie.engines._windows import GROUP, Split
from kvtrie.engines.transformers import Generator
from kvtrie.kernels import reference as kernels
from kvtrie.pool import KVGroup, KVLayout, KVPool
from kvtrie.repair.probe import LayerProbe, probed_layer
from kvtrie.rope import RopeSpec, Rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]
    Models = Callable[[str], PreTrainedModel]

APPROXIMATE = kvtrie.ReusePolicy(min_run=16, scope="namespace")
FIELDS = ("source_slot", "dest_slot", "num_tokens", "delta")


@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "gemma4"])
def test_append_only_turns_equal_a_model_without_cache(
    architecture: str, make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(architecture), reference(architecture)
    prompt: list[int] = []
    for turn in range(6):
        before = len(prompt)
        prompt += ids(13, seed=turn).tolist()
        done = generator.generate(prompt, max_new_tokens=3, ignore_eos=True, return_logits=True)
        assert done.usage.exact >= before - 4
        assert done.tokens == plain.greedy(prompt, 3)
        want = plain.logits(prompt, done.tokens)
        torch.testing.assert_close(done.logits, want, atol=1e-4, rtol=0)
        prompt += done.tokens
    # Several windows of 11.
    assert len(prompt) > 80
    check_drained(generator)


def first_layer(name: str, kind: str) -> PreTrainedModel:
    """The model with layers of this kind first: K of layer 0 depends on tokens and position."""
    config = WINDOWS[name]()
    if name != "mistral" and config.layer_types[0] != kind:
        fields = config.to_dict()
        fields["layer_types"] = config.layer_types[::-1]
        if fields.get("per_layer_config"):
            last = config.num_hidden_layers - 1
            fields["per_layer_config"] = {
                last - int(layer): own for layer, own in fields["per_layer_config"].items()
            }
            # Gemma 4 makes its last layer one of full attention.
            fields["layer_types"][-1] = "full_attention"
            fields["per_layer_config"][last] = fields["per_layer_config"][0]
        config = type(config)(**fields)
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "mistral"])
def test_moved_keys_of_the_first_layer_are_those_of_recomputation(
    name: str, kind: str, ids: Ids
) -> None:
    text = ids(120).tolist()
    prompt = text[:30] + text[55:] + ids(4, seed=1).tolist()
    model = first_layer(name, kind)
    rows = []
    for policy in (APPROXIMATE, kvtrie.EXACT_ONLY):
        generator = Generator(model, num_blocks=128, block_size=4, gate="unchecked")
        generator.generate(text, max_new_tokens=1)
        request = generator.submit(prompt, max_new_tokens=2, ignore_eos=True, policy=policy)
        generator.step()
        job = generator._scheduler.running[0]
        assert job.lease is not None
        slots = generator.pool.slots(job.lease.table, 0, len(prompt))
        rows.append([kernels.gather_rows(view, slots) for view in generator.pool.k])
        generator.cancel(request)
        assert (request.usage.moved >= 60) == policy.approximate
        assert generator.pool.layout.windows[0] == (11 if kind == "sliding_attention" else None)
    error = (rows[0][0] - rows[1][0]).abs().max() / rows[1][0].abs().max()
    assert float(error) <= 1e-4


def test_one_base_for_all_layers_would_be_noticed(make: Make) -> None:
    generator = make("gemma3", num_blocks=128, gate="unchecked")
    rope = generator.pool.rope
    assert rope is not None
    assert len(set(rope.layers)) == 2
    shared = replace(rope, layers=(rope.layers[1],) * len(rope.layers))
    keys = torch.randn(2, 60, 16)
    for layer, differs in ((0, True), (1, False)):
        own = kernels.rotate(keys, rope, -25, layer)
        one = kernels.rotate(keys, shared, -25, layer)
        assert bool((own - one).abs().max() > 0.1) == differs


@pytest.mark.parametrize("policy", [kvtrie.EXACT_ONLY, APPROXIMATE], ids=["exact", "moved"])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "gemma4", "mistral"])
def test_nothing_before_a_window_is_read(
    architecture: str,
    policy: kvtrie.ReusePolicy,
    make: Make,
    ids: Ids,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of cached tokens, layers with a window need the last W - 1 before each gap (G9)."""
    text, new = ids(140).tolist(), ids(9, seed=1).tolist()
    # Deleted, replaced and appended tokens.
    prompt = text[:40] + text[52:90] + new[:3] + text[93:] + new[3:]
    run, spoiled = Runner._run, 0

    def spoiling(self: Runner, pool: KVPool, *given: Any) -> torch.Tensor:
        nonlocal spoiled
        _, table, ranges, *_ = given
        slots = pool.slots(table, 0, ranges[-1][1])
        kept = []
        for layer, window in enumerate(self._windows):
            if window is None:
                continue
            is_read = torch.zeros(len(slots), dtype=torch.bool)
            for start, end in ranges:
                is_read[max(0, start - window + 1) : end] = True
            unread = slots[~is_read]
            spoiled += len(unread)
            for view in (pool.k[layer], pool.v[layer]):
                assert view is not None
                rows = kernels.gather_rows(view, unread)
                kept.append((view, unread, rows))
                # Finite, as 0 times infinity is not 0.
                kernels.scatter_rows(view, unread, torch.full_like(rows, 1e3))
        try:
            return run(self, pool, *given)
        finally:
            for view, unread, rows in kept:
                kernels.scatter_rows(view, unread, rows)

    done = []
    for is_spoiling in (False, True):
        generator = make(architecture, num_blocks=128, gate="unchecked")
        generator.generate(text, max_new_tokens=1)
        assert generator._scheduler._runner.is_sparse
        if is_spoiling:
            monkeypatch.setattr(Runner, "_run", spoiling)
        done.append(
            generator.generate(
                prompt, max_new_tokens=4, ignore_eos=True, return_logits=True, policy=policy
            )
        )
    plain, other = done
    assert (plain.usage.moved > 60) == policy.approximate
    assert spoiled > 100
    assert plain.logits is not None
    assert other.logits is not None
    assert torch.equal(plain.logits, other.logits)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "mistral"])
def test_masks_without_the_window_are_found_and_not_used(
    architecture: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Generator(models(architecture), num_blocks=32, block_size=4).pool
    assert Runner(models(architecture), pool).is_sparse
    whole = Runner._mask
    monkeypatch.setattr(
        Runner, "_mask", lambda self, at, end, window: whole(self, at, end, window and window + 1)
    )
    assert not Runner(models(architecture), pool).is_sparse
    assert models(architecture).config.sliding_window == 11


def test_layers_with_a_window_are_not_probed(make: Make, models: Models) -> None:
    with pytest.raises(LayoutError, match="records: each of the 4 layers has a window: none is"):
        make("mistral", records="model")
    with pytest.raises(LayoutError, match=r"layer 2 of .* over a window of 11 tokens"):
        LayerProbe(models("gemma3"), 2)
    # The one two thirds up has a window.
    assert LayerProbe(models("gemma3")).layer == 1
    assert [probed_layer([None] * count) for count in (1, 2, 3, 18)] == [0, 1, 2, 12]
    assert probed_layer([4, 4, 4, 4, None, 4]) == 4
    assert probed_layer([4, 4, 4, 4, 4, None]) == 5
    assert probed_layer([None, 4, None, 4, 4, None]) == 2


def test_records_next_to_windows_are_of_what_the_layer_computes(
    models: Models, ids: Ids, check_drained: Check
) -> None:
    generator = Generator(
        models("gemma3"), num_blocks=64, block_size=4, records="model", gate="unchecked"
    )
    text = ids(60)
    generator.generate(text, max_new_tokens=1)
    probe, records = generator._repair._probe, generator._records
    assert probe is not None
    assert records is not None
    seq = kvtrie.TokenSequence(text, generator.namespace())
    slots = generator.pool.slots(generator.index.lookup(seq).blocks, 0, 56)
    kept = records.read(slots)
    rows = [views[probe.layer] for views in (generator.pool.k, generator.pool.v)]
    assert kept is not None
    k, v = (kernels.gather_rows(view, slots) for view in rows if view is not None)
    at = torch.arange(56)
    assert float(probe.scores(*kept, at, k, v).max()) < 1e-4
    # Layers with a window do not limit what this one sees: the first tokens reach all later ones.
    v[2] += 3
    changed = probe.scores(*kept, at, k, v)
    assert float(changed[:2].max()) < 1e-4
    assert float(changed[2:].min()) > 0
    check_drained(generator)


def test_layer_of_full_attention_is_probed_next_to_windows(models: Models, ids: Ids) -> None:
    # Its rotary module asks for the type of the layer; the other type's base is not the layer's.
    model: Any = models("gemma3")
    assert model.config.layer_types[3] == "full_attention"
    probe = LayerProbe(model, 3)
    prompt = torch.from_numpy(np.asarray(ids(40), dtype=np.int64))
    cache: Any = DynamicCache()
    with torch.inference_mode(), probe.seeing() as seen:
        model(input_ids=prompt[None], past_key_values=cache, use_cache=True)
    assert seen.h is not None
    assert seen.out is not None
    rows = cache.layers[3]
    own = rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1)
    at = torch.arange(40)
    assert float(probe.scores(seen.h, seen.out, at, *own).max()) < 1e-4
    probe._of_type = {"layer_type": "sliding_attention"}
    assert float(probe.scores(seen.h, seen.out, at, *own).max()) > 1e-3


def test_the_namespace_tells_groups_apart(models: Models) -> None:
    model = models("gemma3")
    names = set()
    for kinds in (["sliding_attention", "full_attention"] * 2, ["full_attention"] * 4):
        config = transformers.Gemma3TextConfig(**{**model.config.to_dict(), "layer_types": kinds})
        torch.manual_seed(0)
        other = transformers.AutoModelForCausalLM.from_config(config).eval()
        names.add(Generator(other, num_blocks=8, block_size=4).namespace().rope)
    assert len(names) == 2
    assert any(
        "sliding_attention" in str(name) and '"sliding_window":11' in str(name) for name in names
    )


@pytest.mark.parametrize(("architecture", "most"), [("phi3-longrope", 256), ("llama-ntk", 511)])
def test_prompts_of_another_regime_are_refused_by_name(
    architecture: str, most: int, make: Make, ids: Ids, reference: Any
) -> None:
    generator, plain = make(architecture, num_blocks=256), reference(architecture)
    with pytest.raises(ValueError, match=rf"LongRoPE or dynamic NTK.* differs above {most}:"):
        generator.submit(ids(most + 1))
    prompt = ids(most - 3).tolist()
    done = generator.generate(prompt, max_new_tokens=9, ignore_eos=True)
    # The last token is not run.
    assert len(done.tokens) == 4
    assert done.tokens == plain.greedy(prompt, 4)


def two_shapes() -> tuple[KVLayout, RopeSpec]:
    groups = (
        KVGroup(layers=(0, 2), num_kv_heads=2, head_dim=8, window=5),
        KVGroup(layers=(1,), num_kv_heads=1, head_dim=16, v_head_dim=12),
    )
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4, groups=groups
    )
    narrow, wide = Rotary((1.0, 0.1)), Rotary((0.5, 0.05, 0.005), start=2)
    return layout, RopeSpec(layers=(narrow, wide, None), head_dim=16, head_dims=(8, 16, 8))


def test_a_pool_moves_each_group_with_its_own_shape_and_rotation() -> None:
    layout, rope = two_shapes()
    pool = KVPool(layout, rope, num_blocks=6)
    assert [tuple(view.shape[2:]) for view in pool.k] == [(2, 8), (1, 16), (2, 8)]
    assert [tuple(view.shape[2:]) for view in pool.v if view is not None] == [
        *((2, 8), (1, 12), (2, 8))
    ]
    assert pool.num_bytes == sum(one.nbytes for part in pool._launches for one in part.tensors)
    for view in (*pool.k, *pool.v):
        if view is not None:
            view.copy_(torch.randn(view.shape))
    every = [view.clone() for view in (*pool.k, *pool.v) if view is not None]
    moves = np.array([(1, 12, 5, 11), (7, 18, 3, 0)], dtype=[(name, "i8") for name in FIELDS])
    pool.apply(moves)
    source, dest = torch.arange(1, 6), torch.arange(12, 17)
    for layer, (old, new) in enumerate(zip(every[:3], pool.k, strict=True)):
        rows = kernels.gather_rows(old, source).transpose(0, 1)
        want = kernels.rotate(rows, rope, 11, layer).transpose(0, 1)
        torch.testing.assert_close(kernels.gather_rows(new, dest), want, atol=1e-6, rtol=0)
        assert (rope.layers[layer] is None) == torch.equal(want, rows.transpose(0, 1))
        kept = torch.tensor([0, *range(1, 12), 17, 21, 22, 23])
        assert torch.equal(kernels.gather_rows(new, kept), kernels.gather_rows(old, kept))
        unrotated = torch.arange(18, 21)
        assert torch.equal(
            kernels.gather_rows(new, unrotated), kernels.gather_rows(old, unrotated - 11)
        )
    for old, values in zip(every[3:], pool.v, strict=True):
        assert values is not None
        assert torch.equal(kernels.gather_rows(values, dest), kernels.gather_rows(old, source))
    with pytest.raises(LayoutError, match=r"KVPool\.gather: .*differ in shape"):
        pool.gather([0], 0, 1)
    with pytest.raises(LayoutError, match=r"KVPool\.scatter: .*differ in shape"):
        pool.scatter(torch.zeros(3, 1, 2, 8), None, [0], 0)


def test_parts_of_a_split_keep_the_types_of_their_groups() -> None:
    layout, _ = two_shapes()
    windowed, full = layout.groups
    for groups, types in (
        ((windowed, replace(full, quant="int8")), ("int8", "float32")),
        ((windowed, replace(full, dtype="bfloat16")), ("bfloat16", "float32")),
    ):
        split = Split.of(replace(layout, groups=groups), 16)
        assert (split.full.kv_dtype, split.windowed.kv_dtype) == types


def test_a_moved_run_brings_its_windows_into_a_pool_of_their_own() -> None:
    """Where a window is read, its rows are those of one pool that keeps and moves every token's."""
    layout, rope = two_shapes()
    split = Split.of(layout, 16)
    own_rope = RopeSpec(layers=(rope.layers[0], rope.layers[2]), head_dim=8)
    one = KVPool(layout, rope, num_blocks=16)
    own = KVPool(split.windowed, own_rope, num_blocks=16)
    for view in (*one.k, *one.v):
        assert view is not None
        view.copy_(torch.randn(view.shape))
    text = list(range(24))
    for view, whole in zip((*own.k, *own.v), (one.k[0], one.k[2], one.v[0], one.v[2]), strict=True):
        assert view is not None
        assert whole is not None
        # Block b of group 0 is block 8 + b of the group.
        view[8:14] = whole[:6]
    index = kvtrie.RadixIndex(16, 4, min_run=8, seed=0, groups=[split.group])
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    index.insert(
        kvtrie.TokenSequence(text, space),
        range(6),
        num_computed=24,
        source=kvtrie.COMPUTED,
        groups={GROUP: [(4 * at, 8 + at) for at in range(6)]},
    )
    prompt = kvtrie.TokenSequence([*text[:4], 99, *text[7:24], 98], space)
    with index.plan(prompt, kvtrie.ReusePolicy(scope="namespace")) as plan:
        assert (plan.num_exact, plan.num_approximate) == (4, 17)
        table = np.array([0, *range(10, 15)], dtype=np.int32)
        one.apply(plan.moves(table))
        # The group keeps what is in place, and has blocks for the rest.
        start, blocks = plan.group(GROUP)
        assert (start, blocks.tolist()) == (0, [8])
        own_table = np.array([8, *range(5)], dtype=np.int32)
        own.apply(plan.moves(own_table, group=GROUP))
        assert plan.rebuild(GROUP).tolist() == []
        for gap in [*plan.gaps[:, 0].tolist(), len(prompt)]:
            at = np.arange(max(0, gap - split.window + 1), gap)
            computed = [start <= token < end for token in at for start, end in plan.gaps.tolist()]
            at = at[~np.array(computed).reshape(len(at), -1).any(axis=1)]
            slots = one.slots(table, 0, len(prompt))[at]
            own_slots = own.slots(own_table, 0, len(prompt))[at]
            for mine, every in ((own.k, one.k), (own.v, one.v)):
                for part, other in zip(mine, (every[0], every[2]), strict=True):
                    assert part is not None
                    assert other is not None
                    rows = kernels.gather_rows(part, own_slots)
                    assert torch.equal(rows, kernels.gather_rows(other, slots))


def test_a_rope_of_other_widths_and_one_with_state_are_refused() -> None:
    layout, rope = two_shapes()
    with pytest.raises(LayoutError, match="head_dim 16 in layer 0, the layout has 8"):
        KVPool(layout, RopeSpec(layers=rope.layers, head_dim=16), num_blocks=1)
    with pytest.raises(LayoutError, match="recurrent state in 2 of its layers"):
        KVPool(layout, replace(rope, state_layers=(1, 3)), num_blocks=1)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"head_dims": (8, 16)}, ValueError, "head_dims has 2 of 3 layers"),
        ({"head_dims": (8, 16, 0)}, ValueError, r"head_dims\[2\] must be at least 1, not 0"),
        ({"head_dims": (8, 8, 8)}, ValueError, "head_dim is 16, the widest is 8"),
        ({"head_dims": [8, 16, 8]}, TypeError, "head_dims must be tuple"),
        ({"head_dims": (4, 16, 8), "layers": None}, ValueError, "beyond head_dim 3"),
        ({"state_layers": (-1,)}, ValueError, r"state_layers\[0\] must be at least 0"),
        ({"state_layers": (True,)}, TypeError, r"state_layers\[0\] must be int"),
    ],
)
def test_widths_and_state_of_a_spec_are_checked(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    _, rope = two_shapes()
    if "layers" in changes:
        changes = {"head_dims": (3, 16, 8)}
    with pytest.raises(error, match=said):
        replace(rope, **changes)
