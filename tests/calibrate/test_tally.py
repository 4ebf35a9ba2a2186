"""What is collected: rows survive a file, kinds follow from terms, and edits end when they may."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvtrie import gates
from kvtrie.calibrate import measure, policies
from kvtrie.calibrate._tally import Observed, Tally

LIMITS = gates.Thresholds()
CUT = gates.Terms(cuts=1, lost_context=0.3, distance=50, hops=1)
MANY = gates.Terms(cuts=4, lost_context=0.5, distance=90, hops=1)
NEW = gates.Terms(lost_context=0.5, distance=0, new_context=0.05, hops=1)


def way(kl: float, *, right: bool = True, terms: gates.Terms | None = None) -> list[Any]:
    agreeing = 24 if kl < 1 else 2
    return Observed(np.full(24, kl, np.float32), agreeing, right, (10, 80, 10), terms).row()


def row(
    edit: str, *steps: gates.Terms | None, kl: float = 0.001, fronts: float = 0.001
) -> dict[str, Any]:
    """A conversation whose replies have plans with these terms; its control fails."""
    found = [
        {
            "full": True,
            "ways": {
                "exact": way(0.0),
                "drop": way(3.0, right=False),
                "unrotated": way(0.5),
                "rotated": way(kl, terms=terms),
                "rotated+fronts20": way(fronts, terms=terms),
            },
        }
        for terms in steps
    ]
    loaded: dict[str, Any] = json.loads(json.dumps({"edit": edit, "steps": found}))
    return loaded


def tally() -> Tally:
    return Tally([policies.policy("rotated")])


def test_row_is_read_as_it_was_written() -> None:
    one = Observed(np.array([0.5, 0.25], np.float32), 1, None, (1, 2, 3), CUT)
    again = Observed.of(json.loads(json.dumps(one.row())))
    assert again.kl.tolist() == one.kl.tolist()
    assert (again.agreeing, again.right, again.usage, again.terms) == (1, None, (1, 2, 3), CUT)


def test_replies_are_of_the_kind_of_their_own_plan() -> None:
    found = tally()
    found.add(row("window", CUT, MANY, None))
    found.add(row("window", CUT))
    (measured,) = found.measured()
    assert [(one.name, one.figures.cases) for one in measured.kinds] == [
        ("one cut", 2),
        ("several cuts", 1),
    ]
    for one in measured.kinds:
        assert one.flaw() is None
        assert one.figures.questions == one.figures.cases
    # A kind ends where the measured plans end.
    assert measured.kind_of(CUT) == measured.kinds[0]
    assert measured.kind_of(gates.Terms(cuts=5, lost_context=0.5, hops=1)) is None


def test_replies_of_no_kind_are_counted() -> None:
    found = tally()
    # Nothing is lost and nothing much is new, but something moves.
    found.add(row("odd", gates.Terms(distance=5, hops=1)))
    assert (found.outside, found.measured()[0].kinds) == (1, ())


def test_edit_ends_when_the_verdict_on_its_kind_is_clear() -> None:
    for kl, state in ((0.001, "cleared"), (0.2, "refused")):
        found = tally()
        while not measure._is_clear(found, "window", LIMITS):
            found.add(row("window", CUT, kl=kl))
        assert found.verdicts(LIMITS)["rotated", "one cut"].state == state
        assert 3 < found.conversations["window"] < 40


def test_edit_does_not_wait_for_a_policy_that_looks_bad_where_another_is_cleared() -> None:
    """A mean just beyond its limit takes hundreds of conversations to be refused."""
    both = [policies.policy("rotated"), policies.policy("rotated+fronts20")]
    found = Tally(both)
    while not measure._is_clear(found, "window", LIMITS):
        found.add(row("window", CUT, kl=1.05 * LIMITS.max_kl))
    verdicts = found.verdicts(LIMITS)
    assert verdicts["rotated", "one cut"].state == "undecided"
    assert verdicts["rotated", "one cut"].looks_worse
    assert verdicts["rotated+fronts20", "one cut"].state == "cleared"
    assert found.conversations["window"] < 40
    # What looks good goes on, and so does what looks bad where nothing is cleared.
    for kl, fronts in ((0.95, 0.0), (1.05, 1.05)):
        found = Tally(both)
        for _ in range(40):
            given = {"kl": kl * LIMITS.max_kl, "fronts": fronts * LIMITS.max_kl}
            found.add(row("window", CUT, **given))
        assert not measure._is_clear(found, "window", LIMITS)


def test_edit_does_not_wait_for_a_kind_that_it_is_rarely_of() -> None:
    found = tally()
    found.add(row("window", MANY))
    for _ in range(40):
        found.add(row("window", CUT))
    assert found.feeds("window") == [("rotated", "one cut")]
    assert measure._is_clear(found, "window", LIMITS)
    assert not measure._is_clear(found, "other", LIMITS)


def test_edit_that_moves_nothing_is_not_clear() -> None:
    found = tally()
    for _ in range(40):
        found.add(row("window", None))
    assert not measure._is_clear(found, "window", LIMITS)
