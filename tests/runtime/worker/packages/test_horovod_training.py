"""A training with `--collectives horovod`, if Horovod is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from raypod.system.sdk import activation

_HAS_HOROVOD = PathFinder.find_spec("horovod", activation.path_without()) is not None


@pytest.mark.skipif(not _HAS_HOROVOD, reason="no Horovod is installed (scripts/install_horovod.sh)")
def test_a_training_with_the_installed_horovod_succeeds(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "EMULATED_POD_HOROVOD"}
    call = [sys.executable, "-m", "raypod.train", "--collectives", "horovod", "--updates", "4"]
    with tempfile.TemporaryDirectory(dir="/tmp") as session:  # a separate Ray session; its sockets need short paths
        environment["RAY_TMPDIR"] = session
        done = subprocess.run(
            [*call, "--run-dir", str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=280
        )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 4
