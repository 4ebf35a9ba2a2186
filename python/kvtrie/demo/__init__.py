"""The files of ``kvtrie demo`` (see README.md here), and the reader of chat files.

Nothing here imports torch or transformers.
"""

from kvtrie.demo.conversations import Conversation, ReplayTurn, answer_of, load_conversations
from kvtrie.demo.paths import conversation_path, model_path

__all__ = [
    "Conversation",
    "ReplayTurn",
    "answer_of",
    "conversation_path",
    "load_conversations",
    "model_path",
]
