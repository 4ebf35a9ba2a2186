"""The files of ``kvtrie demo``: a conversation, the reader of chat files, and where the model is.

README.md in this folder explains the files. Nothing here imports torch or transformers.
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
