"""kvtrie inside vLLM: KV that is already in vLLM's pool is moved instead of computed again.

vLLM loads `KvtrieConnector` by its configuration; nothing of vLLM is patched:

```text
--kv-transfer-config '{"kv_connector": "KvtrieConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvtrie.integrations.vllm", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"gate": "model.gate.json"}}'
```

`KvtrieScheduler` (``--scheduler-cls kvtrie.integrations.vllm.KvtrieScheduler``) goes on reusing KV
behind a gap, where vLLM's own scheduler computes all that follows.

How it works. The scheduler's half keeps a `kvtrie.RadixIndex` of blocks that vLLM has cached,
without holding any: vLLM says when it hands one of them out again. When a request is admitted, vLLM
finds its own exact prefix first; the connector plans the rest, promises as many tokens as follow
without a gap, and holds the sources until the step is put together. The copies of a step travel as
plain slots in the connector's metadata; a worker carries them out on its own tensors before the
forward pass.

What it promises. Exact prefix hits stay vLLM's own. Approximate KV is used for requests that may
use it, of models whose gate file clears the policy, and nowhere else: blocks that hold any are
cached under a hash lineage of their own, which no plain request can hit. Whatever goes wrong at run
time falls back to what vLLM does without a connector, and is counted.
"""

try:
    from kvtrie.integrations.vllm.connector import KvtrieConnector
    from kvtrie.integrations.vllm.scheduler import KvtrieScheduler
except ImportError:
    # Another vLLM lacks what is imported here. Its version is what a user can change, not the name.
    from kvtrie.integrations.vllm import _support

    _support.check_version()
    raise

__all__ = ["KvtrieConnector", "KvtrieScheduler"]
