"""The distribution of test files among processes: every test runs once, and Ray clusters in two processes only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Tuple

import pytest

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
TESTS = [f"{file}::test_{number}" for file, count in FILES.items() for number in range(count)]


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
        """Return the index of the test that runs next, or -1."""
        return self.queue.pop(0) if len(self.queue) > (0 if self.shutting_down else 1) else -1


def new_scheduler(number: int) -> Tuple[ClustersFirst, List[Process]]:
    values = {"tx": ["popen"] * number, "maxworkerrestart": None}
    config: Any = SimpleNamespace(getvalue=values.get, option=SimpleNamespace(loadscopereorder=True))
    scheduler = ClustersFirst(config)
    processes = [Process(f"gw{index}") for index in range(number)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, TESTS)
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
                process.ran.append(TESTS[index])
                scheduler.mark_test_complete(process, index)
    assert sorted(test for process in processes for test in process.ran) == sorted(TESTS)
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
    "fatal", ["tests/plan/test_a.py::test_38", "tests/plan/test_b.py::test_0", TESTS[-1], TESTS[0]]
)
def test_a_test_that_ends_its_process_runs_once_and_the_others_run_elsewhere(fatal: str, number: int) -> None:
    scheduler, processes = new_scheduler(number)
    ran: List[str] = []
    ended: List[str | None] = []
    while scheduler.nodes:
        runnable = [(process, index) for process in processes for index in [process.next_test()] if index >= 0]
        for process, index in runnable:
            ran.append(TESTS[index])
            if TESTS[index] == fatal:
                processes.remove(process)
                ended.append(scheduler.remove_node(process))
                processes.append(Process(f"gw{number}"))
                scheduler.add_node(processes[-1])
                scheduler.add_node_collection(processes[-1], TESTS)
                scheduler.schedule()
            else:
                scheduler.mark_test_complete(process, index)
        for process in [process for process in processes if process.shutting_down and not process.queue]:
            processes.remove(process)
            assert scheduler.remove_node(process) is None
        assert runnable or not scheduler.nodes, "all processes wait for the scheduler"
    assert (ended, sorted(ran)) == ([fatal], sorted(TESTS))
