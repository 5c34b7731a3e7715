"""The generated pages of the reference have every flag, command, metric, operator and key."""

from __future__ import annotations

import ast
import re

import pytest

from raypod.cli.table import COMMANDS
from raypod.observe.status import launch_status, prometheus
from raypod.plan import cluster_file
from raypod.plan.config import Config, fields
from raypod.plan.flags import flags_of
from tests.support.documented import DOCS, generated, reference_pages


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # the pages do not depend on it


@pytest.mark.parametrize("name", generated())
def test_the_page_in_the_repository_is_up_to_date(name: str) -> None:
    if name == "reference/commands.md" and not reference_pages().can_print_help():
        pytest.skip("argparse of this Python prints the help of commands in another form")
    assert (DOCS / name).read_text() == generated()[name](), "python scripts/reference_pages.py writes it"


def test_every_flag_and_key_is_on_the_page() -> None:
    page = generated()["reference/flags.md"]()
    for section, key, field in fields():
        for flag in flags_of(section, key, field):
            assert f"`{flag}`" in page
        assert page.count(f"<br>`{section}.{key}` |") == 1
    assert f"default: {Config().training.learning_rate:g}]" in page
    assert all(line.count("|") - line.count(r"\|") == 3 for line in page.splitlines() if line.startswith("|"))


def test_every_command_has_its_help_and_every_metric_its_row() -> None:
    page = generated()["reference/commands.md"]()
    for name in COMMANDS:
        section = page.partition(f"### raypod {name}\n")[2].partition("\n### ")[0]
        assert re.search(r"```text\nusage: (raypod|python -m raypod)", section, re.IGNORECASE), name
    assert "\x1b" not in page
    metrics = generated()["reference/metrics.md"]()
    for metric in (*prometheus.METRICS, *launch_status.METRICS):
        assert f"| `{metric.name}` | {metric.kind} | {metric.help} |" in metrics


def test_every_supported_operator_is_on_the_page() -> None:
    page = generated()["reference/operators.md"]()
    source = DOCS.parent / "raypod/emulated_sdk/poptorch/parallel/supported_operators.py"
    texts = [node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant)]
    names = [name for text in texts if isinstance(text, str) and text.startswith("\n") for name in text.split()]
    assert len(names) > 300
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_page_of_the_cluster_file_has_every_key() -> None:
    page = (DOCS / "reference/cluster-file.md").read_text()
    for title, keys in (("metadata.raypod", cluster_file._RAYPOD), ("metadata.raypod.vipu", cluster_file._VIPU)):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(keys)
    of_ray = page.partition("## Keys of Ray\n")[2]
    rows = [row.split("|")[1] for row in of_ray.splitlines() if row.startswith("| `")]
    named = {name.partition(".")[0] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert len(named) >= 8
    assert named <= {*cluster_file.TOP_LEVEL_KEYS}
