"""The pod from what the monitors on its hosts found: which IPU works for which run. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from raypod.observe.monitor.model import Device, HostFacts, HostView, Instance, Ipu, Pod, Run, Usage

IDLE, BUSY, LOST, NO_ANSWER = "idle", "busy", "lost", "no answer"
_LOCAL_NAMES = ("", "localhost", "127.0.0.1")


def build_pod(name: str, unix_s: float, facts: Sequence[HostFacts], runs: Iterable[Run]) -> Pod:
    """Return the pod; hosts of runs that no monitor looked at are added after the others.

    A host with a problem has no idle IPUs, and no load unless an instance works there: both would be invented.
    """
    ordered = sorted(runs, key=lambda run: (not run.is_active, -(run.started_unix_s or 0.0), run.run_dir))
    known = {each.name: each for each in facts}
    active = [run for run in ordered if run.is_active]
    for run in active:
        for host in [*(each.host for each in run.instances), *run.hosts]:
            known.setdefault(host, HostFacts(host))
    hosts = tuple(_host(index, each, active) for index, each in enumerate(known.values()))
    return Pod(name, unix_s, hosts, tuple(ordered))


def with_names(run: Run, names: Mapping[str, str]) -> Run:
    """Return a run whose hosts have the names by which the pod knows them.

    `names` maps the names of the monitor's host to the name in the pod. A host without a name is that of the
    coordinator.
    """
    coordinator = names.get(run.host, run.host)

    def named(host: str) -> str:
        return coordinator if host in _LOCAL_NAMES else names.get(host, host)

    instances = tuple(dataclasses.replace(each, host=named(each.host)) for each in run.instances)
    hosts = {named(host): usage for host, usage in run.hosts.items()}
    return dataclasses.replace(run, host=coordinator, instances=instances, hosts=hosts)


def _host(index: int, facts: HostFacts, runs: Sequence[Run]) -> HostView:
    usage = facts.usage
    if usage == Usage():
        usage = next((run.hosts[facts.name] for run in runs if facts.name in run.hosts), usage)
    rows = [row for run in runs for each in run.instances if each.host == facts.name for row in _ipus(run, each)]
    if facts.problem:
        works = any(row.state not in (LOST, NO_ANSWER) for row in rows)
        return HostView(facts.name, usage if works else Usage(), tuple(rows), facts.problem)
    if facts.devices is not None:
        rows = _joined(facts.devices, rows)
    elif facts.num_ipus:
        first, used = index * facts.num_ipus, {row.ipu for row in rows}
        if len(used) < facts.num_ipus:
            free = [each for each in range(first, first + facts.num_ipus) if each not in used]
            rows += [Ipu(each, IDLE) for each in free[: facts.num_ipus - len(used)]]
    return HostView(facts.name, usage, tuple(rows), facts.problem)


def _ipus(run: Run, instance: Instance) -> List[Ipu]:
    """Return the IPUs of an instance; none of a program that has ended."""
    if instance.state == IDLE or instance.state.startswith("exit code"):
        return []
    per_replica = max(1, instance.num_ipus // max(1, instance.num_replicas))
    return [
        Ipu(
            ipu=instance.first_ipu + offset,
            state=NO_ANSWER if run.problem else instance.state or run.phase or run.state,
            owner=run.user,
            run=run.name,
            instance=instance.instance,
            replica=instance.first_replica + offset // per_replica if instance.num_replicas else None,
            program=run.program,
            pid=instance.pid,
        )
        for offset in range(instance.num_ipus)
    ]


def _joined(devices: Sequence[Device], rows: Sequence[Ipu]) -> List[Ipu]:
    """Return a row per IPU that `gc-monitor` lists, with the run whose process is attached to it."""
    waiting: Dict[Optional[int], List[Ipu]] = {}
    for row in rows:
        waiting.setdefault(row.pid, []).append(row)
    found: List[Ipu] = []
    for device in devices:
        own = waiting.get(device.pid) if device.pid is not None else None
        if own:
            found.append(dataclasses.replace(own.pop(0), ipu=device.ipu))
        else:
            state = IDLE if device.pid is None else BUSY
            found.append(Ipu(device.ipu, state, owner=device.owner, program=device.program, pid=device.pid))
    return found + [row for each in waiting.values() for row in each]


def collapsed(rows: Sequence[Ipu]) -> List[Tuple[Ipu, Ipu]]:
    """Return (first, last) of each group of consecutive IPUs that work for the same instance."""
    groups: List[Tuple[Ipu, Ipu]] = []
    for row in rows:
        if groups:
            first, last = groups[-1]
            same = dataclasses.replace(row, ipu=last.ipu, replica=last.replica) == last
            if same and row.ipu == last.ipu + 1:
                groups[-1] = (first, row)
                continue
        groups.append((row, row))
    return groups
