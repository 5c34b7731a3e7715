"""Which test process runs which test files, and in which order, for `pytest -n N --dist loadfile`.

Files that start Ray clusters run first, in at most two processes: on few cores more clusters at once exceed Ray's time
limits. The other processes run the other files meanwhile, the longest first, and all processes end with those.

A test that ends its process fails, and a new process runs the rest of its file. xdist's own `loadfile` waits without
end then: it assigns the files that the lost process had completed again, and waits for a test of them.
"""

from __future__ import annotations

from typing import Any, List, Tuple

from xdist.scheduler import LoadFileScheduling

MAX_CLUSTER_PROCESSES = 2
# Of the other files, those that take the longest.
LONG = ("tests/cli/slow/",)
# Its files emulate pods with the same addresses, so that they run one after the other.
ONE_AT_A_TIME = "tests/end_to_end/pod/"


def starts_clusters(scope: str) -> bool:
    """Return whether a file, or a folder in one piece, starts Ray clusters."""
    return scope.startswith("tests/end_to_end/") or "/ray/" in scope


class ClustersFirst(LoadFileScheduling):  # type: ignore[misc]
    """xdist's `loadfile` with the order of this module."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_AT_A_TIME if nodeid.startswith(ONE_AT_A_TIME) else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        """Assign the next file to a process; end the process if only files are left that it must not run."""
        running = [process for process in self.nodes if not process.shutting_down]
        may_start_clusters = node in running[:MAX_CLUSTER_PROCESSES]
        candidates = [scope for scope in self.workqueue if may_start_clusters or not starts_clusters(scope)]
        if not candidates:
            node.shutdown()
            return
        first = min(candidates, key=_rank)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
        if self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)  # it runs a test once it knows the next one, or that there is none

    def remove_node(self, node: Any) -> str | None:
        """Remove a process that has ended. Return the test that ended it; the tests after that run in another one."""
        left: List[Tuple[str, str]] = [
            (scope, test)
            for scope, unit in self.assigned_work.pop(node).items()
            for test, completed in unit.items()
            if not completed
        ]
        if not left:
            return None
        for scope, test in left[1:]:
            self.workqueue.setdefault(scope, {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0][1]


def _rank(scope: str) -> int:
    """Return 0 for emulated pods, which take the longest; then Ray clusters, long files, and the others."""
    return [scope.startswith(ONE_AT_A_TIME), starts_clusters(scope), scope.startswith(LONG), True].index(True)
