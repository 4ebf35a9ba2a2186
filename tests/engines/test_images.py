"""Images in prompts, with tiny vision models: exact reuse, images that move, images deleted.

Qwen2-VL, because its images enter at the embeddings alone (those of Qwen3-VL also enter later
layers), and Qwen2.5-VL, whose language model is the same.
"""

from __future__ import annotations

import gc
import weakref
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.byte_tokenizer import byte_tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvtrie
from kvtrie import LayoutError
from kvtrie.engines.transformers import Generator, Image, Watcher
from kvtrie.kernels.reference import rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Check = Callable[[Generator], None]

TOLERANCE = 1e-4
VOCAB, IMAGE, VIDEO = 300, 290, 291
# 3 channels, 2 times, 14 x 14 pixels.
PATCH = 1176
TYPES = ["qwen2_vl", "qwen2_5_vl"]
APPROXIMATE = kvtrie.ReusePolicy(min_run=16, scope="namespace")
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 48,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    },
}

by_type = pytest.mark.parametrize("name", TYPES)


@cache
def vision_model(name: str) -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    made: Any = CONFIG_MAPPING[name]
    config = made(
        text_config=text,
        vision_config=VISION[name] | {"initializer_range": 0.2},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).float().eval()


def picture(seed: int, rows: int = 4, columns: int = 6) -> Image:
    """An image of ``rows * columns`` tokens."""
    grid = (1, 2 * rows, 2 * columns)
    draw = torch.Generator().manual_seed(seed)
    return Image(torch.randn(4 * rows * columns, PATCH, generator=draw), grid)


def text(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 280, count)]


