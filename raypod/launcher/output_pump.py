"""Reads the output of a host's programs as it comes, and holds it until somebody asks for it.

What is held is bounded: while nobody asks, nothing more is read, and the programs wait in their next write.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import threading
import time
from typing import Iterable, List, Mapping, Tuple

from raypod.launcher.records import HostReport, ProgramEnd

_MOST_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_KILLED = 128 + 9
_TOGETHER_S = 0.002  # output that comes this soon after other output travels with it: a message costs more
_STALLED_S = 0.5  # how long a full pump sleeps when nobody wakes it


class Pump:
    """One thread, from its birth until every output has ended and every program's end was read."""

    def __init__(self, outputs: Mapping[int, Tuple[int, int]], ends: int, instances: Iterable[int]) -> None:
        """`outputs`: descriptor -> (instance, stream); `ends`: the keeper's output; `instances`: those that will end.

        Takes the descriptors over and closes them.
        """
        self._outputs = dict(outputs)
        self._ends_from, self._unended = ends, set(instances)
        self._chunks: List[Tuple[int, int, bytearray]] = []
        self._ends: List[ProgramEnd] = []
        self._bytes, self._is_silent, self._is_done = 0, False, False
        self._is_news = False  # whether one of these two changed
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="pump", daemon=True).start()

    def take(self, within_s: float) -> HostReport:
        """What came since the last call; waits for something at most `within_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._ends or self._is_news, within_s)
            chunks = tuple((instance, stream, bytes(data)) for instance, stream, data in self._chunks)
            ends = tuple(self._ends)
            self._chunks, self._ends, self._bytes, self._is_news = [], [], 0, False
            self._changed.notify_all()
            return HostReport(chunks, ends, self._is_silent, self._is_done)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._outputs, self._ends_from):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            said = b""
            while selector.get_map():
                most = 0
                for key, _ in selector.select():
                    data, has_ended = _read(key.fd)
                    most = max(most, len(data))
                    if has_ended:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                    if key.fd == self._ends_from:
                        *lines, said = (said + data).split(b"\n")
                        self._add_ends([ProgramEnd(*json.loads(line)["end"]) for line in lines])
                        if has_ended:
                            self._add_ends([ProgramEnd(each, _KILLED, "its keeper died") for each in self._unended])
                    elif data:
                        self._add(*self._outputs[key.fd], data)
                if not self._is_silent and not set(selector.get_map()) - {self._ends_from}:
                    self._be_silent()
                if most < _READ_BYTES:
                    time.sleep(_TOGETHER_S)
                self._wait_for_room()
        with self._changed:
            self._is_silent = self._is_done = self._is_news = True
            self._changed.notify_all()

    def _be_silent(self) -> None:
        with self._changed:
            self._is_silent = self._is_news = True
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
        with self._changed:
            self._ends += [end for end in ends if end.instance in self._unended]
            self._unended -= {end.instance for end in ends}
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        with self._changed:
            while self._bytes > _MOST_BYTES:
                self._changed.wait(_STALLED_S)


def _read(descriptor: int) -> Tuple[bytes, bool]:
    """What is there, up to a limit, and whether that was the last. A terminal gives it in small pieces."""
    pieces: List[bytes] = []
    size = 0
    while size < _READ_BYTES:
        try:
            piece = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b"".join(pieces), False
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal's master side says that its other side is closed
                raise
            piece = b""
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False
