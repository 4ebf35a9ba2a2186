"""llm-d's `GetPodScores` over gRPC, answered by a `KvIndexer`.

Names and numbers of the fields are those of ``api/indexerpb/indexer.proto`` in llm-d/llm-d-kv-cache
(package `indexer.v1`); older files of llm-d lack `data_parallel_rank`. A client made of either file
can ask.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from kvtrie._core import KvIndexer
from kvtrie.fleet.prompts import PromptError, ServedModel
from kvtrie.router.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as missing:
    _msg = "kvtrie.fleet.llmd needs grpcio and protobuf: pip install 'kvtrie[llmd]'"
    raise ImportError(_msg, name=missing.name) from missing

SERVICE: Final = "indexer.v1.IndexerService"
METHOD: Final = "GetPodScores"


def _messages() -> tuple[Any, Any]:
    """The classes of a request and a response, in a pool of their own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="kvtrie/indexer.proto", package="indexer.v1", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, int], **of: str) -> Any:  # noqa: ANN401 - of protobuf, which ships no types
        made = file.message_type.add(name=name)
        for each, number, kind, label in fields:
            made.field.add(name=each, number=number, type=kind, label=label, **of)
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message(
        "GetPodScoresRequest",
        ("prompt", 1, field.TYPE_STRING, one),
        ("model_name", 2, field.TYPE_STRING, one),
        ("pod_identifiers", 3, field.TYPE_STRING, many),
    )
    message(
        "GetPodScoresResponse",
        ("scores", 1, field.TYPE_MESSAGE, many),
        type_name=".indexer.v1.PodScore",
    )
    score = message(
        "PodScore",
        ("pod", 1, field.TYPE_STRING, one),
        ("score", 2, field.TYPE_DOUBLE, one),
        ("data_parallel_rank", 3, field.TYPE_INT32, one),
    )
    # What `optional` of proto3 is in a descriptor.
    score.oneof_decl.add(name="_data_parallel_rank")
    score.field[2].oneof_index = 0
    score.field[2].proto3_optional = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"indexer.v1.{name}"))
        for name in ("GetPodScoresRequest", "GetPodScoresResponse")
    )
    return request, response


REQUEST, RESPONSE = _messages()


@dataclass(frozen=True)
class Pod:
    """A worker's name in llm-d.

    Attributes:
        pod: The pod's identifier.
        rank: Its data-parallel rank, or None.
    """

    pod: str
    rank: int | None = None


class PodScorer:
    """A gRPC server that answers `GetPodScores`. As a context manager it stops with the block.

    A score is the number of blocks from position 0 that the pod holds, in any tier. Pods without
    any are left out, and so are pods of which events may be missing: what they held is old. Moved
    runs do not count. Errors have gRPC's codes: NOT_FOUND for an unknown model, INVALID_ARGUMENT
    for a prompt that cannot be tokenized, RESOURCE_EXHAUSTED beyond a limit.

    Args:
        index: The index.
        models: By the model's name in requests.
        pods: The pod of each worker, by the worker's name; None: they are called the same.
        max_bytes: Largest request.
        max_requests: Most requests at a time.
        threads: Threads that tokenize.

    Attributes:
        port: The port, after `start`.

    Raises:
        TypeError: `index` is not a `KvIndexer`, or a number not an int.
        ValueError: A number is outside its limits.
    """

    def __init__(
        self,
        index: KvIndexer,
        models: Mapping[str, ServedModel],
        *,
        pods: Mapping[str, Pod] | None = None,
        max_bytes: int = 4 << 20,
        max_requests: int = 64,
        threads: int = 4,
    ) -> None:
        call = "PodScorer"
        if not issubclass(type(index), KvIndexer):
            msg = f"{call}: index is {index!r}, not a KvIndexer"
            raise TypeError(msg)
        for name, value, most in (
            ("max_bytes", max_bytes, 1 << 30),
            ("max_requests", max_requests, 1 << 20),
            ("threads", threads, 64),
        ):
            whole(call, name, value, 1, most)
        self.port = 0
        self._index = index
        self._models = dict(models)
        self._pods = None if pods is None else dict(pods)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "kvtrie-llmd"),
            options=[("grpc.max_receive_message_length", max_bytes), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=max_requests,
        )
        handler = grpc.unary_unary_rpc_method_handler(
            self._scores, REQUEST.FromString, RESPONSE.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )

    def start(self, address: str = "127.0.0.1:0") -> int:
        """Listen, without TLS.

        Args:
            address: Host and port; port 0: any free one.

        Returns:
            The port.

        Raises:
            RuntimeError: The address is taken.
        """
        self.port = self._server.add_insecure_port(address)
        self._server.start()
        return self.port

    def close(self, grace: float = 1.0) -> None:
        """Stop.

        Args:
            grace: Seconds for requests that are being answered.
        """
        self._server.stop(grace).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _scores(self, request: Any, context: Any) -> Any:  # noqa: ANN401 - of gRPC
        model = self._models.get(request.model_name)
        if model is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {request.model_name[:80]!r}")
        else:
            try:
                prompt = model.text(request.prompt)
            except PromptError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            else:
                return self._answer(self._index.find_matches(prompt), request.pod_identifiers)
        return RESPONSE()

    def _answer(self, found: Any, asked: Any) -> Any:  # noqa: ANN401 - of gRPC
        wanted = frozenset(asked)
        response = RESPONSE()
        size = self._index.block_size
        for name, exact, uncertain in zip(
            found.workers, found.exact.tolist(), found.uncertain.tolist(), strict=True
        ):
            pod = Pod(name) if self._pods is None else self._pods.get(name)
            if pod is None or uncertain or not exact or (wanted and pod.pod not in wanted):
                continue
            score = response.scores.add(pod=pod.pod, score=exact // size)
            if pod.rank is not None:
                score.data_parallel_rank = pod.rank
        return response
