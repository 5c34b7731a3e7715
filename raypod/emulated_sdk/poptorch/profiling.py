"""`poptorch.profiling`: spans of time in a program, on a named channel (contract 1.10: PVTI_OPTIONS).

The SDK writes them for its PopVision System Analyser, in a format that is not public. The emulation writes Trace Event
JSON, which chrome://tracing and Perfetto show. As in the SDK nothing is recorded unless the environment asks for it:

    PVTI_OPTIONS='{"enable": "true", "directory": "reports"}'

One file per process, `<directory>/poptorch-<pid>.trace.json`, grows as spans end; the closing bracket that is missing
in the end is allowed by the format.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, ContextManager, Iterator, Optional

from poptorch._errors import Error

__all__ = ["Channel"]

_EXAMPLE = '{"enable": "true", "directory": "reports"}'

_lock = threading.Lock()  # around one write


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A fork while another thread writes leaves the child a lock that nobody will release.
os.register_at_fork(after_in_child=_renew_lock)


class Channel:
    """A named channel of spans.

    name: the category of its spans. Error when PVTI_OPTIONS is no JSON object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = _folder()

    def instrument(self, obj: Any, *methods: str) -> None:
        """Record a span around every later call of these methods of an object; AttributeError if it has them not."""
        for method in methods:
            traced = self._traced(getattr(obj, method), method)
            if self._folder is not None:
                setattr(obj, method, traced)

    def tracepoint(self, name: str) -> ContextManager[None]:
        """A context that records a span of this name."""
        return contextlib.nullcontext() if self._folder is None else self._span(self._folder, name)

    def _traced(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return traced

    @contextlib.contextmanager
    def _span(self, folder: Path, name: str) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._write(folder, name, began_ns, time.perf_counter_ns())

    def _write(self, folder: Path, name: str, began_ns: int, ended_ns: int) -> None:
        times = {"ts": began_ns / 1e3, "dur": (ended_ns - began_ns) / 1e3}  # in microseconds
        where = {"pid": os.getpid(), "tid": threading.get_native_id()}
        event = json.dumps({"name": name, "cat": self._name, "ph": "X", **times, **where})
        file = folder / f"poptorch-{os.getpid()}.trace.json"
        with _lock:
            begins = not file.exists()
            with file.open("a") as stream:
                stream.write(f"{'[' if begins else ','}\n{event}")


def _folder() -> Optional[Path]:
    """Where PVTI_OPTIONS wants the spans; None if it does not. The folder is made."""
    text = os.environ.get("PVTI_OPTIONS", "")
    if not text:
        return None
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise Error(f"PVTI_OPTIONS={text!r} is not JSON ({error}); use {_EXAMPLE}") from None
    if not isinstance(options, dict):
        raise Error(f"PVTI_OPTIONS={text!r} is not a JSON object; use {_EXAMPLE}")
    if str(options.get("enable", "false")).lower() != "true":
        return None
    folder = Path(options.get("directory", "."))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
