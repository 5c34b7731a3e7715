"""`raypod bundle`: a folder of wheels with which hosts without a package index install raypod.

`pip download` evaluates the markers of requirements (`; python_version < "3.9"`) for its own interpreter, also with
`--python-version`. Therefore the interpreter of the hosts' version runs pip if this machine has it. Otherwise the
requirements of the downloaded wheels are read again for the hosts: what is missing is downloaded, until nothing is, and
what they do not need is removed.

Wheels as files: their names, their requirements for a version of Python, and the wheel of an installed package.
"""

from __future__ import annotations

import base64
import contextlib
import email.parser
import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raypod.errors import ConfigError
from raypod.plan import shipped
from raypod.system.command_line import FlagParser, show

_OF_THIS_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def name_and_version(wheel: Path) -> Tuple[str, str]:
    """Return the normalized name and the version in the name of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return canonicalize_name(name), version.replace("_", "+")


def versions_in(folder: Path) -> Dict[str, str]:
    """Return the versions of the wheels in a folder by name."""
    return dict(name_and_version(path) for path in folder.glob("*.whl"))


def check_requirements(texts: Sequence[str]) -> None:
    """Raise ConfigError for a text that is neither a requirement nor the path of a wheel."""
    for text in texts:
        if text.endswith(".whl"):
            if not Path(text).is_file():
                raise ConfigError(f"bundle: the wheel {text} does not exist")
            continue
        try:
            Requirement(text)
        except InvalidRequirement:
            raise ConfigError(f"bundle: {text!r} is neither a requirement, as numpy>=1.20, nor a wheel") from None


def constraints_for(file: Path, python: str) -> List[str]:
    """Return the lines of a constraints file that hold for a version of Python, without their markers."""
    lines = file.read_text().splitlines()
    found = [Requirement(text) for text in (line.partition("#")[0].strip() for line in lines) if text]
    return [f"{each.name}{each.specifier}" for each in found if _holds(each.marker, python)]


def installed(packages: Sequence[str]) -> List[str]:
    """Return constraints with the versions of the packages that are installed, without local ones as +cpu."""
    found = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
    return found


class Closure(NamedTuple):
    """What requirements need of a folder: the names of wheels, and requirements for which there is none."""

    needed: Set[str]
    missing: List[str]


def closure_in(folder: Path, requirements: Sequence[str], python: str) -> Closure:
    """Follow requirements through the wheels of a folder; a requirement can be the path of a wheel, too."""
    wheels = {name_and_version(path)[0]: path for path in folder.glob("*.whl")}
    missing: Dict[str, str] = {}
    seen: Set[Tuple[str, str]] = set()
    pending: List[Tuple[str, str]] = []
    for text in requirements:
        is_file = text.endswith(".whl")
        pending += [(name_and_version(Path(text))[0], "")] if is_file else _with_extras(Requirement(text))
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen or name not in wheels:
            continue
        seen.add((name, extra))
        for each in _requirements(wheels[name]):
            if _holds(each.marker, python, extra):
                if canonicalize_name(each.name) not in wheels:
                    missing[canonicalize_name(each.name)] = f"{each.name}{_extras(each)}{each.specifier}"
                pending += _with_extras(each)
    return Closure({name for name, _ in seen}, sorted(missing.values()))


def repack(package: str, folder: Path) -> None:
    """Write the wheel of an installed pure package. ConfigError if its files are not known."""
    found = importlib.metadata.distribution(package)
    files = [file for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    info = next((file.parts[0] for file in files if file.parts[0].endswith(".dist-info")), None)
    sources = [file for file in files if not (file.parts[0] == info and file.name in _OF_THIS_INSTALLATION)]
    if info is None or not any(file.parts[0] == package for file in sources):
        raise ConfigError(f"bundle: the files of the installed {package} are not known; run the command in a checkout")
    record = []
    with zipfile.ZipFile(folder / f"{info[: -len('.dist-info')]}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sources:
            content = Path(str(found.locate_file(file))).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file.as_posix()},sha256={digest},{len(content)}\n")
            wheel.writestr(file.as_posix(), content)
        wheel.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))


def _requirements(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        metadata = email.parser.BytesParser().parsebytes(content.read(name))
    for text in metadata.get_all("Requires-Dist", []):
        yield Requirement(text)


def _holds(marker: Optional[Marker], python: str, extra: str = "") -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    return marker is None or marker.evaluate(environment)


def _with_extras(requirement: Requirement) -> List[Tuple[str, str]]:
    return [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


_VERSION = ".".join(map(str, sys.version_info[:2]))
_START_S = 60.0  # limit of the start of an interpreter
_ROUNDS = 8  # of downloads of what is missing
_GLIBC_MINOR = 31  # that of Ubuntu 20.04, the system of hosts with the Poplar SDK 3.3/3.4
_POD = "ray[default]"  # the extra pod
_DESCRIPTION = """Write a folder of wheels for hosts without a package index: raypod[pod], what it needs, and
REQUIREMENT...; install it there with: sh FOLDER/install.sh VENV"""
# `install.sh` of the folder; `@PYTHON@` stands for the version of the hosts' Python.
_INSTALL = """#!/bin/sh
# Install the wheels of this folder: sh install.sh VENV [PYTHON]. pip compares their hashes with requirements.txt, and
# uses no package index.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: sh install.sh VENV [PYTHON]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
python=${2:-python@PYTHON@}
if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
elif ! command -v "$python" >/dev/null; then
    python=python3
