"""The choice of the SDK, torchvision's import, the address of Horovod, repetitions, and the driver of a Ray job."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

from raypod.system import interfaces, job_driver, torchvision_import
from raypod.system.retries import constant, growing, retried
from tests.support import ROOT
from tests.support.bounded import COMMAND_S, wait_until

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
    done = run_beside(tmp_path, SELECT.format(device=device, before=""), strict)
    assert done.stdout.startswith(begins), done.stderr
    assert contains.format(folder=tmp_path) in done.stdout
    assert ("| waited None" in done.stdout) is begins.startswith("ipu")  # the Poplar SDK does not measure it
    assert (NO_EFFECT in done.stdout) is (strict == "1")


def test_the_emulated_sdk_replaces_one_that_was_imported_before(processes: None, tmp_path: Path) -> None:
    (tmp_path / "poptorch.py").write_text(FAKE["with_ipus"])
    done = run_beside(tmp_path, SELECT.format(device="emulated", before="import poptorch"))  # by the workers' template
    assert "emulated_sdk/poptorch" in done.stdout, done.stderr


def run_beside(folder: Path, program: str, strict: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that can import the modules of a folder."""
    env = {**os.environ, "PYTHONPATH": str(folder), "EMULATED_POD_STRICT": strict}
    words = [sys.executable, "-c", program]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


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
    done = run_beside(tmp_path, TERMINATE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nterminated\n", "")


DECLARE = """
import torch
shim = torch.library.Library("torchvision", "DEF")
for name in {names}:
    shim.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
IMPORT = """
from raypod.system import torchvision_import
torchvision_import.install()
import torch, torchvision
print(len(list(torchvision.models.resnet18().parameters())))
"""
# An import hook that declares the operators just before it executes torchvision, as raypod's did.
HOOK = """
import importlib.abc, importlib.machinery, sys
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def declare_and_execute(module):
            exec(DECLARE, globals())
            execute(module)
        spec.loader.exec_module = declare_and_execute
        return spec
"""


@pytest.fixture(scope="module")
def library_is_not_loaded() -> None:
    torchvision_import.install()
    if importlib.import_module("torchvision.extension")._has_ops():
        pytest.skip("torchvision loads its C++ library here, which itself allows no other declaration")


@pytest.mark.usefixtures("library_is_not_loaded")
@pytest.mark.parametrize("names", [(), ("nms",), ("nms", "qnms")])
def test_operators_that_are_already_declared_are_kept(run_python: Callable[[str], str], names: tuple[str, ...]) -> None:
    assert run_python(DECLARE.format(names=names) + IMPORT) == "62\n"


@pytest.mark.usefixtures("library_is_not_loaded")
@pytest.mark.parametrize("position", [0, 1])
def test_another_import_hook_may_come_first_or_last(run_python: Callable[[str], str], position: int) -> None:
    install = IMPORT.replace("import torch,", f"sys.meta_path.insert({position}, Hook())\nimport torch,", 1)
    assert run_python(f"DECLARE = {DECLARE.format(names=('nms', 'qnms'))!r}\n{HOOK}{install}") == "62\n"


def test_torchs_compiler_is_imported_only_when_it_is_asked_for(run_python: Callable[[str], str]) -> None:
    """It takes seconds and 64 MiB in every process of a run with a model of torchvision."""
    before = IMPORT + "import sys\nprint('torch._dynamo' in sys.modules)\n"
    asked = (
        "asks = getattr(sys.modules['torchvision.ops.roi_align'], 'is_compile_supported', None)\n"
        "print(asks is None or (asks('cpu') in (True, False) and 'torch._dynamo' in sys.modules))"
    )
    assert run_python(before + asked) == "62\nFalse\nTrue\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("localhost", "resolves to the loopback address "),
        ("192.0.2.1", "does not resolve to an own address ("),
        ("no-such-host.invalid", "does not resolve to an own address ("),
    ],
)
def test_a_name_without_an_own_address_is_a_problem(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    problem = str(interfaces.own_horovod_problem())
    assert f"its own name {name} {words}" in problem
    assert "scripts/install_horovod.sh" in problem


def test_the_corrected_build_does_not_depend_on_the_name() -> None:
    assert interfaces.horovod_problem("0.28.1+gloo.iface", "host1", "127.0.1.1") is None
    assert interfaces.horovod_problem("0.28.1", "host1", "10.0.0.1") is None


def failing(times: int) -> Callable[[], str]:
    errors = [ConnectionError(f"failure {number}") for number in range(1, times + 1)]

    def action() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return action


@pytest.mark.parametrize(("attempts", "pauses"), [(None, [1.0, 2.0, 3.0]), (4, [1.0, 2.0, 3.0])])
def test_an_action_is_repeated_until_it_succeeds(attempts: Optional[int], pauses: List[float]) -> None:
    slept: List[float] = []
    assert retried(failing(3), float, lambda error: True, attempts, slept.append) == "done"
    assert slept == pauses


def test_the_last_attempt_and_what_is_not_repeated_raise_their_own_exceptions() -> None:
    slept: List[float] = []
    asked: List[Exception] = []

    def repeats(error: Exception) -> bool:
        asked.append(error)
        return True

    with pytest.raises(ConnectionError, match="failure 3"):
        retried(failing(9), constant(2.0), repeats, 3, slept.append)
    assert slept == [2.0, 2.0]
    assert [str(error) for error in asked] == ["failure 1", "failure 2"]
    slept: List[float] = []
    with pytest.raises(ConnectionError, match="failure 2"):
        retried(failing(9), constant(2.0), lambda error: "1" in str(error), sleep=slept.append)
    assert slept == [2.0]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retried(interrupted, constant(0.0), lambda error: True, sleep=lambda seconds: pytest.fail("it was repeated"))


def test_growing_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: (low, high))
    pause = growing(0.5, 5.0)
    pauses = [pause(attempt) for attempt in (1, 2, 3, 4, 5, 5000)]
    assert pauses == [(0, 0.5), (0, 1.0), (0, 2.0), (0, 4.0), (0, 5.0), (0, 5.0)]


CONFIG = {"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {"job_submission_id": "raypod-run-1"}}
OF_RAY = {"RAY_ADDRESS": "10.0.0.1:6379", job_driver.JOB_CONFIG: json.dumps(CONFIG)}
REPORT = """
import json, os, signal, sys
blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
print(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:], os.getpid(), blocked]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(f"{folder}/socket")
        server.listen(1)
        server.settimeout(COMMAND_S)
        yield server


