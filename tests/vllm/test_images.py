"""Prompts with images in a real engine, next to the model itself.

Moved KV is judged by a cache that is put together of what the model computes: rows of the first
prompt, whose keys are rotated, and what it computes after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.vllm import models
from tests.vllm.embedded import COMPUTED, EXACT, MOVED, Watched
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import words
from tests.vllm.test_logits import ANOTHER, ROUNDING, num
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.vllm.embedded import Segment, Served
    from tests.vllm.engine import Engine

    Start = Callable[..., Engine]

Parts = list[int | str]
Kv = tuple[torch.Tensor, torch.Tensor]

HEAD, DROPPED, BEFORE, AFTER, NEW = (words(n, n) for n in (70, 45, 50, 81, 30))
OPTIONS: dict[str, Any] = {
    "gaps": True,
    "skip_tokenizer_init": False,
    "max_logprobs": -1,
    "limit_mm_per_prompt": {"image": 4},
}


def connector(**policy: Any) -> dict[str, Any]:
    return {
        "gate": "unchecked",
        "images": True,
        "chat_format": None,
        "policy": {"scope": "namespace", **policy},
    }


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.idefics(tmp_path_factory.mktemp("models") / "idefics")


def picture(name: str) -> Image.Image:
    rng = np.random.default_rng(list(name.encode()))
    side = models.PIXELS
    return Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))


def shown(parts: Parts) -> tuple[list[int], list[Image.Image]]:
    """A prompt with a token in the place of each image, and the images."""
    tokens = [models.IMAGE if isinstance(one, str) else one for one in parts]
    return tokens, [picture(one) for one in parts if isinstance(one, str)]


def expanded(tokens: Sequence[int]) -> list[int]:
    """A prompt with all tokens of its images."""
    whole = [models.BORDER, models.BEGIN, *[models.IMAGE] * models.IMAGE_TOKENS, models.BORDER]
    return [one for token in tokens for one in (whole if token == models.IMAGE else [token])]


def rotated(k: torch.Tensor, delta: int) -> torch.Tensor:
    """Keys at other positions, ``[layers, tokens, heads, channels]``."""
    half = k.shape[-1] // 2
    angles = delta * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    one, other = k[..., :half], k[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Model:
    """The model itself, whose cache may hold anything."""

    def __init__(self, folder: Path) -> None:
        kind = transformers.Idefics3ForConditionalGeneration
        self._model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self._pictures: Any = Idefics3ImageProcessorPil.from_pretrained(folder)

    def embeddings(self, parts: Parts) -> torch.Tensor:
        """What enters the first layer, ``[tokens, hidden]``."""
        tokens, pictures = shown(parts)
        found: list[torch.Tensor] = []
        text = self._model.model.text_model

        def note(_: Any, __: Any, given: dict[str, Any]) -> None:
            found.append(given["inputs_embeds"][0])

        hook = text.register_forward_pre_hook(note, with_kwargs=True)
        inputs: dict[str, Any] = {}
        if pictures:
            inputs = self._pictures([pictures], return_tensors="pt")
        try:
            with torch.no_grad():
                self._model(input_ids=torch.tensor([expanded(tokens)]), use_cache=False, **inputs)
        finally:
            hook.remove()
        return found[0]

    def serve(
        self, parts: Parts, answer: Sequence[int], segments: Sequence[Segment], source: Kv | None
    ) -> tuple[torch.Tensor, Kv]:
        """Log probabilities of each token of an answer, and the KV before the last one.

        ``segments`` of the prompt are rows of ``source``, or computed.
        """
        embeddings = self.embeddings(parts)
        said = torch.tensor(list(answer[:-1]), dtype=torch.long)
        embeddings = torch.cat([embeddings, self._model.get_input_embeddings()(said)])
        cache: Any = transformers.DynamicCache()
        rows = embeddings[:0]
        num_prompt, position = segments[-1][1], 0
        for start, end, old, kind in [*segments, (num_prompt, len(embeddings), -1, COMPUTED)]:
            assert start == position
            position = end
            if kind == COMPUTED:
                hidden = self._forward(embeddings[start:end], start, cache)
                if end >= num_prompt:
                    rows = torch.cat([rows, hidden])
                continue
            assert source is not None
            rows_of = slice(old, old + end - start)
            keys, values = rotated(source[0][:, rows_of], start - old), source[1][:, rows_of]
            for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
        logits = self._model.lm_head(rows[-len(answer) :])
        k = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
        v = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
        return logits.log_softmax(-1).detach(), (k.detach(), v.detach())

    def _forward(self, embeddings: torch.Tensor, start: int, cache: Any) -> torch.Tensor:
        """The last hidden states of tokens, whose KV is added to the cache."""
        count = len(embeddings)
        if not count:
            return embeddings
        with torch.no_grad():
            out = self._model.model.text_model(
                inputs_embeds=embeddings[None],
                position_ids=torch.arange(start, start + count)[None],
                past_key_values=cache,
                use_cache=True,
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def computed(self, parts: Parts, answer: Sequence[int]) -> tuple[torch.Tensor, Kv]:
        """Likewise, with nothing reused."""
        count = len(expanded(shown(parts)[0]))
        return self.serve(parts, answer, [(0, count, -1, COMPUTED)], None)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def ask(vllm: Watched, parts: Parts, **given: Any) -> Served:
    tokens, pictures = shown(parts)
    return vllm.ask(tokens, max_tokens=5, images=pictures, **given)


EDITS: dict[str, tuple[Parts, Parts]] = {
    "an image in the moved run": (
        [*HEAD, *DROPPED, *BEFORE, "cat", *AFTER],
        [*HEAD, *BEFORE, "cat", *AFTER, *NEW],
    ),
    "an image before the edit": (
        [*HEAD, "cat", *DROPPED, *BEFORE, *AFTER],
        [*HEAD, "cat", *BEFORE, *AFTER, *NEW],
    ),
    "the image is deleted": (
        [*HEAD, *BEFORE, "cat", *AFTER],
        [*HEAD, *BEFORE, *AFTER, *NEW],
    ),
    "another image": (
        [*HEAD, "cat", *AFTER],
        [*HEAD, "dog", *AFTER, *NEW],
    ),
    "an image after a gap": (
        [*HEAD, *DROPPED, *BEFORE, "cat", *AFTER],
        [*HEAD, *NEW, *BEFORE, "cat", *AFTER, *words(9, 20)],
    ),
    "two images in another order": (
        [*HEAD, "cat", *BEFORE, "dog", *AFTER],
        [*HEAD, "dog", *BEFORE[:-12], "cat", *AFTER, *NEW],
    ),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("poisons", [False, True], ids=["", "poisoned"])
def test_moved_kv_is_that_of_the_model(
    engine: Start, idefics: Path, monkeypatch: pytest.MonkeyPatch, edit: str, poisons: bool
) -> None:
    """With ``poisons``, what the plan leaves out is NaN."""
    vllm = engine(idefics, connector=connector(), **OPTIONS)
    watched, model = Watched(vllm, monkeypatch), Model(idefics)
    old, new = EDITS[edit]
    first = ask(watched, old)
    logprobs, source = model.computed(old, first.tokens)
    close(first.logprobs, logprobs)
    close(first.k, source[0])
    if poisons:
        served = ask(watched, new)
        kept = {
            one
            for start, end, before, kind in served.segments
            if kind != COMPUTED
            for one in range(before, before + end - start)
        }
        vllm.reset()
        ask(watched, old)
        whole = len(source[0][0]) // BLOCK * BLOCK
        poison(vllm, watched.table, [one for one in range(whole) if one not in kept])
    served = ask(watched, new)
    assert num(served, MOVED) > 0
    compare(model, new, served, source)
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0


def compare(model: Model, parts: Parts, served: Served, source: Kv) -> None:
    logprobs, (k, v) = model.serve(parts, served.tokens, served.segments, source)
    close(served.logprobs, logprobs)
    close(served.k, k)
    close(served.v, v)
    # It is approximate: the model would compute something else.
    logprobs, _ = model.computed(parts, served.tokens)
    assert (served.logprobs - logprobs).abs().max() > ANOTHER


def poison(vllm: Engine, table: list[int], positions: list[int]) -> None:
    assert positions
    pool = vllm.kv_pool
    for position in positions:
        block, slot = table[position // BLOCK], position % BLOCK
        for view in (*pool.k, *(one for one in pool.v if one is not None)):
            view[block, slot] = torch.nan


def test_the_first_tokens_of_an_image_are_computed(
    engine: Start, idefics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is encoded, and a step ends inside it."""
    vllm = engine(idefics, connector=connector(recompute_first=9), **OPTIONS)
    watched, model = Watched(vllm, monkeypatch), Model(idefics)
    first = ask(watched, [*HEAD, *DROPPED, "cat", *AFTER])
    _, source = model.computed([*HEAD, *DROPPED, "cat", *AFTER], first.tokens)
    new: Parts = [*HEAD, "cat", *AFTER, *NEW]
    served = ask(watched, new)
    start = len(HEAD) + 9
    assert (start, MOVED) in [(one[0], one[3]) for one in served.segments]
    compare(model, new, served, source)
    assert vllm.counts["errors"] == 0


