"""Gate files of ``kvtrie calibrate``: which reuse policies a model is cleared for.

A gate file names one model, and says what each policy measured on it cost and whether that is
within the thresholds. Engines use ``kvtrie.EXACT_ONLY`` for what it does not clear. A cleared
policy is still approximate. ``docs/fidelity.md`` has the rule.

Clearing is monotone: a policy that is not cleared stays so if it loses more, gains less or diverges
more, or if a control loses less.

This module needs neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie._core import EXACT_ONLY, KvTrieError, ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

__all__ = [
    "CONTROLS",
    "Control",
    "Decision",
    "Figures",
    "Gate",
    "GateError",
    "GateMismatchError",
    "Measured",
    "Thresholds",
    "paired_interval",
    "questions_needed",
    "read",
]

FORMAT: Final = "kvtrie-gate"
VERSION: Final = 2
MAX_BYTES: Final = 1 << 20
MAX_POLICIES: Final = 256
MAX_SCENARIOS: Final = 64
MAX_TEXT: Final = 512
LEAST_RIGHT: Final = 0.5
"""Least share of questions that full recomputation must get right, so that losses can show."""
_MAX_COUNT: Final = 2**53


class GateError(KvTrieError, ValueError):
    """A gate file that cannot be read, is not a gate file, or contradicts itself."""


class GateMismatchError(GateError):
    """A gate file of another model or of another version."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a policy must keep to be cleared; see ``docs/fidelity.md`` for the defaults.

    Attributes:
        max_loss: Task accuracy that may be lost, 0 to 1.
        max_kl_mean: Highest mean KL divergence, in nats.
        max_kl_p99: Highest KL divergence at the 99th percentile, in nats.
        min_top1: Lowest share of positions with the same likeliest token.

    Raises:
        TypeError: A threshold is not a number.
        ValueError: A threshold is out of range, or not finite.
    """

    max_loss: float = 0.01
    max_kl_mean: float = 0.02
    max_kl_p99: float = 0.5
    min_top1: float = 0.93

    def __post_init__(self) -> None:
        most = {"max_loss": 1.0, "min_top1": 1.0}
        for name in _THRESHOLDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                msg = f"Thresholds: {name} must be a number, not {_short(value)}"
                raise TypeError(msg)
            if not _is_finite(value) or not 0 <= value <= most.get(name, math.inf):
                limits = f"in [0, {most[name]}]" if name in most else "finite and at least 0"
                msg = f"Thresholds: {name} must be {limits}, not {_short(value)}"
                raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy did in one scenario, compared with full recomputation.

    Attributes:
        scenario: Its name.
        positions: Next-token distributions that were compared.
        kl_mean: Mean KL divergence from full recomputation, in nats.
        kl_p99: Its 99th percentile.
        top1: Share of positions with the same likeliest token.
        questions: Replies that were judged; 0 if the data has none.
        right_full: Replies that are right under full recomputation.
        lost: Of these, the ones that are wrong under the policy.
        gained: Replies that are right under the policy and wrong under full recomputation.
        exact: Prompt tokens reused exactly.
        moved: Prompt tokens reused approximately.
        computed: Prompt tokens computed.
    """

    scenario: str
    positions: int
    kl_mean: float
    kl_p99: float
    top1: float
    questions: int
    right_full: int
    lost: int
    gained: int
    exact: int
    moved: int
    computed: int

    @property
    def right(self) -> int:
        """Replies that are right under the policy."""
        return self.right_full - self.lost + self.gained

    @property
    def loss(self) -> float:
        """Share of the questions that was lost; negative if more were gained."""
        return (self.lost - self.gained) / self.questions if self.questions else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the loss, paired by question."""
        return paired_interval(self.lost, self.gained, self.questions)

    @property
    def saved(self) -> float:
        """Share of the prompt tokens that were not computed."""
        total = self.exact + self.moved + self.computed
        return (self.exact + self.moved) / total if total else 0.0

    def flaw(self) -> str | None:
        """Why these figures are impossible, with the field's name, or None."""
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MAX_COUNT:
                return f"{name!r} must be a count in [0, {_MAX_COUNT}], not {_short(value)}"
        for name, limits in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not _is_finite(value):
                return f"{name!r} must be a finite number, not {_short(value)}"
            if not limits[0] <= value <= limits[1]:
                return f"{name!r} must be in [{limits[0]}, {limits[1]}], not {_short(value)}"
        wrong = self.questions - self.right_full
        for name, most, of in (
            ("right_full", self.questions, "questions"),
            ("lost", self.right_full, "right answers"),
            ("gained", wrong, "wrong answers"),
            ("questions", self.positions, "positions"),
        ):
            value = getattr(self, name)
            if value > most:
                return f"{name!r} is {value}, more than the {most} {of}"
        return None

    def outside(self, thresholds: Thresholds) -> list[str]:
        """Every figure outside the thresholds, with its value and the limit."""
        found = []
        if self.loss > thresholds.max_loss:
            found.append(
                f"{100 * self.loss:.2f} points of accuracy lost ({self.questions} questions), the "
                f"limit is {100 * thresholds.max_loss:.2f}"
            )
        for name, value, most in (
            ("mean KL", self.kl_mean, thresholds.max_kl_mean),
            ("KL at the 99th percentile", self.kl_p99, thresholds.max_kl_p99),
        ):
            if value > most:
                found.append(f"{name} is {value:.4g}, the limit is {most:.4g}")
        if self.top1 < thresholds.min_top1:
            found.append(
                f"{self.top1:.2%} of the likeliest tokens agree, the limit is "
                f"{thresholds.min_top1:.2%}"
            )
        return found

    def blind(self, controls: Sequence[Control], thresholds: Thresholds) -> list[str]:
        """Why this data cannot show that a policy is bad, with value and limit.

        Args:
            controls: Measured on the same replies.
            thresholds: What a policy must keep.
        """
        if self.questions == 0:
            return ["the data has no answers, so no accuracy was measured"]
        found = []
        if self.right_full < LEAST_RIGHT * self.questions:
            found.append(
                f"full recomputation is right on {self.right_full} of {self.questions} questions, "
                f"at least {LEAST_RIGHT:.0%} are needed"
            )
        seen = [
            (one.name, figures)
            for one in controls
            for figures in one.figures
            if figures.scenario == self.scenario and figures.flaw() is None
        ]
        if not seen:
            return [*found, "no control was measured"]
        if all(figures.replies != self.replies for _, figures in seen):
            return [*found, "the controls were measured on other replies"]
        lows = {
            name: figures.interval[0] for name, figures in seen if figures.replies == self.replies
        }
        if max(lows.values()) <= thresholds.max_loss:
            shown = ", ".join(
                f"{name!r} loses at least {100 * low:.2f}" for name, low in lows.items()
            )
            found.append(
                f"no control is detected as worse: {shown} points ({self.questions} questions), "
                f"the limit is more than {100 * thresholds.max_loss:.2f}"
            )
        return found

    @property
    def replies(self) -> tuple[int, int, int]:
        """Positions, questions and right answers of full recomputation: equal on the same data."""
        return self.positions, self.questions, self.right_full


