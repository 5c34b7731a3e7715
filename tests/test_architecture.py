"""The structure of the house: imports point downward, and vendors are imported where they belong."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, Set

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "raypod"

LEVELS: Dict[str, int] = {
    **dict.fromkeys(("__init__", "errors", "events", "torchvision_import", "allocator", "mixer", "suggestions"), 0),
    **dict.fromkeys(("launcher/__init__", "launcher/records", "launcher/keeper", "launcher/rendezvous_store"), 0),
    **dict.fromkeys(("launcher/options", "launcher/stdin", "cluster_file", "numa"), 0),
    **dict.fromkeys(("durable", "interval", "versions", "replica_state"), 0),
    **dict.fromkeys(("checkpoint/__init__", "checkpoint/manifest"), 0),
    **dict.fromkeys(("checkpoint/folder", "checkpoint/retention", "checkpoint/tensors"), 1),
    **dict.fromkeys(("checkpoint/fit", "weights"), 4),
    **dict.fromkeys(("checkpoint/reader", "checkpoint/writer"), 5),
    **dict.fromkeys(("checkpoint/background",), 6),
    **dict.fromkeys(("run_state", "tensorboard"), 1),
    **dict.fromkeys(("supervisor",), 2),
    **dict.fromkeys(("ledger",), 4),
    **dict.fromkeys(("verify_data",), 5),
    **dict.fromkeys(("sinks",), 6),
    **dict.fromkeys(("saving",), 9),
    **dict.fromkeys(("config", "cluster", "stop_gate", "pulse", "shell", "launcher/console", "launcher/pump"), 1),
    **dict.fromkeys(("device_input", "prefetch"), 0),
    **dict.fromkeys(("user_code", "file_lock", "datasets/arrays"), 1),
    **dict.fromkeys(
        ("datasets/digits", "datasets/synthetic", "datasets/own", "datasets/cifar", "datasets/image_folder"), 4
    ),
    **dict.fromkeys(("datasets/cache", "datasets/download"), 2),
    **dict.fromkeys(("datasets/__init__", "transforms", "sample_loader"), 5),
    **dict.fromkeys(("placement", "launcher/parser", "launcher/mpi_arguments", "launcher/output"), 2),
    **dict.fromkeys(("plan", "devices", "vipu", "launcher/run"), 3),
    **dict.fromkeys(
        (
            "environment",
            "norms",
            "weights",
            "sampling",
            "plan_table",
            "horovod_rendezvous",
            "seeding",
            "launcher/partition",
        ),
        4,
    ),
    **dict.fromkeys(("launcher/topology",), 4),
    **dict.fromkeys(("metrics", "flat_state", "collectives", "sdk", "launcher/programs"), 5),
    **dict.fromkeys(("feed", "models", "optimizers", "run_folder", "launcher/host_process", "steps"), 6),
    **dict.fromkeys(("instance", "pipeline", "pipeline_table"), 7),
    **dict.fromkeys(("fleet/__init__",), 8),
    **dict.fromkeys(("fleet/process", "fleet/inline", "fleet/scripted", "fleet/ray_session", "fleet/ray_nodes"), 9),
    **dict.fromkeys(("liveness", "failure"), 9),
    **dict.fromkeys(("fleet/ray_watch", "fleet/ray_substitutes", "fleet/ray_hosts", "repairs", "progress"), 10),
    **dict.fromkeys(("fleet/ray", "coordinator"), 11),
    **dict.fromkeys(("train", "launch"), 12),
    # What a cluster needs before a run.
    **dict.fromkeys(("gcs", "stop_cluster", "doctor/__init__", "doctor/probe"), 0),
    **dict.fromkeys(("interfaces", "cluster_traps"), 1),
    **dict.fromkeys(("ssh", "auth_token"), 2),
    **dict.fromkeys(("up",), 3),
    **dict.fromkeys(("doctor/findings",), 4),
    **dict.fromkeys(("doctor/table",), 5),
    **dict.fromkeys(("doctor/run",), 6),
    **dict.fromkeys(("__main__",), 13),
}
SDK = {
    "poptorch",
    "popdist",
    "horovod",
    "_emulated_pod",
    "_emulated_gcl",
    "_emulated_gradient_sum",
    "_emulated_shared_memory",
}
SDK_USERS = {"sdk", "instance", "optimizers", "collectives", "steps", "pipeline_table"}


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
