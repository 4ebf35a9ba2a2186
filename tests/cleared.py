"""Figures that clear a kind of edit, and gates of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvtrie
from kvtrie import gates

CASES = 60
POLICY = kvtrie.ReusePolicy(min_run=16)

FLOOR = gates.Figures(
    cases=CASES,
    positions=20 * CASES,
    kl_mean=0.0005,
    kl_p99=0.01,
    top1=0.99,
    questions=CASES,
    right_full=CASES,
    lost=0,
    gained=0,
    exact=700,
    moved=0,
    computed=300,
)


def figures(excess: float = 0.002, drop: float = 0.001, lost: int = 0) -> gates.Figures:
    """Figures of a policy on the replies of ``FLOOR``, equal in all conversations but the lost."""
    return replace(
        FLOOR,
        kl_mean=FLOOR.kl_mean + excess,
        kl_p99=FLOOR.kl_p99 + 10 * excess,
        top1=FLOOR.top1 - drop,
        lost=lost,
        exact=100,
        moved=800,
        computed=100,
        kl_excess=CASES * (excess,),
        top1_drop=CASES * (drop,),
        losses=(*(lost * (1.0,)), *((CASES - lost) * (0.0,))),
    )


GOOD = figures()
BAD = figures(excess=0.1, drop=0.1, lost=30)
DETECTED = gates.Control("drop", figures(excess=2.0, drop=0.5, lost=50))
UNDETECTED = gates.Control("unrotated", GOOD)


def kind(
    name: str = "one cut",
    box: gates.Box | None = None,
    own: gates.Figures = GOOD,
    controls: tuple[gates.Control, ...] = (DETECTED,),
    floor: gates.Figures = FLOOR,
) -> gates.Kind:
    """A kind, cleared unless something else is given."""
    return gates.Kind(name, gates.Box() if box is None else box, own, floor, controls)


def gate(*kinds: gates.Kind, policy: kvtrie.ReusePolicy = POLICY, **changes: Any) -> gates.Gate:
    """A gate of one policy with these kinds; by default one that is cleared, for every plan."""
    given: dict[str, Any] = {
        "model": "m@1",
        "kv_dtype": "bfloat16",
        "rope": "default",
        "thresholds": gates.Thresholds(),
        "measured": (gates.Measured("rotated", policy, kinds or (kind(),)),),
    }
    return gates.Gate(**{**given, **changes})
