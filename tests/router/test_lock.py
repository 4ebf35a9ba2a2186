"""No code of the caller runs while a tracker's lock is held, and none of its objects is freed.

Where it does, the thread waits for itself: each case runs in its own thread, for a limited time.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SECONDS = 20.0


def seq(*ids: int) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(list(ids), NS)


def ends(work: Callable[[], object]) -> None:
    """Run it in a thread; fail if it waits for ever, or with its error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - reported below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the call waits for a lock that its own thread holds"
    if failed:
        raise failed[0]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Finalized:
    """Calls the tracker when it is freed, as the finalizer of a connection may."""

    def __init__(self, tracker: kvtrie.TurnTracker, seen: list[int]) -> None:
        self.tracker, self.seen = tracker, seen

    def __del__(self) -> None:
        self.seen.append(len(self.tracker))

    def __deepcopy__(self, memo: dict[int, Any]) -> Finalized:
        return Finalized(self.tracker, self.seen)


def _replace(tracker: kvtrie.TurnTracker, _clock: Clock) -> None:
    tracker.keep(seq(1, 2, 3, 4), num_computed=3, conversation="c", manifest="another")


def _make_room(tracker: kvtrie.TurnTracker, _clock: Clock) -> None:
    tracker.keep(seq(*range(50, 58)), num_computed=8, conversation="d")


def _expire_in_compare(tracker: kvtrie.TurnTracker, clock: Clock) -> None:
    clock.now = 100.0
    assert tracker.compare(seq(1, 2, 3)).kind == "start_over"


def _expire_in_compare_that_raises(tracker: kvtrie.TurnTracker, clock: Clock) -> None:
    clock.now = 100.0
    with pytest.raises(kvtrie.StaleHandleError, match="expired"):
        tracker.compare(seq(1, 2, 3), conversation="c")


def _expire_in_keep(tracker: kvtrie.TurnTracker, clock: Clock) -> None:
    clock.now = 100.0
    tracker.keep(seq(9), num_computed=1, conversation="d")


def _forget(tracker: kvtrie.TurnTracker, _clock: Clock) -> None:
    tracker.keep(seq(8, 9), num_computed=2, conversation="c")
    tracker.forget("c", NS)


@pytest.mark.parametrize(
    "forgotten_by",
    [
        _replace,
        _make_room,
        _expire_in_compare,
        _expire_in_compare_that_raises,
        _expire_in_keep,
        _forget,
    ],
)
@pytest.mark.parametrize("held_as", ["payload", "manifest", "kv_transfer_params"])
def test_what_is_forgotten_dies_without_the_lock(
    held_as: str, forgotten_by: Callable[[kvtrie.TurnTracker, Clock], None]
) -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=10.0, max_tokens=8, clock=clock)
    seen: list[int] = []

    def work() -> None:
        held: Any = Finalized(tracker, seen)
        if held_as == "kv_transfer_params":
            held = {"a field of tomorrow's": held}
        options = {held_as: held}
        del held
        tracker.keep(seq(1, 2, 3), num_computed=2, conversation="c", **options)
        options.clear()
        seen.clear()
        forgotten_by(tracker, clock)

    ends(work)
    # It was freed once, when the tracker was consistent again.
    assert seen == [len(tracker)]


class Asking(str):
    """A str that calls the tracker whenever it is hashed, compared or shown."""

    __slots__ = ("tracker",)
    tracker: kvtrie.TurnTracker

    def __hash__(self) -> int:
        return self.tracker.num_tokens

    def __eq__(self, other: object) -> bool:
        return self.tracker.num_tokens >= 0 and str.__eq__(self, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"{self.tracker.num_tokens}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Asking:
        return self


def asking(text: str, tracker: kvtrie.TurnTracker) -> Asking:
    made = Asking(text)
    made.tracker = tracker
    return made


def test_conversation_of_a_subclass_of_str_is_its_characters() -> None:
    tracker = kvtrie.TurnTracker()

    def work() -> None:
        name = asking("c", tracker)
        tracker.keep(seq(1, 2, 3), num_computed=2, conversation=name)
        tracker.keep(seq(1, 2, 3, 4), num_computed=3, conversation=name)
        answer = tracker.compare(seq(1, 2, 3, 4, 5), conversation=name)
        assert (answer.kind, answer.num_tokens) == ("exact_extension", 3)
        assert type(answer.conversation) is str
        assert tracker.compare(seq(1, 2, 3, 4, 5), conversation="c").conversation == "c"
        tracker.forget(name, NS)
        with pytest.raises(kvtrie.StaleHandleError, match="'c'"):
            tracker.compare(seq(1), conversation=name)
        with pytest.raises(kvtrie.StaleHandleError, match="'c'"):
            tracker.forget(name, NS)

    ends(work)


def test_conversation_may_be_a_member_of_an_enum_of_texts() -> None:
    class Named(enum.StrEnum):
        FIRST = "first"

    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(1, 2), num_computed=2, conversation=Named.FIRST)
    assert tracker.compare(seq(1, 2, 3), conversation="first").conversation == "first"


