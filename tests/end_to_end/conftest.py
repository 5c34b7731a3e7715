"""One Ray session for all tests of a module."""

from __future__ import annotations

import importlib
import os
from typing import Any, Iterator

import pytest


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """A local Ray session, which the fleets of this process join."""
    environment = dict(os.environ)
    ray = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    ray.init(address="local", num_cpus=2, object_store_memory=80_000_000, namespace="tests", **quiet)
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ.update(environment)
