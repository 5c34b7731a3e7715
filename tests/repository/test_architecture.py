"""The structure of the package: imports between rooms have one direction, and each vendor has its place."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from pathlib import Path
from typing import Dict, List, Sequence, Set

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "raypod"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [file for file in FILES if not {"emulated_sdk", "startup"} & set(file.relative_to(PACKAGE).parts)]

# A package imports its targets and what they may import; modules of the top level that are not listed may import all.
PACKAGES = {
    "errors": "",
    "events": "errors",
    "system": "events",
    "plan": "system",
    "training": "plan",
    "runs": "training",
    "runtime": "runs",
    "observe": "runtime",
    "pod": "observe",
    "api": "observe",
    "cli": "pod api",
}
# Likewise the folders within a package. A module beside them may import and be imported by all of them.
FOLDERS = {
    "system/remote": "",
    "training/data": "",
    "training/checkpoint": "",
    "training/models": "training/data",
    "training/tasks": "training/models",
    "runs/upload": "",
    "runtime/worker": "",
    "runtime/workers": "runtime/worker",
    "runtime/coordinator": "runtime/workers",
    "runtime/launcher": "runtime/workers",
    "observe/status": "",
    "observe/logs": "",
    "observe/trackers": "",
    "observe/report": "",
    "observe/monitor": "observe/status",
    "observe/dashboard": "observe/report observe/status",
    "api/inference": "",
}
# The rooms of the emulated poptorch, likewise.
SDK_DIRECTIONS = {
    "executor": "device/execute",
    "device/execute": "device/compile",
    "device/compile": "device/kernels",
    "device/kernels": "optimizers parallel ops data",
    "optimizers": "options",
    "parallel": "options",
    "ops": "parallel options",  # poptorch.ops also exports the blocks
    "custom_operators": "",
    "data": "options",
    "options": "custom_operators",
}
SDK = {"poptorch", "popdist", "horovod", "popart", "_pod"}
SDK_USERS = {
    "training/models/program",
    "training/models/optimizers",
    "training/models/pipeline_table",
    "runtime/worker/instance",
    "runtime/worker/devices",
    "runtime/worker/collectives",
    "system/sdk",
}
SDK_USERS |= {"training/tasks/image_classification"}
SDK_MODULES = {"poptorch", "popdist", "popdist.poptorch", "horovod.torch"}
# Its package, its folder, one of its settings, or a module below the public ones.
SDK_INTERNALS = re.compile(r"^_pod\b|(^|/)emulated_sdk(/|$)|^EMULATED_POD_\w+$|^(poptorch|popdist|popart)(\.\w+)+$")
RAY_USERS = ["runtime/workers/ray*", "runtime/workers/gcs", "runtime/launcher/ray_hosts", "api/ray_tune"]
IDS = [file.relative_to(PACKAGE).with_suffix("").as_posix() for file in MODULES]


def named_in(nodes: Sequence[ast.AST]) -> Set[str]:
    """Return what the import statements among `nodes` name: modules, and their names."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_names = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names | {f"{node.module}.{alias.name}" for node in from_names for alias in node.names}


@functools.lru_cache(maxsize=None)
def imported(file: Path) -> Set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), f"{file}: relative import"
    return named_in(nodes)


def imported_at_the_top(file: Path) -> Set[str]:
    """Return the modules that are imported as soon as a module is."""
    names = named_in(ast.parse(file.read_text()).body)
    return names | {name.rpartition(".")[0] for name in names}


def reachable(name: str, directions: Dict[str, str]) -> Set[str]:
    targets = set(directions[name].split())
    return targets.union(*(reachable(target, directions) for target in targets))


def test_imports_follow_the_direction_of_the_packages_and_their_folders() -> None:
    for file, name in zip(MODULES, IDS):
        package = name.partition("/")[0]
        used = {each.split(".")[1] for each in imported(file) if each.startswith("raypod.")}
        assert package not in PACKAGES or used <= reachable(package, PACKAGES) | {package}, name
    for file, name in zip(MODULES, IDS):
        folder = "/".join(name.split("/")[:2])
        used = {"/".join(each.split(".")[1:3]) for each in imported(file) if each.startswith("raypod.")} & set(FOLDERS)
        inside = {each for each in used if each.partition("/")[0] == folder.partition("/")[0]}
        assert folder not in FOLDERS or inside <= reachable(folder, FOLDERS) | {folder}, name


def test_imports_follow_the_direction_of_the_emulated_sdk() -> None:
    folder = PACKAGE / "emulated_sdk" / "poptorch"
    for room in SDK_DIRECTIONS:
        names = {name for file in (folder / room).rglob("*.py") for name in imported(file)}
        paths = {name.replace(".", "/") for name in names if name.startswith("poptorch.")}
        used = {other for other in SDK_DIRECTIONS if any(f"{each}/".startswith(f"poptorch/{other}/") for each in paths)}
        assert used <= reachable(room, SDK_DIRECTIONS) | {room}, room
    folders = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert folders <= {*SDK_DIRECTIONS, ".", "device"}


