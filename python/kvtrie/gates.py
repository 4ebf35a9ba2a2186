"""What a model is cleared for: reads and writes the gate files of ``kvtrie calibrate``.

A gate file names one model and says, for each reuse policy that was measured on it, what it cost
and whether that is within the thresholds. Engines ask it before they reuse KV approximately and use
``kvtrie.EXACT_ONLY`` for what it does not clear. A cleared policy is still approximate.

Neither torch nor numpy is needed here.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie._core import EXACT_ONLY, KvTrieError, ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

__all__ = [
    "Decision",
    "Figures",
    "Gate",
    "GateError",
    "GateMismatchError",
    "Measured",
    "Thresholds",
    "paired_interval",
    "read",
]

FORMAT: Final = "kvtrie-gate"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 20
MAX_POLICIES: Final = 256
MAX_SCENARIOS: Final = 64
MAX_TEXT: Final = 512
_MAX_COUNT: Final = 2**53


class GateError(KvTrieError, ValueError):
    """A gate file that cannot be read, is no gate file, or contradicts itself."""


class GateMismatchError(GateError):
    """A gate file of another model or of another version."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a policy must keep to be cleared.

    Attributes:
        max_loss: Task accuracy that may be lost, 0 to 1. No scenario may show a greater loss, and
            over all questions the upper end of the 95 % interval, paired by question, may not be
            greater. A scenario without questions clears nothing.
        max_kl_mean: Most mean KL divergence in nats, or None for any.
        max_kl_p99: Most KL divergence at the 99th percentile, or None for any.
        min_top1: Least share of positions with the same likeliest token, or None for any.

    Raises:
        ValueError: A threshold is out of range.
    """

    max_loss: float = 0.01
    max_kl_mean: float | None = None
    max_kl_p99: float | None = None
    min_top1: float | None = None

    def __post_init__(self) -> None:
        limits = (
            ("max_loss", self.max_loss, 1.0),
            ("max_kl_mean", self.max_kl_mean, math.inf),
            ("max_kl_p99", self.max_kl_p99, math.inf),
            ("min_top1", self.min_top1, 1.0),
        )
        for name, value, most in limits:
            if value is not None and not 0 <= value <= most:
                msg = f"Thresholds: {name} must be in 0..={most}, not {value}"
                raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy did in one scenario, against full recomputation.

    Attributes:
        scenario: Name of the scenario.
        positions: Next-token distributions that were compared.
        kl_mean: Mean KL divergence from full recomputation, in nats.
        kl_p99: Its 99th percentile.
        top1: Share of positions with the same likeliest token.
        questions: Replies that were judged; 0 where the data has none.
        right_full: Right ones under full recomputation.
        lost: Of these, the ones that are wrong under the policy.
        gained: Right ones under the policy that are wrong under full recomputation.
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
        """Right ones under the policy."""
        return self.right_full - self.lost + self.gained

    @property
    def loss(self) -> float:
        """Share of the questions that was lost; negative where more were gained."""
        return (self.lost - self.gained) / self.questions if self.questions else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the loss, paired by question."""
        return paired_interval(self.lost, self.gained, self.questions)

    @property
    def saved(self) -> float:
        """Share of the prompts' tokens that were not computed."""
        total = self.exact + self.moved + self.computed
        return (self.exact + self.moved) / total if total else 0.0

    def failure(self, thresholds: Thresholds) -> str | None:
        """Why these figures are not within the thresholds; None if they are."""
        for name in _NUMBERS:
            # No comparison below would notice.
            if math.isnan(getattr(self, name)):
                return f"{self.scenario}: {name} is not a number"
        if self.questions == 0:
            return f"{self.scenario}: the data has no answers, so no accuracy was measured"
        if self.loss > thresholds.max_loss:
            return (
                f"{self.scenario}: {100 * self.loss:.2f} points of accuracy lost "
                f"({self.questions} questions), the limit is {100 * thresholds.max_loss:.2f}"
            )
        for name, value, most in (
            ("mean KL", self.kl_mean, thresholds.max_kl_mean),
            ("KL at the 99th percentile", self.kl_p99, thresholds.max_kl_p99),
        ):
            if most is not None and value > most:
                return f"{self.scenario}: {name} is {value:.4g}, the limit is {most:.4g}"
        if thresholds.min_top1 is not None and self.top1 < thresholds.min_top1:
            return (
                f"{self.scenario}: {self.top1:.2%} of the likeliest tokens agree, at least "
                f"{thresholds.min_top1:.2%} are wanted"
            )
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy and what it cost.

    Attributes:
        name: What the report calls it.
        policy: The policy; its ``min_run`` is the one that was in force.
        figures: One entry a scenario, at least one.
    """

    name: str
    policy: ReusePolicy
    figures: tuple[Figures, ...]

    @property
    def questions(self) -> int:
        """Questions of all scenarios."""
        return sum(one.questions for one in self.figures)

    @property
    def loss(self) -> float:
        """Share of all questions that was lost."""
        lost = sum(one.lost - one.gained for one in self.figures)
        return lost / self.questions if self.questions else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the loss over all questions, paired by question."""
        lost, gained = (sum(getattr(one, n) for one in self.figures) for n in ("lost", "gained"))
        return paired_interval(lost, gained, self.questions)

    def failure(self, thresholds: Thresholds) -> str | None:
        """Why the policy is not cleared; None if it is."""
        if not self.figures:
            return "nothing was measured"
        for one in self.figures:
            reason = one.failure(thresholds)
            if reason is not None:
                return reason
        high = self.interval[1]
        if high > thresholds.max_loss:
            return (
                f"up to {100 * high:.2f} points of accuracy lost over {self.questions} questions, "
                f"the limit is {100 * thresholds.max_loss:.2f}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request may do.

    Attributes:
        policy: The policy that was wanted, or ``kvtrie.EXACT_ONLY``.
        is_cleared: Whether it is the one that was wanted.
        reason: Why, in one sentence.
    """

    policy: ReusePolicy
    is_cleared: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdicts on one model.

    Args:
        model: Name and fingerprint, as the engine's namespace has it.
        kv_dtype: Element type of the KV that was measured.
        rope: RoPE settings, as the engine's namespace has them.
        thresholds: What a policy must keep.
        measured: The policies.
        data: What was replayed, in words.
        checkpoint: Digest of the model directory that was measured, by which engines of other code
            know it again; None where its weights are not in safetensors files.

    Example:
        >>> import kvtrie
        >>> from kvtrie import gates
        >>> figures = gates.Figures(
        ...     "one turn",
        ...     positions=900,
        ...     kl_mean=0.01,
        ...     kl_p99=0.2,
        ...     top1=0.99,
        ...     questions=500,
        ...     right_full=495,
        ...     lost=0,
        ...     gained=0,
        ...     exact=700,
        ...     moved=200,
        ...     computed=100,
        ... )
        >>> rotated = kvtrie.ReusePolicy(min_run=16)
        >>> measured = gates.Measured("rotated", rotated, (figures,))
        >>> gate = gates.Gate("m@1", "bfloat16", "default", gates.Thresholds(), (measured,))
        >>> gate.policy(rotated, model="m@1").reason
        "cleared by the measurement of 'rotated'"
        >>> gate.policy(kvtrie.ReusePolicy(min_run=8), model="m@1").policy == kvtrie.EXACT_ONLY
        True
    """

    model: str
    kv_dtype: str
    rope: str
    thresholds: Thresholds
    measured: tuple[Measured, ...]
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
        """Answer what a request may do.

        A policy is cleared if it was measured and kept the thresholds, or if such a policy reuses
        at least as much in every respect (shorter runs, more hops, a greater share, fewer tokens
        recomputed, fewer kinds forbidden) and its own measurement, if there is one, did not fail.

        Args:
            wanted: What the request would like to reuse. Its ``min_run`` must be said, unless runs
                as short as any were measured.
            model: The running model, as the engine's namespace has it.
            checkpoint: Digest of the running model's directory, for an engine that names models in
                another way. One of the two must be given.
            kv_dtype: Element type of the running KV; None asks for nothing.
            rope: RoPE settings of the running model; None asks for nothing.

        Returns:
            The wanted policy, or ``kvtrie.EXACT_ONLY``, and why.

        Raises:
            GateMismatchError: The gate belongs to another model, element type or RoPE setting, or
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
                failure = one.failure(self.thresholds)
                if failure is not None:
                    return Decision(EXACT_ONLY, is_cleared=False, reason=failure)
        for one in self.measured:
            if not _is_bolder(one.policy, wanted):
                continue
            failure = one.failure(self.thresholds)
            if failure is None:
                reason = f"cleared by the measurement of {one.name!r}"
                return Decision(wanted, is_cleared=True, reason=reason)
            reason = failure
        return Decision(EXACT_ONLY, is_cleared=False, reason=reason)

    def cleared(self) -> tuple[Measured, ...]:
        """The measured policies that kept the thresholds, most tokens saved first."""
        kept = [one for one in self.measured if one.failure(self.thresholds) is None]
        return tuple(sorted(kept, key=lambda one: sum(f.computed for f in one.figures)))

    def write(self, path: str | PathLike[str]) -> None:
        """Write the gate file, whole or not at all.

        Args:
            path: Where to; a file there is replaced.

        Raises:
            OSError: It cannot be written.
            GateError: It would not be a gate file that can be read back.
        """
        text = self.to_json()
        target = Path(path)
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
        """The gate as the text of its file.

        Raises:
            GateError: A value would be refused when it is read back.
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
            "policies": [
                {
                    "name": one.name,
                    "policy": {name: _listed(getattr(one.policy, name)) for name in _POLICY_FIELDS},
                    "figures": [_plain(figures) for figures in one.figures],
                    "cleared": one.failure(self.thresholds) is None,
                }
                for one in self.measured
            ],
        }
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        _from_text(text, "Gate.to_json")
        return text


