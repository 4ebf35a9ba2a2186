"""What a cache would find in recorded traffic, over sizes of its pool.

A trace lists prompts by their blocks. Each policy serves the requests in the order of the file, one
after the other, and counts the prompt tokens that it finds:

* ``prefix``: prefix reuse that evicts the least recently used block, as vLLM does;
* ``dead first``: the same, but blocks of reasoning that the template drops are evicted first. Only
  for traces that mark reasoning;
* ``kvtrie``: kvtrie's own index: exact KV, and moved runs where the trace shows tokens;
* ``optimum``: the block whose next use is furthest is evicted (Belady), which needs the future.

A pool without limits is next to them. The figures are of the trace and its blocks: no time, no
concurrency and no replies are simulated, except those that a trace or an overlay lists. Prefix
reuse takes one pass for all sizes, the optimum one short pass per size, and the index about 10 ns
per block and size, or 5 to 40 ns per token where the trace shows tokens.

A trace is a file of a known `TraceFormat`; `FORMATS` is where another one is added.
"""

from __future__ import annotations

from kvtrie.replay.formats import FORMATS, TraceFormat, read_trace
from kvtrie.replay.overlay import OVERLAYS, Overlay
from kvtrie.replay.report import PoolRow, ReuseFigures, TrafficReport, default_sizes, replay
from kvtrie.replay.source import TraceFile
from kvtrie.replay.trace import (
    LogGaps,
    Trace,
    TraceError,
    TraceRequest,
    chain_keys,
    chained,
    from_keys,
)

__all__ = [
    "FORMATS",
    "OVERLAYS",
    "LogGaps",
    "Overlay",
    "PoolRow",
    "ReuseFigures",
    "Trace",
    "TraceError",
    "TraceFile",
    "TraceFormat",
    "TraceRequest",
    "TrafficReport",
    "chain_keys",
    "chained",
    "default_sizes",
    "from_keys",
    "read_trace",
    "replay",
]
