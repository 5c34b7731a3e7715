"""Runs raypod on the real front end of PopTorch, and on the emulated SDK for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from conformance import process_group
from conformance.clone import extract
from raypod.plan import layout
from raypod.runs import ledger
from raypod.training.checkpoint.tensors import read_tensors

TORCH = "2.0.1"  # the version that this PopTorch needs
_OWN = Path(__file__).with_name("front_end")
_RAYPOD = Path(__file__).resolve().parents[2]
_GRACE_S = 30.0


def prepare(git_dir: Path, folder: Path) -> None:
    """Puts the front end of a clone, the core and popdist into `folder`/packages. CloneError as `extract`."""
    extract(git_dir, ["python", "popart_compiler/source", "poptorch/source/dispatch_tracer", "tests"], folder)
    packages = folder / "packages"
    poptorch = packages / "poptorch"
    poptorch.mkdir(parents=True)
    for file in (folder / "python").glob("*.py"):  # as its build does
        text = file.read_text()
        for name, value in (("TORCH_VERSION", TORCH), ("VERSION", "3.4.0"), ("SNAPSHOT", "front-end")):
            text = text.replace(f"@{name}@", value)
        (poptorch / file.name).write_text(text)
    (poptorch / "poptorch_core.py").write_text("from front_end.core import *\n")
    ignored = shutil.ignore_patterns("popdist", "__pycache__")
    shutil.copytree(str(_OWN), str(packages / "front_end"), ignore=ignored)
    shutil.copytree(str(_OWN / "popdist"), str(packages / "popdist"))


class Run(NamedTuple):
    """A run that has ended.

    Attributes:
        code: its exit code; None: it did not end in time.
        folder: the run folder.
        state: the folder of the core.
        output: what it has printed.
    """

    code: Optional[int]
    folder: Path
    state: Path
    output: str

    def losses(self) -> List[float]:
        """The losses of its updates, except those whose reports are lost with an instance."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        losses = [json.loads(line)["loss"] for line in lines]
        return [float(loss) for loss in losses if loss is not None]

    def falls(self) -> bool:
        """Whether the loss of the last third of the updates is lower than that of the first."""
        losses = self.losses()
        third = len(losses) // 3
        return third > 0 and sum(losses[-third:]) < sum(losses[:third])

    def weights(self, update: Optional[int] = None) -> Dict[str, Any]:
        """The weights of a checkpoint, by default the newest; empty if there is none."""
        checkpoints = sorted(self.folder.glob("checkpoints/update-*/weights.safetensors"))
        if update is not None:
            checkpoints = [path for path in checkpoints if path.parent.name.endswith(f"-{update:08d}")]
        return dict(read_tensors(checkpoints[-1])[0]) if checkpoints else {}

    def events(self, name: str) -> List[Dict[str, Any]]:
        """The events of a kind."""
        path = self.folder / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["event"] == name]

    def options(self) -> Dict[str, Any]:
        """The session options of a training model by name, those of a group as `GROUP.NAME`; empty if there is none."""
        found = sorted(self.state.glob("options-training-*.json"))
        return _flat(json.loads(found[0].read_text()), "") if found else {}

    def calls(self) -> Dict[int, int]:
        """How many times the ledger has the call that begins after each update."""
        lines, _ = ledger.read(self.folder / layout.LEDGER)
        return Counter(line.update for line in lines if isinstance(line, ledger.CallRecord))

    def core(self) -> List[Dict[str, Any]]:
        """What the cores of all processes have done."""
        return [json.loads(line) for path in self.state.glob("log-*.jsonl") for line in path.read_text().splitlines()]


def _flat(options: Dict[str, Any], prefix: str) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name, value in options.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return found


def difference(run: Run, other: Run, update: Optional[int] = None) -> Optional[float]:
    """The distance of the weights of two runs, as a part of their length; None if they cannot be compared."""
    own, others = run.weights(update), other.weights(update)
    if not own or own.keys() != others.keys():
        return None
    square = sum(float((own[name].double() - others[name].double()).square().sum()) for name in own)
    length = sum(float(others[name].double().square().sum()) for name in own)
    return float((square / length) ** 0.5)


