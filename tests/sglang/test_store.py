"""The store in SGLang's scheduler and model runner: what the pool has lost comes from the store."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest
from tests.sglang.engine import Job, run, scheduled, scheduled_together
from tests.sglang.processes import process
from tests.store.kit import MooncakeMaster, needs_mooncake
from tests.vllm import models

from kvtrie.integrations.sglang import _support, _waiting

if TYPE_CHECKING:
    from pathlib import Path

HOST: dict[str, Any] = {
    "backend": "host",
    "max_bytes": 64 << 20,
    "min_tokens": 8,
    "run_tokens": 16,
    "wait": 30.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("models") / "llama"))


def settings(store: dict[str, Any] = HOST, **more: Any) -> str:
    return json.dumps({"store": store, **more})


def stored(what: str, job: Job) -> Any:
    return scheduled(job, "tests.sglang.stored", what)


def balanced(found: dict[str, Any]) -> None:
    assert (found["lost"], found["protected"]) == (0, 0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_the_pool_has_lost_is_loaded_exactly(model: str, page_size: int) -> None:
    metrics = {"enable_metrics": True}
    job = Job(model, page_size=page_size, num_slots=1024, settings=settings(), overrides=metrics)
    found = stored("same", job)
    counted = found["requests"] | found["events"]
    assert found["told"] == {name: count for name, count in counted.items() if count}
    first = found["first"]
    assert first["cached"] == 0
    # Runs of 16 tokens, and pages that are whole.
    for name in ("flushed", "overwritten"):
        assert found[name]["reply"] == first["reply"]
        assert found[name]["cached"] == 192
    # The very bytes that were computed; the rest is computed after them.
    for one in (*found["apart"], *found["apart overwritten"]):
        assert max(one) <= 1e-4
    assert found["next"]["cached"] == (203 + 11) // 16 * 16
    assert found["other salt"]["cached"] == 0
    assert found["other salt"]["reply"] == first["reply"]
    assert found["other salt again"]["cached"] == 192
    assert found["counts"] == {}
    assert found["requests"]["store_tokens_exact"] == found["events"]["placed_exact"] > 700
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_reasoning_that_the_template_drops_is_not_stored(model: str, page_size: int) -> None:
    found = stored("reasoning", Job(model, page_size=page_size, settings=settings()))
    question, dropped, answer = found["lengths"]
    assert found["first again"]["reply"] == found["first"]["reply"]
    assert found["first again"]["cached"] == question // page_size * page_size
    # A request may say that its template keeps it.
    kept = found["kept again"]
    assert kept["cached"] == (question + dropped + answer - 1) // page_size * page_size
    # Where that is not known, nothing is stored.
    assert found["not read"]["cached"] == 0
    assert found["counts not read"] == {"_read": 1}
    assert found["counts"] == {}
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_approximate_kv_is_not_stored(model: str, page_size: int) -> None:
    given = settings(gate="unchecked", policy={"scope": "namespace"})
    found = stored("approximate", Job(model, page_size=page_size, settings=given))
    assert found["moved"]["cached"] > 64
    # The head was exact; so is what is computed after a flush, and only then it is stored.
    assert found["edited"]["cached"] == 64
    assert max(max(pair) for pair in found["apart"]) <= 1e-4
    assert found["again"]["cached"] == (64 + 150 + 41) // 16 * 16 == 240
    assert found["counts"] == {}
    balanced(found)


def test_the_whole_of_sglang(model: str) -> None:
    """Its three processes, which prepare a step while the one before runs."""
    mine = process("tests.sglang.whole", model, "kvtrie", KVTRIE_SGLANG=settings())
    theirs = process("tests.sglang.whole", model, "")
    assert mine["rounds"] == theirs["rounds"]
    assert mine["overlap"]
    assert mine["cached"] >= theirs["cached"] > 1000


MOVES: dict[str, Any] = {"gate": "unchecked", "policy": {"shared_prefix": 100}}


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_moved_runs_are_those_of_the_pool_and_labelled(model: str, page_size: int) -> None:
    found = stored("edited", Job(model, page_size=page_size, settings=settings(**MOVES)))
    pool, store = found["pool"], found["store"]
    assert (store["cached"], store["reply"]) == (pool["cached"], pool["reply"]) == (208, ANY)
    assert store["moved"] == 144
    assert max(max(pair) for pair in found["store pool"]) <= 1e-4
    # The first layer has seen the tokens alone; later ones differ.
    (first, *_, last) = found["store exact"]
    assert max(first) <= 1e-4
    assert last[1] > 1e-3
    # One hop more than in the store, as when it moves inside the pool.
    assert found["store labels"] == found["pool labels"]
    approximate = [tuple(one) for one in found["store labels"] if one[2] == 1]
    assert approximate[0][0] == 64
    assert approximate[0][3] == 1
    # Exact requests do not find what was computed after it.
    assert found["match"]["cached"] == found["exact"]["cached"] == 64
    assert (found["exact"]["moved"], found["again"]["cached"]) == (0, 240)
    names = ("other session", "other salt", "corrupt", "load", "seek", "write", "refused")
    for name in names:
        assert found[name]["moved"] == 0, name
        assert found[name]["reply"] == found["exact"]["reply"], name
    assert found["other session"]["cached"] == found["refused"]["cached"] == 64
    assert found["other salt"]["cached"] == 0
    assert set(found["failures"]) == {"_loaded", "_sought"}
    assert found["cleared"] == store
    assert found["stopped"]["cached"] == 0
    assert found["events"]["placed_approximate"] == found["requests"]["store_tokens_moved"]
    assert found["events"]["scope"] > 0
    assert found["room"] == 2 << 30
    assert found["counts"] == {}
    balanced(found)


@pytest.mark.parametrize("gaps", [False, True])
def test_fronts_that_a_policy_computes(model: str, gaps: bool) -> None:
    """They are gaps; where none is computed, no moved run is loaded, and that is counted."""
    more = MOVES | {"policy": {"shared_prefix": 100, "recompute_first": 8}, "gaps": gaps}
    found = stored("edited", Job(model, page_size=4, settings=settings(**more)))
    assert found["store"]["cached"] == found["pool"]["cached"] == (200 if gaps else 64)
    assert found["store"]["moved"] == (136 if gaps else 0)
    assert (found["requests"].get("store_repair", 0) > 0) is not gaps
    if gaps:
        assert found["store"]["reply"] == found["pool"]["reply"]
        assert max(max(pair) for pair in found["store pool"]) <= 1e-4
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_last_message_is_not_loaded_as_moved(model: str, page_size: int) -> None:
    given = settings(**MOVES)
    found = stored("last_message", Job(model, page_size=page_size, settings=given))
    first, third = found["lengths"]
    assert found["last"]["cached"] <= first
    assert found["not last"]["cached"] > first + third - 2 * 16
    assert found["counts"] == {}
    balanced(found)


# --- other processes ------------------------------------------------------------------------


def test_another_process_finds_it_in_a_folder(model: str, tmp_path: Path) -> None:
    """On pages of another size; and nothing is there for other keys, models and versions."""
    key, folder = tmp_path / "key", tmp_path / "runs"
    key.write_bytes(b"a secret of the test's own")
    folder.mkdir()
    store = {**HOST, "backend": str(folder), "key_file": str(key)}
    job = Job(model, page_size=16, settings=settings(store))
    first = stored("once", job)
    assert first["cached"] == 0
    assert first["events"]["stored"] == 14
    second = stored("once", replace(job, page_size=1))
    assert (second["cached"], second["reply"]) == (192, first["reply"])
    assert second["counts"] == {}
    balanced(second)
    key.write_bytes(b"another secret of the test's")
    with pytest.raises(RuntimeError, match=r"KVTRIE_SGLANG: store: .* with another key"):
        stored("once", job)
    key.write_bytes(b"a secret of the test's own")
    other = str(models.llama(tmp_path / "other", seed=1))
    with pytest.raises(RuntimeError, match=r"KVTRIE_SGLANG: store: .* the store has namespace"):
        stored("once", replace(job, model=other))


def test_another_process_moves_it_for_its_conversation_alone(model: str, tmp_path: Path) -> None:
    key, folder = tmp_path / "key", tmp_path / "runs"
    key.write_bytes(b"a secret of the test's own")
    folder.mkdir()
    given = settings({**HOST, "backend": str(folder), "key_file": str(key)}, **MOVES)
    job = Job(model, page_size=4, settings=given)
    assert "talk" not in stored("half", job)
    found = stored("half", job)
    moved_for_talk_alone(found)


def moved_for_talk_alone(found: dict[str, Any]) -> None:
    assert (found["talk"]["cached"], found["another"]["cached"]) == (208, 64)
    assert found["requests"]["store_tokens_moved"] == 144
    assert found["counts"] == {}
    balanced(found)


@needs_mooncake
def test_another_process_moves_it_out_of_the_memory_of_the_first_through_mooncake(
    model: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"a secret of the test's own")
    with MooncakeMaster() as master:
        store = {**HOST, "backend": f"mooncake://{master.address}", "key_file": str(key)}
        job = Job(model, page_size=4, settings=settings(store, **MOVES))
        first, found = scheduled_together(job, "tests.sglang.stored", [["lends"], ["borrows"]])
    assert first["events"]["stored"] > 0
    balanced(first)
    moved_for_talk_alone(found)


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ({"backend": "host", "waits": 1}, "unknown key 'waits'"),
        ({"backend": "disk"}, "store: backend must be"),
        ({"backend": "/a/folder"}, "store: key_file must be"),
        ({"backend": "/a/folder", "key_file": "/nowhere/key"}, "key_file /nowhere/key"),
    ],
    ids=str,
)
def test_settings_that_are_invalid_are_refused(model: str, store: Any, why: str) -> None:
    with pytest.raises(RuntimeError, match=f"kvtrie: KVTRIE_SGLANG: .*{why}"):
        run(Job(model, settings=settings(store)))


def test_what_cannot_be_stored_is_refused_by_name(model: str) -> None:
    quantised = Job(model, settings=settings(), overrides={"kv_cache_dtype": "fp8_e4m3"})
    with pytest.raises(RuntimeError, match=r"KVTRIE_SGLANG: store: KV of torch.* is quantised"):
        run(quantised)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("tp_size", 2, "tp_size=2 is not supported: the ranks"),
        ("enable_memory_saver", True, "it unmaps pages that a thread reads"),
        ("kt_weight_path", "/experts", "--kt-weight-path is not supported: experts have other"),
        ("kt_max_deferred_experts_per_token", 2, "--kt-max-deferred-experts-per-token"),
        ("forward_hooks", [{"name": "one"}], "--forward-hooks"),
        ("enable_w4a4_mxfp4_megamoe", True, "--enable-w4a4-mxfp4-megamoe"),
        ("is_embedding", True, "the model generates nothing"),
        ("dllm_algorithm", "blocks", "--dllm-algorithm"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_return_routed_experts", True, "--enable-return-routed-experts"),
    ],
)
def test_servers_that_can_have_no_store(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, why: str
) -> None:
    plain = {
        "tp_size": 1,
        "enable_memory_saver": False,
        "kt_weight_path": None,
        "kt_max_deferred_experts_per_token": None,
        "forward_hooks": None,
        "enable_w4a4_mxfp4_megamoe": False,
        "is_embedding": False,
        "dllm_algorithm": None,
        "enable_pdmux": False,
        "enable_return_routed_experts": False,
        "enable_return_indexer_topk": False,
    }
    model = SimpleNamespace(is_generation=True)

    def reason(**args: object) -> str | None:
        context: Any = SimpleNamespace(server_args=SimpleNamespace(**args), model_config=model)
        return _support._why_not_stored(context)

    assert "could not be hooked" in str(reason(**plain))
    monkeypatch.setattr(_waiting, "is_installed", lambda: True)
    assert reason(**plain) is None
    assert why in str(reason(**plain | {name: value}))


# --- what goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_store_that_fails_is_recomputed(model: str, page_size: int) -> None:
    found = stored("faults", Job(model, page_size=page_size, settings=settings()))
    first = found["first"]["reply"]
    for name, one in found.items():
        if isinstance(one, dict) and "reply" in one:
            assert one["reply"] == first, name
            fails = name in ("first", "corrupt") or name.startswith(("exists", "read"))
            assert one["cached"] == (0 if fails else 192), name
    events = found["events"]
    assert events["corrupt"] >= 1
    assert events["exists_unreachable"] >= 1
    assert events["read_unreachable"] >= 1
    assert events["load_failed"] >= 4
    assert events["put_failed"] >= 1
    assert found["counts"] == {}
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_another_run_is_not_believed_and_on_a_full_disk_nothing_is_stored(
    model: str, page_size: int
) -> None:
    job = Job(model, page_size=page_size)
    found = stored("swapped_and_full", replace(job, settings=settings()))
    plain = stored("replies", replace(job, backend=None))["replies"]
    expected = {
        "first": (0, plain[0]),
        "swapped": (0, plain[0]),
        "whole": (192, plain[0]),
        "full, named": (0, plain[1]),
        "full, named, again": (0, plain[1]),
        "room, named": (0, plain[1]),
        "room, named, again": (192, plain[1]),
        "full, raw": (0, plain[2]),
        "full, raw, again": (0, plain[2]),
        "room, raw": (0, plain[2]),
        "room, raw, again": (192, plain[2]),
    }
    assert {name: (found[name]["cached"], found[name]["reply"]) for name in expected} == expected
    events = found["events"]
    assert events["forged"] > 0
    # Each run is tried twice; of a turn that fails, the first run alone.
    assert events["put_full"] >= 2 * 12
    assert events["put_failed"] == 2
    assert not events.keys() & {"corrupt", "load_failed", "read_unreachable", "put_unreachable"}
    assert found["counts"] == {}
    balanced(found)


def test_calls_of_the_store_that_raise_lose_no_slot(model: str) -> None:
    found = stored("calls", Job(model, page_size=16, settings=settings()))
    first = found["first"]["reply"]
    for name, one in found.items():
        if isinstance(one, dict) and "reply" in one:
            assert one["reply"] == first, name
    assert found["well"]["cached"] == 192
    assert found["load"]["cached"] == found["alloc"]["cached"] == 0
    assert set(found["counts"]) >= {"_sought", "waits", "_from_store", "_write_turn"}
    balanced(found)


def test_a_prompt_waits_while_others_are_served_and_not_for_long(model: str) -> None:
    store = {**HOST, "wait": 1.0, "threads": 1}
    found = stored("slow", Job(model, page_size=16, settings=settings(store)))
    assert found["order"] == ["goes", "waits"]
    assert found["waits"] == {"cached": 192, "reply": found["first"]["reply"]}
    assert found["late"] == {"cached": 0, "reply": found["first"]["reply"]}
    assert found["requests"]["store_late"] == 1
    assert found["slower"] == {"cached": 0, "reply": found["first"]["reply"]}
    assert found["events"]["chose_recompute_slower"] > 0
    assert found["counts"] == {}
    balanced(found)


def test_a_prompt_for_which_others_are_preempted_does_not_wait(model: str) -> None:
    """They would be preempted in each round again."""
    priorities = {"enable_priority_scheduling": True, "max_running_requests": 1}
    found = stored("preempts", Job(model, settings=settings(), overrides=priorities))
    assert found["preempted"] == 1
    assert found["lengths"] == [30, 12]
    assert found["same"]
    assert found["left"] == 0
    assert found["counts"] == {}
    balanced(found)


@pytest.mark.parametrize(
    ("preempted", "has_adapters", "waits"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_a_prompt_waits_where_it_takes_no_place(
    preempted: bool, has_adapters: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_lora", lambda: SimpleNamespace(enable_lora=has_adapters)
    )
    dropped: list[object] = []
    paused: list[bool] = []

    def waiting(_: object, __: object, *, is_idle: bool) -> bool:
        paused.append(is_idle)
        return True

    adder: Any = SimpleNamespace(
        tree_cache=SimpleNamespace(waits=waiting, release_aborted_request=dropped.append),
        running_batch=None,
        can_run_list=[],
        preempt_list=["another"] if preempted else [],
    )
    request: Any = SimpleNamespace(cache_request_handle="handle")
    found = _waiting._admit(lambda *_: "admitted", adder, request)
    assert (found != "admitted") is waits
    assert dropped == ([] if waits else ["handle"])
    assert paused == [waits]


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_abort_after_any_number_of_steps(model: str, page_size: int) -> None:
    """While it waits, when it has arrived, between its chunks and after its first token."""
    store = {**HOST, "run_tokens": 64}
    found = stored("aborts", Job(model, page_size=page_size, settings=settings(store)))
    assert found["cached"][0] == 0
    assert max(found["cached"]) == found["last"]["cached"] == 448
    assert found["last"]["reply"] == found["first"]["reply"]
    # Nothing is kept of what was loaded.
    assert set(found["room"]) == {2 << 30}
    assert found["counts"] == {}
    balanced(found)


def test_pages_that_are_overwritten_before_they_are_read_are_not_stored(model: str) -> None:
    found = stored("overwritten", Job(model, page_size=16, num_slots=640, settings=settings()))
    assert found["events"]["overwritten"] > 0
    assert found["first"]["reply"] == found["again"]["reply"] == found["last"]["reply"]
    assert max(max(pair) for pair in found["apart"]) <= 1e-4
    assert found["counts"] == {}
    balanced(found)


def test_after_weights_are_replaced_nothing_is_read_or_written(model: str, tmp_path: Path) -> None:
    other = str(models.llama(tmp_path / "other", seed=1))
    job = Job(model, settings=settings(), overrides={"served_model_name": other})
    found = stored("weights", job)
    assert found["second"]["cached"] == found["third"]["cached"] == 0
    assert found["second"]["reply"] == found["third"]["reply"] != found["first"]["reply"]
    assert found["requests"]["store_stopped"] == 1
    balanced(found)


def test_after_weights_are_reset_nothing_is_read_or_written(model: str) -> None:
    found = stored("reset", Job(model, settings=settings()))
    assert found["snapshot"]["cached"] == 192
    assert found["reset_tensors"]["cached"] == 0
    assert found["reset_tensors"]["reply"] != found["first"]["reply"]
    assert found["requests"]["store_stopped"] == 1
    balanced(found)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_requests_in_a_small_pool(model: str, page_size: int) -> None:
    """Chunks, retraction, aborts, salts and keys: replies are those of SGLang's own cache."""
    job = Job(model, page_size=page_size, num_slots=1600, turns=4, retract=True)
    found = stored("mixed", replace(job, settings=settings()))
    theirs = run(replace(job, backend=None, num_slots=40_000, retract=False))
    assert found["tokens"] == [theirs.tokens, theirs.tokens]
    assert found["requests"]["store_tokens_exact"] > 1000
    assert found["counts"] == {}
    balanced(found)
    assert min(found["evicted"], *found["met"].values()) > 2