def start(listener: socket.socket, log: Path, output: Path, *command: str) -> subprocess.Popen[bytes]:
    words = ["exec", sys.executable, "-I", job_driver.__file__, listener.getsockname(), str(log), *command]
    options: Any = {"env": {**os.environ, **OF_RAY}, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    options["preexec_fn"] = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) and None
    with output.open("ab") as file:
        return subprocess.Popen(" ".join(map(shlex.quote, words)), shell=True, stdout=file, **options)


def send(listener: socket.socket, environment: Dict[str, str], folder: Path) -> int:
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1 << 12) == b"10.0.0.1:6379"
        connection.sendall(json.dumps({"environment": environment, "folder": str(folder)}).encode())
        pid, user = job_driver.peer_of(connection)
    assert user == os.getuid()
    return pid


def test_a_job_has_arguments_environment_and_folder_of_its_sender(
    processes: None, listener: socket.socket, tmp_path: Path
) -> None:
    log, output, folder = tmp_path / "log", tmp_path / "output", tmp_path / "working folder"
    folder.mkdir()
    log.write_text("before\n")
    arguments: List[str] = ["a b", "c'd", "$HOME"]
    with start(listener, log, output, sys.executable, "-c", REPORT, *arguments) as process:
        sent = {"PATH": os.environ["PATH"], "SECRET": "12345", "RAY_ADDRESS": "other", "BYTES": "\udc80"}
        assert send(listener, sent, folder) == process.pid
        assert process.wait(COMMAND_S) == 7
    assert wait_until(lambda: "an error" in log.read_text() and "an error" in output.read_text())
    (printed,) = (line for line in output.read_text().splitlines() if line.startswith("["))
    environment, where, words, pid, blocked = json.loads(printed)
    assert json.loads(environment.pop(job_driver.JOB_CONFIG)) == {"metadata": CONFIG["metadata"]}
    environment.pop("LC_CTYPE", None)  # Python sets it in the C locale
    assert environment == {**sent, "RAY_ADDRESS": "10.0.0.1:6379"}
    assert (where, words, pid) == (str(folder), arguments, process.pid)
    assert signal.SIGINT not in blocked
    assert log.read_text() == "before\n" + output.read_text()


def test_the_last_lines_of_a_killed_command_are_not_lost(processes: None, listener: Any, tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "output"
    script = (
        "import os, signal; os.write(1, b'x' * 300000 + b'last'); os.kill(0, signal.SIGTERM); os.kill(os.getpid(), 9)"
    )
    with start(listener, log, output, sys.executable, "-c", f"import signal, os; os.setpgrp(); {script}") as process:
        send(listener, {}, tmp_path)
        assert process.wait(COMMAND_S) in (-signal.SIGTERM, -signal.SIGKILL)
    assert wait_until(lambda: log.read_bytes() == output.read_bytes() == b"x" * 300000 + b"last")


def test_without_the_submitting_process_it_ends_with_one_line(processes: None, tmp_path: Path) -> None:
    words = [sys.executable, "-I", job_driver.__file__, str(tmp_path / "none"), str(tmp_path / "log"), "command"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the command that submitted this job is not there any more" in line
    assert not (tmp_path / "log").exists()


def test_the_submission_id_of_an_environment() -> None:
    assert job_driver.submission_id_of(OF_RAY) == "raypod-run-1"
    for other in ({}, {job_driver.JOB_CONFIG: "{"}, {job_driver.JOB_CONFIG: "[]"}, {job_driver.JOB_CONFIG: "{}"}):
        assert job_driver.submission_id_of(other) is None


def test_a_module_keeps_its_usual_loader() -> None:
    spec = importlib.machinery.PathFinder.find_spec("colorsys")
    assert spec is not None
    usual, spec.loader = spec.loader, torchvision_import._LateLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__loader__ is spec.loader is usual
    assert module.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
