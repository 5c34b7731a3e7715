from __future__ import annotations

import json
import subprocess
import sys
from typing import Callable

import pytest

from raypod.plan.cluster import cluster_of
from raypod.plan.placement import Sizes, place
from raypod.plan.plan import Plan
from raypod.plan.tables import describe, render, render_topology


def test_the_plan_shows_every_product(make: Callable[..., Plan]) -> None:
    plan = make(pod={"replicas": 8})
    described = json.loads(json.dumps(describe(plan)))
    assert described["geometry"]["global_batch_size"] == 64
    assert "8 (micro-batch) x 1 (accumulation) x 8 (replicas) = 64 samples per update" in render(plan)


def test_the_topology_is_a_boxed_table() -> None:
    placement = place(cluster_of("a,b"), Sizes(4, 2, 1))
    assert render_topology(placement, 2).splitlines() == [
        "+------+-----+----------+----------+------+",
        "| host | ILD | instance | replicas | IPUs |",
        "+------+-----+----------+----------+------+",
        "| a    | 0   | 0        | 0..1     | 0..1 |",
        "| b    | 1   | 1        | 2..3     | 2..3 |",
        "+------+-----+----------+----------+------+",
    ]


PLANS = [["raypod", "plan"], ["raypod", "plan", "--json"]]


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        *((command, {"ray", "torch", "poptorch", "numpy"}) for command in PLANS),
        *((command, {"ray"}) for command in ([*PLANS[0], "--memory"], ["raypod.train", "--dry-run"])),
        (["raypod", "--help"], {"ray", "torch", "numpy", "pydantic", "yaml"}),
    ],
)
def test_what_a_command_does_not_import(command: list[str], absent: set[str]) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = {command!r}\n"
        "try:\n    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"assert not {absent!r} & set(sys.modules), {absent!r} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "replica" in done.stdout or "usage: raypod COMMAND" in done.stdout
