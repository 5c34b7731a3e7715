"""The code blocks of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List

DOCS = Path(__file__).resolve().parents[1] / "docs"


def modules(page: str) -> Dict[str, str]:
    """Return the Python blocks of a page whose first line is a file name: file name -> code."""
    text = (DOCS / page).read_text()
    return {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", text, re.DOTALL)}


def commands(page: str) -> List[str]:
    """Return the lines of the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
