"""Dead reasoning is evicted first, and nothing else is."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.sglang.caches import Pool, Side, params

from kvtrie.integrations import _sections
from kvtrie.integrations._turns import StorePrompt
from kvtrie.integrations.sglang import _reasoning
from kvtrie.integrations.sglang._moving import Moving
from kvtrie.integrations.sglang._settings import Wish
from kvtrie.integrations.sglang._stored import PoolStore
from kvtrie.integrations.sglang.cache import KvtrieCache
from kvtrie.tags import Tagger
from kvtrie.tags.openings import Openings

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.tags import Stream

USER, ASSISTANT, OPEN, CLOSE, CALL, RETURN = 1, 2, 3, 4, 5, 6
TAGGER = Tagger.from_ids(
    user=USER, assistant=ASSISTANT, reasoning=(OPEN, CLOSE), tool_call=(CALL, RETURN)
)
OLD = [USER, *range(100, 107)]
TURN = [USER, 10, 11, ASSISTANT, OPEN, 20, 21, 22, CLOSE, 30, 31, 32]
"""Reasoning from 4 to 9; the pages of two tokens from 4 on are dead."""


class Rows:
    """A request's row of slots."""

    def __init__(self) -> None:
        self.req_to_token = torch.zeros((1, 64), dtype=torch.int32)

    def write(self, at: tuple[int, slice], slots: torch.Tensor) -> None:
        self.req_to_token[at] = slots.to(torch.int32)


class Request:
    """What the cache reads of a request, which is a key, as SGLang's is."""

    lock: Any
    kv: Any

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def side(tagger: Tagger | None = TAGGER, reasoning: str = "evict_first") -> Side:
    pool = Pool(20, 2)
    cache = KvtrieCache(params(pool), 20, "model", tagger, reasoning=reasoning)
    cache.req_to_token_pool = Rows()
    return Side(cache, pool)


def end(one: Side, ids: list[int], *, stopped: bool = True, custom: Any = None) -> None:
    """A request computes its tokens and ends; the last one has no KV."""
    count = (len(ids) - 1) // 2 * 2
    slots = one.pool.alloc(count // 2)
    one.cache.req_to_token_pool.write((0, slice(0, count)), slots)
    reason = FINISH_MATCHED_TOKEN(ids[-1]) if stopped else FINISH_LENGTH(1)
    request = Request(
        kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=0, cache_inserted_len=0),
        full_untruncated_fill_ids=ids,
        extra_key=None,
        cache_salt=None,
        lock=None,
        last_node=None,
        finished=lambda: True,
        finished_reason=reason,
        sampling_params=SimpleNamespace(custom_params=custom),
    )
    one.cache.checkpoint(request, up_to=len(ids) - 1)
    one.cache.unlock(request.lock)


def left(one: Side, ids: list[int]) -> int:
    found: int = one.match(ids).device_prefix_len
    return found


def test_dead_reasoning_and_what_follows_is_evicted_before_older_prompts() -> None:
    one = side()
    one.insert(OLD)
    end(one, [*TURN, 40])
    assert one.evict(8) == 8
    assert (left(one, TURN), left(one, OLD)) == (4, 8)


def test_reasoning_after_an_image_is_evicted_first() -> None:
    one = side()
    one.insert(OLD)
    with_image = [USER, 2**40, 2**41, 2**42, *TURN[1:]]
    end(one, [*with_image, 40])
    assert one.evict(6) == 6
    assert (left(one, with_image), left(one, OLD)) == (8, 8)
    assert not one.cache.counts


def test_dropped_reasoning_leaves_at_once() -> None:
    one = side()
    end(one, [*TURN, 40], custom={"kvtrie": {"reasoning": "drop"}})
    assert left(one, TURN) == 4
    assert len(one.pool.free) == 20 - 2
    assert one.cache.total_size() == one.cache.evictable_size() == 4
    assert not one.cache.counts


