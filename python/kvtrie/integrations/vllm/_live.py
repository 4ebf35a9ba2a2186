"""The requests that vLLM has, and the plans that they hold until all copies are issued."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvtrie.integrations._asked import named
from kvtrie.integrations.vllm._items import items_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kvtrie._core import Item
    from kvtrie.integrations.vllm._held import Held
    from kvtrie.integrations.vllm._requests import LiveRequest, Pending
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")

# Failed admissions with pinned sources, after which a request gets no copies.
_MAX_REFUSALS: Final = 2


class LiveRequests:
    """Requests from arrival to end, by id.

    Args:
        pool: vLLM's pool.
        block_size: Tokens of a block.
        counts: Where requests are counted.
        held: What releases the sources of plans.
        with_images: Whether requests with images are followed.

    Attributes:
        known: All of vLLM's, also those without kvtrie: they may read what it copied.
        live: The connector's state of those that it follows.
        pending: Those with a plan in the current step, so that a decode step skips the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        counts: Counts,
        held: Held,
        *,
        with_images: bool = False,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._counts = counts
        self._held = held
        self._with_images = with_images
        self.known: dict[str, Request] = {}
        self.live: dict[str, LiveRequest] = {}
        self.pending: dict[str, Request] = {}

    def take(self, request: Request) -> Sequence[Item] | None:
        """Know a request; its images, or None if it cannot be followed."""
        self.known[request.request_id] = request
        items: Sequence[Item] | None = ()
        if request.mm_features:
            items = items_of(request) if self._with_images else None
        # vLLM truncates and extends a resumable request's tokens without notice.
        if (
            items is None
            or request.prompt_token_ids is None
            or request.prompt_is_token_ids
            or request.resumable
        ):
            self._counts.add("requests_unsupported")
            _LOG.debug("kvtrie: request %s: not only token ids", named(request.request_id))
            return None
        return items

    def looked_up(self, request: Request, num_local: int) -> LiveRequest | None:
        """The request, with vLLM's own hit noted; None if nothing may be copied for it."""
        live = self.live.get(request.request_id)
        if live is None:
            return None
        live.begins_with(num_local)
        if request.skip_reading_prefix_cache:
            return None
        if live.pending is not None:
            self.drop(request.request_id, live)
        if live.num_refused >= _MAX_REFUSALS:
            return None
        live.follow(request)
        return live

    def promise(self, request: Request, live: LiveRequest, pending: Pending) -> None:
        """Keep a plan, whose sources the pool may not hand out before `drop`."""
        self._pool.touch(pending.pinned)
        live.pending = pending
        self.pending[request.request_id] = request

    def admitted(self, request_id: str) -> LiveRequest | None:
        """The request that vLLM has allocated blocks for."""
        live = self.live.get(request_id)
        if live is not None and live.num_refused >= _MAX_REFUSALS and not live.is_without_room:
            # vLLM may ask any number of times before, and again after a preemption.
            live.is_without_room = True
            self._counts.add("requests_without_room")
        return live

    def refused(self, request: Request, live: LiveRequest, *, is_idle: bool) -> None:
        """Release the sources of a request that vLLM has not admitted, and count if they are why.

        The plan is released too, unless it is kept as the request's latest.

        ``is_idle``: the step computes nothing. Then nothing makes room either, and the same free
        blocks a second time mean that the request waits for its own sources. Where others run, they
        make room when they end.
        """
        before = self._pool.get_num_free_blocks()
        pending = self._unpin(request.request_id, live)
        if pending is not None and live.latest is None:
            pending.plan.release()
        after = self._pool.get_num_free_blocks()
        needed = -(-request.num_tokens // self._block_size)
        if before < needed <= after or (is_idle and before == live.last_free):
            live.num_refused += 1
        live.last_free = before

    def drop(self, request_id: str, live: LiveRequest) -> None:
        """Give up a request's plan, and the references to its sources."""
        pending = self._unpin(request_id, live)
        latest, live.latest = live.latest, None
        if pending is not None:
            pending.plan.release()
        elif latest is not None and latest.plan is not None:
            latest.plan.release()

    def _unpin(self, request_id: str, live: LiveRequest) -> Pending | None:
        pending, live.pending = live.pending, None
        self.pending.pop(request_id, None)
        if pending is not None:
            self._held.release(pending.pinned, are_read=pending.is_read)
        return pending

    def preempted(self, request_id: str) -> None:
        """Release the sources: vLLM may need these blocks."""
        live = self.live.get(request_id)
        if live is not None:
            self.drop(request_id, live)

    def unfollow(self, request_id: str) -> LiveRequest | None:
        """Let vLLM go on with a request alone; returns its state so far."""
        live = self.live.pop(request_id, None)
        if live is not None:
            self.drop(request_id, live)
        return live
