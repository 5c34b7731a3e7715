"""The address on which an installed Horovod listens for other hosts."""

from __future__ import annotations

import socket

import pytest

from raypod.system import interfaces


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("localhost", "resolves to the loopback address "),
        ("192.0.2.1", "does not resolve to an own address ("),
        ("no-such-host.invalid", "does not resolve to an own address ("),
    ],
)
def test_a_name_without_an_own_address_is_a_problem(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    problem = str(interfaces.own_horovod_problem())
    assert f"its own name {name} {words}" in problem
    assert "scripts/install_horovod.sh" in problem


def test_the_corrected_build_does_not_depend_on_the_name() -> None:
    assert interfaces.horovod_problem("0.28.1+gloo.iface", "host1", "127.0.1.1") is None
    assert interfaces.horovod_problem("0.28.1", "host1", "10.0.0.1") is None
