"""The processes on other hosts that keep copies of checkpoints: which are used, and on which disks they write."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from typing import Collection, Dict, List, Optional, Set

from raypod.runtime.workers.fleet import Fleet
from raypod.training.checkpoint.copies import Age, CopyReceiver, Opened, copy_hosts
from raypod.training.checkpoint.transfer import Requests, Server

_CLOSE_S = 5.0  # for a host to record the end of the run


class Abandoned(Exception):
    """The run ends, and with it a transfer."""


class SharedDisk(Exception):
    """A host keeps its copies on the disk of another one."""


class CopyTargets:
    """The hosts to which one run copies its checkpoints. Used by one thread, except `close`."""

    def __init__(self, fleet: Fleet, folder: str, run_id: str, copies: int, timeout_s: float) -> None:
        """`folder` is that of the copies of all runs; `timeout_s` is the time for a process to start on a host."""
        self._fleet, self._folder, self._run_id = fleet, folder, run_id
        self._copies, self._timeout_s = copies, timeout_s
        self._servers: Dict[str, Server] = {}
        self._own_mark = uuid.uuid4().hex
        self._marks: Dict[str, str] = {}  # by host
        self._failures: Counter[str] = Counter()  # by host
        self._shared: Set[str] = set()
        self._has_ended = False
        self._here = CopyReceiver(folder, run_id)
        with contextlib.suppress(OSError):  # this host cannot keep copies: then it shares no folder with one that can
            self._here.open(self._own_mark, ())

    def choose(self, held: Collection[str], given_up: Collection[str]) -> Optional[str]:
        """Return the next host to copy to, or None if enough hosts hold it or none is left.

        Args:
            held: the hosts that have the checkpoint.
            given_up: further hosts that are not used for it.
        """
        unused = {*given_up, *self._shared}
        usable = [host for host in self._fleet.peers() if host not in unused]
        chosen: List[str] = copy_hosts(usable, self._copies, self._failures)
        return next((host for host in chosen if host not in held), None)

    def open(self, host: str) -> Optional[Age]:
        """Start the process on a host, unless it runs; return the newest copy that it has, if it was started.

        Raises:
            SharedDisk: the host writes to a disk that has a copy already. It is not used any more.
            OSError: the host does not respond, or cannot write.
            Abandoned: `close` was called.
        """
        if host in self._servers:
            return None
        server = self._servers[host] = self._fleet.serve_on(host, CopyReceiver, self._folder, self._run_id)
        if self._has_ended:
            self.drop(host)
            raise Abandoned
        mark = uuid.uuid4().hex
        requests = Requests(server, self._timeout_s)
        requests.add("open", mark, [self._own_mark, *self._marks.values()])
        opened: Opened = requests.finish()[0]
        if opened.shares_with is not None:
            other = {mark: name for name, mark in self._marks.items()}.get(opened.shares_with, "the coordinator's host")
            self._shared.add(host)
            self.drop(host)
            raise SharedDisk(f"its folder {self._folder} is that of {other}")
        self._marks[host] = mark
        return opened.held

    def server(self, host: str) -> Server:
        """Return the process on a host that was opened. ConnectionError if it was dropped meanwhile."""
        found = self._servers.get(host)
        if found is None:
            raise ConnectionError("the run ends")
        return found

    def note_failure(self, host: str) -> int:
        """Count the failure of a host, and end its process; return how often it has failed."""
        self.drop(host)
        self._failures[host] += 1
        return self._failures[host]

    def drop(self, host: str) -> None:
        """End the process on a host."""
        self._marks.pop(host, None)
        server = self._servers.pop(host, None)
        if server is not None:
            server.close()

    def finish(self, complete: Optional[Age], held: Collection[str]) -> None:
        """Remove the marks from all disks, and record on the hosts `held` that the run is complete.

        A host that does not respond is passed over: its copy remains one of a run that can be continued.
        """
        for host, server in self._servers.items():
            with contextlib.suppress(OSError):
                requests = Requests(server, _CLOSE_S)
                if complete is not None and host in held:
                    requests.add("end", complete)
                requests.add("close")
                requests.finish()

    def close(self) -> None:
        """End all processes. Called in any thread: requests in progress raise OSError."""
        self._has_ended = True
        for host in list(self._servers):
            self.drop(host)
        self._here.close()
