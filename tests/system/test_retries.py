"""What failed is repeated after a pause, as often and as long as its caller says."""

from __future__ import annotations

from typing import Callable, List, Optional

import pytest

from raypod.system.retries import constant, growing, retried


def failing(times: int) -> Callable[[], str]:
    """Return an action that fails some times, and then returns."""
    errors = [ConnectionError(f"failure {number}") for number in range(1, times + 1)]

    def action() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return action


@pytest.mark.parametrize(("attempts", "pauses"), [(None, [1.0, 2.0, 3.0]), (4, [1.0, 2.0, 3.0])])
def test_an_action_is_repeated_until_it_succeeds(attempts: Optional[int], pauses: List[float]) -> None:
    slept: List[float] = []
    assert retried(failing(3), float, lambda error: True, attempts, slept.append) == "done"
    assert slept == pauses


def test_the_last_attempt_raises_its_own_exception() -> None:
    slept: List[float] = []
    asked: List[Exception] = []

    def repeats(error: Exception) -> bool:
        asked.append(error)
        return True

    with pytest.raises(ConnectionError, match="failure 3"):
        retried(failing(9), constant(2.0), repeats, 3, slept.append)
    assert slept == [2.0, 2.0]
    assert [str(error) for error in asked] == ["failure 1", "failure 2"]


def test_an_exception_that_is_not_repeated() -> None:
    slept: List[float] = []
    with pytest.raises(ConnectionError, match="failure 2"):
        retried(failing(9), constant(2.0), lambda error: "1" in str(error), sleep=slept.append)
    assert slept == [2.0]


def test_an_interruption_is_never_repeated() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retried(interrupted, constant(0.0), lambda error: True, sleep=lambda seconds: pytest.fail("it was repeated"))


def test_growing_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: (low, high))
    pause = growing(0.5, 5.0)
    assert [pause(attempt) for attempt in (1, 2, 3, 4, 5, 5000)] == [  # type: ignore[comparison-overlap]
        (0, 0.5),
        (0, 1.0),
        (0, 2.0),
        (0, 4.0),
        (0, 5.0),
        (0, 5.0),
    ]
