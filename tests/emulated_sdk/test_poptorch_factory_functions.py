"""While a model compiles, torch's factory functions make no tensors of the host in other threads of the process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Tuple

import numpy
import poptorch
import pytest
import torch

from tests.support.poptorch_models import Apply, options

KINDS: Dict[str, Tuple[Callable[[], torch.Tensor], str]] = {
    "empty": (lambda: torch.empty(3), "meta"),
    "tensor": (lambda: torch.tensor([1.0]), "meta"),
    "zeros_like": (lambda: torch.zeros_like(torch.from_numpy(numpy.ones(3))), "meta"),
    "normal": (lambda: torch.normal(0.0, 1.0, (3,)), "meta"),
    "within torch": (lambda: torch.utils.data.default_collate([1.0, 2.0]), "meta"),
    "with a device": (lambda: torch.ones(3, device="cpu"), "cpu"),
    "normal of tensors": (lambda: torch.normal(torch.from_numpy(numpy.ones(3)), 1.0), "cpu"),
    "from_numpy": (lambda: torch.from_numpy(numpy.ones(3)), "cpu"),
    "new_empty": (lambda: torch.from_numpy(numpy.ones(3)).new_empty(3), "cpu"),
}


def made_while_compiling(function: Callable[[], Any]) -> Any:
    """Return what the function returns in another thread, while a model compiles in this one."""
    made: List[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1, "feed") as pool:
            made.append(pool.submit(function).result())
        return x * torch.ones(2)

    executor = poptorch.inferenceModel(Apply(forward), options())
    before = torch.empty, torch.normal
    try:
        executor.compile(torch.zeros(1, 2))
    finally:
        assert (torch.empty, torch.normal) == before
    return made[0]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_threads_are_on_no_host(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    function, device = KINDS[kind]
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        assert made_while_compiling(function).device.type == device
    assert (f"({__file__}:" in caplog.text) is (device == "meta")


def test_strict_mode_names_the_thread_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    function = KINDS["empty"][0]
    line = f"{__file__}:{function.__code__.co_firstlineno}"
    with pytest.raises(
        poptorch.Error, match=rf"the thread 'feed_0' \({line}\), while the thread 'MainThread' compiles"
    ):
        made_while_compiling(function)
    assert made_while_compiling(lambda: torch.from_numpy(numpy.ones(3))).device.type == "cpu"
