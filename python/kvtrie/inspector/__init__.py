"""Shows what an index holds, what a plan reuses and what recorded requests found, as one page.

`tree_document`, `plan_document` and `traffic_document` make the data of a page, ``page.html`` and
the scripts next to it show them in a browser. The page is one file, asks no host, and draws only
what is visible, so that 100,000 edges stay fluid.

**What it promises.** What a page shows is what the snapshot, the plan or the log says: the edges of
a snapshot are read from its bytes (`read_snapshot`), the plan is one of a real index. KV that is
approximate is drawn with a pattern and named so; a bar that stands for many blocks is drawn exact
only if all of them are. Where a page leaves something out, it says how much.

**What is secret.** A page of a snapshot or of prompts has their token ids, and their text with a
tokenizer: keep it like the prompts. Salts, seeds and names of sessions are not in it; namespaces
with the same salt get the same number.

**What it costs.** About 10 us and 300 bytes per edge, and 2 bytes per token.

This package needs numpy, and no engine.
"""

from __future__ import annotations

from kvtrie.inspector.pack import packed, packed_json, pieces_of
from kvtrie.inspector.plan import PlanSource, plan_document, sources_in
from kvtrie.inspector.snapshot import MAGIC, SnapshotEdge, SnapshotTrees, read_snapshot
from kvtrie.inspector.traffic import traffic_document
from kvtrie.inspector.tree import PageTree, tree_document

__all__ = [
    "MAGIC",
    "PageTree",
    "PlanSource",
    "SnapshotEdge",
    "SnapshotTrees",
    "packed",
    "packed_json",
    "pieces_of",
    "plan_document",
    "read_snapshot",
    "sources_in",
    "traffic_document",
    "tree_document",
]
