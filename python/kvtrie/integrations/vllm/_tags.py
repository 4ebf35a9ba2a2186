"""The kinds of requests' tokens, by the model's chat format."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._sections import read_on
from kvtrie.integrations.vllm import _formats
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.integrations.vllm._vllm import ReasoningParserManager, cached_tokenizer_from_config
from kvtrie.tags import PRESETS, Tagger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from vllm.config import VllmConfig

    from kvtrie._core import Span, TokenSequence
    from kvtrie.integrations.vllm._account import Reused
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.tags import Section, Stream
    from kvtrie.tags.openings import Openings

    Kinds = tuple[list[str], NDArray[np.int64] | None]

_LOG = logging.getLogger("vllm.kvtrie")

OTHER: Final = "other"
"""Tokens between messages, and all tokens if the chat format is unknown."""

RECOMPUTED: Final = "recomputed"
REUSES: Final = ("exact", "moved", RECOMPUTED)
"""The sources of the KV of prompt tokens."""
_RECOMPUTED: Final = REUSES.index(RECOMPUTED)

_MAX_BLANK: Final = 4


def tagger_of(settings: Settings, vllm_config: VllmConfig) -> Tagger | None:
    """The chat format of the model that vLLM serves; None if tokens are not tagged.

    If ``"auto"`` does not know the template, vLLM's reasoning parser identifies reasoning. It does
    not say when reasoning is dropped, so it is kept.
    """
    tokenizer = None
    if isinstance(settings.chat_format, str):
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    tagger = _formats.tagger_of(
        settings, tokenizer, otherwise=lambda why: _from_parser(vllm_config, tokenizer, why)
    )
    forbidden = settings.wanted().forbid_kinds
    if tagger is None and forbidden:
        msg = (
            f"{WHERE}: policy forbids {', '.join(forbidden)}, and nothing identifies these tokens: "
            f'name the format in "chat_format" (one of {", ".join(PRESETS)}, or token ids)'
        )
        raise SettingsError(msg)
    return tagger


def openings_of(
    settings: Settings, vllm_config: VllmConfig, tagger: Tagger | None, *, moves: bool
) -> Openings | None:
    """How messages begin, where `tagger_of` does not say it; None if it does, or no way.

    Args:
        settings: The connector's settings.
        vllm_config: vLLM's.
        tagger: The chat format.
        moves: Whether KV may be moved, so that the log says what is not known.
    """
    tokenizer = None
    if settings.chat_format == "auto":
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    found = _formats.openings_of(settings, tagger, tokenizer)
    if moves and found is None and not (tagger and tagger.format.starts):
        _LOG.warning(
            "kvtrie: where messages begin is not known, so moved runs may supply the last one: "
            'name the format in "chat_format"'
        )
    return found


def _from_parser(
    vllm_config: VllmConfig,
    tokenizer: Any,  # noqa: ANN401 - vLLM's own, of many types
    why: str,
) -> Tagger | None:
    _LOG.info("kvtrie: %s", why)
    name = vllm_config.structured_outputs_config.reasoning_parser
    if not name:
        _LOG.warning('kvtrie: tokens are not tagged: name the format in "chat_format"')
        return None
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        opens, closes = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (parser.reasoning_start_str, parser.reasoning_end_str)
        )
        # One message of the assistant: the parser has no roles.
        found = Tagger.from_ids(reasoning=(opens, closes), initial="assistant", boundary="never")
    except Exception:
        _LOG.warning("kvtrie: tokens are not tagged: reasoning parser %r", name, exc_info=True)
        return None
    _LOG.warning("kvtrie: reasoning is identified by reasoning parser %r, and kept", name)
    return found


class Reading:
    """The spans of one request's final tokens, as far as `follow` has read them.

    Args:
        tagger: The chat format.
        counts: Where a request with too many delimiters is counted.
    """

    __slots__ = ("_counts", "_num_returned", "stream")

    def __init__(self, tagger: Tagger, counts: Counts) -> None:
        self.stream: Stream = tagger.stream()
        self._counts = counts
        self._num_returned = 0

    def follow(self, seq: TokenSequence) -> bool:
        """Read on to the end of a sequence; if False, it has too many delimiters to be read.

        Then nothing of this reading may be used (`LiveRequest.read` drops it).
        """
        start = len(self.stream)
        if start >= len(seq):
            return True
        if read_on(self.stream, np.asarray(seq[start:])):
            return True
        self._counts.add("requests_untagged")
        return False

    @property
    def keeps_all(self) -> bool:
        """Whether the served template never drops reasoning."""
        return self.stream.tagger.format.boundary == "never"

    def new_spans(self) -> list[Span]:
        """The spans that have ended since the last call."""
        spans = self.stream.spans
        if not spans:
            return spans
        # The last one may have grown since: reasoning includes the newlines after it.
        first, self._num_returned = max(0, self._num_returned - 1), len(spans)
        return spans[first:]

    def finish(self, *, complete: bool) -> list[Span]:
        """End the last message; returns the spans that `new_spans` has not returned."""
        self.stream.finish(complete=complete)
        return self.new_spans()

    def disagreement(self, num_prompt: int) -> str | None:
        """Why the served template cannot have rendered the prompt; None if it can have.

        A prompt without any message was rendered by another template, or by none. One with
        reasoning in a turn before the last user's message comes from a template that keeps it, or
        an answer spells out its delimiters.
        """
        stream = self.stream
        if not (stream.sections or stream.is_in_message):
            return "it has no message of the format"
        if self.keeps_all:
            return None
        for turn in stream.turns:
            if turn.state != "closed" or turn.end > num_prompt:
                continue
            for section in turn.sections:
                start, end = section.body
                if section.kind == "reasoning" and not is_blank(section):
                    return f"it keeps reasoning of an earlier turn, at tokens [{start}, {end})"
        return None

    def spans(self) -> list[Span]:
        """All spans, with the open one."""
        spans, under_way = self.stream.spans, self.stream.open
        return spans if under_way is None else [*spans, under_way]


def kinds_of(num_tokens: int, spans: Sequence[Span]) -> Kinds:
    """Names of kinds, and the number of each token's; None if there are no spans."""
    names = [OTHER]
    if not spans:
        return names, None
    kinds = np.zeros(num_tokens, np.int64)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.kind not in names:
            names.append(span.kind)
        kinds[span.start : span.end] = names.index(span.kind)
    return names, kinds