@dataclass(frozen=True, slots=True)
class Control:
    """A way to reuse KV that no request can ask for: shows whether data can detect a loss.

    Attributes:
        name: One of ``CONTROLS``.
        figures: One entry per scenario.

    Raises:
        ValueError: ``name`` is not one of ``CONTROLS``.
    """

    name: str
    figures: tuple[Figures, ...]

    def __post_init__(self) -> None:
        if self.name not in CONTROLS:
            msg = f"Control: 'name' must be one of {', '.join(CONTROLS)}, not {_short(self.name)}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy and what it cost.

    Attributes:
        name: What the report calls it.
        policy: The policy, with the ``min_run`` that was used.
        figures: One entry per scenario, at least one.
    """

    name: str
    policy: ReusePolicy
    figures: tuple[Figures, ...]

    @property
    def questions(self) -> int:
        """Questions of all scenarios."""
        return sum(one.questions for one in self.figures)

    @property
    def lost(self) -> int:
        """Answers lost in all scenarios."""
        return sum(one.lost for one in self.figures)

    @property
    def gained(self) -> int:
        """Answers gained in all scenarios."""
        return sum(one.gained for one in self.figures)

    @property
    def loss(self) -> float:
        """Share of all questions that was lost."""
        return (self.lost - self.gained) / self.questions if self.questions else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the loss over all questions, paired by question."""
        return paired_interval(self.lost, self.gained, self.questions)

    def failure(self, thresholds: Thresholds, controls: Sequence[Control]) -> str | None:
        """Why the policy is not cleared, with values and limits; None if it is.

        Args:
            thresholds: What it must keep.
            controls: Measured on the same replies.
        """
        flaw = _scenarios_flaw(self, controls)
        if flaw is not None:
            return flaw
        for one in self.figures:
            reasons = [*one.blind(controls, thresholds), *one.outside(thresholds)]
            if reasons:
                return f"{one.scenario}: {'; '.join(reasons)}"
        high = self.interval[1]
        if high > thresholds.max_loss:
            needed = questions_needed(self.lost, self.gained, thresholds.max_loss)
            more = "" if needed is None else f" (undecided: {needed} questions are needed)"
            return (
                f"up to {100 * high:.2f} points of accuracy lost over {self.questions} questions, "
                f"the limit is {100 * thresholds.max_loss:.2f}{more}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """Which policy a request may use.

    Attributes:
        policy: The wanted policy, or ``kvtrie.EXACT_ONLY``.
        is_cleared: Whether it is the wanted policy.
        reason: Why, in one sentence.
    """

    policy: ReusePolicy
    is_cleared: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdicts on one model. ``docs/fidelity.md`` has an example.

    Args:
        model: Name and fingerprint, as in the engine's namespace.
        kv_dtype: Element type of the measured KV.
        rope: RoPE settings, as in the engine's namespace.
        thresholds: What a policy must keep.
        measured: The policies.
        controls: On the same replies. Without controls nothing is cleared.
        data: A description of the replayed data.
        checkpoint: Digest of the measured model directory, by which engines with another namespace
            recognise it; None if its weights are not in safetensors files.

    Example:
        >>> gate = Gate("m@1", "bfloat16", "default", Thresholds(), measured=(), controls=())
        >>> decision = gate.policy(kvtrie.ReusePolicy(approximate=True), model="m@1")
        >>> decision.policy == kvtrie.EXACT_ONLY, decision.reason
        (True, 'nothing that reuses as much was measured')
    """

    model: str
    kv_dtype: str
    rope: str
    thresholds: Thresholds
    measured: tuple[Measured, ...]
    controls: tuple[Control, ...]
    data: str = ""
    checkpoint: str | None = None

    def policy(
        self,
        wanted: ReusePolicy,
        *,
        model: str | None = None,
        checkpoint: str | None = None,
        kv_dtype: str | None = None,
        rope: str | None = None,
    ) -> Decision:
        """Decide which policy a request may use.

        A policy is cleared if a measured policy that reuses at least as much in every respect kept
        the thresholds, and the policy's own measurement, if there is one, did not fail. Reusing
        more means shorter runs, more hops, a greater share, fewer tokens recomputed, or fewer kinds
        forbidden.

        Args:
            wanted: What the request wants to reuse. Without ``min_run`` it means the shortest
                possible runs, 8 tokens.
            model: The running model, as in the engine's namespace.
            checkpoint: Digest of the running model's directory, for an engine that names models in
                another way. ``model`` or ``checkpoint`` must be given.
            kv_dtype: Element type of the running KV; None: not compared.
            rope: RoPE settings of the running model; None: not compared.

        Raises:
            GateMismatchError: The gate is for another model, element type or RoPE setting, or
                does not say which checkpoint was measured.
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
        ):
            if running is not None and running != own:
                msg = f"Gate.policy: the gate was measured with {name} {own!r}, not {running!r}"
                raise GateMismatchError(msg)
        if not wanted.approximate:
            return Decision(wanted, is_cleared=True, reason="exact reuse needs no clearance")
        reason = "nothing that reuses as much was measured"
        for one in self.measured:
            if _is_bolder(one.policy, wanted) and _is_bolder(wanted, one.policy):
                failure = one.failure(self.thresholds, self.controls)
                if failure is not None:
                    return Decision(EXACT_ONLY, is_cleared=False, reason=failure)
        for one in self.measured:
            if not _is_bolder(one.policy, wanted):
                continue
            failure = one.failure(self.thresholds, self.controls)
            if failure is None:
                reason = f"cleared by the measurement of {one.name!r}"
                return Decision(wanted, is_cleared=True, reason=reason)
            reason = failure
        return Decision(EXACT_ONLY, is_cleared=False, reason=reason)

    def cleared(self) -> tuple[Measured, ...]:
        """The measured policies that kept the thresholds, fewest computed tokens first."""
        kept = [one for one in self.measured if one.failure(self.thresholds, self.controls) is None]
        return tuple(sorted(kept, key=lambda one: sum(f.computed for f in one.figures)))

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
        document = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "kv_dtype": self.kv_dtype,
            "rope": self.rope,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "thresholds": _plain(self.thresholds),
            "controls": [
                {"name": one.name, "figures": [_plain(figures) for figures in one.figures]}
                for one in self.controls
            ],
            "policies": [
                {
                    "name": one.name,
                    "policy": {name: _listed(getattr(one.policy, name)) for name in _POLICY_FIELDS},
                    "figures": [_plain(figures) for figures in one.figures],
                    "cleared": one.failure(self.thresholds, self.controls) is None,
                }
                for one in self.measured
            ],
        }
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        _from_text(text, "Gate.to_json")
        return text


def paired_interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """The 95 % interval of a loss of accuracy, paired by question.

    Tango's score interval (Statistics in Medicine 17, 1998, 891-908). It keeps its level where few
    pairs differ; normal intervals and bootstraps shrink to nothing there.

    Args:
        lost: As in `Figures`.
        gained: As in `Figures`.
        questions: All questions.

    Returns:
        Lower and upper end of ``(lost - gained) / questions``; ``(-1, 1)`` without questions.

    Example:
        >>> low, high = paired_interval(0, 0, 400)
        >>> round(high, 4)
        0.0095
    """
    if questions == 0:
        return -1.0, 1.0
    return -_upper(gained, lost, questions), _upper(lost, gained, questions)


def _upper(lost: int, gained: int, questions: int) -> float:
    """The loss at which the score statistic falls to the 2.5 % quantile."""
    low, high = (lost - gained) / questions, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = (2 * questions - lost + gained) * middle - lost - gained
        constant = gained * middle * (1 - middle)
        # With 2^29 questions and more, rounding can make a 0 negative.
        root = math.sqrt(max(0.0, linear * linear + 8 * questions * constant))
        variance = questions * ((root - linear) / (2 * questions) + middle * (1 - middle))
        distance = questions * middle - (lost - gained)
        if distance * distance > _Z95 * _Z95 * variance:
            high = middle
        else:
            low = middle
    return high


def questions_needed(lost: int, gained: int, max_loss: float) -> int | None:
    """The least number of questions that bounds a loss, if no further one differs.

    Args:
        lost: As in `Figures`.
        gained: As in `Figures`.
        max_loss: What may be lost, 0 to 1.

    Returns:
        The number, or None if none below 2^53 is enough (``max_loss=0``).

    Example:
        >>> questions_needed(0, 0, 0.01), questions_needed(1, 0, 0.01)
        (381, 563)
    """
    low, high = max(1, lost + gained) - 1, _MAX_COUNT
    if paired_interval(lost, gained, high)[1] > max_loss:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if paired_interval(lost, gained, middle)[1] <= max_loss:
            high = middle
        else:
            low = middle
    return high


def checked_target(path: str | PathLike[str]) -> Path:
    """The file to be replaced, after links.

    Raises:
        OSError: ``path`` is a directory, a device, a pipe or a loop of links.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(os.path.realpath(path))


def read(path: str | PathLike[str]) -> Gate:
    """Read a gate file.

    Args:
        path: What ``kvtrie calibrate --out`` wrote.

    Raises:
        OSError: The file cannot be read.
        GateError: It is too large, is not a gate file, or marks a policy as cleared whose figures
            are not within the thresholds.
        GateMismatchError: Its version is not supported.
    """
    with Path(path).open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        _refuse(str(path), f"more than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path}: not a gate file: byte {error.start} is not UTF-8"
        raise GateError(msg) from None
    return _from_text(text, str(path))


_POLICY_FIELDS: Final = (
    "approximate",
    "min_run",
    "max_hops",
    "max_approximate_share",
    "recompute_first",
    "recompute_last",
    "forbid_kinds",
    "scope",
    "shared_prefix",
    "recompute_share",
    "repair",
    "partial_blocks",
)
# A file without them is of a policy that computes no such tokens.
_NEW_FIELDS: Final[Mapping[str, Any]] = {"recompute_share": 0.0, "repair": "fronts"}
CONTROLS: Final = ("unrotated", "drop")
"""The controls, as ``kvtrie.calibrate.policies`` names them."""
_THRESHOLDS: Final = ("max_loss", "max_kl_mean", "max_kl_p99", "min_top1")
_NUMBERS: Final = {"kl_mean": (0, math.inf), "kl_p99": (0, math.inf), "top1": (0, 1)}
_COUNTS: Final = (
    *("positions", "questions", "right_full", "lost", "gained"),
    *("exact", "moved", "computed"),
)
_Z95: Final = 1.959963984540054
_LEAST_RUN: Final = 8  # no index finds shorter runs


def _is_bolder(measured: ReusePolicy, wanted: ReusePolicy) -> bool:
    least = _LEAST_RUN if wanted.min_run is None else wanted.min_run
    return (
        measured.approximate
        and (measured.min_run or _LEAST_RUN) <= least
        and measured.max_hops >= wanted.max_hops
        and measured.max_approximate_share >= wanted.max_approximate_share
        and measured.recompute_first <= wanted.recompute_first
        and measured.recompute_last <= wanted.recompute_last
        and set(measured.forbid_kinds) <= set(wanted.forbid_kinds)
        and _is_wider(measured, wanted)
        and measured.recompute_share <= wanted.recompute_share
        and (not measured.recompute_share or measured.repair == wanted.repair)
    )


def _is_wider(measured: ReusePolicy, wanted: ReusePolicy) -> bool:
    in_conversation = wanted.scope == "conversation"
    shares = measured.shared_prefix <= wanted.shared_prefix
    return measured.scope == "namespace" or (in_conversation and shares)


def _scenarios_flaw(one: Measured | Control, controls: Sequence[Control]) -> str | None:
    if not one.figures:
        return "nothing was measured"
    for figures in one.figures:
        flaw = figures.flaw()
        if flaw is not None:
            return f"{figures.scenario}: {flaw}"
    names = [figures.scenario for figures in one.figures]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"'figures' has the scenario {twice!r} twice"
    for control in controls:
        for figures in control.figures:
            if figures.scenario not in names:
                return (
                    f"'figures' lacks the scenario {figures.scenario!r}, in which the control "
                    f"{control.name!r} was measured"
                )
    return None


def _plain(value: Thresholds | Figures) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _listed(value: Any) -> Any:  # noqa: ANN401 - a field of a policy may be anything
    return list(value) if isinstance(value, tuple) else value


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where}: not a gate file: {why}"
    raise GateError(msg)


class _Reader:
    """Removes and checks fields of a JSON object; refuses the remaining ones."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(where, f"an object is expected, not {type(value).__name__}")
        self._left: dict[str, Any] = dict(value)
        self._where = where

    def refuse(self, why: str) -> NoReturn:
        _refuse(self._where, why)

    def take(self, name: str) -> Any:  # noqa: ANN401 - checked by the caller
        if name not in self._left:
            self.refuse(f"{name!r} is missing")
        return self._left.pop(name)

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > most:
            self.refuse(f"{name!r} must be text of at most {most} characters")
        return value

    def optional_text(self, name: str) -> str | None:
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.text(name)

    def items(self, name: str, most: int) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            self.refuse(f"{name!r} must be a list of 1 to {most} entries")
        return value

    def close(self) -> None:
        if self._left:
            self.refuse(f"unknown field {_short(next(iter(self._left)))}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: object) -> str:
    # Python does not print integers of very many digits: show the type.
    try:
        text = repr(value)
    except ValueError:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a field occurs twice"
        raise ValueError(msg)
    return found


def _no_constant(name: str) -> NoReturn:
    msg = f"{name} is not a JSON number"
    raise ValueError(msg)


def _from_text(text: str, where: str) -> Gate:
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        _refuse(where, "it is nested too deeply")
    except ValueError as error:
        _refuse(where, str(error).splitlines()[0][:MAX_TEXT])
    fields = _Reader(document, where)
    if fields.take("format") != FORMAT:
        fields.refuse(f"its format is not {FORMAT!r}")
    version = fields.take("version")
    if type(version) is int and version == 1:
        msg = (
            f"{where}: version 1 clears nothing, because it has no control, no check of full "
            "recomputation and no limits for KL and top 1: run `kvtrie calibrate` again"
        )
        raise GateMismatchError(msg)
    if type(version) is not int or version != VERSION:
        msg = f"{where}: version {_short(version)} is not supported, only {VERSION} is"
        raise GateMismatchError(msg)
    model, kv_dtype = fields.text("model"), fields.text("kv_dtype")
    if not model:
        fields.refuse("'model' is empty")
    rope, data = fields.text("rope", 1 << 16), fields.text("data")
    checkpoint = fields.optional_text("checkpoint")
    limits = _Reader(fields.take("thresholds"), f"{where}, thresholds")
    given = {name: limits.take(name) for name in _THRESHOLDS}
    limits.close()
    try:
        thresholds = Thresholds(**given)
    except (TypeError, ValueError) as error:
        limits.refuse(str(error))
    controls = tuple(
        _control(entry, f"{where}, control {number}")
        for number, entry in enumerate(fields.items("controls", len(CONTROLS)), start=1)
    )
    if len({one.name for one in controls}) != len(controls):
        fields.refuse(f"'controls' has {controls[0].name!r} twice")
    for number, one in enumerate(controls, start=1):
        _check_scenarios(one, controls, f"{where}, control {number}")
    measured = tuple(
        _measured(entry, f"{where}, policy {number}", thresholds, controls)
        for number, entry in enumerate(fields.items("policies", MAX_POLICIES), start=1)
    )
    fields.close()
    return Gate(model, kv_dtype, rope, thresholds, measured, controls, data, checkpoint)


def _control(entry: object, where: str) -> Control:
    fields = _Reader(entry, where)
    name = fields.text("name")
    figures = _all_figures(fields, where)
    fields.close()
    try:
        return Control(name, figures)
    except ValueError as error:
        fields.refuse(str(error))


def _all_figures(fields: _Reader, where: str) -> tuple[Figures, ...]:
    entries = fields.items("figures", MAX_SCENARIOS)
    return tuple(_figures(one, f"{where}, scenario {n}") for n, one in enumerate(entries, 1))


def _check_scenarios(one: Measured | Control, controls: Sequence[Control], where: str) -> None:
    flaw = _scenarios_flaw(one, controls)
    if flaw is not None:
        _refuse(where, flaw)
    replies = {
        (control.name, f.scenario): f.replies for control in controls for f in control.figures
    }
    for figures in one.figures:
        for control in controls:
            theirs = replies.get((control.name, figures.scenario))
            if theirs is not None and theirs != figures.replies:
                _refuse(
                    where,
                    f"{figures.scenario}: 'positions', 'questions' and 'right_full' are "
                    f"{figures.replies}, those of the control {control.name!r} are {theirs}",
                )


def _measured(
    entry: object, where: str, thresholds: Thresholds, controls: Sequence[Control]
) -> Measured:
    fields = _Reader(entry, where)
    name = fields.text("name")
    policy = _policy(fields.take("policy"), where)
    one = Measured(name, policy, _all_figures(fields, where))
    _check_scenarios(one, controls, where)
    is_cleared = fields.take("cleared")
    fields.close()
    if is_cleared is not (one.failure(thresholds, controls) is None):
        fields.refuse(f"'cleared' is {_short(is_cleared)}, the figures say otherwise")
    return one


def _policy(value: object, where: str) -> ReusePolicy:
    if isinstance(value, dict):
        value = {**_NEW_FIELDS, **value}
    fields = _Reader(value, f"{where}, policy")
    given: Mapping[str, Any] = {name: fields.take(name) for name in _POLICY_FIELDS}
    fields.close()
    for name in ("approximate", "partial_blocks"):
        if not isinstance(given[name], bool):
            fields.refuse(f"{name!r} must be true or false, not {_short(given[name])}")
    if given["min_run"] is None:
        fields.refuse("'min_run' must be a number: the shortest run that was used")
    kinds = given["forbid_kinds"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        fields.refuse(f"'forbid_kinds' must be a list of texts, not {_short(kinds)}")
    try:
        policy = ReusePolicy(**given)
    except (TypeError, ValueError, OverflowError) as error:
        fields.refuse(str(error))
    if not policy.approximate:
        fields.refuse("an exact policy needs no clearance")
    return policy


def _figures(value: object, where: str) -> Figures:
    fields = _Reader(value, where)
    scenario = fields.text("scenario")
    given: dict[str, Any] = {name: fields.take(name) for name in (*_COUNTS, *_NUMBERS)}
    fields.close()
    figures = Figures(scenario=scenario, **given)
    flaw = figures.flaw()
    if flaw is not None:
        fields.refuse(flaw)
    return figures
