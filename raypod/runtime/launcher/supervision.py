"""Supervise the programs of a launch until none is left: output, signals, stdin, failures, and the exit code.

Hosts are known only by the protocol `Hosts`, independent of Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
import time
from types import FrameType
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from typing_extensions import Protocol

from raypod.errors import ProgramFailed
from raypod.plan.placement import Placement
from raypod.runtime.launcher.output import Output
from raypod.runtime.launcher.records import HostReport, ProgramEnd
from raypod.system.signals import SignalFilter, stop_signals, unreported_if_ignored

_POLL_S = 0.2  # longest delay until a signal or `close` takes effect
_EXIT_MARGIN_S = 5.0  # time beyond the grace period; after it, the reapers end the programs alone
_SIGNAL_GRACES = 10  # grace periods for programs to exit after a forwarded signal
_READ_BYTES = 1 << 16
_MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)
_ABORTED = 128 + signal.SIGABRT  # exit code after an uncaught C++ exception
_CAUSE_S = 2.0  # for the process of a peer to end, which may close its connections before
# An exception with which a program ends because another one has ended: of the emulated SDK, Horovod, and Gloo.
_OF_PEER = re.compile(
    r"a peer has ended|PeerFailed|HorovodInternalError|Connection (closed|reset) by peer|connectFullMesh failed"
)
Write = Callable[[bytes, float], Optional[bool]]


class Hosts(Protocol):
    """The operations of a launch on its hosts; `ray_hosts.RayHosts` implements them."""

    @property
    def are_done(self) -> bool:
        """Whether every host has sent its last report."""

    def reports(self, within_s: float) -> Iterator[Tuple[int, HostReport]]:
        """Yield (host index, report) for the reports that arrive within a time."""

    def signal(self, number: int) -> None:
        """Send a signal to all programs."""

    def end(self, grace_s: float) -> None:
        """End all programs."""


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP ended the launch; its exit code is 128 + the signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class Signals:
    """SIGINT, SIGTERM and SIGHUP: recorded while programs run, raised as `Interrupted` at any other time.

    SIGUSR1 and SIGUSR2 do not end a launch: as mpirun does, it passes them on to the programs (`take_messages`).
    """

    def __init__(self) -> None:
        self.received: List[int] = []
        self._messages: List[int] = []
        self._raised: Optional[int] = None
        self._is_recording = False
        self._filter = SignalFilter()

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        if self._filter.is_copy():
            return
        if not self._is_recording:
            self._raised = number
            raise Interrupted(number)
        self.received.append(number)

    def take_messages(self) -> List[int]:
        """Return and clear the signals to pass on, in their order."""
        taken, self._messages = self._messages, []
        return taken

    @contextlib.contextmanager
    def handled(self, record: bool = False) -> Iterator[Signals]:
        """Install the handlers; record signals instead of raising if `record`.

        Entering it again, as after `ray.init()`, raises a signal whose exception Python has ignored.
        """
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        for number in _MESSAGES:
            before[number] = signal.signal(number, lambda received, frame: self._messages.append(received))
        self._is_recording, was_recording = record, self._is_recording
        try:
            if self._raised is not None:  # Python ignores exceptions in finalizers and other callbacks
                raise Interrupted(self._raised)
            with unreported_if_ignored(Interrupted):
                yield self
        finally:
            self._is_recording = was_recording
            for number, handler in before.items():
                signal.signal(number, handler)


class Supervision:
    """The loop over the reports of hosts, until no process of the programs is left."""

    def __init__(
        self,
        hosts: Hosts,
        placement: Placement,
        output: Output,
        signals: Signals,
        grace_s: float,
        observe: Callable[[int, HostReport], None] = lambda host, report: None,
    ) -> None:
        """`observe` is called with the index of a host and each of its reports."""
        self._hosts, self._placement, self._output, self._observe = hosts, placement, output, observe
        self._signals, self._grace_s = signals, grace_s
        self._running = {spec.index for spec in placement.instances}
        self._failed: Optional[ProgramEnd] = None
        # Before the others are ended; a program that is ended by a signal may have the code 0, too.
        self._succeeded: List[int] = []
        self._forwarded = 0  # number of received signals that were forwarded
        self._is_ending = False
        self._cause_until_s: Optional[float] = None  # how long to wait for the end of the peer that caused the failure
        self._end_at_s: Optional[float] = None  # when to end the remaining processes
        self._leave_at_s: Optional[float] = None  # when to stop waiting for hosts
        self._output_closed: Dict[int, bool] = {}  # by host

    def run(self) -> int:
        """Run until the end; return the exit code 0.

        Raises:
            Interrupted: A signal was received and forwarded.
            ProgramFailed: A program exited with another code than 0 before any signal.
            HostLost: A host is lost.
        """
        while not self._hosts.are_done and (self._leave_at_s is None or time.monotonic() < self._leave_at_s):
            was_ending = self._is_ending
            for host, report in self._hosts.reports(_POLL_S):
                self._observe(host, report)
                for instance, stream, data in report.chunks:
                    self._output.add(instance, stream, data)
                self._output_closed[host] = report.is_output_closed
                for end in report.ends:
                    self._add_end(end)
                if not was_ending:  # the reports of several hosts that arrive together have no order
                    self._succeeded += [end.instance for end in report.ends if not end.exit_code]
            self._output.flush()
            self._forward_signals()
            if not self._is_ending and self._should_end():
                self._end(self._grace_s)
        if self._signals.received:
            raise Interrupted(self._signals.received[0])
        if self._failed is not None:
            raise self._failure(self._failed)
        return 0

    def _should_end(self) -> bool:
        if self._cause_until_s is not None and (self._succeeded or time.monotonic() >= self._cause_until_s):
            return True
        if self._end_at_s is not None and time.monotonic() >= self._end_at_s:
            return True
        return not self._running and all(self._output_closed.values())

    def _add_end(self, end: ProgramEnd) -> None:
        self._running.discard(end.instance)
        if end.exit_code and not self._is_ending and not self._signals.received:
            self._add_failure(end)
        if not self._running and self._end_at_s is None:  # descendants of the programs have the grace period to exit
            self._end_at_s = time.monotonic() + self._grace_s

    def _add_failure(self, end: ProgramEnd) -> None:
        """End the other programs; after the failure of a peer only if that peer is not the next to end."""
        is_of_peer = _OF_PEER.search(self._exception(end) or "") is not None
        if self._failed is None or not is_of_peer:
            self._failed = end
        if not is_of_peer:
            self._end(self._grace_s)
        elif self._cause_until_s is None:
            self._cause_until_s = time.monotonic() + _CAUSE_S

    def _exception(self, end: ProgramEnd) -> Optional[str]:
        """Return the uncaught exception with which a program ended; None if there is none."""
        if end.exit_code == 1:  # that of Python after an uncaught exception
            return self._output.last_exception(end.instance)
        return self._output.last_cpp_exception(end.instance) if end.exit_code == _ABORTED else None

    def _forward_signals(self) -> None:
        """Pass on SIGUSR1 and SIGUSR2; forward the first other signal to the programs; a second one kills them."""
        for number in self._signals.take_messages():
            self._hosts.signal(number)
        for number in self._signals.received[self._forwarded :]:
            self._forwarded += 1
            if self._forwarded == 1:
                self._hosts.signal(number)
                self._end_at_s = time.monotonic() + _SIGNAL_GRACES * self._grace_s
            else:
                self._end(0.0)

    def _end(self, grace_s: float) -> None:
        self._is_ending = True
        self._hosts.end(grace_s)
        self._leave_at_s = time.monotonic() + grace_s + _EXIT_MARGIN_S

    def _failure(self, end: ProgramEnd) -> ProgramFailed:
        failed, exception = end.instance, self._exception(end)
        cause = f"{end.cause} ({exception})" if exception else end.cause
        if self._succeeded and _OF_PEER.search(exception or ""):
            failed, of_peer = self._succeeded[0], failed
            cause = f"it ended too early, with exit code 0; instance {of_peer} still needed it: {cause}"
        host = self._placement.instances[failed].host
        return ProgramFailed(failed, host, cause, self._output.log_file(failed), end.exit_code)


class StdinForwarder:
    """A thread that forwards stdin to instance 0, until its end, until the program closes its stdin, or until `close`.

    A terminal is not read while the launch is in the background: the kernel would stop the launch (SIGTTIN).
    """

    def __init__(self, write: Write, descriptor: int = 0) -> None:
        """Start the thread.

        Args:
            write: `write(data, within_s)` returns True when written, False if nothing reads any more, and None if it
                must be called again with the same data.
            descriptor: The descriptor to read.
        """
        self._write, self._descriptor = write, descriptor
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stdin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; wait for it for at most a second."""
        self._closing.set()
        self._thread.join(5 * _POLL_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            data = self._read()
            if data is None:
                continue
            is_written = None
            while is_written is None and not self._closing.is_set():
                is_written = self._write(data, _POLL_S)
            if not data or not is_written:
                return

    def _read(self) -> Optional[bytes]:
        """Return available bytes, b"" at the end of stdin, or None if nothing arrived within `_POLL_S`."""
        try:
            if os.isatty(self._descriptor) and os.tcgetpgrp(self._descriptor) != os.getpgrp():
                self._closing.wait(_POLL_S)
                return None
            ready, _, _ = select.select([self._descriptor], [], [], _POLL_S)
            return os.read(self._descriptor, _READ_BYTES) if ready else None
        except (OSError, ValueError):  # closed, or the terminal is gone
            return b""
