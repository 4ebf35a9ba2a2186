"""Prompts as they would be if the template left all reasoning in the history.

Many templates drop reasoning and have no switch for it. What keeping it would save is then computed
from prompts that no template writes: each continues the one before and its reply, token for token,
with what the template writes after a reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.lab.template import Rendered, TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.lab.chats import Chat
    from kvtrie.lab.template import Template


def keep_reasoning(
    template: Template, chat: Chat, rendered: Sequence[Rendered]
) -> list[Rendered] | None:
    """The requests of a conversation with all reasoning kept.

    Args:
        template: What renders it.
        chat: The conversation.
        rendered: Its requests, as they are.

    Returns:
        None if the client changes the history, or what follows a reply cannot be found.
    """
    found = [rendered[0]]
    for at, now in enumerate(rendered[1:], 1):
        earlier, before = rendered[at - 1], found[-1]
        whole = earlier.prompt + earlier.text
        sampled = list(before.sampled)
        text = before.prompt + before.text
        if now.prompt.startswith(whole):
            rest = now.prompt[len(whole) :]
        else:
            try:
                written = template.after_reply(chat, chat.requests[at - 1], chat.requests[at])
            except TemplateError:
                return None
            if written is None:
                return None
            # The end mark is sampled, and written again; some templates write another one.
            overlap = _overlap(before.text, written)
            rest = written[overlap:]
            end = template.tokenizer.eos_token
            if not overlap and end and before.text.endswith(end):
                sampled, text = sampled[:-1], text.removesuffix(end)
        ids = [*before.ids, *sampled, *template.encode(rest)]
        found.append(Rendered(text + rest, ids, now.sampled, now.text))
    return found


def _overlap(one: str, other: str) -> int:
    """How much of the end of a text is the beginning of another."""
    for length in range(min(len(one), len(other)), 0, -1):
        if one.endswith(other[:length]):
            return length
    return 0
