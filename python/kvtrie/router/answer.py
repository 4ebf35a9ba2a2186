"""What `TurnTracker.compare` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AnswerKind = Literal["exact_extension", "common_prefix", "moved_runs", "alias", "start_over"]
"""What `TurnTracker.compare` returns."""

KINDS: Final[tuple[AnswerKind, ...]] = get_args(AnswerKind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnAnswer:
    """How the next prompt relates to what is kept.

    Attributes:
        kind: `"exact_extension"`, `"alias"`, `"moved_runs"`, `"common_prefix"` or `"start_over"`;
            ``docs/router.md`` explains them.
        num_tokens: Tokens from position 0 of the prompt (of `send` for an alias) whose KV the
            engine has in place. The last `keep_last` tokens never count.
        num_exact: How many of these are exact.
        num_common: Length of the common prefix of prompt and history, computed or not.
        conversation: The id under which the history was kept, or None.
        num_kept: Tokens of that history; 0 without one.
        age: Seconds since it was kept; 0.0 without one.
        kv_transfer_params: vLLM's parameters, cut to blocks of exact tokens of `num_tokens`, or
            None.
        num_transfer_tokens: Tokens from position 0 that they cover.
        transfer_reason: Why there are no parameters; empty if there are.
        payload: What `keep` was given.
        manifest: The history's `TransferManifest`, if `keep` was given one.
        send: For an alias, the ids to send instead of the prompt (uint32); else None.
        segments: For moved runs, the source of each prompt token, as in `ReusePlan.segments`
            (positions are those of the history); else None.
    """

    kind: AnswerKind
    num_tokens: int = 0
    num_exact: int = 0
    num_common: int = 0
    conversation: str | None = None
    num_kept: int = 0
    age: float = 0.0
    kv_transfer_params: dict[str, Any] | None = None
    num_transfer_tokens: int = 0
    transfer_reason: str = "nothing is kept"
    payload: object = None
    manifest: object = None
    send: npt.NDArray[np.uint32] | None = None
    segments: npt.NDArray[np.void] | None = None
