"""Figures that clear a policy."""

from kvtrie import gates

GOOD = gates.Figures(
    "one turn",
    positions=900,
    kl_mean=0.01,
    kl_p99=0.2,
    top1=0.99,
    questions=500,
    right_full=495,
    lost=0,
    gained=0,
    exact=700,
    moved=200,
    computed=100,
)
