"""`poptorch.profiling`: records time spans of a program on named channels.

The SDK writes them for its PopVision System Analyser, in a format that is not public. The emulation writes Trace Event
JSON, which chrome://tracing and Perfetto show. As in the SDK, recording is off unless the environment enables it:

    PVTI_OPTIONS='{"enable": "true", "directory": "reports"}'

Each process appends its spans to `<directory>/poptorch-<pid>.trace.json`. The file has no closing bracket, which the
format allows.
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

from poptorch.errors import Error

__all__ = ["Channel"]

_EXAMPLE = '{"enable": "true", "directory": "reports"}'

_lock = threading.Lock()  # held during one write


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A fork while another thread holds the lock would leave it locked in the child.
os.register_at_fork(after_in_child=_renew_lock)


class Channel:
    """A named channel of time spans.

    Args:
        name: the category of its spans.

    Raises:
        poptorch.Error: PVTI_OPTIONS is not a JSON object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._directory = _directory()

    def instrument(self, obj: Any, *methods: str) -> Any:
        """Record a span around every later call of these methods of `obj`, and return `obj`.

        Raises:
            AttributeError: `obj` does not have a method.
        """
        for method in methods:
            traced = self._traced(getattr(obj, method), method)
            if self._directory is not None:
                setattr(obj, method, traced)
        return obj

    def tracepoint(self, name: str) -> ContextManager[None]:
        """Return a context manager that records a span with this name."""
        return contextlib.nullcontext() if self._directory is None else self._span(self._directory, name)

    def _traced(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return traced

    @contextlib.contextmanager
    def _span(self, directory: Path, name: str) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            times = {"ts": start_ns / 1e3, "dur": (time.perf_counter_ns() - start_ns) / 1e3}  # microseconds
            where = {"pid": os.getpid(), "tid": threading.get_native_id()}
            event = json.dumps({"name": name, "cat": self._name, "ph": "X", **times, **where})
            file = directory / f"poptorch-{os.getpid()}.trace.json"
            with _lock:
                is_new = not file.exists()
                with file.open("a") as stream:
                    stream.write(f"{'[' if is_new else ','}\n{event}")


def _directory() -> Optional[Path]:
    """Return the directory in PVTI_OPTIONS, created if necessary; None if recording is off."""
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
    directory = Path(options.get("directory", "."))
    directory.mkdir(parents=True, exist_ok=True)
    return directory
