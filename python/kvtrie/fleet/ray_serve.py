"""A request router for Ray Serve that sends a prompt to the replica that has most of it.

Give it as `request_router_class` of a deployment whose replicas run an engine each. A replica says
in `record_routing_stats` where its engine publishes events: `{"kvtrie": {"events": "tcp://...",
"replay": "tcp://..."}}`. The router subscribes to each, and forgets a replica that is gone.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final

from ray.serve.request_router import RequestRouter

from kvtrie._core import SHARED, KvIndexer, Namespace, TokenSequence
from kvtrie.cluster import Subscription, subscribe
from kvtrie.fleet.dispatcher import Dispatcher, Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

_STATS: Final = "kvtrie"
# Requests that were chosen for and of which nothing more was heard: beyond, the oldest ends.
_MOST_OPEN: Final = 65_536
_log = logging.getLogger(__name__)


class KvRequestRouter(RequestRouter):  # type: ignore[misc] # Ray is not in the environment of mypy
    """Chooses the replica by a `KvIndexer`'s scores and by what was sent.

    `request_router_kwargs` are the arguments of `initialize_state`. A request whose tokens are not
    known, and one that no replica with events can be chosen for, goes to any replica, as Ray Serve
    ranks them. Requests are counted by the router of each handle on its own.
    """

    def initialize_state(
        self,
        *,
        model: str,
        block_size: int,
        key: str,
        tokens: str,
        shared: bool = False,
        salt: str | None = None,
        load_weight: float = 1.0,
    ) -> None:
        """Take the settings of the deployment.

        Args:
            model: The model, of the workers' namespace.
            block_size: The engines'.
            key: 16 to 64 secret characters.
            tokens: `"module:function"`, called with the request's positional and named arguments;
                returns its token ids, or None if they are not known.
            shared: Whether requests share KV.
            salt: If they do not: the salt of all of them.
            load_weight: As for `Dispatcher`.

        Raises:
            ValueError: A setting is outside its limits, or neither `shared` nor `salt` is given.
        """
        if shared == (salt is not None):
            msg = f"KvRequestRouter: shared is {shared} and salt is {salt!r}; give one of both"
            raise ValueError(msg)
        module, _, name = tokens.partition(":")
        self._tokens: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._space = Namespace(model=model, salt=SHARED if salt is None else salt)
        self._index = KvIndexer(block_size, key.encode())
        self._dispatcher = Dispatcher(self._index, load_weight=load_weight)
        self._subscribed: dict[str, tuple[int, Any, Subscription]] = {}
        self._open: dict[str, tuple[Sent, TokenSequence | None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Subscribe to new replicas, and forget those that are gone."""
        super().update_replicas(replicas)
        found = {}
        for replica in replicas:
            said = (replica.routing_stats or {}).get(_STATS)
            if isinstance(said, dict) and isinstance(said.get("events"), str):
                found[replica.replica_id.unique_id] = said
        for name, (number, said, subscription) in list(self._subscribed.items()):
            if found.get(name) != said:
                del self._subscribed[name]
                subscription.close()
                self._index.remove_worker(number)
        for name, said in found.items():
            if name in self._subscribed:
                continue
            # What a replica says must not keep Ray Serve from hearing of the others.
            try:
                number = self._index.add_worker(name, self._space)
            except ValueError as error:
                _log.warning("replica %s: %s", name, error)
                continue
            try:
                subscription = subscribe(
                    self._index,
                    number,
                    said["events"],
                    said.get("replay"),
                    snapshot=said.get("snapshot"),
                )
            except (TypeError, ValueError) as error:
                self._index.remove_worker(number)
                _log.warning("replica %s: %s", name, error)
            else:
                self._subscribed[name] = (number, said, subscription)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica with the least to compute, then all others."""
        prompt = None if pending_request is None else self._prompt(pending_request)
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        among = by_name.keys() & self._subscribed.keys()
        if pending_request is None or prompt is None or not among:
            return [candidate_replicas]
        request = pending_request.metadata.internal_request_id
        if request not in self._open:
            # Of a request that is cancelled before it is sent Ray Serve says nothing else.
            pending_request.future.add_done_callback(
                lambda future: self._end(request) if future.cancelled() else None
            )
        sent = self._send(request, prompt, among)
        best = by_name[sent.worker]
        return [[best], [one for one in candidate_replicas if one is not best]]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ANN401 - Ray's
    ) -> None:
        """Count the request where it was sent."""
        request = pending_request.metadata.internal_request_id
        noted = self._open.get(request)
        if noted is not None and noted[0].worker != replica_id.unique_id:
            if noted[1] is not None and replica_id.unique_id in self._subscribed:
                self._send(request, noted[1], [replica_id.unique_id])
            else:
                self._end(request)
        if request in self._open:
            # The prompt is not asked for again.
            self._open[request] = (self._open[request][0], None)
        super().on_request_routed(pending_request, replica_id, result)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended."""
        self._end(internal_request_id)
        super().on_request_completed(replica_id, internal_request_id)

    def _send(self, request: str, prompt: TokenSequence, among: Iterable[str]) -> Sent:
        """Count a request, in place of what was chosen for it before."""
        self._end(request)
        if len(self._open) >= _MOST_OPEN:
            self._end(next(iter(self._open)))
        sent = self._dispatcher.choose(prompt, among)
        self._open[request] = (sent, prompt)
        return sent

    def _end(self, request: str) -> None:
        noted = self._open.pop(request, None)
        if noted is not None:
            noted[0].end()

    def _prompt(self, request: PendingRequest) -> TokenSequence | None:
        try:
            ids = self._tokens(*request.args, **request.kwargs)
            return None if ids is None else TokenSequence(ids, self._space)
        except Exception as error:  # noqa: BLE001 - of the user's function; any replica can serve it
            _log.warning("the tokens of a request are not known: %r", error)
            return None
