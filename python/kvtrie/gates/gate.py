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
from kvtrie.gates.boxes import terms

if TYPE_CHECKING:
    from os import PathLike

    from kvtrie.gates.boxes import Box, Plan, Terms
    from kvtrie.gates.figures import Thresholds
    from kvtrie.gates.verdict import Measured

MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Judged:
    """A kind of edit, as `Decision` looks it up.

    Attributes:
        name: Its name.
        box: The plans that are of this kind.
        failure: Why it is not cleared; None if it is.
    """

    name: str
    box: Box
    failure: str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request may reuse, and which of its plans.

    Attributes:
        policy: The wanted policy, or an exact one.
        is_cleared: Whether it is the wanted policy.
        reason: Why, in one sentence.
        kinds: The kinds of edit that the policy was measured on, the best fitting measurement
            first; None: a plan of any kind may be used.
    """

    policy: ReusePolicy
    is_cleared: bool
    reason: str
    kinds: tuple[Judged, ...] | None = None

    def of(self, plan: Plan) -> Decision:
        """The decision on one plan of this policy.

        Takes time linear in the plan's moved runs and segments and in the kinds.

        Args:
            plan: A plan that is not released.

        Returns:
            This decision, if the plan may be used. Else one with the exact policy under which to
            plan again, and the reason.
        """
        if self.kinds is None:
            return self
        found = terms(plan)
        if found is None:
            return self
        reason = f"no edit of this kind was measured ({_shown(found)})"
        for kind in self.kinds:
            if found in kind.box:
                if kind.failure is None:
                    return self
                reason = f"edits of the kind {kind.name!r} are not cleared: {kind.failure}"
                break
        exact = self.policy.replace(approximate=False)
        return Decision(exact, is_cleared=False, reason=reason)


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdicts on one model. ``docs/fidelity.md`` has an example.

    Args:
        model: Name and fingerprint, as in the engine's namespace.
        kv_dtype: Element type of the measured KV.
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
            kv_dtype: Element type of the running KV; None: not compared.
            rope: RoPE settings of the running model; None: not compared.
            template: Digest of the running chat template; None: not compared.

        Raises:
            GateMismatchError: The gate is for another model, element type, RoPE setting or chat
                template, or does not say which checkpoint was measured.
            ValueError: Neither ``model`` nor ``checkpoint`` is given.
        """
        if model is None and checkpoint is None:
            msg = "Gate.policy: give the running model, or the digest of its checkpoint"
            raise ValueError(msg)
        for name, own, running in (
            ("model", self.model, model),
            ("checkpoint", self.checkpoint, checkpoint),
            ("kv_dtype", self.kv_dtype, kv_dtype),
            ("rope", self.rope, rope),
            ("template", self.template, template),
        ):
            if running is not None and running != own:
                msg = f"Gate.policy: the gate was measured with {name} {own!r}, not {running!r}"
                raise GateMismatchError(msg)
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

    def _judged(self, one: Measured) -> tuple[Judged, ...]:
        return tuple(
            Judged(kind.name, kind.box, kind.verdict(self.thresholds).reason) for kind in one.kinds
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


def _shown(found: Terms) -> str:
    whose = "own" if found.same_conversation else "other"
    return (
        f"{found.cuts} cuts, {found.lost_context:.0%} of the context lost, "
        f"{found.new_context:.0%} new, moved by {found.distance}, {found.hops} hops, from {whose} "
        "conversations"
    )
