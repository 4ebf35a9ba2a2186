"""kvtrie inside vLLM: moves KV that is already in vLLM's pool instead of recomputing it.

vLLM loads `KvtrieConnector` by its configuration; vLLM is not patched:

```text
--kv-transfer-config '{"kv_connector": "KvtrieConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvtrie.integrations.vllm", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"gate": "model.gate.json"}}'
```

`KvtrieScheduler` (``--scheduler-cls kvtrie.integrations.vllm.KvtrieScheduler``) also reuses KV
after a gap, where vLLM's own scheduler computes everything that follows.

How it works. The scheduler's half keeps a `kvtrie.RadixIndex` of blocks that vLLM has cached. It
holds no references: vLLM reports when it hands a block out again. When a request is admitted, vLLM
first finds its own exact prefix. The connector plans the rest, promises the tokens that follow
without a gap, and pins the sources until the step is built. The copies of a step are plain slots in
the connector's metadata; each worker applies them to its own tensors before the forward pass.

What it promises. Exact prefix hits stay vLLM's own. Approximate KV is used only for requests that
may use it, of models whose gate file clears the policy. Blocks with approximate KV are cached under
separate hashes, which no plain request can hit. After any error at run time, vLLM continues as
without a connector, and the error is counted.
"""

try:
    from kvtrie.integrations.vllm.connector import KvtrieConnector
    from kvtrie.integrations.vllm.scheduler import KvtrieScheduler
except ImportError:
    # Other versions of vLLM lack these imports. The error then names the version, not the missing
    # name.
    from kvtrie.integrations.vllm import _support

    _support.check_version()
    raise

__all__ = ["KvtrieConnector", "KvtrieScheduler"]