def tokens(*parts: list[int] | Image) -> dict[str, Any]:
    """A prompt of text and images, as ``generate`` takes it."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Image):
            ids += [IMAGE] * (part.grid[1] * part.grid[2] // 4)
            images.append(part)
        else:
            ids += part
    return {"prompt": ids, "images": images}


def generator_of(name: str = "qwen2_vl", **options: Any) -> Generator:
    return Generator(vision_model(name), **{"num_blocks": 128, "block_size": 4, **options})


def uncached(
    name: str, prompt: Sequence[int], images: Sequence[Image], answer: Sequence[int] = ()
) -> Any:
    """What the whole model computes of a prompt with its pixels, without any cache of ours."""
    whole = torch.tensor([[*prompt, *answer]])
    given = {}
    if images:
        given = {
            "pixel_values": torch.cat([image.pixel_values for image in images]),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
            "mm_token_type_ids": (whole == IMAGE).int(),
        }
    model = vision_model(name)
    # Positions of an earlier call are kept there.
    model.model.rope_deltas = None
    with torch.inference_mode():
        return model(input_ids=whole, use_cache=True, **given)


def assert_as_uncached(
    name: str, done: Any, prompt: Sequence[int], images: Sequence[Image]
) -> None:
    answer = done.tokens[:-1]
    want = uncached(name, prompt, images, answer).logits[0, len(prompt) - 1 :].float()
    torch.testing.assert_close(done.logits, want, atol=TOLERANCE, rtol=0)


GREEDY: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True, "return_logits": True}


@by_type
@pytest.mark.parametrize("prefill_chunk", [2048, 5])
def test_logits_are_those_of_the_model_without_a_cache(
    name: str, prefill_chunk: int, check_drained: Check
) -> None:
    """Chunks of 5 begin inside images. Answers go on at the position after the image."""
    cat, dog = picture(1), picture(2, 2, 9)
    generator = generator_of(name, prefill_chunk=prefill_chunk)
    for asked in (
        tokens(text(7, 1), cat, text(5, 2)),
        tokens(text(7, 1), cat, text(5, 3), dog, text(6, 4)),
        tokens(text(3, 5), dog),
        tokens(cat, text(3, 6)),
        tokens(text(9, 7)),
    ):
        done = generator.generate(**asked, **GREEDY)
        assert_as_uncached(name, done, asked["prompt"], asked["images"])
    check_drained(generator)


@by_type
def test_a_prefix_with_an_image_is_reused_exactly(name: str, monkeypatch: Any) -> None:
    cat, dog = picture(1), picture(2)
    generator, model = generator_of(name), vision_model(name)
    calls: list[int] = []
    seen = model.model.get_image_features

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return seen(*given, **more)

    monkeypatch.setattr(model.model, "get_image_features", counted)
    first = tokens(text(7, 1), cat, text(5, 2))
    done = generator.generate(**first, **GREEDY)
    assert (done.usage.exact, len(calls)) == (0, 1)
    assert_as_uncached(name, done, **first)
    calls.clear()
    # The answer, and another question: the image is not seen again.
    second = tokens(text(7, 1), cat, text(5, 2), done.tokens, text(6, 3))
    done = generator.generate(**second, **GREEDY)
    assert done.usage.exact >= len(first["prompt"])
    assert not calls
    assert_as_uncached(name, done, **second)
    calls.clear()
    # Another image with the same tokens: nothing from it on.
    third = tokens(text(7, 1), dog, text(5, 2))
    done = generator.generate(**third, **GREEDY)
    assert (done.usage.exact, len(calls)) == (7, 1)
    calls.clear()
    assert_as_uncached(name, done, **third)


@by_type
def test_a_gap_may_begin_inside_an_image(name: str) -> None:
    """Its tokens attend to those before them only, and the whole image is seen again."""
    cat = picture(1)
    asked = tokens(text(7, 1), cat, text(5, 2))
    generator = generator_of(name)
    generator.generate(**asked, **GREEDY)
    # Leaves first: what remains ends inside the image.
    index = generator.index
    generator.allocator.free(index.evict(index.stats().indexed - 4))
    done = generator.generate(**asked, **GREEDY)
    assert done.usage.exact == 16
    assert_as_uncached(name, done, **asked)


def test_images_of_one_shape_and_other_pixels_are_other_images() -> None:
    one, other = picture(1, 4, 6), picture(2, 4, 6)
    same = Image(one.pixel_values.clone(), one.grid)
    wide = Image(one.pixel_values, (1, 12, 8))
    half = Image(one.pixel_values.half(), one.grid)
    assert one.digest == same.digest
    assert len({image.digest for image in (one, other, wide, half)}) == 4


def test_two_grids_of_as_many_tokens_share_nothing() -> None:
    """Their positions differ, so the text after them does, if the pixels were the same."""
    tall = picture(1, 3, 8)
    flat = Image(tall.pixel_values, (1, 8, 12))
    generator = generator_of()
    generator.generate(**tokens(text(8, 1), tall, text(8, 2)), **GREEDY)
    asked = tokens(text(8, 1), flat, text(8, 2))
    done = generator.generate(**asked, **GREEDY)
    assert done.usage.exact == 8
    assert_as_uncached("qwen2_vl", done, **asked)


class Segments(Watcher):
    """Keeps the segments of the last plan."""

    found: Any = None

    def planned(self, request: Any, planned: Any) -> None:
        del request
        self.found = planned.plan.segments.copy()


def keys_of(
    name: str, before: dict[str, Any], asked: dict[str, Any], policy: kvtrie.ReusePolicy
) -> tuple[torch.Tensor, Any, Any]:
    """K ``[layers, tokens, ...]`` of a prompt after another; its usage, and its plan's segments."""
    generator = generator_of(name, gate="unchecked")
    generator.generate(**before, max_new_tokens=1)
    watcher = Segments()
    generator.watch(watcher)
    request = generator.submit(**asked, max_new_tokens=2, ignore_eos=True, policy=policy)
    generator.step()
    (job,) = generator._scheduler.running
    assert job.lease is not None
    keys, _ = generator.pool.gather(job.lease.table, 0, len(asked["prompt"]))
    usage = request.usage
    generator.cancel(request)
    return keys, usage, watcher.found


