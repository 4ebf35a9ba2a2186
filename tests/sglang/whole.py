"""The whole of SGLang, in its processes: ``python -m tests.sglang.whole MODEL BACKEND [RANKS]``.

Prints one JSON object: the replies and hits of three rounds of eight prompts, in a pool too small
for all, and whether the scheduler prepares a step while the one before runs.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any


def main(model: str, backend: str, ranks: str = "1") -> int:
    import sglang  # noqa: PLC0415 - after this module is imported in SGLang's processes too

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        tp_size=int(ranks),
        attention_backend="torch_native",
        sampling_backend="pytorch",
        mem_fraction_static=0.6,
        max_total_tokens=1536,
        page_size=16,
        dtype="float32",
        skip_tokenizer_init=True,
        radix_cache_backend=backend or None,
        log_level="error",
    )
    rng = Random(1)
    head = [rng.randrange(3, 512) for _ in range(100)]
    prompts = [head + [rng.randrange(3, 512) for _ in range(60)] for _ in range(8)]
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    rounds: list[list[list[int]]] = []
    cached = 0
    for _ in range(3):
        found: list[dict[str, Any]] = engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds.append([one["output_ids"] for one in found])
        cached += sum(one["meta_info"]["cached_tokens"] for one in found)
        prompts = [
            [*prompt, *one["output_ids"], rng.randrange(3, 512)]
            for prompt, one in zip(prompts, found, strict=True)
        ]
    overlap = not engine.get_server_info()["disable_overlap_schedule"]
    engine.shutdown()
    sys.stdout.write(json.dumps({"rounds": rounds, "cached": cached, "overlap": overlap}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
