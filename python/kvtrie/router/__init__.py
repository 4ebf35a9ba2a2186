"""How much of the next prompt an engine still has: what a router remembers of conversations.

It needs numpy alone. ``nixl_params.py`` has vLLM's parameters.
"""

from kvtrie.router.answer import AnswerKind, TurnAnswer
from kvtrie.router.splicing import PromptSplicer, SplicedPrompt, SpliceOutcome
from kvtrie.router.stats import TrackerStats
from kvtrie.router.tracker import TurnTracker

__all__ = [
    "AnswerKind",
    "PromptSplicer",
    "SpliceOutcome",
    "SplicedPrompt",
    "TrackerStats",
    "TurnAnswer",
    "TurnTracker",
]
