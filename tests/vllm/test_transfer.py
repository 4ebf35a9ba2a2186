"""Transfers between two of vLLM's real schedulers: every block that is loaded holds its tokens.

The connector between them does what NIXL's does, and no model runs: a slot's KV is its token.
"""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import kvtrie
from kvtrie.calibrate import shipped
from kvtrie.integrations._asked import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transfer = pytest.importorskip("kvtrie.integrations.vllm.transfer")
_transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")

SIZE = 16
KEY = b"k" * 32


class Bare(KVConnectorBase_V1, SupportsHMA):
    """A transfer connector that trims the sender's blocks by count."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.reads: dict[str, tuple[list[int], list[int]]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        count = request.num_prompt_tokens - num_computed
        return (count, True) if params.get("do_remote_prefill") and count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            local = blocks.get_unhashed_block_ids_all_groups()[0] if num_external else []
            remote = params["remote_block_ids"][0]
            self.reads[request.request_id] = (local, remote[-len(local) :] if local else [])
            params["do_remote_prefill"] = False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        ids = [list(group) for group in block_ids]
        return True, {"do_remote_prefill": True, "remote_block_ids": ids}

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class Checked(transfer.CheckedTransfer, Bare):  # type: ignore[name-defined] # imported so
    """The same, checked."""


@dataclass
class Side:
    """An engine without a model.

    Attributes:
        scheduler: vLLM's.
        kv: Which token each slot is of.
    """

    scheduler: Any
    kv: dict[int, int] = field(default_factory=dict)
    hasher: Any = None

    def run(self, name: str, prompt: list[int], params: dict[str, Any], **more: Any) -> Request:
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **more)
        self.scheduler.add_request(request)
        self.computed: list[int] = []
        for _ in range(20):
            if request.is_finished():
                return request
            self.step(request)
        raise AssertionError(f"{name} does not end")

    def table(self, request: Request) -> list[int]:
        ids: list[int] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return ids

    def step(self, request: Request) -> None:
        output = self.scheduler.schedule()
        count = output.num_scheduled_tokens.get(request.request_id, 0)
        if count:
            table, end = self.table(request), request.num_computed_tokens
            for at in range(end - count, end):
                self.kv[table[at // SIZE] * SIZE + at % SIZE] = request.all_token_ids[at]
                self.computed.append(at)
        came = self.take_reads()
        done = request.num_computed_tokens >= request.num_tokens and count
        result = ModelRunnerOutput(
            req_ids=[request.request_id] if count else [],
            req_id_to_index={request.request_id: 0} if count else {},
            sampled_token_ids=[[7] if done else []] if count else [],
            kv_connector_output=KVConnectorOutput(finished_recving=came) if came else None,
        )
        if done:
            # What the request has is read before vLLM frees its blocks.
            self.seen = [
                self.kv.get(self.slot(request, at)) for at in range(len(self.prompt(request)))
            ]
        self.scheduler.update_from_output(output, result)

    def prompt(self, request: Request) -> list[int]:
        return list(request.prompt_token_ids or [])

    def slot(self, request: Request, at: int) -> int:
        return self.table(request)[at // SIZE] * SIZE + at % SIZE

    sender: Side | None = None
    seen: list[int | None] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    def take_reads(self) -> set[str]:
        reads, self.scheduler.connector.reads = self.scheduler.connector.reads, {}
        came = set()
        for name, (local, remote) in reads.items():
            if not local:
                continue
            came.add(name)
            assert self.sender is not None
            assert len(local) == len(remote)
            for mine, theirs in zip(local, remote, strict=True):
                self.loaded.append(theirs)
                for offset in range(SIZE):
                    # Unwritten slots hold no token.
                    there = self.sender.kv.get(theirs * SIZE + offset, -1)
                    self.kv[mine * SIZE + offset] = there
        return came


NO = object()
"""A setting that is not given."""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Side]:
    (tmp_path / "key").write_bytes(KEY)
    model = str(shipped.model_path("gqa"))
    init_none_hash(sha256)

    def make(
        connector: str = "Checked", *, key: str = "key", folder: str = model, **extra: Any
    ) -> Side:
        settings = {transfer.KEY_FILE: str(tmp_path / key), transfer.MODEL: "m", **extra}
        settings = {name: value for name, value in settings.items() if value is not NO}
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=SIZE,
            max_model_len=1024,
            async_scheduling=False,
        ).create_engine_config()
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_connector_extra_config=settings,
        )
        config.cache_config.num_gpu_blocks = 64
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        caches = KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
        )
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=SIZE,
            log_stats=True,
        )
        return Side(scheduler, hasher=get_request_block_hasher(SIZE, sha256))

    return make


def prefill(side: Side, prompt: list[int], **more: Any) -> dict[str, Any]:
    answers: list[Any] = []
    connector = side.scheduler.connector
    finished = connector.request_finished_all_groups

    def watching(request: Any, block_ids: Any) -> Any:
        answers.append(finished(request, block_ids))
        return answers[-1]

    connector.request_finished_all_groups = watching
    side.run("prefill", prompt, {"do_remote_decode": True}, **more)
    connector.request_finished_all_groups = finished
    params: dict[str, Any] = json.loads(json.dumps(answers[0][1]))
    return params


PROMPT = [1000 + at for at in range(100)]


def receive(side: Side, sender: Side, prompt: list[int], params: dict[str, Any]) -> int:
    """Decode a request, whose KV must be of its tokens; return the number of computed ones."""
    side.sender, side.loaded = sender, []
    side.run("decode", prompt, params)
    assert side.seen == prompt
    return len(side.computed)


def test_a_prompt_is_loaded_whole(start: Callable[..., Side]) -> None:
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    # vLLM computes the last token of a prompt whose KV came from elsewhere, for its logits.
    assert receive(receiver, sender, PROMPT, params) == 1
    assert len(receiver.loaded) == 7
    assert receiver.scheduler.connector.outcomes == {"whole": 1}


def test_what_is_here_already_is_not_loaded(start: Callable[..., Side]) -> None:
    sender, receiver = start(), start()
    receiver.run("before", PROMPT[:40], {})
    params = prefill(sender, PROMPT)
    assert receive(receiver, sender, PROMPT, params) == 1
    assert receiver.loaded == params["remote_block_ids"][0][2:] or len(receiver.loaded) == 5


@pytest.mark.parametrize("change", ["dropped", "changed", "shorter", "longer"])
def test_blocks_of_other_tokens_are_computed(start: Callable[..., Side], change: str) -> None:
    prompts = {
        # Reasoning that the receiver's template has dropped.
        "dropped": PROMPT[:48] + PROMPT[70:],
        "changed": [*PROMPT[:60], 5, *PROMPT[61:]],
        "shorter": PROMPT[:99],
        "longer": [*PROMPT, *range(50)],
    }
    least = {"dropped": 78 - 48, "changed": 52, "shorter": 3, "longer": 54}
    sender, receiver = start(), start()
    computed = receive(receiver, sender, prompts[change], prefill(sender, PROMPT))
    assert computed == least[change]
    assert receiver.scheduler.connector.outcomes == {"part": 1}


def test_the_connector_alone_loads_other_tokens(start: Callable[..., Side]) -> None:
    """Why this is needed: the same pair without the check."""
    sender, receiver = start("Bare"), start("Bare")
    params = prefill(sender, PROMPT)
    receiver.sender = sender
    prompt = PROMPT[:48] + PROMPT[70:]
    receiver.run("decode", prompt, params)
    assert receiver.seen != prompt


def test_one_block_more_is_detected(start: Callable[..., Side]) -> None:
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    # A look-ahead block at the end: trimming by count would take it, and drop one at the front.
    params["remote_block_ids"][0].append(60)
    assert receive(receiver, sender, PROMPT, params) == 1


def forge(params: dict[str, Any], how: str) -> None:
    raw = bytearray(base64.b64decode(params[transfer.MANIFEST]))
    if how == "changed":
        raw[-1] ^= 1
    elif how == "cut":
        del raw[-9:]
    elif how == "text":
        params[transfer.MANIFEST] = "no base64"
        return
    elif how == "none":
        del params[transfer.MANIFEST]
        return
    elif how == "long":
        # Whoever sends the request writes as much as it likes, and it was read in each step.
        raw += bytes(100_000)
    params[transfer.MANIFEST] = base64.b64encode(bytes(raw)).decode()


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("changed", "digest"),
        ("cut", "malformed"),
        ("text", "malformed"),
        ("long", "malformed"),
        ("none", "no manifest"),
    ],
)
def test_what_is_no_manifest_is_computed(
    start: Callable[..., Side], how: str, outcome: str
) -> None:
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    forge(params, how)
    assert receive(receiver, sender, PROMPT, params) == len(PROMPT)
    assert receiver.loaded == []
    assert receiver.scheduler.connector.outcomes == {outcome: 1}


def test_a_manifest_of_more_than_a_prompt_can_have_is_not_read(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    forge(params, "long")
    read: list[object] = []
    monkeypatch.setattr(_transfer, "_read", read.append)
    assert receive(receiver, sender, PROMPT, params) == len(PROMPT)
    assert not read
    assert receiver.scheduler.connector.outcomes == {"malformed": 1}


def test_blocks_of_a_token_have_a_manifest_that_is_read() -> None:
    """The longest that a sender makes."""
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED, adapter="a" * 1000)
    for count in (1, 100, 5000):
        manifest = kvtrie.TransferManifest.from_blocks(
            kvtrie.TokenSequence(range(count), space),
            range(1 << 20, (1 << 20) + count),
            key=KEY,
            num_computed=count,
            block_size=1,
        )
        length = len(base64.b64encode(manifest.to_bytes()))
        assert length <= _transfer._MANIFEST_LEAST + _transfer._MANIFEST_PER_TOKEN * count


def test_approximate_kv_is_neither_loaded_nor_sent_on(start: Callable[..., Side]) -> None:
    """A manifest says no policy, because all that it names is exact."""
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    exact = kvtrie.TransferManifest.from_bytes(base64.b64decode(params[transfer.MANIFEST]))
    space = kvtrie.Namespace(model=exact.model, kv_dtype=exact.kv_dtype, salt=kvtrie.SHARED)
    source = kvtrie.Imported(48, policy=kvtrie.ReusePolicy(approximate=True))
    approximate = kvtrie.TransferManifest.from_blocks(
        kvtrie.TokenSequence(PROMPT, space),
        params["remote_block_ids"][0],
        key=KEY,
        num_computed=len(PROMPT),
        block_size=SIZE,
        source=source,
    )
    assert approximate.policy == source.policy
    params[transfer.MANIFEST] = base64.b64encode(approximate.to_bytes()).decode()
    assert receive(receiver, sender, PROMPT, params) == len(PROMPT) - 48
    assert len(receiver.loaded) == 3
    params = prefill(receiver, [*PROMPT, 5])
    sent_on = kvtrie.TransferManifest.from_bytes(base64.b64decode(params[transfer.MANIFEST]))
    assert {run.class_ for run in sent_on.runs} == {0}
    assert sent_on.policy is None


def test_another_key_model_or_tenant_is_computed(
    start: Callable[..., Side], tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"o" * 32)
    sender = start()
    params = prefill(sender, PROMPT)
    for receiver in (start(key="other"), start(kvtrie_model="n")):
        assert receive(receiver, sender, PROMPT, dict(params)) == len(PROMPT)
    salted = prefill(start(), PROMPT, cache_salt="tenant")
    receiver = start()
    assert receive(receiver, sender, PROMPT, salted) == len(PROMPT)
    assert receiver.scheduler.connector.outcomes == {"namespace": 1}


def test_models_without_a_name_are_told_apart_by_their_weights(
    start: Callable[..., Side], tmp_path: Path
) -> None:
    """Their paths were their names: two machines may have other weights under one path."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        shutil.copytree(shipped.model_path("gqa"), folder)
    sender, receiver = (
        start(folder=str(first), kvtrie_model=NO),
        start(folder=str(second), kvtrie_model=NO),
    )
    params = prefill(sender, PROMPT)
    assert receive(receiver, sender, PROMPT, dict(params)) < len(PROMPT)
    assert receiver.scheduler.connector.outcomes == {"whole": 1}

    file = second / "model.safetensors"
    raw = bytearray(file.read_bytes())
    half = len(raw) // 2
    raw[half:] = bytes(one ^ 1 for one in raw[half:])
    file.write_bytes(raw)
    trained = start(folder=str(second), kvtrie_model=NO)
    assert receive(trained, sender, PROMPT, dict(params)) == len(PROMPT)
    assert trained.scheduler.connector.outcomes == {"namespace": 1}


