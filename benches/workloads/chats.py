"""A warm chat: every turn appends to what the turn before has cached."""

from workloads.documents import Tokens, document

_CHAT_SEEDS = 1 << 48


class Chat:
    """One conversation: a history of `history` tokens, then turns of `turn` tokens.

    Example:
        >>> chat = Chat(0, history=64, turn=16)
        >>> len(chat.after(0)), len(chat.after(2)), len(chat.new(1))
        (64, 96, 16)
    """

    def __init__(self, number: int, history: int, turn: int) -> None:
        self.history = history
        self.turn = turn
        self._seed = _CHAT_SEEDS + number

    def after(self, turns: int) -> Tokens:
        return document(self._seed, self.history + turns * self.turn)

    def new(self, turn: int) -> Tokens:
        return document(self._seed, self.turn, start=self.history + turn * self.turn)
