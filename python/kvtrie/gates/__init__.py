"""Gate files of ``kvtrie calibrate``: which edits a model's KV may be reused after, by policy.

A gate file names one model, and says for each policy and each kind of edit what was measured and
whether that is within the thresholds. A kind is a box in terms of what an edit did to the context
of moved KV, so each live plan is of one measured kind, or of none. Engines plan exactly where the
gate does not clear the plan's kind. What is cleared is still approximate. ``docs/calibrate.md`` has
the rule.

This package needs neither torch nor numpy.
"""

from __future__ import annotations

from kvtrie.gates._errors import GateError, GateMismatchError
from kvtrie.gates.boxes import Box, Range, Terms, terms
from kvtrie.gates.decision import Decision, Judged, Ladder, laxest
from kvtrie.gates.figures import Figures, Thresholds
from kvtrie.gates.gate import MAX_BYTES, Gate, checked_target, read
from kvtrie.gates.statistics import paired_interval, questions_needed
from kvtrie.gates.verdict import (
    CONTROLS,
    LEAST_ANSWERS,
    LEAST_RIGHT,
    Control,
    Kind,
    Measured,
    Verdict,
    loss_bound,
)

__all__ = [
    "CONTROLS",
    "LEAST_ANSWERS",
    "LEAST_RIGHT",
    "MAX_BYTES",
    "Box",
    "Control",
    "Decision",
    "Figures",
    "Gate",
    "GateError",
    "GateMismatchError",
    "Judged",
    "Kind",
    "Ladder",
    "Measured",
    "Range",
    "Terms",
    "Thresholds",
    "Verdict",
    "checked_target",
    "laxest",
    "loss_bound",
    "paired_interval",
    "questions_needed",
    "read",
    "terms",
]
