"""What a plan shows, and the table of a run's files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any

import pytest

from raypod.plan import layout
from raypod.plan.cluster import cluster_of
from raypod.plan.placement import Sizes, place
from raypod.plan.tables import describe, render, render_brief, render_topology
from tests.support import ROOT


def test_the_plan_shows_every_product_the_ipus_in_use_and_a_boxed_table_of_the_topology(make: Any) -> None:
    plan = make(pod={"replicas": 8})
    described = json.loads(json.dumps(describe(plan)))
    assert described["geometry"]["global_batch_size"] == 64
    assert "8 (micro-batch) x 1 (accumulation) x 8 (replicas) = 64 samples per update" in render(plan)
    assert "snapshots" not in render(plan)
    assert "snapshots  every 2 updates: each host keeps two" in render(make(run={"snapshot_every": 2}))
    placement = place(cluster_of("a,b"), Sizes(4, 2, 1))
    assert render_topology(placement, 2).splitlines() == [
        "+------+-----+----------+----------+------+",
        "| host | ILD | instance | replicas | IPUs |",
        "+------+-----+----------+----------+------+",
        "| a    | 0   | 0        | 0..1     | 0..1 |",
        "| b    | 1   | 1        | 2..3     | 2..3 |",
        "+------+-----+----------+----------+------+",
    ]
    hosts = tuple(dataclasses.replace(host, ipus=16) for host in cluster_of("a,b").hosts)
    alone = make()
    cluster = dataclasses.replace(cluster_of("a,b"), hosts=hosts)
    plan = dataclasses.replace(alone, placement=dataclasses.replace(alone.placement, cluster=cluster))
    for text in (render(plan), render_brief(plan)):
        assert "= 4 IPUs of 32" in text
    assert " of " not in render_brief(alone).split("placement")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("raypod plan", "ray torch poptorch numpy"),
        *((command, "ray") for command in ("raypod plan --memory", "raypod plan --json", "raypod.train --dry-run")),
        ("raypod --help", "ray torch numpy pydantic yaml"),
    ],
)
def test_what_a_command_does_not_import(command: str, absent: str, run_python: Any) -> None:
    output = run_python(
        "import runpy, sys\n"
        f"sys.argv = {command.split()!r}\n"
        "try:\n    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"found = set({absent.split()!r}) & set(sys.modules)\nassert not found, found\n"
    )
    assert "replica" in output or "usage: raypod COMMAND" in output


def test_the_plan_shows_the_cores_per_replica_and_where_the_weights_are_the_same(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert "8 CPUs per host for 2 replicas: 4 per replica, 1 thread each\n" in render(make(pod={"replicas": 2}))
    sixteen = make(pod={"replicas": 16, "bind_cores": True})
    assert "0.5 per replica, 1 thread each; each instance is bound to its own, by NUMA node\n" in render(sixteen)
    assert "an instance computes 4 of its 8 replicas at a time (emulated SDK)" in render(sixteen)
    many = make(pod={"replicas": 4, "num_instances": 4, "threads_per_replica": 3})
    words = "WARNING, oversubscribed: 4 x 3 threads"
    shared = f"{words} (instances x threads per replica) share the 8 CPUs of a host: "
    assert f"{shared}use at most 2 instances per host or --threads-per-replica 2" in render(many)
    assert words in render_brief(many)
    assert "  cores  " not in render_brief(many)
    shown = render(make(pod={"replicas": 4, "threads_per_replica": 0}))
    assert "2 per replica, 2 threads each" in shown
    assert "specific to this placement: the threads" in shown
    one_thread = render(make(pod={"replicas": 4, "threads_per_replica": 1}))
    assert "the same for every placement of these replicas" in one_thread
    hosts = cluster_of("a,b")
    assert place(hosts, Sizes(4, 4, 1)).cpus_per_host is None
    four = dataclasses.replace(hosts, hosts=tuple(dataclasses.replace(host, cpus=4) for host in hosts.hosts))
    assert place(four, Sizes(4, 4, 1)).oversubscription == ""
    assert place(four, Sizes(16, 16, 1)).oversubscription.endswith("use at most 4 instances per host")
    assert place(four, Sizes(2, 2, 1), 8).oversubscription.endswith("use --threads-per-replica 4")
    assert place(four, Sizes(16, 16, 1), 8).oversubscription.endswith("use fewer of both")


def test_a_plan_shows_samples_that_are_left_out_and_what_evaluations_and_the_average_transfer(make: Any) -> None:
    left_out = "29 of 1437 images left out of each"
    assert f"length  660 updates, 44 per epoch ({left_out}), 15 segments\n" in render(make())
    assert f"length  660 updates (15 epochs of 44; {left_out})\n" in render_brief(make(), 80)
    assert f"length  5 updates, 44 per epoch ({left_out})\n" in render_brief(make(training={"updates": 5}), 80)
    whole = make(data={"dataset": "synthetic", "samples": 64}, training={"epochs": 1, "batch_size": 16})
    assert "length  1 update, 1 per epoch, 1 segment\n" in render(whole)
    assert "length  1 update (1 epoch of 1)\n" in render_brief(whole)
    shown = render(make(training={"epochs": 3}))
    assert "evaluation  after the training; on IPUs it transfers the weights 2 x and the optimizer state 1 x" in shown
    assert "during the training" not in shown
    assert "average" not in shown
    shown = render(make(training={"epochs": 3, "evaluate_every": 1, "ema": 0.99}))
    assert "evaluation  2 times during the training; on IPUs each transfers the weights 3 x and the optimizer" in shown
    assert "average  of the weights, which are read back every 10 updates\n" in shown


def test_a_plan_is_folded_to_its_column_except_in_paths_and_instances(make: Any) -> None:
    plan = make()
    lines = render(plan, 80).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("global batch"))
    assert lines[first + 1] == f"{'':14}update"
    assert [line for line in lines if len(line) > 80 and not line.startswith("  run folder")] == []
    assert render(plan, 20).splitlines()[-3:] == render(plan).splitlines()[-3:]
    lines = render_brief(plan, 40).splitlines()
    assert [line for line in lines if len(line) > 40 and not line.startswith("  run folder")] == []
    for row in ("model", "data", "length", "global batch", "pod", "placement", "run folder"):
        assert sum(line.startswith(f"{row:>12}  ") for line in lines) == 1


def test_every_file_has_its_writer_and_its_line_in_the_documentation() -> None:
    source = (ROOT / "raypod/plan/layout.py").read_text()
    constants = re.findall(r"^    RunFile\((\w+),", source, re.MULTILINE)
    page = (ROOT / "docs/reference/run-folder.md").read_text()
    documented = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    for constant, file in zip(constants, layout.TABLE):
        assert re.search(rf"\b{constant}\b", (ROOT / f"raypod/{file.writer}.py").read_text()), file
        assert any(name.split("/")[0] == file.name for name in documented), file.name
    known = {file.name for file in layout.TABLE}
    files = [name for name in documented if re.fullmatch(r"[a-z-]+\.(json|jsonl|yaml|seal|html)", name)]
    assert {name for name in files if name not in known} == set()
    assert len(known) == len(layout.TABLE) == len(constants)
