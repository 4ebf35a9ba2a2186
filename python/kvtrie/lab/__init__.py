"""What a chat template does to the cache: turn by turn, what is found, and where it ends.

Conversations are rendered with a tokenizer's chat template as a client would send them, request
after request. After each request the prompt and the reply are cached, and the next prompt is looked
up in a real index. So the answer says what prefix caching finds, what kvtrie would move, and which
token differs first. No model runs: a tokenizer is enough.
"""

from __future__ import annotations

from kvtrie.lab.chats import BUILT_IN, Chat, ClientRequest, from_conversation
from kvtrie.lab.measure import Divergence, LookedUp, ReplayedChat, measure
from kvtrie.lab.report import Row, Saving, TemplateReport, study
from kvtrie.lab.template import Rendered, Template, TemplateError

__all__ = [
    "BUILT_IN",
    "Chat",
    "ClientRequest",
    "Divergence",
    "LookedUp",
    "Rendered",
    "ReplayedChat",
    "Row",
    "Saving",
    "Template",
    "TemplateError",
    "TemplateReport",
    "from_conversation",
    "measure",
    "study",
]
