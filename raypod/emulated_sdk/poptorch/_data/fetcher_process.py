"""Starts the process that loads, sees whether it lives, and ends it (contract 1.9, AsynchronousDataAccessor)."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util  # its function at exit, which waits for children, must be registered before ours
import os
import pickle
import signal
import weakref
from multiprocessing import forkserver
from typing import Any, Optional

from poptorch._data import fetcher
from poptorch._data.descriptors import Bell, SharedMemory
from poptorch._data.ring import Board
from poptorch._errors import DataFetcherError, Error
from poptorch._executor import custom_parsers
from poptorch.enums import SharingStrategy

_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
_LOOK_AROUND_S = 0.1  # how often a waiting reader sees whether the fetcher lives
_GRACE_S = 10.0  # after each step of a shutdown


class FetcherProcess:
    """A running fetcher. Made by the process that reads, and ended by that one only, at its exit at the latest.

    Error when the data set cannot be sent to it.
    """

    def __init__(self, dataset: Any, settings: fetcher.Settings, strategy: SharingStrategy) -> None:
        self._owner = os.getpid()
        self._failure: Optional[DataFetcherError] = None
        self.memory = SharedMemory.create(Board.size(settings.slots))
        self.board = Board(self.memory, settings.slots)
        self._data_ready, self._slot_free = Bell.create(), Bell.create()
        context: Any = multiprocessing.get_context(_METHODS[strategy])
        self._reports, theirs = context.Pipe(duplex=False)
        links = fetcher.Links(self.memory, self._data_ready, self._slot_free, theirs)
        self._process: Any = None
        try:
            self._process = _started(context, strategy, links, settings, dataset)
        finally:
            theirs.close()
            if self._process is None:
                self._close()
        _running.add(self)

    def wait_until_ready(self) -> fetcher.Ready:
        """Wait for the first element, as long as the fetcher lives. DataFetcherError if there will be none."""
        while not self._reports.poll(_LOOK_AROUND_S):
            if not self._process.is_alive() and not self._reports.poll():
                raise self._died()
        report = self._receive()
        if isinstance(report, fetcher.Ready):
            return report
        raise self._failed(report)

    def wait_for_data(self) -> None:
        """Return when there is news, or after a tenth of a second."""
        self._data_ready.wait(_LOOK_AROUND_S)

    def announce(self) -> None:
        """Tell the fetcher that a slot is free or another epoch wanted."""
        self._slot_free.ring()

    def failure(self) -> Optional[DataFetcherError]:
        """Why no more data will come; what was published before is still to be had. None while it goes on."""
        if self._failure is None:
            # Asked in this order: a report is sent before the end.
            is_alive = self._process.is_alive()
            if self._reports.poll():
                self._failure = self._failed(self._receive())
            elif not is_alive:
                self._failure = self._died()
        return self._failure

    def stop(self) -> None:
        """End the process: by request, which it sees between two elements, else by signals after 10 s each."""
        if self._process is None or os.getpid() != self._owner:
            return
        self.board.stop()
        self._slot_free.ring()
        for step in (self._interrupt, self._process.terminate, self._process.kill):
            if self._has_ended():
                break
            step()
        self._process.join(_GRACE_S)
        self._process = None
        self._close()

    def _interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it just ended
            os.kill(self._process.pid, signal.SIGINT)

    def _has_ended(self) -> bool:
        self._process.join(_GRACE_S)
        return not self._process.is_alive()

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._reports.recv_bytes())
        except EOFError:
            return None

    def _failed(self, report: Optional[fetcher.Failure]) -> DataFetcherError:
        if report is None:
            return self._died()
        return DataFetcherError(f"An error occurred in the data fetcher:\n{report.message}")

    def _died(self) -> DataFetcherError:
        self._process.join(_GRACE_S)
        return DataFetcherError(
            f"An error occurred in the data fetcher: process {self._process.pid} ended with exit code "
            f"{self._process.exitcode} (negative: by that signal). If it never began, see above: a program that loads "
            'asynchronously needs `if __name__ == "__main__":`, or SharingStrategy.Fork'
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


def _started(
    context: Any, strategy: SharingStrategy, links: fetcher.Links, settings: fetcher.Settings, dataset: Any
) -> Any:
    """The process, started; Error when the data set cannot be sent."""
    if strategy == SharingStrategy.ForkServer:
        # The server imports these once, if it finds them, and every fetcher begins with them. Without effect on a
        # server that runs.
        forkserver.set_forkserver_preload(["__main__", "torch", "poptorch"])
    is_in_file = strategy == SharingStrategy.FileSystem
    try:
        try:
            return _start(context, links, settings, dataset, is_in_file)
        except ValueError:
            # A fork server takes so many descriptors only, one a tensor: more tensors than that go through a file.
            if strategy != SharingStrategy.ForkServer:
                raise
            return _start(context, links, settings, dataset, is_in_file=True)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise Error(
            f"The data set cannot be sent to the process that loads it ({type(error).__name__}: {error}): make it "
            f"picklable, or use another SharingStrategy than {strategy.name} (Fork pickles nothing)"
        ) from error


def _start(context: Any, links: fetcher.Links, settings: fetcher.Settings, dataset: Any, is_in_file: bool) -> Any:
    state = fetcher.HostState.of_this_process(custom_parsers.registered())
    pickled = _in_file(dataset) if is_in_file else None
    try:
        arguments = (links, settings, state, pickled, None if is_in_file else dataset)
        process = context.Process(target=fetcher.run, args=arguments, name="poptorch data fetcher")
        process.start()
    finally:
        if pickled is not None:
            pickled.close()
    return process


def _in_file(dataset: Any) -> SharedMemory:
    """The pickled data set in a file that has no name."""
    content = pickle.dumps(dataset)
    file = SharedMemory.create(len(content))
    with file.map() as target:
        target.write(content)
    return file
