"""What a request asks of an integration is read at a bounded cost, whatever its size."""

from __future__ import annotations

import difflib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtrie import EXACT_ONLY
from kvtrie.integrations._asked import SettingsError, shown
from kvtrie.integrations.sglang._settings import Wish
from kvtrie.integrations.vllm._settings import is_last, request_policy

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE = "x" * 5_000_000
MOST = 300
"""Characters of a message: a value that is cut, and what is fixed."""


def policy(params: dict[str, Any]) -> None:
    request_policy(params, EXACT_ONLY, "exact")


def last(value: object) -> None:
    is_last(SimpleNamespace(kv_transfer_params={"last": value}, kv_hints=None))


def hinted(name: str) -> None:
    hints = SimpleNamespace(actions=[SimpleNamespace(action_type=name)])
    is_last(SimpleNamespace(kv_transfer_params=None, kv_hints=hints))


def wish(given: object) -> None:
    Wish.read({"kvtrie": given})


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were compared with the known ones."""
    found: list[str] = []
    real = difflib.get_close_matches

    def spied(word: str, *given: Any, **options: Any) -> list[str]:
        found.append(word)
        return real(word, *given, **options)

    monkeypatch.setattr(difflib, "get_close_matches", spied)
    return found


def test_many_parameters_are_refused_and_not_compared(compared: list[str]) -> None:
    """Each was compared with kvtrie's: seconds in the scheduler for 400,000."""
    with pytest.raises(SettingsError, match=r"has 400000 keys, kvtrie reads at most 32$"):
        policy({f"{number:07d}": 0 for number in range(400_000)})
    assert not compared


def test_as_many_parameters_as_are_read(compared: list[str]) -> None:
    policy({f"{number:07d}": 0 for number in range(31)} | {"kvtrie": "exact"})
    assert len(compared) == 31


@pytest.mark.parametrize("call", [policy, wish])
def test_a_long_name_is_refused_and_not_compared(
    compared: list[str], call: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(SettingsError, match=r"\(5000006 characters\)") as caught:
        call({"kvtrie" + HUGE: True})
    assert len(str(caught.value)) < MOST
    assert not compared


def test_a_long_name_of_another_connector_is_not_compared(compared: list[str]) -> None:
    policy({"session" + HUGE: True})
    assert not compared


@pytest.mark.parametrize(
    "call",
    [
        last,
        wish,
        lambda value: policy({"kvtrie": value}),
        lambda value: wish({"reuse": value}),
        lambda value: wish({"session": value}),
    ],
    ids=["last", "wish", "kvtrie", "reuse", "session"],
)
@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        [1] * 400_000,
        dict.fromkeys(map(str, range(400_000)), HUGE),
        [[HUGE] * 9] * 9,
        {"a": {"b": {"c": HUGE}}},
    ],
    ids=["text", "list", "object", "texts", "nested"],
)
def test_a_message_shows_the_beginning_of_a_value(
    call: Callable[[object], None], value: object
) -> None:
    """The whole value was logged: a line of 5 MB."""
    with pytest.raises(SettingsError) as caught:
        call(value)
    assert len(str(caught.value)) < MOST


def test_a_message_shows_the_beginning_of_a_hint_of_vllm() -> None:
    with pytest.raises(SettingsError) as caught:
        hinted("kvtrie." + HUGE)
    assert len(str(caught.value)) < MOST


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("keep", "'keep'"),
        ("x" * 80, f"{'x' * 80!r}"),
        ("x" * 81, f"{'x' * 80!r}... (81 characters)"),
        ([1, 2], "[1, 2]"),
        ({"a": [1], "b": None}, "{'a': [1], 'b': None}"),
        ([0] * 9, "[0, 0, 0, 0, 0, 0, ...] (9 entries)"),
        (dict.fromkeys("aaabcdefg", 1), "{'a': 1, 'b': 1, 'c': 1, 'd': 1, ...} (7 entries)"),
        (1.5, "1.5"),
        (None, "None"),
    ],
)
def test_how_a_value_is_shown(value: object, text: str) -> None:
    assert shown(value) == text


def test_no_entry_after_the_first_is_looked_at_to_show_a_value() -> None:
    class Watched(dict[str, int]):
        looked = 0

        def items(self) -> Any:
            for one in super().items():
                Watched.looked += 1
                yield one

    shown([Watched(dict.fromkeys(map(str, range(10_000)), 0))])
    assert Watched.looked < 20


def test_a_key_that_is_no_text_is_none_of_ours() -> None:
    """Callers in Python may give one; it raised in the scheduler."""
    assert request_policy({3: "x"}, EXACT_ONLY, "exact") is EXACT_ONLY  # type: ignore[dict-item] # that is tested
