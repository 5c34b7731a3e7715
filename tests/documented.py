"""The code blocks of the documentation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Callable, Dict, List

DOCS = Path(__file__).resolve().parents[1] / "docs"


def generated() -> Dict[str, Callable[[], str]]:
    """Return the pages that are made from the tables of the code: path in docs/ -> function that returns the text."""
    pages: Dict[str, Callable[[], str]] = reference_pages().PAGES
    return pages


def reference_pages() -> Any:
    """Return the module scripts/reference_pages.py."""
    path = DOCS.parent / "scripts" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules(page: str) -> Dict[str, str]:
    """Return the Python blocks of a page whose first line is a file name: file name -> code."""
    text = (DOCS / page).read_text()
    return {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", text, re.DOTALL)}


def commands(page: str) -> List[str]:
    """Return the lines of the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
