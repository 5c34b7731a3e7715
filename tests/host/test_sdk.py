from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = {
    "with_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return True\n",
    "without_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return False\n",
    "not_sourced": "raise ImportError('libpoplar.so: cannot open shared object file')\n",
}


def select(folder: Path, device: str, installed: str = "") -> subprocess.CompletedProcess[str]:
    """`sdk.select(device)` in a fresh interpreter, beside an installed SDK of the given kind."""
    if installed:
        (folder / "poptorch.py").write_text(FAKE[installed])
        (folder / "popdist.py").write_text("")
    program = (
        "from raypod import errors\nfrom raypod.host import sdk\n"
        f"try:\n    found = sdk.select({device!r})\n"
        "except errors.SdkError as error:\n    print('refused:', error)\n"
        "else:\n    import poptorch\n    print(found.device, '|', found.line, '|', poptorch.__file__)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("device", ["auto", "emulated"])
def test_without_an_sdk_the_emulated_one_computes(tmp_path: Path, device: str) -> None:
    done = select(tmp_path, device)
    assert done.stdout.startswith("emulated | emulated SDK on CPU"), done.stderr
    assert "emulated_sdk/poptorch" in done.stdout


def test_ipus_asked_for_and_no_sdk_is_refused_with_the_import_error(tmp_path: Path) -> None:
    assert "refused: the Poplar SDK cannot be imported: ModuleNotFoundError" in select(tmp_path, "ipu").stdout


@pytest.mark.parametrize("device", ["auto", "ipu"])
def test_an_sdk_that_cannot_be_imported_is_never_passed_over(tmp_path: Path, device: str) -> None:
    told = select(tmp_path, device, "not_sourced").stdout
    assert "refused" in told
    assert "libpoplar.so: cannot open shared object file" in told


@pytest.mark.parametrize("device", ["auto", "ipu"])
def test_a_real_sdk_with_ipus_is_used(tmp_path: Path, device: str) -> None:
    told = select(tmp_path, device, "with_ipus").stdout
    assert told.startswith("ipu | Poplar SDK (poptorch 3.4)")
    assert str(tmp_path) in told


def test_auto_without_ipus_says_so_and_emulates(tmp_path: Path) -> None:
    told = select(tmp_path, "auto", "without_ipus").stdout
    assert told.startswith("emulated | emulated SDK on CPU (poptorch 3.4 finds no IPU here)")
    assert "emulated_sdk/poptorch" in told


def test_ipus_asked_for_and_none_there_is_refused(tmp_path: Path) -> None:
    assert "finds no IPU here" in select(tmp_path, "ipu", "without_ipus").stdout


def test_emulation_can_be_asked_for_beside_a_real_sdk(tmp_path: Path) -> None:
    assert "emulated_sdk/poptorch" in select(tmp_path, "emulated", "with_ipus").stdout