class Bench:
    """Starts commands with the front end or with the emulated SDK, in a folder that the caller removes."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self._limit_s, self._count = folder, limit_s, 0
        self._undisturbed: Dict[Tuple[str, ...], Run] = {}

    def train(self, flags: Sequence[str], environment: Optional[Dict[str, str]] = None, device: str = "ipu") -> Run:
        """Runs `raypod train` to its end."""
        with self.started(flags, environment, device) as running:
            return running.wait()

    def undisturbed(self, flags: Sequence[str]) -> Run:
        """The same run without a failure, which is made once for all rows."""
        if tuple(flags) not in self._undisturbed:
            self._undisturbed[tuple(flags)] = self.train(flags)
        return self._undisturbed[tuple(flags)]

    @contextlib.contextmanager
    def started(
        self, flags: Sequence[str], environment: Optional[Dict[str, str]] = None, device: str = "ipu",
        folder: Optional[Path] = None,
    ) -> Iterator[Running]:  # fmt: skip
        """A running `raypod train`, which is ended with the context. `folder`: of the run, if it is not a new one."""
        run_folder = folder or self._new()
        resumed = any(flag == "--resume" for flag in flags)
        command = ["train", "--device", device, *([] if resumed else ["--run-dir", str(run_folder)]), *flags]
        with self._process(command, run_folder, environment or {}, device) as running:
            yield running

    def launch(self, flags: Sequence[str], program: Sequence[str], environment: Optional[Dict[str, str]] = None) -> Run:
        """Runs `raypod launch`."""
        folder = self._new()
        command = ["launch", "--device", "ipu", "--run-dir", str(folder), *flags, *program]
        with self._process(command, folder, environment or {}, "ipu") as running:
            return running.wait()

    def raypod(self, *command: str) -> int:
        """The exit code of another command of raypod."""
        environment = self._environment({}, "emulated", self.folder)
        return subprocess.run(
            [sys.executable, "-m", "raypod", *command], env=environment, stdout=subprocess.DEVNULL, check=False
        ).returncode

    def options_of(
        self, command: Sequence[str], environment: Dict[str, str], place: Path, paths: Sequence[str] = ()
    ) -> Dict[str, Any]:
        """The session options of the training model that a Python program compiles, in the folder `place`.

        `paths` are added to the places of its modules. Its output is that of an AssertionError, if it fails.
        """
        state = self.folder / f"state-{self._new().name}"
        state.mkdir()
        found = self._environment(environment, "ipu", state)
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], *paths])
        done = subprocess.run(
            [sys.executable, *command], cwd=place, env=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=self._limit_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
        return Run(0, place, state, done.stdout).options()

    def _new(self) -> Path:
        self._count += 1
        return self.folder / f"run-{self._count}"

    def _environment(self, environment: Dict[str, str], device: str, state: Path) -> Dict[str, str]:
        hidden = ("POPTORCH_", "POPDIST_", "EMULATED_POD_", "FRONT_END_", "RAY_ADDRESS")
        paths = [str(_RAYPOD)] if device == "emulated" else [str(self.folder / "packages"), str(_RAYPOD)]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(hidden)},
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(state / "cache"),
            "FRONT_END_SOURCES": str(self.folder),
            "FRONT_END_FOLDER": str(state),
            **environment,
        }

    @contextlib.contextmanager
    def _process(self, command: List[str], folder: Path, environment: Dict[str, str], device: str) -> Iterator[Running]:
        state = self.folder / f"state-{folder.name}"
        state.mkdir(exist_ok=True)
        output = state / "output"
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "raypod", *command], cwd=self.folder, stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, env=self._environment(environment, device, state), start_new_session=True,
            )  # fmt: skip
        try:
            yield Running(process, folder, state, self._limit_s)
        finally:
            process_group.end(process, _GRACE_S)


class Running:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, state: Path, limit_s: float) -> None:
        self._process, self._folder, self._state, self._limit_s = process, folder, state, limit_s

    def wait(self) -> Run:
        """Waits for the end."""
        code: Optional[int] = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(self._limit_s)
        return Run(code, self._folder, self._state, (self._state / "output").read_text(errors="replace"))

    def wait_for_calls(self, calls: int) -> bool:
        """Waits until the core has executed so many calls; False if the command has ended before."""
        deadline = time.monotonic() + self._limit_s
        run = Run(None, self._folder, self._state, "")
        while time.monotonic() < deadline and self._process.poll() is None:
            if sum(event["event"] == "execute" for event in _complete(run)) >= calls:
                return True
            time.sleep(0.05)
        return False

    def signal(self, number: int) -> None:
        """Signals the command itself."""
        self._process.send_signal(number)

    def kill_instance(self, rank: int) -> None:
        """Kills the process of an instance that trains."""
        pids = sorted(self._state.glob(f"*-training-*/{rank}.pid"), key=lambda path: path.stat().st_mtime)
        os.kill(int(pids[-1].read_text()), signal.SIGKILL)


def _complete(run: Run) -> List[Dict[str, Any]]:
    """The events of the core, while a line may be incomplete."""
    try:
        return run.core()
    except ValueError:
        return []
