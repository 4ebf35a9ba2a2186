"""Writes the Grafana dashboard, dashboards/kvtrie.json.

    python tools/dashboard.py            write it
    python tools/dashboard.py --check    say whether it is as this would write it

The queries are below. Grafana's own variable for intervals is in none of them, so that Prometheus
alone can run each query: a test does.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "dashboards" / "kvtrie.json"
WINDOW = "5m"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


def selected(metric: str, where: str = "") -> str:
    """A selector of one metric, with labels as they stand between braces.

    Prometheus 2 asks for a format in which prometheus_client writes an underscore for the colon of
    vLLM's names, so both are selected.
    """
    if metric.startswith("vllm:"):
        name = f'__name__=~"vllm[:_]{metric.removeprefix("vllm:")}"'
        return f"{{{name}, {where}}}" if where else f"{{{name}}}"
    return f"{metric}{{{where}}}" if where else metric


def rate(metric: str, by: str = "", where: str = "") -> str:
    inner = f"rate({selected(metric, where)}[{WINDOW}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def share(part: str, whole: str) -> str:
    """A share that is 0, not missing, while nothing is counted."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def quantile(name: str, q: float) -> str:
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le')})"


def first_token(name: str) -> Panel:
    return Panel(
        "Time to first token",
        "From the arrival of a request to its first token.",
        "s",
        tuple(Query(quantile(name, q), f"p{q * 100:.0f}") for q in (0.5, 0.95)),
    )