fi
if ! "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")'; then
    echo "install.sh: this bundle is for Python @PYTHON@, and $python is another version" >&2
    echo "name one: sh install.sh VENV PYTHON" >&2
    exit 2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$here/wheels" \\
    --require-hashes -r "$here/requirements.txt"
"""


class Target(NamedTuple):
    """The hosts: the version of their Python, as in 3.8, and the platform tags of wheels that they can install."""

    python: str
    platforms: Sequence[str]


def parser() -> FlagParser:
    parser = FlagParser(run, prog="raypod bundle", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write; it must not exist")
    parser.add_argument("requirements", metavar="REQUIREMENT", nargs="*", help="more to install, as PopTorch's wheel")
    parser.add_argument("--python", default=_VERSION, metavar="X.Y", help="Python of the hosts [that of this command]")
    parser.add_argument(
        "--platform", action="append", metavar="TAG", help="platform tag of the hosts' wheels, can be repeated "
        f"[that of this machine, with glibc 2.{_GLIBC_MINOR}]"
    )  # fmt: skip
    parser.add_argument("--index", action="append", default=[], metavar="URL", help="a further package index")
    parser.add_argument(
        "--constraints",
        metavar="FILE",
        help="pip's constraints [in a checkout: the tested versions; else those installed here]",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="timeout of each download [3600]")
    return parser


def run(args: Namespace) -> int:
    """Run the command. ConfigError if the request is wrong or pip fails; then the folder does not exist."""
    folder = Path(args.folder)
    target = Target(_checked_version(args.python), args.platform or _platforms())
    if folder.exists():
        raise ConfigError(f"bundle {folder}: it exists; remove it, or choose another folder")
    check_requirements(args.requirements)
    constraints = _constraints(args.constraints, target.python)
    pip = Pip(target, args.index, constraints, args.timeout, str(folder))
    write(folder, pip, [_POD, *args.requirements])
    number = len(list((folder / "wheels").iterdir()))
    show(f"{folder}: {number} wheels for Python {target.python}")
    show(f"On a host: sh {folder.name}/install.sh VENV")
    return 0


def _checked_version(text: str) -> str:
    found = re.fullmatch(r"3\.(\d+)", text)
    if not found or int(found.group(1)) < 8:
        raise ConfigError(f"--python {text}: must be the version of the hosts' Python, as in 3.8, and at least 3.8")
    return text


def _constraints(given: Optional[str], version: str) -> List[str]:
    """Return pip's constraints: those of a file, of the checkout, or for its own Python the installed versions."""
    file = Path(given) if given else shipped.project_file("constraints.txt")
    if file is None:
        return installed(("torch", "torchvision", "ray")) if version == _VERSION else []
    if not file.is_file():
        raise ConfigError(f"bundle: the file of --constraints, {file}, does not exist")
    return constraints_for(file, version)