def count_by_kind(
    num_tokens: int, reused: Sequence[Reused], kinds: Kinds
) -> dict[tuple[str, str], int]:
    """Tokens of a prompt by (one of `REUSES`, kind); of nested spans the inner one counts."""
    names, numbers = kinds
    if numbers is None and not reused:
        return {(RECOMPUTED, OTHER): num_tokens} if num_tokens else {}
    if numbers is None:
        totals = [0] * len(REUSES)
        for one in reused:
            totals[one.is_approximate] += max(0, min(one.end, num_tokens) - one.start)
        totals[_RECOMPUTED] = num_tokens - sum(totals)
        return {(how, OTHER): count for how, count in zip(REUSES, totals, strict=True) if count}
    reuse = np.full(num_tokens, _RECOMPUTED, np.int64)
    for one in reused:
        reuse[one.start : one.end] = int(one.is_approximate)
    counts = np.bincount(numbers * len(REUSES) + reuse)
    return {
        (REUSES[at % len(REUSES)], names[at // len(REUSES)]): int(counts[at])
        for at in counts.nonzero()[0].tolist()
    }


def is_blank(section: Section) -> bool:
    """Whether it is what templates leave of dropped reasoning: delimiters, newlines between."""
    start, end = section.body
    return end - start <= _MAX_BLANK
