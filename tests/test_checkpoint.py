from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from raypod import checkpoint
from raypod.errors import ConfigError
from raypod.plan import Plan


def save(plan: Plan, update: int) -> Path:
    path = checkpoint.weights_path(plan, update)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    checkpoint.commit(plan, update, "ab" * 32)
    return path


def resumed(make: Callable[..., Plan], where: object, **sections: Any) -> checkpoint.Checkpoint:
    return checkpoint.read(make(run={"resume": str(where)}, **sections))


def test_a_run_folder_gives_its_newest_checkpoint(make: Callable[..., Plan]) -> None:
    plan = make()
    save(plan, 44)
    newest = save(plan, 88)
    found = resumed(make, plan.run_dir)
    assert (found.path, found.position.update) == (newest, 88)


def test_weights_without_their_position_are_no_checkpoint(make: Callable[..., Plan]) -> None:
    plan = make()
    save(plan, 44)
    checkpoint.weights_path(plan, 88).write_bytes(b"half")
    assert resumed(make, plan.run_dir).path.name == "update-00000044.pt"


def test_a_checkpoint_of_another_run_names_what_differs(make: Callable[..., Plan]) -> None:
    path = save(make(), 44)
    with pytest.raises(ConfigError, match="seed is 42 and this run's is 7"):
        resumed(make, path, training={"seed": 7})
    with pytest.raises(ConfigError, match="replicas is 4 and this run's is 8"):
        resumed(make, path, pod={"replicas": 8})


def test_the_placement_may_differ(make: Callable[..., Plan]) -> None:
    path = save(make(), 44)
    assert resumed(make, path, pod={"num_instances": 4}).position.update == 44


def test_a_finished_run_says_so(make: Callable[..., Plan]) -> None:
    path = save(make(), 44)
    with pytest.raises(ConfigError, match="already at update 44 of 44"):
        resumed(make, path, training={"epochs": 1})


@pytest.mark.parametrize("where", ["{}", "{}/checkpoints/update-00000044.pt"])
def test_what_is_not_there_is_named(make: Callable[..., Plan], where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        resumed(make, where.format(tmp_path))


def test_a_damaged_position_is_told(make: Callable[..., Plan]) -> None:
    path = save(make(), 44)
    path.with_suffix(".json").write_text('{"update": ')
    with pytest.raises(ConfigError, match="damaged"):
        resumed(make, path)
