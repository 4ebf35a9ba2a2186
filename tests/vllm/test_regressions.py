"""One test for each bug that was found by reading, on vLLM's real scheduler with steps in flight."""

from __future__ import annotations

from random import Random

from tests.vllm.pipeline import Pipeline
from vllm.lora.request import LoRARequest

APPROXIMATE = {"gate": "unchecked", "chat_format": None}


def words(count: int, seed: int) -> list[int]:
    """Random ids."""
    return Random(seed).choices(range(3, 400), k=count)


QUESTION, THOUGHT, ANSWER, NEXT = words(100, 1), words(80, 2), words(75, 3), words(20, 4)


def test_an_adapter_that_took_over_a_name_reads_nothing_of_the_one_before() -> None:
    # vLLM hashes the adapter's path too, so it hits nothing; the index knew adapters by name, and
    # had the old one's KV copied as exact.
    p = Pipeline(connector=APPROXIMATE)
    p.ask("old", QUESTION + ANSWER, lora_request=LoRARequest("tuned", 1, "/adapters/one"))
    for mode in ("exact", "approximate"):
        new = LoRARequest("tuned", 2, "/adapters/two")
        said = p.ask(f"new, {mode}", QUESTION + ANSWER, mode=mode, lora_request=new)
        assert said == p.truth(p.requests[f"new, {mode}"])
