"""Repaired plans in the engine: one pass for all gaps, records, and what happens without them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.cleared import gate, kind
from tests.engines.architectures import CONFIGS
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvtrie
from kvtrie import gates
from kvtrie.engines import _repair, _runner
from kvtrie.engines._repair import RepairCounts
from kvtrie.engines._runner import Runner
from kvtrie.engines.transformers import Generator
from kvtrie.kernels import reference as reference_kernels
from kvtrie.repair import probe as probes
from kvtrie.repair.probe import LayerProbe
from kvtrie.repair.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]
    Models = Callable[[str], PreTrainedModel]

# Bloom takes no positions.
SPARSE = [name for name in CONFIGS if name != "bloom"]
PROBED = ("llama-gqa", "qwen3", "mixtral", "glm", "smollm3", "gemma3", "gpt-oss")


def edited(ids: Ids) -> tuple[list[int], list[int]]:
    text, new = ids(160).tolist(), ids(9, seed=1).tolist()
    return text, text[:21] + text[30:72] + new[:3] + text[90:150] + new[3:]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name in SPARSE
        for dtype in (torch.float64, torch.float32)
        # torch multiplies experts in float32 and less.
        if not (dtype == torch.float64 and name in {"mixtral", "gpt-oss", "mimo-v2"})
    ],
)
def test_one_pass_is_gap_by_gap_except_for_rounding(
    architecture: str,
    dtype: torch.dtype,
    models: Models,
    ids: Ids,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(_runner._CHUNKS, "cpu", 5)
    copied: Any = copy.deepcopy(models(architecture))
    model: Any = copied.to(dtype)
    generator = Generator(model, num_blocks=32, block_size=4)
    pool, runner = generator.pool, Runner(model, generator.pool)
    assert runner.is_sparse
    tokens = ids(60)
    seq = kvtrie.TokenSequence(tokens, generator.namespace())
    tables = [np.arange(15, dtype=np.int32), np.arange(16, 31, dtype=np.int32)]
    gaps = [(3, 4), (9, 17), (30, 31), (41, 55), (59, 60)]
    rows = []
    for table in tables:
        # KV of another text: what is not computed differs from what it would be.
        other = kvtrie.TokenSequence(ids(60, seed=3), generator.namespace())
        runner.run(other, table, [(0, 60)])
        if table is tables[0]:
            rows.append(runner.run(seq, table, gaps))
        else:
            rows.append([runner.run(seq, table, [gap]) for gap in gaps][-1])
    tolerance = 1e-5 if dtype == torch.float64 else 1e-4
    assert float((rows[0] - rows[1]).abs().max()) <= tolerance * float(rows[1].abs().max())
    slots = [pool.slots(table, 0, 60) for table in tables]
    for rows_of_layer in (*pool.k, *pool.v):
        if rows_of_layer is not None:
            found, expected = (reference_kernels.gather_rows(rows_of_layer, at) for at in slots)
            assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("architecture", ["llama-gqa", "bloom"])
def test_models_without_masks_compute_gap_by_gap(architecture: str, models: Models) -> None:
    model = models(architecture)
    pool = Generator(model, num_blocks=8, block_size=4).pool
    assert Runner(model, pool).is_sparse == (architecture != "bloom")


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("repair", ["fronts", "ngrams", "probe", "question", "adaptive"])
def test_everything_recomputed_is_the_answer_without_reuse(
    repair: str, architecture: str, make: Make, ids: Ids, check_drained: Check, reference: Any
) -> None:
    text, prompt = edited(ids)
    generator = make(architecture, num_blocks=128, gate="unchecked", records="model")
    generator.generate(text, max_new_tokens=1)
    policy = kvtrie.ReusePolicy(scope="namespace", recompute_share=1.0, repair=repair)
    done = generator.generate(
        prompt, max_new_tokens=4, ignore_eos=True, return_logits=True, policy=policy
    )
    expected = reference(architecture).logits(prompt, done.tokens)
    assert done.usage.moved == 0
    assert done.logits is not None
    assert float((done.logits - expected).abs().max()) < 1e-3
    # All of it is exact: it is found again as such.
    again = generator.generate(prompt, max_new_tokens=1)
    assert again.usage.exact >= len(prompt) - 4
    check_drained(generator)


@pytest.mark.parametrize("architecture", PROBED)
@pytest.mark.parametrize("repair", ["ngrams", "probe", "question"])
def test_a_share_of_what_moved_is_computed(
    architecture: str, repair: str, make: Make, ids: Ids, check_drained: Check
) -> None:
    text, prompt = edited(ids)
    generator = make(architecture, num_blocks=256, gate="unchecked", records="model")
    generator.generate(text, max_new_tokens=1)
    plain = generator.generate(
        prompt, max_new_tokens=1, policy=kvtrie.ReusePolicy(scope="namespace")
    ).usage
    generator.forget()
    generator.generate(text, max_new_tokens=1)
    policy = kvtrie.ReusePolicy(scope="namespace", recompute_share=0.25, repair=repair, max_hops=9)
    done = generator.generate(prompt, max_new_tokens=1, policy=policy).usage
    assert plain.moved > 60
    wanted = -(-plain.moved // 4)
    assert wanted <= plain.moved - done.moved <= wanted + 4
    assert (generator.repair_counts.chosen, generator.repair_counts.without_records) == (1, 0)
    # Records are copied with KV: the next edit has them, too.
    later = prompt[:10] + prompt[14:]
    generator.generate(later, max_new_tokens=1, policy=policy)
    assert (generator.repair_counts.chosen, generator.repair_counts.without_records) == (2, 0)
    check_drained(generator)


def test_fronts_where_records_are_missing_or_do_not_fit(make: Make, ids: Ids) -> None:
    text, prompt = edited(ids)
    policy = kvtrie.ReusePolicy(scope="namespace", recompute_share=0.25, repair="probe")
    fronts = policy.replace(repair="fronts")

    def computed(generator: Generator, policy: kvtrie.ReusePolicy) -> int:
        return generator.generate(prompt, max_new_tokens=1, policy=policy).usage.computed

    plain = make(num_blocks=128, gate="unchecked")
    plain.generate(text, max_new_tokens=1)
    expected = computed(plain, fronts)

    def check(generator: Generator) -> None:
        assert computed(generator, policy) == expected
        assert generator.repair_counts.without_records == 1
        assert generator.repair_counts.chosen == 0

    none = make(num_blocks=128, gate="unchecked")
    none.generate(text, max_new_tokens=1)
    check(none)
    for name, value in (("layer", 0), ("hidden", 32), ("dtype", torch.bfloat16)):
        generator = make(num_blocks=128, gate="unchecked", records="model")
        generator.generate(text, max_new_tokens=1)
        setattr(generator._records, name, value)
        check(generator)
    # KV that the engine did not compute itself has no records.
    generator = make(num_blocks=128, gate="unchecked", records="model")
    generator.generate(text, max_new_tokens=1)
    generator._repair.forget(np.arange(128, dtype=np.int32))
    check(generator)


PROBE = kvtrie.ReusePolicy(min_run=16, recompute_share=0.25, repair="probe", scope="namespace")
FRONTS = PROBE.replace(repair="fronts")


def gated(generator: Generator, *policies: kvtrie.ReusePolicy) -> gates.Gate:
    """A gate that clears these for every plan."""
    own = generator.namespace()
    named = [gates.Measured(one.repair, one, (kind(),)) for one in policies]
    return gate(
        model=own.model, kv_dtype=own.kv_dtype, rope=own.rope, measured=tuple(named), policy=FRONTS
    )


@pytest.mark.parametrize("records", [None, "model"])
@pytest.mark.parametrize("cleared", [(PROBE,), (PROBE, FRONTS)], ids=["probe", "both"])
def test_a_gate_that_clears_the_probe_does_not_clear_fronts(
    cleared: tuple[kvtrie.ReusePolicy, ...],
    records: str | None,
    make: Make,
    ids: Ids,
    check_drained: Check,
) -> None:
    """What lacks records got fronts under the verdict on the probe."""
    text, prompt = edited(ids)
    generator = make(num_blocks=128, gate=gated(make(), *cleared), records=records)
    generator.generate(text, max_new_tokens=1)
    generator._repair.forget(np.arange(128, dtype=np.int32))
    request = generator.submit(prompt, max_new_tokens=1, policy=PROBE)
    generator.step()
    assert generator.repair_counts == RepairCounts(chosen=0, without_records=1)
    assert request.decision.policy == (FRONTS if len(cleared) == 2 else kvtrie.EXACT_ONLY)
    assert request.usage is not None
    assert (request.usage.moved > 0) == (len(cleared) == 2)
    check_drained(generator)


def test_a_ladder_without_records_is_that_of_a_generator_without_them(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    text, prompt = edited(ids)
    own = [one.replace(scope="conversation") for one in (PROBE, FRONTS)]
    for cleared, is_moved in ((own[:1], False), (own, True)):
        generator = make(num_blocks=128, gate=gated(make(), *cleared), records="model")
        generator.generate(text, max_new_tokens=1, session="chat")
        assert generator.generate(prompt, max_new_tokens=1, session="chat").usage.moved > 0
        generator.forget()
        generator.generate(text, max_new_tokens=1, session="chat")
        generator._repair.forget(np.arange(128, dtype=np.int32))
        done = generator.generate(prompt, max_new_tokens=1, session="chat")
        assert (done.usage.moved > 0) == is_moved
        assert done.decision.policy.repair == "fronts"
        check_drained(generator)


def test_fronts_in_place_of_the_probe_are_not_reused_as_its_own(make: Make, ids: Ids) -> None:
    """A plan under the probe's policy used KV that was built with fronts."""
    text, prompt = edited(ids)
    generator = make(num_blocks=128, gate="unchecked", records="model")
    generator.generate(text, max_new_tokens=1)
    generator._repair.forget(np.arange(128, dtype=np.int32))
    assert generator.generate(prompt, max_new_tokens=1, policy=PROBE).usage.moved > 0
    assert generator.repair_counts.without_records == 1
    seq = kvtrie.TokenSequence(prompt, generator.namespace())
    with generator.index.plan(seq, FRONTS) as plan:
        assert len(plan.blocks) == (len(prompt) - 1) // 4
    with generator.index.plan(seq, PROBE) as plan:
        assert len(plan.blocks) < (len(prompt) - 1) // 4


