"""The warnings of an instance's process about the user's code, for the coordinator: they are also in its log file."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import warnings
from typing import Any, List, Set, Tuple

from raypod.plan import user_code

_MOST = 10  # a warning of every sample would bury the rest of the output
_MOST_CHARACTERS = 500
_SDK_LOGGER = "poptorch::python"
# They are about future versions of a package, or about files that are closed late.
_IGNORED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)


class WarningRecord:
    """Collects the warnings of Python and of the SDK, each text once and at most 10. They are shown as before."""

    def __init__(self) -> None:
        self._known: Set[str] = set()
        self._new: List[str] = []
        self._lock = threading.Lock()  # replicas of the emulated SDK are threads

    def install(self) -> None:
        """Collect from now on, until the process ends."""
        show = warnings.showwarning

        def record_and_show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            if not issubclass(category, _IGNORED):
                self._add(f"{category.__name__}: {message}", is_of_python=True)
            show(message, category, filename, lineno, *rest, **more)

        warnings.showwarning = record_and_show
        logging.getLogger(_SDK_LOGGER).addFilter(self._record_of_sdk)

    def take(self) -> Tuple[str, ...]:
        """Return the warnings that are new since the previous call, each in one line."""
        with self._lock:
            taken, self._new = tuple(self._new), []
        return taken

    def _record_of_sdk(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            with contextlib.suppress(TypeError, ValueError):  # wrong arguments: the handler reports them
                self._add(record.getMessage())
        return True  # a filter: the record is written

    def _add(self, text: str, is_of_python: bool = False) -> None:
        text = " ".join(text.split())[:_MOST_CHARACTERS]
        with self._lock:
            if text in self._known or len(self._known) >= _MOST:
                return
            self._known.add(text)
        # The file of a warning of torch is mostly one of torch. The SDK's texts name the line.
        place = user_code.place_in(traceback.extract_stack()) if is_of_python else ""
        with self._lock:
            self._new.append(text + place)
