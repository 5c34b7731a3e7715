"""Every command of the tutorials and how-tos is executed by a test, or is marked with the reason why it is not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional

import pytest
from documented import DOCS, modules
from ray_cluster import ray_cluster

from raypod import train
from raypod.__main__ import main

TESTS = Path(__file__).resolve().parent
# Pages whose commands other tests execute.
ELSEWHERE = {
    "how-to/from-poprun.md": "tasks/test_from_poprun.py",
    "how-to/from-python.md": "api/test_documentation.py",
    "how-to/tune.md": "api/test_documentation.py",
    "how-to/ray-jobs.md": "api/test_ray_job.py",
    "how-to/language-models.md": "test_documented_commands.py",
    "how-to/trained-models.md": "trained/test_documented.py",
    "how-to/pods.md": "end_to_end/test_pod.py",
    "tutorials/your-own-task.md": "tasks/test_documented_tasks.py",
}
PAGES = sorted(
    page.relative_to(DOCS).as_posix() for part in ("tutorials", "how-to") for page in (DOCS / part).rglob("*.md")
)
_BLOCK = re.compile(
    r"(?:^ *<!-- not executed: (?P<reason>[^>]+) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
_LANGUAGES = frozenset(("sh", "python", "text", "yaml", "json"))
_INLINE = ["--fleet", "inline", "--num-instances", "1"]


class Block(NamedTuple):
    language: str
    text: str
    reason: Optional[str]  # why it is not executed

    def lines(self) -> List[str]:
        """The commands: continued lines are joined, comments are left out."""
        lines = (line.split(" #")[0].strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line]


def blocks(page: str) -> List[Block]:
    found = _BLOCK.finditer((DOCS / page).read_text())
    return [Block(each["language"], each["text"], each["reason"]) for each in found]


def executed(page: str) -> List[str]:
    return [line for block in blocks(page) if block.language == "sh" and not block.reason for line in block.lines()]


HERE = [page for page in PAGES if page not in ELSEWHERE and executed(page)]
_LAUNCHES = [page for page in HERE if any("raypod launch" in line for line in executed(page))]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_executed_or_says_why_not(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^ *```", text, re.M)), "a block that cannot be parsed"
    for block in blocks(page):
        assert block.language in _LANGUAGES, block.text
        assert block.reason is None or len(block.reason.split()) >= 2, "a reason is more than a word"
    assert not re.search(r"<!-- not executed(?!: [^>]+ -->\n *```)", text), "a reason without a block"
    if page in ELSEWHERE:
        assert page in (TESTS / ELSEWHERE[page]).read_text()


def test_pages_that_are_executed_elsewhere_exist() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    assert HERE


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray cluster, so that not every launch starts its own."""
    with ray_cluster(("",), num_cpus=4) as started:
        yield started.cluster.address


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the programs of the pages and a copy of the cluster files."""
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    (tmp_path / "tests").symlink_to(TESTS)
    shutil.copytree(DOCS.parent / "cluster", tmp_path / "cluster")
    for page in PAGES:
        for name, code in modules(page).items():
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
@pytest.mark.parametrize("page", [page for page in HERE if page not in _LAUNCHES])
def test_the_commands_of_a_page(page: str, folder: Path) -> None:
    for line in executed(page):
        run(line)


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves sockets and files to the garbage collector
@pytest.mark.parametrize("page", _LAUNCHES)
def test_the_commands_of_a_page_that_launches(page: str, folder: Path, address: str) -> None:
    for line in executed(page):
        run(line, address)


def run(line: str, address: Optional[str] = None) -> None:
    """Execute a command: raypod's in this process, trainings without Ray and with few updates, others in a shell.

    A launch is a process of its own, which joins the Ray cluster at `address`.
    """
    words = shlex.split(line)
    if words[:2] == ["raypod", "train"]:
        few = [] if {"--updates", "--resume"} & {*words} else ["--updates", "4"]
        code = train.main([*words[2:], *_INLINE, *few])
    elif words[:2] == ["raypod", "launch"]:
        assert address is not None
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(DOCS.parent)}
        command = [sys.executable, "-m", "raypod.launch", *words[2:]]
        done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    elif words[0] == "raypod":
        code = main(words[1:])
    elif words[:2] == ["grep", "weights_sha256"]:  # the pages say that these are equal
        hashes = {json.loads(Path(name).read_text())["weights_sha256"] for name in words[2:]}
        code = len(hashes) - 1
    else:
        code = subprocess.run(["bash", "-ec", line], check=False, timeout=60, capture_output=True).returncode
    assert code == 0, line