class AskingInt(int):
    """An int that calls the tracker whenever it is compared or calculated with."""

    tracker: kvtrie.TurnTracker

    def __deepcopy__(self, memo: dict[int, Any]) -> AskingInt:
        return self


def _asks(name: str) -> Callable[..., object]:
    plain = getattr(int, name)

    def method(self: AskingInt, *others: object) -> object:
        assert self.tracker.num_tokens >= 0
        return plain(self, *others)

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "hash", "bool", "sub", "rsub", "neg", "floordiv"):
    setattr(AskingInt, f"__{_name}__", _asks(f"__{_name}__"))


class Number:
    """An index whose value is an int of another class."""

    def __init__(self, value: AskingInt) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def asking_int(value: int, tracker: kvtrie.TurnTracker) -> AskingInt:
    made = AskingInt(value)
    made.tracker = tracker
    return made


@pytest.mark.filterwarnings("ignore:.*__index__ returned non-int:DeprecationWarning")
def test_counts_are_exact_ints() -> None:
    tracker = kvtrie.TurnTracker()

    def work() -> None:
        computed, last = (Number(asking_int(value, tracker)) for value in (2, 1))
        tracker.keep(seq(1, 2, 3), num_computed=computed, conversation="c")
        answer = tracker.compare(seq(1, 2, 3), conversation="c", keep_last=last)
        assert (answer.kind, answer.num_tokens) == ("exact_extension", 2)

    ends(work)


def test_fields_of_the_parameters_run_no_code_under_the_lock() -> None:
    tracker = kvtrie.TurnTracker(block_size=2)

    def text(value: str) -> str:
        return asking(value, tracker)

    def number(value: int) -> int:
        return asking_int(value, tracker)

    class Processed:
        def __bool__(self) -> bool:
            return tracker.num_tokens < 0

        def __deepcopy__(self, memo: dict[int, Any]) -> Processed:
            return self

    class Blocks(list[Any]):
        def __len__(self) -> int:
            return super().__len__() + 0 * tracker.num_tokens

        def __deepcopy__(self, memo: dict[int, Any]) -> Blocks:
            return self

    given = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "_remote_blocks_processed": Processed(),
        text("transfer_mode"): text("pull"),
        "remote_engine_id": text("e"),
        "remote_request_id": text("r"),
        "remote_host": text("h"),
        "remote_port": number(5600),
        "remote_num_tokens": number(4),
        "dcp_size": number(1),
        "tp_size": number(1),
        "remote_block_ids": Blocks([Blocks([number(7), number(8)])]),
    }

    def work() -> None:
        tracker.keep(seq(1, 2, 3, 4), num_computed=4, conversation="c", kv_transfer_params=given)
        answer = tracker.compare(seq(1, 2, 3, 4, 5), conversation="c")
        params = answer.kv_transfer_params
        assert params is not None
        assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[7, 8]], 4)
        assert {type(value) for value in params.values()} == {bool, str, int, list}
        assert {type(name) for name in params} == {str}

    ends(work)


def test_what_only_says_it_is_of_a_type_is_refused() -> None:
    class Pretender:
        @property  # type: ignore[misc] # what a mock with a spec does
        def __class__(self) -> type:
            return kvtrie.Imported

    pretender: Any = Pretender()
    with pytest.raises(TypeError, match="source is"):
        kvtrie.TurnTracker().keep(seq(1), num_computed=1, source=pretender)
