"""pyproject.toml declares exactly the packages that are imported, and constraints.txt pins them for each Python."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.modules import module_of

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
# The names of modules that are not those of their packages.
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml", "mlflow": "mlflow-skinny"}
# Modules that raypod contains, that an SDK or a user provides, or that only scripts/install_horovod.sh installs.
NOT_PACKAGES = {"raypod", "_pod", "poptorch", "popdist", "popart", "poptorch_geometric", "horovod", "sitecustomize"}
# Result.dataframe, Parquet files of predictions, and --model timm:NAME are for those who have these anyway.
OPTIONAL = {"pandas", "timm"}
# Packages that are declared for others, or as commands, and not imported.
NOT_IMPORTED = {
    *("sqlalchemy", "alembic"),  # of MLflow's store
    *("s3fs", "gcsfs"),  # of fsspec
    "tensorboard",  # of torch.utils.tensorboard
    "filelock",  # of Ray
}


def requirements() -> Dict[str, List[Requirement]]:
    """Return what pyproject.toml declares: extra ("": what is always installed) -> requirements."""
    text = (ROOT / "pyproject.toml").read_text()
    project = text[text.index("\ndependencies = [") : text.index("\n[project.scripts]")]
    uncommented = re.sub(r'("[^"]*")|\s*#.*', r"\1", project)
    lists = re.findall(r"^([\w-]+) = \[(.*?)\]$", uncommented, re.MULTILINE | re.DOTALL)
    quoted = {name: re.findall(r'"([^"]+)"', content) for name, content in lists}
    return {name if name != "dependencies" else "": list(map(Requirement, each)) for name, each in quoted.items()}


def names(extras: Iterator[str]) -> Set[str]:
    declared = requirements()
    return {canonicalize_name(each.name) for extra in extras for each in declared[extra]} - {"raypod"}


def of_users() -> Iterator[str]:
    return (extra for extra in requirements() if not extra.startswith("dev"))


@functools.lru_cache(maxsize=None)
def imported() -> Dict[str, str]:
    found = {}
    for path in sorted((ROOT / "raypod").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for module in _modules(node):
                found[module.partition(".")[0]] = str(path.relative_to(ROOT))
    return found


def _modules(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        first = node.args[0] if node.args else None
        if name in ("import_module", "find_spec") and isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def packages(modules: Dict[str, str]) -> Dict[str, str]:
    """Return the packages of other projects among modules, with one file of each."""
    standard = _standard_library()
    wanted = {name: file for name, file in modules.items() if name not in standard and name not in NOT_PACKAGES}
    return {canonicalize_name(PACKAGES.get(name, name)): file for name, file in wanted.items()}


def _standard_library() -> Set[str]:
    names = getattr(sys, "stdlib_module_names", None)  # from Python 3.10 on
    if names is None:
        pytest.skip("Python 3.10 and later know the names of the standard library")
    return set(names)


def test_exactly_what_is_imported_is_declared() -> None:
    found = packages(imported())
    assert {name: file for name, file in found.items() if name not in names(of_users()) | OPTIONAL} == {}
    found = packages(imported())
    assert names(of_users()) - found.keys() - NOT_IMPORTED == set()
    assert not NOT_IMPORTED & found.keys()


def test_an_import_at_the_top_of_a_module_is_no_extra() -> None:
    """What every command may import is always installed; an extra is imported where it is used."""
    always, own = names(iter([""])), {"ray_tune.py", "formats.py", "sftp.py", "mlflow_tracker.py", "wandb_tracker.py"}
    standard = _standard_library() | NOT_PACKAGES
    for path in sorted((ROOT / "raypod").rglob("*.py")):
        top = [name.partition(".")[0] for node in ast.parse(path.read_text()).body for name in _modules(node)]
        found = {canonicalize_name(PACKAGES.get(name, name)) for name in top if name not in standard}
        assert path.name in own or found <= always, path


def test_the_extras() -> None:
    found = list(requirements())
    assert len(found) - 1 <= 14
    named = "pod s3 gs sftp tensorboard mlflow wandb jpeg tokenizers hf tune onnx"
    assert {*named.split()} == {*filter(None, of_users())}
    for extra in re.findall(r"raypod\[([\w,-]+)\]", _all_texts()):
        assert set(extra.split(",")) <= {*found, "NAME"}, extra


def _all_texts() -> str:
    """Return the texts in which users read names of extras."""
    folders = ("raypod", "docs", "scripts", "tests", "cluster", "configs")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    files = [path for path in paths if path.suffix in (".py", ".md", ".yaml")]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")]
    return "\n".join(path.read_text() for path in files if path.name != Path(__file__).name)


def test_every_dependency_has_its_reason() -> None:
    """A comment in its own line, or in the line that begins its list."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("\ndependencies = [") : text.index("dev-test = [")]
    without = [line for line in section.splitlines() if line.strip().startswith('"') and "#" not in line]
    assert without == []
    heads = [line for line in section.splitlines() if re.match(r"[\w-]+ = \[", line) and "#" not in line]
    assert heads == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    pins: Dict[str, List[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            pin = Requirement(text)
            if pin.marker is None or pin.marker.evaluate(environment):
                assert re.fullmatch(r"==[\w.!]+", str(pin.specifier)), line
                pins.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier)[2:])
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}
    for extra, found in requirements().items():
        for each in found:
            if each.name == "raypod" or (each.marker is not None and not each.marker.evaluate(environment)):
                continue
            versions = pins.get(canonicalize_name(each.name), [])
            assert versions, f"{each} of {extra or 'raypod'} is not pinned for Python {python}: scripts/dev lock"
            allowed = SpecifierSet(str(each.specifier))
            assert allowed.contains(versions[0], prereleases=True), f"{each}: constraints.txt has {versions[0]}"


def test_the_versions_that_are_decided_and_equal_ones_in_one_line() -> None:
    lock = _lock()
    assert lock.PYTHONS == PYTHONS
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for pythons, chosen in lock.CHOSEN.items():
        for pin in chosen:
            assert f"{pin}{lock.marker(list(pythons))}" in lines
    assert not [line for line in lines if re.match(r"(nvidia|cuda|triton)\b", line)]
    assert not [line for line in lines if "/" in line.partition("#")[0]]
    found = {python: {"same": "1", "some": "2"} for python in PYTHONS}
    found["3.8"] = {"same": "1", "old": "3"}
    lines = ['old==3 ; python_version < "3.9"', "same==1", 'some==2 ; python_version >= "3.9"']
    assert _lock().merged(found) == lines


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        (PYTHONS, ""),
        (("3.8",), ' ; python_version < "3.9"'),
        (("3.8", "3.9"), ' ; python_version < "3.10"'),
        (("3.9",), ' ; python_version == "3.9"'),
        (("3.10", "3.11"), ' ; python_version >= "3.10" and python_version < "3.12"'),
        (("3.13",), ' ; python_version >= "3.13"'),
        (("3.8", "3.10"), ' ; python_version == "3.8" or python_version == "3.10"'),
    ],
)
def test_markers_of_pythons(pythons: List[str], expected: str) -> None:
    assert _lock().marker(list(pythons)) == expected


def _lock() -> Any:
    """Return the module scripts/lock.py."""
    return module_of(ROOT / "scripts" / "lock.py", "lock")


def test_the_version_is_in_one_place() -> None:
    (version,) = re.findall(r'^version = "([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = [path for folder in ("raypod", "docs", "scripts", "cluster") for path in (ROOT / folder).rglob("*")]
    own = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.]*\d)")
    wrong = [path for path in files if path.suffix in (".py", ".md", ".yaml", ".yml") and own.search(path.read_text())]
    assert wrong == []
