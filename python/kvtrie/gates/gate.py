"""The gate of one model: what a request may reuse, and whether a plan of it is cleared."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtrie._core import EXACT_ONLY, ReusePolicy
from kvtrie.gates._document import as_text, parse
from kvtrie.gates._errors import GateError, GateMismatchError, refuse
from kvtrie.gates.decision import Decision, Judged, Ladder, laxest

if TYPE_CHECKING:
    from collections.abc import Collection
    from os import PathLike

    from kvtrie.gates.figures import Thresholds
    from kvtrie.gates.verdict import Measured

MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdicts on one model. ``docs/calibrate.md`` has an example.

    Args:
        model: Name and fingerprint, as in the engine's namespace.
        kv_dtype: Type and scales of the measured KV, as in the engine's namespace: what
            ``KVLayout.kv_dtype`` names, and `kvtrie.models.kv_scales.scaled_name` where a layer
            has scales.
        rope: RoPE settings, as in the engine's namespace.
        thresholds: What a kind of edit must keep.
        measured: The policies, each with its kinds.
        data: A description of the replayed data.
        checkpoint: Digest of the measured model directory, by which engines with another namespace
            recognise it; None if its weights are not in safetensors files.
        template: Digest of the chat template that the replies were measured with.

    Example:
        >>> limits = kvtrie.gates.Thresholds()
        >>> gate = Gate("m@1", "bfloat16", "default", limits, measured=())
        >>> decision = gate.policy(kvtrie.ReusePolicy(approximate=True), model="m@1")
        >>> decision.policy == kvtrie.EXACT_ONLY, decision.reason
        (True, 'nothing that reuses as much was measured')
    """

    model: str
    kv_dtype: str
    rope: str
    thresholds: Thresholds
    measured: tuple[Measured, ...]
    data: str = ""
    checkpoint: str | None = None
    template: str | None = None

    def policy(
        self,
        wanted: ReusePolicy,
        *,
        model: str | None = None,
        checkpoint: str | None = None,
        kv_dtype: str | None = None,
        rope: str | None = None,
        template: str | None = None,
    ) -> Decision:
        """Decide what a request may reuse; `Decision.of` then decides on each plan.

        A kind of edit is cleared by the measurement of the policy itself, if it has this kind, else
        by that of any policy that reuses at least as much in every respect.

        Args:
            wanted: What the request wants to reuse. Without ``min_run`` it means the shortest
                possible runs, 8 tokens.
            model: The running model, as in the engine's namespace.
            checkpoint: Digest of the running model's directory, for an engine that names models in
                another way. ``model`` or ``checkpoint`` must be given.
            kv_dtype: Type and scales of the running KV, as for the class; None: not compared.
            rope: RoPE settings of the running model; None: not compared.
            template: Digest of the running chat template; None: not compared.

        Raises:
            GateMismatchError: The gate is for another model, KV type, RoPE setting or chat
                template, or does not say which checkpoint was measured.
            ValueError: Neither ``model`` nor ``checkpoint`` is given.
        """
        self._check(
            "policy",
            model=model,
            checkpoint=checkpoint,
            kv_dtype=kv_dtype,
            rope=rope,
            template=template,
        )
        if not wanted.approximate:
            return Decision(wanted, is_cleared=True, reason="exact reuse needs no clearance")
        laxer = [one for one in self.measured if wanted.is_at_least_as_strict_as(one.policy)]
        same = [one for one in laxer if one.policy.is_at_least_as_strict_as(wanted)]
        its = [kind for one in same for kind in self._judged(one)]
        others = [kind for one in laxer if one not in same for kind in self._judged(one)]
        # The policy's own measurement of a kind decides it, whatever another policy showed.
        kinds = (*its, *(kind for kind in others if kind.failure is None), *others)
        names = dict.fromkeys(kind.name for kind in kinds if kind.failure is None)
        if names:
            reason = f"cleared for edits of the kinds {', '.join(names)}"
            return Decision(wanted, is_cleared=True, reason=reason, kinds=kinds)
        reason = "nothing that reuses as much was measured"
        if laxer:
            reason = "no edit of any kind was measured"
        if kinds:
            reason = f"{kinds[0].name}: {kinds[0].failure}"
        return Decision(EXACT_ONLY, is_cleared=False, reason=reason)

    def ladder(
        self,
        *,
        repairs: Collection[str] = ("fronts",),
        min_run: int = 0,
        model: str | None = None,
        checkpoint: str | None = None,
        kv_dtype: str | None = None,
        rope: str | None = None,
        template: str | None = None,
    ) -> Decision:
        """What a request that names no policy may reuse: each plan's cheapest cleared policy.

        The rungs are the measured policies that are cleared for a kind of edit. Policies that reuse
        other conversations' KV are none: a request has to ask for that.

        Args:
            repairs: The ways to choose tokens to recompute that the engine has.
            min_run: The shortest run that the engine's index finds.
            model: As for `policy`.
            checkpoint: As for `policy`.
            kv_dtype: As for `policy`.
            rope: As for `policy`.
            template: As for `policy`.

        Raises:
            GateMismatchError: As for `policy`.
            ValueError: As for `policy`.
        """
        self._check(
            "ladder",
            model=model,
            checkpoint=checkpoint,
            kv_dtype=kv_dtype,
            rope=rope,
            template=template,
        )
        usable = [
            one
            for one in self.measured
            if one.policy.scope == "conversation"
            and (one.policy.recompute_share == 0 or one.policy.repair in repairs)
            and (one.policy.min_run or 0) >= min_run
        ]
        rungs = [one for one in usable if one.cleared(self.thresholds)]
        if not rungs:
            failures = [
                f"{one.name}, {kind.name}: {kind.verdict(self.thresholds).reason}"
                for one in usable
                for kind in one.kinds
            ]
            reason = failures[0] if failures else "no policy was measured that this engine can run"
            return Decision(EXACT_ONLY, is_cleared=False, reason=reason)
        names: dict[str, list[str]] = {}
        decisions = []
        for one in rungs:
            its = [kind.name for kind in one.cleared(self.thresholds)]
            for name in its:
                names.setdefault(name, []).append(one.name)
            reason = f"{one.name} is cleared for edits of the kinds {', '.join(its)}"
            decisions.append(
                Decision(one.policy, is_cleared=True, reason=reason, kinds=self._judged(one))
            )
        shown = ", ".join(f"{kind} ({', '.join(by)})" for kind, by in names.items())
        return Ladder(
            laxest([one.policy for one in rungs]),
            is_cleared=True,
            reason=f"cleared for edits of the kinds {shown}",
            rungs=tuple(decisions),
        )

    def _check(self, call: str, **running: str | None) -> None:
        """Refuse an engine with another model, or other settings, than was measured."""
        if running["model"] is None and running["checkpoint"] is None:
            msg = f"Gate.{call}: give the running model, or the digest of its checkpoint"
            raise ValueError(msg)
        for name, value in running.items():
            own = getattr(self, name)
            if value is not None and value != own:
                msg = f"Gate.{call}: the gate was measured with {name} {own!r}, not {value!r}"
                raise GateMismatchError(msg)

    def _judged(self, one: Measured) -> tuple[Judged, ...]:
        return tuple(
            Judged(
                kind.name,
                kind.box,
                kind.verdict(self.thresholds).reason,
                1 - kind.figures.saved,
            )
            for kind in one.kinds
        )

    def cleared(self) -> tuple[Measured, ...]:
        """The measured policies with a cleared kind, most such kinds first."""
        count = {id(one): len(one.cleared(self.thresholds)) for one in self.measured}
        kept = [one for one in self.measured if count[id(one)]]
        return tuple(sorted(kept, key=lambda one: -count[id(one)]))

    def write(self, path: str | PathLike[str]) -> None:
        """Write the gate file atomically.

        Args:
            path: A file there is replaced; of a link, the file it points to.

        Raises:
            OSError: It cannot be written, or ``path`` is something other than a file.
            GateError: The result could not be read back.
        """
        text = self.to_json()
        target = checked_target(path)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def to_json(self) -> str:
        """The text of the gate file.

        Raises:
            GateError: A value could not be read back.
        """
        return as_text(self)


def read(path: str | PathLike[str]) -> Gate:
    """Read a gate file.

    Args:
        path: What ``kvtrie calibrate --out`` wrote.

    Raises:
        OSError: The file cannot be read.
        GateError: It is too large, is not a gate file, or marks a kind as cleared whose figures
            are not within the thresholds.
        GateMismatchError: Its version is not supported.
    """
    with Path(path).open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        refuse(str(path), f"more than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path}: not a gate file: byte {error.start} is not UTF-8"
        raise GateError(msg) from None
    return Gate(**parse(text, str(path)))


def checked_target(path: str | PathLike[str]) -> Path:
    """The file to be replaced, after links.

    Raises:
        OSError: ``path`` is a directory, a device, a pipe or a loop of links.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(os.path.realpath(path))