EDITS: dict[str, tuple[Any, Any, int, int]] = {
    # Before, after, and the tokens and positions that the run moves by.
    "image in the run": (
        lambda: tokens(text(30, 1), text(9, 2), picture(1), text(12, 3)),
        lambda: tokens(text(4, 4), text(9, 2), picture(1), text(12, 3), text(3, 5)),
        *(-26, -26),
    ),
    "image deleted before the run": (
        lambda: tokens(text(6, 1), picture(1), text(20, 2), picture(2, 2, 3), text(9, 3)),
        lambda: tokens(text(6, 1), text(20, 2), picture(2, 2, 3), text(9, 3), text(3, 5)),
        *(-24, -6),
    ),
    "image before the run": (
        lambda: tokens(text(6, 1), text(20, 2), picture(2, 2, 3), text(9, 3)),
        lambda: tokens(
            *(text(6, 1), picture(1), text(20, 2), picture(2, 2, 3), text(9, 3), text(3, 5))
        ),
        *(24, 6),
    ),
    "another image before the run": (
        lambda: tokens(text(6, 1), picture(1, 3, 8), text(20, 2), text(9, 3)),
        lambda: tokens(text(6, 1), picture(1, 2, 12), text(20, 2), text(9, 3), text(3, 5)),
        *(0, 4),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
@by_type
def test_moved_keys_of_the_first_layer_are_those_of_recomputation(name: str, edit: str) -> None:
    before, after, of_tokens, of_positions = EDITS[edit]
    asked = after()
    moved, usage, segments = keys_of(name, before(), asked, APPROXIMATE)
    exact, _, _ = keys_of(name, before(), asked, kvtrie.EXACT_ONLY)
    (run,) = segments[segments["class"] == 1]
    assert usage.moved == run["end"] - run["start"] >= 26
    assert (run["delta"], run["position_delta"]) == (of_tokens, of_positions)
    error = (moved[0] - exact[0]).abs().max() / exact[0].abs().max()
    assert float(error) < 1e-4
    # And they are what transformers itself computes of the whole prompt.
    want = uncached(name, asked["prompt"], asked["images"]).past_key_values.layers[0].keys[0]
    error = (moved[0] - want.transpose(0, 1)).abs().max() / want.abs().max()
    assert float(error) < 1e-4


def test_the_difference_of_tokens_would_be_noticed() -> None:
    generator = generator_of()
    rope = generator.pool.rope
    assert rope is not None
    assert rope.item_positions
    assert generator.index.item_positions
    _, after, of_tokens, of_positions = EDITS["image deleted before the run"]
    asked = after()
    keys = uncached("qwen2_vl", asked["prompt"], asked["images"]).past_key_values.layers[0].keys[0]
    apart = rotate(keys, rope, of_tokens) - rotate(keys, rope, of_positions)
    assert float(apart.abs().max() / keys.abs().max()) > 0.1


def test_answers_after_a_moved_image_end_and_leave_nothing(check_drained: Check) -> None:
    before, after, *_ = EDITS["image in the run"]
    generator = generator_of(gate="unchecked")
    generator.generate(**before(), max_new_tokens=1)
    for _ in range(2):
        done = generator.generate(**after(), policy=APPROXIMATE, **GREEDY)
        assert len(done.tokens) == 4
        assert done.usage.moved > 26
    check_drained(generator)


def test_preempted_requests_resume_with_their_images(check_drained: Check) -> None:
    asked = [tokens(text(6, n), picture(n), text(5, n + 10)) for n in range(3)]
    generator = generator_of(num_blocks=20)
    requests = [generator.submit(**one, max_new_tokens=12, ignore_eos=True) for one in asked]
    while generator.num_running or generator.num_waiting:
        generator.step()
    assert sum(request.num_preemptions for request in requests) > 0
    for request, one in zip(requests, asked, strict=True):
        alone = generator_of().generate(**one, max_new_tokens=12, ignore_eos=True)
        assert request.tokens == alone.tokens
    check_drained(generator)


def test_an_image_that_overflows_ends_its_request_alone_and_leaves_no_kv(
    check_drained: Check,
) -> None:
    """Of tokens before it too, KV would be NaN, and other prompts share that."""
    bright = Image(picture(1).pixel_values.sign() * 3e38, picture(1).grid)
    generator = generator_of()
    shared = text(40, 1)
    asked = [tokens(text(9, 2)), tokens(shared, bright, text(5, 3)), tokens(shared, text(6, 4))]
    requests = [generator.submit(**one, max_new_tokens=4, ignore_eos=True) for one in asked]
    while generator.num_running or generator.num_waiting:
        generator.step()
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, ValueError)
    assert str(requests[1].error).endswith("image of grid (1, 8, 12) is not finite")
    assert requests[2].usage.exact == 0
    done = generator.generate(**tokens(shared, text(6, 5)), **GREEDY)
    assert_as_uncached("qwen2_vl", done, [*shared, *text(6, 5)], [])
    check_drained(generator)


def test_a_vision_part_that_fails_ends_its_request_alone(
    monkeypatch: Any, check_drained: Check
) -> None:
    generator = generator_of()
    seen = vision_model("qwen2_vl").model.get_image_features
    bad = picture(7)

    def failing(pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        if torch.equal(pixels, bad.pixel_values):
            raise RuntimeError("out of memory")
        return seen(pixels, grid)

    monkeypatch.setattr(vision_model("qwen2_vl").model, "get_image_features", failing)
    asked = [tokens(text(9, n), image, text(3, n)) for n, image in enumerate([picture(8), bad])]
    requests = [generator.submit(**one, max_new_tokens=3, ignore_eos=True) for one in asked]
    while generator.num_running or generator.num_waiting:
        generator.step()
    assert [request.finish_reason for request in requests] == ["length", "error"]
    check_drained(generator)


def test_a_generated_image_token_is_a_token_of_text(check_drained: Check) -> None:
    """It has no pixels: its answer goes on, and a prompt with it needs another image."""
    cat = picture(1)
    asked = tokens(text(7, 1), cat, text(5, 2))
    generator = generator_of()
    request = generator.submit(**asked, max_new_tokens=6, ignore_eos=True, return_logits=True)
    generator.step()
    (job,) = generator._scheduler.running
    assert job.lease is not None
    job.lease.append([IMAGE])
    (event,) = generator.step()
    assert event.logits is not None
    assert event.logits.isfinite().all()
    prompt = [int(token) for token in job.seq[:]]
    assert prompt[-2] == IMAGE
    generator.cancel(request)
    with pytest.raises(ValueError, match="2 runs of image tokens"):
        generator.submit(prompt, images=[cat])
    check_drained(generator)


def test_nothing_refers_to_the_images_of_a_request_that_ended() -> None:
    """Not a request that its caller keeps, nor the generator."""
    generator = generator_of()
    asked = tokens(text(7, 1), picture(1), text(5, 2))
    requests = [generator.submit(**asked, max_new_tokens=3, ignore_eos=True) for _ in range(2)]
    generator.step()
    placed = [weakref.ref(job.images) for job in generator._scheduler.running]
    assert len(placed) == 2
    generator.cancel(requests[0])
    while generator.num_running:
        generator.step()
    gc.collect()
    assert [one() for one in placed] == [None, None]


# --- messages -------------------------------------------------------------------------------------

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + PAD + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}<assistant>"
)


