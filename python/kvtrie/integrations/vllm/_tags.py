"""The kinds of requests' tokens, by the model's chat format."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _template
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.integrations.vllm._vllm import ReasoningParserManager, cached_tokenizer_from_config
from kvtrie.tags import PRESETS, Tagger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from vllm.config import VllmConfig

    from kvtrie._core import Span, TokenSequence
    from kvtrie.integrations.vllm._account import Reused
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.tags import Stream

_LOG = logging.getLogger("vllm.kvtrie")

DROPPED_AT: Final = {"user": "next user message", "final": "final answer", "never": "never"}
"""When a chat template drops reasoning, by the boundary of its format."""

OTHER: Final = "other"
"""Tokens between messages, and all tokens if the chat format is unknown."""

# Templates leave the delimiters of dropped reasoning, with newlines between.
_MAX_BLANK: Final = 4

REUSES: Final = ("exact", "moved", "recomputed")
"""The sources of the KV of prompt tokens."""


def tagger_of(settings: Settings, vllm_config: VllmConfig) -> Tagger | None:
    """The chat format of the model that vLLM serves; None if tokens are not tagged.

    If ``"auto"`` does not know the template, vLLM's reasoning parser identifies reasoning. It does
    not say when reasoning is dropped, so it is kept.
    """
    form = settings.chat_format
    tagger = None
    if isinstance(form, Mapping):
        tagger = _from_ids(form)
    elif form is not None:
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        if form != "auto":
            tagger = _from_preset(form, tokenizer)
        elif tokenizer is not None:
            tagger = _from_template(settings, tokenizer) or _from_parser(vllm_config, tokenizer)
    forbidden = settings.wanted().forbid_kinds
    if tagger is None and forbidden:
        msg = (
            f"{WHERE}: policy forbids {', '.join(forbidden)}, and nothing identifies these tokens: "
            f'name the format in "chat_format" (one of {", ".join(PRESETS)}, or token ids)'
        )
        raise SettingsError(msg)
    return tagger


def _from_ids(form: Mapping[str, Any]) -> Tagger:
    try:
        return Tagger.from_ids(**form)
    except (TypeError, ValueError) as error:
        msg = f"{WHERE}: chat_format: {error}"
        raise SettingsError(msg) from error


def _from_preset(name: str, tokenizer: Any) -> Tagger:  # noqa: ANN401 - vLLM's own, of many types
    if tokenizer is None:
        msg = f"{WHERE}: chat_format is {name!r}, and vLLM has no tokenizer (skip_tokenizer_init): "
        msg += "give token ids, as kvtrie.tags.Tagger.from_ids takes them"
        raise SettingsError(msg)
    try:
        return Tagger.from_preset(name, tokenizer)
    except (TypeError, ValueError) as error:
        msg = f"{WHERE}: chat_format: {error}"
        raise SettingsError(msg) from error


def _from_template(settings: Settings, tokenizer: Any) -> Tagger | None:  # noqa: ANN401 - likewise
    arguments = dict(settings.template_arguments or {})
    template = _template.served(settings).text
    if template is not None:
        arguments["chat_template"] = template
    try:
        return Tagger.from_tokenizer(tokenizer, **arguments)
    except (TypeError, ValueError) as error:
        _LOG.info("kvtrie: %s", error)
        return None


def _from_parser(vllm_config: VllmConfig, tokenizer: Any) -> Tagger | None:  # noqa: ANN401 - likewise
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


def form_of(tagger: Tagger | None) -> str:
    """The chat format, and when it drops reasoning, in the words of the log."""
    if tagger is None:
        return "chat format: unknown"
    dropped = DROPPED_AT[tagger.format.boundary]
    return f"chat format: {tagger.format.name}; reasoning dropped at: {dropped}"


class Reading:
    """The spans of one request's final tokens."""

    __slots__ = ("_num_returned", "stream")

    def __init__(self, tagger: Tagger) -> None:
        self.stream: Stream = tagger.stream()
        self._num_returned = 0

    def follow(self, seq: TokenSequence) -> None:
        if len(self.stream) < len(seq):
            self.stream.feed(np.asarray(seq[len(self.stream) :]))

    def new_spans(self, seq: TokenSequence) -> list[Span]:
        """The spans that have ended since the last call."""
        self.follow(seq)
        spans = self.stream.spans
        # The last one may have grown since: reasoning includes the newlines after it.
        first, self._num_returned = max(0, self._num_returned - 1), len(spans)
        return spans[first:]

    def finish(self, seq: TokenSequence, *, complete: bool) -> list[Span]:
        """Returns the spans that `new_spans` has not returned."""
        self.follow(seq)
        self.stream.finish(complete=complete)
        return self.new_spans(seq)

    def disagreement(self, num_prompt: int) -> str | None:
        """Why the served template cannot have rendered the prompt; None if it can have.

        A prompt without any message was rendered by another template, or by none. One with
        reasoning in a turn before the last user's message comes from a template that keeps it, or
        an answer spells out its delimiters.
        """
        stream = self.stream
        if not stream.sections and stream.open is None:
            return "it has no message of the format"
        if stream.tagger.format.boundary == "never":
            return None
        for turn in stream.turns:
            if turn.state != "closed" or turn.end > num_prompt:
                continue
            for section in turn.sections:
                start, end = section.body
                if section.kind == "reasoning" and end - start > _MAX_BLANK:
                    return f"it keeps reasoning of an earlier turn, at tokens [{start}, {end})"
        return None

    def spans(self) -> list[Span]:
        """All spans, with the open one."""
        spans, under_way = self.stream.spans, self.stream.open
        return spans if under_way is None else [*spans, under_way]


def kinds_of(num_tokens: int, spans: Iterable[Span]) -> tuple[list[str], NDArray[np.int64] | None]:
    """Names of kinds, and the number of each token's; None if there are no spans."""
    names, kinds = [OTHER], None
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if kinds is None:
            kinds = np.zeros(num_tokens, np.int64)
        if span.kind not in names:
            names.append(span.kind)
        kinds[span.start : span.end] = names.index(span.kind)
    return names, kinds


def count_by_kind(
    num_tokens: int, reused: Iterable[Reused], spans: Iterable[Span]
) -> Counter[tuple[str, str]]:
    """Tokens of a prompt by (one of `REUSES`, kind); of nested spans the inner one counts."""
    spans = list(spans)
    if not spans:
        totals = [0] * len(REUSES)
        for one in reused:
            totals[one.is_approximate] += max(0, min(one.end, num_tokens) - one.start)
        totals[REUSES.index("recomputed")] = num_tokens - sum(totals)
        return Counter(
            {(how, OTHER): count for how, count in zip(REUSES, totals, strict=True) if count}
        )
    reuse = np.full(num_tokens, REUSES.index("recomputed"), np.int64)
    for one in reused:
        reuse[one.start : one.end] = int(one.is_approximate)
    names, kinds = kinds_of(num_tokens, spans)
    kinds = reuse * 0 if kinds is None else kinds
    counts = np.bincount(kinds * len(REUSES) + reuse, minlength=len(names) * len(REUSES))
    return Counter(
        {
            (how, name): int(counts[number * len(REUSES) + at])
            for number, name in enumerate(names)
            for at, how in enumerate(REUSES)
            if counts[number * len(REUSES) + at]
        }
    )
