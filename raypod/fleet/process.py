"""What lives in an actor's process: first its environment and its log file, then the instance.

Plain Python; `fleet/ray.py` wraps it where it starts actors. Nothing here may import torch or the SDK before the
environment stands.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List

from raypod.environment import instance_environment
from raypod.events import CallReport, InstanceStarted
from raypod.plan import Leg, Plan

if TYPE_CHECKING:
    from raypod.instance import Instance

_REPORT_EVERY_S = 0.02  # reports of faster calls travel together: a message costs more than such a call


class InstanceProcess:
    """Owns the process of one instance."""

    def __init__(self, plan: Plan, index: int, working_dir: str) -> None:
        self._plan, self._index = plan, index
        self._instance: Instance
        os.chdir(working_dir)
        _write_output_to(Path(plan.log_file(index)))
        python_path = os.environ.get("PYTHONPATH", "")
        os.environ.update(instance_environment(plan, plan.instances[index], python_path))

    def build(self) -> InstanceStarted:
        """Import torch and the SDK, and build the instance."""
        began = time.monotonic()
        from raypod import collectives, sdk, torchvision_import

        torchvision_import.install()
        found = sdk.select(self._plan.config.run.device)
        collectives.check_available(self._plan.config.run.collectives)
        from raypod.instance import Instance

        imported_s = time.monotonic() - began
        self._instance = Instance(self._plan, self._index, found)
        started = self._instance.build()
        of = self._plan.geometry.num_instances
        sys.stdout.write(f"instance {self._index} of {of}, pid {os.getpid()}: {found.line}\n")
        return InstanceStarted(
            **{**vars(started), "seconds": (("import torch and the SDK", imported_s), *started.seconds)}
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance."""
        return getattr(self._instance, method)(*arguments)

    def run(self, leg: Leg) -> Iterator[List[CallReport]]:
        """Run a leg; the reports, those of quick calls together."""
        waiting: List[CallReport] = []
        sent_s = time.monotonic()
        for report in self._instance.run(leg):
            waiting.append(report)
            if time.monotonic() - sent_s >= _REPORT_EVERY_S:
                yield waiting
                waiting, sent_s = [], time.monotonic()
        if waiting:
            yield waiting

    def environment(self) -> Dict[str, str]:
        """The process's environment, for a look from outside."""
        return dict(os.environ)


def _write_output_to(path: Path) -> None:
    """Point the process's stdout and stderr, also those of C++ and of child processes, at the instance's log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
