"""The process of one instance: its environment, log file and warnings, and the thread that runs the instance.

`runtime/workers/ray.py` wraps it in a Ray actor. Nothing here may import torch or the SDK before the
environment is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from raypod.errors import CollectiveBroken, ConfigError, DeviceFailed, as_utf8, summarize_exception
from raypod.events import CallReport, EvaluationReport, HeartbeatReport, InstanceStarted
from raypod.plan import user_code
from raypod.plan.plan import Plan, Segment
from raypod.runtime.worker import collectives
from raypod.runtime.worker.environment import instance_environment, take_cores
from raypod.system import process, sdk, torchvision_import
from raypod.system.activity_record import ActivityRecord, Identity
from raypod.system.files import HeldFolder, open_to_append
from raypod.system.log_files import LastLine, LogTimes
from raypod.system.spans import recorder

if TYPE_CHECKING:
    from raypod.runtime.worker.instance import Instance
    from raypod.training.data.source import Source
    from raypod.training.tasks.task import Task


_REPORT_INTERVAL_S = 0.02  # faster calls are reported together: one Ray message takes longer than such a call


class InstanceProcess:
    """Sets up this process and runs one instance in it; the class of the Ray actor.

    The instance runs in a single thread that Python starts: torch keeps state per thread, and torch 2.0 can deadlock on
    the interpreter lock in the threads that Ray starts for an actor.
    """

    def __init__(self, plan: Plan, index: Optional[int], working_dir: str) -> None:
        """`index` is None for a standby, which is to `prepare`, and to `begin` as the instance that it replaces."""
        self._plan, self._index = plan, -1
        self._instance: Optional[Instance] = None
        self._sdk: Optional[sdk.Sdk] = None
        self._data: Optional[Tuple[Task, Source]] = None
        self._python_path = os.environ.get("PYTHONPATH", "")
        process.keep_freed_memory()
        os.chdir(working_dir)
        self._warnings = WarningRecord()
        self._thread = process.single_thread("instance")
        self._record = ActivityRecord()
        if index is not None:
            self.begin(index, "started")

    def begin(self, index: int, how: str) -> None:
        """Become an instance: use its log file, environment and cores. `how` is written to the log."""
        plan, self._index = self._plan, index
        _redirect_output(Path(plan.log_file(index)))
        self._run_dir = HeldFolder(Path(plan.run_dir))  # until the process ends
        self._log_times = LogTimes(Path(plan.log_file(index)))
        self._last_line = LastLine(Path(plan.log_file(index)))
        sys.stdout.write(f"{log_header(plan, index, str(os.getpid()))}{how} on {socket.gethostname()}\n")
        spec = plan.placement.instances[index]
        os.environ.update(instance_environment(plan, spec, self._python_path))
        take_cores(plan.placement, spec)  # before torch counts cores and starts threads
        if index == 0:  # all instances run the same code
            self._warnings.install()

    def prepare(self, host_index: int) -> None:
        """Import torch and the SDK and load the data, as a standby on a host of the plan."""
        spec = self._plan.placement.instances_on(host_index)[0]
        # What torch and the SDK read when they are imported is equal in all instances of a host.
        os.environ.update(instance_environment(self._plan, spec, self._python_path))
        self._thread.submit(_log_errors, self._prepare).result()

    def identity(self) -> Identity:
        """Return what identifies this process for the other processes of its host."""
        return self._record.identity

    def build(self) -> InstanceStarted:
        """Import torch and the SDK, and build the instance."""
        started: InstanceStarted = self._thread.submit(_log_errors, self._build).result()
        return started

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance in its thread, after its current work.

        Raises:
            CollectiveBroken: the method failed because another instance did.
        """
        return self._thread.submit(_log_errors, self._call, method, *arguments).result()

    def call_now(self, method: str, *arguments: Any) -> Any:
        """Call a thread-safe method of the instance (`pause`, `stop_after`, `reopen`) parallel to its current work."""
        return getattr(self._instance, method)(*arguments)

    def abort_collectives(self) -> None:
        """End the instance's waits for other instances. One that is not built yet has none."""
        if self._instance is not None:
            self._instance.abort_collectives()

    def beat(self) -> Optional[HeartbeatReport]:
        """Return the heartbeat of the instance; None while it is being built."""
        self._log_times.mark()
        if self._instance is None:
            return None
        return dataclasses.replace(self._instance.heartbeat.beat(), log_line=self._last_line.read())

    def clock(self) -> float:
        """Return the monotonic clock of this host, in seconds."""
        return time.monotonic()

    def stack(self) -> str:
        """Return the stack of the instance's thread, and write it to the log file."""
        stack = self._instance.heartbeat.stack() if self._instance is not None else ""
        sys.stderr.write(f"the coordinator requested the stack of instance {self._index}:\n{stack}\n")
        return stack

    def run(self, segment: Segment) -> Iterator[List[CallReport]]:
        """Run a segment; yield the reports, those of fast calls in one list.

        A report is sent at once unless another was sent just before: this process may die before it sends the others.
        """
        reports: queue.SimpleQueue[Optional[CallReport]] = queue.SimpleQueue()
        ran = self._thread.submit(_log_errors, self._run_into, reports, segment)
        ended, next_s = False, 0.0
        while not ended:
            together = [reports.get()]  # no timeout: the waits within the instance have timeouts
            time.sleep(max(0.0, next_s - time.monotonic()))
            next_s = time.monotonic() + _REPORT_INTERVAL_S
            with contextlib.suppress(queue.Empty):
                while True:
                    together.append(reports.get_nowait())
            ended = together[-1] is None
            yield [report for report in together if report is not None]
        ran.result()

    def environment(self) -> Dict[str, str]:
        """Return the environment of the process."""
        return dict(os.environ)

    def _prepare(self) -> None:
        torchvision_import.install()
        self._sdk = sdk.select(self._plan.config.run.device)
        from raypod.runtime.worker import instance  # imports torch and the selected SDK

        self._data = instance.load_data(self._plan)

    def _build(self) -> InstanceStarted:
        began = time.monotonic()
        torchvision_import.install()
        selected = self._sdk or sdk.select(self._plan.config.run.device)  # a standby has selected it
        placement = self._plan.placement
        host = placement.instances[self._index].host
        collectives.check_instance(self._plan.config.run.collectives, selected.has_ipus, placement, host)
        from raypod.runtime.worker.instance import Instance  # imports torch and the selected SDK

        imported_s = time.monotonic() - began
        instance = Instance(self._plan, self._index, selected)
        started = instance.build(self._data)
        instance.heartbeat.write_to(self._record)
        self._instance = instance
        sys.stdout.write(f"{selected.line}\n")
        started = dataclasses.replace(started, seconds=(("import torch and the SDK", imported_s), *started.seconds))
        recorder.add_steps(started.seconds, began)
        return started

    def _call(self, method: str, *arguments: Any) -> Any:
        assert self._instance is not None, "call build first"
        if method == "leave":  # for a repair, which answers the exception at the end of the log
            self._last_line.forget()
        with self._instance.heartbeat.set_activity(method), self._convert_peer_errors():
            result = getattr(self._instance, method)(*arguments)
        if isinstance(result, EvaluationReport):
            return dataclasses.replace(result, warnings=self._warnings.take())
        return result

    def _run_into(self, reports: queue.SimpleQueue[Optional[CallReport]], segment: Segment) -> None:
        assert self._instance is not None, "call build first"
        try:
            with self._convert_peer_errors():
                for report in self._instance.run(segment):
                    warned = self._warnings.take()
                    reports.put(dataclasses.replace(report, warnings=warned) if warned else report)
        finally:
            reports.put(None)

    @contextlib.contextmanager
    def _convert_peer_errors(self) -> Iterator[None]:
        """Raise errors that another instance caused as CollectiveBroken, so that this one is not reported as failed."""
        try:
            yield
        except Exception as error:
            action = collectives.device_failure(error)
            if action is not None and (action or self._plan.geometry.num_instances > 1):
                raise DeviceFailed(self._index, " ".join(str(error).split()), action) from error
            if self._plan.geometry.num_instances > 1 and collectives.caused_by_peer(error):
                raise CollectiveBroken(self._index, " ".join(str(error).split())) from error
            raise


