"""The images of a request, by which the index tells equal placeholders apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvtrie._core import Item

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

_PERSON: Final = b"kvtrie.vllm.img1"
# Images of a request that is followed: a plan compares each with those of cached prompts.
_MOST_IMAGES: Final = 256


def items_of(request: Request) -> list[Item] | None:
    """The images of a request in the order of its prompt.

    None if it has other inputs as well, or more than 256 images.

    vLLM identifies an image by a hash of its pixels and of how they are processed, or by the id
    that the client gives it (`multi_modal_uuids`), and so do its own caches. That identifier, and
    which of the placeholders take features of the image, are the digest of an item.
    """
    items: list[Item] = []
    if len(request.mm_features) > _MOST_IMAGES:
        return None
    end = 0
    for feature in request.mm_features:
        place = feature.mm_position
        start, stop = place.offset, place.offset + place.length
        # Of inputs that overlap, such as a video and its sound, no token is of one item.
        if feature.modality != "image" or not end <= start < stop <= request.num_prompt_tokens:
            return None
        items.append(Item(start, stop, _digest(feature)))
        end = stop
    return items


def _digest(feature: MultiModalFeatureSpec) -> bytes:
    place = feature.mm_position
    total = hashlib.blake2b(digest_size=32, person=_PERSON)
    name = feature.identifier.encode("utf-8", "surrogatepass")
    # A client may choose any identifier, so its length is before it.
    total.update(f"{place.length} {len(name)} ".encode() + name)
    # All placeholders take features where no mask says which.
    if place.is_embed is not None and not bool(place.is_embed.all()):
        total.update(place.is_embed.numpy().tobytes())
    return total.digest()
