"""Requests with images, whose placeholders are equal whatever they show.

The worker's KV depends on the image, and it refuses to compute tokens of an image that was not
encoded. The shadow compares what every slot holds by token and image.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.vllm.traffic import Ask, Traffic
from tests.vllm_scheduler.core import features_of
from tests.vllm_scheduler.test_exact import CLOSED, EXACT, end
from tests.vllm_scheduler.test_exact import HEAD as CHAT_HEAD
from tests.vllm_scheduler.test_groups import WINDOW
from tests.vllm_scheduler.test_groups import options as groups_of_a_window
from tests.vllm_scheduler.test_traffic import NUM_REQUESTS, SMALL, Run, gaps, in_flight, report
from tests.vllm_scheduler.worker import BLOCK, Image, continuation
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

import kvtrie
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _answered
from kvtrie.integrations.vllm._items import items_of
from kvtrie.integrations.vllm._settings import Settings
from kvtrie.integrations.vllm._version import UnsupportedError
from kvtrie.record import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

PLACEHOLDER = 7
LENGTH = 40
MOVING: dict[str, Any] = {
    "gate": "unchecked",
    "images": True,
    "policy": {"scope": "namespace"},
}

runners = pytest.mark.parametrize("second_runner", [False, True], ids=["V1", "V2"])


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, 500), k=count)


def shown(parts: Sequence[int | str]) -> tuple[list[int], tuple[Image, ...]]:
    """A prompt in which a name stands for the image of this name."""
    tokens: list[int] = []
    images: list[Image] = []
    for one in parts:
        if isinstance(one, str):
            images.append(Image(len(tokens), len(tokens) + LENGTH, one))
            tokens += [PLACEHOLDER] * LENGTH
        else:
            tokens.append(one)
    return tokens, tuple(images)


HEAD, DROPPED, BEFORE, AFTER, NEW = (
    words(40, 1),
    words(50, 2),
    words(60, 3),
    words(70, 4),
    words(30, 5),
)
LONG: list[int | str] = [*HEAD, *DROPPED, *BEFORE, "cat", *AFTER]


def asked(vllm: Core, parts: Sequence[int | str], **given: Any) -> tuple[int, int, int]:
    """Tokens that are moved and computed for a prompt, and images that are encoded."""
    vllm.forget_encoded()
    tokens, images = shown(parts)
    worker, moved = vllm.worker, vllm.worker.num_moved
    computed, encoded = worker.num_computed, worker.num_encoded
    vllm.ask(tokens, images=images, max_tokens=1, **given)
    return (
        worker.num_moved - moved,
        worker.num_computed - computed,
        worker.num_encoded - encoded,
    )


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def moving(core: Callable[..., Core], request: pytest.FixtureRequest) -> Core:
    return core(connector=MOVING, gaps=True, in_flight=request.param)


def test_an_image_moves_with_the_text_around_it(moving: Core) -> None:
    """Nothing of it is encoded again."""
    asked(moving, LONG)
    moved, computed, encoded = asked(moving, [*HEAD, *BEFORE, "cat", *AFTER, *NEW])
    # Of the long prompt, whole blocks are kept.
    kept = (len(shown(LONG)[0]) // BLOCK) * BLOCK
    assert moved == kept - len(HEAD) - len(DROPPED)
    assert computed == len(HEAD) + len(BEFORE) + LENGTH + len(AFTER) + len(NEW) - moved - len(HEAD)
    assert encoded == 0
    assert moving.counts["errors"] == moving.counts["requests_unsupported"] == 0
    moving.check_idle()


def test_the_kv_of_another_image_is_not_moved(moving: Core) -> None:
    """The text around it is, and the other image is encoded."""
    asked(moving, LONG)
    moved, computed, encoded = asked(moving, [*HEAD, *BEFORE, "dog", *AFTER, *NEW])
    assert len(BEFORE) <= moved <= len(BEFORE) + len(AFTER)
    assert computed >= LENGTH + len(NEW)
    assert encoded == 1
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_exact_requests_copy_of_their_own_image(moving: Core) -> None:
    for name in ("cat", "dog", "cat"):
        parts = [*HEAD, name, *AFTER]
        for more in (NEW, words(11, 8)):
            tokens, images = shown([*parts, *more])
            said = moving.ask(tokens, images=images, max_tokens=4, mode="exact")
            assert said == continuation(tokens, 4, images=images)
    # The second prompt of each goes on in the middle of a block.
    assert moving.counts["tokens_exact"] > 0
    assert moving.counts["tokens_moved"] == moving.counts["errors"] == 0
    moving.check_idle()


def test_plain_tokens_find_nothing_of_an_image(moving: Core) -> None:
    """The placeholders may be written as text."""
    asked(moving, LONG)
    tokens, _ = shown([*HEAD, *BEFORE, "cat", *AFTER, *NEW])
    moved, _, _ = asked(moving, tokens)
    assert moved <= len(BEFORE) + len(AFTER)
    moving.check_idle()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["cat", *HEAD, *BEFORE, *AFTER, *NEW], id="to the beginning"),
        pytest.param([*HEAD, *BEFORE, *AFTER, "cat", *NEW], id="to the end"),
        pytest.param([*HEAD, *BEFORE, *AFTER, *NEW], id="deleted"),
        pytest.param([*HEAD, *BEFORE, "cat", "cat", *AFTER, *NEW], id="twice"),
        pytest.param([*HEAD, *BEFORE, "dog", "cat", *AFTER, *NEW], id="after another one"),
    ],
)
def test_an_image_is_elsewhere(moving: Core, parts: list[int | str]) -> None:
    asked(moving, LONG)
    moved, _, encoded = asked(moving, parts)
    assert moved >= len(BEFORE)
    assert encoded == ("dog" in parts)
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_images_that_are_copied_after_a_gap_are_not_encoded(moving: Core) -> None:
    asked(moving, LONG)
    moved, computed, encoded = asked(moving, [*HEAD, *NEW, *BEFORE, "cat", *AFTER, *words(9, 6)])
    assert moved >= len(BEFORE) + LENGTH
    assert computed >= len(NEW) + 9
    assert encoded == 0
    assert moving.num_rows == 0
    moving.check_idle()


@in_flight
@runners
def test_a_chunk_begins_inside_an_image(
    core: Callable[..., Core], in_flight: bool, second_runner: bool
) -> None:
    """Its first tokens are computed again, for which it is encoded."""
    policy = {"scope": "namespace", "recompute_first": 5}
    vllm = core(
        connector=MOVING | {"policy": policy},
        gaps=True,
        in_flight=in_flight,
        second_runner=second_runner,
    )
    asked(vllm, LONG)
    moved, _, encoded = asked(vllm, [*HEAD, "cat", *AFTER, *NEW])
    assert LENGTH - 5 <= moved < LENGTH - 5 + len(AFTER)
    assert encoded == 1
    assert vllm.counts["errors"] == 0
    vllm.check_idle()


def test_dead_reasoning_after_an_image(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT | {"images": True})
    shown_in_question = features_of([Image(len(CHAT_HEAD) + 3, len(CHAT_HEAD) + 23, "cat")])
    end(vllm, CLOSED, mm_features=shown_in_question)
    # It leaves the queue's order with the next request.
    vllm.ask(words(20, 9), max_tokens=1)
    assert vllm.counts["blocks_dead"] >= 158 // BLOCK
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    vllm.check_idle()


def test_by_default_images_are_served_as_without_us(core: Callable[..., Core]) -> None:
    vllm = core(connector=MOVING | {"images": False}, gaps=True)
    asked(vllm, LONG)
    tokens, images = shown([*HEAD, *BEFORE, "cat", *AFTER, *NEW])
    said = vllm.ask(tokens, images=images, max_tokens=4)
    assert said == continuation(tokens, 4, images=images)
    assert vllm.counts["requests_unsupported"] == 2
    assert vllm.worker.num_moved == vllm.worker.num_copied == 0
    vllm.check_idle()


@pytest.mark.parametrize("kind", ["audio", "overlapping"])
def test_other_inputs_are_served_as_without_us(moving: Core, kind: str) -> None:
    tokens, (image,) = shown(LONG)
    more = replace(image, start=image.start + 1, end=image.end + 1, identifier="sound")
    given = (replace(image, modality="audio"),) if kind == "audio" else (image, more)
    moving.ask(tokens, images=given, max_tokens=1)
    assert moving.counts["requests_unsupported"] == 1
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_the_images_of_a_copy_that_fails_are_encoded(
    core: Callable[..., Core],
) -> None:
    """vLLM sends runner V1 no pixels of an image whose tokens it takes for computed."""
    vllm = core(connector=MOVING, shadow=False)
    asked(vllm, LONG)
    vllm.worker.fails = lambda _: True
    tokens, images = shown([*HEAD, *BEFORE, "cat", *AFTER, *NEW])
    vllm.forget_encoded()
    said = vllm.ask(tokens, images=images, max_tokens=4)
    assert vllm.worker.num_failed == 1
    assert said == continuation(tokens, 4, images=images)
    assert vllm.worker.num_encoded == 2
    assert vllm.counts["errors"] == 0
    vllm.check_idle()


def test_reasons_tell_images_apart(core: Callable[..., Core]) -> None:
    """In the first block, by which prompts of another salt are known."""
    vllm = core(connector={"gate": None, "images": True})

    def reasons(parts: list[int | str], salt: str) -> dict[str, int]:
        vllm.counts.clear()
        asked(vllm, parts, salt=salt)
        kind = "computed_tokens/"
        return {name.split("/")[1]: n for name, n in vllm.counts.items() if name.startswith(kind)}

    count = 9 + LENGTH + len(AFTER)
    assert reasons([*HEAD[:9], "cat", *AFTER], "one") == {"first_seen": count}
    assert reasons([*HEAD[:9], "dog", *AFTER], "two") == {"first_seen": count}
    assert reasons([*HEAD[:9], "cat", *AFTER], "three") == {"other_salt": count}
    vllm.check_idle()


def test_the_same_answer_to_another_image_lacks_nothing() -> None:
    """Or its prompt would count as one of another chat template."""
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    question, answer = SimpleNamespace(body=(2, 20)), SimpleNamespace(body=(20, 40))

    def key(at: int, digest: bytes) -> int | None:
        seq = kvtrie.TokenSequence([1] * 40, space, [kvtrie.Item(at, at + 4, digest)])
        return _answered._key(seq, question, answer, None)  # type: ignore[arg-type] # two sections

    assert key(4, b"cat") == key(4, b"cat") != key(4, b"dog")
    assert key(4, b"cat") != key(5, b"cat")
    assert key(20, b"cat") == key(30, b"dog")


def test_an_item_is_of_the_tokens_that_take_features() -> None:
    def digest(length: int, *embeds: int) -> bytes:
        mask = torch.zeros(length, dtype=torch.bool)
        mask[list(embeds)] = True
        place = PlaceholderRange(2, length, mask if embeds else None)
        feature = MultiModalFeatureSpec(None, "image", "cat", place)
        request: Any = SimpleNamespace(mm_features=[feature], num_prompt_tokens=40)
        found = items_of(request)
        assert found is not None
        (item,) = found
        assert (item.start, item.end) == (2, 2 + length)
        return item.digest

    given = [(9,), (8,), (9, 1), (9, 2), (9, 1, 2)]
    assert len({digest(*one) for one in given}) == len(given)
    assert digest(9, 1) == digest(9, 1)
    # Without a mask all do.
    assert digest(9, *range(9)) == digest(9)


def test_no_identifier_is_taken_for_another_one_with_a_mask() -> None:
    def digest(name: str, mask: list[bool] | None) -> bytes:
        place = PlaceholderRange(0, 4, None if mask is None else torch.tensor(mask))
        feature = MultiModalFeatureSpec(None, "image", name, place)
        request: Any = SimpleNamespace(mm_features=[feature], num_prompt_tokens=40)
        found = items_of(request)
        assert found is not None
        return found[0].digest

    mask = [False, True, True, False]
    as_text = "".join(chr(one) for one in mask)
    assert digest("X", mask) != digest("X" + as_text, None)
    assert digest("X", mask) != digest("X\0" + as_text, None)
    assert digest("X\0" + as_text, None) != digest("X" + as_text, None)


def test_requests_of_many_images_are_served_as_without_us(moving: Core) -> None:
    """A plan compares each image with those of cached prompts, and a client chooses how many."""
    for count, unsupported in ((256, 0), (257, 1)):
        tokens = words(10, 1) + [PLACEHOLDER] * count
        images = tuple(Image(10 + at, 11 + at, f"dot-{at}") for at in range(count))
        moving.ask(tokens, images=images, max_tokens=1)
        assert moving.counts["requests_unsupported"] == unsupported
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_an_identifier_of_two_lengths_is_no_error(moving: Core) -> None:
    """vLLM's hash of a block has the identifier of an image, and not its length."""
    for length in (48, 80, 48):
        tokens = [*words(20, 1), *[PLACEHOLDER] * length, *words(40, length)]
        images = (Image(20, 20 + length, "cat"),)
        # vLLM refuses the other length while it has the encoder's output.
        moving.forget_encoded()
        moving.ask(tokens, images=images, max_tokens=1)
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_requests_with_images_are_not_recorded(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector=MOVING | {"record": str(path)})
    asked(vllm, LONG)
    asked(vllm, [*HEAD, *AFTER])
    assert vllm.connector.planner.half.recording._recorder.flush()
    assert [one.num_prompt for one in Log(path)] == [len(HEAD) + len(AFTER)]
    vllm.check_idle()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disable_chunked_mm_input": True}, "with --disable-chunked-mm-input vLLM ends no step"),
        (groups_of_a_window(), 'remove "images", or set "mode": "exact"'),
    ],
    ids=["whole images", "windows"],
)
def test_engines_in_which_no_image_moves_are_refused(
    core: Callable[..., Core], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        core(connector=MOVING, **options)
    core(connector={"mode": "exact", "images": True}, **options)


@pytest.fixture
def not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's tokens of an image attend to later ones of it."""
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", property(lambda _: True))


@pytest.mark.usefixtures("not_causal")
@pytest.mark.parametrize("connector", [MOVING, EXACT, {"gate": None}], ids=["", "exact", "no gate"])
def test_models_whose_images_are_not_causal_are_refused(
    core: Callable[..., Core], connector: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=r'attend to later ones of it.*: remove "images"'):
        core(connector=connector | {"images": True})


@pytest.mark.usefixtures("not_causal")
def test_text_is_copied_where_images_are_not_causal(core: Callable[..., Core]) -> None:
    """Without the setting nothing of images is followed, and text is causal."""
    vllm = core(connector=EXACT)
    for parts in (LONG, [*HEAD, *AFTER, *NEW], [*HEAD, *AFTER, *DROPPED]):
        tokens, images = shown(parts)
        said = vllm.ask(tokens, images=images, max_tokens=4)
        assert said == continuation(tokens, 4, images=images)
    assert vllm.worker.num_copied == (len(HEAD) + len(AFTER)) % BLOCK
    assert vllm.counts["requests_unsupported"] == 1
    vllm.check_idle()


@pytest.mark.usefixtures("not_causal")
@pytest.mark.parametrize(
    "options",
    [groups_of_a_window(max_num_batched_tokens=256), {"kv_cache_dtype": "fp8"}],
    ids=["windows", "quantised"],
)
def test_of_images_that_are_not_causal_nothing_is_copied(
    core: Callable[..., Core], options: dict[str, Any]
) -> None:
    """Where no mode copies, they are followed, for dead reasoning."""
    vllm = core(connector=EXACT | {"images": True}, **options)
    shown_in_question = features_of([Image(len(CHAT_HEAD) + 3, len(CHAT_HEAD) + 23, "cat")])
    for _ in range(2):
        end(vllm, CLOSED, mm_features=shown_in_question)
        vllm.ask(words(20, 9), max_tokens=1)
    assert vllm.counts["blocks_dead"] >= 158 // BLOCK
    assert vllm.worker.num_copied == vllm.worker.num_moved == vllm.worker.num_carried == 0
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    vllm.check_idle()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"images": "yes"}, "images must be true or false, not 'yes'"),
        ({"images": True, "gate": "a.gate.json"}, "next to a gate file, which is measured on text"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.read(given)


class ImageTraffic(Traffic):
    """Histories with images: they are edited as words are, and each is whole."""

    NAMES = ("cat", "dog", "owl", "elk")

    def __init__(self, seed: int) -> None:
        self._shown: dict[tuple[int, ...], list[Any]] = {}
        super().__init__(seed, longest=240)

    def _words(self, count: int) -> list[Any]:
        words: list[Any] = super()._words(count)
        for _ in range(len(words) // 16):
            if self.random.random() < 0.5:
                words.insert(self.random.randrange(len(words)), self.random.choice(self.NAMES))
        return words

    def next(self) -> ImageAsk:
        ask = super().next()
        tokens, images = shown(ask.prompt)
        return ImageAsk(tokens, ask.max_tokens, ask.mode, ask.salt, images, ask)

    def said(self, ask: Ask, answer: list[int]) -> None:
        assert isinstance(ask, ImageAsk)
        super().said(ask.history, answer)


@dataclass(frozen=True)
class ImageAsk(Ask):
    history: Any = None


def check_reasons(vllm: Core) -> None:
    """Each computed token of a prompt has one."""
    counts = {
        kind: sum(n for name, n in vllm.counts.items() if name.startswith(kind))
        for kind in ("computed_tokens/", "prompt_tokens/recomputed/")
    }
    assert len(set(counts.values())) == 1, counts


@gaps
@in_flight
@runners
def test_mixed_traffic(
    core: Callable[..., Core], gaps: bool, in_flight: bool, second_runner: bool
) -> None:
    vllm = core(
        connector=MOVING, gaps=gaps, in_flight=in_flight, second_runner=second_runner, **SMALL
    )
    seed = 81 + 4 * second_runner + 2 * gaps + in_flight
    run = Run(vllm, seed=seed, traffic=ImageTraffic(seed))
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    assert vllm.worker.num_moved == vllm.shadow.num_moved > 0
    assert vllm.worker.num_copied == vllm.shadow.num_exact_copies > 0
    assert vllm.worker.num_encoded
    assert vllm.num_preempted
    assert run.num_checked
    check_reasons(vllm)


@in_flight
@pytest.mark.parametrize(
    "connector",
    [
        {"mode": "exact", "images": True},
        {"images": True},
        {"images": True, "shadow": True, "policy": {"scope": "namespace"}},
    ],
    ids=["mode", "no gate", "shadow"],
)
def test_exact_reuse_alone(
    core: Callable[..., Core], in_flight: bool, connector: dict[str, Any]
) -> None:
    vllm = core(connector=connector, in_flight=in_flight, **SMALL)
    run = Run(vllm, seed=91 + in_flight, traffic=ImageTraffic(91 + in_flight))
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    assert vllm.worker.num_moved == 0
    assert vllm.worker.num_copied > 0
    assert run.num_checked > NUM_REQUESTS // 2
    assert bool(vllm.counts["tokens_would_move"]) == ("shadow" in connector)
    check_reasons(vllm)


def test_windows_in_exact_mode(core: Callable[..., Core]) -> None:
    """Blocks of all groups are ordered, and vLLM finds those of the same image alone."""
    given = groups_of_a_window(blocks=140, max_model_len=1024, max_num_batched_tokens=256)
    vllm = core(connector={"mode": "exact", "images": True}, **given)
    traffic, num_asked = ImageTraffic(7), 0
    for _ in range(60):
        ask = traffic.next()
        num_asked += len(ask.prompt)
        said = vllm.ask(ask.prompt, images=ask.images, max_tokens=ask.max_tokens, salt=ask.salt)
        traffic.said(ask, said)
        known = continuation(ask.prompt, len(said), windows=[WINDOW], images=ask.images)
        assert said == known
    assert vllm.worker.num_computed < num_asked
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    vllm.check_idle()


@gaps
@in_flight
@runners
def test_copies_that_fail(
    core: Callable[..., Core], gaps: bool, in_flight: bool, second_runner: bool
) -> None:
    vllm = core(
        connector=MOVING,
        gaps=gaps,
        in_flight=in_flight,
        second_runner=second_runner,
        shadow=False,
        **SMALL,
    )
    seed = 101 + 4 * second_runner + 2 * gaps + in_flight
    run = Run(vllm, seed=seed, traffic=ImageTraffic(seed))
    vllm.worker.fails = lambda _: run.rng.random() < 0.3
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.worker.num_failed > 5
    assert vllm.counts["errors"] == 0
    assert run.num_checked
    assert not run.num_failed