def test_no_module_imports_itself_through_others() -> None:
    graph: Dict[str, List[str]] = {}
    for file, name in zip(MODULES, IDS):
        used = {each[len("raypod.") :].replace(".", "/") for each in imported(file)}
        graph[name] = [other for other in IDS if other in used | {each.rpartition("/")[0] for each in used}]
    while graph:
        leaves = [name for name, used in graph.items() if not set(used) & set(graph) - {name}]
        assert leaves, f"import cycle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


def test_ray_the_sdk_and_devices_are_distinguished_only_in_their_places() -> None:
    for file, name in zip(MODULES, IDS):
        text, tops = file.read_text(), {each.split(".")[0] for each in imported(file)}
        uses_ray = "ray" in tops or 'import_module("ray")' in text
        assert not uses_ray or any(fnmatch.fnmatch(name, place) for place in RAY_USERS), name
        assert not tops & SDK or name in SDK_USERS, name
        if file.stem not in ("sdk", "config", "events"):
            words = ("if emulated", 'device == "emulated"', 'device == "ipu"')
            assert not [each for each in words if each in text], name


def test_only_instances_import_the_sdk_before_its_place_is_chosen() -> None:
    at_top = {name: imported_at_the_top(file) for file, name in zip(MODULES, IDS)}
    needs = {name for name, used in at_top.items() if used & SDK_MODULES}
    before: Set[str] = set()
    while needs != before:
        before, modules = needs, {f"raypod.{name.replace('/', '.')}" for name in needs}
        needs = needs | {name for name, used in at_top.items() if used & modules}
    of_instances = ("training/models/", "training/tasks/image_classification", "runtime/worker/")
    assert "runtime/worker/instance" in needs
    assert [name for name in sorted(needs) if not name.startswith(of_instances)] == []


def test_the_emulated_sdk_imports_nothing_of_raypod_which_uses_it_through_its_doors() -> None:
    for file, name in zip(MODULES, IDS):
        of_sdk = {each for each in imported(file) if each.split(".")[0] in SDK}
        doors = {f"_pod.{door}" for door in ("activation", "rendezvous", "telemetry")}
        assert of_sdk <= SDK_MODULES | (doors if name == "system/sdk" else set()), name
        tree = ast.parse(file.read_text())
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        reached = {each for each in texts if SDK_INTERNALS.search(each)}
        assert reached <= ({"_pod", "emulated_sdk"} if name == "system/sdk" else set()), name
    sdk = [file for file in FILES if "emulated_sdk" in file.relative_to(PACKAGE).parts]
    assert not {file.name for file in sdk if any(name.split(".")[0] == "raypod" for name in imported(file))}


def test_every_module_states_its_duty_and_stays_short_and_packages_are_few() -> None:
    for file in FILES:
        text = file.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{file}: no docstring"
        assert len(text.splitlines()) <= 600, f"{file}: over 600 lines: does it have two duties?"
    assert len(list(PACKAGE.glob("*.py"))) <= 7
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= {*PACKAGES, "emulated_sdk"}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_documented_files_exist(page: str) -> None:
    named = re.findall(r"`([\w{},./-]+/[\w{},.-]*|[\w{},]+\.py)`", (ROOT / page).read_text())
    paths = [path for name in named for path in _expanded(name)]
    assert len(paths) > 20
    folders = (PACKAGE, PACKAGE / "emulated_sdk", PACKAGE / "emulated_sdk" / "poptorch", ROOT, ROOT / "scripts")
    assert [path for path in paths if not any((folder / path).exists() for folder in folders)] == []


def test_the_tests_that_the_gate_names_exist() -> None:
    named = re.findall(r"\btests/[\w/.*]+", (ROOT / ".ci" / "run").read_text())
    assert len(named) > 5
    assert [name for name in named if not list(ROOT.glob(name))] == []


def _expanded(name: str) -> List[str]:
    before, brace, rest = name.partition("{")
    inner, _, after = rest.partition("}")
    return [f"{before}{part}{after}" for part in inner.split(",")] if brace else [name]


def test_the_documented_directions_are_those_of_the_imports_and_every_folder_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*)\|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    documented = {package: " ".join(re.findall(r"`(\w+)`", targets)) for package, targets in rows}
    folders = {name for name in PACKAGES if (PACKAGE / name).is_dir()}
    assert documented == {**{name: PACKAGES[name] for name in folders}, "emulated_sdk": ""}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert [folder for folder in FOLDERS if f"| `{folder}/` |" not in text] == []
