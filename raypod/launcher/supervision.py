"""A launch from the start of its programs to their end: output, signals, failures, and how it all ends.

Knows hosts by what `Hosts` says, and not what brings them up.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from typing_extensions import Protocol

from raypod.errors import ProgramFailed
from raypod.launcher.output import Output
from raypod.launcher.records import HostReport, ProgramEnd
from raypod.plan.placement import Placement

_LOOK_EVERY_S = 0.2  # how long a signal may go unnoticed
_LAST_S = 5.0  # beyond the grace: then hosts are left to their keepers
_PATIENCE = 10  # times the grace, for programs that were told to stop from outside


class Hosts(Protocol):
    """What a launch needs of its hosts; `fleet.ray_hosts.RayHosts` is one."""

    @property
    def are_done(self) -> bool:
        """Whether every host has reported its last."""

    def reports(self, within_s: float) -> Iterator[Tuple[int, HostReport]]:
        """What hosts report within a time."""

    def signal(self, number: int) -> None:
        """Pass a signal on to all programs."""

    def end(self, grace_s: float) -> None:
        """End what is left of the programs."""


class Interrupted(KeyboardInterrupt):
    """Scene: SIGINT, SIGTERM or SIGHUP; the launch ends with 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class Signals:
    """SIGINT, SIGTERM and SIGHUP: noted while programs run, and an `Interrupted` at any other time."""

    def __init__(self) -> None:
        self.noted: List[int] = []
        self._is_noting = False

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        if not self._is_noting:
            raise Interrupted(number)
        self.noted.append(number)

    @contextlib.contextmanager
    def caught(self, note: bool = False) -> Iterator[Signals]:
        """Catch them inside; `note` says how. Ray puts handlers of its own in place, so say it again after it."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._is_noting, was_noting = note, self._is_noting
        try:
            yield self
        finally:
            self._is_noting = was_noting
            for number, handler in before.items():
                signal.signal(number, handler)


class Supervision:
    """The loop over what hosts report, until nothing is left of the programs."""

    def __init__(self, hosts: Hosts, placement: Placement, output: Output, signals: Signals, grace_s: float) -> None:
        self._hosts, self._placement, self._output = hosts, placement, output
        self._signals, self._grace_s = signals, grace_s
        self._unended = {spec.index for spec in placement.instances}
        self._failed: Optional[ProgramEnd] = None
        self._told = 0  # signals of those noted that were passed on
        self._is_ending = False
        self._end_at_s: Optional[float] = None  # when to end what is left
        self._leave_at_s: Optional[float] = None
        self._silent: Dict[int, bool] = {}

    def run(self) -> int:
        """The exit code of the launch where all went well: 0.

        Raises:
            Interrupted: somebody sent a signal, which was passed on.
            ProgramFailed: a program ended with another exit code than 0, and nobody had asked for it.
            HostLost: a host is gone.
        """
        while not self._hosts.are_done and (self._leave_at_s is None or time.monotonic() < self._leave_at_s):
            for host, report in self._hosts.reports(_LOOK_EVERY_S):
                for instance, stream, data in report.chunks:
                    self._output.add(instance, stream, data)
                self._silent[host] = report.is_silent
                for end in report.ends:
                    self._note(end)
            self._output.flush()
            self._pass_signals_on()
            if not self._is_ending and self._is_time_to_end():
                self._end(self._grace_s)
        if self._signals.noted:
            raise Interrupted(self._signals.noted[0])
        if self._failed is not None:
            raise self._failure(self._failed)
        return 0

    def _is_time_to_end(self) -> bool:
        if self._end_at_s is not None and time.monotonic() >= self._end_at_s:
            return True
        return not self._unended and all(self._silent.values())  # and nobody is left who could say anything

    def _note(self, end: ProgramEnd) -> None:
        self._unended.discard(end.instance)
        if end.exit_code and self._failed is None and not self._signals.noted:
            self._failed = end
            self._end(self._grace_s)
        if not self._unended and self._end_at_s is None:  # what programs left behind may finish, within the grace
            self._end_at_s = time.monotonic() + self._grace_s

    def _pass_signals_on(self) -> None:
        for number in self._signals.noted[self._told :]:
            self._told += 1
            if self._told == 1:
                self._hosts.signal(number)
                self._end_at_s = time.monotonic() + _PATIENCE * self._grace_s
            else:
                self._end(0.0)

    def _end(self, grace_s: float) -> None:
        self._is_ending = True
        self._hosts.end(grace_s)
        self._leave_at_s = time.monotonic() + grace_s + _LAST_S

    def _failure(self, end: ProgramEnd) -> ProgramFailed:
        host = self._placement.instances[end.instance].host
        raised = self._output.last_exception(end.instance) if end.exit_code == 1 else None  # as Python ends with it
        cause = f"{end.cause} ({raised})" if raised else end.cause
        return ProgramFailed(end.instance, host, cause, self._output.log_file(end.instance), end.exit_code)


# --- from launcher.stdin: Hands the stdin of a launch to instance 0, from a thread of its own.
#
# A terminal is not read while the launch is in the background: the kernel would stop it for that.
#

_LOOK_S = 0.2
_READ_BYTES = 1 << 16
Write = Callable[[bytes, float], Optional[bool]]


class StdinForwarder:
    """Forwards until the end of stdin, until nobody listens, or until `close`."""

    def __init__(self, write: Write, descriptor: int = 0) -> None:
        """`write(data, within_s)`: True when done, False when nobody listens, None: say the same again."""
        self._write, self._descriptor = write, descriptor
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stdin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; bounded."""
        self._closing.set()
        self._thread.join(5 * _LOOK_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            data = self._read()
            if data is None:
                continue
            done = None
            while done is None and not self._closing.is_set():
                done = self._write(data, _LOOK_S)
            if not data or not done:
                return

    def _read(self) -> Optional[bytes]:
        """What came; b"" at the end, None if nothing came for a moment."""
        try:
            if os.isatty(self._descriptor) and os.tcgetpgrp(self._descriptor) != os.getpgrp():
                self._closing.wait(_LOOK_S)
                return None
            ready, _, _ = select.select([self._descriptor], [], [], _LOOK_S)
            return os.read(self._descriptor, _READ_BYTES) if ready else None
        except (OSError, ValueError):  # closed, or a terminal that is gone
            return b""
