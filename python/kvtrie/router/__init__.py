"""How much of the next prompt an engine still has: what a router remembers of conversations.

`TurnTracker` keeps what a decode engine returned: the ids of prompt and answer, how far they are
computed, and the handles by which their KV can be fetched. Given the next prompt, it says which
tokens are the same under the same prefix, which moved, or what to send instead. It holds no KV,
talks to no engine, and needs numpy alone. ``nixl_params.py`` has vLLM's parameters.
"""

from kvtrie.router.answer import AnswerKind, TurnAnswer
from kvtrie.router.tracker import TurnTracker

__all__ = ["AnswerKind", "TurnAnswer", "TurnTracker"]
