"""Run published PopTorch programs, unmodified, on the emulated SDK, and print the table of their results.

    python scripts/run_published_programs.py --examples GIT_DIR --optimum GIT_DIR --examples-utils GIT_DIR \\
        --addons GIT_DIR --bess GIT_DIR [NAME ...]

Each row of `published_programs.yaml` is a command, run in a temporary copy of its repository's folder with generated
data. A missing clone, package or library is the row's result.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import math
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import make_image_folder
import numpy as np
import yaml
from conformance import process_group
from conformance.clone import CloneError, extract
from conformance.custom_operators import LIBRARIES as COMPILED

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).with_name("published_programs.yaml")
# Repository: package.
LIBRARIES = {
    "examples-utils": "examples_utils",
    "optimum": "optimum",
    "addons": "poptorch_experimental_addons",
    "bess": "besskge",
}
_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?i:inf(?:inity)?|nan))"
GRACE_S = 15.0  # of a program whose time is up
# torchvision compares CIFAR-10's files with the published ones; these are generated.
ANY_CIFAR = (
    "import runpy, sys, torchvision; torchvision.datasets.cifar.check_integrity = lambda *_: True; "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Program(NamedTuple):
    """One row of the YAML file.

    Attributes:
        folder: where the command runs, in its repository.
        extract: the folder that is extracted; default: `folder`.
        command: words after the interpreter.
        loss: a pattern of the losses in the output, in which LOSS stands for the number.
        cifar: (training, test) images of a generated CIFAR-10, and where the program expects it.
        pictures: the number of pictures in a generated folder in ImageNet's layout, and where the program expects it.
        custom_ops: the module with its custom operators.
        library: the compiled custom operators that it looks for before it loads them; an empty file.
        instances: 2 or more run under `raypod launch`.
        ipus: the IPUs of each replica, an option of `raypod launch`.
        requires: a package and its version, where the program fails with others.
        reason: why it cannot run.
    """

    name: str
    repository: str
    folder: str
    command: str
    loss: str = ""
    extract: str = ""
    cifar: str = ""
    pictures: str = ""
    custom_ops: str = ""
    library: str = ""
    instances: int = 1
    ipus: int = 1
    requires: str = ""
    reason: str = ""


def write_mnist(folder: Path, train: int = 1000, test: int = 160) -> None:
    """Write a learnable MNIST and FashionMNIST in the published format."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 180, (10, 28, 28))
    for kind, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, count)
        images = patterns[labels] + random.integers(0, 76, (count, 28, 28))
        for name in ("MNIST", "FashionMNIST"):
            raw = folder / name / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            for file, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
                shape = b"".join(struct.pack(">I", size) for size in values.shape)
                header = struct.pack(">BBBB", 0, 0, 8, values.ndim) + shape
                (raw / f"{kind}-{file}").write_bytes(header + values.astype(np.uint8).tobytes())


