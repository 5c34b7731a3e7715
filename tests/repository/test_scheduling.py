"""The kinds of tests, and their distribution among processes: Ray clusters in two processes only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest

from tests.support import kinds
from tests.support.scheduling import LONG, MAX_CLUSTER_PROCESSES, ONE_AT_A_TIME, ClustersFirst, starts_clusters

FILES = {
    "tests/api/ray/test_fit_under_ray.py": 9,
    "tests/end_to_end/pod/test_pod.py": 5,
    "tests/end_to_end/pod/test_pod_tls.py": 2,
    "tests/runtime/coordinator/ray/test_killed.py": 6,
    "tests/runtime/coordinator/ray/test_lost_host.py": 1,
    "tests/plan/test_a.py": 40,
    "tests/plan/test_b.py": 1,
    "tests/plan/test_c.py": 3,
    "tests/runtime/launcher/ray/test_launch.py": 20,
    "tests/cli/slow/test_train_convergence.py": 3,
}
NAMES = [f"{file}::test_{number}" for file, count in FILES.items() for number in range(count)]


class Process:
    """A test process. As xdist's, it runs a test once it knows the next one, or that there is none."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: List[int] = []
        self.ran: List[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: List[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next_test(self) -> int:
        return self.queue.pop(0) if len(self.queue) > (0 if self.shutting_down else 1) else -1


def new_scheduler(number: int) -> Tuple[ClustersFirst, List[Process]]:
    values = {"tx": ["popen"] * number, "maxworkerrestart": None}
    config: Any = SimpleNamespace(getvalue=values.get, option=SimpleNamespace(loadscopereorder=True))
    scheduler = ClustersFirst(config)
    processes = [Process(f"gw{index}") for index in range(number)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, NAMES)
    scheduler.schedule()
    return scheduler, processes


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_every_test_runs_once_and_clusters_in_two_processes(number: int) -> None:
    scheduler, processes = new_scheduler(number)
    progress = True
    while progress:
        progress = False
        for process in processes:
            index = process.next_test()
            if index >= 0:
                progress = True
                process.ran.append(NAMES[index])
                scheduler.mark_test_complete(process, index)
    assert sorted(test for process in processes for test in process.ran) == sorted(NAMES)
    assert not scheduler.has_pending
    assert all(process.shutting_down for process in processes)
    with_clusters = [process for process in processes if any(map(starts_clusters, process.ran))]
    assert len(with_clusters) <= MAX_CLUSTER_PROCESSES
    for process in with_clusters:
        kinds = [starts_clusters(test) for test in process.ran]
        assert kinds == sorted(kinds, reverse=True)  # clusters first
    assert len([process for process in processes if any(test.startswith(ONE_AT_A_TIME) for test in process.ran)]) == 1
    if number > MAX_CLUSTER_PROCESSES:
        assert any(process.ran[0].startswith(LONG) for process in processes)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "fatal", ["tests/plan/test_a.py::test_38", "tests/plan/test_b.py::test_0", NAMES[-1], NAMES[0]]
)
def test_a_test_that_ends_its_process_runs_once_and_the_others_run_elsewhere(fatal: str, number: int) -> None:
    scheduler, processes = new_scheduler(number)
    ran: List[str] = []
    ended: List[str | None] = []
    while scheduler.nodes:
        runnable = [(process, index) for process in processes for index in [process.next_test()] if index >= 0]
        for process, index in runnable:
            ran.append(NAMES[index])
            if NAMES[index] == fatal:
                processes.remove(process)
                ended.append(scheduler.remove_node(process))
                processes.append(Process(f"gw{number}"))
                scheduler.add_node(processes[-1])
                scheduler.add_node_collection(processes[-1], NAMES)
                scheduler.schedule()
            else:
                scheduler.mark_test_complete(process, index)
        for process in [process for process in processes if process.shutting_down and not process.queue]:
            processes.remove(process)
            assert scheduler.remove_node(process) is None
        assert runnable or not scheduler.nodes, "all processes wait for the scheduler"
    assert (ended, sorted(ran)) == ([fatal], sorted(NAMES))


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
