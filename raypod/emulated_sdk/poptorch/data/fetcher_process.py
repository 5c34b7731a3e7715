"""Start, monitor and stop the data fetcher process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util  # registers its exit function, which joins children, before ours
import os
import pickle
import signal
import weakref
from multiprocessing import forkserver
from typing import Any, Optional

from poptorch import pytree
from poptorch.data import fetcher
from poptorch.data.ring import RingHeader
from poptorch.data.shared_memory import Event, SharedMemory
from poptorch.enums import SharingStrategy
from poptorch.errors import DataFetcherError, Error

_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
_NOT_STARTED = "The worker thread failed to start. "
_POLL_INTERVAL_S = 0.1  # a waiting reader checks this often whether the fetcher is alive
_GRACE_S = 10.0  # timeout of each step of a shutdown


class FetcherProcess:
    """A running data fetcher. Only the process that created it stops it, at its exit at the latest.

    Raises:
        Error: the data set cannot be pickled.
    """

    def __init__(self, dataset: Any, settings: fetcher.Settings, strategy: SharingStrategy) -> None:
        self._owner = os.getpid()
        self._failure: Optional[DataFetcherError] = None
        self.memory = SharedMemory.create(RingHeader.size(settings.slots))
        self.header = RingHeader(self.memory, settings.slots)
        self._data_ready, self._slot_free = Event.create(), Event.create()
        context: Any = multiprocessing.get_context(_METHODS[strategy])
        self._reports, sender = context.Pipe(duplex=False)
        channels = fetcher.Channels(self.memory, self._data_ready, self._slot_free, sender)
        self._process: Any = None
        try:
            self._process = _start(context, strategy, channels, settings, dataset)
        finally:
            sender.close()
            if self._process is None:
                self._close()
        _running.add(self)

    def wait_until_ready(self) -> fetcher.Ready:
        """Wait for the first element; DataFetcherError if the fetcher fails or exits first."""
        while not self._reports.poll(_POLL_INTERVAL_S):
            if not self._process.is_alive() and not self._reports.poll():
                raise self._exited(_NOT_STARTED)
        report = self._receive()
        if isinstance(report, fetcher.Ready):
            return report
        raise self._failed(report, _NOT_STARTED)

    def wait_for_data(self) -> None:
        """Wait until the fetcher publishes an entry or fails, at most 0.1 s."""
        self._data_ready.wait(_POLL_INTERVAL_S)

    def wake(self) -> None:
        """Wake the fetcher after a slot was released or an epoch requested."""
        self._slot_free.set()

    def failure(self) -> Optional[DataFetcherError]:
        """Return why the fetcher has ended; None while it runs. Entries that it published before stay readable."""
        if self._failure is None:
            # In this order, as a report is sent before the exit.
            is_alive = self._process.is_alive()
            if self._reports.poll():
                self._failure = self._failed(self._receive())
            elif not is_alive:
                self._failure = self._exited()
        return self._failure

    def stop(self) -> None:
        """Stop the process: by request, which it checks between two elements, then by signals, after 10 s each."""
        if self._process is None or os.getpid() != self._owner:
            return
        self.header.stop()
        self._slot_free.set()
        for step in (self._interrupt, self._process.terminate, self._process.kill):
            if self._has_ended():
                break
            step()
        self._process.join(_GRACE_S)
        self._process = None
        self._close()

    def _interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just exited
            os.kill(self._process.pid, signal.SIGINT)

    def _has_ended(self) -> bool:
        self._process.join(_GRACE_S)
        return not self._process.is_alive()

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._reports.recv_bytes())
        except EOFError:
            return None

    def _failed(self, report: Optional[fetcher.Failure], prefix: str = "") -> DataFetcherError:
        if report is None:
            return self._exited(prefix)
        return DataFetcherError(f"{prefix}An error occurred in the data fetcher:\n{report.message}")

    def _exited(self, prefix: str = "") -> DataFetcherError:
        self._process.join(_GRACE_S)
        return DataFetcherError(
            f"{prefix}An error occurred in the data fetcher: process {self._process.pid} ended with exit code "
            f"{self._process.exitcode} (negative: killed by that signal). If it failed to start, its error is above: a "
            'program that loads asynchronously needs `if __name__ == "__main__":`, or SharingStrategy.Fork'
        )

    def _close(self) -> None:
        self._reports.close()
        for shared in (self.memory, self._data_ready, self._slot_free):
            shared.close()


_running: weakref.WeakSet[FetcherProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for process in list(_running):
        process.stop()


def _start(
    context: Any, strategy: SharingStrategy, channels: fetcher.Channels, settings: fetcher.Settings, dataset: Any
) -> Any:
    """Return the started process; Error if the data set cannot be pickled."""
    if strategy == SharingStrategy.ForkServer:
        # The fork server imports these modules once, for all fetchers. No effect if it runs already.
        forkserver.set_forkserver_preload(["__main__", "torch", "poptorch"])
    by_file = strategy == SharingStrategy.FileSystem
    try:
        try:
            return _start_process(context, channels, settings, dataset, by_file)
        except ValueError:
            # A fork server accepts a limited number of descriptors, and each tensor needs one: send a file instead.
            if strategy != SharingStrategy.ForkServer:
                raise
            return _start_process(context, channels, settings, dataset, by_file=True)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise Error(
            f"Cannot send the data set to the data fetcher process ({type(error).__name__}: {error}): make it "
            f"picklable, or use another SharingStrategy than {strategy.name} (Fork pickles nothing)"
        ) from error


def _start_process(
    context: Any, channels: fetcher.Channels, settings: fetcher.Settings, dataset: Any, by_file: bool
) -> Any:
    state = fetcher.ProcessState.of_this_process(pytree.registered_parsers())
    pickled = _pickle_to_file(dataset) if by_file else None
    try:
        arguments = (channels, settings, state, pickled, None if by_file else dataset)
        process = context.Process(target=fetcher.run, args=arguments, name="poptorch data fetcher")
        process.start()
    finally:
        if pickled is not None:
            pickled.close()
    return process


def _pickle_to_file(dataset: Any) -> SharedMemory:
    """Return an anonymous file with the pickled data set."""
    content = pickle.dumps(dataset)
    file = SharedMemory.create(len(content))
    with file.map() as target:
        target.write(content)
    return file