def vision_tokenizer() -> Any:
    made = byte_tokenizer(TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": [f"<{n}>" for n in range(31)] + [PAD]})
    assert made.convert_tokens_to_ids(PAD) == IMAGE
    return made


def test_messages_and_text_have_one_token_per_image() -> None:
    tokenizer = vision_tokenizer()
    generator = Generator(vision_model("qwen2_vl"), tokenizer, num_blocks=128, block_size=4)
    cat, dog = picture(1, 2, 2), picture(2, 2, 3)
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}]
    ids = generator.encode(messages, images=[cat, dog])
    assert [token for token in ids if token == IMAGE] == [IMAGE] * 10
    done = generator.generate(messages, images=[cat, dog], **GREEDY)
    assert_as_uncached("qwen2_vl", done, list(ids), [cat, dog])
    written = f"<user>{PAD}and{PAD}<eos><assistant>"
    assert generator.encode(written, images=[cat, dog]) == list(ids)
    again = generator.generate(written, images=[cat, dog], **GREEDY)
    assert again.usage.computed == 1
    with pytest.raises(ValueError, match=r"the prompt has 2 places for images, images= has 1 imag"):
        generator.generate(messages, images=[cat])
    with pytest.raises(ValueError, match=r"the prompt has 2 places for images, images= has 0 imag"):
        generator.generate(written)


