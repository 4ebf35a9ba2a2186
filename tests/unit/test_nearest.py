"""Messages name the nearest known name, and long names are not compared."""

from kvtrie._nearest import MAX_COMPARED, hint, nearest

KNOWN = ("session", "policy", "tenant")


def test_a_misspelt_name_gets_the_nearest_known_one() -> None:
    assert nearest("sesion_", KNOWN) == "session"
    assert hint("polic", KNOWN) == "; did you mean 'policy'?"


def test_what_is_like_no_known_name_gets_no_hint() -> None:
    assert nearest("temperature", KNOWN) is None
    assert hint(17, KNOWN) == ""


def test_a_name_beyond_the_limit_is_not_compared() -> None:
    known = ["k" * MAX_COMPARED]
    assert nearest("k" * MAX_COMPARED, known) == known[0]
    assert nearest("k" * (MAX_COMPARED + 1), known) is None
