"""The commands of `scripts/dev`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "dev"


def dev(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    return subprocess.run(
        [str(SCRIPT), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("words", [(), ("tests",), ("--help",)])
def test_an_unknown_command_lists_all_commands(processes: None, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = dev(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    listed = re.findall(r"^ *scripts/dev (\w+)", done.stderr, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == re.findall(r"^(\w+)\) ", SCRIPT.read_text(), re.MULTILINE)


def test_tests_run_in_the_active_environment_and_in_the_checkout(processes: None, tmp_path: Path) -> None:
    done = dev("test", "-q", "-p", "no:xdist", "--collect-only", "tests/repository/test_scheduling.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/repository/test_scheduling.py::" in done.stdout
