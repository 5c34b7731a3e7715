from __future__ import annotations

import dataclasses
import json
from typing import List

from raypod.observe.monitor.log_lines import LastLines
from raypod.observe.monitor.model import Device, HostFacts, Ipu, RateMeter, Usage, from_json, to_json
from raypod.observe.monitor.pod_source import build_pod, collapsed, with_names
from raypod.observe.monitor.run_source import with_log_lines
from raypod.system.files import strict_json
from tests.support.monitor_models import instance, make_run, usage

FACTS = [HostFacts(f"10.0.0.{last}", num_ipus=16) for last in (11, 12, 13)]


def test_ipus_work_for_instances_and_the_others_are_idle() -> None:
    pod = build_pod("pod", 0.0, FACTS, [make_run()])
    first, second, third = pod.hosts
    assert [each.ipu for each in first.ipus] == list(range(16))
    assert first.ipus[5] == Ipu(5, "training", "ada", "a", 2, 5, "image-classification", 1002)
    assert [each.state for each in second.ipus].count("training") == 8
    assert {each.state for each in third.ipus} == {"idle"}
    assert [each.ipu for each in third.ipus] == list(range(32, 48))
    assert first.usage == Usage(**usage())  # from the heartbeats of the run


def test_hosts_of_runs_are_listed_without_a_cluster_file_and_ended_runs_use_no_ipu() -> None:
    ended = dataclasses.replace(make_run(run_dir="/runs/b"), state="done")
    pod = build_pod("vm", 0.0, [HostFacts("vm")], [ended, make_run()])
    assert [host.name for host in pod.hosts] == ["vm", "10.0.0.11", "10.0.0.12"]
    assert [run.name for run in pod.runs] == ["a", "b"]
    assert {each.run for host in pod.hosts for each in host.ipus} == {"a"}
    silent = dataclasses.replace(make_run(), problem="process 999 does not answer")
    assert {each.state for each in build_pod("vm", 0.0, [], [silent]).hosts[0].ipus} == {"no answer"}


def test_an_instance_with_several_ipus_per_replica_and_a_lost_one() -> None:
    run = make_run(instances=[instance(0, ipus=[0, 4]), instance(1, ipus=[4, 4], state="lost")])
    (host,) = build_pod("pod", 0.0, [HostFacts("10.0.0.11")], [run]).hosts[:1]
    assert [each.replica for each in host.ipus] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [each.state for each in host.ipus] == ["training"] * 4 + ["lost"] * 4
    assert [(first.ipu, last.ipu) for first, last in collapsed(host.ipus)] == [(0, 3), (4, 7)]


def test_gc_monitor_names_the_ipus_and_the_programs_of_others() -> None:
    devices = (Device(0, 1000), Device(1), Device(2, 77, "eve", "python"), Device(3, 1000))
    run = make_run(instances=[instance(0)])
    (host,) = build_pod("pod", 0.0, [HostFacts("10.0.0.11", devices=devices)], [run]).hosts[:1]
    assert [(each.ipu, each.state, each.owner, each.replica) for each in host.ipus] == [
        (0, "training", "ada", 0),
        (1, "idle", "", None),
        (2, "busy", "eve", None),
        (3, "training", "ada", 1),
    ]


def test_names_of_hosts_are_those_of_the_pod() -> None:
    run = make_run(host="head", instances=[instance(0, host="localhost"), instance(4)], hosts={"localhost": usage()})
    named = with_names(run, {"head": "10.0.0.11"})
    assert (named.host, [each.host for each in named.instances]) == ("10.0.0.11", ["10.0.0.11", "10.0.0.12"])
    assert list(named.hosts) == ["10.0.0.11"]


def test_json_contains_what_another_monitor_needs() -> None:
    facts = HostFacts("10.0.0.11", Usage(**usage()), (Device(0, 1000, "ada", "python"),))
    pod = build_pod("pod", 1.0, [facts], [make_run()])
    content = json.loads(strict_json(to_json(pod, facts)))
    assert from_json(content) == (facts, list(pod.runs))
    content["runs"][0]["added_later"] = content["usage"]["added_later"] = 1
    assert from_json(content) == (facts, list(pod.runs))
    assert content["hosts"][0]["ipus"][0]["pid"] == 1000


def test_rates_of_the_network() -> None:
    meter, found = RateMeter(), []  # type: ignore[var-annotated]
    for now_s, received in ((0.0, 100), (1.0, 100), (2.0, 500), (3.0, 500), (4.0, 10), (5.0, 10), (9.0, 10)):
        rated = meter.add("h", Usage(network_received_bytes=received, network_sent_bytes=received), now_s)
        found.append(rated.received_bytes_per_s)
    assert found == [None, None, 200.0, 200.0, None, None, 0.0]


def test_launches_have_programs() -> None:
    programs: List[object] = [
        {"instance": 0, "host": "h", "pid": 5, "state": "running", "exit_code": None, "last_line": "a\x1b[0mb"},
        {"instance": 1, "host": "h", "pid": None, "state": "exited", "exit_code": 3, "ipus": [1, 1], "last_line": ""},
    ]
    launch = make_run(kind="launch", command=["python", "train.py"], instances=programs, phase="running", hosts={})
    assert (launch.kind, launch.program, launch.state) == ("launch", "python train.py", "running")
    assert [(each.state, each.log_line) for each in launch.instances] == [("running", "ab"), ("exit code 3", None)]
    (host,) = build_pod("pod", 0.0, [HostFacts("h", num_ipus=2)], [launch]).hosts
    assert [(each.ipu, each.state) for each in host.ipus] == [(0, "idle"), (1, "idle")]


def test_the_last_log_line_of_an_instance_on_another_host_is_that_of_its_heartbeat() -> None:
    run = make_run(instances=[instance(0, log_line="\x1b[31mwarning:\x1b[0m  slow disk"), instance(1)])
    assert [each.log_line for each in with_log_lines(run, LastLines()).instances] == ["warning: slow disk", None]
