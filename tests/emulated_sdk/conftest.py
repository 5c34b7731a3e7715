"""What the tests of the emulated SDK clean up: models hold threads until they are collected."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

# The tests in this process are about the emulated one, whatever is installed here.
os.environ["EMULATED_POD_HOROVOD"] = "emulated"


def _has_replica_threads() -> bool:
    return any(thread.name.startswith("replica") for thread in threading.enumerate())


@pytest.fixture(autouse=True, scope="session")
def _torch_is_warm():
    """The first optimizer makes torch import its compiler, which sets an environment variable of its own."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    # What is imported by now stays: no need to look through it at every collection.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _models_are_collected():
    """A model that a test dropped ends its replica threads once it is collected."""
    yield
    if _has_replica_threads():
        # A wrapped module and its executor know each other, so counting references does not free them.
        gc.collect()
    deadline = time.monotonic() + 5
    while _has_replica_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