def test_weights_that_cannot_be_read_need_a_name(
    start: Callable[..., Side], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"give it a name .*kvtrie_model"):
        start(folder=str(folder), kvtrie_model=NO)
    start(folder=str(folder))


def test_requests_without_a_transfer_are_left_alone(start: Callable[..., Side]) -> None:
    side = start()
    side.run("plain", PROMPT, {})
    assert side.seen == PROMPT
    assert not side.scheduler.connector.outcomes


def test_a_transfer_that_is_given_up_is_reported_to_the_sender(start: Callable[..., Side]) -> None:
    sender, receiver = start(), start()
    params = prefill(sender, PROMPT)
    forge(params, "none")
    reads: list[tuple[list[int], list[int]]] = []
    connector = receiver.scheduler.connector
    update = connector.update_state_after_alloc

    def watching(request: Any, blocks: Any, count: int) -> None:
        update(request, blocks, count)
        reads.extend(connector.reads.values())

    connector.update_state_after_alloc = watching
    receive(receiver, sender, PROMPT, params)
    # For NIXL's connector, an empty read means that the sender may free its blocks.
    assert reads == [([], [])]


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({transfer.KEY_FILE: None}, "must be the path"),
        ({transfer.KEY_FILE: "/nowhere/key"}, "No such file"),
        ({"key": "short"}, "has 3 bytes, a key has 16 to 64"),
    ],
    ids=["none", "missing", "short"],
)
def test_a_key_that_is_none_is_refused(
    start: Callable[..., Side], tmp_path: Path, extra: dict[str, Any], why: str
) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(SettingsError, match=why):
        start(**extra)


