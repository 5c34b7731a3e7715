"""`import horovod` selects the installed Horovod if it supports PyTorch, else the emulated one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Optional

import pytest

from tests.support.ranks import SDK

pytestmark = pytest.mark.usefixtures("processes")


def fake_horovod(folder: Path, has_extension: bool) -> Path:
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '0.0'\n")
    (package / "__init__.py").write_text("origin = 'installed'\n")
    if has_extension:
        (package / f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    return folder


def imported(other: Path, choice: Optional[str] = None) -> str:
    program = """
        import horovod, horovod.torch as hvd
        print(getattr(hvd, "origin", "emulated"), getattr(horovod, "__version__", "-"))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SDK), str(other)])}
    environment.pop("EMULATED_POD_HOROVOD", None)
    environment.update({} if choice is None else {"EMULATED_POD_HOROVOD": choice})
    call = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(
        call, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=60
    ).stdout.strip()


def test_an_installed_horovod_takes_precedence(tmp_path: Path) -> None:
    assert imported(fake_horovod(tmp_path, has_extension=True)) == "installed 0.0"


def test_the_emulated_horovod_can_be_selected(tmp_path: Path) -> None:
    assert imported(fake_horovod(tmp_path, has_extension=True), "emulated") == "emulated 0.28.1+emulated"


def test_a_horovod_without_torch_support_is_ignored(tmp_path: Path) -> None:
    assert imported(fake_horovod(tmp_path, has_extension=False)).startswith("emulated 0.28.1")
