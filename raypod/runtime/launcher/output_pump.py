"""Read the output of a host's programs as it arrives, and hold it until the launcher fetches it.

The buffer is bounded: while it is full, nothing more is read, and the programs block in their next write.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import threading
import time
from typing import Dict, Iterable, List, Mapping, Tuple

from raypod.runtime.launcher.records import HostReport, ProgramEnd

_MAX_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_KILLED = 128 + 9
_BATCH_S = 0.002  # output that arrives within this time is sent in one message: each message is expensive
_FULL_WAIT_S = 0.5  # longest wait of a full pump between two checks for space


class OutputPump:
    """A thread that reads all outputs until each is closed and the exit of every program has been read."""

    def __init__(self, outputs: Mapping[int, Tuple[int, int]], ends: int, instances: Iterable[int]) -> None:
        """Start the thread, which takes over all descriptors and closes them.

        Args:
            outputs: Descriptor -> (instance, stream).
            ends: Descriptor of the reaper's output.
            instances: The instances whose exits are expected.
        """
        self._outputs = dict(outputs)
        self._ends_from, self._running = ends, set(instances)
        self.pids: Dict[int, int] = {}  # by instance, of the programs that run
        self._chunks: List[Tuple[int, int, bytearray]] = []
        self._ends: List[ProgramEnd] = []
        self._bytes, self._is_output_closed, self._is_done = 0, False, False
        self._has_new_state = False  # one of the two flags changed since the last report
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="output pump", daemon=True).start()

    def take(self, within_s: float) -> HostReport:
        """Return what arrived since the last call; wait at most `within_s` for something to arrive."""
        with self._changed:
            self._changed.wait_for(self._has_news, within_s)
            chunks = tuple((instance, stream, bytes(data)) for instance, stream, data in self._chunks)
            ends = tuple(self._ends)
            self._chunks, self._ends, self._bytes, self._has_new_state = [], [], 0, False
            self._changed.notify_all()
            return HostReport(chunks, ends, self._is_output_closed, self._is_done)

    def _has_news(self) -> bool:
        return bool(self._chunks or self._ends) or self._has_new_state or self._is_done

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._outputs, self._ends_from):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            partial_line = b""
            while selector.get_map():
                largest = 0
                for key, _ in selector.select():
                    data, is_closed = _read(key.fd)
                    largest = max(largest, len(data))
                    if is_closed:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                    if key.fd == self._ends_from:
                        *lines, partial_line = (partial_line + data).split(b"\n")
                        reports = [json.loads(line) for line in lines]
                        ends = [ProgramEnd(*each["end"]) for each in reports if "end" in each]
                        self.pids = {**self.pids, **dict(each["start"] for each in reports if "start" in each)}
                        self._add_ends(ends)
                        if is_closed:
                            self._add_ends([ProgramEnd(each, _KILLED, "its reaper died") for each in self._running])
                    elif data:
                        self._add(*self._outputs[key.fd], data)
                if not self._is_output_closed and not set(selector.get_map()) - {self._ends_from}:
                    self._set_state(is_done=False)
                if largest < _READ_BYTES:
                    time.sleep(_BATCH_S)
                self._wait_for_space()
        self._set_state(is_done=True)

    def _set_state(self, is_done: bool) -> None:
        """Report that all outputs are closed, and with `is_done` that no process is left."""
        with self._changed:
            self._is_output_closed = self._has_new_state = True
            self._is_done = is_done
            self._changed.notify_all()

    def _add(self, instance: int, stream: int, data: bytes) -> None:
        with self._changed:
            if self._chunks and self._chunks[-1][:2] == (instance, stream):
                self._chunks[-1][2].extend(data)
            else:
                self._chunks.append((instance, stream, bytearray(data)))
            self._bytes += len(data)
            self._changed.notify_all()

    def _add_ends(self, ends: List[ProgramEnd]) -> None:
        ended = {end.instance for end in ends}
        self.pids = {instance: pid for instance, pid in self.pids.items() if instance not in ended}
        with self._changed:
            self._ends += [end for end in ends if end.instance in self._running]
            self._running -= ended
            self._changed.notify_all()

    def _wait_for_space(self) -> None:
        with self._changed:
            while self._bytes > _MAX_BYTES:
                self._changed.wait(_FULL_WAIT_S)


def _read(descriptor: int) -> Tuple[bytes, bool]:
    """Return the available bytes, up to a limit, and whether the descriptor reached its end.

    The loop is for terminals, which return small pieces.
    """
    pieces: List[bytes] = []
    size = 0
    while size < _READ_BYTES:
        try:
            piece = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b"".join(pieces), False
        except OSError as error:
            if error.errno != errno.EIO:  # EIO on a terminal's master side: the other side is closed
                raise
            piece = b""
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False
