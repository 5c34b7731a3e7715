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
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

from raypod.errors import ClusterError, CollectiveBroken
from raypod.events import Beat, CallReport, InstanceStarted
from raypod.host import process
from raypod.host.process import bind_process, cpus_of_node, ticks_of
from raypod.plan.environment import instance_environment
from raypod.plan.placement import misfit_of
from raypod.plan.plan import Leg, Plan

if TYPE_CHECKING:
    from raypod.instance.instance import Instance

_REPORT_EVERY_S = 0.02  # reports of faster calls travel together: a message costs more than such a call


class InstanceProcess:
    """Owns the process of one instance.

    The instance lives in one thread of Python's own for its whole life: what torch keeps per thread stays with it, and
    torch 2.0 can deadlock on the interpreter lock in the threads that Ray makes for an actor.
    """

    def __init__(self, plan: Plan, index: int, working_dir: str) -> None:
        self._plan, self._index = plan, index
        self._instance: Optional[Instance] = None
        process.keep_freed_memory()
        os.chdir(working_dir)
        _write_output_to(Path(plan.log_file(index)))
        cpus = cpus_of_node(plan.instances[index].local_index) if plan.placement.binds_numa else None
        if cpus is not None:  # before torch counts cores and starts threads
            bind_process(cpus)
        python_path = os.environ.get("PYTHONPATH", "")
        os.environ.update(instance_environment(plan, plan.instances[index], python_path))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instance")

    def identity(self) -> Tuple[int, int]:
        """The pid of this process, and when it began (`record/run_state.py`): enough to end it from outside."""
        return os.getpid(), ticks_of(os.getpid()) or 0

    def build(self) -> InstanceStarted:
        """Import torch and the SDK, and build the instance."""
        started: InstanceStarted = self._thread.submit(_traced, self._build).result()
        return started

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance, after what it is doing.

        Raises:
            CollectiveBroken: it failed because another instance did.
        """
        return self._thread.submit(_traced, self._call, method, *arguments).result()

    def call_now(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance beside what it is doing: `pause` and `stop_after` are made for it."""
        return getattr(self._instance, method)(*arguments)

    def abandon(self) -> None:
        """Free the instance from waiting for others; one that is still being built waits for nobody."""
        if self._instance is not None:
            self._instance.abandon()

    def beat(self) -> Optional[Beat]:
        """What the instance is doing; None while it is being built."""
        return self._instance.pulse.beat() if self._instance is not None else None

    def stack(self) -> str:
        """Where the instance's thread is, and into the log file with it."""
        told = self._instance.pulse.stack() if self._instance is not None else ""
        sys.stderr.write(f"the coordinator asks where instance {self._index} is:\n{told}\n")
        return told

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
        from raypod.host import sdk, torchvision_import
        from raypod.instance import collectives

        torchvision_import.install()
        found = sdk.select(self._plan.config.run.device)
        collectives.check_available(self._plan.config.run.collectives)
        partition = self._plan.cluster.vipu if found.has_ipus else None
        misfit = misfit_of(partition, self._plan.placement) if partition else None
        if misfit:
            raise ClusterError(misfit)
        from raypod.instance.instance import Instance

        imported_s = time.monotonic() - began
        instance = Instance(self._plan, self._index, found)
        started = instance.build()
        self._instance = instance
        of = self._plan.geometry.num_instances
        sys.stdout.write(f"instance {self._index} of {of}, pid {os.getpid()}: {found.line}\n")
        return dataclasses.replace(started, seconds=(("import torch and the SDK", imported_s), *started.seconds))

    def _call(self, method: str, *arguments: Any) -> Any:
        assert self._instance is not None, "build comes first"
        with self._instance.pulse.doing(method), self._blaming_others():
            return getattr(self._instance, method)(*arguments)

    def _run_into(self, reports: queue.SimpleQueue[Optional[CallReport]], leg: Leg) -> None:
        assert self._instance is not None, "build comes first"
        try:
            with self._blaming_others():
                for report in self._instance.run(leg):
                    reports.put(report)
        finally:
            reports.put(None)

    @contextlib.contextmanager
    def _blaming_others(self) -> Iterator[None]:
        """What fails because another instance failed is told as that: it is not the cause."""
        from raypod.instance import collectives

        try:
            yield
        except Exception as error:
            if collectives.is_a_peers(error):
                raise CollectiveBroken(self._index, " ".join(str(error).split())) from error
            raise

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
