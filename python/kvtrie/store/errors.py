"""What goes wrong with a store, each with a reason."""

from __future__ import annotations

from kvtrie._core import KvTrieError


class StoreRefused(KvTrieError):  # noqa: N818 - a refusal is one
    """A store cannot be used. It is raised at the start, by `SpanStore`.

    Attributes:
        reason: ``"version"``, ``"key"``, ``"encryption"``, ``"namespace"``, ``"geometry"``,
            ``"malformed"``: what is there is of another one, or cannot be read;
            ``"unreachable"``: the backend does not answer.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BackendError(KvTrieError):
    """A backend did not do what it was asked for.

    Attributes:
        reason: ``"unreachable"``: it does not answer, or fails; ``"full"``: it has no room;
            ``"too_large"``: a value is larger than it takes.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
