"""The uncaught C++ exception that ended a process, from what it wrote to stderr."""

from __future__ import annotations

import re
from typing import Optional

# The lines of the C++ runtime, and the line of Ray's handler in a Ray worker, which ends with a stack frame.
_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of|without an active exception|recursively).*")
_WHAT = re.compile(r"\s+what\(\):\s.*")
_OF_RAY = re.compile(r"\[.*Unhandled exception: \S+ (what\(\): .*?)(?: \S+\(\S*\) \[0x[0-9a-f]+\].*)?")
_LONGEST = 500  # characters of the line


def last_exception(text: str) -> Optional[str]:
    """Return the last line about an uncaught C++ exception, which contains its message; None if there is none."""
    for line in reversed(text.splitlines()):
        found = _OF_RAY.fullmatch(line) or _WHAT.fullmatch(line) or _TERMINATE.fullmatch(line)
        if found is not None:
            return " ".join((found.group(1) if found.re is _OF_RAY else line).split())[:_LONGEST]
    return None
