"""Follows one run in a thread: asks its status endpoint, and reads its files if that does not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import pwd
import threading
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import psutil

from raypod.observe.monitor.from_status import run_of
from raypod.observe.monitor.log_lines import LastLines
from raypod.observe.monitor.model import Instance, Run
from raypod.observe.monitor.run_files import RunFiles
from raypod.observe.status.registry import Entry
from raypod.observe.status.token_server import ADDRESS
from raypod.system.files import parse_json

TIMEOUT_S = 2.0  # of a request
_MAX_BYTES = 64 << 20  # of an answer


class LiveRun:
    """The newest known state of the run of a registered process."""

    def __init__(self, entry: Entry, interval_s: float) -> None:
        self.entry, self._interval_s = entry, interval_s
        self.run: Optional[Run] = None
        self.first_try = threading.Event()
        self._answered_s: Optional[float] = None
        self._asked_s = time.monotonic()
        self._problem = ""
        self._last_lines, self._stopped = LastLines(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"status of {entry.run_dir}", daemon=True)
        self._thread.start()

    def current(self) -> Optional[Run]:
        """Return the run, with `problem` set if its process does not answer now; None before the first answer."""
        run, answered_s = self.run, self._answered_s
        if run is None or not self._problem:
            return run
        silent_s = time.monotonic() - (self._asked_s if answered_s is None else answered_s)
        instances = tuple(_older(each, silent_s) for each in run.instances)
        return dataclasses.replace(run, problem=f"{self._problem} (for {silent_s:.0f} s)", instances=instances)

    def stop(self) -> None:
        """End the thread after its current request."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(TIMEOUT_S + 3)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                snapshot = ask(self.entry, TIMEOUT_S)
                self.run = self._with_log_lines(
                    run_of(snapshot, user=user_name(self.entry.uid), run_dir=self.entry.run_dir)
                )
                self._answered_s, self._problem = time.monotonic(), ""
            except (OSError, http.client.HTTPException) as error:
                self._not_answered(_reason(self.entry, error))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._not_answered(f"its status is that of another version ({type(error).__name__}: {error})")
            self.first_try.set()
            self._stopped.wait(max(0.05, self._interval_s - (time.monotonic() - began_s)))

    def _not_answered(self, why: str) -> None:
        """Keep the last state, or read the files if there never was an answer."""
        if self.run is None:
            found = RunFiles(Path(self.entry.run_dir)).read()
            user = user_name(self.entry.uid)
            self.run = self._with_log_lines(dataclasses.replace(found, state="running", pid=self.entry.pid, user=user))
        self._problem = why

    def _with_log_lines(self, run: Run) -> Run:
        return with_log_lines(run, self._last_lines)


def with_log_lines(run: Run, last_lines: LastLines) -> Run:
    """Return a run whose instances have the last lines of their logs, as far as these are on this host.

    A log that did not change since the start or the last repair of the run ends with lines of before, such as the
    exception that the repair answered: it has no line.
    """
    since_s = max(run.started_unix_s or 0.0, run.repaired_unix_s or 0.0)
    instances = tuple(
        dataclasses.replace(each, log_line=last_lines.of(each.log_file, since_s) or each.log_line)
        for each in run.instances
    )
    return dataclasses.replace(run, instances=instances)


def _older(instance: Instance, seconds: float) -> Instance:
    """Return an instance as it was `seconds` ago, with the ages of now."""
    age_s = instance.heartbeat_age_s
    return dataclasses.replace(instance, heartbeat_age_s=None if age_s is None else age_s + seconds)


def ask(entry: Entry, timeout_s: float) -> Mapping[str, Any]:
    """Return the JSON of a status endpoint.

    Raises:
        OSError, http.client.HTTPException: no answer in time, or an error as the answer.
        ValueError: it is no JSON object.
    """
    with contextlib.closing(http.client.HTTPConnection(ADDRESS, entry.port, timeout=timeout_s)) as connection:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {entry.token}"})
        response = connection.getresponse()
        body = response.read(_MAX_BYTES)
        if response.status != 200:
            raise http.client.HTTPException(f"status {response.status}")
    content: Dict[str, Any] = parse_json(body)
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def user_name(uid: int) -> str:
    """Return the name of a user; the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _reason(entry: Entry, error: Exception) -> str:
    """Return why a process does not answer."""
    with contextlib.suppress(psutil.Error):
        if psutil.Process(entry.pid).status() == psutil.STATUS_STOPPED:
            return f"process {entry.pid} is stopped by a signal (SIGSTOP or a debugger)"
    if isinstance(error, (TimeoutError, OSError)) and "timed out" in str(error):
        return f"process {entry.pid} does not answer"
    detail = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"process {entry.pid} does not answer: {detail}"
