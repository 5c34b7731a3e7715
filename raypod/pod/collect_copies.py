"""`raypod up` on a new head: find the newest copy of each run on the hosts, and collect it where the head lacks it.

The data goes through this machine, so that the hosts need no access to each other.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from raypod.plan.cluster import Cluster, Host
from raypod.pod import host_copies
from raypod.runtime import ssh

_LIST_S = 60.0
_TRANSFER_S = 3600.0  # of one copy
Say = Callable[[str], None]
Age = Tuple[int, int]


class Copy(NamedTuple):
    """A copy of a run on a host."""

    age: Age  # generation and update
    host: Host
    path: str
    facts: Dict[str, Any]  # its `run.json`
    is_complete: bool  # the run has ended as planned

    @property
    def run_dir(self) -> str:
        """The run folder on the head from which it was copied."""
        return str(self.facts["run_dir"])


def collect(cluster: Cluster, command: str, say: Say) -> None:
    """Collect the newest copy of each run that can be continued, unless the head has a checkpoint as new.

    Nothing raises an error: the cluster runs, whatever a copy is like.

    Args:
        cluster: the cluster; its first host is the head.
        command: the command that trains on the head, to which flags are appended.
        say: prints a line.
    """
    head = cluster.hosts[0]
    runs = _runs(_listed(cluster, say), head)
    if not runs:
        return
    wanted = {copies[0].run_dir: copies[0].facts["run_id"] for copies in runs}
    complete = [copies[0].run_dir for copies in runs if copies[0].is_complete]
    answer = _ask(head, cluster, {"run_dirs": wanted, "complete": complete})
    if answer is None:
        say(f"warning: {head.name}: its runs cannot be listed; no copies of checkpoints are collected")
        return
    for copies in runs:
        if not (copies[0].is_complete and copies[0].facts["run_id"] in answer["named"]):
            _collect_run(cluster, copies, answer["runs"][copies[0].run_dir], command, say)


def _collect_run(cluster: Cluster, copies: List[Copy], own: Dict[str, Any], command: str, say: Say) -> None:
    """Collect the newest valid copy of one run. `own` is what the head has in its folder, see `host_copies.held`."""
    newest = copies[0]
    where = f"{newest.facts['checkpoint']} (generation {newest.age[0]}) is on host {newest.host.name} in {newest.path}"
    if own.get("other"):
        say(f"warning: {newest.run_dir} on the head is not the run {newest.facts['run_id']}, whose {where}")
        return
    have: Optional[Age] = tuple(own["age"]) if own.get("age") else None
    if newest.is_complete:
        if have is None:
            say(f"the run {newest.run_dir} is complete and not on the head; its {where}")
        return
    for copy in copies:
        if have is not None and have >= copy.age:
            return
        answer = _install(cluster, copy)
        name = f"{copy.facts['checkpoint']} (generation {copy.age[0]}) of {copy.run_dir} from host {copy.host.name}"
        if answer.get("installed"):
            moved = f"; the older state is in {answer['moved']}" if answer.get("moved") else ""
            say(f"collected {name}{moved}")
            few = " --checkpoint-copies 1" if len(cluster.hosts) < 2 else ""
            say(f"continue it: {command} --resume {shlex.quote(copy.run_dir)}{few}")
            return
        if answer.get("error"):
            say(f"warning: cannot collect {name}: {answer['error']}")
            return
        say(f"warning: cannot collect {name}: {copy.path}/{answer['damaged']}")
    say(f"warning: no copy of the run {newest.run_dir} is valid")


def _listed(cluster: Cluster, say: Say) -> List[Copy]:
    """Return all copies on all hosts; name those that are damaged."""
    answers = ssh.map_hosts(cluster.hosts, lambda host: _ask(host, cluster, {}))
    found: List[Copy] = []
    for host in cluster.hosts:
        answer = answers[host.name]
        if answer is None:
            say(f"warning: host {host.name}: its copies of checkpoints cannot be listed")
            continue
        for each in answer["copies"]:
            if "damaged" in each:
                say(f"warning: host {host.name}: a copy of a checkpoint is damaged: {each['path']}/{each['damaged']}")
            else:
                age = (each["index"]["generation"], each["index"]["update"])
                found.append(Copy(age, host, each["path"], each["index"], each["is_complete"]))
    return found


def _runs(copies: List[Copy], head: Host) -> List[List[Copy]]:
    """Return the copies of each run, newest first; among equal ones those of the head first.

    Of several runs that have had the same folder, the one whose copies were written last counts.
    """
    runs: Dict[str, List[Copy]] = {}
    for copy in sorted(copies, key=lambda each: (each.age, each.host == head), reverse=True):
        runs.setdefault(str(copy.facts["run_id"]), []).append(copy)
    last: Dict[str, List[Copy]] = {}
    for of_run in sorted(runs.values(), key=lambda each: max(copy.facts["written_unix_s"] for copy in each)):
        last[of_run[0].run_dir] = of_run
    return list(last.values())


def _ask(host: Host, cluster: Cluster, settings: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    words = ["python3", "-", "list", json.dumps(settings)]
    return ssh.run_on(host, cluster.ssh, words, _program(), _LIST_S).json_object("copies")


def _install(cluster: Cluster, copy: Copy) -> Dict[str, Any]:
    """Copy and verify a copy on the head; return the answer of `host_copies`."""
    head = cluster.hosts[0]
    settings = {"run_dir": copy.run_dir, "index": copy.facts}
    if copy.host == head:
        words = ["python3", "-", "install", json.dumps({**settings, "source": copy.path})]
        done = ssh.run_on(head, cluster.ssh, words, _program(), _TRANSFER_S)
    else:
        words = ["python3", "-c", _program(), "install", json.dumps(settings)]
        archive = ["tar", "-C", copy.path, "-cf", "-", "."]
        done = ssh.pipe((copy.host, archive), (head, words), cluster.ssh, _TRANSFER_S)
    return done.json_object("installed") or {"error": done.error or f"no answer in {done.excerpt}"}


def _program() -> str:
    return Path(host_copies.__file__).read_text()