def test_the_namespace_is_that_of_the_request() -> None:
    bare = object.__new__(transfer.CheckedTransfer)
    bare._space = {"model": "m", "kv_dtype": "auto"}

    def space(path: str | None) -> kvtrie.Namespace:
        lora = SimpleNamespace(lora_name="a", lora_path=path) if path else None
        request: Any = SimpleNamespace(lora_request=lora, cache_salt="s")
        found: kvtrie.Namespace = bare._namespace(request)
        return found

    assert space(None) == kvtrie.Namespace(model="m", kv_dtype="auto", salt="s")
    # A name may be given to another adapter while the engine runs.
    assert len({space(None), space("/one"), space("/two")}) == 3
    assert space("/one") == space("/one")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_request_with_images_is_computed(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """Placeholders of two images are the same tokens, which a manifest would call verified."""
    sender, receiver = start(), start()
    of_image = {"sender": "prefill", "receiver": "decode"}[side]
    names = "request_finished_all_groups", "get_num_new_matched_tokens"
    for name in names:
        checked = getattr(transfer.CheckedTransfer, name)

        def seen(self: Any, request: Any, *given: Any, checked: Any = checked) -> Any:
            if request.request_id == of_image:
                request.mm_features = [object()]
            try:
                return checked(self, request, *given)
            finally:
                request.mm_features = []

        monkeypatch.setattr(transfer.CheckedTransfer, name, seen)
    params = prefill(sender, PROMPT)
    assert (transfer.MANIFEST in params) == (side == "receiver")
    assert receive(receiver, sender, PROMPT, params) == len(PROMPT)
    assert receiver.loaded == []
    outcome = {"sender": "no manifest", "receiver": "not only token ids"}[side]
    assert receiver.scheduler.connector.outcomes == {outcome: 1}
    assert sender.scheduler.connector.outcomes == ({"not sent": 1} if side == "sender" else {})
