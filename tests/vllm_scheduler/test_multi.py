"""Other connectors next to this one, under vLLM's `MultiConnector`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.inside import SCHEDULER, connector_config
from tests.vllm.prompts import ANSWER, EDITED, QUESTION, REASONING, words
from tests.vllm_scheduler import storing
from tests.vllm_scheduler.core import features_of
from tests.vllm_scheduler.test_images import ImageTraffic
from tests.vllm_scheduler.test_traffic import NUM_REQUESTS, SMALL, Run, report
from tests.vllm_scheduler.worker import BLOCK, Image, continuation, kv_of
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_block_hash

from kvtrie.integrations.vllm import _lineage, _others
from kvtrie.integrations.vllm._support import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.traffic import Traffic
    from tests.vllm_scheduler.core import Core

in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


class Among(Run):
    """Traffic with a storing connector; `plain` has the exact KV of every plain key."""

    def __init__(self, vllm: Core, seed: int, traffic: Traffic | None = None) -> None:
        super().__init__(vllm, seed, traffic=traffic)
        vllm.worker.follow(vllm)
        # vLLM cannot reset its prefix cache while a request waits for a connector's blocks.
        self.resets = False

    def stored(self) -> tuple[int, int, int]:
        """Blocks stored under a plain key with its KV, with other KV, and under other keys."""
        vllm, plain = self.core, dict[bytes, tuple[int, list[int]]]()
        for name, (ask, _) in self.asked.items():
            if ask.salt is not None:
                continue
            tokens = list(ask.prompt) + vllm.answers[name].tokens
            written = kv_of(tokens, ask.images)
            hashes = vllm.plain_hashes(tokens, features=features_of(ask.images))
            for number, one in enumerate(hashes):
                plain[one] = (number, written[number * BLOCK : (number + 1) * BLOCK])
        right = wrong = other = 0
        (theirs,) = (
            one.scheduler_manager
            for one in vllm.scheduler.connector.sub_connectors
            if hasattr(one, "scheduler_manager")
        )
        for block in theirs.cpu_block_pool.blocks:
            if block.block_hash is None:
                continue
            known = plain.get(bytes(get_block_hash(block.block_hash)))
            if known is None:
                other += 1
                continue
            kv, position = vllm.worker.stored[block.block_id]
            first = known[0] * BLOCK
            is_right = kv.tolist() == known[1]
            is_right &= position.tolist() == list(range(first, first + BLOCK))
            right, wrong = right + is_right, wrong + (not is_right)
        return right, wrong, other


@in_flight
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_storing_connector_never_has_approximate_kv_under_a_plain_key(
    core: Callable[..., Core], in_flight: bool, lazy: bool
) -> None:
    given = storing.options(lazy=lazy, cpu_blocks=1000)
    vllm = core(in_flight=in_flight, shadow=False, **given, **SMALL)
    run = Among(vllm, seed=81 + 2 * lazy + in_flight)
    run.go(NUM_REQUESTS)
    report(run)
    right, wrong, other = run.stored()
    print(f"{right} blocks stored under plain keys, {other} under others")  # noqa: T201 - shown with pytest -s
    assert wrong == 0
    assert right > 20
    assert other > 20
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved > 0
    assert vllm.worker.num_loaded > 0
    assert run.num_checked


def test_the_check_finds_approximate_kv_under_a_plain_key(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lineage, "start", lambda *_: None)
    vllm = core(shadow=False, **storing.options(), **SMALL)
    run = Among(vllm, seed=85)
    # Answers are wrong as well.
    monkeypatch.setattr(run, "_look", lambda _: None)
    run.go(60)
    assert run.stored()[1] > 0


def test_sources_are_kept_until_the_step_that_reads_them_has_run(
    core: Callable[..., Core],
) -> None:
    vllm = core(in_flight=True, shadow=False, **storing.options(), **SMALL)
    assert vllm.scheduler.defer_block_free
    vllm.worker.follow(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    name = vllm.add(EDITED)
    before = vllm.worker.num_moved
    while vllm.worker.num_moved == before:
        vllm.step()
    held = [block for step in vllm.connector.planner.half.held._steps for block in step]
    assert held
    assert all(block.ref_cnt > 0 for block in held)
    vllm.drain()
    assert vllm.answers[name].finished
    assert not vllm.connector.planner.half.held._steps


def test_what_another_connector_loads_is_counted_as_external(core: Callable[..., Core]) -> None:
    vllm = core(shadow=False, **storing.options(), **SMALL)
    vllm.worker.follow(vllm)
    prompt = words(200, 7)
    expected = continuation(prompt, 8)
    assert vllm.ask(prompt) == expected
    vllm.ask(words(20, 8))
    vllm.evict(prompt)
    name = vllm.add(prompt)
    vllm.drain()
    answer = vllm.answers[name]
    assert answer.tokens == expected
    assert vllm.worker.num_loaded > 0
    assert answer.prefill is not None
    assert answer.prefill.num_external_cached_tokens == 192
    assert vllm.counts["prompt_tokens/exact/other"] >= 192


def test_a_failed_copy_ends_the_engine(core: Callable[..., Core]) -> None:
    half = core(shadow=False, **storing.options(), **SMALL).connector
    half._is_among_others, half._not_copied = True, {3}
    try:
        with pytest.raises(RuntimeError, match="1 blocks were not copied, and another connector"):
            half.get_block_ids_with_load_errors()
    finally:
        half._is_among_others = False


SAID: dict[str, Any] = {
    "scheduler": SCHEDULER,
    "publishes": False,
    "moves": True,
    "is_exact": False,
    "snapshots": False,
}


EXACTLY: dict[str, Any] = {"is_exact": True, "moves": False, "scheduler": None}


def names(*others: str) -> list[dict[str, Any]]:
    return [{"kv_connector": one} for one in ("KvtrieConnector", *others)]


@pytest.mark.parametrize(
    ("given", "more", "why"),
    [
        (names("OffloadingConnector"), {}, "OffloadingConnector next to it .* it keeps the hashes"),
        (names("ExampleConnector"), {}, "ExampleConnector .* it stores KV under the tokens"),
        (names("LMCacheConnectorV1"), {}, "LMCacheConnectorV1 .* it stores KV under the tokens"),
        (names("NixlConnector"), {}, "NixlConnector .* it sends blocks to engines"),
        (names("KvtrieNixlConnector"), {}, "KvtrieNixlConnector .* it sends blocks to engines"),
        (names("HF3FSKVConnector"), {}, "HF3FSKVConnector .* it was not run next to kvtrie"),
        (names(storing.NAME, "NixlConnector"), {}, "NixlConnector next to it is not supported"),
        (
            [*names(), {"kv_connector": storing.NAME, "kv_connector_module_path": "mine"}],
            {},
            "it was not run next to kvtrie",
        ),
        (names(storing.NAME)[::-1], {}, "list KvtrieConnector once, and first"),
        (names("KvtrieConnector"), {}, "list KvtrieConnector once, and first"),
        (None, {}, "list KvtrieConnector once, and first"),
        ([*names(), 3], {}, "None next to it is not supported"),
        (names(storing.NAME), {"scheduler": None}, "only KvtrieScheduler keeps blocks"),
        (names(storing.NAME), {"publishes": True}, "would publish approximate blocks as exact"),
        (names(storing.NAME), {"is_exact": True}, '"mode": "exact" has no gaps to continue'),
        (names(storing.NAME), {"snapshots": True}, "publish events of their own, which a snapshot"),
        (names(storing.NAME), EXACTLY | {"snapshots": True}, 'remove "snapshot"'),
        (names("NixlConnector"), EXACTLY, "NixlConnector .* it sends blocks to engines"),
        (names("KvtrieConnector"), EXACTLY, r"list KvtrieConnector once in"),
        (None, EXACTLY, r"list KvtrieConnector once in"),
    ],
)
def test_what_is_refused(given: object, more: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        _others.check_names(given, **(SAID | more))


def test_events_of_exact_blocks_alone_may_be_published() -> None:
    _others.check_names(names(storing.NAME), **(SAID | {"publishes": True, "moves": False}))


def test_in_exact_mode_the_order_is_free_and_events_may_be_published() -> None:
    for given in (names(storing.NAME), names(storing.NAME)[::-1]):
        for publishes in (False, True):
            _others.check_names(given, **(SAID | EXACTLY | {"publishes": publishes}))


@in_flight
@pytest.mark.parametrize(
    ("is_last", "lazy"), [(False, True), (True, False)], ids=["first-lazy", "last-eager"]
)
def test_exact_mode_next_to_a_storing_connector(
    core: Callable[..., Core], in_flight: bool, is_last: bool, lazy: bool
) -> None:
    given = storing.options(lazy=lazy, cpu_blocks=1000, is_exact=True, is_last=is_last)
    vllm = core(in_flight=in_flight, shadow=False, **given, **SMALL)
    run = Among(vllm, seed=91 + 2 * is_last + in_flight)
    run.go(150)
    report(run)
    right, wrong, other = run.stored()
    assert wrong == 0
    assert right > 20
    # Keys of the prompts with a salt.
    assert other > 0
    assert vllm.counts["errors"] == vllm.counts["tokens_moved"] == 0
    assert vllm.counts["tokens_exact"] > 0
    assert vllm.worker.num_loaded > 0
    assert run.num_checked


def test_exact_mode_keeps_sources_until_the_step_has_run(core: Callable[..., Core]) -> None:
    given = storing.options(is_exact=True)
    vllm = core(in_flight=True, shadow=False, **given, **SMALL)
    vllm.worker.follow(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    # Twelve tokens of a block are the same.
    name = vllm.add((QUESTION + REASONING)[:188] + words(30, 3))
    vllm.step()
    assert vllm.counts["tokens_exact"] == 12
    held = [block for step in vllm.connector.planner.half.held._steps for block in step]
    assert held
    assert all(block.ref_cnt > 0 for block in held)
    vllm.drain()
    assert vllm.answers[name].finished
    assert not any(vllm.connector.planner.half.held._steps)


@in_flight
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("is_exact", [False, True], ids=["moving", "exact"])
def test_images_next_to_a_storing_connector(
    core: Callable[..., Core], in_flight: bool, lazy: bool, is_exact: bool
) -> None:
    """It stores and loads KV of images under the hashes of vLLM, which have their identifiers."""
    given = storing.options(lazy=lazy, cpu_blocks=1000, is_exact=is_exact, images=True)
    vllm = core(in_flight=in_flight, shadow=False, **given, **SMALL)
    seed = 101 + 4 * is_exact + 2 * lazy + in_flight
    run = Among(vllm, seed=seed, traffic=ImageTraffic(seed))
    run.go(200)
    report(run)
    right, wrong, other = run.stored()
    assert wrong == 0
    assert right > 20
    assert other > 0
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0
    assert (vllm.worker.num_moved > 0) != is_exact
    assert vllm.worker.num_copied > 0
    assert vllm.worker.num_loaded > 0
    assert vllm.worker.num_encoded > 0
    assert run.num_checked


@pytest.mark.parametrize("is_exact", [False, True], ids=["moving", "exact"])
def test_an_image_that_another_connector_loads_is_not_encoded(
    core: Callable[..., Core], is_exact: bool
) -> None:
    given = storing.options(is_exact=is_exact, images=True)
    vllm = core(shadow=False, **given, **SMALL)
    vllm.worker.follow(vllm)
    before, after = words(20, 7), words(100, 8)
    prompt = [*before, *[7] * 40, *after]
    for name, loaded in (("cat", 0), ("cat", 144), ("dog", 16)):
        images = [Image(20, 60, name)]
        number = vllm.worker.num_encoded
        asked = vllm.add(prompt, images=images, mode="exact")
        vllm.drain()
        answer = vllm.answers[asked]
        assert answer.tokens == continuation(prompt, 8, images=images)
        assert answer.prefill is not None
        assert answer.prefill.num_external_cached_tokens == loaded
        assert vllm.worker.num_encoded == number + (loaded < 60)
        vllm.ask(words(20, 9), max_tokens=1)
        vllm.forget_encoded()
        vllm.pool.evict_blocks({block.block_id for block in vllm.pool.blocks if block.block_hash})
    assert vllm.worker.num_loaded > 0
    assert vllm.counts["errors"] == vllm.counts["requests_unsupported"] == 0


@pytest.mark.parametrize("gate", [None, "unchecked"])
def test_vllm_refuses_it_with_its_own_connectors(
    core: Callable[..., Core], gate: str | None
) -> None:
    vllm = core(connector={"gate": None}, shadow=False)
    config, before = vllm.core.vllm_config, vllm.core.vllm_config.kv_transfer_config
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                connector_config(gate=gate),
                {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
            ]
        },
    )
    try:
        with (
            set_current_vllm_config(config),
            pytest.raises(UnsupportedError, match="OffloadingConnector next to it is not supp"),
        ):
            KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, vllm.scheduler.kv_cache_config
            )
    finally:
        config.kv_transfer_config = before


def test_the_scheduler_refuses_other_connectors(core: Callable[..., Core]) -> None:
    with pytest.raises(Exception, match="ExampleConnector next to it is not supported"):
        core(shadow=False, **storing.options("ExampleConnector"), **SMALL)


def test_snapshots_next_to_it_are_refused_in_the_worker(core: Callable[..., Core]) -> None:
    vllm = core(shadow=False, **storing.options(is_exact=True), **SMALL)
    config = vllm.core.vllm_config
    before = config.kv_transfer_config.kv_connector_extra_config
    mine, *others = before["connectors"]
    changed = {**mine, "kv_connector_extra_config": {"mode": "exact", "snapshot": {}}}
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [changed, *others]}
    try:
        with (
            set_current_vllm_config(config),
            pytest.raises(UnsupportedError, match="which a snapshot lacks"),
        ):
            KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, vllm.scheduler.kv_cache_config
            )
    finally:
        config.kv_transfer_config.kv_connector_extra_config = before


def test_events_next_to_it_are_refused_in_the_worker(core: Callable[..., Core]) -> None:
    vllm = core(shadow=False, **storing.options(), **SMALL)
    config, before = vllm.core.vllm_config, vllm.core.vllm_config.kv_events_config
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    try:
        with (
            set_current_vllm_config(config),
            pytest.raises(UnsupportedError, match="would publish approximate blocks"),
        ):
            KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, vllm.scheduler.kv_cache_config
            )
    finally:
        config.kv_events_config = before


def test_quantised_kv_is_not_served_next_to_others(core: Callable[..., Core]) -> None:
    given = storing.options(is_exact=True) | {"kv_cache_dtype": "fp8"}
    vllm = core(shadow=False, **given, **SMALL)
    config = vllm.core.vllm_config
    with (
        set_current_vllm_config(config),
        pytest.raises(UnsupportedError, match="KV in fp8 was not run next to other connectors"),
    ):
        KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, vllm.scheduler.kv_cache_config
        )
