"""The process that loads: it iterates over a data set and copies every element into the ring buffer (contract 1.9)."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional

import torch

from poptorch._data.descriptors import Bell, SharedMemory
from poptorch._data.elements import ElementKind, take_apart
from poptorch._data.ring import END, Board, Entry, SlotLayout, map_slots, memory_size
from poptorch._data.slot_writer import SlotWriter
from poptorch._data.worker_memory import WorkerBatches
from poptorch._errors import Error
from poptorch._executor.custom_parsers import registerCustomArgParser

_LOOK_AROUND_S = 0.5  # how often a waiting process sees whether the other still lives


@dataclass(frozen=True)
class Settings:
    """How to load.

    slots: of the ring buffer.
    load_indefinitely: begin the next epoch before it is asked for.
    early_preload: begin the first epoch before it is asked for; without, only its first element is loaded.
    rebatched_size: samples of an element of the ring; None to take the data set's own elements.
    drop_last: with `rebatched_size`, whether a short rest is dropped.
    """

    slots: int
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: Optional[int]
    drop_last: bool


@dataclass(frozen=True)
class Links:
    """What joins the fetcher to the process that reads."""

    memory: SharedMemory
    data_ready: Bell
    slot_free: Bell
    reports: Connection  # one `Ready`, and one `Failure` should it fail


@dataclass(frozen=True)
class Ready:
    """The first element is in the ring, of which the layout is known now."""

    layout: SlotLayout
    kind: ElementKind


@dataclass(frozen=True)
class Failure:
    """Why the fetcher ended: a message, with the traceback of the data set if that is to blame."""

    message: str


@dataclass(frozen=True)
class HostState:
    """What the fetcher takes over: registered parsers, the state of the random number generators, the start method.

    A process that is forked would have them; with this, all sharing strategies load the same numbers, and a loader
    starts its workers there as it would here.
    """

    start_method: str
    parsers: Dict[type, Any]
    torch_rng: torch.Tensor
    python_rng: Any
    numpy_rng: Any

    @classmethod
    def of_this_process(cls, parsers: Dict[type, Any]) -> HostState:
        """The present state."""
        numpy = sys.modules.get("numpy")
        numpy_rng = None if numpy is None else numpy.random.get_state()
        start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        return cls(start_method, dict(parsers), torch.get_rng_state(), random.getstate(), numpy_rng)

    def restore(self) -> None:
        """Bring this process into the state."""
        multiprocessing.set_start_method(self.start_method, force=True)
        for kind, parser in self.parsers.items():
            registerCustomArgParser(kind, parser)
        torch.set_rng_state(self.torch_rng)
        random.setstate(self.python_rng)
        if self.numpy_rng is not None:
            import numpy

            numpy.random.set_state(self.numpy_rng)


class _Stopped(Exception):
    """The reader wants no more, or is gone."""


class _Abandoned(Exception):
    """The reader wants a later epoch."""


class _Fetcher:
    """Loads epoch after epoch, as far ahead as the settings and the ring allow."""

    def __init__(self, links: Links, settings: Settings, board: Board) -> None:
        self._links, self._settings, self._board = links, settings, board
        self._parent = os.getppid()
        self._epoch = 1
        self._elements = 0  # of this epoch
        self._entries: Deque[int] = collections.deque()  # the entries whose slots may still be in use
        self._filled = 0  # slots filled so far
        self._writer: Optional[SlotWriter] = None

    def serve(self, dataset: Any) -> None:
        """Load until the reader wants no more."""
        with contextlib.suppress(_Stopped):
            while True:
                with contextlib.suppress(_Abandoned):
                    self._load_epoch(dataset)
                self._epoch = max(self._epoch + 1, self._board.wanted_epoch)
                # A data set that can be read once only ends here, rather than end epoch after epoch.
                may_go_on = self._settings.load_indefinitely and self._elements > 0
                self._elements = 0
                if not may_go_on:
                    self._wait_until(self._is_wanted)

    def _load_epoch(self, dataset: Any) -> None:
        if self._writer is not None:
            self._writer.forget_rest()
        for element in _iterate(dataset):
            tensors, kind = take_apart(element)
            if self._writer is None:
                self._writer = self._open_ring(tensors, kind)
            self._writer.write(tensors, kind)
            self._elements += 1
            del element, tensors
            self._wait_until(self._may_load)
        if self._writer is None:
            raise Error("The data set is empty: there is no element to load asynchronously")
        self._writer.end_epoch()
        self._publish(END, 0)

    def _open_ring(self, tensors: List[torch.Tensor], kind: ElementKind) -> SlotWriter:
        writer = SlotWriter(tensors, kind, self._settings.rebatched_size, self._settings.drop_last)
        self._links.memory.resize(memory_size(writer.layout, self._settings.slots))
        slots = map_slots(self._links.memory, writer.layout, self._settings.slots)
        writer.open(slots, self._next_slot, self._publish)
        _send(self._links.reports, Ready(writer.layout, kind))
        return writer

    def _is_wanted(self) -> bool:
        return self._board.wanted_epoch >= self._epoch

    def _may_load(self) -> bool:
        ahead = self._settings.early_preload if self._epoch == 1 else self._settings.load_indefinitely
        return ahead or self._is_wanted()

    def _next_slot(self) -> int:
        """The slot to fill next, as soon as it is free."""
        self._wait_until(self._has_free_slot)
        return self._filled % self._settings.slots

    def _has_free_slot(self) -> bool:
        taken = self._board.taken
        while self._entries and self._entries[0] < taken:
            self._entries.popleft()
        return len(self._entries) < self._settings.slots

    def _publish(self, rows: int, slot: int) -> None:
        self._wait_until(self._board.has_room)
        if rows != END:
            self._entries.append(self._board.published)
            self._filled += 1
        self._board.publish(Entry(self._epoch, rows, slot))
        self._links.data_ready.ring()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Raises _Stopped when the reader wants no more or is gone, _Abandoned when it wants a later epoch."""
        while True:
            if self._board.must_stop or os.getppid() != self._parent:
                raise _Stopped
            if self._board.wanted_epoch > self._epoch:
                raise _Abandoned
            if condition():
                return
            self._links.slot_free.wait(_LOOK_AROUND_S)


