"""A fleet of one instance in this process, without Ray: breakpoints and output work as in a script."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from raypod.errors import InstanceFailed, RaypodError, RunError, summarize_exception
from raypod.events import CallReport, ClockReading, EvaluationReport, InstanceStarted
from raypod.plan import user_code
from raypod.plan.plan import Plan, Segment
from raypod.runtime.worker.environment import instance_environment
from raypod.runtime.workers.fleet import Beat, Family, Labels
from raypod.system import sdk, torchvision_import
from raypod.system.files import make_folder, open_to_append
from raypod.system.spans import recorder
from raypod.training.checkpoint.transfer import Server

if TYPE_CHECKING:
    from raypod.runtime.worker.instance import Instance


class _LoadingAbandoned(BaseException):
    """Ends a segment that waits for data: not an Exception, which a user's data set may handle."""


class InlineFleet:
    """Runs one instance in this process. See `Fleet` for the methods."""

    def __init__(self, plan: Plan) -> None:
        assert plan.geometry.num_instances == 1, "planning rejects an inline fleet of several instances"
        self._plan = plan
        self._instance: Optional[Instance] = None
        self._started: List[InstanceStarted] = []
        self.start_seconds: List[Tuple[str, float]] = []
        self._environment_before: Optional[Dict[str, str]] = None
        self._threads_before = 1  # intra-op threads of torch
        self._random_before: Any = None  # the state of torch's generator

    def start(self) -> List[InstanceStarted]:
        """Set the environment, select the SDK, and build the instance."""
        self._environment_before = dict(os.environ)
        self._threads_before = _num_threads()
        if "torch" in sys.modules:
            self._random_before = sys.modules["torch"].get_rng_state()
        python_path = os.environ.get("PYTHONPATH", "")
        os.environ.update(instance_environment(self._plan, self._plan.placement.instances[0], python_path))
        torchvision_import.install()
        found = sdk.select(self._plan.config.run.device)
        from raypod.runtime.worker.instance import Instance  # imports torch and the SDK: after the environment is set

        with self._failures():
            began_s = time.monotonic()
            self._instance = Instance(self._plan, 0, found)
            self._started = [self._instance.build()]
            recorder.add_steps(self._started[0].seconds, began_s)
            self._instance.join({})
        return self._started

    def call(self, method: str, *arguments: Any) -> List[Any]:
        assert self._instance is not None, "start comes first"
        with self._failures(), self._instance.heartbeat.set_activity(method):
            return [getattr(self._instance, method)(*arguments)]

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        assert self._instance is not None
        with self._failures(), contextlib.suppress(_LoadingAbandoned):
            for report in self._instance.run(segment):
                yield report
                if stop_requested():
                    return

    def abandon_loading(self) -> None:
        """See `Fleet.abandon_loading`. Interrupts the main thread, where the data is loaded."""
        if self._instance is not None and self._instance.heartbeat.is_loading:
            raise _LoadingAbandoned

    def evaluate(self, is_abandoned: Callable[[], bool]) -> Optional[List[EvaluationReport]]:
        assert self._instance is not None, "start comes first"
        with self._failures(), self._instance.heartbeat.set_activity("evaluate"):
            report = self._instance.evaluate(is_abandoned)
        return None if is_abandoned() else [report]

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """Not supported, and not called: this fleet does not raise FleetBroken."""
        raise RunError(f"instances {lost} run in this process and cannot be replaced")

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        return self.call_on(survivors, "leave")

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        return dict(zip(instances, self.call(method, *arguments)))

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        return False

    def hosts(self) -> List[str]:
        return [self._plan.placement.instances[0].host]

    def started(self) -> List[InstanceStarted]:
        return self._started

    def heartbeats(self) -> Dict[int, Beat]:
        instance = self._instance
        return {} if instance is None else {0: Beat(instance.heartbeat.beat(), time.monotonic())}

    def export_metrics(self, collect: Callable[[], Iterable[Family]], constant: Labels) -> None:
        """See `Fleet.export_metrics`. There is no exporter."""

    def clocks(self) -> Dict[int, ClockReading]:
        """See `Fleet.clocks`. This is one process."""
        return {0: ClockReading(0.0, 0.0)}

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> Server:
        """See `Fleet.serve`. The object is in this process, which is also the coordinator's."""
        return InlineServer(kind(*arguments))

    def peers(self) -> List[str]:
        """See `Fleet.peers`. There are no other hosts."""
        return []

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> Server:
        """Not supported, and not called: there are no `peers`."""
        raise RunError(f"the inline fleet starts no process on host {host}")

    def draining(self) -> List[str]:
        return []

    def close(self) -> None:
        """See `Fleet.close`. Restores the environment, and torch's number of threads and random state."""
        if self._instance is not None:
            self._instance.close()
            self._instance = None
        if self._environment_before is not None:
            os.environ.clear()
            os.environ.update(self._environment_before)
            self._environment_before = None
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self._threads_before)
            if self._random_before is not None:
                sys.modules["torch"].set_rng_state(self._random_before)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise an exception of the instance as InstanceFailed, with its traceback in the log file, as under Ray."""
        try:
            yield
        except RaypodError:
            raise
        except Exception as error:  # the SDK and the user's code can raise any exception
            log_file = Path(self._plan.log_file(0))
            with contextlib.suppress(OSError):  # the disk is full, for example; the message has the cause
                make_folder(log_file.parent)
                with os.fdopen(open_to_append(log_file), "a", encoding="utf-8", errors="backslashreplace") as log:
                    traceback.print_exc(file=log)
            host = self._plan.placement.instances[0].host
            cause = f"{summarize_exception(error)}{user_code.place_of(error)}"
            raise InstanceFailed(0, host, cause, str(log_file)) from error


def _num_threads() -> int:
    """Return the number of intra-op threads of torch in this process, or that of a later import."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) else len(os.sched_getaffinity(0))


class InlineServer:
    """A `checkpoint.transfer.Server` for an object of this process."""

    def __init__(self, served: Any) -> None:
        self._served = served

    def request(self, method: str, *arguments: Any) -> Any:
        """See `Server.request`; the method has ended when this returns."""
        return getattr(self._served, method)(*arguments)

    def result(self, handle: Any, timeout_s: float) -> Any:
        return handle

    def close(self) -> None:
        """See `Server.close`."""
