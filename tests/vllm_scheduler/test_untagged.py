"""A request with too many delimiters is not tagged: no tenant chooses how long that takes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.vllm_scheduler.test_exact import (
    ANSWER,
    ASSISTANT,
    CLOSED,
    END,
    EXACT,
    FORMAT,
    HEAD,
    LOOPING,
    QUESTION,
    REASONING,
    USER,
    end,
    message,
    order,
    words,
)
from tests.vllm_scheduler.worker import BLOCK

import kvtrie
from kvtrie.integrations import _sections
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.integrations.vllm._requests import LiveRequest
from kvtrie.integrations.vllm._stats import Counts
from kvtrie.integrations.vllm._stored import StoreRequests
from kvtrie.integrations.vllm._tags import Reading
from kvtrie.integrations.vllm._vllm import RequestStatus
from kvtrie.record import Log
from kvtrie.tags import Tagger
from kvtrie.tags.openings import Openings
from kvtrie.tags.reader import MessageReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

MOVING: dict[str, Any] = {
    "gate": "unchecked",
    "policy": {"scope": "namespace"},
    "chat_format": FORMAT,
}
_GIVEN: Any = FORMAT
TAGGER = Tagger.from_ids(**_GIVEN)
MODES: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "moving": MOVING,
    "shadow": {**MOVING, "shadow": True},
}
LONG: dict[str, Any] = {"blocks": 1200, "max_model_len": 16_384, "max_num_batched_tokens": 16_384}
DELIMITERS = [USER, ASSISTANT]
EDITED = [*HEAD, *QUESTION, ASSISTANT, *ANSWER, *message(USER, 20, 5), ASSISTANT]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that taggers read one by one."""
    found: list[int] = []
    step = MessageReader.step

    def counting(self: MessageReader, state: Any, token: int, position: int) -> Any:
        found.append(token)
        return step(self, state, token, position)

    monkeypatch.setattr(MessageReader, "step", counting)
    return found


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few delimiters are too many."""
    monkeypatch.setattr(_sections, "most_steps", lambda num_tokens: 16 + num_tokens // 8)
    monkeypatch.setattr(_sections, "PIECE", 8)


def kinds(core: Core) -> set[str]:
    prompts = (name for name in core.counts if name.startswith("prompt_tokens/"))
    return {name.rpartition("/")[2] for name in prompts}


@pytest.mark.parametrize("mode", ["exact", "moving", "shadow"])
@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(DELIMITERS * 4000, id="delimiters alone"),
        pytest.param([*words(6000, 9), *DELIMITERS * 1500], id="at the end"),
        pytest.param([USER, *words(2, 9), ASSISTANT, END] * 1600, id="short messages"),
    ],
)
def test_few_tokens_of_a_prompt_are_read_one_by_one(
    core: Callable[..., Core], steps: list[int], mode: str, prompt: list[int]
) -> None:
    vllm = core(connector=MODES[mode], **LONG)
    vllm.ask(prompt, max_tokens=2)
    assert 0 < len(steps) <= 1024 + len(prompt) // 8 + 256
    assert vllm.counts["requests_untagged"] == 1
    assert vllm.counts["errors"] == 0
    assert kinds(vllm) == {"other"}


def test_a_prompt_of_ordinary_messages_is_tagged(
    core: Callable[..., Core], steps: list[int]
) -> None:
    vllm = core(connector=EXACT, **LONG)
    turn = [*message(USER, 40, 1), ASSISTANT, *words(40, 2), END]
    vllm.ask(turn * 90, max_tokens=2)
    assert len(steps) < 1024
    assert vllm.counts["requests_untagged"] == 0
    assert kinds(vllm) == {"user", "answer", "other"}


@pytest.mark.usefixtures("strict")
def test_few_tokens_of_a_reply_are_read_one_by_one(
    core: Callable[..., Core], steps: list[int]
) -> None:
    vllm = core(connector=EXACT)
    prompt = [*HEAD, *QUESTION, ASSISTANT]
    worker: Any = vllm.worker
    say = worker._forward

    def delimits(row: Any, count: int, drafted: Any) -> list[int]:
        said: list[int] = say(row, count, drafted)
        if said:
            row.tokens[-1] = DELIMITERS[len(row.tokens) % 2]
            last: list[int] = row.tokens[-1:]
            return last
        return said

    worker._forward = delimits
    vllm.ask(prompt, max_tokens=400)
    assert vllm.counts["requests_untagged"] == 1
    assert len(steps) <= 16 + (len(prompt) + 400) // 8 + 8
    # Its prompt was tagged when it was computed.
    assert kinds(vllm) == {"system", "user", "other"}


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("params", [{}, {"session": "a"}], ids=["", "session"])
def test_reasoning_of_an_untagged_request_stays(
    core: Callable[..., Core], params: dict[str, Any]
) -> None:
    vllm = core(connector=EXACT)
    end(vllm, CLOSED)
    assert vllm.counts["blocks_dead"] > 0
    vllm.counts.clear()
    more = DELIMITERS * 30
    ids = end(vllm, [*words(8, 7), *more, *CLOSED], params)
    assert vllm.counts["requests_untagged"] == 1
    assert vllm.counts["blocks_dead"] == 0
    # It gets no passes as a tool loop either.
    ids += end(vllm, [*words(8, 8), *more, *LOOPING], params)
    assert vllm.connector.planner._retention._passes[ids].sum() == 0
    assert set(ids) - set(order(vllm)) == set()


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("more", [[], DELIMITERS * 40], ids=["tagged", "untagged"])
def test_nothing_moves_into_an_untagged_request(core: Callable[..., Core], more: list[int]) -> None:
    """Where its last message begins is not known."""
    vllm = core(connector=MOVING)
    end(vllm, CLOSED)
    vllm.ask([*EDITED, *more])
    assert vllm.counts["requests_untagged"] == bool(more)
    assert (vllm.counts["tokens_moved"] == 0) == bool(more)
    assert vllm.counts["errors"] == 0


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("forbid", [["reasoning"], []])
def test_what_an_untagged_request_leaves_moves_unless_kinds_are_forbidden(
    core: Callable[..., Core], forbid: list[str]
) -> None:
    policy = {"scope": "namespace", "forbid_kinds": forbid}
    vllm = core(connector={**MOVING, "policy": policy}, gaps=True)
    end(vllm, [*words(8, 7), *DELIMITERS * 30, *CLOSED])
    assert vllm.counts["requests_untagged"] == 1
    vllm.ask([*HEAD, *REASONING, *QUESTION, ASSISTANT])
    assert (vllm.counts["tokens_moved"] == 0) == bool(forbid)
    # What the others leave is indexed as always.
    vllm.ask([*words(5, 8), *HEAD, *QUESTION, ASSISTANT])
    assert vllm.counts["tokens_moved"] > 0


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("more", [[], DELIMITERS * 40], ids=["tagged", "untagged"])
def test_a_record_of_an_untagged_request_has_no_spans(
    core: Callable[..., Core], tmp_path: Path, more: list[int]
) -> None:
    vllm = core(connector={**EXACT, "record": str(tmp_path / "log")})
    end(vllm, [*more, *CLOSED])
    assert vllm.connector.planner.half.recording._recorder.flush()
    (found,) = Log(tmp_path / "log")
    assert bool(found.spans) == (not more)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("more", [[], DELIMITERS * 40], ids=["tagged", "untagged"])
def test_a_turn_of_an_untagged_request_is_not_stored_and_its_prompt_looked_up_uncut(
    more: list[int],
) -> None:
    counts = Counts()
    tokens = [*more, *CLOSED]
    store = StoreRequests(StoreSettings(backend="/a/folder"), BLOCK, counts, judges=False)
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    seq = kvtrie.TokenSequence(tokens, space)
    live = LiveRequest(seq, kvtrie.EXACT_ONLY, reading=Reading(TAGGER, counts))
    request: Any = SimpleNamespace(
        request_id="a",
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        status=RequestStatus.FINISHED_STOPPED,
        num_computed_tokens=len(tokens) - 1,
        num_in_flight_tokens=0,
    )
    assert bool(store._prompt(request, live).borders) == (not more)
    store.ended(request, live, range(-(-len(tokens) // BLOCK)))
    assert len(store._next.turns) == (not more)


def test_openings_say_where_the_last_message_begins_where_tags_do_not() -> None:
    prompt = [1, 2, 9, 9, 1, 3, 9, 1, 2, 9, 1, 3]
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)

    def found(**given: Any) -> int | None:
        # What the model answers begins no message of a user, whatever it spells.
        seq = kvtrie.TokenSequence([*prompt, 1, 2, 9], space)
        return LiveRequest(seq, kvtrie.EXACT_ONLY, **given).find_moved_end(len(prompt))

    assert found() is None
    assert found(openings=Openings(((1, 2),))) == 7
    assert found(openings=Openings(((1, 2),)), is_untagged=True) == 0


@pytest.mark.parametrize("num_answered", [0, 3])
def test_the_last_message_is_looked_for_in_the_prompt_alone(num_answered: int) -> None:
    tagger = Tagger.from_ids(user=[1], assistant=[2], end=[3])
    prompt, answer = [1, 40, 41, 3, 2, 42, 3, 1, 43, 3, 2], [1, 44, 45]
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    live = LiveRequest(
        kvtrie.TokenSequence([*prompt, *answer[:num_answered]], space),
        kvtrie.EXACT_ONLY,
        new_reading=partial(Reading, tagger, Counts()),
    )
    assert live.find_moved_end(len(prompt)) == 7
    # Once: what is written later changes nothing.
    live.seq.extend([1, 46])
    assert live.find_moved_end(len(prompt)) == 7


def test_states_of_tokens_that_are_final_are_not_kept() -> None:
    """They are for taking tokens back; a long request had some megabytes of them."""
    counts = Counts()
    reading = Reading(TAGGER, counts)
    seq = kvtrie.TokenSequence(CLOSED, kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    assert reading.follow(seq)
    with pytest.raises(ValueError, match="must be in"):
        reading.stream.truncate(len(seq) - 1)


@pytest.mark.parametrize("portion", [1, 7, 300, 5000])
def test_the_bound_holds_in_any_portions(portion: int) -> None:
    stream = TAGGER.stream()
    ids = np.array([*words(500, 1), *DELIMITERS * 3000])
    for at in range(0, len(ids), portion):
        if not _sections.read_on(stream, ids[at : at + portion]):
            break
    else:
        raise AssertionError("all of it was read")
    assert stream.num_steps <= 1024 + len(ids) // 8 + 256


def test_a_prompt_of_the_header_of_an_answer_alone_is_of_the_format() -> None:
    """Without the first token of the answer no message has begun, and none is missed."""
    tagger = Tagger.from_ids(user=[3], assistant=[4], reasoning=([5], [6]), end=[7])
    space = kvtrie.Namespace(model="m@1", kv_dtype="float32", salt=kvtrie.SHARED)
    for ids, said in (([4], None), ([40, 41], "it has no message of the format")):
        reading = Reading(tagger, Counts())
        assert reading.follow(kvtrie.TokenSequence(ids, space))
        assert reading.disagreement(len(ids)) == said
