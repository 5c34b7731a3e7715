"""Fixtures of the emulated SDK's tests: clean up models, which keep threads until they are collected."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any, Callable, Iterator

import pytest
import torch

from tests.support.ranks import rank_server, run_ranks

# Test the emulated Horovod even if the real one is installed.
os.environ["EMULATED_POD_HOROVOD"] = "emulated"


def _has_replica_threads() -> bool:
    return any(thread.name.startswith("replica") for thread in threading.enumerate())


@pytest.fixture(autouse=True, scope="session")
def _import_torch_compiler():
    """Construct an optimizer: for the first one torch imports its compiler, which sets an environment variable."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    # Exclude the imported modules from later garbage collections.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _collect_models():
    """Collect the models of a test, which stops their replica threads."""
    yield
    if _has_replica_threads():
        # A wrapped module and its executor refer to each other, so reference counting does not free them.
        gc.collect()
    deadline = time.monotonic() + 5
    while _has_replica_threads() and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread of torch: threads of small kernels wait for cores, and kernels of several round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Any]]:
    """`ranks(__file__, functions, size)`: `run_ranks`, with one server for all tests of this process."""
    with rank_server():
        yield run_ranks
