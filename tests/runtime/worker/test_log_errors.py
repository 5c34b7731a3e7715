"""What an instance's process writes into its log about an exception."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from raypod.errors import CollectiveBroken, ConfigError
from raypod.plan import user_code
from raypod.runtime.worker import process

RESET = "[Errno 104] Connection reset by peer"


def lose_the_connection(what: str = "rank 0 of 2: a peer has ended") -> None:
    try:
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except OSError as error:
            raise RuntimeError(what) from error
    except RuntimeError as error:
        raise CollectiveBroken(0, str(error)) from error


def abort_an_evaluation() -> None:
    raise CollectiveBroken(0, "the evaluation was aborted")


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (lose_the_connection, f"rank 0 of 2: a peer has ended (ConnectionResetError: {RESET})"),
        (lambda: lose_the_connection(f"lost the connection [{RESET}]"), f"lost the connection [{RESET}]"),
        (abort_an_evaluation, "the evaluation was aborted"),
    ],
)
def test_a_survivor_of_a_failure_writes_one_line(work: Any, cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CollectiveBroken):
        process._log_errors(work)
    expected = f"the collective with the other instances is broken: {cause}\n"
    assert capfd.readouterr().err == expected


def test_every_other_exception_has_its_traceback_and_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer") as caught:
        process._log_errors(fail)
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: no such layer\n")
    caught.value.__traceback__ = None
    assert user_code.place_of(caught.value).endswith(", in fail)")


@pytest.mark.parametrize("kind", [ConfigError, OSError, ValueError])
def test_an_exception_that_ray_could_not_send_has_readable_bytes(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        try:
            raise FileNotFoundError("caf\udce9")
        except FileNotFoundError as error:
            raise kind("cannot read the image") from error

    with pytest.raises((ConfigError, RuntimeError)) as caught:
        process._log_errors(fail)
    text = "".join(traceback.format_exception(type(caught.value), caught.value, caught.value.__traceback__))
    assert "cannot read the image" in text.encode().decode()
    assert isinstance(caught.value, ConfigError) == (kind is ConfigError)
    assert "caf\\udce9" in capfd.readouterr().err