def log_header(plan: Plan, index: int, pid: str) -> str:
    """Return the text with which the process `pid` of an instance begins its output in the log file."""
    return f"instance {index} of {plan.geometry.num_instances}, pid {pid}: "


def _log_errors(work: Callable[..., Any], *arguments: Any) -> Any:
    """Print the traceback of an error to the log file: the coordinator reports one line and the path of that file.

    The loss of another instance is no error of this one, and has one line.
    """
    try:
        return work(*arguments)
    except CollectiveBroken as error:
        sys.stderr.write(f"the collective with the other instances is broken: {_cause_of(error)}\n")
        raise
    except BaseException as error:
        user_code.record_place(error)
        traceback.print_exc()
        if as_utf8(traceback.format_exc()) != traceback.format_exc():  # Ray could not send it
            if isinstance(error, ConfigError):
                raise ConfigError(as_utf8(str(error))) from None
            raise RuntimeError(f"{summarize_exception(error)}{user_code.place_of(error)}") from None
        raise


def _cause_of(broken: CollectiveBroken) -> str:
    """Return the cause in one line, with the exception at the beginning of the chain that led to it."""
    error: BaseException = broken
    chain: List[BaseException] = [broken]
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or any(before is each for each in chain):
            break
        error = before
        chain.append(error)
    text = " ".join(str(error).split())
    is_known = error is broken or (text and text in broken.cause)
    return broken.cause if is_known else f"{broken.cause} ({summarize_exception(error)})"


