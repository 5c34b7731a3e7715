"""The structure of the house: imports point downward, and vendors are imported where they belong."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, Set

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "raypod"

LEVELS: Dict[str, int] = {
    name: level
    for level, names in enumerate(
        (
            "__init__ cluster_file errors events interval mixer suggestions torchvision_import "
            "checkpoint/__init__ checkpoint/manifest doctor/__init__ doctor/probe host/__init__ "
            "host/allocator host/numa input/__init__ input/device_input input/prefetch launcher/__init__ "
            "launcher/keeper launcher/options launcher/records launcher/stdin model/__init__ model/schedule "
            "pod/__init__ pod/gcs pod/stop_cluster record/__init__ record/durable record/plain_json record/versions "
            "state/__init__ state/replica_state",
            "cluster config file_lock pulse shell stop_gate user_code checkpoint/folder checkpoint/retention "
            "checkpoint/tensors datasets/arrays host/interfaces launcher/console launcher/pump "
            "pod/cluster_traps record/run_state record/tensorboard",
            "flags placement supervisor doctor/finding datasets/cache datasets/download launcher/mpi_arguments "
            "launcher/output launcher/parser pod/auth_token pod/ssh",
            "plan doctor/listeners host/devices host/vipu launcher/run pod/up",
            "environment horovod_rendezvous norms plan_table sampling checkpoint/fit datasets/cifar "
            "datasets/digits datasets/image_folder datasets/own datasets/synthetic doctor/findings "
            "launcher/partition launcher/topology record/ledger state/seeding state/weights",
            "collectives metrics sdk checkpoint/reader checkpoint/writer datasets/__init__ doctor/table "
            "input/sample_loader input/transforms launcher/programs state/flat_state",
            "feed models optimizers steps checkpoint/background doctor/run launcher/host_process record/run_folder",
            "options pipeline pipeline_table record/sinks record/verify_data",
            "instance",
            "fleet/__init__",
            "failure liveness saving fleet/inline fleet/process fleet/ray_nodes fleet/ray_reservation "
            "fleet/ray_session fleet/scripted",
            "evaluations progress repairs fleet/ray_hosts fleet/ray_kill",
            "coordinator fleet/ray_substitutes fleet/ray_watch",
            "fleet/ray",
            "launch train",
            "__main__",
        )
    )
    for name in names.split()
}
SDK = {
    "poptorch",
    "popdist",
    "horovod",
    "popart",
    "_pod",
}
SDK_USERS = {"sdk", "instance", "options", "optimizers", "collectives", "steps", "pipeline_table"}


def modules() -> Iterator[str]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).with_suffix("").as_posix()
        if not name.startswith(("emulated_sdk/", "startup/")):
            yield name


def imports(name: str) -> Set[str]:
    """Everything a module imports, anywhere in it; `raypod.x.y` as "raypod/x/y"."""
    found: Set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {each.replace(".", "/") for each in found}


def of_raypod(name: str) -> Set[str]:
    candidates = {each[len("raypod/") :] for each in imports(name) if each.startswith("raypod/")}
    return {each for each in candidates if each in LEVELS} | {
        f"{each}/__init__" for each in candidates if f"{each}/__init__" in LEVELS
    }


def test_every_module_has_its_level() -> None:
    assert set(modules()) == set(LEVELS)


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_imports_point_downward(name: str) -> None:
    upward = {each for each in of_raypod(name) - {name} if LEVELS[each] >= LEVELS[name]}
    assert not upward


def top_level(name: str) -> Set[str]:
    return {each.partition("/")[0] for each in imports(name)}


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_ray_is_imported_in_the_fleet_alone(name: str) -> None:
    text = (PACKAGE / f"{name}.py").read_text()
    knows_ray = "ray" in top_level(name) or 'import_module("ray")' in text
    assert not knows_ray or name.startswith("fleet/ray")


@pytest.mark.parametrize("name", sorted(set(LEVELS) - SDK_USERS))
def test_the_sdk_is_imported_where_it_belongs(name: str) -> None:
    assert not top_level(name) & SDK


def test_only_the_switch_knows_which_sdk_it_is() -> None:
    for name in set(modules()) - {"sdk", "config", "events"}:
        text = (PACKAGE / f"{name}.py").read_text()
        assert "if emulated" not in text, name
        assert 'device == "emulated"' not in text, name
        assert 'device == "ipu"' not in text, name


@pytest.mark.parametrize("file", sorted((PACKAGE / "emulated_sdk").rglob("*.py")), ids=lambda file: file.stem)
def test_the_emulated_sdk_imports_nothing_of_raypod(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names.append(node.module or "" if isinstance(node, ast.ImportFrom) else "")
        assert not any(name.partition(".")[0] == "raypod" for name in names)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_every_module_opens_with_its_duty(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), file
    assert len(file.read_text().splitlines()) <= 350, "over 350 lines: two duties?"