def _platforms() -> List[str]:
    machine = platform.machine()
    modern = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC_MINOR, 4, -1)]
    return [*modern, *(f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux"))]


def _interpreter_for(version: str) -> str:
    """Return this interpreter, or one of another version if this machine has it with pip.

    Raises:
        ConfigError: this interpreter has no pip.
    """
    if version != _VERSION:
        other = shutil.which(f"python{version}")
        if other is not None and _has_pip(other):
            return other
    if not _has_pip(sys.executable):
        raise ConfigError(f"bundle: {sys.executable} has no pip; install it with: python -m ensurepip")
    return sys.executable


def _has_pip(interpreter: str) -> bool:
    line = [interpreter, "-c", "import pip"]
    try:
        return subprocess.run(line, stderr=subprocess.DEVNULL, timeout=_START_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Pip:
    """Runs `pip download` for the hosts."""

    def __init__(
        self, target: Target, indexes: Sequence[str], constraints: Sequence[str], timeout_s: float, name: str
    ) -> None:
        """`name` is that of the bundle, for messages."""
        self.target, self._timeout_s, self._name = target, timeout_s, name
        self._constraints = list(constraints)
        self._interpreter = _interpreter_for(target.python)
        self._flags = [word for url in indexes for word in ("--extra-index-url", url)]
        self._target_flags = ["--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}"]
        self._target_flags += [f"--platform={tag}" for tag in target.platforms]

    def download(self, requirements: Sequence[str], folder: Path, chosen: Mapping[str, str]) -> None:
        """Download wheels for requirements; `chosen` are versions by name that must not change.

        Raises:
            ConfigError: pip fails or takes too long.
        """
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary, "constraints.txt")
            pinned = [f"{name}=={version}" for name, version in chosen.items()]
            file.write_text("\n".join([*pinned, *self._constraints]))
            words = ["download", "--dest", str(folder), "--find-links", str(folder), "-c", str(file), *self._flags]
            self.run([*words, *self._target_flags, *requirements])

    def build(self, source: Path, folder: Path) -> None:
        self.run(["wheel", "--no-deps", "--wheel-dir", str(folder), str(source)])

    def run(self, words: Sequence[str]) -> None:
        """Run pip. ConfigError with its last error."""
        line = [self._interpreter, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=self._timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"bundle {self._name}: pip timed out after {self._timeout_s:g} s (--timeout)") from None
        if done.returncode:
            raise ConfigError(f"bundle {self._name}: pip {words[0]} failed: {_cause_of(done.stderr or done.stdout)}")


def _cause_of(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line[len("ERROR: ") :] for line in lines if line.startswith("ERROR: ")]
    cause = (errors or lines or ["no message"])[-1]
    if re.search(r"connection (was )?(broken|refused|error)|NewConnectionError|name resolution", output, re.IGNORECASE):
        cause += "; the package index cannot be reached"
    return cause


def write(folder: Path, pip: Pip, requirements: Sequence[str]) -> None:
    """Write a bundle; `folder` exists only if it is complete.

    Raises:
        ConfigError: pip fails, or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-partial-", dir=str(folder.parent)))
    except OSError as error:
        raise ConfigError(f"bundle {folder}: {error.strerror}") from None
    try:
        target = partial / "wheels"
        target.mkdir()
        source = shipped.project_file("pyproject.toml")
        if source is not None:
            pip.build(source.parent, target)
        else:
            repack("raypod", target)
        _fill(target, pip, requirements)
        _describe(partial, pip.target)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"bundle {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)


def _fill(folder: Path, pip: Pip, requirements: Sequence[str]) -> None:
    """Download what the wheels of a folder and further requirements need, until nothing is missing."""
    missing = [*(str(path) for path in folder.iterdir()), *requirements]
    for _ in range(_ROUNDS):
        chosen = {name: version for name, version in versions_in(folder).items() if name != "raypod"}
        pip.download(missing, folder, chosen)
        needed, missing = closure_in(folder, ["raypod", *requirements], pip.target.python)
        if not missing:
            for path in folder.iterdir():
                if name_and_version(path)[0] not in needed:
                    path.unlink()
            return
    raise ConfigError(f"bundle: after {_ROUNDS} downloads these are still missing: {', '.join(missing)}")


def _describe(folder: Path, target: Target) -> None:
    """Write the list of the wheels with their hashes, for pip and as JSON, and the script that installs them."""
    hashes: Dict[str, str] = {}
    lines: List[str] = []
    for path in sorted((folder / "wheels").iterdir()):
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        name, version = name_and_version(path)
        lines.append(f"{name}=={version} --hash=sha256:{hashes[path.name]}")
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")
    manifest = {"python": target.python, "platforms": list(target.platforms), "sha256": hashes}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (folder / "install.sh").write_text(_INSTALL.replace("@PYTHON@", target.python))
