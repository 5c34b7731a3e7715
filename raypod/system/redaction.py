"""Keep secrets of the environment out of what is written into the run folder: command lines, output of trackers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import Dict, Iterator, List, Mapping
from urllib.parse import unquote

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_MIN_LENGTH = 6  # shorter values, for example "1", are no secrets, and are part of other texts
_END_WITHIN_S = 2.0
_HIDDEN = "***"


class Redaction:
    """Replaces secrets in texts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Secrets are the values of variables with such names, and users and passwords in addresses."""
        found: Dict[str, None] = {}
        for name, value in environment.items():
            in_urls = _USER_IN_URL.findall(value)
            parts = [part for each in in_urls for part in (each, each.partition(":")[2])]
            for text in (*([value] if _NAME.search(name) else []), *parts, *map(unquote, parts)):
                if len(text) >= _MIN_LENGTH:
                    found[text] = None
        self._secrets: List[str] = sorted(found, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return _USER_IN_URL.sub(_HIDDEN, text)


@contextlib.contextmanager
def redacted_output(redaction: Redaction) -> Iterator[None]:
    """Redact what this process and its children write to stdout and stderr within the context."""
    log = os.dup(2)
    reading, writing = os.pipe()
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    thread = threading.Thread(target=_copy, args=(reading, log, redaction), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(log, number)
        thread.join(_END_WITHIN_S)  # a child that lives on holds the pipe


def _copy(reading: int, log: int, redaction: Redaction) -> None:
    with os.fdopen(reading, "r", errors="replace") as lines:
        for line in lines:
            os.write(log, redaction.clean(line).encode())
