"""`GetPodScores` asked by a client of gRPC over 127.0.0.1, and in bytes as the wire has them."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.byte_tokenizer import byte_tokenizer
from tests.cluster.publisher import packed, stored

import kvtrie
from kvtrie.fleet import ServedModel
from kvtrie.fleet.llmd import METHOD, REQUEST, RESPONSE, SERVICE, Pod, PodScorer

if TYPE_CHECKING:
    from collections.abc import Iterator

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
TEXT = "hello there"  # 11 tokens


class Asked:
    def __init__(self, **options: Any) -> None:
        self.index = kvtrie.KvIndexer(2, b"the key of tests")
        for name in ("a", "b", "c"):
            self.index.add_worker(name, NS)
        self.model = ServedModel(NS, byte_tokenizer())
        tokens = self.model.text(TEXT)[:].tolist()
        self.index.apply(0, packed(stored(range(5), None, tokens[:10])))
        self.index.apply(1, packed(stored(range(2), None, tokens[:4])))
        self.server = PodScorer(self.index, {"tiny": self.model}, **options)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.start()}")

    def __enter__(self) -> Asked:  # noqa: PYI034 - it is final
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.server.close(0)

    def scores(self, prompt: str = TEXT, model: str = "tiny", pods: tuple[str, ...] = ()) -> Any:
        call = self.channel.unary_unary(
            f"/{SERVICE}/{METHOD}", REQUEST.SerializeToString, RESPONSE.FromString
        )
        asked = REQUEST(prompt=prompt, model_name=model, pod_identifiers=pods)
        return {one.pod: one.score for one in call(asked, timeout=20).scores}

    def raw(self, request: bytes) -> bytes:
        answer: bytes = self.channel.unary_unary(f"/{SERVICE}/{METHOD}")(request, timeout=20)
        return answer


@pytest.fixture
def asked() -> Iterator[Asked]:
    with Asked() as found:
        yield found


def test_scores_are_blocks_of_the_pods_that_have_some(asked: Asked) -> None:
    assert asked.scores() == {"a": 5.0, "b": 2.0}
    assert asked.scores(TEXT[:6]) == {"a": 3.0, "b": 2.0}
    assert asked.scores(pods=("b", "c", "d")) == {"b": 2.0}
    assert asked.scores("another") == {}


def test_an_uncertain_worker_has_no_score(asked: Asked) -> None:
    asked.index.set_uncertain(0, True)
    assert asked.scores() == {"b": 2.0}


def test_the_bytes_are_those_of_llm_ds_file(asked: Asked) -> None:
    # Fields 1 (prompt), 2 (model_name) and 3 (pod_identifiers), each of wire type 2.
    request = b"\x0a\x0bhello there" + b"\x12\x04tiny" + b"\x1a\x01b"
    # Field 1 (scores): field 1 (pod), field 2 (score), a double.
    score = b"\x0a\x01b" + b"\x11" + struct.pack("<d", 2.0)
    assert asked.raw(request) == b"\x0a" + bytes([len(score)]) + score
    # Fields that an older server does not know change nothing.
    assert asked.raw(request + b"\x22\x01x") == b"\x0a" + bytes([len(score)]) + score


def test_a_rank_is_the_third_field() -> None:
    with Asked(pods={"a": Pod("pod-1", 0), "b": Pod("pod-1", 1)}) as asked:
        raw = asked.raw(b"\x0a\x0bhello there\x12\x04tiny")
        found = RESPONSE.FromString(raw)
        assert [(one.pod, one.data_parallel_rank) for one in found.scores] == [
            ("pod-1", 0),
            ("pod-1", 1),
        ]
        # Rank 0 is there, and not only a default.
        assert b"\x18\x00" in raw
        assert found.scores[0].HasField("data_parallel_rank")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"prompt": "x" * 2000}, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_errors_have_codes(arguments: dict[str, Any], code: object) -> None:
    with Asked(max_bytes=1000) as asked:
        with pytest.raises(grpc.RpcError) as caught:
            asked.scores(**arguments)
        assert caught.value.code() == code
        assert asked.scores() == {"a": 5.0, "b": 2.0}


def test_a_tokenizer_that_fails_is_an_argument_that_is_wrong(asked: Asked) -> None:
    class Fails(ServedModel):
        def text(self, prompt: str) -> kvtrie.TokenSequence:
            object.__setattr__(self, "tokenizer", None)
            return super().text(prompt)

    asked.server._models["fails"] = Fails(NS, byte_tokenizer())
    with pytest.raises(grpc.RpcError) as caught:
        asked.scores(model="fails")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "tokenizing failed: AttributeError"


def test_more_requests_than_are_allowed_are_refused() -> None:
    with Asked(max_requests=1, threads=1) as asked:
        went, go = threading.Event(), threading.Event()

        class Waits(ServedModel):
            def text(self, prompt: str) -> kvtrie.TokenSequence:
                went.set()
                go.wait(20)
                return super().text(prompt)

        asked.server._models["waits"] = Waits(NS, byte_tokenizer())
        thread = threading.Thread(target=asked.scores, kwargs={"model": "waits"})
        thread.start()
        assert went.wait(20)
        with pytest.raises(grpc.RpcError) as caught:
            asked.scores()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        go.set()
        thread.join()


def test_bad_arguments_are_named() -> None:
    index = kvtrie.KvIndexer(2, b"the key of tests")
    with pytest.raises(TypeError, match="not a KvIndexer"):
        PodScorer(None, {})  # type: ignore[arg-type]
    half: Any = 1.5
    zeros: list[dict[str, Any]] = [{"max_bytes": 0}, {"max_requests": 0}, {"threads": 0}]
    for options in zeros:
        with pytest.raises(ValueError, match=f"{next(iter(options))} is 0"):
            PodScorer(index, {}, **options)
        with pytest.raises(TypeError, match=f"PodScorer: {next(iter(options))} "):
            PodScorer(index, {}, **dict.fromkeys(options, half))
