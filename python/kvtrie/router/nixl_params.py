"""The KV parameters of vLLM's NIXL connector, checked and cut to a range of tokens.

Source: vLLM 0.32.0, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` (connector version 14),
    files ``pull_scheduler.py``, ``push_scheduler.py``, ``base_scheduler.py``, ``pull_worker.py``,
    ``base_worker.py``, ``metadata.py``.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_REQUIRED: Final = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)
_TEXTS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "transfer_mode")
_FLAGS: Final = ("do_remote_prefill", "do_remote_decode")
_SIZES: Final = ("tp_size", "dcp_size", "pp_size")
_COUNTS: Final = ("remote_num_tokens", "remote_port")
_PROCESSED: Final = "_remote_blocks_processed"
_MAX_ID: Final = 2**63


class CutParams(NamedTuple):
    """A new `kv_transfer_params` for tokens from 0, or None and the reason."""

    params: dict[str, Any] | None
    num_tokens: int
    reason: str


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _field(call: str, name: str, value: object, expected: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValueError(f"{call}: kv_transfer_params[{name!r}] is {shown}, not {expected}")


def exact_text(text: str) -> str:
    """An exact `str`, not a subclass."""
    return str.__str__(text)


def _checked_int(call: str, name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or operator.index(value) < least:
        raise _field(call, name, value, f"an int of {least} or more")
    return operator.index(value)


def _checked_groups(call: str, value: object) -> list[list[int]] | None:
    name, expected = "remote_block_ids", "a list with one list of block ids per block group"
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _field(call, name, value, expected)
    groups: list[list[int]] = []
    for number, group in enumerate(value):
        if not isinstance(group, Sequence) or isinstance(group, str | bytes):
            raise _field(call, name, value, expected)
        blocks: list[int] = []
        for block in group:
            if not _is_int(block) or not 0 <= operator.index(block) < _MAX_ID:
                raise _field(call, f"{name}[{number}]", block, "a block id")
            blocks.append(operator.index(block))
        groups.append(blocks)
    return groups


def _copied(params: object, call: str) -> dict[str, Any]:
    """A copy with exact keys, which no caller can change after the check."""
    if not isinstance(params, Mapping):
        msg = f"{call}: kv_transfer_params is a {type(params).__name__}, not a mapping"
        raise TypeError(msg)
    copied: dict[str, Any] = {}
    for name, value in copy.deepcopy(dict(params)).items():
        if not isinstance(name, str):
            msg = f"{call}: kv_transfer_params has the key {name!r}, which is not a str"
            raise ValueError(msg)  # noqa: TRY004 - a field is malformed, not the argument
        copied[exact_text(name)] = value
    return copied


def checked_params(params: object, call: str) -> dict[str, Any]:
    """A copy of `kv_transfer_params` whose known fields have vLLM's types; others are unchanged.

    The types are exact, so `cut_params` runs no code of the caller and may be called under a lock.

    Raises:
        TypeError: It is not a mapping.
        ValueError: A known field is malformed; the message names it.
    """
    checked = _copied(params, call)
    for name in _FLAGS:
        if type(checked.get(name, False)) is not bool:
            raise _field(call, name, checked[name], "True or False")
    if _PROCESSED in checked:
        checked[_PROCESSED] = bool(checked[_PROCESSED])
    for name in _TEXTS:
        value = checked.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise _field(call, name, value, "a str")
        checked[name] = exact_text(value)
    for name in _SIZES:
        if name in checked:
            checked[name] = _checked_int(call, name, checked[name], 1)
    for name in _COUNTS:
        if checked.get(name) is not None:
            checked[name] = _checked_int(call, name, checked[name], 0)
    expiry = checked.get("remote_blocks_expiry_time")
    if expiry is not None and (
        not (_is_int(expiry) or isinstance(expiry, float)) or not math.isfinite(expiry)
    ):
        raise _field(call, "remote_blocks_expiry_time", expiry, "a finite number")
    if "remote_block_ids" in checked:
        checked["remote_block_ids"] = _checked_groups(call, checked["remote_block_ids"])
    return checked


def _none(reason: str) -> CutParams:
    return CutParams(None, 0, reason)


def _unreadable(params: Mapping[str, Any]) -> str:
    """Why no receiver would read the blocks, or ""."""
    mode = params.get("transfer_mode")
    if mode not in (None, "pull"):
        return f"transfer_mode is {mode!r}: only a pull receiver reads the named blocks"
    if params.get("do_remote_prefill") or not params.get("do_remote_decode"):
        return (
            "they are a prefill engine's result for this same request (do_remote_prefill, without "
            "do_remote_decode): the receiver takes its whole prompt, whatever remote_num_tokens is"
        )
    if params.get(_PROCESSED):
        return "an engine has processed them (_remote_blocks_processed)"
    for name in _REQUIRED:
        if params.get(name) is None:
            return f"{name} is missing"
    if not params.get("remote_num_tokens"):
        return "remote_num_tokens is missing or 0"
    if params.get("dcp_size", 1) > 1:
        return (
            f"dcp_size is {params['dcp_size']}: blocks of one list are interleaved with those of "
            "other ranks"
        )
    return ""


def cut_params(
    params: Mapping[str, Any],
    num_tokens: int,
    *,
    block_sizes: Sequence[int] | None,
    receiver_block_size: int | None = None,
    partial_block: bool = False,
) -> CutParams:
    """Cut checked parameters to the blocks of the first tokens, in every block group.

    The receiver of a pull pairs the end of the list with the end of its allocation (see
    ``docs/router.md``). Both are at the same position exactly if ``remote_num_tokens`` is not
    beyond the prompt and every list holds the blocks of these tokens and no more.

    Args:
        params: What `checked_params` returned.
        num_tokens: Length of the common prefix of the receiver's prompt and the computed tokens,
            minus the tokens that it must not load.
        block_sizes: Of each group, all of full attention. None: unknown.
        receiver_block_size: The receiver's, if different.
        partial_block: Whether the last block may be partly covered. Only for equal block sizes.
    """
    reason = _unreadable(params)
    if reason:
        return _none(reason)
    if block_sizes is None:
        return _none("the tracker was made without a block_size")
    groups = params.get("remote_block_ids") or ()
    if len(groups) != len(block_sizes):
        return _none(f"there are {len(groups)} block groups, but {len(block_sizes)} block sizes")
    computed = params["remote_num_tokens"]
    for number, (group, size) in enumerate(zip(groups, block_sizes, strict=True)):
        needed = -(-computed // size)
        if len(group) < needed:
            return _none(
                f"group {number} has {len(group)} blocks of {size}, but {computed} tokens need "
                f"{needed}: the list does not begin at token 0"
            )
        if len(set(group[:needed])) < needed:
            return _none(f"group {number} names a block twice: some of its blocks are placeholders")
    sizes = {*block_sizes, receiver_block_size or block_sizes[0]}
    unit = math.lcm(*sizes)
    covered = min(num_tokens, computed)
    if not partial_block or len(sizes) > 1:
        covered -= covered % unit
    if covered == 0:
        return _none(f"no whole block of {unit} tokens is within {min(num_tokens, computed)}")
    cut = dict(params)
    cut["remote_num_tokens"] = covered
    cut["remote_block_ids"] = [
        list(group[: -(-covered // size)]) for group, size in zip(groups, block_sizes, strict=True)
    ]
    return CutParams(cut, covered, "")