@pytest.mark.parametrize(
    ("policy", "custom", "done"),
    [
        ("drop", None, "drop"),
        ("keep", None, "keep"),
        ("keep", {"kvtrie": {"session": "a"}}, "keep"),
        ("keep", {"kvtrie": {"reasoning": "drop"}}, "drop"),
        ("drop", {"kvtrie": {"reasoning": "keep"}}, "keep"),
        ("keep", {"kvtrie": {"reasoning": "never"}}, "keep"),
    ],
)
def test_the_operator_decides_for_requests_that_do_not(policy: str, custom: Any, done: str) -> None:
    one = side(reasoning=policy)
    one.insert(OLD)
    end(one, [*TURN, 40], custom=custom)
    assert (left(one, TURN) == 4) == (done == "drop")
    # What is kept is not evicted first.
    one.evict(8)
    assert left(one, OLD) == 0


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        pytest.param([*TURN, 40], {"tagger": None}, id="no format"),
        pytest.param([*TURN, 40], {"stopped": False}, id="cut off"),
        pytest.param([*TURN, 40], {"custom": {"kvtrie": {"reasoning": "keep"}}}, id="kept"),
        pytest.param([*TURN[:9], CALL, 33, RETURN, 40], {}, id="a tool loop goes on"),
        pytest.param(
            [*TURN, USER, 50, ASSISTANT, OPEN, 51, CLOSE, 60], {}, id="the template keeps it"
        ),
        pytest.param([USER, 10, 11, ASSISTANT, 30, 31, 32, 33, 34], {}, id="no reasoning"),
    ],
)
def test_what_is_not_dead_goes_in_order(ids: list[int], options: dict[str, Any]) -> None:
    one = side(options.pop("tagger", TAGGER))
    one.insert(OLD)
    end(one, ids, **options)
    assert one.evict(8) == 8
    assert left(one, OLD) == 0
    assert left(one, ids) == (len(ids) - 1) // 2 * 2
    assert not one.cache.counts


