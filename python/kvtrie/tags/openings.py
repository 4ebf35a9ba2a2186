"""Where the last message of a user or a tool begins, in chat templates that no preset reads.

A plan needs no more of a template: moved runs supply no token of that message (rule P18).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvtrie.tags.probe import find_openings
from kvtrie.tags.tagger import Tagger

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Openings:
    """The token ids that messages of users and of tools begin with.

    Attributes:
        ids: At least one sequence; each begins with a special token.
    """

    ids: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tokenizer: object, **template_arguments: object) -> Self | None:
        """Those of a tokenizer's own chat template, found by rendering it.

        Args:
            tokenizer: As for `Tagger.from_tokenizer`.
            **template_arguments: Likewise.

        Returns:
            None if there is no chat template, or a user's messages do not begin with a special
            token. Those of tools are left out if they do not.
        """
        found = find_openings(tokenizer, template_arguments)
        return cls(found) if found else None

    def last(self, ids: NDArray[np.integer[Any]]) -> int | None:
        """Where the last such message begins; None if there is none.

        It costs a few comparisons of all tokens.

        Args:
            ids: The tokens of a prompt.
        """
        return max(
            (int(at[-1]) for at in (_places(ids, one) for one in self.ids) if len(at)), default=None
        )


def _places(ids: NDArray[np.integer[Any]], wanted: tuple[int, ...]) -> NDArray[np.int64]:
    at = np.flatnonzero(ids[: max(0, len(ids) - len(wanted) + 1)] == wanted[0])
    for more, token in enumerate(wanted[1:], start=1):
        at = at[ids[at + more] == token]
    return at


class LastMessage:
    """Where the last message of a prompt begins, by a tokenizer's own chat template.

    By the format, if a preset reads the template, else by its openings.

    Args:
        tokenizer: As for `Tagger.from_tokenizer`; if nothing is known of it, nothing is found.
        **template_arguments: Likewise.
    """

    def __init__(self, tokenizer: Any, **template_arguments: object) -> None:  # noqa: ANN401 - duck-typed
        self._tagger: Tagger | None = None
        self._openings: Openings | None = None
        try:
            self._tagger = Tagger.from_tokenizer(tokenizer, **template_arguments)
        except (TypeError, ValueError):
            self._openings = Openings.of(tokenizer, **template_arguments)

    def __call__(self, ids: NDArray[np.integer[Any]]) -> int | None:
        """Where the last message of a user or a tool begins; None if there is none, or no way.

        Args:
            ids: The tokens of a prompt.
        """
        if self._tagger is not None:
            stream = self._tagger.stream()
            stream.feed(ids)
            return stream.moved_end
        return None if self._openings is None else self._openings.last(ids)
