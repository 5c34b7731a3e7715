"""One Ray session for all tests of a module, and the runs that are compared in several modules."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any, Iterator

import pytest

from tests.support import SUPPORT
from tests.support.faulty_runs import Outcome
from tests.support.fragile_runs import run_inline


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with a user's module; files in it make it fail."""
    found = tmp_path_factory.mktemp("user")
    shutil.copy(SUPPORT / "fragile.py", found)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        patch.syspath_prepend(found)
        yield found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Outcome:
    return run_inline(folder, "undisturbed")
