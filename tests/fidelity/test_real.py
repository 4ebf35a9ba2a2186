"""The fidelity suite's own code, on a tiny random model: what it computes, chooses and counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from real import (
    adaptive,
    chains,
    conversations,
    default,
    first_token,
    gpu,
    measure,
    ours,
    policies,
    recorded,
    summary,
    texts,
)
from real.__main__ import Suite
from real.cases import Renderer
from real.plans import BLOCK, REUSE, SESSION, Shelf
from real.reader import Reader
from real.rows import Rows
from real.views import Choice, View
from tests.byte_tokenizer import byte_tokenizer
from tests.fidelity.tiny import PASSAGES, SIZE
from tests.pretended import THERE, pretended_gpu
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie import EXACT_ONLY, ReusePolicy
from kvtrie.engines._repair import Repair
from kvtrie.engines.transformers import Generator
from kvtrie.gates import Box
from kvtrie.gates.decision import Decision, Judged, Ladder
from kvtrie.repair import Adaptive
from kvtrie.repair.choice import smoothed

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "tools" / "smollm2_chat_template.jinja").read_text(encoding="utf-8")


def tiny_model(num_layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    # Larger weights than a new model has, so that contexts change what it says.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else None
    return model


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(tiny_model())


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(TEMPLATE))


def written(kind: str, wording: str = "reporting", seed: int = 1) -> conversations.Case:
    return conversations.KINDS[kind](conversations.Writer(PASSAGES, wording, seed, SIZE))


@pytest.fixture(scope="module")
def bench(reader: Reader, renderer: Renderer) -> measure.Bench:
    case = renderer.tokens(written("reorder"))
    ids = list(range(3, 131))
    return measure.Bench(reader, case, (ids, reader.full(ids)[0]))


# --- passes ---------------------------------------------------------------------------------------


def test_mixed_pass_over_true_kv_equals_a_full_one(reader: Reader) -> None:
    ids = torch.randint(3, 200, (80,), generator=torch.Generator().manual_seed(1))
    kept, logits = reader.full(ids.tolist(), 80)
    chosen = torch.rand(80, generator=torch.Generator().manual_seed(2)) < 0.4
    chosen[-1] = True
    at = torch.arange(80)
    given = (kept.k[:, ~chosen], kept.v[:, ~chosen], at[~chosen])
    new, rows = reader.mixed(ids[chosen], at[chosen], given, num_logits=int(chosen.sum()))
    assert torch.allclose(rows, logits[chosen], atol=1e-4)
    assert torch.allclose(new.k, kept.k[:, chosen], atol=1e-4)
    assert torch.allclose(new.inputs, kept.inputs[chosen], atol=1e-4)


def test_replies_of_one_pass_do_not_see_each_other(reader: Reader) -> None:
    prompt, one, two = list(range(3, 40)), [50, 51, 52], [60, 61, 62, 63]
    kept, _ = reader.full(prompt)
    end = len(prompt)
    _, rows = reader.mixed(
        torch.tensor(one + two),
        torch.tensor([end, end + 1, end + 2, end, end + 1, end + 2, end + 3]),
        (kept.k, kept.v, torch.arange(end)),
        branches=torch.tensor([1] * 3 + [2] * 4),
        num_logits=7,
    )
    for part, reply in ((rows[:3], one), (rows[3:], two)):
        _, alone = reader.full(prompt + reply, len(reply))
        assert torch.allclose(part, alone, atol=1e-4)


def test_probe_repeats_what_the_layer_said_in_an_unchanged_context(reader: Reader) -> None:
    ids = list(range(3, 103))
    kept, _ = reader.full(ids)
    at = torch.arange(100)
    again = reader.attended(
        kept.inputs, at, kept.k[reader.probed], kept.v[reader.probed], at, chunk=33
    )
    assert torch.allclose(again, kept.outputs, atol=1e-4)


# --- plans ----------------------------------------------------------------------------------------


def test_moved_keys_of_the_first_layer_are_those_of_full_recomputation(
    bench: measure.Bench,
) -> None:
    # The first layer's K and V depend on token and position alone: only the rotation can be wrong.
    view = bench.view()
    moved = view.plan.is_moved
    assert int(moved.sum()) > 100
    assert torch.allclose(view.plan.k[0][moved], view.truth.k[0][moved], atol=1e-4)
    assert torch.allclose(view.plan.v[0][moved], view.truth.v[0][moved], atol=1e-4)
    assert not torch.allclose(view.plan.k[1][moved], view.truth.k[1][moved], atol=1e-2)


def test_moved_runs_supply_nothing_of_the_last_message(reader: Reader, renderer: Renderer) -> None:
    case = renderer.tokens(written("nonce"))
    shelf = Shelf(reader, measure.room(case))
    # Another context, so that all but its head is found elsewhere.
    other = (3, *case.prompt)
    shelf.add(other, reader.full(other)[0])
    plan = shelf.assemble(case.prompt, REUSE, moved_end=case.moved_end)
    assert plan.is_moved[: case.moved_end].any()
    assert not plan.is_moved[case.moved_end :].any()
    assert all(end <= case.moved_end for _, end, _ in plan.runs)


def test_moved_runs_are_of_the_own_conversation(reader: Reader, renderer: Renderer) -> None:
    case = renderer.tokens(written("assembled"))
    shelf = Shelf(reader, measure.room(case))
    assert set(measure.sessions(case)).isdisjoint(
        measure.sessions(renderer.tokens(written("drop")))
    )
    for ids, session in zip(case.contexts, measure.sessions(case), strict=True):
        shelf.name(ids, session)
    with shelf.plan(case.prompt, REUSE, case.moved_end) as plan:
        assert not plan.num_approximate
    with shelf.plan(case.prompt, measure.approximate(case), case.moved_end) as plan:
        assert plan.num_approximate


def test_plan_without_kv_has_the_same_name(reader: Reader, renderer: Renderer) -> None:
    case = renderer.tokens(written("prune"))
    other = renderer.tokens(written("prune", seed=2))
    first = measure.plan_digest(reader, case)
    assert first == measure.plan_digest(reader, case)
    assert first != measure.plan_digest(reader, other)


@pytest.mark.parametrize(
    ("failures", "taken"),
    [((None, None), "rotated"), (("no", None), "fronts20"), (("no", "no"), "exact")],
)
def test_default_takes_the_cheapest_policy_cleared_for_the_plan(
    reader: Reader, renderer: Renderer, failures: tuple[str | None, ...], taken: str
) -> None:
    names = {REUSE: "rotated", REUSE.replace(recompute_share=0.2): "fronts20"}
    rungs = tuple(
        Decision(policy, True, "", (Judged("all", Box(), failure, computed),))
        for policy, failure, computed in zip(names, failures, (0.1, 0.2), strict=True)
    )
    ladder = Ladder(REUSE, True, "", None, rungs)
    case = renderer.tokens(written("date"))
    got = default.taken(default.filled(reader, case), case, ladder, names)
    assert got.name == taken
    assert (got.moved > 0) == (taken != "exact")


def test_default_moves_what_is_of_the_own_conversation(reader: Reader, renderer: Renderer) -> None:
    names = {REUSE: "rotated"}
    ladder = Decision(REUSE, True, "", None)
    for kind in ("strip all", "assembled"):
        case = renderer.tokens(written(kind))
        shelf = default.filled(reader, case)
        for session in (SESSION, "another", None):
            got = default.taken(shelf, case, ladder, names, session)
            assert (got.moved > 0) == ((kind, session) == ("strip all", SESSION))


# --- edits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(conversations.KINDS))
def test_edit_moves_text_and_keeps_its_facts(kind: str, renderer: Renderer) -> None:
    case = written(kind)
    tokens = renderer.tokens(case)
    assert len(case.facts) == len(tokens.facts) >= 3
    text = " ".join(str(one["content"]) for one in case.prompt)
    for stem, value in case.facts:
        assert text.count(f"{stem}{value}") == 2
    # No context is a prefix of the prompt: something moves.
    assert not any(tokens.prompt[: len(one)] == one for one in tokens.contexts)
    last = str(case.prompt[-1]["content"])
    assert len(tokens.prompt) - tokens.moved_end > len(last)


@pytest.mark.parametrize("kind", list(conversations.KINDS))
def test_values_are_where_the_facts_say(kind: str, renderer: Renderer) -> None:
    case = written(kind)
    tokens = renderer.tokens(case)
    tokenizer = byte_tokenizer(TEMPLATE)
    for fact, (_, value) in zip(tokens.facts, case.facts, strict=True):
        assert tokenizer.decode(list(tokens.quotes[fact.start : fact.end])) == value


def test_sets_share_no_wording_and_no_seed() -> None:
    tuning, reporting = (conversations.WORDINGS[one] for one in ("tuning", "reporting"))
    assert not set(tuning.facts) & set(reporting.facts)
    for name in ("fact", "section", "system", "question", "earlier", "notice"):
        assert getattr(tuning, name) != getattr(reporting, name)
    assert len({*conversations.SETS.values()}) == 2
    assert conversations.KINDS["drop"](conversations.Writer(PASSAGES, "tuning", 1, SIZE)) != (
        written("drop")
    )


@pytest.mark.parametrize("kind", ["stub", "prune"])
def test_what_the_model_said_is_between_cleared_results(kind: str) -> None:
    # W12's messages between results have a quarter of their length. With a call alone between two
    # notices, what is between them is shorter than `min_run`, and computed.
    case = written(kind)
    notice = conversations.WORDINGS["reporting"].notice
    said = [str(one["content"]) for one in case.prompt if one["role"] == "assistant"]
    assert sum(one["content"] == notice for one in case.prompt) == 4
    assert said[0].startswith("Reading the ")
    for text in said[1:-1]:
        assert text.startswith("It is text ")
        assert " Reading the " in text


def test_replies_to_all_passages_of_a_section_are_said() -> None:
    size = conversations.Size("tiny", 3, 4, 5)
    case = conversations.stub(conversations.Writer(PASSAGES, "reporting", 1, size))
    said = [str(one["content"]) for one in case.prompt if one["role"] == "assistant"]
    assert [one.count("It is text") for one in said[:-1]] == [0, 4, 4, 4, 4]


def test_reasoning_is_in_the_context_and_not_in_the_prompt(renderer: Renderer) -> None:
    case = written("strip all")
    tokenizer = byte_tokenizer(TEMPLATE)
    (context,), prompt = renderer.tokens(case).contexts, renderer.tokens(case).prompt
    assert tokenizer.decode(list(context)).count("<think>") == SIZE.sections + 1
    assert "<think>" not in tokenizer.decode(list(prompt))


def test_ten_edits_share_contexts_with_the_steps_before(renderer: Renderer) -> None:
    writer = conversations.Writer(PASSAGES, "reporting", 3, SIZE)
    steps = conversations.ten_edits(writer)
    assert len(steps) == 10
    for before, after in pairwise(steps):
        assert after.contexts[0][:-1] == before.prompt
        assert after.contexts[0][-1]["reasoning_content"]
        assert len(renderer.tokens(after).facts) == SIZE.sections


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [one for one in policies.POLICIES if one[-1].isdigit()])
def test_choice_is_moved_tokens_within_the_budget(name: str, bench: measure.Bench) -> None:
    view, policy = bench.view(), policies.POLICIES[name]
    choice = policy.chooses(view, policy.share)
    assert choice.chosen.dtype == torch.bool
    assert not (choice.chosen & ~view.plan.is_moved).any()
    assert choice.extra >= 0
    if policy.share:
        # KV of a model with random weights changes so much that an adaptive share is the largest.
        most = Adaptive.MOST if name.startswith("adaptive") else 1
        number, budget = int(choice.chosen.sum()), view.budget(most * policy.share)
        assert abs(number - budget) <= len(view.plan.runs)
    assert torch.equal(choice.chosen, policy.chooses(view, policy.share).chosen)


def test_fronts_are_the_shortest_that_give_the_share(bench: measure.Bench) -> None:
    view = bench.view()
    chosen = policies.POLICIES["fronts20"].chooses(view, 0.2).chosen
    numbers = {int(chosen[start:end].sum()) for start, end, _ in view.plan.runs if end - start > 60}
    assert len(numbers) == 1
    wanted = 0.2 * view.num_moved
    assert int(policies.first(view, numbers.pop() - 1).sum()) < wanted <= int(chosen.sum())


def test_computing_all_that_is_moved_is_full_recomputation(bench: measure.Bench) -> None:
    row = bench.row(policies.Policy("all", lambda view, _: Choice(view.plan.is_moved)))
    kl = row["kl_reply"] + row["kl_quotes"]
    assert max(kl) < 1e-5
    assert row["greedy"]
    assert sum(row["top1"]) == len(kl)
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in (fact["nll"] for fact in row["facts"]))


def test_controls_are_further_off_than_what_they_control(bench: measure.Bench) -> None:
    def kl(name: str) -> float:
        row = bench.row(policies.POLICIES[name])
        return float(sum(row["kl_reply"] + row["kl_quotes"]))

    assert kl("exact") < 1e-4 < kl("rotated") < kl("foreign")


def test_probe_finds_nothing_where_nothing_changed(reader: Reader) -> None:
    ids = list(range(3, 83))
    kept, _ = reader.full(ids)
    shelf = Shelf(reader, 512)
    shelf.add((9, *ids), reader.full((9, *ids))[0])
    plan = shelf.assemble(ids, REUSE, moved_end=79)
    view = View(reader, plan, kept, kept, torch.zeros(80), 79, 0)
    changed = ours.changes(view, ours.moved_by(view)).mean()
    plan.inputs[:], plan.outputs[:] = kept.inputs, kept.outputs
    assert ours.changes(view, ours.moved_by(view)).mean() < changed / 100


@pytest.mark.parametrize("name", ["ngrams", "probe", "question", "adaptive"])
def test_engine_computes_the_tokens_that_the_suite_measures(
    name: str,
    reader: Reader,
    renderer: Renderer,
    bench: measure.Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = renderer.tokens(written("reorder"))
    num_blocks = measure.room(case) // BLOCK
    engine = Generator(reader.model, num_blocks=num_blocks, gate="unchecked", records="model")
    for ids, session in zip(case.contexts, measure.sessions(case), strict=True):
        engine.generate(list(ids), max_new_tokens=1, policy=EXACT_ONLY, session=session)
    chosen = torch.zeros(len(case.prompt), dtype=torch.bool)
    of_plan = Repair._chooser

    class Seen:
        def __init__(self, chooser: Any) -> None:
            self._chooser = chooser

        def choose(self, moved: Any, share: float) -> Any:
            ranges = self._chooser.choose(moved, share)
            for start, end in ranges:
                chosen[int(start) : int(end)] = True
            return ranges

    monkeypatch.setattr(Repair, "_chooser", lambda *given: Seen(of_plan(*given)))
    policy = ReusePolicy(recompute_share=0.2, repair=name, max_hops=REUSE.max_hops)
    engine.generate(
        list(case.prompt),
        max_new_tokens=1,
        policy=policy,
        session=SESSION,
        moved_end=case.moved_end,
    )
    own = policies.POLICIES[f"{name}20"].chooses(bench.view(), 0.2).chosen
    assert own.any()
    assert torch.equal(chosen, own)


def test_chain_over_exact_kv_stays_exact(reader: Reader, renderer: Renderer) -> None:
    writer = conversations.Writer(PASSAGES, "reporting", 3, conversations.Size("tiny", 3, 1, 3))
    steps = [renderer.tokens(one) for one in conversations.ten_edits(writer, steps=2)]
    truths = [measure.reference(reader, one) for one in steps]
    for row in chains.rows(reader, steps, truths, policies.POLICIES["exact"]):
        assert max(row["kl_reply"] + row["kl_quotes"]) < 1e-4
    approximate = list(chains.rows(reader, steps, truths, policies.POLICIES["rotated"]))
    assert all(row["moved"] > BLOCK for row in approximate)
    assert max(approximate[1]["kl_reply"]) > 1e-4


def test_what_was_moved_once_is_computed_under_one_hop(reader: Reader, renderer: Renderer) -> None:
    writer = conversations.Writer(PASSAGES, "reporting", 3, conversations.Size("tiny", 3, 1, 3))
    steps = [renderer.tokens(one) for one in conversations.ten_edits(writer, steps=2)]
    truths = [measure.reference(reader, one) for one in steps]
    many = list(chains.rows(reader, steps, truths, policies.POLICIES["rotated"]))
    one = list(chains.rows(reader, steps, truths, policies.ONE_HOP))
    assert one[0] == many[0]
    assert one[1]["moved"] < many[1]["moved"]
    assert one[1]["computed"] > many[1]["computed"]


def test_adaptive_share_is_the_probes_times_the_mean_change(bench: measure.Bench) -> None:
    view = bench.view()
    moved = ours.moved_by(view)
    change = smoothed(ours.changes(view, moved).numpy(), moved.positions).mean()
    share = 0.2 * min(Adaptive.MOST, change / Adaptive.TYPICAL)
    own = ours.adaptive(view, 0.2)
    assert torch.equal(own.chosen, ours.probe(view, share).chosen)
    # It asks the same layer: choosing costs as much.
    assert own.extra == ours.probe(view, 0.2).extra


def test_true_kv_in_half_of_the_layers(bench: measure.Bench) -> None:
    view = bench.view()
    half = view.reader.num_layers // 2
    moved = view.plan.is_moved
    for choose, some in ((policies.lower, slice(half)), (policies.upper, slice(half, None))):
        choice = choose(view, 0)
        assert not choice.chosen.any()
        assert choice.kv is not None
        for given, plan, true in zip(
            choice.kv, (view.plan.k, view.plan.v), (view.truth.k, view.truth.v), strict=True
        ):
            assert torch.equal(given[some][:, moved], true[some][:, moved])
            is_stale = torch.ones(len(given), dtype=torch.bool)
            is_stale[some] = False
            assert torch.equal(given[is_stale], plan[is_stale])
            assert torch.equal(given[:, ~moved], plan[:, ~moved])


def test_keys_are_rotated_as_the_model_does(reader: Reader) -> None:
    ids = list(range(3, 30))
    kept, _ = reader.full(ids)
    # The first layer's keys depend on token and position alone.
    later = reader.full([7] * 9 + ids)[0].k[:1, 9:]
    by = torch.full((len(ids),), 9)
    assert torch.allclose(reader.rotated(kept.k[:1], by), later.float(), atol=1e-4)
    assert torch.allclose(reader.rotated(later, -by), kept.k[:1].float(), atol=1e-4)


def test_lost_attention_is_to_what_is_not_in_the_prompt(bench: measure.Bench) -> None:
    view = bench.view()
    (start, end, old), *_ = view.plan.runs
    context = view.context(start, end, old)
    ids = view.contexts[context]
    kept = view.kept(context, start)
    before = set(view.plan.ids[:start].tolist())
    assert not kept[old:].any()
    assert all(ids[at] in before for at in kept.nonzero()[:, 0].tolist())
    assert kept.any()
    chosen = policies.lost(view, 0.2).chosen
    assert int(chosen.sum()) == view.budget(0.2)
    assert not (chosen & ~view.plan.is_moved).any()


def test_corrected_kv_differs_in_what_is_neither_in_place_nor_computed(
    bench: measure.Bench,
) -> None:
    view = bench.view()
    choice = policies.corrected(view, 0.2)
    assert choice.kv is not None
    changed = (choice.kv[1] != view.plan.v).flatten(2).any(2).any(0)
    assert changed.any()
    assert not (changed & ~view.plan.is_moved).any()
    assert not (changed & choice.chosen).any()


def test_records_in_float8_choose_nearly_the_same(bench: measure.Bench) -> None:
    view = bench.view()
    one, other = ours.probe(view, 0.3), ours.probe_fp8(view, 0.3)
    assert int(one.chosen.sum()) == int(other.chosen.sum())
    assert int((one.chosen & other.chosen).sum()) > 0.6 * int(one.chosen.sum())
    assert one.extra == other.extra


def test_caller_s_full_recomputation_is_used(reader: Reader, renderer: Renderer) -> None:
    case, ids = renderer.tokens(written("nonce")), list(range(3, 60))
    truth = measure.reference(reader, case)
    foreign = (ids, reader.full(ids)[0])
    wanted = {"rotated": policies.POLICIES["rotated"]}
    ((_, own),) = measure.rows(reader, case, wanted, foreign)
    ((_, given),) = measure.rows(reader, case, wanted, foreign, truth)
    assert own["kl_quotes"] == given["kl_quotes"]
    assert given["seconds_full"] == round(truth.seconds, 3)


# --- a GPU ----------------------------------------------------------------------------------------

ON_DEVICE = (
    *("exact", "foreign", "blend20", "sink20", "query20", "lost20", "corrected20"),
    *("probe20", "probe20fp8", "question20", "lower", "adaptive20"),
)


SMALL = conversations.Size("small", 2, 1, 5)


def test_rows_of_a_gpu_are_those_of_the_cpu(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "REPLY_TOKENS", 3)
    writer = conversations.Writer(PASSAGES, "reporting", 1, SMALL)
    case = renderer.tokens(conversations.strip_all(writer))
    ids = list(range(3, 67))

    def found(reader: Reader) -> dict[str, dict[str, Any]]:
        wanted = {name: policies.POLICIES[name] for name in ON_DEVICE}
        return dict(measure.rows(reader, case, wanted, (ids, reader.full(ids)[0])))

    here = found(Reader(tiny_model(2)))
    with pretended_gpu():
        reader = Reader(tiny_model(2).to("cuda"))
        assert reader.device == THERE
        there = found(reader)
    for name, row in here.items():
        for field in ("tokens", "exact", "moved", "runs", "computed", "extra", "greedy", "top1"):
            assert there[name][field] == row[field], (name, field)
        for field in ("kl_reply", "kl_quotes"):
            assert there[name][field] == pytest.approx(row[field], rel=0.02, abs=1e-5)


def test_edits_in_a_row_are_measured_on_a_gpu(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "REPLY_TOKENS", 3)
    writer = conversations.Writer(PASSAGES, "reporting", 3, SMALL)
    steps = [renderer.tokens(one) for one in conversations.ten_edits(writer, 2)]

    def found(reader: Reader) -> list[int]:
        truths = [measure.reference(reader, one) for one in steps]
        rows = chains.rows(reader, steps, truths, policies.POLICIES["probe28"])
        return [row["computed"] for row in rows]

    with pretended_gpu():
        there = found(Reader(tiny_model(2).to("cuda")))
    assert there == found(Reader(tiny_model(2)))


def test_first_tokens_of_a_gpu_compute_what_those_of_the_cpu_do(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = conversations.Writer(PASSAGES, "reporting", 1, SMALL)
    case = renderer.tokens(conversations.strip_all(writer))
    names = (first_token.NOTHING, "exact", "rotated", "probe20")

    def made(_: Path, *, device: str, dtype: str, **options: Any) -> Generator:
        assert dtype == "float32"
        return Generator(tiny_model(2).to(device), byte_tokenizer(TEMPLATE), **options)

    monkeypatch.setattr(Generator, "from_pretrained", made)

    def found(device: str) -> list[dict[str, Any]]:
        rows = first_token.rows(ROOT, "float32", case, names, device)
        return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]

    here = found("cpu")
    with pretended_gpu():
        assert found("cuda") == here
    by_name = dict(zip(names, here, strict=True))
    assert by_name[first_token.NOTHING]["computed"] == len(case.prompt)
    assert not any(row["fell_back"] for row in here)


def test_work_on_a_gpu_begins_with_what_was_not_measured_elsewhere() -> None:
    some = list(gpu.work(gpu.ROUNDS))
    assert len(set(some)) == len(some)
    assert {case[0] for case in some[: 12 * gpu.EASY_FROM]} == set(conversations.HARD)
    assert {case[0] for case in some} == set(conversations.KINDS)
    assert min(number for _, size, number in some if size == "4k") == 4


def test_suite_s_rows_of_a_device_are_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "fetch", list)
    monkeypatch.setattr(recorded, "load", lambda *_: PASSAGES)
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    monkeypatch.setitem(conversations.SIZES, "1k", SIZE)
    path = tmp_path / "rows.jsonl"
    for device in (None, "cpu", "cpu"):
        suite = Suite(folder, "float32", path, device)
        suite.measure("nonce", "1k", "reporting", 1, ("exact",))
    rows = list(Rows(path).by_key.values())
    assert [row.get("device") for row in rows] == [None, "cpu"]


def test_rows_of_a_gpu_are_no_figures_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add(row("exact", device="A GPU"))
    assert summary.main(rows.path, quick=True, wording="reporting", dtype="float32") == 1
    rows.add(row("exact", seed=2, dtype="bfloat16"))
    assert summary.main(rows.path, quick=True, wording="reporting", dtype="float32") == 1
    assert "nothing has been measured" in capsys.readouterr().out


def test_figures_of_a_gpu_are_of_one_device_and_of_whole_conversations() -> None:
    def case(seed: int, **changes: Any) -> list[dict[str, Any]]:
        where = {"device": "A GPU", **changes}
        return [row(name, seed=seed, **where) for name in gpu.POLICIES]

    rows = [*case(1, dtype="float16"), row("exact", seed=2), *case(3, device="Another")]
    rows += [*case(4)[1:], *case(5, set="tuning"), *case(6), *case(7, kind="nonce")]
    # Conversation 4 lacks a policy, 2 all but one; the others are of another dtype, device or set.
    found = gpu.document(rows)
    assert found is not None
    assert (found["device"], found["dtype"]) == ("A GPU", "float32")
    assert {
        name: one["exact"]["cases"] for name, one in found["sizes"]["1k"]["groups"].items()
    } == {"hard": 1, "easy": 1}
    text = gpu.render(found)
    assert "all in float32, on a device named A GPU." in text
    assert "Prompts of 1k tokens, hard kinds (reorder): 1 conversation, 2 questions" in text
    assert "answers 2 and is sure of 1." in text
    assert "Goal of a KL of 0.016 at 32% computed or less: `probe28` misses it with 0.1000." in text


@pytest.mark.parametrize("option", ["--sizes", "--first-token"])
def test_unknown_size_is_named(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["real.gpu", option, "4k,9k"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "unknown size 9k (known: 4k" in capsys.readouterr().err.replace("1k, 4k", "4k")


def test_page_holds_what_the_figures_of_a_gpu_say() -> None:
    found = json.loads(gpu.FIGURES.read_text(encoding="utf-8")) if gpu.FIGURES.exists() else None
    page = summary.PAGE.read_text(encoding="utf-8")
    assert summary.put(page, gpu.render(found), gpu.BEGIN, gpu.END) == page


# --- first token ----------------------------------------------------------------------------------


def test_first_token_computes_what_its_policy_says_every_time(
    reader: Reader, renderer: Renderer
) -> None:
    case = renderer.tokens(written("strip all"))
    generator = Generator(
        reader.model,
        byte_tokenizer(TEMPLATE),
        num_blocks=-(-first_token.room(case) // BLOCK),
        gate="unchecked",
        records="model",
    )
    clock = first_token.Clock(generator, case)
    rows = {name: clock.row(policy) for name, policy in first_token.POLICIES.items()}
    assert rows["exact"]["computed"] + rows["exact"]["exact"] == len(case.prompt)
    assert 0 < rows["rotated"]["computed"] < rows["fronts20"]["computed"]
    assert rows["rotated"]["exact"] == rows["exact"]["exact"]
    for name, row in rows.items():
        assert row["seconds"] > 0
        assert row["fell_back"] == 0
        # The prompt's own KV is gone: the next request computes as much.
        again = clock.row(first_token.POLICIES[name])
        assert (again["computed"], again["moved"]) == (row["computed"], row["moved"])


# --- figures --------------------------------------------------------------------------------------


def row(name: str, kind: str = "reorder", seed: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "size": "1k",
        "set": "reporting",
        "seed": seed,
        "policy": name,
        "model": "m",
        "dtype": "float32",
        "plan": "p",
        "key": f"{kind}{seed}{name}",
        "tokens": 100,
        "computed": 20,
        "extra": 5.0,
        "exact": 10,
        "moved": 70,
        "runs": 3,
        "kl_reply": [0.1, 0.3],
        "kl_quotes": [0.0, 0.0],
        "top1": [1, 2],
        "greedy": False,
        "facts": [
            {"nll": [0.05, 3.0], "right": [True, False]},
            {"nll": [0.5, 0.1], "right": [True, True]},
        ],
        **changes,
    }


def test_figures_count_what_rows_say() -> None:
    found = summary.figures([row("rotated"), row("rotated", seed=2, kl_reply=[0.5, 0.5])])
    assert found["kl"] == pytest.approx((0.1 + 0.25) / 2)
    assert found["kl_p99"] == 0.5
    assert found["computed"] == pytest.approx(0.2)
    assert found["cost"] == pytest.approx(0.25)
    assert found["top1"] == pytest.approx(6 / 8)
    assert (found["questions"], found["lost"], found["gained"]) == (4, 2, 0)
    assert (found["sure"], found["sure_lost"]) == (2, 2)
    assert found["loss_low"] < 0.5 < found["loss_high"]


def test_cases_that_lack_a_policy_are_left_out() -> None:
    rows = [row("exact"), row("rotated"), row("exact", seed=2)]
    assert {name: len(some) for name, some in summary.whole(rows).items()} == {
        "exact": 1,
        "rotated": 1,
    }


def test_policy_of_few_cases_takes_no_cases_from_the_others() -> None:
    rows = [row(name, seed=seed) for name in ("exact", "rotated") for seed in (1, 2, 3)]
    rows.append(row("fronts20"))
    assert {name: len(some) for name, some in summary.whole(rows).items()} == {
        "exact": 3,
        "rotated": 3,
    }
    rows.append(row("fronts20", seed=3))
    assert {name: [one["seed"] for one in some] for name, some in summary.whole(rows).items()} == {
        name: [1, 3] for name in ("exact", "rotated", "fronts20")
    }


def test_seeds_share_the_conversations() -> None:
    rows = [row(name, seed=seed) for name in ("exact", "rotated") for seed in (1, 2, 3, 4)]
    rows[3] = row("exact", seed=4, kl_reply=[0.5, 0.5])
    found = summary.by_seed(rows)["1k"]
    assert [one["exact"]["cases"] for one in found.values()] == [2, 1, 1]
    assert found["1"]["exact"]["kl"] == pytest.approx((0.1 + 0.25) / 2)
    assert not summary.by_seed(rows[:2])
    page = summary.render(summary.document(rows, "reporting"))
    assert "### Hard kinds by seed, prompts of 1k tokens" in page


def chain_rows(name: str, kind: str, kl: float, steps: int = 10) -> list[dict[str, Any]]:
    same: dict[str, Any] = {"kl_reply": [kl, kl], "kl_quotes": [kl, kl]}
    return [
        row(name, kind, step=step, **same, key=f"{kind}{name}{step}")
        for step in range(1, steps + 1)
    ]


def test_chains_are_compared_with_the_same_edits_alone() -> None:
    rows = [*chain_rows("rotated", "ten", 0.3), *chain_rows("rotated", "alone", 0.2)]
    rows += chain_rows("foreign", "alone", 2.0)
    rows += [*chain_rows("fronts20", "ten", 0.1), *chain_rows("fronts20", "alone", 0.1, steps=9)]
    found = summary.chained(rows)
    assert list(found) == ["rotated", "foreign"]
    assert found["rotated"]["ten"] == pytest.approx([0.3] * 10)
    page = summary.render(summary.document([row("exact"), *rows], "reporting"))
    assert "| 0.300 | 0.300 | 0.200 | 1.50 | 25.0% | " in page


def test_first_token_is_the_median_against_exact_reuse() -> None:
    rows = [
        {
            **row(name, "first token"),
            "repeat": at,
            "seconds": time,
            "fell_back": 0,
            "key": f"{name}{at}{processor}",
            "processor": processor,
        }
        for processor, factor in (("one", 1), ("another", 3))
        for name, times in (("exact", (8.0, 90.0, 10.0)), ("fronts20", (2.0, 2.5, 1.0)))
        for at, time in enumerate(factor * time for time in times)
    ]
    found = summary.document([row("exact"), *rows], "reporting")
    page = summary.render(found)
    assert "| 100 | `exact` | 3 | 30.00 s | 1.0\N{MULTIPLICATION SIGN} | 20.0% |" in page
    assert "| 100 | `exact` | 3 | 10.00 s | 1.0\N{MULTIPLICATION SIGN} | 20.0% |" in page
    assert "| 100 | `fronts20` | 3 | 2.00 s | 5.0\N{MULTIPLICATION SIGN} | 20.0% |" in page
    mine = [one for one in rows if one["processor"] == "one"]
    again = summary.completed(summary.document([row("exact"), *mine], "reporting"), found)
    assert again["first_token"] == found["first_token"]


def test_rows_of_an_older_plan_are_left_out() -> None:
    old, new = row("rotated", kl_reply=[9.0]), row("rotated", plan="q", key="other")
    found = summary.document([old, new], "reporting")
    assert found["sizes"]["1k"]["kinds"]["reorder"]["rotated"]["kl"] < 1


def test_kind_whose_control_is_not_bad_is_named() -> None:
    fine: dict[str, Any] = {"kl_reply": [0.0], "kl_quotes": [0.0], "facts": []}
    rows = [row("exact", **fine), row("rotated"), row("foreign", **fine)]
    assert summary.document(rows, "reporting")["undetected"] == ["1k reorder"]
    assert "shows nothing" in summary.render(summary.document(rows, "reporting"))
    lost = [{"nll": [0.05, 9.0], "right": [True, False]}] * 20
    rows[2] = row("foreign", facts=lost)
    assert summary.document(rows, "reporting")["undetected"] == []


def test_sizes_that_were_not_measured_again_stay() -> None:
    before = summary.document([row("exact"), row("exact", size="4k", kl_reply=[0.5])], "reporting")
    found = summary.document([row("exact", size="4k")], "reporting")
    both = summary.completed(found, before)
    assert list(both["sizes"]) == ["1k", "4k"]
    assert both["sizes"]["1k"] == before["sizes"]["1k"]
    assert both["sizes"]["4k"] == found["sizes"]["4k"] != before["sizes"]["4k"]
    other = found | {"model": "another"}
    assert summary.completed(other, before) == other


def test_run_whose_control_is_not_bad_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine: dict[str, Any] = {"kl_reply": [0.0], "kl_quotes": [0.0], "facts": []}
    rows = Rows(tmp_path / "rows.jsonl")
    for one in (row("exact", **fine), row("rotated"), row("foreign", **fine)):
        rows.add(one)
    assert summary.main(rows.path, quick=True, wording="reporting", dtype="float32") == 1
    said = capsys.readouterr().err
    assert "no control is detected in 1k reorder, over 0 answers of 1 conversation: " in said
    assert "--cases" in said


def test_loss_by_kind_has_its_interval() -> None:
    found = summary.document([row("exact"), row("rotated"), row("foreign")], "reporting")
    text = summary.render(found)
    assert "### Points lost by kind, prompts of 1k tokens" in text
    assert "| reorder (W19) | 1 | 2/2 | 50.0 [" in text


def test_rows_go_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.add({"key": "a", "kl": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "b", "k')
    again = Rows(path)
    assert "a" in again
    assert "b" not in again
    again.add({"key": "b", "kl": 2})
    again.add({"key": "c", "kl": 3})
    assert list(Rows(path).by_key) == ["a", "b", "c"]


def test_page_holds_what_the_figures_say() -> None:
    found = json.loads(summary.FIGURES.read_text(encoding="utf-8"))
    page = summary.PAGE.read_text(encoding="utf-8")
    assert summary.put(page, summary.render(found)) == page


def test_page_holds_what_the_figures_of_adaptive_shares_say() -> None:
    found = json.loads(adaptive.FIGURES.read_text(encoding="utf-8"))
    page = summary.PAGE.read_text(encoding="utf-8")
    assert summary.put(page, adaptive.render(found), adaptive.BEGIN, adaptive.END) == page
    assert [found[dtype]["dtype"] for dtype in adaptive.DTYPES] == ["bfloat16", "float32"]


def test_adaptive_shares_of_sizes_that_were_not_measured_again_stay() -> None:
    seed = conversations.SETS["reporting"] + 1
    one, other = (
        [
            row(name, kind, seed, size=size, dtype="float32", products=products)
            for name in adaptive.POLICIES
            for kind in conversations.HARD
        ]
        for size, products in (("1k", "float32"), ("4k", "bfloat16"))
    )
    before, found = adaptive.document(one), adaptive.document(other)
    both = adaptive.completed(found, before)
    assert both["sizes"] == before["sizes"] | found["sizes"]
    assert both["products"] == {"1k": "float32", "4k": "bfloat16"}
    assert list(both["drawn"]) == ["1k", "4k"]
    assert "Products are computed in float32 at 1k, bfloat16 at 4k." in adaptive.render(
        {"float32": both}
    )
    assert adaptive.completed(found, before | {"model": "another"}) == found


def test_adaptive_shares_are_compared_on_whole_conversations() -> None:
    kinds, seed = conversations.HARD, conversations.SETS["reporting"] + 1
    names = adaptive.POLICIES
    same: dict[str, Any] = {"kl_reply": [0.012], "kl_quotes": [0.012], "dtype": "float32"}
    rows = [row(name, kind, seed, **same) for name in names for kind in kinds]
    # A conversation that has not all policies counts nothing.
    rows += [row(name, kinds[0], seed + 1, kl_reply=[9.0]) for name in names[1:]]
    found = adaptive.document(rows)
    hard = found["sizes"]["1k"]["groups"]["hard"]
    assert list(hard) == list(names)
    assert {one["cases"] for one in hard.values()} == {len(kinds)}
    assert hard["adaptive20"]["kl"] == pytest.approx(0.012)
    costs = {"probe20": 0.2, "probe28": 0.33, "adaptive20": 0.25, "adaptive26": 0.3}
    said = adaptive.goals({name: {"kl": 0.015, "cost": cost} for name, cost in costs.items()})
    met, other = (f"`{name}20` meets it with 0.0150" for name in adaptive.FAMILIES)
    assert said == [
        f"Goal of a KL of 0.016 at 32% computed or less: {met}, {other}.",
        f"Goal of a KL of 0.025 at 20% computed or less: {met}, no `adaptive` computes so little.",
    ]


def test_readme_quotes_the_figures() -> None:
    found = json.loads((ROOT / "benches" / "real" / "gpu.json").read_text(encoding="utf-8"))[
        "sizes"
    ]["4k"]
    hard, easy = (found["groups"][name] for name in ("hard", "easy"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("> ", "").split())

    def lost(row: Any) -> str:
        return f"{100 * (row['lost'] - row['gained']) / row['questions']:.1f} points"

    def interval(row: Any) -> str:
        return f"{100 * row['loss_low']:.1f} to {100 * row['loss_high']:.1f}"

    rotated, probed, slight = hard["rotated"], hard["probe28"], easy["rotated"]
    assert (
        f"a mean KL of {summary.small(rotated['kl'])} nats from full recomputation after hard "
        f"edits, and loses {lost(rotated)} of the answers (95 %: {interval(rotated)}); with "
        f"{probed['cost']:.0%} of the prompt"
    ).replace("0% of", "0 % of") in readme
    assert f"says, {summary.small(probed['kl'])} and {lost(probed)} ({interval(probed)})" in readme
    assert f"after easy edits {summary.small(slight['kl'])} and {lost(slight)}." in readme
    assert rotated["sure_lost"] == probed["sure_lost"] == 0
    assert f"Of {rotated['sure']} answers after hard edits" in readme
    assert f"[{rotated['cases'] + slight['cases']} conversations]" in readme


def test_page_says_what_was_not_measured() -> None:
    text = summary.render(summary.document([row("exact"), row("rotated")], "reporting"))
    assert "At 1k: 1 conversation of 1 kind, with 2 questions, of which full recomputation" in text
    kinds = ", ".join(kind for kind in conversations.KINDS if kind != "reorder")
    missing = ["prompts of 4k tokens", "prompts of 7k tokens", f"{kinds} at 1k"]
    missing += ["ten edits in a row", "first token"]
    assert f"Not measured yet: {'; '.join(missing)}." in text


def test_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks are missing"):
        summary.put("# A page", "figures")


# --- text -----------------------------------------------------------------------------------------


README = """Name: thing
License-Expression: MIT

# Thing

It reads [the words](https://example.org/words) of a file and says which of them are long ones.

    >>> thing.read("a file that is not prose, however many words it may have in it")

See https://example.org for more than this paragraph could tell you about anything at all.
"""


def test_prose_is_plain_paragraphs() -> None:
    said = "It reads the words of a file and says which of them are long ones."
    assert texts.prose(README) == [said]
    assert texts.licence(README) == "MIT"
    assert texts.licence("Classifier: License :: OSI Approved :: BSD License\n\n") == "BSD License"


def test_every_text_is_recorded_and_every_record_is_of_a_text() -> None:
    assert set(texts.recorded()) == {f"{name}.txt" for name in texts.names()}
    lines = recorded.PATH.read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["passage"] for line in lines}) == len(lines) > 100


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in texts.names():
            (folder / f"{name}.txt").write_text("another text", encoding="utf-8")

    monkeypatch.setattr(texts, "install", install)
    with pytest.raises(texts.TextError, match=r"has SHA-256 [0-9a-f]{64}, not"):
        texts.fetch(tmp_path / "texts")
