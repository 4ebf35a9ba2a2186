"""kvtrie inside vLLM: moves KV that is already in vLLM's pool instead of recomputing it.

vLLM loads `KvtrieConnector`, and `KvtrieScheduler` for reuse after a gap, by its configuration
(``docs/vllm.md``). The scheduler's half indexes the blocks that vLLM has cached, without
references, plans what follows vLLM's own exact hit, and pins the sources until the step is built.
Each worker applies the copies of a step to its own tensors before the forward pass. After any error
at run time, vLLM continues as without a connector, and the error is counted.
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
