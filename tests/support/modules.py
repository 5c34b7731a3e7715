"""Modules that cannot be imported by their names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def module_of(path: Path, name: str) -> Any:
    """Return the module in a file, executed under `name`, which stays free for another module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
