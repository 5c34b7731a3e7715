"""What an IPU would refuse of a program, or the emulation cannot know, for `raypod doctor --program`.

EMULATED_POD_FINDINGS=FILE lets a program run until the end of its first call. What is an Error in strict mode does not
end it; it is a line of JSON in the file, as are the warnings of the SDK. `reject` decides which of the three it is.

    {"level": "trouble", "what": "operator", "text": "...", "places": ["fc (Linear), main.py:12"]}
    {"event": "call", "limit_s": 300.0}                          a call begins, or "compilation"
    {"event": "end", "compile_s": 0.1, "call_s": 0.2, ...}       it has ended, and so does the program
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, Iterable, Iterator, List, NoReturn, Sequence, Tuple

import torch
from _pod.activation import FINDINGS as FILE
from _pod.activation import FOLDER, STRICT, is_strict

from poptorch.environment import logger
from poptorch.errors import Error

OK, WARN, TROUBLE = "ok", "warn", "trouble"

SDK_FOLDER = f"{FOLDER}/"
TORCH_FOLDER = f"{Path(torch.__file__).resolve().parent}/"
_BETWEEN = (logging.__file__, contextlib.__file__, traceback.__file__)
_RECORDED = "_is_in_findings"  # an attribute of exceptions


def is_active() -> bool:
    """Return whether findings are recorded."""
    return bool(os.environ.get(FILE))


def add(level: str, what: str, text: str, places: Sequence[str] = ()) -> None:
    """Record a finding: `what` it is about, and the places in the program, as in "fc (Linear), main.py:12"."""
    _write(level=level, what=what, text=text, places=list(places))


def add_here(level: str, what: str, text: str) -> None:
    """Record a finding whose place is the line of the program that calls the SDK."""
    add(level, what, text, _first_of_program(_frames(traceback.walk_stack(None))))


@contextlib.contextmanager
def during(event: str, **facts: Any) -> Iterator[None]:
    """Context of a "call" or a "compilation": an exception in it is a finding."""
    if not is_active():
        yield
        return
    _write(event=event, **facts)
    try:
        yield
    except Exception as error:
        if not hasattr(error, _RECORDED):
            setattr(error, _RECORDED, True)
            frames = _frames(traceback.walk_tb(error.__traceback__))[::-1] + _frames(traceback.walk_stack(None))
            add(TROUBLE, event, f"{type(error).__name__}: {error}", _first_of_program(frames))
        raise


def end_program(**facts: Any) -> NoReturn:
    """Record that the first call has ended, and end the program. SystemExit runs what it has to clean up."""
    _write(event="end", **facts)
    raise SystemExit(0)


class Recorder(logging.Handler):
    """Records the warnings of the SDK's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Record one message."""
        if record.levelno >= logging.WARNING:
            add_here(WARN, "warning", record.getMessage())


def record_warnings(logger: logging.Logger) -> None:
    """Record the warnings of a logger from now on, if findings are recorded."""
    if is_active():
        logger.addHandler(Recorder())


def _frames(walked: Iterable[Tuple[FrameType, int]]) -> List[Tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in walked]


def _first_of_program(frames: Sequence[Tuple[str, int]]) -> Sequence[str]:
    """Return file and line of the first frame outside of the SDK, torch and the modules that these call."""
    for file, line in frames:
        if not file.startswith((SDK_FOLDER, TORCH_FOLDER, "<")) and file not in _BETWEEN:
            return [f"{Path(file).name}:{line}"]
    return []


def _write(**line: Any) -> None:
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def reject(message: str, what: str = "model") -> None:
    """Warn that an IPU rejects the model; in strict mode raise Error. `what` names the subject among findings."""
    if is_active():
        add(TROUBLE, what, message)
    elif is_strict():
        raise Error(message)
    logger.warning("%s An IPU rejects this model; %s=1 makes it an Error here.", message, STRICT)
