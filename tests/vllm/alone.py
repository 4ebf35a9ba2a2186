"""Runs one engine in a process of its own, sends it edited histories, and prints its answers.

With numba loaded, which drafts n-grams, vLLM starts no second engine in a process; and ranks of
tensor parallelism are processes.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

from tests.vllm.engine import BLOCK
from tests.vllm.inside import connector_config
from vllm import LLM, SamplingParams


def main() -> None:
    """Arguments: a model, the connector's settings or null, more options of vLLM."""
    settings, more = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK,
        "dtype": "float32",
        "max_model_len": 2048,
        "num_gpu_blocks_override": 200,
        **more,
    }
    if settings is not None:
        options["kv_transfer_config"] = connector_config(**settings)
    engine = LLM(sys.argv[1], **options)
    plain: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def ask(prompt: list[int], **sampling: float) -> tuple[list[int], int]:
        params = SamplingParams(**plain, **sampling, detokenize=False)
        done = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        return list(done.outputs[0].token_ids), done.num_cached_tokens

    rng = Random(5)
    reasoning, head = ([rng.randrange(3, 500) for _ in range(200)] for _ in range(2))
    loop = [rng.randrange(3, 500) for _ in range(5)] * 30
    prompts = [head + loop, reasoning + loop[:100], head + loop, head + reasoning + loop]
    said = [ask(prompt)[0] for prompt in prompts]
    # The history of one of them, with its answer, after another head.
    last, cached = ask(reasoning + head + loop + said[0] + loop[:20])
    # Known pieces, each after its own stub.
    stubs = [[rng.randrange(3, 500) for _ in range(3 + at)] for at in range(5)]
    pieces = [head[:90], said[3], reasoning[40:], loop[:70], head[100:]]
    gapped = [token for pair in zip(stubs, pieces, strict=True) for part in pair for token in part]
    # Penalties count prompt and answer also for a request that is sent to the runner again.
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4}
    more = [ask(gapped + said[at], **penalties)[0] for at in range(2)]
    result = {"said": said, "last": last, "cached": cached, "gapped": more}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
