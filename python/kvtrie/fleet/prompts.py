"""The tokens of a request in OpenAI's form, as an engine makes them of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import Namespace, TokenSequence
from kvtrie.lab import Template, TemplateError
from kvtrie.tags.openings import LastMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
# Characters of a salt, which is kept with each prompt and each history.
_LONGEST_SALT: Final = 1024
# Bytes of the id of a conversation.
_LONGEST_SESSION: Final = 256
_SESSION: Final = "session_id"
_SESSION_HEADER: Final = "X-Session-ID"


class PromptError(ValueError):
    """The tokens of a request are not known; the message says why, in a few words."""


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The conversation of a request, by which events of vLLM name it and kvtrie's connector plans.

    Args:
        body: The request.
        headers: Its headers, whatever their case.

    Returns:
        None if there is none, if the connector is told another one than vLLM, or if no worker would
        take it.
    """
    extra, params = body.get("vllm_xargs"), body.get("kv_transfer_params")
    asked = (
        body.get(_SESSION),
        headers.get(_SESSION_HEADER),
        extra.get(_SESSION) if isinstance(extra, dict) else None,
    )
    session = next((one for one in asked if one), None)
    own = params.get("session") if isinstance(params, dict) else None
    if (
        not isinstance(session, str)
        or len(session) > _LONGEST_SESSION
        or own not in (None, session)
    ):
        return None
    try:
        is_valid = len(session.encode()) <= _LONGEST_SESSION
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON allows
        is_valid = False
    return session if is_valid else None


@dataclass(frozen=True)
class ServedModel:
    """A model's tokenizer and chat template, and whose KV its prompts may share.

    Args:
        namespace: That of the workers in the index. A request's `cache_salt` takes the place of its
            salt.
        tokenizer: The engine's, with ``apply_chat_template`` and ``encode``, as the transformers
            library has them.
        arguments: Passed to the template with each prompt, for engines that were started so.

    Raises:
        TemplateError: The tokenizer has no chat template.
    """

    namespace: Namespace
    tokenizer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _template: Template = field(init=False, repr=False, compare=False)
    # Made when it is first asked for: it renders the template.
    _last_message: LastMessage | None = field(init=False, default=None, repr=False, compare=False)
    # What a client's arguments of the template must not be called.
    _reserved: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", Template(self.tokenizer, self.arguments))
        named = inspect.signature(self.tokenizer.apply_chat_template).parameters
        object.__setattr__(self, "_reserved", frozenset(named) | {"chat_template"})

    def prompt(self, path: str, body: Mapping[str, Any]) -> TokenSequence:
        """The prompt of a request.

        Args:
            path: `"/v1/chat/completions"` or `"/v1/completions"`.
            body: The request.

        Raises:
            PromptError: It has several prompts, pictures or fields that change what is rendered in
                ways that are not known here, or the template refuses it.
        """
        space = self.namespace_of(body)
        ids = self._template.encode(self._chat(body)) if path == CHAT else self._text(body)
        try:
            return TokenSequence(np.array(ids, np.uint32), space)
        except (OverflowError, ValueError, TypeError) as error:
            msg = "a token id is out of range"
            raise PromptError(msg) from error

    def moved_end(self, prompt: TokenSequence) -> int | None:
        """Where the last message of a user or a tool begins, as kvtrie in the workers finds it.

        Args:
            prompt: The prompt of a request.

        Returns:
            None if there is none, or if the chat template does not say.
        """
        last_message = self._last_message
        if last_message is None:
            last_message = LastMessage(self.tokenizer, **self.arguments)
            object.__setattr__(self, "_last_message", last_message)
        return last_message(np.asarray(prompt[:]))

    def chat_text(self, body: Mapping[str, Any]) -> str:
        """The text of a chat's prompt, as the template renders it.

        Args:
            body: The request.

        Raises:
            PromptError: As for `prompt`.
        """
        return self._chat(body)

    def namespace_of(self, body: Mapping[str, Any]) -> Namespace:
        """The namespace of a request's prompt.

        Args:
            body: The request.

        Raises:
            PromptError: `cache_salt` is no text or too long, or the prompt is cut.
        """
        if body.get("truncate_prompt_tokens") is not None:
            msg = "a prompt that is cut"
            raise PromptError(msg)
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            msg = "cache_salt is no text"
            raise PromptError(msg)
        if salt is not None and len(salt) > _LONGEST_SALT:
            msg = f"a cache_salt of more than {_LONGEST_SALT} characters"
            raise PromptError(msg)
        return self.namespace if salt is None else self.namespace.replace(salt=salt)

    def text(self, prompt: str) -> TokenSequence:
        """The tokens of a text, with the special tokens that the tokenizer begins with.

        Args:
            prompt: The text.

        Raises:
            PromptError: The tokenizer fails.
        """
        try:
            return TokenSequence(self.tokenizer.encode(prompt), self.namespace)
        except Exception as error:
            # A tokenizer may raise anything.
            msg = f"tokenizing failed: {type(error).__name__}"
            raise PromptError(msg) from error

    def _chat(self, body: Mapping[str, Any]) -> str:
        if body.get("continue_final_message") or not body.get("add_generation_prompt", True):
            msg = "a prompt that goes on in the last message"
            raise PromptError(msg)
        for name in ("add_special_tokens", "documents", "chat_template"):
            if body.get(name):
                msg = f"a request with {name}"
                raise PromptError(msg)
        messages = body.get("messages")
        arguments = body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not isinstance(arguments, dict):
            msg = "messages in another form"
            raise PromptError(msg)
        # Above all a template of the client's own, which could take all time and memory.
        if not self._reserved.isdisjoint(arguments):
            msg = "chat_template_kwargs with an argument of the tokenizer"
            raise PromptError(msg)
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        try:
            spelled = [{**one, "content": _joined(one.get("content"))} for one in messages]
            return self._template.text(spelled, tools=tuple(tools or ()), arguments=arguments)
        except TemplateError as error:
            msg = "refused by the chat template"
            raise PromptError(msg) from error
        except (AttributeError, KeyError, TypeError) as error:
            msg = "messages in another form"
            raise PromptError(msg) from error

    def _text(self, body: Mapping[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            special = {} if body.get("add_special_tokens", True) else {"add_special_tokens": False}
            return list(self.tokenizer.encode(prompt, **special))
        if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
            return prompt
        msg = "several prompts, or none"
        raise PromptError(msg)


def _joined(content: object) -> object:
    """The text of a message. Engines differ in how they join several parts of text."""
    if not isinstance(content, list):
        return content or ""
    if len(content) != 1 or content[0].get("type") != "text":
        msg = "a message of several parts, or with more than text"
        raise PromptError(msg)
    return content[0]["text"]
