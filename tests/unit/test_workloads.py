"""The workloads make the edits that their ids name."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import workloads
from workloads import export
from workloads.ceiling import Ceiling
from workloads.documents import VOCABULARY
from workloads.populations import population
from workloads.registry import WORKLOADS, Workload
from workloads.shapes import AgentRun
from workloads.writer import MARKERS, Writer

import kvtrie

if TYPE_CHECKING:
    from pathlib import Path

    from workloads.history import Conversation, Kept

# Points in percent by which a share may differ from the one that was measured.
POINTS = 2.0

every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def exact_percent(conversation: Conversation) -> float:
    cached = Ceiling([conversation.cached])
    return cached.of(conversation.prompt).prefix // 16 * 16 / len(conversation.prompt) * 100


def span_percent(conversation: Conversation) -> float:
    cached = Ceiling([conversation.cached], block_size=1)
    return cached.of(conversation.prompt).share * 100


def near(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] - POINTS <= value <= bounds[1] + POINTS


def deltas(conversation: Conversation) -> list[int]:
    return [kept.delta for kept in conversation.kept]


def deleted(conversation: Conversation) -> list[int]:
    return [edit.old_end - edit.old_start for edit in conversation.edited("delete")]


def replaced(conversation: Conversation) -> list[tuple[int, int]]:
    return [
        (edit.old_end - edit.old_start, edit.end - edit.start)
        for edit in conversation.edited("replace")
    ]


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.iter_modules(workloads.__path__)]
)
def test_examples_of(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"workloads.{name}")).failed == 0


def test_every_id_is_there() -> None:
    ids = {name.partition(".")[0] for name in WORKLOADS}
    assert ids == {f"W{number:02}" for number in (*range(1, 24), 25)}


@every_workload
def test_shares_are_those_measured(workload: Workload) -> None:
    conversation = workload.build(seed=1)
    if workload.exact is not None and workload.span is not None:
        assert near(exact_percent(conversation), workload.exact)
        assert near(span_percent(conversation), workload.span)
    else:
        assert workload.id in {"W22", "W23", "W25"}


@every_workload
def test_kept_and_edits_make_the_prompt(workload: Workload) -> None:
    conversation = workload.build(seed=2)
    cached, prompt = conversation.cached, conversation.prompt
    for kept in conversation.kept:
        assert (
            prompt[kept.start : kept.end].tolist() == cached[kept.old_start : kept.old_end].tolist()
        )
    if conversation.reordered:
        assert conversation.edits == ()
        return
    # Kept pieces and edits together are all of both, each once.
    old = [(kept.old_start, kept.old_end) for kept in conversation.kept]
    new = [(kept.start, kept.end) for kept in conversation.kept]
    old += [(edit.old_start, edit.old_end) for edit in conversation.edits]
    new += [(edit.start, edit.end) for edit in conversation.edits]
    for ranges, length in ((old, len(cached)), (new, len(prompt))):
        ordered = sorted(piece for piece in ranges if piece[0] < piece[1])
        assert [0, *(end for _, end in ordered)] == [*(start for start, _ in ordered), length]


@every_workload
def test_spans_are_spans_of_the_index(workload: Workload) -> None:
    conversation = workload.build(seed=3)
    pairs = (
        (conversation.cached, conversation.spans),
        (conversation.prompt, conversation.prompt_spans),
    )
    for ids, spans in pairs:
        assert [kvtrie.Span(*span).kind for span in spans] == [span.kind for span in spans]
        ends = [end for span in spans for end in span[:2]]
        assert ends == sorted(ends)
        assert ends[-1] <= len(ids)
        # What has no kind are the template's markers.
        mask = np.ones(len(ids), dtype=np.bool_)
        for start, end, _ in spans:
            mask[start:end] = False
        assert (ids[mask] >= VOCABULARY).all()


@every_workload
def test_the_same_seed_is_the_same_conversation(workload: Workload) -> None:
    one, same, other = (workload.build(seed=seed, scale=0.2) for seed in (5, 5, 6))
    assert one.cached.tolist() == same.cached.tolist()
    assert one.prompt.tolist() == same.prompt.tolist()
    assert (one.edits, one.kept, one.spans) == (other.edits, other.kept, other.spans)
    assert Ceiling([one.cached], block_size=1).of(other.cached).most <= 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W01", [0, -1534]),
        ("W02", [0, -1530]),
        ("W03", [0, -1534]),
        ("W04", [0, -4]),
        ("W05", [0, -1529, -1530]),
        ("W06", [0, -1529]),
        ("W07", [0, -1534]),
        ("W08", [0, -1535]),
        ("W09", [0]),
        ("W10", [0]),
        ("W15", [0, -444]),
        ("W15.5", [0, -2220]),
        ("W16", [0, 0]),
        ("W17", [0, -1]),
        ("W20", [0, -815]),
        ("W20.question_first", [0, 5]),
        ("W21", [0, 0]),
    ],
)
def test_moves(name: str, expected: list[int]) -> None:
    assert deltas(WORKLOADS[name].build()) == expected


@pytest.mark.parametrize("name", ["W09", "W10"])
def test_append_only(name: str) -> None:
    conversation = WORKLOADS[name].build()
    assert [edit.action for edit in conversation.edits] == ["append"]


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.startswith("W11")])
def test_agent_close_deletes_all_reasoning(name: str) -> None:
    conversation = WORKLOADS[name].build()
    moves = deltas(conversation)
    gone = deleted(conversation)
    assert len([length for length in gone if length > 100]) == 13
    if name == "W11":
        assert (moves[1], moves[-1]) == (-247, -2790)
    assert sum(gone) == -min(moves)
    # Most deltas are not multiples of the block size, so blocks cannot be shared in place.
    assert sum(delta % 16 != 0 for delta in moves[1:]) > len(moves) / 2


def test_cleared_results_become_notices() -> None:
    assert replaced(WORKLOADS["W12"].build()) == [(727, 6)] * 9
    assert replaced(WORKLOADS["W13"].build()) == [(727, 6)] * 4
    reasoning = replaced(WORKLOADS["W14"].build())
    assert [new for _, new in reasoning] == [1] * 12


def test_head_edits_are_near_the_front() -> None:
    (clock,) = WORKLOADS["W16"].build().edited("replace")
    assert (clock.old_start, clock.old_end, clock.start, clock.end) == (20, 26, 20, 26)
    (nonce,) = WORKLOADS["W17"].build().edited("replace")
    assert (nonce.old_start, nonce.old_end, nonce.start, nonce.end) == (36, 40, 36, 39)


def test_compact_leaves_two_turns() -> None:
    conversation = WORKLOADS["W18"].build()
    ((gone, came),) = replaced(conversation)
    assert gone > 15 * came
    assert [kept.length for kept in conversation.kept][1] == 2 * 444


def test_reordered_documents_move_one_by_one() -> None:
    conversation = WORKLOADS["W19"].build()
    assert conversation.reordered
    assert len(conversation.moved) >= 7
    assert longest_in_order(conversation.kept) / len(conversation.prompt) * 100 == pytest.approx(
        37.9, abs=POINTS
    )


def longest_in_order(kept: tuple[Kept, ...]) -> int:
    """The most tokens of kept pieces that are in the same order in both."""
    best = 0
    for count in range(1, len(kept) + 1):
        for chosen in itertools.combinations(kept, count):
            if all(a.old_end <= b.old_start for a, b in itertools.pairwise(chosen)):
                best = max(best, sum(piece.length for piece in chosen))
    return best


def test_edited_first_message() -> None:
    ((gone, came),) = replaced(WORKLOADS["W21"].build())
    assert gone == came == 120


def test_retokenised_edges_are_a_few_tokens() -> None:
    conversation = WORKLOADS["W22"].build()
    edges = replaced(conversation)
    shape = WORKLOADS["W22"].shape
    assert isinstance(shape, AgentRun)
    # Reasoning and call of each round, final reasoning and answer: an edge on both sides.
    assert len(edges) == 4 * shape.rounds + 4
    assert {old for old, _ in edges} == {1, 2, 3}
    assert {new for _, new in edges} == {1, 2}
    assert len(set(deltas(conversation))) > 10
    assert exact_percent(conversation) < 25
    assert span_percent(conversation) > 95


def test_flipped_effort_moves_everything_far() -> None:
    conversation = WORKLOADS["W23"].build()
    assert len(conversation.kept) == 2
    assert deltas(conversation)[1] < -500
    assert exact_percent(conversation) == 0
    assert span_percent(conversation) > 95


def test_compound_replaces_and_deletes() -> None:
    conversation = WORKLOADS["W25"].build()
    assert replaced(conversation) == [(727, 403)]
    gone = deleted(conversation)
    assert len(gone) == 11
    # The reasoning of the first two rounds is before the result.
    assert conversation.kept[0].length > exact_percent(conversation) / 100 * 10_000
    assert span_percent(conversation) > 90


@pytest.mark.parametrize("answer", [20, 255])
@pytest.mark.parametrize("extra", [0, 15])
def test_answers_of_any_length_at_any_alignment(answer: int, extra: int) -> None:
    base, conversation = (
        WORKLOADS["W01"].build(answer=answer, extra=extra) for extra in (0, extra)
    )
    (span,) = [span for span in conversation.spans if span.kind == "answer"]
    (old,) = [span for span in base.spans if span.kind == "answer"]
    assert span.end - span.start == answer
    assert span.start - old.start == extra


def test_scale_leaves_the_number_of_edits() -> None:
    small, large = (WORKLOADS["W11"].build(scale=scale) for scale in (0.25, 2.0))
    assert len(small.edits) == len(large.edits)
    assert len(large.cached) / len(small.cached) == pytest.approx(8, rel=0.05)


def test_only_the_sampled_token_has_no_kv() -> None:
    conversation = WORKLOADS["W01"].build()
    assert conversation.num_computed == len(conversation.cached) - 1


@pytest.mark.parametrize("text", ["uniform", "worded"])
def test_conversations_share_nothing_unless_asked(text: str) -> None:
    build = WORKLOADS["W11"].build
    one, other = (build(number, text=text, scale=0.3) for number in (0, 1))
    common = Ceiling([one.cached], block_size=1, min_run=16).of(other.cached).share
    # Texts with repeated phrases share some by chance.
    assert common < (0.001 if text == "uniform" else 0.2)
    one, other = (build(number, text=text, shared=True) for number in (0, 1))
    reach = Ceiling([one.cached], block_size=1, min_run=16).of(other.cached)
    assert reach.prefix > 1_000
    assert reach.most > reach.prefix + 1_000


def test_worded_texts_repeat_themselves() -> None:
    conversation = WORKLOADS["W01"].build(text="worded")
    ids, counts = np.unique(conversation.cached, return_counts=True)
    assert counts.max() > 100
    assert len(ids) < len(conversation.cached) * 0.7
    assert (ids < VOCABULARY + len(MARKERS)).all()


def test_unknown_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text is 'prose', not one of uniform, worded"):
        Writer(0, 0, text="prose")


@pytest.mark.parametrize("shared", [False, True])
def test_population_fills_the_cache(shared: bool) -> None:
    made = population(WORKLOADS["W11"], conversations=50, cached_tokens=200_000, shared=shared)
    assert made.num_cached == pytest.approx(200_000, rel=0.01)
    assert len(made.asked) == 50
    made = population(
        WORKLOADS["W11"],
        conversations=50,
        cached_tokens=400_000,
        prompt_tokens=20_000,
        asked=2,
        shared=shared,
    )
    assert made.num_cached == pytest.approx(400_000, rel=0.01)
    assert [len(each.prompt) for each in made.asked] == pytest.approx([20_000] * 2, rel=0.01)


def test_population_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="are left for 49 conversations next to 1"):
        population(WORKLOADS["W11"], conversations=50, cached_tokens=20_000, prompt_tokens=20_000)


def test_export_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "W01.bin"
    size = ["--conversations", "3", "--cached-tokens", "3000"]
    export.main(["W01", *size, "--out", str(path)])
    assert "3 conversations" in capsys.readouterr().out
    words = np.fromfile(path, dtype="<u4")
    assert words[:3].tolist() == [int.from_bytes(b"KVTW", "little"), 1, 3]
    made = population(WORKLOADS["W01"], conversations=3, cached_tokens=3_000)
    place = 3
    for each in made.conversations:
        cached, computed, prompt = words[place : place + 3].tolist()
        assert computed == each.num_computed
        place += 3
        assert words[place : place + cached].tolist() == each.cached.tolist()
        place += cached
        assert words[place : place + prompt].tolist() == each.prompt.tolist()
        place += prompt
    assert place == len(words)
