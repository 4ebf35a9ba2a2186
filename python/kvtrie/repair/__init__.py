"""Chooses the tokens of moved runs that are worth computing (rule P20); see ``docs/repair.md``.

A chooser sees what a plan moves and returns ranges for ``ReusePlan.recompute``. ``Fronts`` and
``Ngrams`` need numpy alone. ``kvtrie.repair.probe`` scores with one layer of a model, and
``kvtrie.repair.records`` keeps what it compares with; both need torch.
"""

from kvtrie.repair.choice import Adaptive, Chooser, Fronts, Moved, Probed, Scored
from kvtrie.repair.ngrams import Ngrams

__all__ = ["Adaptive", "Chooser", "Fronts", "Moved", "Ngrams", "Probed", "Scored"]
