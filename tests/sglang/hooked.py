"""``python -m tests.sglang.hooked``: whether kvtrie has hooked SGLang, as its plug-ins load."""

from __future__ import annotations

import sys

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.plugins import load_plugins

if __name__ == "__main__":
    load_plugins()
    is_hooked = hasattr(TpModelWorker.forward_batch_generation, "__wrapped__")
    sys.stdout.write(f"{str(is_hooked).lower()}\n")
    sys.stdout.flush()
