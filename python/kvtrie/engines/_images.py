"""Images in prompts: what they are, where they are, and what a vision model makes of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtrie._core import Item, LayoutError
from kvtrie.models.vision import TEXT_OF_VISION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

_PERSON: Final = b"kvtrie.image.1"
# Their language models take features as embeddings of the first layer, and nothing in later ones.
_KNOWN: Final = ("qwen2_5_vl", "qwen2_vl")


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image as an image processor of transformers returns it.

    Two images are the same for reuse if all their values and their grid are. The values must not
    change afterwards.

    Args:
        pixel_values: Patches, finite, floating point ``[time * height * width, channels]``; the
            rows that ``pixel_values`` of a processor has for this image.
        grid: Patches per axis: time, height, width; its row of ``image_grid_thw``.

    Attributes:
        digest: BLAKE2b of values and grid, 32 bytes: what the index compares images by.

    Raises:
        TypeError: ``pixel_values`` is not a tensor of floating point numbers.
        ValueError: A size of the grid is below 1, the patches are of another number or shape, or
            a value is NaN or infinite.

    Example:
        >>> import torch
        >>> from kvtrie.engines.transformers import Image
        >>> image = Image(torch.zeros(16, 1176), (1, 4, 4))
        >>> image.digest == Image(torch.zeros(16, 1176), (1, 2, 8)).digest
        False
    """

    pixel_values: torch.Tensor
    grid: tuple[int, int, int]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        grid = tuple(int(size) for size in self.grid)
        if len(grid) != 3 or min(grid) < 1:
            msg = f"Image: grid is {grid}; it must be three numbers of patches, each at least 1"
            raise ValueError(msg)
        pixels: object = self.pixel_values
        if not isinstance(pixels, torch.Tensor) or not pixels.is_floating_point():
            what = pixels.dtype if isinstance(pixels, torch.Tensor) else type(pixels)
            msg = f"Image: pixel_values must be a tensor of floating point numbers, not {what}"
            raise TypeError(msg)
        if pixels.ndim != 2 or len(pixels) != prod(grid):
            msg = (
                f"Image: pixel_values have shape {tuple(pixels.shape)}; the grid {grid} needs "
                f"({prod(grid)}, channels)"
            )
            raise ValueError(msg)
        is_finite = pixels.isfinite()
        if not bool(is_finite.all()):
            row, channel = (~is_finite).nonzero()[0].tolist()
            msg = f"Image: pixel_values[{row}, {channel}] is {float(pixels[row, channel])}"
            raise ValueError(msg)
        object.__setattr__(self, "grid", grid)
        total = hashlib.blake2b(digest_size=32, person=_PERSON)
        total.update(f"{grid} {tuple(pixels.shape)} {pixels.dtype}".encode())
        total.update(pixels.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", total.digest())

    @classmethod
    def split(cls, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[Image]:
        """The images of one prompt, which a processor returns in one tensor.

        Args:
            pixel_values: Patches of all images, ``[patches, channels]``.
            image_grid_thw: Their grids, ``[images, 3]``.

        Raises:
            TypeError: As for the class.
            ValueError: As for the class, or the grids are of more or fewer patches.
        """
        grids = [tuple(grid) for grid in torch.as_tensor(image_grid_thw).tolist()]
        sizes = [prod(grid) for grid in grids]
        if sum(sizes) != len(pixel_values):
            msg = f"Image.split: grids of {sum(sizes)} patches, and {len(pixel_values)} are given"
            raise ValueError(msg)
        parts = torch.split(pixel_values, sizes)
        return [cls(part, grid) for part, grid in zip(parts, grids, strict=True)]


class Vision:
    """The part of a vision model that is not its language model."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        if config.model_type not in _KNOWN:
            msg = (
                f"Generator: what a {config.model_type} model does with images is not known (this "
                f"version: {', '.join(_KNOWN)}); give its text model"
            )
            raise LayoutError(msg)
        self._model: Any = model
        self._image_id = int(config.image_token_id)
        self._video_id = int(config.video_token_id)
        vision = config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def num_tokens(self, image: Image) -> int:
        """Tokens of an image."""
        return prod(image.grid) // self._merge**2

    def check(self, images: Sequence[Image]) -> None:
        """Refuse what is no image of this model."""
        for number, image in enumerate(images):
            given: object = image
            if not isinstance(given, Image):
                msg = f"Generator: images[{number}] must be an Image, not {type(given).__name__}"
                raise TypeError(msg)
            time, *sides = image.grid
            if time != 1 or any(size % self._merge for size in sides):
                msg = (
                    f"Generator: images[{number}] has a grid of {image.grid}; its time must be 1, "
                    f"and its sides multiples of {self._merge}, the patches of a token"
                )
                raise ValueError(msg)
            channels = image.pixel_values.shape[1]
            if channels != self._channels:
                msg = (
                    f"Generator: images[{number}] has {channels} channels, the patches of this "
                    f"model have {self._channels}"
                )
                raise ValueError(msg)

    def expanded(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Ids of a chat template, which has one token per image, with those of whole images."""
        self.check(images)
        at = [number for number, token in enumerate(ids) if token == self._image_id]
        if len(at) != len(images):
            msg = (
                f"Generator: the prompt has {len(at)} places for images, images= has "
                f"{len(images)} images"
            )
            raise ValueError(msg)
        counts = dict(zip(at, map(self.num_tokens, images), strict=True))
        return [token for number, token in enumerate(ids) for _ in range(counts.get(number, 1))]

    def place(self, ids: NDArray[np.int64], images: Sequence[Image]) -> PlacedImages | None:
        """Find the tokens of images in a prompt, and the positions of all tokens.

        Raises:
            TypeError: As for ``check``.
            ValueError: As for ``check``, or the tokens are not those of the images.
        """
        self.check(images)
        if (ids == self._video_id).any():
            msg = f"Generator: the prompt has tokens of a video ({self._video_id}): not supported"
            raise ValueError(msg)
        ends = np.flatnonzero(np.diff(np.pad(ids == self._image_id, 1).astype(np.int8)))
        spans = [(int(start), int(end)) for start, end in ends.reshape(-1, 2)]
        if len(spans) != len(images):
            msg = (
                f"Generator: the prompt has {len(spans)} runs of image tokens ({self._image_id}), "
                f"images= has {len(images)} images"
            )
            raise ValueError(msg)
        for number, (image, (start, end)) in enumerate(zip(images, spans, strict=True)):
            if end - start != self.num_tokens(image):
                msg = (
                    f"Generator: images[{number}] of grid {image.grid} has "
                    f"{self.num_tokens(image)} tokens, the prompt has {end - start} at {start}"
                )
                raise ValueError(msg)
        if not images:
            return None
        tokens = torch.from_numpy(ids)[None]
        # Numbers of modalities, as processors give them: 1 is an image.
        positions, _ = self._model.model.get_rope_index(
            tokens,
            image_grid_thw=torch.tensor([image.grid for image in images]),
            mm_token_type_ids=(tokens == self._image_id).int(),
        )
        return PlacedImages(self, list(images), spans, positions[:, 0])

    def features(self, image: Image) -> torch.Tensor:
        """What the vision model makes of an image, ``[tokens, hidden]``.

        Raises:
            ValueError: It is not finite. A model multiplies what its mask hides by 0, so the KV of
                tokens before the image, which other prompts share, would not be finite either.
        """
        device = self._model.device
        with torch.inference_mode():
            found = self._model.model.get_image_features(
                image.pixel_values.to(device), torch.tensor([image.grid], device=device)
            )
        features: torch.Tensor = found.pooler_output[0]
        if not bool(features.isfinite().all()):
            msg = f"Generator: what the model makes of an image of grid {image.grid} is not finite"
            raise ValueError(msg)
        return features

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings of token ids, ``[tokens, hidden]``."""
        found: torch.Tensor = self._model.get_input_embeddings()(tokens)
        return found


class PlacedImages:
    """The images of one prompt. Features are computed when a pass first needs them, and kept."""

    def __init__(
        self,
        vision: Vision,
        images: list[Image],
        spans: list[tuple[int, int]],
        positions: torch.Tensor,
    ) -> None:
        self._vision = vision
        self._images = images
        self._spans = spans
        self._positions = positions
        self._features: dict[bytes, torch.Tensor] = {}

    @property
    def items(self) -> list[Item]:
        """What the index compares the tokens by."""
        found = []
        for image, (start, end) in zip(self._images, self._spans, strict=True):
            at = self._positions[:, start:end]
            taken = int(at.max()) + 1 - int(at[:, 0].min())
            found.append(Item(start, end, image.digest, positions=taken))
        return found

    def positions(self, at: torch.Tensor) -> torch.Tensor:
        """The positions of tokens ``[n]``, ``[3, 1, n]``; answers go on after the prompt."""
        known = self._positions.shape[1]
        prompt = self._positions.to(at.device)
        later = at - known + prompt.max() + 1
        return torch.where(at < known, prompt[:, at.clamp(max=known - 1)], later)[:, None]

    def embeddings(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens ``[n]`` at ``at``, ``[n, hidden]``, those of images included."""
        found = self._vision.embeddings(tokens)
        for image, (start, end) in zip(self._images, self._spans, strict=True):
            is_inside = (at >= start) & (at < end)
            if bool(is_inside.any()):
                if image.digest not in self._features:
                    self._features[image.digest] = self._vision.features(image)
                rows = self._features[image.digest][at[is_inside] - start]
                found = found.index_put((is_inside,), rows.to(found.device, found.dtype))
        return found


def vision_of(model: PreTrainedModel) -> Vision | None:
    """The vision part of a model; None if it is of text alone.

    Raises:
        LayoutError: What it does with images is not known.
    """
    return Vision(model) if model.config.model_type in TEXT_OF_VISION else None