def paired_interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """The 95 % interval of a loss of accuracy, paired by question.

    Tango's score interval (Statistics in Medicine 17, 1998, 891-908). It holds its level where
    hardly any pair differs; there, normal intervals and bootstraps shrink to nothing.

    Args:
        lost: Questions that are right under full recomputation alone.
        gained: Questions that are right under the policy alone.
        questions: All questions.

    Returns:
        Lower and upper end of ``(lost - gained) / questions``; everything without questions.

    Example:
        >>> low, high = paired_interval(0, 0, 400)
        >>> round(high, 4)
        0.0095
    """
    if questions == 0:
        return -1.0, 1.0
    return -_upper(gained, lost, questions), _upper(lost, gained, questions)


def _upper(lost: int, gained: int, questions: int) -> float:
    """Where the score statistic of a loss falls to the 2.5 % quantile."""
    low, high = (lost - gained) / questions, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = (2 * questions - lost + gained) * middle - lost - gained
        constant = gained * middle * (1 - middle)
        root = math.sqrt(linear * linear + 8 * questions * constant)
        variance = questions * ((root - linear) / (2 * questions) + middle * (1 - middle))
        distance = questions * middle - (lost - gained)
        if distance * distance > _Z95 * _Z95 * variance:
            high = middle
        else:
            low = middle
    return high


