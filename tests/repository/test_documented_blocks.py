"""The documentation: commands that are executed, links, and generated pages that are complete."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Set

import pytest

from raypod.cli.table import COMMANDS
from raypod.observe.status import launch_status, prometheus
from raypod.plan import cluster_file
from raypod.plan.config import Config, fields
from raypod.plan.flags import flags_of
from tests.support import ROOT
from tests.support.documented import DOCS, PAGES, blocks, execute, executed, generated, reference_pages

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


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
@pytest.mark.parametrize("page", ["reference/training.md", *(page for page in HERE if page not in LAUNCHES)])
def test_the_commands_of_a_page(processes: None, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(page)


LINKED = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
LINKED += sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.is_file() or (anchor and anchor not in _anchors(file)):
            wrong.append(target)
    assert wrong == []


def test_the_readme_is_a_page_and_every_page_is_in_the_navigation() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 240
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []
    assert set(ELSEWHERE) <= set(PAGES)
    assert HERE


def _anchors(page: Path) -> Set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", generated())
def test_the_page_in_the_repository_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # the pages do not depend on it
    if name == "reference/commands.md" and not reference_pages().can_print_help():
        pytest.skip("argparse of this Python prints the help of commands in another form")
    assert (DOCS / name).read_text() == generated()[name](), "python scripts/reference_pages.py writes it"


def test_the_reference_has_every_flag_command_metric_operator_and_key() -> None:
    page = generated()["reference/flags.md"]()
    for section, key, field in fields():
        for flag in flags_of(section, key, field):
            assert f"`{flag}`" in page
        assert page.count(f"<br>`{section}.{key}` |") == 1
    assert f"default: {Config().training.learning_rate:g}]" in page
    assert all(line.count("|") - line.count(r"\|") == 3 for line in page.splitlines() if line.startswith("|"))
    page = generated()["reference/commands.md"]()
    for name in COMMANDS:
        section = page.partition(f"### raypod {name}\n")[2].partition("\n### ")[0]
        assert re.search(r"```text\nusage: (raypod|python -m raypod)", section, re.IGNORECASE), name
    assert "\x1b" not in page
    metrics = generated()["reference/metrics.md"]()
    for metric in (*prometheus.METRICS, *launch_status.METRICS):
        assert f"| `{metric.name}` | {metric.kind} | {metric.help} |" in metrics
    page = generated()["reference/operators.md"]()
    source = DOCS.parent / "raypod/emulated_sdk/poptorch/parallel/supported_operators.py"
    texts = [node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant)]
    names = [name for text in texts if isinstance(text, str) and text.startswith("\n") for name in text.split()]
    assert len(names) > 300
    assert [name for name in names if f"`{name}`" not in page] == []
    page = (DOCS / "reference/cluster-file.md").read_text()
    for title, keys in (("metadata.raypod", cluster_file._RAYPOD), ("metadata.raypod.vipu", cluster_file._VIPU)):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(keys)
    of_ray = page.partition("## Keys of Ray\n")[2]
    rows = [row.split("|")[1] for row in of_ray.splitlines() if row.startswith("| `")]
    named = {name.partition(".")[0] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert len(named) >= 8
    assert named <= {*cluster_file.TOP_LEVEL_KEYS}
