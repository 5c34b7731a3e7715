"""JSON that every program reads: a number that is none (NaN, infinity) is null."""

from __future__ import annotations

import json
import math
from typing import Any, Optional


def dumps(content: Any, indent: Optional[int] = None) -> str:
    """`json.dumps`, without Python's own words for numbers that JSON does not have."""
    return json.dumps(_plain(content), indent=indent, allow_nan=False)


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
