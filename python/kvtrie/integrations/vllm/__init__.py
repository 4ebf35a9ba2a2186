"""kvtrie inside vLLM: moves KV that is already in vLLM's pool instead of recomputing it.

vLLM loads `KvtrieConnector`, and `KvtrieScheduler` for reuse after a gap, by its configuration
(``docs/vllm.md``). The scheduler's half indexes the blocks that vLLM has cached, without
references, plans what follows vLLM's own exact hit, and pins the sources until the step is built.
Each worker applies the copies of a step to its own tensors before the forward pass. After any error
at run time, vLLM continues as without a connector, and the error is counted.

Importing this package does not import vLLM, which takes seconds: its classes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.integrations.vllm import _command, _version

if TYPE_CHECKING:
    from kvtrie.integrations.vllm.connector import KvtrieConnector
    from kvtrie.integrations.vllm.scheduler import KvtrieScheduler

__all__ = ["KvtrieConnector", "KvtrieScheduler"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        from kvtrie.integrations.vllm.connector import KvtrieConnector  # noqa: PLC0415
        from kvtrie.integrations.vllm.scheduler import KvtrieScheduler  # noqa: PLC0415
    except ImportError as error:
        # Another version of vLLM may lack what is imported from it.
        if not (error.name or "").startswith("vllm"):
            raise
        _version.lacks(error)
    if name == "KvtrieConnector":
        _check_command()
    return {"KvtrieConnector": KvtrieConnector, "KvtrieScheduler": KvtrieScheduler}[name]


def _check_command() -> None:
    """Refuse this vLLM, and what its server was started with, before it loads weights.

    vLLM looks the connector up when it reads its configuration, with CUDA graphs and without.
    """
    from kvtrie.integrations.vllm import _check, _model, _others  # noqa: PLC0415 - numpy and more
    from kvtrie.integrations.vllm._settings import Settings  # noqa: PLC0415 - likewise
    from kvtrie.integrations.vllm._vllm import probe  # noqa: PLC0415 - imports vLLM
    from kvtrie.integrations.vllm.connector import check_early  # noqa: PLC0415 - likewise

    probe()
    _others.check_command()
    for extra in _command.settings(_others.MINE, __name__):
        check_early(extra)
        settings = Settings.read(extra)
        _check.check_command(settings)
        _model.check_command(settings)
