"""User code that raises or never returns: its instance is replaced; the same exception twice ends the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
from harness import assert_undisturbed, plan_for, run

from raypod.errors import InstanceFailed
from raypod.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the user's modules; files in it make them fail."""
    shutil.copy(Path(__file__).parent / "fragile.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def plan_of(folder: Path, name: str, **run_section: Any) -> Plan:
    (folder / name).mkdir()
    fleet = {"fleet": "inline"} if name == "inline" else {}
    return plan_for(
        folder / name,
        data={"dataset": "fragile:data"},
        training={"model": "fragile:model", "warmup_updates": 1, "updates": 60},
        pod={"num_instances": 1 if fleet else 2},
        run={**fleet, **run_section},
    )


def fail(folder: Path, failure: str) -> Callable[[Plan], None]:
    return lambda plan: (folder / failure).touch()


def test_each_failure_of_user_code_uses_one_restart(session: Any, folder: Path) -> None:
    reference = run(plan_of(folder, "inline"))
    plan = plan_of(folder, "ray", stuck_after_s=10, report_timeout_s=60)
    faults = ["model-raises", "model-exhausts-memory", "loader-raises", "model-hangs", "loader-hangs"]
    found = run(plan, [(4 + 5 * number, fail(folder, failure)) for number, failure in enumerate(faults)])
    assert_undisturbed(plan, found, reference)
    assert [(loss.instance, loss.kind) for loss in found.losses] == [
        (1, "raised"),
        (1, "raised"),
        (1, "raised"),
        (1, "stuck"),
        (1, "stuck"),
    ]
    raised, memory, loader, hangs, blocked = found.losses
    assert re.fullmatch(r"ValueError: no such layer \(fragile\.py:\d+, in forward\)", raised.cause)
    assert "can't allocate memory" in memory.cause
    assert re.fullmatch(r"OSError: the disk is gone \(fragile\.py:\d+, in __getitem__\)", loader.cause)
    assert "stuck: in call" in hangs.cause
    assert "stuck: loading data" in blocked.cause
    assert "_hang_in_user_code" in blocked.stack
    assert [repair.restarts for repair in found.repairs] == [1, 2, 3, 4, 5]


def test_the_results_of_an_instance_that_dies_between_its_last_exchange_and_its_report_are_known(
    session: Any, folder: Path
) -> None:
    reference = run(plan_of(folder, "inline"))
    plan = plan_of(folder, "ray")
    found = run(plan, [(5, fail(folder, "optimizer-dies"))])
    assert_undisturbed(plan, found, reference)
    assert [(loss.instance, loss.kind) for loss in found.losses] == [(1, "died")]
    assert found.repairs[0].seeded_from == "instance 0"


def test_an_endless_loop_is_ended_later_than_code_that_uses_no_cpu_time(session: Any, folder: Path) -> None:
    reference = run(plan_of(folder, "inline"))
    plan = plan_of(folder, "ray", stuck_after_s=4, report_timeout_s=60)
    found = run(plan, [(5, fail(folder, "model-loops"))])
    assert_undisturbed(plan, found, reference)
    (loss,) = found.losses
    assert (loss.instance, loss.kind) == (1, "stuck")
    assert "s while its threads use CPU time)" in loss.cause


def test_a_repeated_exception_ends_the_run(session: Any, folder: Path) -> None:
    (folder / "again").touch()
    with pytest.raises(
        InstanceFailed, match=r"no such layer \(fragile.py:\d+, in forward\) \(the same happened"
    ) as caught:
        run(plan_of(folder, "ray"), [(6, fail(folder, "model-raises"))])
    assert (caught.value.instance, caught.value.host) == (1, "localhost")
