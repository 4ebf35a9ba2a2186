"""The files of ``kvtrie demo``: a small model, a conversation, and the reader of chat files.

This repository trains the model in ``model/`` (``tools/train_demo_model.py``); README.md in this
folder explains the files. Nothing here imports torch or transformers.
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