def _redirect_output(path: Path) -> None:
    """Redirect stdout and stderr, also those of C++ code and of child processes, to the instance's log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_to_append(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout, sys.stderr = process.log_stream(1), process.log_stream(2)


_MOST = 10  # a warning of every sample would bury the rest of the output
_MOST_CHARACTERS = 500
_SDK_LOGGER = "poptorch::python"
# They are about future versions of a package, or about files that are closed late.
_IGNORED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)


class WarningRecord:
    """Collects the warnings of Python and of the SDK, each text once and at most 10. They are shown as before."""

    def __init__(self) -> None:
        self._known: Set[str] = set()
        self._new: List[str] = []
        self._lock = threading.Lock()  # replicas of the emulated SDK are threads

    def install(self) -> None:
        """Collect from now on, until the process ends."""
        show = warnings.showwarning

        def record_and_show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            if not issubclass(category, _IGNORED):
                self._add(f"{category.__name__}: {message}", is_of_python=True)
            show(message, category, filename, lineno, *rest, **more)

        warnings.showwarning = record_and_show
        logging.getLogger(_SDK_LOGGER).addFilter(self._record_of_sdk)

    def take(self) -> Tuple[str, ...]:
        """Return the warnings that are new since the previous call, each in one line."""
        with self._lock:
            taken, self._new = tuple(self._new), []
        return taken

    def _record_of_sdk(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            with contextlib.suppress(TypeError, ValueError):  # wrong arguments: the handler reports them
                self._add(record.getMessage())
        return True  # a filter: the record is written

    def _add(self, text: str, is_of_python: bool = False) -> None:
        text = " ".join(text.split())[:_MOST_CHARACTERS]
        with self._lock:
            if text in self._known or len(self._known) >= _MOST:
                return
            self._known.add(text)
        # The file of a warning of torch is mostly one of torch. The SDK's texts name the line.
        place = user_code.place_in(traceback.extract_stack()) if is_of_python else ""
        with self._lock:
            self._new.append(text + place)