def read(path: str | PathLike[str]) -> Gate:
    """Read a gate file.

    Args:
        path: What ``kvtrie calibrate --out`` wrote.

    Returns:
        The gate; ask it for a policy.

    Raises:
        OSError: The file cannot be read.
        GateError: It is too large, no gate file, or says of a policy that it is cleared when its
            figures are not within the thresholds.
        GateMismatchError: It is of a version that is not known here.
    """
    with Path(path).open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        _refuse(str(path), f"more than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path}: no gate file: byte {error.start} is not UTF-8"
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
    "partial_blocks",
)
_NUMBERS: Final = ("kl_mean", "kl_p99", "top1")
_COUNTS: Final = (
    *("positions", "questions", "right_full", "lost", "gained"),
    *("exact", "moved", "computed"),
)
_Z95: Final = 1.959963984540054
_LEAST_RUN: Final = 8  # an index finds nothing shorter


def _is_bolder(measured: ReusePolicy, wanted: ReusePolicy) -> bool:
    """Whether the measured policy reuses at least as much as the wanted one in every respect."""
    least = _LEAST_RUN if wanted.min_run is None else wanted.min_run
    return (
        measured.approximate
        and (measured.min_run or _LEAST_RUN) <= least
        and measured.max_hops >= wanted.max_hops
        and measured.max_approximate_share >= wanted.max_approximate_share
        and measured.recompute_first <= wanted.recompute_first
        and measured.recompute_last <= wanted.recompute_last
        and set(measured.forbid_kinds) <= set(wanted.forbid_kinds)
    )


