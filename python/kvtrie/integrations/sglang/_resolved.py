"""SGLang's settings as they are after it has resolved them.

SGLang keeps what the operator gave: a setting that was left out stays None there, and what SGLang
decided is kept next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def resolved(args: ServerArgs) -> ServerArgs:
    """The settings of a server, with SGLang's decisions in place of what was given; read-only."""
    from sglang.srt.arg_groups.overrides import resolved_view  # noqa: PLC0415 - SGLang's

    view: Any = resolved_view(args)
    return cast("ServerArgs", view)