def run(links: Links, settings: Settings, state: HostState, pickled: Optional[SharedMemory], dataset: Any) -> None:
    """The fetcher's life; the data set lies in the file `pickled` if that is given."""
    board = Board(links.memory, settings.slots)
    _set_up_process(board)
    try:
        state.restore()
        if pickled is not None:
            dataset = pickle.loads(pickled.map())
        _own_shuffling(dataset)
        has_workers = isinstance(dataset, torch.utils.data.DataLoader) and dataset.num_workers > 0
        _Fetcher(links, settings, board).serve(WorkerBatches(dataset) if has_workers else dataset)
    except KeyboardInterrupt:
        # Asked to end while the data set was busy: its workers may be as busy, so nobody waits for them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.terminate()
    except Exception as error:  # noqa: BLE001  # whatever a data set raises is told where it is read
        reason = str(error) if isinstance(error, Error) else traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):  # the reader is gone
            _send(links.reports, Failure(reason))
            links.data_ready.ring()
    finally:
        if isinstance(dataset, torch.utils.data.DataLoader):
            vars(dataset)["_iterator"] = None  # ends its workers


def _own_shuffling(dataset: Any) -> None:
    """Let a loader's partition, if it has one, shuffle apart from the loader that it is a copy of."""
    partition = getattr(dataset, "_partition", None)
    if partition is not None:
        partition.become_independent()


def _set_up_process(board: Board) -> None:
    def on_interrupt(signal_number: int, frame: Any) -> None:
        # Ctrl-C reaches all processes of a terminal; what it ends is for the program to decide, which may go on.
        if board.must_stop:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Threads of its own would compete with the replicas'; a fork of a process that had some would wait for them.
    torch.set_num_threads(1)


def _iterate(dataset: Any) -> Iterator[Any]:
    is_indexed = not hasattr(dataset, "__iter__") and hasattr(dataset, "__len__")
    return (dataset[index] for index in range(len(dataset))) if is_indexed else iter(dataset)


def _send(reports: Connection, report: Any) -> None:
    # Plainly pickled: the tensors of an original travel as bytes and leave no descriptor to be fetched.
    reports.send_bytes(pickle.dumps(report))
