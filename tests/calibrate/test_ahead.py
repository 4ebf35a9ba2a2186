"""A calibration on several threads takes the conversations, and writes the rows, of one thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.calibrate import measure, shipped
from kvtrie.calibrate._ahead import Ahead, twin
from kvtrie.calibrate._partial import Partial

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")


class Source:
    """Makes conversations that say which they are, and notes the thread that asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads: set[int] = set()

    def make(self, number: int) -> tuple[list[Any], bool]:
        self.threads.add(threading.get_ident())
        return [(self.name, number)], False


class Bench:
    """Notes what it replays; one conversation at a time."""

    def __init__(self, error: Exception | None = None) -> None:
        self.replayed: list[Any] = []
        self._error = error
        self._lock = threading.Lock()

    def replay(self, steps: list[Any], *, is_chain: bool) -> list[dict[str, Any]]:
        assert self._lock.acquire(blocking=False)
        try:
            if self._error is not None:
                raise self._error
            self.replayed += steps
            return [{"steps": steps, "chain": is_chain}]
        finally:
            self._lock.release()


def test_report_and_partial_file_are_those_of_one_job(tmp_path: Path) -> None:
    def run(jobs: int) -> tuple[measure.Report, bytes]:
        with Partial(tmp_path / f"{jobs}.partial") as partial:
            report = measure.calibrate(
                shipped.model_path("gqa"),
                policies=("rotated", "rotated+probe20"),
                is_recall=True,
                most_cases=4,
                partial=partial,
                jobs=jobs,
            )
        return report, (tmp_path / f"{jobs}.partial").read_bytes()

    assert run(3) == run(1)


def test_copies_share_weights_and_neither_buffers_nor_hooks() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa"))
    other = twin(model)
    for (one, ours), (two, theirs) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one == two
        assert ours is theirs
    buffers = list(zip(model.buffers(), other.buffers(), strict=True))
    assert buffers
    for mine, copied in buffers:
        assert torch.equal(mine, copied)
        # A pass may write to frequencies.
        assert mine.data_ptr() != copied.data_ptr()
    seen: list[str] = []
    other.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append("other"))
    ids = torch.tensor([[3, 4]])
    model(ids)
    assert seen == []
    other(ids)
    assert seen == ["other"]


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_rows_come_as_asked_for_and_conversations_are_made_on_one_thread(jobs: int) -> None:
    source, benches = Source("nonce"), [Bench() for _ in range(jobs)]
    with contextlib.closing(Ahead(benches)) as ahead:
        for number in range(30):
            ahead.begin((source, later) for later in range(number, 30))
            assert ahead.take(source, number) == [{"steps": [("nonce", number)], "chain": False}]
    assert source.threads == {threading.get_ident()}
    replayed = [step for bench in benches for step in bench.replayed]
    assert sorted(replayed) == [("nonce", number) for number in range(30)]


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (2, 4), (3, 6)])
def test_at_most_two_conversations_a_thread_are_begun(jobs: int, most: int) -> None:
    benches = [Bench() for _ in range(jobs)]
    with contextlib.closing(Ahead(benches)) as ahead:
        for _ in range(3):
            ahead.begin((Source("nonce"), number) for number in range(100))
    assert sum(len(bench.replayed) for bench in benches) <= most


def test_nothing_is_begun_after_the_end_of_the_time() -> None:
    source = Source("nonce")
    with contextlib.closing(Ahead([Bench(), Bench()])) as ahead:
        ahead.stop()
        assert ahead.take(source, 0) is None


def test_what_is_not_wanted_any_more_makes_room() -> None:
    one, other = Source("nonce"), Source("window")
    with contextlib.closing(Ahead([Bench()])) as ahead:
        ahead.begin([(one, 0)])
        ahead.drop("nonce")
        ahead.begin([(other, 0)])
        assert ahead.take(one, 0) is None
        assert ahead.take(other, 0) == [{"steps": [("window", 0)], "chain": False}]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_replay_reaches_the_caller(jobs: int) -> None:
    source = Source("nonce")
    benches = [Bench(RuntimeError("no memory")) for _ in range(jobs)]

    def replay() -> None:
        with contextlib.closing(Ahead(benches)) as ahead:
            ahead.begin([(source, 0)])
            ahead.take(source, 0)

    with pytest.raises(RuntimeError, match="no memory"):
        replay()


def test_an_error_of_a_conversation_that_is_not_wanted_is_nobodys() -> None:
    class Refused(Source):
        def make(self, number: int) -> tuple[list[Any], bool]:
            if number == 1:
                msg = "the chat template refuses the conversation"
                raise ValueError(msg)
            return super().make(number)

    source = Refused("nonce")
    with contextlib.closing(Ahead([Bench(), Bench()])) as ahead:
        ahead.begin((source, number) for number in range(3))
        assert ahead.take(source, 0) is not None
        with pytest.raises(ValueError, match="refuses"):
            ahead.take(source, 1)
        ahead.drop("nonce")


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8)), max_size=5))
def test_turns_are_those_of_rounds(shapes: list[tuple[int, int, int]]) -> None:
    """``shapes``: of each edit, its conversations, its rounds, and after how many it is clear."""

    def make(number: int) -> tuple[list[Any], bool]:
        return [number], False

    sources = [
        measure._Conversations(str(name), most, make, every=every)
        for name, (most, every, _) in enumerate(shapes)
    ]
    clear = {str(name): after for name, (_, _, after) in enumerate(shapes)}
    expected, count = [], dict.fromkeys(clear, 0)
    left = list(sources)
    for turn in itertools.count():
        if not left:
            break
        for source in list(left):
            if turn % source.every == 0:
                expected.append((source.name, count[source.name]))
                count[source.name] += 1
                if count[source.name] == min(source.most, clear[source.name]):
                    left.remove(source)
    turns, found = measure._Turns(sources), []
    while (wanted := next(turns.next(), None)) is not None:
        source, number = wanted
        found.append((source.name, number))
        turns.took(ends=number + 1 == clear[source.name])
    assert found == expected