def test_what_a_processor_returns_is_split_into_images() -> None:
    """Pictures of two sizes, through the image processor of transformers."""
    picture_of: Any = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    module: Any = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    draw = np.random.default_rng(0)
    pictures = [
        picture_of.fromarray(draw.integers(0, 255, size, dtype=np.uint8))
        for size in ((56, 84, 3), (84, 56, 3))
    ]
    processor = module.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64)
    made = processor(images=pictures, return_tensors="pt")
    images = Image.split(made["pixel_values"], made["image_grid_thw"])
    assert [image.grid for image in images] == [(1, 4, 6), (1, 6, 4)]
    asked = tokens(text(4, 1), images[0], text(3, 2), images[1], text(4, 3))
    done = generator_of().generate(**asked, **GREEDY)
    assert_as_uncached("qwen2_vl", done, asked["prompt"], images)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected", "said"),
    [
        (
            {"prompt": [5, IMAGE, IMAGE, 6]},
            ValueError,
            r"the prompt has 1 runs of image tokens \(290\), images= has 0 images",
        ),
        ({"prompt": [5, 6], "images": [picture(1)]}, ValueError, "0 runs .* has 1 images"),
        (
            {"prompt": [5, IMAGE, 6], "images": [picture(1)]},
            ValueError,
            r"images\[0\] of grid \(1, 8, 12\) has 24 tokens, the prompt has 1 at 1",
        ),
        (
            {"prompt": [5] + [IMAGE] * 48, "images": [picture(1), picture(2)]},
            ValueError,
            "1 runs of image tokens .* has 2 images",
        ),
        ({"prompt": [5, VIDEO, 6]}, ValueError, r"tokens of a video \(291\): not supported"),
        (
            {"prompt": [5, IMAGE], "images": [torch.zeros(4, PATCH)]},
            TypeError,
            r"images\[0\] must be an Image, not Tensor",
        ),
        (
            {"prompt": [5, IMAGE], "images": [Image(torch.zeros(3, PATCH), (1, 1, 3))]},
            ValueError,
            r"images\[0\] has a grid of \(1, 1, 3\); .* multiples of 2",
        ),
        (
            {"prompt": [5, IMAGE], "images": [Image(torch.zeros(8, PATCH), (2, 2, 2))]},
            ValueError,
            "its time must be 1",
        ),
        (
            {"prompt": [5, IMAGE], "images": [Image(torch.zeros(4, 588), (1, 2, 2))]},
            ValueError,
            r"images\[0\] has 588 channels, the patches of this model have 1176",
        ),
    ],
)
def test_other_images_than_tokens_are_refused(
    asked: dict[str, Any], expected: type[Exception], said: str, check_drained: Check
) -> None:
    generator = generator_of()
    with pytest.raises(expected, match=said):
        generator.submit(**asked)
    assert generator.num_waiting == 0
    assert generator.index.stats().indexed == 0
    check_drained(generator)


@pytest.mark.parametrize(
    ("pixels", "grid", "expected", "said"),
    [
        (torch.zeros(4, 8), (1, 2), ValueError, r"grid is \(1, 2\); it must be three numbers"),
        (torch.zeros(4, 8), (1, 0, 4), ValueError, r"grid is \(1, 0, 4\)"),
        (torch.zeros(4, 8), (1, 2, 3), ValueError, r"shape \(4, 8\); .* needs \(6, channels\)"),
        (torch.zeros(4), (1, 2, 2), ValueError, r"shape \(4,\)"),
        (torch.zeros(4, 8).int(), (1, 2, 2), TypeError, "not torch.int32"),
        ([[0.0]], (1, 1, 1), TypeError, "not <class 'list'>"),
        (torch.tensor([[0.0, float("nan")]]), (1, 1, 1), ValueError, r"values\[0, 1\] is nan"),
        (torch.tensor([[-float("inf")]]), (1, 1, 1), ValueError, r"values\[0, 0\] is -inf"),
    ],
)
def test_what_is_no_image_is_refused(
    pixels: Any, grid: Any, expected: type[Exception], said: str
) -> None:
    with pytest.raises(expected, match=said):
        Image(pixels, grid)


def test_grids_of_other_patches_are_not_split() -> None:
    with pytest.raises(ValueError, match=r"grids of 6 patches, and 4 are given"):
        Image.split(torch.zeros(4, 8), torch.tensor([[1, 2, 3]]))


def test_a_model_of_text_takes_no_images(make: Callable[..., Generator]) -> None:
    with pytest.raises(ValueError, match="images= has 1 images, and the model is of text alone"):
        make().generate([5, 6], images=[picture(1)])


def test_other_vision_models_are_refused_by_name() -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(model_type="qwen3_vl"), training=False, dtype=torch.float32
    )
    with pytest.raises(LayoutError, match="a qwen3_vl model does with images is not known"):
        Generator(model, num_blocks=4)


def test_records_of_a_vision_model_are_refused() -> None:
    with pytest.raises(LayoutError, match="a layer of a vision model is not probed"):
        generator_of(records="model")


def test_the_namespace_has_the_rope_of_the_text_model() -> None:
    assert "mrope_section" in str(generator_of().namespace().rope)


def test_a_directory_with_a_vision_model_is_loaded(tmp_path: Any) -> None:
    vision_model("qwen2_vl").save_pretrained(tmp_path)
    vision_tokenizer().save_pretrained(tmp_path)
    generator = Generator.from_pretrained(tmp_path, num_blocks=64, block_size=4)
    asked = tokens(text(4, 1), picture(1), text(3, 2))
    done = generator.generate(**asked, **GREEDY)
    assert_as_uncached("qwen2_vl", done, asked["prompt"], asked["images"])
