"""Conversations that are short enough for models with random weights."""

from __future__ import annotations

from real import conversations
from real.recorded import Passage

SIZE = conversations.Size("tiny", 5, 1, 7)
PASSAGES = [
    Passage(
        f"Text {number} has a few words. It says what it says. It is short. Number {number} ends.",
        f"It is text {number}.",
        f"The user shows text {number}.",
    )
    for number in range(40)
]
