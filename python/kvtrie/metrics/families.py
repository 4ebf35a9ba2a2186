"""The metrics that are exported: names, types, labels, and what each says.

``docs/metrics.md`` lists them, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["prompts", "generator", "index", "tracker", "indexer", "proxy"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. A counter's samples are called ``name`` with ``_total``.

    Attributes:
        name: Its name.
        kind: Its type.
        source: What it is read from.
        text: What it says.
        labels: Labels of its own, next to those that the collector was given.
    """

    name: str
    kind: Kind
    source: Source
    text: str
    labels: tuple[str, ...] = ()


FAMILIES: Final = (
    # As vLLM's connector exports them, after `vllm:`.
    MetricFamily(
        "kvtrie_prompt_tokens",
        "counter",
        "prompts",
        "Prompt tokens by source of their KV (exact, moved, recomputed) and by kind.",
        ("reuse", "kind"),
    ),
    MetricFamily(
        "kvtrie_computed_tokens",
        "counter",
        "prompts",
        "Prompt tokens computed, by the reason and by kind.",
        ("reason", "kind"),
    ),
    MetricFamily(
        "kvtrie_tokens_exact", "counter", "prompts", "Prompt tokens copied that are exact KV."
    ),
    MetricFamily(
        "kvtrie_tokens_moved",
        "counter",
        "prompts",
        "Prompt tokens copied that are approximate KV: another context or position.",
    ),
    MetricFamily(
        "kvtrie_plans_not_cleared",
        "counter",
        "generator",
        "Plans after a kind of edit that the gate does not clear, made exact.",
    ),
    MetricFamily(
        "kvtrie_requests_in_place_only",
        "counter",
        "generator",
        "Requests admitted without copies, because there was no room next to their sources.",
    ),
    MetricFamily(
        "kvtrie_requests",
        "counter",
        "generator",
        "Requests that ended, by how: stop, length, cancelled, error.",
        ("finish_reason",),
    ),
    MetricFamily("kvtrie_requests_running", "gauge", "generator", "Requests that have blocks."),
    MetricFamily("kvtrie_requests_waiting", "gauge", "generator", "Requests that wait for blocks."),
    MetricFamily(
        "kvtrie_preemptions",
        "counter",
        "generator",
        "Times a request gave its blocks to an older one.",
    ),
    MetricFamily("kvtrie_generation_tokens", "counter", "generator", "Tokens generated."),
    MetricFamily(
        "kvtrie_forward_tokens",
        "counter",
        "generator",
        "Tokens run through the model, of prompts and answers, again after a preemption.",
    ),
    MetricFamily(
        "kvtrie_phase_seconds",
        "counter",
        "generator",
        "Time in phases of requests: plan, copy, compute, decode, insert.",
        ("phase",),
    ),
    MetricFamily(
        "kvtrie_phases", "counter", "generator", "Phases of requests that ended.", ("phase",)
    ),
    MetricFamily(
        "kvtrie_time_to_first_token_seconds",
        "histogram",
        "generator",
        "Time from the submission of a request to its first token.",
    ),
    MetricFamily(
        "kvtrie_plans_repaired",
        "counter",
        "generator",
        "Plans whose recomputed tokens were chosen as their policy asks.",
    ),
    MetricFamily(
        "kvtrie_plans_without_records",
        "counter",
        "generator",
        "Plans made again without a choice by records, because some were missing.",
    ),
    MetricFamily(
        "kvtrie_saturated_elements",
        "counter",
        "generator",
        "Elements of K and V that passes stored as another number, with kv_dtype.",
    ),
    MetricFamily("kvtrie_free_blocks", "gauge", "generator", "Blocks in the free list."),
    MetricFamily("kvtrie_pool_blocks", "gauge", "index", "Blocks of the pool."),
    MetricFamily("kvtrie_index_blocks", "gauge", "index", "Blocks that back tokens.", ("class",)),
    MetricFamily(
        "kvtrie_index_evictable_blocks", "gauge", "index", "Indexed blocks that can be evicted now."
    ),
    MetricFamily(
        "kvtrie_index_pinned_blocks", "gauge", "index", "Pinned blocks, indexed or condemned."
    ),
    MetricFamily(
        "kvtrie_index_condemned_blocks",
        "gauge",
        "index",
        "Blocks that left the index while pinned and were not taken back.",
    ),
    MetricFamily(
        "kvtrie_index_waiting_blocks", "gauge", "index", "Condemned blocks without a pin."
    ),
    MetricFamily(
        "kvtrie_index_quarantined_blocks", "gauge", "index", "Blocks that are out of use for good."
    ),
    MetricFamily(
        "kvtrie_index_dead_blocks", "gauge", "index", "Indexed blocks marked dead, evicted first."
    ),
    MetricFamily(
        "kvtrie_index_holes", "gauge", "index", "Evicted blocks with cached blocks below."
    ),
    MetricFamily("kvtrie_index_namespaces", "gauge", "index", "Namespaces that hold a block."),
    MetricFamily("kvtrie_index_nodes", "gauge", "index", "Nodes of the radix trees."),
    MetricFamily(
        "kvtrie_index_windows", "gauge", "index", "Windows by which moved runs are found."
    ),
    MetricFamily("kvtrie_index_bytes", "gauge", "index", "Memory that the index holds."),
    MetricFamily("kvtrie_index_live_plans", "gauge", "index", "Plans that are not released."),
    MetricFamily(
        "kvtrie_index_visited_nodes",
        "counter",
        "index",
        "Nodes that lookups, plans and inserts visited.",
    ),
    MetricFamily(
        "kvtrie_index_compared_bytes", "counter", "index", "Bytes of token ids that they compared."
    ),
    MetricFamily(
        "kvtrie_index_search_looks", "counter", "index", "Looks of the searches for moved runs."
    ),
    MetricFamily(
        "kvtrie_index_plans_without_scope",
        "counter",
        "index",
        "Plans without a session for which no moved run was looked for, those of reasons included.",
    ),
    MetricFamily(
        "kvtrie_index_unknown_discards",
        "counter",
        "index",
        "Ids given to discard or quarantine that were not indexed.",
    ),
    MetricFamily("kvtrie_tracker_conversations", "gauge", "tracker", "Conversations kept."),
    MetricFamily("kvtrie_tracker_histories", "gauge", "tracker", "Histories kept."),
    MetricFamily(
        "kvtrie_tracker_history_tokens", "gauge", "tracker", "Tokens of all kept histories."
    ),
    MetricFamily("kvtrie_tracker_kept", "counter", "tracker", "Histories that keep() took."),
    MetricFamily(
        "kvtrie_tracker_dropped",
        "counter",
        "tracker",
        "Histories dropped, by cause: expired, room, replaced, forgotten.",
        ("cause",),
    ),
    MetricFamily(
        "kvtrie_tracker_answers",
        "counter",
        "tracker",
        "Answers of compare() that the caller takes, by their kind.",
        ("answer",),
    ),
    MetricFamily(
        "kvtrie_tracker_unknown",
        "counter",
        "tracker",
        "Calls with a conversation that has expired or is unknown.",
        ("cause",),
    ),
    MetricFamily(
        "kvtrie_tracker_prompt_tokens",
        "counter",
        "tracker",
        "Tokens of the prompts of these answers.",
    ),
    MetricFamily(
        "kvtrie_tracker_tokens",
        "counter",
        "tracker",
        "Tokens at their front that an engine has in place.",
        ("class",),
    ),
    MetricFamily(
        "kvtrie_tracker_transfers",
        "counter",
        "tracker",
        "Times that compare() handed out kv_transfer_params.",
    ),
    MetricFamily(
        "kvtrie_tracker_splices",
        "counter",
        "tracker",
        "Prompts of splice(), by outcome.",
        ("outcome",),
    ),
    MetricFamily(
        "kvtrie_tracker_spliced_tokens",
        "counter",
        "tracker",
        "Tokens of these prompts with ids of a history.",
    ),
    MetricFamily("kvtrie_cluster_workers", "gauge", "indexer", "Workers in the index."),
    MetricFamily(
        "kvtrie_cluster_blocks", "gauge", "indexer", "Different blocks in the index, with holes."
    ),
    MetricFamily("kvtrie_cluster_entries", "gauge", "indexer", "Blocks of all workers."),
    MetricFamily("kvtrie_cluster_bytes", "gauge", "indexer", "Memory that the index holds."),
    MetricFamily(
        "kvtrie_cluster_worker_blocks",
        "gauge",
        "indexer",
        "Blocks of a worker.",
        ("worker",),
    ),
    MetricFamily(
        "kvtrie_cluster_worker_events",
        "counter",
        "indexer",
        "What became of a worker's events since it was added.",
        ("worker", "event"),
    ),
    MetricFamily(
        "kvtrie_cluster_subscription_state",
        "gauge",
        "indexer",
        "1 for the state that a worker's subscription is in, else 0.",
        ("worker", "state"),
    ),
    MetricFamily(
        "kvtrie_cluster_subscription_events",
        "counter",
        "indexer",
        "What a worker's subscription has met.",
        ("worker", "event"),
    ),
    MetricFamily(
        "kvtrie_cluster_replica_state",
        "gauge",
        "indexer",
        "1 for the state that a worker is in at a replica, else 0.",
        ("worker", "state"),
    ),
    MetricFamily(
        "kvtrie_cluster_replica_events",
        "counter",
        "indexer",
        "What a replica has met in the stream of bridges.",
        ("event",),
    ),
    MetricFamily(
        "kvtrie_proxy_requests",
        "counter",
        "proxy",
        "What became of the proxy's requests; one may count more than once.",
        ("outcome",),
    ),
)
"""All metrics, in the order in which they are exported."""
