"""Which test process runs which test files, and in which order, for `pytest -n N --dist loadfile`.

Files that start Ray clusters run first, in at most two processes: on few cores more clusters at once exceed Ray's time
limits. The other processes run the other files meanwhile, the longest first, and all processes end with those.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

MAX_CLUSTER_PROCESSES = 2
# Beginnings of the names of the files that start Ray clusters, in the order in which they start: the longest first.
CLUSTERS = (
    *("tests/end_to_end/", "tests/test_launch", "tests/faults/", "tests/fleet/", "tests/api/"),
    *("tests/tasks/test_from_poprun", "tests/trained/test_evaluate_ray", "tests/status/test_prometheus_server"),
)
# Of the other files, those that take the longest.
LONG = ("tests/test_train_convergence",)
# Its files emulate pods with the same addresses, so that they run one after the other.
ONE_AT_A_TIME = "tests/end_to_end/"


def starts_clusters(scope: str) -> bool:
    """Return whether a file, or a folder in one piece, starts Ray clusters."""
    return scope.startswith(CLUSTERS)


class ClustersFirst(LoadFileScheduling):  # type: ignore[misc]
    """xdist's `loadfile` with the order of this module."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_AT_A_TIME if nodeid.startswith(ONE_AT_A_TIME) else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        """Assign the next file to a process; end the process if only files are left that it must not run."""
        may_start_clusters = node in self.nodes[:MAX_CLUSTER_PROCESSES]
        candidates = [scope for scope in self.workqueue if may_start_clusters or not starts_clusters(scope)]
        if not candidates:
            node.shutdown()
            return
        first = min(candidates, key=_rank)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def _rank(scope: str) -> int:
    """Return the position of the first entry of `CLUSTERS`, then of `LONG`, that a file matches."""
    starts = (*CLUSTERS, *LONG)
    return next((position for position, start in enumerate(starts) if scope.startswith(start)), len(starts))
