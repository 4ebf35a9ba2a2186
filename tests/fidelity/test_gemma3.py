"""The suite on a model with windows: what passes see, what is rebuilt, and how its page reads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from real import cases, conversations, gemma3, measure, policies, recorded, summary
from real.cases import GEMMA3, HERE, Renderer
from real.plans import BLOCK, MIN_RUN, REUSE, SESSION, Shelf
from real.reader import Reader
from real.views import Choice
from tests.byte_tokenizer import byte_tokenizer
from tests.fidelity.tiny import PASSAGES, SIZE
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import kvtrie
from kvtrie import LayoutError

WINDOW = 64


def config(**changes: Any) -> Gemma3TextConfig:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    made: Any = Gemma3TextConfig
    found: Gemma3TextConfig = made(
        **{
            "vocab_size": 259,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": kinds,
            "max_position_embeddings": 8192,
            "eos_token_id": 2,
        }
        | changes
    )
    return found


@pytest.fixture(scope="module")
def reader() -> Reader:
    torch.manual_seed(0)
    model: Any = Gemma3ForCausalLM(config()).eval()
    # Larger weights than a new model has, so that contexts change what it says.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8) if weight.dim() > 1 else None
    return Reader(model)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = byte_tokenizer()
    return Renderer(tokenizer, cases.form_of(config(), tokenizer))


@pytest.fixture(scope="module")
def bench(reader: Reader, renderer: Renderer) -> measure.Bench:
    return measure.Bench(reader, case(renderer), ([4, 5, 6], reader.full([4, 5, 6])[0]))


def case(renderer: Renderer, kind: str = "prune") -> cases.Tokens:
    writer = conversations.Writer(PASSAGES, "reporting", 1, SIZE)
    return renderer.tokens(conversations.KINDS[kind](writer))


# --- passes ---------------------------------------------------------------------------------------


def sequence(length: int = 300) -> torch.Tensor:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(1))


def own_logits(reader: Reader, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = reader.model(input_ids=ids[None], use_cache=False).logits[0]
    return found


def test_pass_over_the_whole_prompt_is_transformers_own(reader: Reader) -> None:
    ids, at = sequence(), torch.arange(300)
    wanted = own_logits(reader, ids)
    nothing = torch.zeros(4, 0, 2, 16)
    _, rows = reader.mixed(ids, at, (nothing, nothing, at[:0]), num_logits=300)
    assert torch.allclose(rows, wanted, atol=1e-4)
    _, rows = reader.full(ids.tolist(), 300)
    assert torch.allclose(rows, wanted, atol=1e-4)
    # The window is seen: full attention everywhere says otherwise.
    reader.window, kept = 4096, reader.window
    try:
        _, rows = reader.mixed(ids, at, (nothing, nothing, at[:0]), num_logits=300)
    finally:
        reader.window = kept
    assert not torch.allclose(rows, wanted, atol=1e-2)


def test_sparse_pass_over_true_kv_is_transformers_own(reader: Reader) -> None:
    ids, at = sequence(), torch.arange(300)
    kept, _ = reader.full(ids.tolist())
    chosen = torch.rand(300, generator=torch.Generator().manual_seed(2)) < 0.4
    chosen[-1] = True
    given = (kept.k[:, ~chosen], kept.v[:, ~chosen], at[~chosen])
    new, rows = reader.mixed(ids[chosen], at[chosen], given, num_logits=int(chosen.sum()))
    assert torch.allclose(rows, own_logits(reader, ids)[chosen], atol=1e-4)
    assert torch.allclose(new.k, kept.k[:, chosen], atol=1e-4)


def test_greedy_reply_is_transformers_own(reader: Reader) -> None:
    ids = sequence(150)
    kept, last = reader.full(ids.tolist())
    found = reader.greedy(kept, last[-1], 8)
    whole = torch.cat([ids, torch.tensor(found)])
    assert own_logits(reader, whole)[149:-1].argmax(-1).tolist() == found


def test_reply_ends_with_the_forms_end(reader: Reader) -> None:
    kept, last = reader.full(sequence(150).tolist())
    first = int(last[-1].argmax())
    assert Reader(reader.model, [first]).greedy(kept, last[-1], 8) == [first]


def test_probed_layer_has_full_attention(reader: Reader) -> None:
    assert list(reader.windows) == [WINDOW, None, WINDOW, WINDOW]
    assert reader.probed == 1
    with pytest.raises(LayoutError, match="none is probed"):
        Reader(Gemma3ForCausalLM(config(layer_types=["sliding_attention"] * 4)))


def test_probed_layers_attention_is_the_models(reader: Reader) -> None:
    ids, at = sequence(100), torch.arange(100)
    kept, _ = reader.full(ids.tolist())
    own = kept.k[reader.probed], kept.v[reader.probed]
    again = reader.attended(kept.inputs, at, *own, at, chunk=33)
    assert torch.allclose(again, kept.outputs, atol=1e-4)


def test_keys_are_rotated_by_each_layers_base(reader: Reader) -> None:
    ids = sequence(40)
    kept, _ = reader.full(ids.tolist())
    none = torch.zeros(4, 0, 2, 16)
    moved, _ = reader.mixed(ids, torch.arange(40) + 700, (none, none, torch.arange(0)))
    by = torch.full((40,), 700)
    assert torch.allclose(reader.rotated(kept.k, by), moved.k, atol=1e-3)
    shared = reader.rotated(kept.k, by, base_of=1)
    assert torch.allclose(shared[1], moved.k[1], atol=1e-3)
    assert not torch.allclose(shared[0], moved.k[0], atol=1e-1)


# --- windows that are rebuilt ---------------------------------------------------------------------


@pytest.mark.parametrize("carried", [False, True], ids=["rebuilt", "carried"])
def test_rebuilt_tokens_are_those_that_a_plan_lists(
    carried: bool, bench: measure.Bench, reader: Reader, renderer: Renderer
) -> None:
    """Without windows where runs come from; with these, a plan copies the same tokens instead."""
    mine = case(renderer)
    (context,) = mine.contexts
    view = bench.view()
    rebuilt = policies.rebuilt(view, 0).rebuilt
    assert rebuilt is not None
    assert 0 < int(rebuilt.sum()) < view.num_moved
    shelf = Shelf(reader, measure.room(mine), records=False)
    num = len(context) // BLOCK
    in_place = int(view.plan.segments["end"][0]) // BLOCK
    group = kvtrie.Group.window("swa", window=WINDOW, num_blocks=2 * num, block_size=BLOCK)
    index = kvtrie.RadixIndex(shelf.num_blocks, BLOCK, min_run=MIN_RUN, seed=0, groups=[group])
    index.insert(
        shelf.sequence(context),
        range(num),
        num_computed=num * BLOCK,
        source=kvtrie.COMPUTED,
        session=SESSION,
        groups={"swa": [(BLOCK * at, at) for at in range(num if carried else in_place)]},
    )
    listed = torch.zeros_like(rebuilt)
    with index.plan(
        shelf.sequence(mine.prompt), REUSE, session=SESSION, moved_end=mine.moved_end
    ) as plan:
        assert plan.segments["start"].tolist() == view.plan.segments["start"].tolist()
        ranges = plan.rebuild("swa").tolist()
        table = np.arange(num, num - (-len(mine.prompt) // BLOCK))
        moves = plan.moves(table, group="swa")
        first = moves["dest_slot"] - num * BLOCK
        copied = np.stack([first, first + moves["num_tokens"]], axis=1).tolist()
        assert bool(ranges) != carried
        for start, end in [*ranges, *copied]:
            assert not listed[start:end].any()
            listed[start:end] = True
    assert torch.equal(rebuilt, listed)


def test_rebuilding_counts_as_computing(bench: measure.Bench) -> None:
    rebuilt = policies.rebuilt(bench.view(), 0).rebuilt
    assert rebuilt is not None
    row = bench.row(policies.WINDOWS["rebuilt"])
    plain = bench.row(policies.POLICIES["rotated"])
    assert row["computed"] == plain["computed"] + int(rebuilt.sum())
    assert row["kl_reply"] != plain["kl_reply"]


def test_rebuilding_sees_no_window_that_was_not_carried(reader: Reader) -> None:
    # The window's rows of what is hidden may hold anything; full attention's may not.
    ids, at = sequence(), torch.arange(300)
    kept, _ = reader.full(ids.tolist())
    run, hidden = at >= 300 - WINDOW, at < 300 - WINDOW
    given_at = at[:299]
    own = (at >= 300 - WINDOW)[run] & (at[run] < 299)
    answers = []
    for spoiled in (None, (0, 2, 3), (1,)):
        k = kept.k.clone()
        if spoiled is not None:
            k[list(spoiled), :299] += 1
        given = k[:, :299], kept.v[:, :299], given_at
        _, rows = reader.mixed(
            ids[run], at[run], given, rebuilt=own, hidden=torch.ones(299, dtype=torch.bool)
        )
        answers.append(rows)
    assert int(hidden.sum()) > WINDOW
    assert torch.equal(answers[0], answers[1])
    assert not torch.allclose(answers[0], answers[2], atol=1e-3)


def test_rebuilding_everything_after_true_full_kv_is_exact(reader: Reader) -> None:
    # Layers with a window are computed from the start, so nothing is missing.
    ids, at = sequence(), torch.arange(300)
    kept, _ = reader.full(ids.tolist())
    given = kept.k[:, :299].clone(), kept.v[:, :299].clone(), at[:299]
    for layer in (0, 2, 3):
        given[0][layer] = given[1][layer] = 7.0
    _, rows = reader.mixed(
        ids, at, given, rebuilt=at < 299, hidden=torch.ones(299, dtype=torch.bool)
    )
    assert torch.allclose(rows[-1], own_logits(reader, ids)[-1], atol=1e-4)


def test_model_without_windows_has_none_to_rebuild() -> None:
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
        )
    )
    reader = Reader(model.eval())
    one = torch.zeros(1, dtype=torch.long)
    given = torch.zeros(3, 0, 4, 8), torch.zeros(3, 0, 4, 8), one[:0]
    with pytest.raises(ValueError, match="no layer has a window"):
        reader.mixed(one, one, given, rebuilt=one.bool())


def test_all_policies_have_rows_and_controls_are_bad(bench: measure.Bench) -> None:
    kl = {}
    for name in gemma3.POLICIES:
        row = bench.row(gemma3.KNOWN[name])
        kl[name] = sum(row["kl_reply"] + row["kl_quotes"])
    assert kl["exact"] < 1e-4
    assert kl["exact"] < kl["rotated"] < min(kl[name] for name in gemma3.CONTROLS)
    assert kl["exact"] < kl["rebuilt"]


def test_computing_all_that_is_moved_is_full_recomputation(bench: measure.Bench) -> None:
    row = bench.row(policies.Policy("all", lambda view, _: Choice(view.plan.is_moved)))
    assert max(row["kl_reply"] + row["kl_quotes"]) < 1e-5


# --- the form -------------------------------------------------------------------------------------


def said(ids: tuple[int, ...]) -> str:
    return str(byte_tokenizer().decode(list(ids)))


@pytest.mark.parametrize("kind", list(conversations.KINDS))
def test_gemmas_turns_hold_every_kind_of_edit(kind: str, renderer: Renderer) -> None:
    tokens = case(renderer, kind)
    assert tokens.prompt[0] == byte_tokenizer().bos_token_id
    assert not any(tokens.prompt[: len(one)] == one for one in tokens.contexts)
    text = said(tokens.prompt[tokens.moved_end :])
    assert text.startswith("<start_of_turn>user\n")
    assert text.endswith("<end_of_turn>\n<start_of_turn>model\n")
    assert text.count("<start_of_turn>") == 2


def test_reasoning_is_in_the_context_and_not_in_the_prompt(renderer: Renderer) -> None:
    tokens = case(renderer, "strip all")
    context, prompt = said(tokens.contexts[0]), said(tokens.prompt)
    assert context.count("<think>") == context.count("The user shows") == SIZE.sections + 1
    assert "<think>" not in prompt


def test_every_text_has_gemmas_own_reply() -> None:
    lines = (HERE / GEMMA3.records).read_text(encoding="utf-8").splitlines()
    own = {row["passage"]: row for row in map(json.loads, lines)}
    theirs = {json.loads(line)["passage"] for line in recorded.PATH.read_text().splitlines()}
    assert set(own) == theirs
    assert all(row["reasoning"] and "<end_of_turn>" not in row["reply"] for row in own.values())


# --- the page -------------------------------------------------------------------------------------


def test_page_holds_what_the_figures_say() -> None:
    found = json.loads(gemma3.FIGURES.read_text(encoding="utf-8"))
    page = summary.PAGE.read_text(encoding="utf-8")
    assert summary.put(page, gemma3.render(found), gemma3.BEGIN, gemma3.END) == page


def row(policy: str, kl: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "prune",
        "size": "1k",
        "seed": 1,
        "plan": "p",
        "policy": policy,
        "model": "gemma",
        "dtype": "float32",
        "tokens": 1000,
        "computed": 100,
        "extra": 0.0,
        "kl_reply": [kl],
        "kl_quotes": [kl],
        "top1": [1, 1],
        "greedy": True,
        "facts": [{"nll": [0.0, 0.0], "right": [True, True]}],
    } | changes


def test_figures_are_of_the_policies_with_windows_and_have_intervals() -> None:
    rows = [row(name, 0.1 * (name != "exact")) for name in gemma3.POLICIES]
    rows += [row(name, 0.3 * (name != "exact"), seed=2) for name in gemma3.POLICIES]
    rows.append(row("exact", 0.0, seed=3))  # stopped before the others
    found = gemma3.document(rows)
    for by_policy in (
        found["sizes"]["1k"]["groups"]["hard"],
        found["sizes"]["1k"]["kinds"]["prune"],
    ):
        assert list(by_policy) == list(gemma3.POLICIES)
        assert by_policy["rebuilt"]["cases"] == 2
        assert by_policy["rebuilt"]["kl"] == pytest.approx(0.2)
        assert by_policy["rebuilt"]["kl_drawn"] == pytest.approx([0.1, 0.3])
        assert by_policy["exact"]["cases"] == 2
    page = gemma3.render(found)
    assert "0.200 [0.100, 0.300]" in page
    assert "| `rebuilt` | past: KL |" in page


def test_thresholds_are_said_of_each_policy() -> None:
    floor = {"kl": 0.001, "kl_p99": 0.01, "top1": 1.0}
    assert gemma3.past(floor, floor) == []
    assert gemma3.past({"kl": 0.0211, "kl_p99": 0.52, "top1": 0.979}, floor) == [
        "KL",
        "KL 99 %",
        "top 1",
    ]
    assert gemma3.past({"kl": 0.0209, "kl_p99": 0.5, "top1": 0.981}, floor) == []


def test_work_begins_with_every_kind_at_both_sizes() -> None:
    works = list(gemma3.work())
    count = len(conversations.KINDS)
    assert {size for _, size, _ in works[:count]} == {"1k"}
    assert {size for _, size, _ in works[count : 2 * count]} == {"4k"}
    assert len(works) == len(set(works))