def prompt_panels(prefix: str) -> list[Panel]:
    prompt, computed = f"{prefix}prompt_tokens_total", f"{prefix}computed_tokens_total"
    return [
        Panel(
            "Prompt tokens by source",
            "exact: reused under the same prefix. moved: reused approximately. recomputed: run "
            "through the model.",
            "short",
            (Query(rate(prompt, "reuse"), "{{reuse}}"),),
            stacked=True,
        ),
        Panel(
            "Share of prompt tokens reused",
            "Exact and approximate KV are apart.",
            "percentunit",
            tuple(
                Query(
                    share(rate(prompt, where=f'reuse="{how}"'), rate(prompt)),
                    how,
                )
                for how in ("exact", "moved")
            ),
        ),
        Panel(
            "Why tokens are computed",
            "One reason per computed token; the documentation has what each says.",
            "short",
            (Query(rate(computed, "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Kinds of computed tokens",
            "By the chat format; other: between messages, or of an unknown format.",
            "short",
            (Query(rate(computed, "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens copied",
            "Copied to the blocks of a request, not used in place.",
            "short",
            (
                Query(rate(f"{prefix}tokens_exact_total"), "exact"),
                Query(rate(f"{prefix}tokens_moved_total"), "moved"),
            ),
        ),
    ]


def vllm_panels() -> list[Panel]:
    ours = "vllm:kvtrie_"
    return [
        first_token("vllm:time_to_first_token_seconds"),
        Panel(
            "vLLM: prompt tokens by source",
            "local_compute is what is computed; copies of kvtrie are external.",
            "short",
            (Query(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            "vLLM: prefix cache hit rate",
            "vLLM's own cache, and what the connector found after it.",
            "percentunit",
            tuple(
                Query(
                    share(rate(f"vllm:{name}_hits_total"), rate(f"vllm:{name}_queries_total")),
                    legend,
                )
                for name, legend in (
                    ("prefix_cache", "vLLM"),
                    ("external_prefix_cache", "connector"),
                )
            ),
        ),
        Panel(
            "vLLM: KV cache usage and requests",
            "Usage is a share of the pool.",
            "short",
            (
                Query(f"max({selected('vllm:kv_cache_usage_perc')})", "usage"),
                Query(f"sum({selected('vllm:num_requests_running')})", "running"),
                Query(f"sum({selected('vllm:num_requests_waiting')})", "waiting"),
            ),
        ),
        *prompt_panels(ours),
        Panel(
            "Dead reasoning",
            "Blocks that vLLM reuses first, and those that exact mode kept for longer.",
            "short",
            (
                Query(rate(f"{ours}blocks_dead_total"), "dead"),
                Query(rate(f"{ours}blocks_kept_total"), "kept"),
            ),
        ),
        Panel(
            "Shadow mode: what moving would do",
            "Prompt tokens, planned and not moved.",
            "short",
            tuple(
                Query(rate(f"{ours}tokens_would_{name}_total"), legend)
                for name, legend in (
                    ("be_exact", "exact"),
                    ("move", "moved"),
                    ("compute", "computed"),
                    ("follow_gaps", "of these, need KvtrieScheduler"),
                )
            ),
        ),
        Panel(
            "To look into",
            "Each should be 0, or rare: production.md says what to do.",
            "short",
            tuple(
                Query(f"sum(increase({selected(f'{ours}{name}_total')}[1h]))", name)
                for name in (
                    "errors",
                    "copies_failed",
                    "requests_refused",
                    "requests_unsupported",
                    "requests_uncalibrated",
                    "requests_other_template",
                    "requests_untagged",
                    "requests_without_room",
                    "plans_not_cleared",
                    "plans_would_not_clear",
                    "plans_stale",
                    "records_dropped",
                )
            ),
        ),
        Panel(
            "Recording",
            "Requests written to the log.",
            "short",
            (Query(rate(f"{ours}records_written_total"), "written"),),
        ),
    ]


def generator_panels() -> list[Panel]:
    return [
        first_token("kvtrie_time_to_first_token_seconds"),
        *prompt_panels("kvtrie_"),
        Panel(
            "Requests and free blocks",
            "Requests that run and wait; blocks in the free list.",
            "short",
            (
                Query("sum(kvtrie_requests_running)", "running"),
                Query("sum(kvtrie_requests_waiting)", "waiting"),
                Query("sum(kvtrie_free_blocks)", "free blocks"),
            ),
        ),
        Panel(
            "Ends of requests and preemptions",
            "By finish_reason.",
            "short",
            (
                Query(rate("kvtrie_requests_total", "finish_reason"), "{{finish_reason}}"),
                Query(rate("kvtrie_preemptions_total"), "preempted"),
            ),
        ),
        Panel(
            "Time in phases",
            "Seconds per second.",
            "percentunit",
            (Query(rate("kvtrie_phase_seconds_total", "phase"), "{{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens through the model",
            "All passes, and the tokens of answers.",
            "short",
            (
                Query(rate("kvtrie_forward_tokens_total"), "run"),
                Query(rate("kvtrie_generation_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "To look into, requests",
            "Each should be 0, or rare.",
            "short",
            tuple(
                Query(f"sum(increase(kvtrie_{name}_total[1h]))", name)
                for name in (
                    "plans_not_cleared",
                    "plans_without_records",
                    "requests_in_place_only",
                )
            ),
        ),
        Panel(
            "K and V stored as another number",
            "Elements beyond the largest code of kv_dtype. Should be 0, or rare.",
            "short",
            (Query(rate("kvtrie_saturated_elements_total"), "saturated"),),
        ),
    ]


def index_panels() -> list[Panel]:
    return [
        Panel(
            "Blocks of the pool",
            "Indexed ones by class; what is neither indexed nor condemned is free or held.",
            "short",
            (
                Query("sum by (class) (kvtrie_index_blocks)", "{{class}}"),
                Query("sum(kvtrie_index_condemned_blocks)", "condemned"),
                Query("sum(kvtrie_pool_blocks)", "pool"),
            ),
        ),
        Panel(
            "State of indexed blocks",
            "Pinned ones are in use by plans; dead ones leave first.",
            "short",
            tuple(
                Query(f"sum(kvtrie_index_{name}_blocks)", name)
                for name in ("evictable", "pinned", "dead", "waiting", "quarantined")
            ),
        ),
        Panel(
            "Memory of the index",
            "Without KV.",
            "bytes",
            (Query("sum(kvtrie_index_bytes)", "bytes"),),
        ),
        Panel(
            "Shape of the index",
            "Nodes, holes, windows, namespaces, and plans that are not released.",
            "short",
            tuple(
                Query(f"sum(kvtrie_index_{name})", name)
                for name in ("nodes", "holes", "windows", "namespaces", "live_plans")
            ),
        ),
        Panel(
            "Work of the index",
            "Of lookups, plans, inserts and searches for moved runs.",
            "short",
            (
                Query(rate("kvtrie_index_visited_nodes_total"), "nodes visited"),
                Query(rate("kvtrie_index_search_looks_total"), "looks"),
            ),
        ),
        Panel(
            "Tokens compared",
            "Bytes of token ids.",
            "Bps",
            (Query(rate("kvtrie_index_compared_bytes_total"), "compared"),),
        ),
        Panel(
            "To look into, index",
            "Plans without a session find no moved runs; unknown ids are a bug of the engine.",
            "short",
            tuple(
                Query(f"sum(increase(kvtrie_index_{name}_total[1h]))", name)
                for name in ("plans_without_scope", "unknown_discards")
            ),
        ),
    ]


def cluster_panels() -> tuple[Panel, ...]:
    """A router's index, what feeds it, and the proxy."""
    name = "kvtrie_cluster_"
    return (
        Panel(
            "Workers by state",
            "Workers whose events are all known (live), and others, whose scores are uncertain; as"
            " subscriptions and as replicas see them.",
            "short",
            (
                Query(f"sum by (state) ({name}subscription_state)", "{{state}}"),
                Query(f"sum by (state) ({name}replica_state)", "{{state}}, replica"),
            ),
            stacked=True,
        ),
        Panel(
            "Blocks of workers",
            "Blocks that each worker holds, as its events say.",
            "short",
            (Query(f"sum by (worker) ({name}worker_blocks)", "{{worker}}"),),
        ),
        Panel(
            "Size of the cluster's index",
            "Workers, different blocks, and blocks of all workers.",
            "short",
            tuple(Query(f"sum({name}{one})", one) for one in ("workers", "blocks", "entries")),
        ),
        Panel(
            "Memory of the cluster's index",
            "Bytes that it holds.",
            "bytes",
            (Query(f"sum({name}bytes)", "bytes"),),
        ),
        Panel(
            "Events of workers",
            "Blocks stored and removed, batches, and what was refused.",
            "short",
            (Query(rate(f"{name}worker_events_total", "event"), "{{event}}"),),
        ),
        Panel(
            "What subscriptions and replicas met",
            "Batches, and what was lost, replayed or replaced by a snapshot.",
            "short",
            (
                Query(rate(f"{name}subscription_events_total", "event"), "{{event}}"),
                Query(rate(f"{name}replica_events_total", "event"), "{{event}}, replica"),
            ),
        ),
        Panel(
            "Requests of the proxy",
            "What became of them: routed, passed without a worker and why, refused.",
            "reqps",
            (Query(rate("kvtrie_proxy_requests_total", "outcome"), "{{outcome}}"),),
        ),
    )


def tracker_panels() -> list[Panel]:
    tokens, prompt = "kvtrie_tracker_tokens_total", "kvtrie_tracker_prompt_tokens_total"
    return [
        Panel(
            "Answers",
            "How prompts relate to what is kept.",
            "short",
            (Query(rate("kvtrie_tracker_answers_total", "answer"), "{{answer}}"),),
            stacked=True,
        ),
        Panel(
            "Share of prompt tokens that an engine has in place",
            "Exact and approximate KV are apart.",
            "percentunit",
            tuple(
                Query(share(rate(tokens, where=f'class="{how}"'), rate(prompt)), how)
                for how in ("exact", "approximate")
            ),
        ),
        Panel(
            "Histories",
            "What is kept.",
            "short",
            (
                Query("sum(kvtrie_tracker_histories)", "histories"),
                Query("sum(kvtrie_tracker_conversations)", "conversations"),
                Query("sum(kvtrie_tracker_history_tokens)", "tokens"),
            ),
        ),
        Panel(
            "Histories kept and dropped",
            "room: to keep the limits; a high rate asks for larger ones.",
            "short",
            (
                Query(rate("kvtrie_tracker_kept_total"), "kept"),
                Query(rate("kvtrie_tracker_dropped_total", "cause"), "{{cause}}"),
            ),
        ),
        Panel(
            "Unknown conversations and transfers",
            "Calls that named a conversation that is gone, and parameters that were handed out.",
            "short",
            (
                Query(rate("kvtrie_tracker_unknown_total", "cause"), "{{cause}}"),
                Query(rate("kvtrie_tracker_transfers_total"), "transfers"),
            ),
        ),
        Panel(
            "Spliced prompts",
            "Prompts that were encoded with ids of a history, by outcome, and these ids.",
            "short",
            (
                Query(rate("kvtrie_tracker_splices_total", "outcome"), "{{outcome}}"),
                Query(rate("kvtrie_tracker_spliced_tokens_total"), "tokens"),
            ),
        ),
    ]


ROWS = (
    ("vLLM", vllm_panels()),
    ("Embedded engine, or your own", generator_panels()),
    ("Index", index_panels()),
    ("Router", tracker_panels()),
    ("Index of many workers", cluster_panels()),
)


def panel(one: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 25 if one.stacked else 0, "lineWidth": 1}
    custom["stacking"] = {"mode": "normal" if one.stacked else "none"}
    return {
        "id": number,
        "type": "timeseries",
        "title": one.title,
        "description": one.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0, "custom": custom}},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for at, query in enumerate(one.queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for at, one in enumerate(row):
            panels.append(panel(one, len(panels) + 1, at % 3 * 8, y + at // 3 * 8))
        y += -(-len(row) // 3) * 8
    return {
        "title": "kvtrie",
        "uid": "kvtrie",
        "description": "KV-cache reuse: vLLM with kvtrie's connector, and engines and routers.",
        "tags": ["kvtrie", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = json.dumps(dashboard(), indent=1) + "\n"
    if options.check:
        if OUT.read_text(encoding="utf-8") != text:
            print("dashboard: run python tools/dashboard.py", file=sys.stderr)
            return 1
        return 0
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