def _plain(value: Thresholds | Figures) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _listed(value: Any) -> Any:  # noqa: ANN401 - a field of a policy may be anything
    return list(value) if isinstance(value, tuple) else value


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where}: no gate file: {why}"
    raise GateError(msg)


class _Reader:
    """Takes fields out of a JSON object, each checked; what is left over is refused."""

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

    def number(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            self.refuse(f"{name!r} must be a finite number, not {_short(value)}")
        return float(value)

    def optional(self, name: str) -> float | None:
        if self._left.get(name, 0) is None:
            del self._left[name]
            return None
        return self.number(name)

    def count(self, name: str) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
            self.refuse(f"{name!r} must be a count, not {_short(value)}")
        return value

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
    # An integer of more digits than Python prints is shown by its type.
    try:
        text = repr(value)
    except ValueError:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a field comes twice"
        raise ValueError(msg)
    return found


def _no_constant(name: str) -> NoReturn:
    msg = f"{name} is no number of JSON"
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
    if type(version) is not int or version != VERSION:
        msg = f"{where}: version {_short(version)} is not known here, only {VERSION} is"
        raise GateMismatchError(msg)
    model, kv_dtype = fields.text("model"), fields.text("kv_dtype")
    if not model:
        fields.refuse("'model' is empty")
    rope, data = fields.text("rope", 1 << 16), fields.text("data")
    checkpoint = fields.optional_text("checkpoint")
    limits = _Reader(fields.take("thresholds"), f"{where}, thresholds")
    try:
        thresholds = Thresholds(
            max_loss=limits.number("max_loss"),
            max_kl_mean=limits.optional("max_kl_mean"),
            max_kl_p99=limits.optional("max_kl_p99"),
            min_top1=limits.optional("min_top1"),
        )
    except GateError:
        raise
    except ValueError as error:
        limits.refuse(str(error))
    limits.close()
    measured = tuple(
        _measured(entry, f"{where}, policy {number}", thresholds)
        for number, entry in enumerate(fields.items("policies", MAX_POLICIES), start=1)
    )
    fields.close()
    return Gate(model, kv_dtype, rope, thresholds, measured, data, checkpoint)


def _measured(entry: object, where: str, thresholds: Thresholds) -> Measured:
    fields = _Reader(entry, where)
    name = fields.text("name")
    policy = _policy(fields.take("policy"), where)
    scenarios = fields.items("figures", MAX_SCENARIOS)
    figures = tuple(
        _figures(one, f"{where}, scenario {number}") for number, one in enumerate(scenarios, 1)
    )
    one = Measured(name, policy, figures)
    is_cleared = fields.take("cleared")
    fields.close()
    if is_cleared is not (one.failure(thresholds) is None):
        fields.refuse(f"'cleared' is {_short(is_cleared)}, the figures say otherwise")
    return one


def _policy(value: object, where: str) -> ReusePolicy:
    fields = _Reader(value, f"{where}, policy")
    given: Mapping[str, Any] = {name: fields.take(name) for name in _POLICY_FIELDS}
    fields.close()
    for name in ("approximate", "partial_blocks"):
        if not isinstance(given[name], bool):
            fields.refuse(f"{name!r} must be true or false, not {_short(given[name])}")
    if given["min_run"] is None:
        fields.refuse("'min_run' must be a number: the shortest run that was in force")
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
    counts: dict[str, Any] = {name: fields.count(name) for name in _COUNTS}
    numbers: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    fields.close()
    if counts["right_full"] > counts["questions"]:
        fields.refuse(f"more right answers than the {counts['questions']} questions")
    if counts["lost"] > counts["right_full"]:
        fields.refuse(f"more answers are lost than the {counts['right_full']} right ones")
    if counts["gained"] > counts["questions"] - counts["right_full"]:
        fields.refuse("more answers are gained than there were wrong ones")
    if min(numbers["kl_mean"], numbers["kl_p99"]) < 0 or not 0 <= numbers["top1"] <= 1:
        fields.refuse("a divergence is negative, or a share is not in 0..=1")
    return Figures(scenario=scenario, **counts, **numbers)
