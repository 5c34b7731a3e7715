"""What lives in an actor's process: first its environment and its log file, then the instance.

Plain Python; `fleet/ray.py` wraps it where it starts actors. Nothing here may import torch or the SDK before the
environment stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional

from raypod import allocator
from raypod.devices import misfit_of
from raypod.environment import instance_environment
from raypod.errors import ClusterError
from raypod.events import CallReport, InstanceStarted
from raypod.numa import bind_process, cpus_of_node
from raypod.plan import Leg, Plan

if TYPE_CHECKING:
    from raypod.instance import Instance

_REPORT_EVERY_S = 0.02  # reports of faster calls travel together: a message costs more than such a call


class InstanceProcess:
    """Owns the process of one instance.

    The instance lives in one thread of Python's own for its whole life: what torch keeps per thread stays with it, and
    torch 2.0 can deadlock on the interpreter lock in the threads that Ray makes for an actor.
    """

    def __init__(self, plan: Plan, index: int, working_dir: str) -> None:
        self._plan, self._index = plan, index
        self._instance: Instance
        allocator.keep_freed_memory()
        os.chdir(working_dir)
        _write_output_to(Path(plan.log_file(index)))
        cpus = cpus_of_node(plan.instances[index].local_index) if plan.placement.binds_numa else None
        if cpus is not None:  # before torch counts cores and starts threads
            bind_process(cpus)
        python_path = os.environ.get("PYTHONPATH", "")
        os.environ.update(instance_environment(plan, plan.instances[index], python_path))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instance")

    def build(self) -> InstanceStarted:
        """Import torch and the SDK, and build the instance."""
        started: InstanceStarted = self._thread.submit(_traced, self._build).result()
        return started

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance, after what it is doing."""
        return self._thread.submit(_traced, getattr(self._instance, method), *arguments).result()

    def call_now(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance beside what it is doing: `pause` and `stop_after` are made for it."""
        return getattr(self._instance, method)(*arguments)

    def run(self, leg: Leg) -> Iterator[List[CallReport]]:
        """Run a leg; the reports, those of quick calls together."""
        reports: queue.SimpleQueue[Optional[CallReport]] = queue.SimpleQueue()
        ran = self._thread.submit(_traced, self._run_into, reports, leg)
        ended = False
        while not ended:
            together = [reports.get()]  # bounded by what the instance itself waits for
            time.sleep(_REPORT_EVERY_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    together.append(reports.get_nowait())
            ended = together[-1] is None
            yield [report for report in together if report is not None]
        ran.result()

    def _build(self) -> InstanceStarted:
        began = time.monotonic()
        from raypod import collectives, sdk, torchvision_import

        torchvision_import.install()
        found = sdk.select(self._plan.config.run.device)
        collectives.check_available(self._plan.config.run.collectives)
        partition = self._plan.cluster.vipu if found.has_ipus else None
        misfit = misfit_of(partition, self._plan.placement) if partition else None
        if misfit:
            raise ClusterError(misfit)
        from raypod.instance import Instance

        imported_s = time.monotonic() - began
        self._instance = Instance(self._plan, self._index, found)
        started = self._instance.build()
        of = self._plan.geometry.num_instances
        sys.stdout.write(f"instance {self._index} of {of}, pid {os.getpid()}: {found.line}\n")
        return dataclasses.replace(started, seconds=(("import torch and the SDK", imported_s), *started.seconds))

    def _run_into(self, reports: queue.SimpleQueue[Optional[CallReport]], leg: Leg) -> None:
        try:
            for report in self._instance.run(leg):
                reports.put(report)
        finally:
            reports.put(None)

    def environment(self) -> Dict[str, str]:
        """The process's environment, for a look from outside."""
        return dict(os.environ)


def _traced(work: Callable[..., Any], *arguments: Any) -> Any:
    """What fails here is told in one line elsewhere; the log file that the line names has the whole of it."""
    try:
        return work(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


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
