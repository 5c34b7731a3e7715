"""Launches of programs in this process, on hosts of an `InlineRay`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Callable, List, NamedTuple, Tuple

import pytest

from raypod.launch import main
from raypod.runtime.launcher import ray_hosts
from tests.support import ROOT
from tests.support.inline_ray import InlineRay
from tests.support.ray_cluster import SECOND_HOST

PROGRAMS = ROOT / "tests" / "programs"
EIGHT_IN_FOUR = ("--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2")
FOUR_IN_TWO = ("--num-replicas", "4", "--num-instances", "2", "--ipus-per-replica", "2")
FOUR = ("--num-replicas", "4", "--num-instances", "4")
TWO = ("--num-replicas", "2", "--num-instances", "2")


class Launched(NamedTuple):
    """The result of a launch."""

    code: int
    out: str
    err: str

    def lines(self, instance: int, stream: str = "stdout") -> List[str]:
        tag = f"[1,{instance}]<{stream}>:"
        text = self.out if stream == "stdout" else self.err
        return [line[len(tag) :] for line in text.splitlines() if line.startswith(tag)]


Launch = Callable[..., Launched]


def launcher(capture: pytest.CaptureFixture[bytes]) -> Launch:
    """Return a function that runs the command in this process."""

    def run(*words: str) -> Launched:
        capture.readouterr()
        code = main(list(words))
        out, err = capture.readouterr()
        return Launched(code, out.decode(), err.decode())

    return run


def use_inline_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches run on two hosts of an InlineRay."""
    ray = InlineRay("127.0.0.1", SECOND_HOST)
    session = SimpleNamespace(open=lambda log: ray, close=lambda: None)
    reservation = SimpleNamespace(options=lambda host, share: {}, release=lambda ray: None)
    monkeypatch.setattr(ray_hosts, "RaySession", lambda *_: session)
    monkeypatch.setattr(ray_hosts, "reserve", lambda *_: reservation)


def python(text: str) -> Tuple[str, ...]:
    return (sys.executable, "-c", text)


def program(name: str, *arguments: str) -> Tuple[str, ...]:
    return (sys.executable, str(PROGRAMS / name), *arguments)