def test_the_probe_runs_what_is_computed_before_the_last_moved_token(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, new = ids(160).tolist(), ids(40, seed=1).tolist()
    policy = kvtrie.ReusePolicy(scope="namespace", recompute_share=0.25, repair="probe")
    monkeypatch.setattr(_repair, "_MOST_SEEN", 6)
    begun: list[list[tuple[int, int]]] = []
    begin = Runner.begin

    def noted(self: Runner, tokens: Any, table: Any, ranges: Any) -> None:
        begun.append(list(ranges))
        begin(self, tokens, table, ranges)

    monkeypatch.setattr(Runner, "begin", noted)

    def counts(prompt: list[int]) -> tuple[int, int]:
        generator = make(num_blocks=256, gate="unchecked", records="model")
        generator.generate(text, max_new_tokens=1)
        generator.generate(prompt, max_new_tokens=1, policy=policy)
        return generator.repair_counts.chosen, generator.repair_counts.without_records

    # However long the last message is, and with a short new text in the middle.
    assert counts(text[8:120] + new) == (1, 0)
    assert begun == []
    assert counts(text[:40] + new[:5] + text[60:120] + new[5:]) == (1, 0)
    assert begun == [[(40, 45)]]
    # Too much to compute in the middle.
    assert counts(text[:40] + new[:7] + text[60:120] + new[7:]) == (0, 1)


def test_records_say_what_they_take_and_are_forgotten_with_their_blocks() -> None:
    records = Records(3, 4, 8, layer=1, dtype=torch.float32)
    small = Records(3, 4, 8, layer=1, dtype=torch.bfloat16, fp8=True)
    assert (records.bytes_per_token, small.bytes_per_token) == (2 * 8 * 4 + 1, 2 * 8 + 8 + 1)
    slots = torch.tensor([2, 5, 6])
    h, out = torch.randn(3, 8), 100 * torch.randn(3, 8)
    for one in (records, small):
        assert one.read(slots) is None
        one.write(slots, h.to(one.dtype), out.to(one.dtype))
        kept = one.read(slots)
        assert kept is not None
        for found, given in zip(kept, (h, out), strict=True):
            off = (found.float() - given).abs().max()
            assert off <= (0 if one is records else 0.07) * given.abs().max()
        fields = ("source_slot", "dest_slot", "num_tokens", "delta")
        moves = np.array([(5, 8, 2, -3)], dtype=[(name, "i8") for name in fields])
        one.move(moves)
        moved = one.read(torch.tensor([8, 9]))
        assert moved is not None
        assert torch.equal(moved[0], kept[0][1:])
        one.forget(np.array([1], dtype=np.int32))
        assert one.read(torch.tensor([5])) is None
        assert one.read(torch.tensor([2])) is not None


def test_the_probe_of_kv_that_did_not_change_scores_nothing(models: Models, ids: Ids) -> None:
    model = models("llama-gqa")
    probe = LayerProbe(model)
    generator = Generator(model, num_blocks=32, block_size=4, records="model")
    generator.generate(ids(40), max_new_tokens=1)
    table = generator.index.lookup(kvtrie.TokenSequence(ids(40), generator.namespace())).blocks
    assert generator._records is not None
    slots = generator.pool.slots(table, 0, 36)
    kept = generator._records.read(slots)
    assert kept is not None
    k, v = generator.pool.gather(table, 0, 36)
    assert v is not None
    at = torch.arange(36)
    same = probe.scores(*kept, at, k[probe.layer], v[probe.layer])
    assert float(same.max()) < 1e-4
    v[probe.layer][5] += 3
    other = probe.scores(*kept, at, k[probe.layer], v[probe.layer])
    assert float(other[:5].max()) < 1e-4
    assert float(other[5:].min()) > 0
    paid = probe.attention(kept[0][-4:], at[-4:], k[probe.layer], v[probe.layer])
    assert float(paid.sum()) == pytest.approx(1, abs=1e-3)


def test_attention_weights_by_chunk_are_those_of_the_whole_matrix(models: Models, ids: Ids) -> None:
    model: Any = models("llama-gqa")
    probe = LayerProbe(model)
    prompt = torch.from_numpy(np.asarray(ids(300), dtype=np.int64))
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode(), probe.seeing() as seen:
        model(input_ids=prompt[None], past_key_values=cache, use_cache=True)
    assert seen.h is not None
    rows = cache.layers[probe.layer]
    # Some tokens, at other positions than their own, as moved ones are.
    at = torch.tensor([n for n in range(3, 300) if n % 3])
    h = seen.h[at - 3]
    keys, values = rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1)

    block, attn = model.model.layers[probe.layer], model.model.layers[probe.layer].self_attn
    with torch.inference_mode():
        states = block.input_layernorm(h)[None]
        q = attn.q_proj(states).view(1, len(at), -1, attn.head_dim).transpose(1, 2)
        cos, sin = model.model.rotary_emb(states, position_ids=at[None])
        q = apply_rotary_pos_emb(q, q, cos, sin)[0][0]
        k = rows.keys[0].repeat_interleave(len(q) // rows.keys.shape[1], dim=0)
        scores = q @ k.transpose(1, 2) * attn.scaling
        scores[:, torch.arange(300) > at[:, None]] = -torch.inf
        naive = scores.softmax(-1)

    kind = model.config._attn_implementation
    done = 0
    for some, new, weights in probe.attended(h, at, keys, values, weighs=True):
        assert weights is not None
        num, end = len(at[some]), int(at[some][-1]) + 1
        assert num <= 128
        assert weights.shape == (len(naive), num, end)
        assert weights.dtype == torch.float32
        assert torch.allclose(weights, naive[:, some, :end], atol=1e-5)
        assert new.shape == (num, probe.hidden)
        assert model.config._attn_implementation == kind
        done += num
    assert done == len(at) > 128
    paid = probe.attention(h, at, keys, values)
    assert torch.allclose(paid, naive.mean(dim=(0, 1)), atol=1e-6)
    assert all(weights is None for _, _, weights in probe.attended(h, at, keys, values))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_scores_do_not_depend_on_how_many_attend_at_once(
    device: str, models: Models, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = copy.deepcopy(models("llama-gqa"))
    model = model.to(device)
    probe = LayerProbe(model)
    prompt = torch.from_numpy(np.asarray(ids(300), dtype=np.int64)).to(device)
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode(), probe.seeing() as seen:
        model(input_ids=prompt[None], past_key_values=cache, use_cache=True)
    assert seen.h is not None
    assert seen.out is not None
    rows = cache.layers[probe.layer]
    keys, values = rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1)
    at = torch.arange(9, 300, device=device)
    given = seen.h[at - 9], seen.out[at - 9], at, keys, values
    want = probe.scores(*given)
    assert float(want.min()) > 0
    for name in ("_CHUNK", "_CHUNK_ON_GPU"):
        monkeypatch.setattr(probes, name, 7)
    assert torch.allclose(probe.scores(*given), want, rtol=1e-3)
    none = torch.arange(0, device=device)
    assert probe.scores(seen.h[:0], seen.out[:0], none, keys, values).shape == (0,)


def test_what_cannot_be_probed_is_refused(make: Make, models: Models) -> None:
    for name in ("gpt-neox", "bloom", "deepseek-v3"):
        with pytest.raises(kvtrie.LayoutError, match="records"):
            make(name, records="model")
    with pytest.raises(ValueError, match="'model', 'fp8' or None, not 'all'"):
        make(records="all")
    with pytest.raises(kvtrie.LayoutError, match="layer 9 is not one"):
        LayerProbe(models("llama-gqa"), 9)
