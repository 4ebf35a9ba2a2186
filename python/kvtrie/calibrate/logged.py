"""Recorded traffic for calibration: the sessions of a log that has token ids.

Each request is a step: its prompt and reply as they were, token for token, so no chat template is
applied. A session is replayed in the order in which its requests arrived. What names no session, or
is the only request of one, shows no edit and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtrie.calibrate._steps import CalibrationError, Step
from kvtrie.record import Log

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.record import Recorded

# Messages into which nothing moves.
_INPUTS: Final = ("user", "tool_result")
_BEGINS: Final = b'{"kvtrie_log":'


@dataclass(frozen=True, slots=True)
class Session:
    """The requests of one session.

    Attributes:
        steps: Its requests, in the order in which they arrived.
    """

    steps: tuple[Step, ...]


def is_log(path: Path) -> bool:
    """Whether a file is a log, of any version.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS


def sessions(path: Path) -> list[Session]:
    """The sessions of a log with at least two requests.

    Raises:
        CalibrationError: The log has no token ids, or no such session.
        LogError: It cannot be read.
        OSError: Likewise.
    """
    log = Log(path)
    if log.header is not None and log.header.content != "tokens":
        msg = (
            f"{path}: the log has digests, and calibration needs token ids: record with "
            '"content": "tokens"'
        )
        raise CalibrationError(msg)
    found: dict[tuple[str, str], list[tuple[float, Step]]] = {}
    for one in log:
        if one.session is not None and one.tokens is not None and one.num_prompt:
            step = _step(one)
            found.setdefault((one.space, one.session), []).append((one.arrived, step))
    kept = [
        Session(tuple(step for _, step in sorted(steps, key=lambda each: each[0])))
        for steps in found.values()
        if len(steps) > 1
    ]
    if not kept:
        msg = (
            f"{path}: no session has two requests, so there is no edit to measure: let requests "
            'name their session ("kv_transfer_params": {"session": "chat-7"}), and record longer'
        )
        raise CalibrationError(msg)
    return kept


def _step(one: Recorded) -> Step:
    tokens = [] if one.tokens is None else one.tokens.tolist()
    starts = [
        span.start for span in one.spans if span.kind in _INPUTS and span.start < one.num_prompt
    ]
    return Step(
        prompt=tokens[: one.num_prompt],
        reply=tokens[one.num_prompt :],
        answer_start=0,
        is_scored=False,
        is_measured=True,
        moved_end=max(starts, default=None),
    )
