"""Sampled ids in chats that pass through the proxy to vLLM.

A chat goes to the engine as text, and the ids of earlier replies are lost. vLLM's chat completions
take the ids of the prompt in `kv_transfer_params.prompt_token_ids` in place of the messages', and
with `return_token_ids` a reply says the ids of its prompt and of what was sampled. All else of a
chat, as parsers of reasoning and of tools, streams and limits, is as without.

So a reply's ids are kept if its prompt was the one that is rendered here, and the next turn is sent
with them. Only chats whose rendering leaves nothing to the engine are sent so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import TokenSequence
from kvtrie.fleet.documents import read_json
from kvtrie.router import PromptSplicer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvtrie._core import Namespace
    from kvtrie.fleet.prompts import ServedModel
    from kvtrie.router import TurnTracker

# Fields that do not change what an engine renders.
_HARMLESS: Final = frozenset(
    "model messages cache_salt chat_template_kwargs add_generation_prompt stream stream_options "
    "max_tokens max_completion_tokens min_tokens n temperature top_p top_k min_p seed stop "
    "stop_token_ids include_stop_str_in_output ignore_eos frequency_penalty presence_penalty "
    "repetition_penalty length_penalty logit_bias allowed_token_ids bad_words logprobs "
    "top_logprobs prompt_logprobs skip_special_tokens spaces_between_special_tokens "
    "thinking_token_budget structured_outputs include_reasoning tool_choice parallel_tool_calls "
    "kv_transfer_params return_token_ids return_tokens_as_token_ids priority request_id "
    "session_id user metadata store service_tier vllm_xargs".split()
)
_ROLES: Final = frozenset(("system", "user", "assistant"))
_PARAMS: Final = "kv_transfer_params"
_PROMPT_IDS: Final = "prompt_token_ids"
_SAMPLED_IDS: Final = "token_ids"
_RETURN_IDS: Final = "return_token_ids"
# A document, or an event of a stream, that is longer passes as it is, and no ids are kept; nor of
# a reply with more ids.
_MOST_REPLY: Final = 8 << 20
_MOST_SAMPLED: Final = 1 << 20


class UnsplicedError(ValueError):
    """A chat goes to the engine as it came; the message says why, in a few words."""


@dataclass
class SplicedChat:
    """A chat as it is sent.

    Attributes:
        prompt: Its ids.
        body: The request, until its reply begins: it may be several times as long as the client's.
        why_text: Why the prompt goes as text; None if as ids.
        shows_ids: Whether the client asked for the ids of its reply.
        splicer: What made it, and keeps the ids of its reply.
    """

    prompt: TokenSequence
    body: bytes
    why_text: str | None
    shows_ids: bool
    splicer: ChatSplicer


class ChatSplicer:
    """Makes the requests of one model, and keeps the ids of its replies.

    Args:
        model: The model.
        tracker: Keeps what engines used. Several models may share it.

    Raises:
        TypeError: The tokenizer lacks what `PromptSplicer` needs.
    """

    def __init__(self, model: ServedModel, tracker: TurnTracker) -> None:
        self._model = model
        self._tracker = tracker
        self._splicer = PromptSplicer(model.tokenizer)

    def splice(self, body: Mapping[str, Any]) -> SplicedChat:
        """The request to send.

        Args:
            body: That of the client.

        Raises:
            UnsplicedError: It must go as it came.
            PromptError: The prompt is not known.
        """
        _check_form(body)
        params = body.get(_PARAMS) or {}
        space = self._model.namespace_of(body)
        messages = _plain(body.get("messages"))
        text = self._model.chat_text({**body, "messages": messages})
        ids, why_text = self._ids(text, messages, space)
        sent = {**body, _RETURN_IDS: True}
        if why_text is None:
            sent[_PARAMS] = {**params, _PROMPT_IDS: ids.tolist()}
        return SplicedChat(
            TokenSequence(ids, space),
            json.dumps(sent, ensure_ascii=False, separators=(",", ":")).encode(),
            why_text,
            bool(body.get(_RETURN_IDS)),
            self,
        )

    def _ids(
        self, text: str, messages: Sequence[Mapping[str, str]], space: Namespace
    ) -> tuple[npt.NDArray[np.uint32], str | None]:
        """The ids of a rendered chat, and why it is sent as text."""
        if not any(one["role"] == "assistant" for one in messages):
            # No model has sampled any of it. A history that has its text is of another chat, whose
            # client may have chosen the ids.
            return self._splicer.encode(text), "no history"
        found = self._tracker.splice(text, self._splicer, space)
        if found.outcome == "refused":
            return found.ids, "refused"
        if found.outcome != "spliced":
            return found.ids, "no history"
        is_plain = np.array_equal(found.ids, self._splicer.encode(text))
        return found.ids, "the same ids" if is_plain else None

    def keep(self, chat: SplicedChat, reply: ReplyIds) -> str | None:
        """Keep the ids of a reply.

        Args:
            chat: What was sent.
            reply: What came.

        Returns:
            None, or why they were not kept.
        """
        if not reply.ended:
            return "no end of the reply"
        if reply.prompt is None or not reply.sampled:
            return "no ids in the reply"
        if reply.prompt != chat.prompt[:].tolist():
            return "another prompt"
        try:
            whole = TokenSequence([*reply.prompt, *reply.sampled], chat.prompt.namespace)
            self._tracker.keep(whole, num_computed=len(whole) - 1)
        except (OverflowError, TypeError, ValueError):
            return "a token id is out of range, or too many"
        return None


@dataclass
class ReplyIds:
    """Reads the ids in a reply as it passes, and takes them out unless the client wants them.

    Attributes:
        streams: Whether the reply is a stream of events; else it is one document.
        shows_ids: Whether they stay in the reply.
        prompt: The prompt's ids, or None.
        sampled: Those of the reply.
    """

    streams: bool
    shows_ids: bool
    prompt: list[Any] | None = None
    sampled: list[Any] = field(default_factory=list)
    _held: bytearray = field(default_factory=bytearray)
    _has_ended: bool = False
    _gives_up: bool = False

    @property
    def ended(self) -> bool:
        """Whether the reply has said why it ended, and all of it was read."""
        return self._has_ended and not self._gives_up

    def feed(self, piece: bytes) -> bytes:
        """Take what came; returns what may pass."""
        before = len(self._held)
        self._held += piece
        self._gives_up |= len(self._held) > _MOST_REPLY
        if self._gives_up:
            return self._taken()
        # What was held has no end of a line, so that it is looked through once.
        whole = self._held.rfind(b"\n", before) + 1 if self.streams else 0
        if not whole:
            return b""
        lines = bytes(self._held[:whole]).splitlines(keepends=True)
        del self._held[:whole]
        return b"".join(map(self._line, lines))

    def rest(self) -> bytes:
        """What is left at the end."""
        left = self._taken()
        return left if self.streams or self._gives_up else self._document(left)

    def _taken(self) -> bytes:
        left = bytes(self._held)
        self._held.clear()
        return left

    def _line(self, line: bytes) -> bytes:
        head, mark, text = line.partition(b"data:")
        if head or not mark or text.strip() == b"[DONE]":
            return line
        end = line[len(line.rstrip(b"\r\n")) :]
        found = self._document(text.strip())
        return b"data: " + found + end

    def _document(self, text: bytes) -> bytes:
        try:
            document = read_json(text)
            choices = list(document.get("choices") or ())
            prompt = document.get(_PROMPT_IDS)
            if isinstance(prompt, list):
                self.prompt = prompt
            for choice in choices:
                self.sampled += choice.get(_SAMPLED_IDS) or ()
                self._has_ended |= choice.get("finish_reason") is not None
            self._gives_up |= len(self.sampled) > _MOST_SAMPLED
            if self.shows_ids:
                return text
            document.pop(_PROMPT_IDS, None)
            for choice in choices:
                choice.pop(_SAMPLED_IDS, None)
            return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        except (AttributeError, RecursionError, TypeError, ValueError):
            # In another form, or half a surrogate pair is in it: it passes, and no ids are kept.
            self._gives_up = True
            return text


def _check_form(body: Mapping[str, Any]) -> None:
    """Refuse a chat that an engine may render otherwise than the template here does."""
    if body.get("tools"):
        msg = "tools"
        raise UnsplicedError(msg)
    if any(body[name] is not None for name in body.keys() - _HARMLESS):
        msg = "other fields"
        raise UnsplicedError(msg)
    if body.get("n") not in (None, 1):
        msg = "several replies"
        raise UnsplicedError(msg)
    params = body.get(_PARAMS)
    if params is not None and (not isinstance(params, dict) or _PROMPT_IDS in params):
        msg = "ids of the client's own"
        raise UnsplicedError(msg)


def _plain(messages: object) -> list[dict[str, str]]:
    """Messages of text alone."""
    found = []
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, dict) or not _is_plain(message):
            msg = "messages of more than text"
            raise UnsplicedError(msg)
        found.append({"role": message["role"], "content": message["content"]})
    return found


def _is_plain(message: Mapping[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    # What is empty an engine leaves out.
    empty = all(message[name] in (None, []) for name in message.keys() - {"role", "content"})
    return empty and isinstance(role, str) and role in _ROLES and isinstance(content, str)
