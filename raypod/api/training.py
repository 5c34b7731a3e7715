"""One training run: claim its folder, run the coordinator, write its files. The command line and `fit` both use it.

The end of a run whose run folder no longer takes its state: the newest one goes to `--storage-path` and to copies.

The coordinator saves it in a folder on another disk of this host (`runtime/coordinator/kept_state.py`). Here that gets
the files with which a run continues, and is passed on while the instances still run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Callable, ContextManager, Generator, Iterator, List, Optional, Sequence, Tuple

from raypod.api import planning
from raypod.api.media import logging_to
from raypod.errors import (
    ConfigError,
    DataUnreadable,
    FolderLost,
    HostLost,
    InstanceFailed,
    LeaseLost,
    RaypodError,
    UserError,
    summarize_exception,
)
from raypod.events import (
    TRAINS,
    CheckpointBegun,
    CheckpointSaved,
    Event,
    PhaseBegun,
    RunStarted,
)
from raypod.observe.status import prometheus
from raypod.observe.status.endpoint import cached_route, served, snapshot_route
from raypod.observe.status.run_status import RunStatus
from raypod.observe.status.token_server import check_port
from raypod.observe.trackers.companions import TrackerProcesses
from raypod.plan.plan import Plan, rounding_of, window_of
from raypod.plan.tables import topology_summary
from raypod.runs import claim, run_folder, run_state, verify_data
from raypod.runs.callback import Callback, Reporter, UploadTarget
from raypod.runs.event_log import EventLog, restarts_in
from raypod.runs.lease import Log
from raypod.runs.media import Kind, Media
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.profile import ProfileSource, ProfileWriter
from raypod.runs.run_folder import CoordinatorLogTimes
from raypod.runs.sinks import Sinks
from raypod.runs.upload.copies import CheckpointCopies
from raypod.runs.upload.mirror import Mirror
from raypod.runs.upload.restore import restore
from raypod.runtime.coordinator import coordinator
from raypod.runtime.coordinator.kept_state import Elsewhere
from raypod.runtime.coordinator.stop import Stop, deadline_of, early_stop
from raypod.runtime.workers.choice import fleet_for
from raypod.runtime.workers.fleet import Fleet
from raypod.system.signals import on_abort
from raypod.training.checkpoint import resume, weights_file


@dataclasses.dataclass(frozen=True)
class Claimed:
    """A plan whose run folder is claimed, the checkpoint from which it resumes, and the requested memory format."""

    plan: Plan
    claim: claim.Claim
    found: Optional[resume.ResumePoint]
    memory_format: str


@contextlib.contextmanager
def claimed(
    plan: Plan, log: Log, take_over: bool = False, owner: Optional[str] = None, verify: bool = True
) -> Iterator[Claimed]:
    """Claim the run folder of a plan within the context.

    Args:
        plan: the plan.
        log: receives lines about waits, and about where the run begins.
        take_over: end another run that uses the folder.
        owner: of the lease that the parent process has handed over.
        verify: verify the files of the checkpoint from which the run resumes, or with whose weights it starts.

    Raises:
        UserError: the folder or the port of the status endpoint is in use, the folder holds something else, or the run
            cannot resume or start on this host.
    """
    planning.check_host(plan)
    if owner is not None:
        held = claim.adopt(plan.run_dir, owner, log)
    else:
        held = claim.claim(plan.config, plan.run_dir, take_over, log)
    with held:
        check_port(plan.config.run.status_port)  # here, so that also `--detach` finds it before it starts a process
        plan = restore(dataclasses.replace(plan, run_dir=str(held.folder)), held, log)
        resumes, memory_format = plan.config.run.resume, plan.config.training.memory_format
        plan, found = resume_point(plan, verify)
        if found is None and not resumes and run_folder.has_lost_checkpoints(held.folder):
            log(
                f"warning: {plan.run_dir} has none of the checkpoints that it wrote: the interrupted run begins again "
                "from update 0"
            )
        if found is not None and resumes and resumes != plan.config.run.resume:
            log(
                f"{plan.run_dir} began from {resumes} already: continuing from {found.checkpoint.path.name}; to begin "
                "again, use another --run-dir"
            )
        yield Claimed(plan, held, found, memory_format)


def resume_point(plan: Plan, verify: bool = True) -> Tuple[Plan, Optional[resume.ResumePoint]]:
    """Return the plan, changed to resume an interrupted run in its folder, and the checkpoint from which it resumes.

    Raises:
        ConfigError: the run cannot resume, or its folder holds something else.
    """
    was_cut_off, found = run_state.is_unfinished(Path(plan.run_dir)), None
    resumes = bool(plan.config.run.resume)
    if was_cut_off and (not resumes or run_folder.continues(plan)):
        plan, found = resume.resume_interrupted(plan, verify)
        resumes = resumes and found is None  # there is no checkpoint yet: from the one that the command names
    if resumes:
        found = resume.find_checkpoint(plan, was_cut_off, verify)
        stopped = early_stop(plan, run_folder.evaluations_until(plan, found.checkpoint.update))
        if stopped is not None and not was_cut_off:
            raise ConfigError(
                f"--resume {plan.config.run.resume}: the run has stopped early after update {stopped.update}: "
                f"{stopped.reason}; continue it with another --early-stopping"
            )
    if found is None:
        weights_file.check_on_head(plan, verify)
    else:
        plan = resume.in_recorded_format(plan, found.checkpoint.manifest)
    run_folder.check_may_write(plan)
    return plan, found


class Training:
    """Runs a claimed plan, and records it in its folder."""

    def __init__(
        self,
        run: Claimed,
        reporter: Reporter,
        stop: Stop,
        started_at_s: Optional[float] = None,
        callbacks: Optional[Callback] = None,
    ) -> None:
        """`started_at_s` is the monotonic time from which the times of the run count; default: now.

        `callbacks` are those of the user.
        """
        self._run, self._reporter, self._stop, self._user = run, reporter, stop, callbacks or Callback()
        resumed = run.found.checkpoint if run.found else None
        self._known = run_folder.evaluations_until(run.plan, resumed.update if resumed else 0)
        self._restarts_before = restarts_in(run.claim.folder)
        self._started_at_s = time.monotonic() if started_at_s is None else started_at_s
        self.metrics = MetricsAggregator(run.plan, self._started_at_s)
        self._elsewhere = Elsewhere(run.plan)
        self._callbacks: List[Callback] = []
        self._sinks: Optional[Sinks] = None
        self._update = resumed.update if resumed else 0
        self._has_trained = False

    def events(self) -> Generator[Event, None, None]:
        """Yield the events of the run, and write its files: after the last event `summary.json` and `report.html`.

        If the generator is closed before its end, or a callback of the user fails, the run stops after the current
        call, with a checkpoint.
        """
        plan, lease, is_closed = self._run.plan, self._run.claim.lease, False
        failure: Optional[BaseException] = None
        self._stop.configure(plan.config.run)
        run_folder.create(plan, self._run.memory_format)
        self._run.claim.note_written()
        with contextlib.ExitStack() as stack:
            stack.enter_context(deadline_of(self._stop))
            stack.enter_context(on_abort(lambda error: lease.abandon()))
            parts, events = self._parts(fleet_for(plan, self._reporter.print_line))
            self._callbacks += [each for each in parts if isinstance(each, Callback)]
            for part in reversed(parts):
                stack.enter_context(part)
            self._show_notes()
            for event in self._checked(events):
                self._record(event)
                if is_closed:
                    continue
                try:
                    with logging_to(self._log_media):
                        self._user.on_event(event)
                    yield event
                except BaseException as error:  # noqa: BLE001 - from here on the generator must not yield
                    is_closed, failure = True, None if isinstance(error, GeneratorExit) else error
                    self._stop.request("the stream of events was closed")
        if failure is not None:
            raise failure

    def _parts(self, fleet: Fleet) -> Tuple[List[ContextManager[object]], coordinator.Events]:
        """Return what follows the run, and the events of its coordinator.

        All are contexts, entered last to first, and left first to last: the mirror sees all files. Those that are
        callbacks get each event, first to last; those of the user come after them.
        """
        plan, folder, lease, stop = self._run.plan, self._run.claim.folder, self._run.claim.lease, self._stop
        reporter, warn, print_line = self._reporter, self._reporter.warn, self._reporter.print_line
        status = self._view = RunStatus(plan, fleet.heartbeats, self._known)
        copies = CheckpointCopies(plan, fleet, warn, print_line, stop.seconds_left)
        mirror, sinks = Mirror(plan, warn, print_line, stop.seconds_left), Sinks(plan, warn)
        self._sinks = sinks
        resumed = self._run.found.checkpoint if self._run.found else None
        known, elsewhere = self._known, self._elsewhere
        events = coordinator.run(plan, fleet, self.metrics, resumed, known, stop, copies, elsewhere)
        fleet.export_metrics(lambda: prometheus.started_families(status), prometheus.run_label(plan.run_dir))
        metrics = cached_route(lambda: prometheus.scrape_response(status))
        routes = {"/status": snapshot_route(status.snapshot), "/metrics": metrics}
        state = run_state.StateFile(folder, status, stop.exit_code)
        window, source = window_of(plan), ProfileSource(fleet.clocks, lambda: fleet.call("take_profile"))
        started_unix_s = time.time() - (time.monotonic() - self._started_at_s)
        conclusion = contextlib.ExitStack()
        conclusion.push(self._show_way_on)
        conclusion.push(self._write_report)
        return [
            lease.interrupting(),
            contextlib.closing(events),
            status,
            sinks,
            reporter,
            self._summarized(copies),
            *([ProfileWriter(plan, window, source, warn, self._started_at_s)] if window is not None else []),
            EventLog(folder, {"total_updates": plan.total_updates, **topology_summary(plan)}, warn),
            served(routes, folder, plan.config.run.status_port, state),
            CoordinatorLogTimes(folder),
            state,
            Rescue(self._run, elsewhere, copies, mirror, warn, self._callbacks),
            conclusion,
            TrackerProcesses(plan, warn, print_line, started_unix_s, stop.seconds_left),
            mirror,
        ], events

    def _log_media(self, kind: Kind, name: str, content: bytes) -> None:
        """Write a picture or a text of a callback, which gets the newest event."""
        if self._sinks is not None:
            self._sinks.add_media(Media(kind, name, self._update, content))

    def _checked(self, events: coordinator.Events) -> Iterator[Event]:
        """Yield the events, and check the run folder; a lost one is thrown into them before something is begun in it.

        Then no call is in progress, so that the newest state can be saved elsewhere.
        """
        lease = self._run.claim.lease
        lost: Optional[FolderLost] = None
        while True:
            try:
                event = next(events) if lost is None else events.throw(lost)
            except StopIteration:
                return
            lost = None
            lease.check()
            if isinstance(event, CheckpointBegun) or (isinstance(event, PhaseBegun) and event.phase == "repairing"):
                try:
                    lease.check_folder()
                except FolderLost as error:
                    self._leave_folder(error)
                    lost = error
                    continue
            yield event

    def _show_notes(self) -> None:
        """Show what the user should know before the run starts."""
        plan, found, reporter = self._run.plan, self._run.found, self._reporter
        rounding = rounding_of(plan)
        if rounding is not None:
            reporter.print_line(rounding)
        for damaged in found.damaged if found else ():
            reporter.warn(f"{damaged}; resuming from {found.checkpoint.path.name if found else ''}")
        lost = verify_data.lost_lines(plan, found.checkpoint) if found else None
        if lost is not None:
            reporter.warn(lost)

    @contextlib.contextmanager
    def _summarized(self, copies: CheckpointCopies) -> Iterator[None]:
        """Write `summary.json` after a run that has ended without an error."""
        yield
        self._run.claim.lease.check_folder()
        run_folder.write_summary(self._run.plan, self.metrics, self._view, copies.summary(), self._restarts_before)

    def _record(self, event: Event) -> None:
        if isinstance(event, TRAINS) and not self._has_trained:
            self._has_trained = True
            self._run.claim.keep()
        if isinstance(event, RunStarted) and self._elsewhere.is_wanted:
            self._run.claim.lease.on_folder_lost = self._leave_folder
        self._update = getattr(event, "update", self._update)
        for callback in self._callbacks:
            callback.on_event(event)

    def _leave_folder(self, lost: FolderLost) -> None:
        """End the calls in progress: then the state is saved elsewhere. Called in the thread of the lease."""
        self._stop.request(f"{lost.folder} is lost")

    def _show_way_on(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        """Show how a run that has failed continues, unless its error says that."""
        saved = self._view.checkpoint
        if saved is not None and isinstance(error, (UserError, InstanceFailed, HostLost, DataUnreadable)):
            way_on = f"continue with --resume {self._run.claim.folder}"
            self._reporter.print_line(f"update {saved.update} is saved in {Path(saved.path).name}: {way_on}")

    def _write_report(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        """Write `report.html`, also for a run that failed or was interrupted. If that fails, the run has a warning."""
        is_users_mistake = isinstance(error, UserError) and not self._has_trained
        if is_users_mistake or isinstance(error, LeaseLost):  # the folder is restored, or another process has it
            return
        from raypod.observe.report.command import write_report

        try:
            write_report(self._run.claim.folder)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the run has ended as it has
            self._reporter.warn(f"the report was not written: {summarize_exception(failure)}")


class Rescue(Callback):
    """Passes the newest state of a run on to its upload targets if it is in another folder than that of the run.

    It passes all other events to `copies`. The `callbacks` write the files of the run folder.
    """

    def __init__(
        self,
        run: Claimed,
        elsewhere: Elsewhere,
        copies: UploadTarget,
        mirror: UploadTarget,
        warn: Callable[[str], None],
        callbacks: Sequence[Callback],
    ) -> None:
        self._run, self._elsewhere, self._copies, self._mirror = run, elsewhere, copies, mirror
        self._warn, self._callbacks = warn, callbacks

    def on_event(self, event: Event) -> None:
        """Keep copies of each checkpoint; pass on the one that is not in the run folder."""
        if not isinstance(event, CheckpointSaved) or not self._elsewhere.holds(event.path):
            self._copies.on_event(event)
            return
        folder = self._elsewhere.folder()
        try:
            self._write_files(folder)
        except (OSError, RaypodError) as error:
            self._warn(f"{folder} lacks files of the run: {error}")
        hints = [each.send_from(folder, Path(event.path)) for each in (self._copies, self._mirror)]
        held = [hint for hint in hints if hint]
        hint = held[-1] if held else f": continue with --resume {folder}"
        self._elsewhere.way_on = f"the state of update {event.update} is saved{hint}"
        if held:
            self._elsewhere.remove()

    def _write_files(self, folder: Path) -> None:
        run_folder.create(dataclasses.replace(self._run.plan, run_dir=str(folder)), self._run.memory_format)
        for each in (*reversed(self._callbacks), self._copies):
            each.copy_to(folder)
