"""Every command of the tutorials and how-tos is executed by a test, or is marked with the reason why it is not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.documented import DOCS, PAGES, blocks, execute, executed

# Pages whose commands other tests execute.
ELSEWHERE = {
    "how-to/from-poprun.md": "training/tasks/test_documented_tasks.py",
    "how-to/from-python.md": "api/packages/test_documentation.py",
    "how-to/hugging-face.md": "training/tasks/packages/test_hf_tasks.py",
    "how-to/tune.md": "api/packages/test_documentation.py",
    "how-to/ray-jobs.md": "api/packages/test_ray_job.py",
    "how-to/trained-models.md": "api/inference/slow/test_trained_commands.py",
    "how-to/pods.md": "end_to_end/pod/test_pod.py",
    "tutorials/your-own-task.md": "training/tasks/test_documented_tasks.py",
}
HERE = [page for page in PAGES if page not in ELSEWHERE and executed(page)]
LAUNCHES = [page for page in HERE if any("raypod launch" in line for line in executed(page))]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_executed_or_says_why_not(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^ *```", text, re.M)), "a block that cannot be parsed"
    for block in blocks(page):
        assert block.language in ("sh", "python", "text", "yaml", "json"), block.text
        assert block.reason is None or len(block.reason.split()) >= 2, "a reason is more than a word"
    assert not re.search(r"<!-- not executed(?!: [^>]+ -->\n *```)", text), "a reason without a block"
    if page in ELSEWHERE:  # the names may be in a folder of a kind
        folder, _, name = ELSEWHERE[page].rpartition("/")
        assert any(page in found.read_text() for found in (ROOT / "tests" / folder).rglob(name))


def test_pages_that_are_executed_elsewhere_exist() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    assert HERE


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
@pytest.mark.parametrize("page", ["reference/training.md", *(page for page in HERE if page not in LAUNCHES)])
def test_the_commands_of_a_page(processes: None, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(page)
