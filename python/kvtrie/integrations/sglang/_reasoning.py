"""Dead reasoning: tokens that no later prompt asks for, because the chat template drops them.

A turn's reasoning is dead when the turn is answered, and its pages are evicted first. Where nothing
is moved, so is what follows it: the next prompt has these tokens after others. Inside a tool loop
the reasoning stays, as templates keep it until the next user message.

It costs one pass over the tokens of a request at its end, as moved runs and a store cost one over
those of a prompt, which is bounded (`kvtrie.integrations._sections`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations._sections import read_sections
from kvtrie.tags import Tagger, TurnPolicy
from kvtrie.tags.openings import Openings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.server_args import ServerArgs

    from kvtrie.tags import Stream

_LOG = logging.getLogger("sglang.kvtrie")

DROPPED_AT: Final = {"user": "next user message", "final": "final answer", "never": "never"}
"""When a chat template drops reasoning, by the boundary of its format."""


def tagger_of(args: ServerArgs) -> Tagger | None:
    """The chat format of the model that SGLang serves; None if it is not known, and all is kept."""
    if args.skip_tokenizer_init:
        return None
    try:
        tokenizer, arguments = _rendering(args)
        tagger = Tagger.from_tokenizer(tokenizer, **arguments)
    except Exception as error:  # without it the cache is what it was
        _LOG.info("kvtrie: reasoning is not told apart: %s", error)
        return None
    _LOG.info("kvtrie: reasoning dropped at: %s", DROPPED_AT[tagger.format.boundary])
    return tagger


def openings_of(args: ServerArgs) -> Openings | None:
    """How messages begin in the served chat template; None if nothing says it."""
    why, found = "the chat template does not show it", None
    if args.skip_tokenizer_init:
        why = "there is no tokenizer"
    else:
        try:
            tokenizer, arguments = _rendering(args)
            found = Openings.of(tokenizer, **arguments)
        except Exception as error:  # the cache moves KV without it
            why = str(error)
    if found is None:
        _LOG.warning(
            "kvtrie: where messages begin is not known, so moved runs may supply the last one: %s",
            why,
        )
    return found


def _rendering(args: ServerArgs) -> tuple[Any, dict[str, Any]]:
    """The tokenizer that renders prompts, and the arguments of its method."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer  # noqa: PLC0415 - slow

    tokenizer = get_tokenizer(
        args.tokenizer_path,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
    )
    if args.chat_template is None:
        return tokenizer, {}
    with open(args.chat_template, encoding="utf-8") as file:  # noqa: PTH123 - SGLang has a str
        return tokenizer, {"chat_template": file.read()}


class Reasoning:
    """Finds dead tokens."""

    def __init__(self, tagger: Tagger) -> None:
        self._tagger = tagger
        self._policy = TurnPolicy()

    def read(self, ids: NDArray[np.integer], *, complete: bool) -> Stream | None:
        """The sections of a request that has ended; None if it has too many delimiters to read.

        Args:
            ids: Prompt and reply.
            complete: Whether the model stopped by itself.
        """
        stream = read_sections(self._tagger, ids)
        if stream is not None:
            stream.finish(complete=complete)
        return stream

    def keeps(self, stream: Stream) -> bool:
        """Whether the template keeps reasoning: the prompt has some of earlier turns."""
        earlier = (section for turn in stream.turns[:-1] for section in turn.sections)
        return any(section.kind == "reasoning" for section in earlier)

    def dead(self, stream: Stream) -> list[tuple[int, int]]:
        """The dead reasoning of a request that has ended, in order."""
        if self.keeps(stream):
            return []
        return list(self._policy.decide(stream).evict_first)