@pytest.mark.parametrize("mode", ["exact", "setting"])
def test_exact_reuse_is_as_without_us(
    engine: Start, idefics: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Of requests that ask for it after others were moved, and in exact mode."""
    options, given = dict(OPTIONS), {"mode": "exact"}
    setting = connector()
    if mode == "setting":
        setting = {"mode": "exact", "images": True, "chat_format": None}
        options["gaps"], given = False, {}
    vllm = engine(idefics, connector=setting, **options)
    watched, model = Watched(vllm, monkeypatch), Model(idefics)
    for old, new in EDITS.values():
        ask(watched, old)
        if mode == "exact":
            ask(watched, new)
        for parts in (new, [*new[:-7], *words(11, 31)]):
            served = ask(watched, parts, **given)
            assert num(served, MOVED) == 0
            logprobs, (k, v) = model.computed(parts, served.tokens)
            assert served.tokens == logprobs.argmax(-1).tolist()
            close(served.logprobs, logprobs)
            close(served.k, k)
            close(served.v, v)
    assert vllm.counts["tokens_exact"] > 0
    assert num(served, EXACT) > 0
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0


FAILING: dict[str, tuple[str, dict[str, str]]] = {
    "moved": ("an image in the moved run", {}),
    "after a gap": ("an image after a gap", {}),
    "exact": ("an image in the moved run", {"mode": "exact"}),
}


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("what", FAILING)
def test_after_a_copy_that_failed_answers_are_those_of_the_model(
    engine: Start, idefics: Path, monkeypatch: pytest.MonkeyPatch, what: str, in_flight: bool
) -> None:
    """Its images are encoded again, of which vLLM sends no pixels to runner V1."""
    vllm = engine(idefics, connector=connector(), async_scheduling=in_flight, **OPTIONS)
    watched, model = Watched(vllm, monkeypatch), Model(idefics)
    edit, given = FAILING[what]
    old, new = EDITS[edit]
    if given:
        # Of the last block, some tokens are the same.
        new = [*old[:-7], *NEW]
    ask(watched, old)
    vllm.core.reset_encoder_cache()

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(vllm.kv_pool, "apply", fail)
        vllm.shadow.expect_failures()
        served = ask(watched, new, **given)
        vllm.shadow.expect_failures(expected=False)
    assert vllm.counts["copies_failed"] > 0
    logprobs, (k, v) = model.computed(new, served.tokens)
    assert served.tokens == logprobs.argmax(-1).tolist()
    close(served.logprobs, logprobs)
    close(served.k, k)
    close(served.v, v)
    # What is left in the pool is right as well.
    again = ask(watched, new, mode="exact")
    assert again.tokens == served.tokens
    close(again.logprobs, logprobs)
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0


def test_nothing_of_an_image_is_stored(engine: Start, idefics: Path) -> None:
    """A store has token ids alone."""
    store = {"backend": "host", "min_tokens": 1}
    setting = {"mode": "exact", "images": True, "chat_format": None, "store": store}
    vllm = engine(idefics, connector=setting, **OPTIONS | {"gaps": False})
    runs = vllm.connector.planner.half.stored._known_runs
    for _ in range(2):
        tokens, pictures = shown([*HEAD, "cat", *AFTER])
        vllm.ask(tokens, max_tokens=5, images=pictures)
    assert not runs
    vllm.ask([*HEAD, *AFTER], max_tokens=5)
    assert runs
    # Its first run is in the store.
    tokens, pictures = shown([*NEW, "cat", *HEAD, *AFTER])
    vllm.ask(tokens, max_tokens=5, images=pictures)
    assert vllm.counts["store_requests"] == vllm.counts["errors"] == 0


def test_by_default_images_are_served_as_without_us(engine: Start, idefics: Path) -> None:
    vllm = engine(idefics, connector=connector() | {"images": False}, **OPTIONS)
    model = Model(idefics)
    for parts in EDITS["an image in the moved run"]:
        tokens, pictures = shown(parts)
        said = vllm.ask(tokens, max_tokens=5, images=pictures).tokens
        logprobs, _ = model.computed(parts, said)
        assert said == logprobs.argmax(-1).tolist()
    assert vllm.counts["requests_unsupported"] == 2
    assert vllm.counts["tokens_moved"] == vllm.counts["tokens_exact"] == 0
