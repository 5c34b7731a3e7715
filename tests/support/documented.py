"""The code blocks of the documentation."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from raypod import train
from raypod.__main__ import main
from tests.support import ROOT
from tests.support.bounded import COMMAND_S
from tests.support.modules import module_of

DOCS = ROOT / "docs"
PAGES = sorted(
    page.relative_to(DOCS).as_posix() for part in ("tutorials", "how-to") for page in (DOCS / part).rglob("*.md")
)
LANGUAGE_MODELS = "how-to/language-models.md"
TWO_UPDATES = (LANGUAGE_MODELS, "reference/training.md")  # what their commands say is too long for a test
_BLOCK = re.compile(
    r"(?:^ *<!-- not executed: (?P<reason>[^>]+) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)


class Block(NamedTuple):
    """A code block."""

    language: str
    text: str
    reason: Optional[str]  # why it is not executed

    def lines(self) -> List[str]:
        """The commands: continued lines are joined, comments are left out."""
        lines = (line.split(" #")[0].strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line]


def blocks(page: str) -> List[Block]:
    """Return the code blocks of a page."""
    found = _BLOCK.finditer((DOCS / page).read_text())
    return [Block(each["language"], each["text"], each["reason"]) for each in found]


def executed(page: str) -> List[str]:
    """Return the commands of a page that have to be executed."""
    return [line for block in blocks(page) if block.language == "sh" and not block.reason for line in block.lines()]


def execute(page: str, address: Optional[str] = None) -> None:
    """Execute the commands of a page in the current folder, with its programs and a copy of the cluster files.

    raypod's run in this process, trainings without Ray and with few updates, others in a shell. A launch is a process
    of its own, which joins the Ray cluster at `address`.
    """
    for name in ("configs", "tests"):
        Path(name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "cluster", "cluster")
    for each in (*PAGES, page):
        for name, code in modules(each).items():
            Path(name).write_text(code)
    for line in executed(page):
        assert _exit_code(shlex.split(line), line, page, address) == 0, line


def _exit_code(words: List[str], line: str, page: str, address: Optional[str]) -> int:
    little = ["--max-mb", "0.1"] if page == LANGUAGE_MODELS and "--data-dir" not in words else []
    if words[:2] == ["raypod", "train"]:
        few = ["2"] if page in TWO_UPDATES else [] if {"--updates", "--resume"} & {*words} else ["4"]
        inline = ["--fleet", "inline", "--num-instances", "1"]
        return train.main([*words[2:], *inline, *(f"--updates={each}" for each in few), *little])
    if words[:2] == ["raypod", "launch"]:
        assert address is not None
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "raypod.launch", *words[2:]]
        done = subprocess.run(command, check=False, timeout=COMMAND_S, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return 0
    if words[0] == "raypod":
        return main([*words[1:], *little])
    if words[:2] == ["grep", "weights_sha256"]:  # the pages say that these are equal
        return len({json.loads(Path(name).read_text())["weights_sha256"] for name in words[2:]}) - 1
    return subprocess.run(["bash", "-ec", line], check=False, timeout=COMMAND_S, capture_output=True).returncode


def generated() -> Dict[str, Callable[[], str]]:
    """Return the pages that are made from the tables of the code: path in docs/ -> function that returns the text."""
    pages: Dict[str, Callable[[], str]] = reference_pages().PAGES
    return pages


def reference_pages() -> Any:
    """Return the module scripts/reference_pages.py."""
    return module_of(ROOT / "scripts" / "reference_pages.py", "reference_pages")


def modules(page: str) -> Dict[str, str]:
    """Return the Python blocks of a page whose first line is a file name: file name -> code."""
    text = (DOCS / page).read_text()
    return {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", text, re.DOTALL)}


def commands(page: str) -> List[str]:
    """Return the lines of the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