class Workspace:
    """A temporary folder with generated data and the environment that the programs run in.

    Args:
        clones: the clone of each repository, as far as given.
    """

    def __init__(self, folder: Path, clones: Dict[str, Path]) -> None:
        self._folder, self._clones = folder, clones
        write_mnist(folder / "home" / ".torch" / "datasets")
        self._libraries = [name for name in LIBRARIES if name in clones]
        self._pending = list(self._libraries)  # to be extracted

    def run(self, program: Program, timeout_s: float) -> str:
        """Run a program and return its result in one line: the losses, or why it does not run."""
        if program.reason:
            return f"not run: {program.reason}"
        if program.repository != "raypod" and program.repository not in self._clones:
            return f"not run: no clone of {program.repository} is given"
        package, _, version = program.requires.partition("==")
        if package and _installed_version(package) != version:
            return f"not run: needs {program.requires}, found {_installed_version(package) or 'none'}"
        try:
            copy = self._copy(program)
        except CloneError as error:
            return f"failed: {error}"
        if program.cifar:
            self._write_cifar(program.cifar, copy / program.folder)
        if program.pictures:
            count, where = program.pictures.split()
            make_image_folder.write(copy / program.folder / where, train=int(count), test=2, classes=2)
        if program.library:
            (copy / program.folder / program.library).touch()
        log = self._folder / f"{program.name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self._command(program), cwd=copy / program.folder, env=self._environment(program),
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return f"failed: not finished after {timeout_s:g} s"
            finally:
                process_group.end(process, GRACE_S)  # with its data loaders
        return result_of(program, log.read_text(errors="replace"), process.returncode)

    def _copy(self, program: Program) -> Path:
        """Extract the libraries and the program's folder, and return the copy of its repository."""
        while self._pending:
            name = self._pending[0]
            extract(self._clones[name], [LIBRARIES[name]], self._folder / name)
            if LIBRARIES[name] in COMPILED:
                (self._folder / name / "build").mkdir()
                (self._folder / name / "build" / COMPILED[LIBRARIES[name]]).touch()
            del self._pending[0]
        if program.repository == "raypod":
            return ROOT
        copy = self._folder / f"copy-{program.name}"
        extract(self._clones[program.repository], [program.extract or program.folder], copy)
        return copy

    def _write_cifar(self, sizes: str, folder: Path) -> None:
        train, test, where = sizes.split()
        target = Path(where.replace("HOME", str(self._folder / "home")))
        words = [sys.executable, str(ROOT / "scripts/make_cifar.py"), str(folder / target), "--train", train]
        subprocess.run([*words, "--test", test], check=True, stdout=subprocess.DEVNULL)

    def _command(self, program: Program) -> List[str]:
        words = [sys.executable, *(("-c", ANY_CIFAR) if program.cifar else ()), *shlex.split(program.command)]
        if program.instances == 1:
            return words
        count = str(program.instances)
        launch = ["-m", "raypod.launch", "--num-replicas", count, "--num-instances", count, "--ipus-per-replica"]
        return [sys.executable, *launch, str(program.ipus), *words]

    def _environment(self, program: Program) -> Dict[str, str]:
        paths = [*([ROOT] if program.instances > 1 else []), ROOT / "raypod/emulated_sdk"]
        paths += [self._folder / name for name in self._libraries]
        changes = {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "HOME": str(self._folder / "home"),
            "OMP_NUM_THREADS": "1",
            "EMULATED_POD_IPUS": "16",  # programs that ask for hardware find some
            "WANDB_MODE": "offline",
            "HF_HUB_OFFLINE": "1",
            **({"EMULATED_POD_CUSTOM_OPS": program.custom_ops} if program.custom_ops else {}),
        }
        return {**os.environ, **changes}


def result_of(program: Program, output: str, code: int) -> str:
    """Return the result of a run in one line."""
    lines = [line for line in output.replace("\r", "\n").splitlines() if line.strip()]
    if code:
        return f"failed with exit code {code}: {lines[-1][:160] if lines else 'no output'}"
    if not program.loss:
        return "runs to its end"
    losses = [float(value) for value in re.findall(program.loss.replace("LOSS", _NUMBER), "\n".join(lines))]
    if not losses:
        return "failed: no loss in its output"
    summary = f"loss {losses[0]:g} -> {losses[-1]:g}"
    if not all(map(math.isfinite, losses)):
        return f"failed: {summary} (not finite; {len(losses)} values)"
    if losses[-1] >= losses[0]:
        return f"failed: {summary} (does not fall; {len(losses)} values)"
    return f"{summary} (falls; {len(losses)} values)"


def _installed_version(package: str) -> str:
    """Return the version of a package, or an empty text."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def programs() -> List[Program]:
    """Return the rows of the YAML file."""
    rows: Dict[str, Dict[str, Any]] = yaml.safe_load(PROGRAMS.read_text())
    return [Program(name=name, **row) for name, row in rows.items()]


def main(argv: Optional[List[str]] = None) -> int:
    """Run the programs and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for repository in ("examples", *LIBRARIES):
        parser.add_argument(f"--{repository}", metavar="GIT_DIR", help=f"a clone of {repository}, bare or not")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each program")
    parser.add_argument("--keep", metavar="FOLDER", help="run in this folder and keep it, with a log of each program")
    parser.add_argument("names", nargs="*", help="rows to run; default: all")
    flags = vars(parser.parse_args(argv))
    clones = {name: flags[name.replace("-", "_")] for name in ("examples", *LIBRARIES)}
    known = [program.name for program in programs()]
    for name in flags["names"]:
        if name not in known:
            near = difflib.get_close_matches(name, known) or known
            parser.error(f"no program {name!r}; did you mean {' or '.join(near)}?")
    chosen = [program for program in programs() if not flags["names"] or program.name in flags["names"]]
    failed = 0
    print("| program | command | instances | result |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(flags["keep"] or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        workspace = Workspace(folder, {name: Path(path) for name, path in clones.items() if path})
        for program in chosen:
            result = workspace.run(program, flags["timeout"])
            failed += result.startswith("failed")
            print(f"| {program.name} | `{program.command}` | {program.instances} | {result} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the program and deletes the temporary folder
    sys.exit(main())
