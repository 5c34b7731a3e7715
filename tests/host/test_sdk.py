"""`select` chooses the real or the emulated SDK and reports its choice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest
from poptorch import strict

from raypod.host import sdk

FAKE = {
    "with_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return True\n",
    "without_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return False\n",
    "not_sourced": "raise ImportError('libpoplar.so: cannot open shared object file')\n",
}


def select(folder: Path, device: str, installed: str = "") -> subprocess.CompletedProcess[str]:
    """Run `sdk.select(device)` in a new interpreter, with an installed SDK of the given kind."""
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
def test_the_emulated_sdk_is_used_if_none_is_installed(tmp_path: Path, device: str) -> None:
    done = select(tmp_path, device)
    assert done.stdout.startswith("emulated | emulated SDK on CPU"), done.stderr
    assert "emulated_sdk/poptorch" in done.stdout


def test_device_ipu_without_an_sdk_reports_the_import_error(tmp_path: Path) -> None:
    assert "refused: the Poplar SDK cannot be imported: ModuleNotFoundError" in select(tmp_path, "ipu").stdout


@pytest.mark.parametrize("device", ["auto", "ipu"])
def test_an_installed_sdk_that_fails_to_import_is_an_error(tmp_path: Path, device: str) -> None:
    output = select(tmp_path, device, "not_sourced").stdout
    assert "refused" in output
    assert "libpoplar.so: cannot open shared object file" in output


@pytest.mark.parametrize("device", ["auto", "ipu"])
def test_a_real_sdk_with_ipus_is_used(tmp_path: Path, device: str) -> None:
    output = select(tmp_path, device, "with_ipus").stdout
    assert output.startswith("ipu | Poplar SDK (poptorch 3.4)")
    assert str(tmp_path) in output


@pytest.mark.parametrize(("value", "is_strict"), [("1", True), ("0", False)])
def test_strict_mode_without_effect_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, is_strict: bool
) -> None:
    monkeypatch.setenv("EMULATED_POD_STRICT", value)
    output = select(tmp_path, "auto", "with_ipus").stdout
    assert output.startswith("ipu |")
    assert ("on which --strict has no effect" in output) is is_strict


@pytest.mark.parametrize("value", [None, "", "0", "1", "yes"])
def test_strict_mode_has_the_same_rule_as_in_the_emulated_sdk(
    monkeypatch: pytest.MonkeyPatch, value: Optional[str]
) -> None:
    monkeypatch.delenv("EMULATED_POD_STRICT", raising=False)
    if value is not None:
        monkeypatch.setenv("EMULATED_POD_STRICT", value)
    assert sdk.is_strict() is strict.is_strict() is (value in ("1", "yes"))


def test_auto_without_ipus_reports_it_and_emulates(tmp_path: Path) -> None:
    output = select(tmp_path, "auto", "without_ipus").stdout
    assert output.startswith("emulated | emulated SDK on CPU (poptorch 3.4 finds no IPU here)")
    assert "emulated_sdk/poptorch" in output


def test_device_ipu_without_ipus_is_refused(tmp_path: Path) -> None:
    assert "finds no IPU here" in select(tmp_path, "ipu", "without_ipus").stdout


def test_device_emulated_is_used_even_if_an_sdk_is_installed(tmp_path: Path) -> None:
    assert "emulated_sdk/poptorch" in select(tmp_path, "emulated", "with_ipus").stdout
