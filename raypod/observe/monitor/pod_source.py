"""The pod that is shown: this host alone, or all hosts of a cluster file."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

from raypod.observe.monitor.build_pod import build_pod, with_names
from raypod.observe.monitor.log_lines import LogTail
from raypod.observe.monitor.model import HostFacts, Pod, Run, Usage
from raypod.observe.monitor.rates import RateMeter
from raypod.observe.monitor.remote_host import RemoteHost
from raypod.observe.monitor.remote_log import RemoteLog
from raypod.observe.monitor.this_host import ThisHost
from raypod.plan.cluster import Cluster, Host
from raypod.runtime import ssh
from raypod.system.interfaces import interface_addresses

_CONNECT_S = 15.0


class PodSource:
    """Follows the pod until `stop`; a context manager."""

    def __init__(self, interval_s: float, folder: Optional[Path] = None, cluster: Optional[Cluster] = None) -> None:
        """Show this host, with the run in `folder`, or the hosts of a cluster."""
        self._cluster = cluster
        self._local: Dict[str, Host] = {}  # of the cluster
        self._this_host = ThisHost(interval_s, folder)
        self._remotes: List[RemoteHost] = []
        self._rates = RateMeter()
        for host in cluster.hosts if cluster is not None else ():
            if ssh.is_local(host):
                self._local[host.name] = host
            elif cluster is not None:
                self._remotes.append(RemoteHost(cluster, host, interval_s))
        self.facts = HostFacts(socket.gethostname())  # of this host

    def __enter__(self) -> PodSource:
        self._this_host.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._remotes:
            each.stop()
        for each in self._remotes:
            each.join()
        self._this_host.stop()

    def wait(self) -> None:
        """Wait, for a bounded time, until every run and host has answered or failed."""
        self._this_host.wait()
        deadline = time.monotonic() + _CONNECT_S
        for each in self._remotes:
            each.first_try.wait(max(0.0, deadline - time.monotonic()))

    def log(self, run: Run, path: str) -> Union[LogTail, RemoteLog]:
        """Return a log file of a run, which is on the host of its coordinator."""
        host = next((each.host for each in self._remotes if each.host.name == run.host), None)
        if self._cluster is not None and host is not None:
            return RemoteLog(self._cluster, host, path)
        return LogTail(Path(path))

    def poll(self) -> Pod:
        """Return what is known now."""
        facts, runs = self._here()
        if self._cluster is None:
            return self._pod(facts.name, [facts], runs)
        known: Dict[str, HostFacts] = {}
        for host in self._cluster.hosts:
            known[host.name] = HostFacts(host.name, num_ipus=host.ipus)
        if self._local:
            name = next(iter(self._local))
            known[name] = dataclasses.replace(facts, name=name, num_ipus=known[name].num_ipus)
        else:  # an operator's machine
            runs = []
        for remote in self._remotes:
            name = remote.host.name
            found, theirs, problem = remote.poll()
            known[name] = dataclasses.replace(found, name=name, num_ipus=known[name].num_ipus, problem=problem)
            for run in theirs:
                named = with_names(run, {found.name: name})
                runs.append(dataclasses.replace(named, problem=named.problem or problem))
        return self._pod(self._cluster.name, list(known.values()), runs)

    def _here(self) -> Tuple[HostFacts, List[Run]]:
        facts, runs = self._this_host.poll()
        name = next(iter(self._local), facts.name)
        # With rates: the monitor of another host shows them.
        facts = dataclasses.replace(facts, usage=self._rated("", name, facts.usage, time.monotonic()))
        self.facts = facts
        names = dict.fromkeys([facts.name, *interface_addresses().values()], name)
        return facts, [with_names(run, names) for run in runs]

    def _pod(self, name: str, facts: List[HostFacts], runs: List[Run]) -> Pod:
        """Return the pod with the rates of its network counters."""
        now_s = time.monotonic()
        facts = [dataclasses.replace(each, usage=self._rated("", each.name, each.usage, now_s)) for each in facts]
        rated = []
        for run in runs:
            usage = {host: self._rated(run.run_dir, host, each, now_s) for host, each in run.hosts.items()}
            rated.append(dataclasses.replace(run, hosts=usage))
        return build_pod(name, time.time(), facts, rated)

    def _rated(self, source: str, host: str, usage: Usage, now_s: float) -> Usage:
        known = usage.network_received_bytes is not None and usage.received_bytes_per_s is None
        return self._rates.add(f"{source}:{host}", usage, now_s) if known else usage
