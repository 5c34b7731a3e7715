"""Short runs that the tests of this folder share; they do not change them."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List

import pytest

from raypod.__main__ import main
from tests.support.trained_runs import train_inline


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of two replicas, evaluated after both, with three checkpoints."""
    flags = ["--replicas", "2", "--batch-size", "64", "--updates", "22", "--evaluate-every", "1"]
    return train_inline(tmp_path_factory.mktemp("digits") / "run", *flags, "--checkpoint-every", "8 updates")


@pytest.fixture(scope="session")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline over two IPUs in half precision with 8-bit IO and enlarged images."""
    flags = ["--replicas", "1", "--ipus-per-replica", "2", "--pipeline-balance", "parameters", "--updates", "2"]
    more = ["--gradient-accumulation", "3", "--precision", "16.16", "--eight-bit-io", "--image-size", "16"]
    return train_inline(tmp_path_factory.mktemp("half") / "run", *flags, *more)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[[List[str]], str]:
    """Run a command that ends with exit code 2 and one line, and return it."""

    def run(words: List[str]) -> str:
        capsys.readouterr()
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err[:15]) == ("", 1, "raypod: error: ")
        return err

    return run
