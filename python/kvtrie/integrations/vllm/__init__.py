"""kvtrie inside vLLM: moves KV that is already in vLLM's pool instead of recomputing it.

vLLM loads `KvtrieConnector` by its configuration; vLLM is not patched:

```text
--kv-transfer-config '{"kv_connector": "KvtrieConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvtrie.integrations.vllm", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"gate": "model.gate.json"}}'
```

`KvtrieScheduler` (``--scheduler-cls kvtrie.integrations.vllm.KvtrieScheduler``) also reuses KV
after a gap, where vLLM's own scheduler computes everything that follows.

The scheduler's half indexes the blocks that vLLM has cached, without references, plans what follows
vLLM's own exact hit, and pins the sources until the step is built. Each worker applies the copies
of a step, plain slots, to its own tensors before the forward pass. After any error at run time,
vLLM continues as without a connector, and the error is counted. See docs/vllm.md.
"""

try:
    from kvtrie.integrations.vllm.connector import KvtrieConnector
    from kvtrie.integrations.vllm.scheduler import KvtrieScheduler
except ImportError:
    # Other versions of vLLM lack these imports; the error then names the version.
    from kvtrie.integrations.vllm import _support

    _support.check_version()
    raise

__all__ = ["KvtrieConnector", "KvtrieScheduler"]
