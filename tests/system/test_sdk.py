"""`select` chooses the real or the emulated SDK and reports its choice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

FAKE = {
    "with_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return True\n",
    "without_ipus": "__version__ = '3.4'\ndef ipuHardwareIsAvailable(n=1): return False\n",
    "not_sourced": "raise ImportError('libpoplar.so: cannot open shared object file')\n",
}


SELECT = """
{before}
from raypod import errors
from raypod.system import sdk
from raypod.system.sdk import telemetry
try:
    found = sdk.select({device!r})
except errors.SdkError as error:
    print('refused:', error)
else:
    import poptorch
    print(found.device, '|', found.line, '|', poptorch.__file__, '| waited', telemetry.peer_wait_s())
"""
EMULATED = "emulated | emulated SDK on CPU"
NO_LIBRARY = "libpoplar.so: cannot open shared object file"
NO_EFFECT = "on which --strict has no effect"


@pytest.mark.parametrize(
    ("device", "installed", "strict", "begins", "contains"),
    [
        ("auto", "", "", EMULATED, "emulated_sdk/poptorch"),
        ("emulated", "", "", EMULATED, "emulated_sdk/poptorch"),
        ("ipu", "", "", "refused: the Poplar SDK cannot be imported: ModuleNotFoundError", ""),
        ("auto", "not_sourced", "", "refused", NO_LIBRARY),
        ("ipu", "not_sourced", "", "refused", NO_LIBRARY),
        ("auto", "with_ipus", "1", "ipu | Poplar SDK (poptorch 3.4)", NO_EFFECT),
        ("ipu", "with_ipus", "0", "ipu | Poplar SDK (poptorch 3.4)", "{folder}"),
        ("auto", "without_ipus", "", f"{EMULATED} (poptorch 3.4 finds no IPU here)", "emulated_sdk/poptorch"),
        ("ipu", "without_ipus", "", "refused: ", "finds no IPU here"),
        ("emulated", "with_ipus", "", EMULATED, "emulated_sdk/poptorch"),
    ],
)
def test_the_selection_of_an_installed_sdk(
    processes: None, tmp_path: Path, device: str, installed: str, strict: str, begins: str, contains: str
) -> None:
    if installed:
        (tmp_path / "poptorch.py").write_text(FAKE[installed])
        (tmp_path / "popdist.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "EMULATED_POD_STRICT": strict}
    words = [sys.executable, "-c", SELECT.format(device=device, before="")]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(begins), done.stderr
    assert contains.format(folder=tmp_path) in done.stdout
    assert ("| waited None" in done.stdout) is begins.startswith("ipu")  # the Poplar SDK does not measure it
    assert (NO_EFFECT in done.stdout) is (strict == "1")


def test_the_emulated_sdk_replaces_one_that_was_imported_before(processes: None, tmp_path: Path) -> None:
    (tmp_path / "poptorch.py").write_text(FAKE["with_ipus"])
    program = SELECT.format(device="emulated", before="import poptorch")  # by the template of the workers
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert "emulated_sdk/poptorch" in done.stdout, done.stderr


HANDLERS = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
sys.excepthook = lambda *error: print("of poptorch", error, file=sys.stderr)
"""
TERMINATE = """
import os, signal, sys
from raypod.system import sdk
signal.signal(signal.SIGTERM, lambda *_: print("terminated"))
sdk.select("ipu")
print(sys.excepthook is sys.__excepthook__)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_importing_poptorch_does_not_change_what_sigterm_and_exceptions_do(processes: None, tmp_path: Path) -> None:
    (tmp_path / "poptorch.py").write_text(HANDLERS + FAKE["with_ipus"])
    (tmp_path / "popdist.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", TERMINATE]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nterminated\n", "")