def test_what_is_used_again_is_not_dead() -> None:
    one = side()
    one.insert(OLD)
    end(one, [*TURN, 40])
    assert left(one, TURN) == 12
    one.evict(8)
    assert (left(one, TURN), left(one, OLD)) == (12, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reasoning": "keeps"}, """"keep" or "drop", not 'keeps'; did you mean 'keep'?"""),
        ({"reason": "keep"}, "unknown key 'reason'; did you mean 'reasoning'?"),
        ("keep", "must be an object, not 'keep'"),
        ({"reasoning": "keep", "x": 1}, "unknown key 'x'"),
        ({"reuse": "all"}, """reuse must be "approximate" or "exact", not 'all'"""),
        ({"session": ""}, "session must be a text of 1 to 256 bytes"),
    ],
)
def test_a_parameter_that_is_not_known_is_counted(
    given: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = side()
    end(one, [*TURN, 40], custom={"kvtrie": given})
    assert one.cache.counts == {"custom_params": 1}
    assert left(one, TURN) == 12
    assert said in caplog.text
    assert "kvtrie: a request's parameters are ignored: " in caplog.text
    assert "Traceback" not in caplog.text


def test_parameters_of_others_are_none_of_ours() -> None:
    assert Wish.read({"other": 1}) == Wish.read(None) == Wish.read({"kvtrie": {}}) == Wish()
    given = {"reasoning": "keep", "reuse": "exact", "session": "a"}
    assert Wish.read({"kvtrie": given}) == Wish("keep", "exact", "a")


def server(**changes: Any) -> Any:
    known = {
        "skip_tokenizer_init": False,
        "tokenizer_path": "tokenizer",
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "chat_template": None,
    }
    return SimpleNamespace(**known | changes)


def test_the_served_template_says_when_reasoning_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[Any] = []

    def from_tokenizer(tokenizer: object, **arguments: object) -> Tagger:
        seen.append((tokenizer, arguments))
        return TAGGER

    monkeypatch.setattr(Tagger, "from_tokenizer", from_tokenizer)
    monkeypatch.setattr(
        "sglang.srt.utils.hf_transformers_utils.get_tokenizer", lambda path, **_: f"of {path}"
    )
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert _reasoning.tagger_of(server(chat_template=str(template))) is TAGGER
    assert _reasoning.tagger_of(server()) is TAGGER
    assert seen == [("of tokenizer", {"chat_template": "{{ messages }}"}), ("of tokenizer", {})]
    assert caplog.messages == ["kvtrie: reasoning dropped at: next user message"] * 2


@pytest.mark.parametrize("changes", [{"tokenizer_path": "/nowhere"}, {"chat_template": "/nowhere"}])
def test_without_a_format_all_is_kept(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert _reasoning.tagger_of(server(**changes)) is None
    assert "kvtrie: reasoning is not told apart" in caplog.text
    assert _reasoning.tagger_of(server(skip_tokenizer_init=True)) is None


def test_one_pass_over_a_long_prompt() -> None:
    ids = np.array([USER, *range(1000, 9000), ASSISTANT, OPEN, *range(10, 510), CLOSE, 30, 31])
    reasoning = _reasoning.Reasoning(TAGGER)
    stream = reasoning.read(ids, complete=True)
    assert stream is not None
    assert reasoning.dead(stream) == [(8002, 8504)]


class Counted:
    """A tagger whose streams are kept, with the lengths of what they are fed."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.feeds: list[int] = []

    def stream(self) -> Stream:
        made = TAGGER.stream()
        self.streams.append(made)
        counted = self.feeds

        class Feeding:
            def feed(self, ids: Any, *, final: bool = False) -> None:
                counted.append(len(ids))
                made.feed(ids, final=final)

            def __len__(self) -> int:
                return len(made)

            def __getattr__(self, name: str) -> Any:
                return getattr(made, name)

        return cast("Stream", Feeding())


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param([USER, ASSISTANT], id="messages without text"),
        pytest.param([USER, 10, ASSISTANT, OPEN, 20, CLOSE, 30], id="many sections"),
        pytest.param([ASSISTANT], id="no section"),
        pytest.param([50] * 7300 + [USER] * 892, id="all at the end"),
        pytest.param([USER] * 2040 + [50] * 6152 + [USER] * 900, id="at both ends"),
    ],
)
@pytest.mark.parametrize("count", [8192, 65_536])
def test_few_tokens_of_a_request_are_read_one_by_one(pattern: list[int], count: int) -> None:
    """Whatever they are, so that a prompt does not choose how long the scheduler waits."""
    ids = np.array((pattern * count)[:count])
    counted = Counted()
    _reasoning.Reasoning(cast("Tagger", counted)).read(ids, complete=True)
    (stream,) = counted.streams
    assert stream.num_steps <= _sections.most_steps(count) + _sections.PIECE
    assert len(counted.feeds) <= count // 256 + 1


def test_nothing_of_a_request_with_too_many_delimiters_is_told_apart() -> None:
    reasoning = _reasoning.Reasoning(TAGGER)
    ids = [*TURN, *[USER, ASSISTANT] * 4096]
    assert reasoning.read(np.array(ids), complete=True) is None
    # As many as a prompt of this length may have.
    messages = ([USER, *[50] * 38, ASSISTANT, OPEN, *[51] * 28, CLOSE, *[52] * 8] * 200)[:8192]
    assert reasoning.read(np.array(messages), complete=True) is not None


def test_a_request_that_is_not_told_apart_goes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sections, "most_steps", lambda _: 3)
    one = side()
    one.insert(OLD)
    end(one, [*TURN, 40], custom={"kvtrie": {"reasoning": "drop"}})
    assert left(one, TURN) == 12
    assert one.evict(8) == 8
    assert left(one, OLD) == 0
    assert not one.cache.counts


def test_nothing_moves_into_a_prompt_with_too_many_delimiters() -> None:
    """Where its last message begins is not known; to read it all held the scheduler for seconds."""
    moving = Moving.__new__(Moving)
    moving._tagger, moving._ends = TAGGER, WeakKeyDictionary()
    ordinary = Request(full_untruncated_fill_ids=[*TURN, USER, 50, 51, ASSISTANT])
    hostile = Request(full_untruncated_fill_ids=[*TURN, *[USER, ASSISTANT] * 4096])
    assert moving._moved_end(cast("Any", ordinary)) == len(TURN)
    assert moving._moved_end(cast("Any", hostile)) == 0


def test_nothing_moves_into_the_last_message_of_a_format_that_no_preset_reads() -> None:
    """A question's moved tail made a model answer the question before."""
    moving = Moving.__new__(Moving)
    moving._tagger, moving._openings, moving._ends = None, None, WeakKeyDictionary()
    assert moving._moved_end(cast("Any", Request(full_untruncated_fill_ids=[*TURN, USER]))) is None
    moving._openings = Openings(((USER, 50),))
    asked = Request(full_untruncated_fill_ids=[*TURN, USER, 50, 51, ASSISTANT])
    assert moving._moved_end(cast("Any", asked)) == len(TURN)


def test_openings_are_those_of_the_served_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    tokenizer = byte_tokenizer("{{ messages[0].content }}")
    monkeypatch.setattr(
        "sglang.srt.utils.hf_transformers_utils.get_tokenizer", lambda *_, **__: tokenizer
    )
    assert _reasoning.openings_of(server()) is None
    found = _reasoning.openings_of(server(chat_template=str(template)))
    assert found is not None
    assert tokenizer.decode(list(found.ids[0])) == "<eos><u"
    for changes, why in (
        ({"skip_tokenizer_init": True}, "there is no tokenizer"),
        ({"chat_template": "/nowhere"}, "No such file"),
        ({}, "the chat template does not show it"),
    ):
        caplog.clear()
        assert _reasoning.openings_of(server(**changes)) is None
        assert "kvtrie: where messages begin is not known" in caplog.text
        assert why in caplog.text


def test_a_prompt_with_too_many_delimiters_is_looked_up_uncut() -> None:
    store = PoolStore.__new__(PoolStore)
    store._tagger = TAGGER

    def cut(ids: list[int]) -> tuple[int, ...]:
        return store._cut(StorePrompt(np.array(ids), None, (), (), None)).borders

    assert len(cut([*TURN, USER, 50, 51, ASSISTANT])) > 0
    assert cut([*TURN, *[USER, ASSISTANT] * 4096]) == ()
