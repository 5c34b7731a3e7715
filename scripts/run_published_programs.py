"""Run published PopTorch programs, unmodified, on the emulated SDK, and print the table of their results.

    python scripts/run_published_programs.py --examples GIT_DIR --optimum GIT_DIR --examples-utils GIT_DIR [NAME ...]

Each row of `published_programs.yaml` is a command, run in a temporary copy of its repository's folder with generated
data. A missing clone, package or library is the row's result.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).with_name("published_programs.yaml")
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
        loss: a pattern whose group 1 is a loss in the output.
        cifar: (training, test) images of a generated CIFAR-10, and where the program expects it.
        instances: 2 or more run under `python -m raypod.launch`.
        ipus: the IPUs of each replica, an option of `raypod.launch`.
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


def extract(git: str, folder: str, target: Path) -> None:
    """Extract a folder of the newest commit of a clone, bare or not."""
    target.mkdir(parents=True, exist_ok=True)
    # The tree of the folder: with a path, git archive needs the files outside of it, too.
    words = ["git", "-C", git, "archive", f"--prefix={folder}/", f"HEAD:{folder}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        with tarfile.open(fileobj=archive.stdout, mode="r|") as tar:
            tar.extractall(target)
    if archive.returncode:
        raise SystemExit(f"git archive of {folder} in {git} failed: is the clone complete?")


class Workplace:
    """A temporary folder with generated data and the environment that the programs run in.

    Args:
        clones: the clone of each repository, as far as given.
    """

    def __init__(self, folder: Path, clones: Dict[str, str]) -> None:
        self._folder, self._clones = folder, clones
        write_mnist(folder / "home" / ".torch" / "datasets")
        self._libraries: List[Path] = []
        for name, package in (("examples-utils", "examples_utils"), ("optimum", "optimum")):
            if name in clones:
                extract(clones[name], package, folder / name)
                self._libraries.append(folder / name)

    def run(self, program: Program, timeout_s: float) -> str:
        """Run a program and return its result in one line: the losses, or why it does not run."""
        if program.reason:
            return f"not run: {program.reason}"
        if program.repository != "raypod" and program.repository not in self._clones:
            return f"not run: no clone of {program.repository} is given"
        package, _, version = program.requires.partition("==")
        if package and importlib.metadata.version(package) != version:
            return f"not run: needs {program.requires}"
        copy = ROOT if program.repository == "raypod" else self._folder / f"copy-{program.name}"
        if copy is not ROOT:
            extract(self._clones[program.repository], program.extract or program.folder, copy)
        if program.cifar:
            self._write_cifar(program.cifar, copy / program.folder)
        log = self._folder / f"{program.name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self._command(program), cwd=copy / program.folder, env=self._environment(program),
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # with its data loaders
                process.wait()
                return f"failed: not finished after {timeout_s:.0f} s"
        return result_of(program, log.read_text(errors="replace"), process.returncode)

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
        paths = [*([ROOT] if program.instances > 1 else []), ROOT / "raypod/emulated_sdk", *self._libraries]
        changes = {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "HOME": str(self._folder / "home"),
            "OMP_NUM_THREADS": "1",
            "EMULATED_POD_IPUS": "16",  # programs that ask for hardware find some
            "WANDB_MODE": "offline",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **changes}


def result_of(program: Program, output: str, code: int) -> str:
    """Return the result of a run in one line."""
    lines = [line for line in output.replace("\r", "\n").splitlines() if line.strip()]
    if code:
        return f"failed with exit code {code}: {lines[-1][:160] if lines else 'no output'}"
    losses = [float(value) for value in re.findall(program.loss, "\n".join(lines))] if program.loss else []
    if not program.loss:
        return "runs to its end"
    if not losses:
        return "failed: no loss in its output"
    falls = "falls" if losses[-1] < losses[0] else "does NOT fall"
    return f"loss {losses[0]:g} -> {losses[-1]:g} ({falls}; {len(losses)} values)"


def programs() -> List[Program]:
    """Return the rows of the YAML file."""
    rows: Dict[str, Dict[str, Any]] = yaml.safe_load(PROGRAMS.read_text())
    return [Program(name=name, **row) for name, row in rows.items()]


def main(argv: Optional[List[str]] = None) -> int:
    """Run the programs and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for repository in ("examples", "examples-utils", "optimum"):
        parser.add_argument(f"--{repository}", metavar="GIT_DIR", help=f"a clone of {repository}, bare or not")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each program")
    parser.add_argument("--keep", metavar="FOLDER", help="run in this folder and keep it, with a log of each program")
    parser.add_argument("names", nargs="*", help="rows to run; default: all")
    flags = vars(parser.parse_args(argv))
    clones = {name: flags[name.replace("-", "_")] for name in ("examples", "examples-utils", "optimum")}
    chosen = [program for program in programs() if not flags["names"] or program.name in flags["names"]]
    failed = 0
    print("| program | command | instances | result |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(flags["keep"] or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        place = Workplace(folder, {name: path for name, path in clones.items() if path})
        for program in chosen:
            result = place.run(program, flags["timeout"])
            failed += result.startswith("failed")
            print(f"| {program.name} | `{program.command}` | {program.instances} | {result} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
