"""The kinds of tests, and which of them run by default."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest

from tests.support import kinds

TESTS = Path("/tests")
SOURCES = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("file", "fixtures", "expected"),
    [
        ("plan/test_a.py", ["make"], set()),
        ("pod/test_a.py", [], set()),  # the package of that name, not the kind
        ("end_to_end/pod/test_a.py", [], {"pod"}),
        ("fleet/ray/test_a.py", ["processes"], {"ray", "process"}),
        ("fleet/test_a.py", ["session"], {"ray"}),
    ],
)
def test_kinds_are_those_of_the_folder_and_the_fixtures(file: str, fixtures: List[str], expected: Any) -> None:
    assert kinds.kinds_of(TESTS / file, fixtures, TESTS) == expected


def _selected(source: Any = SOURCES.TESTPATHS, worker: Any = None, **options: Any) -> Any:
    """Return the files that are selected, and the line of the summary."""
    options = {"--all": False, "--left-out": False, "markexpr": "", **options}
    deselected: List[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    stash: Dict[Any, Any] = {}
    config: Any = SimpleNamespace(getoption=options.get, args_source=source, stash=stash, hook=hook)
    if worker is not None:
        config.workerinput = {"choice": worker}
    items: List[Any] = []
    for file in ("plan/test_a.py", "end_to_end/test_b.py", "end_to_end/pod/test_c.py", "fleet/ray/test_d.py"):
        marks = kinds.kinds_of(TESTS / file, ["session"] if file == "end_to_end/test_b.py" else [], TESTS)
        items.append(SimpleNamespace(path=TESTS / file, get_closest_marker=marks.__contains__))
    kinds.select(config, items)
    assert len(items) + len(deselected) == 4
    return "".join(item.path.stem[-1] for item in items), kinds.summary(stash.get(kinds.LEFT_OUT, Counter()))


def test_what_runs_and_what_the_summary_says() -> None:
    line = "2 tests were left out (1 ray, 1 pod); all: scripts/dev test --all"
    assert (_selected(), _selected(**{"--left-out": True})) == (("ab", line), ("cd", ""))
    for everything in ({"--all": True}, {"markexpr": "ray"}, {"source": SOURCES.ARGS}):
        assert _selected(**everything) == ("abcd", "")
    # The processes of xdist have paths on their command line; the controller's choice counts.
    assert _selected(SOURCES.ARGS, worker="default") == ("ab", line)


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by name."""
    names = Counter(path.name for path in Path(kinds.__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
