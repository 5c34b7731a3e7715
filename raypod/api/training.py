"""One training run: claim its folder, run the coordinator, write its files. The command line and `fit` both use it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Generator, Iterator, List, Optional, Sequence, Tuple

from typing_extensions import Protocol

from raypod.api import planning
from raypod.api.rescue import Part, Rescue
from raypod.errors import (
    ConfigError,
    DataUnreadable,
    FolderLost,
    HostLost,
    InstanceFailed,
    LeaseLost,
    UserError,
    summarize_exception,
)
from raypod.events import (
    CheckpointBegun,
    Event,
    InstanceWarned,
    PhaseBegun,
    RunStarted,
)
from raypod.observe.status import prometheus
from raypod.observe.status.endpoint import cached_route, served, snapshot_route
from raypod.observe.status.run_status import RunStatus
from raypod.observe.status.token_server import check_port
from raypod.observe.trackers.processes import TrackerProcesses
from raypod.plan.plan import Plan
from raypod.plan.profile_window import rounding_of, window_of
from raypod.plan.tables import topology_summary
from raypod.runs import claim, origin, run_folder, run_state, verify_data
from raypod.runs.coordinator_log import CoordinatorLogTimes
from raypod.runs.event_log import EventLog, restarts_in
from raypod.runs.lease_file import Log
from raypod.runs.media import Kind, Media
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.profile import ProfileSource, ProfileWriter
from raypod.runs.run_view import RunView
from raypod.runs.sinks import Sinks
from raypod.runs.upload.mirror import Mirror
from raypod.runs.upload.restore import restore
from raypod.runtime.coordinator import coordinator
from raypod.runtime.coordinator.checkpoint_copies import CheckpointCopies
from raypod.runtime.coordinator.kept_state import Elsewhere
from raypod.runtime.coordinator.stop import Stop, deadline_of, early_stop
from raypod.runtime.workers.choice import fleet_for
from raypod.runtime.workers.fleet import Fleet
from raypod.system.abort import on_abort
from raypod.training.checkpoint import resume, weights_file


class Reporter(Protocol):
    """What shows a run to the user: `record.progress.Progress`, or `LogReporter`."""

    def begin(self) -> None:
        """Show the plan, before anything is started."""

    def show(self, event: Event) -> None:
        """Show one event."""

    def warn(self, text: str) -> None:
        """Show a warning."""

    def print_line(self, text: str) -> None:
        """Show a line, for example about a wait."""

    def close(self) -> None:
        """End the display."""


class Recorder(Protocol):
    """What records the events of a run."""

    def handle(self, event: Event) -> None:
        """Record one event."""


class LogReporter:
    """Shows nothing of a run except its warnings, which go to the logger `raypod`."""

    def begin(self) -> None:
        """See `Reporter.begin`."""

    def show(self, event: Event) -> None:
        """See `Reporter.show`."""

    def warn(self, text: str) -> None:
        """See `Reporter.warn`."""
        logging.getLogger("raypod").warning("%s", text)

    def print_line(self, text: str) -> None:
        """See `Reporter.print_line`."""
        logging.getLogger("raypod").info("%s", text)

    def close(self) -> None:
        """See `Reporter.close`."""


@dataclasses.dataclass(frozen=True)
class Claimed:
    """A plan whose run folder is claimed, and the checkpoint from which it resumes."""

    plan: Plan
    claim: claim.Claim
    found: Optional[resume.ResumePoint]


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
        resumes = plan.config.run.resume
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
        yield Claimed(plan, held, found)


def resume_point(plan: Plan, verify: bool = True) -> Tuple[Plan, Optional[resume.ResumePoint]]:
    """Return the plan, changed to resume an interrupted run in its folder, and the checkpoint from which it resumes.

    Raises:
        ConfigError: the run cannot resume, or its folder holds something else.
    """
    was_cut_off, found = run_state.is_unfinished(Path(plan.run_dir)), None
    resumes = bool(plan.config.run.resume)
    if was_cut_off and (not resumes or origin.continues(plan)):
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

    def __init__(self, run: Claimed, reporter: Reporter, stop: Stop, started_at_s: Optional[float] = None) -> None:
        """`started_at_s` is the monotonic time from which the times of the run count; default: now."""
        self._run, self._reporter, self._stop = run, reporter, stop
        resumed = run.found.checkpoint if run.found else None
        self._known = run_folder.evaluations_until(run.plan, resumed.update if resumed else 0)
        self._restarts_before = restarts_in(run.claim.folder)
        self._view = RunView(run.plan, self._known)
        self._started_at_s = time.monotonic() if started_at_s is None else started_at_s
        self._started_unix_s = time.time() - (time.monotonic() - self._started_at_s)
        self.metrics = MetricsAggregator(run.plan, self._started_at_s)
        self._elsewhere = Elsewhere(run.plan)
        self._sinks: Optional[Sinks] = None
        self._update = resumed.update if resumed else 0

    def events(self) -> Generator[Event, None, None]:
        """Yield the events of the run, and write its files: after the last event `summary.json` and `report.html`.

        If the generator is closed before its end, the run stops after the current call, with a checkpoint.
        """
        plan, lease, is_closed = self._run.plan, self._run.claim.lease, False
        self._stop.configure(plan.config.run)
        run_folder.create(plan)
        self._run.claim.note_written()
        with contextlib.ExitStack() as stack:
            stack.enter_context(deadline_of(self._stop))
            stack.enter_context(on_abort(lambda error: lease.abandon()))
            mirror = stack.enter_context(Mirror(plan, self._reporter.warn, self._reporter.print_line))
            trackers = stack.enter_context(TrackerProcesses(plan, self._reporter.warn, self._started_unix_s))
            stack.push(self._show_way_on)
            stack.push(self._write_report)  # the last step before that of the trackers: it reads the other files
            fleet = fleet_for(plan, self._reporter.print_line)
            status = self._view = RunStatus(plan, fleet.heartbeats, self._known)
            warn, print_line = self._reporter.warn, self._reporter.print_line
            copies = CheckpointCopies(plan, fleet, warn, print_line, self._stop.seconds_left)
            rescue = Rescue(plan, self._elsewhere, mirror, copies, warn)
            recorders = [*self._recorders(fleet, status, stack, rescue.parts), trackers, mirror, rescue]
            with self._opened(fleet, copies) as (events, sinks):
                rescue.parts.append(sinks)
                self._sinks = sinks
                for event in self._checked(events):
                    self._record(event, [sinks, *recorders])
                    if is_closed:
                        continue
                    try:
                        yield event
                    except GeneratorExit:  # from here on the generator must not yield
                        is_closed = True
                        self._stop.request("the stream of events was closed")
            lease.check_folder()
            more = copies.summary()
            before = self._restarts_before
            run_folder.write_summary(plan, self.metrics, self._view, more, before)

    def log_media(self, kind: Kind, name: str, content: bytes) -> None:
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

    def _recorders(
        self, fleet: Fleet, status: RunStatus, stack: contextlib.ExitStack, parts: List[Part]
    ) -> Iterator[Recorder]:
        """Open what shows the run to other processes: `state.json`, the status endpoint and `events.jsonl`.

        `parts` gets the writers of the two files.
        """
        plan, folder = self._run.plan, self._run.claim.folder
        state = stack.enter_context(run_state.StateFile(folder, status, self._stop.exit_code))
        parts.append(state)
        yield state
        yield CoordinatorLogTimes(folder)
        fleet.export_metrics(lambda: prometheus.started_families(status), prometheus.run_label(plan.run_dir))
        metrics = cached_route(lambda: prometheus.scrape_response(status))
        routes = {"/status": snapshot_route(status.snapshot), "/metrics": metrics}
        stack.enter_context(served(routes, folder, plan.config.run.status_port, state))
        counts = {"total_updates": plan.total_updates, **topology_summary(plan)}
        log = stack.enter_context(EventLog(folder, counts, self._reporter.warn))
        parts.append(log)
        yield log
        window = window_of(plan)
        if window is not None:
            source = ProfileSource(fleet.clocks, lambda: fleet.call("take_profile"))
            warn, started_at_s = self._reporter.warn, self._started_at_s
            yield stack.enter_context(ProfileWriter(plan, window, source, warn, started_at_s))

    @contextlib.contextmanager
    def _opened(self, fleet: Fleet, copies: CheckpointCopies) -> Iterator[Tuple[coordinator.Events, Sinks]]:
        """Yield the events of the coordinator, and the files that record them."""
        plan, found, reporter = self._run.plan, self._run.found, self._reporter
        reporter.begin()
        rounding = rounding_of(plan)
        if rounding is not None:
            reporter.print_line(rounding)
        resumed = found.checkpoint if found else None
        for damaged in found.damaged if found else ():
            reporter.warn(f"{damaged}; resuming from {resumed.path.name if resumed else ''}")
        lost = verify_data.lost_lines(plan, resumed) if resumed else None
        if lost is not None:
            reporter.warn(lost)
        with contextlib.ExitStack() as stack:
            stack.callback(reporter.close)
            sinks = stack.enter_context(Sinks(plan, reporter.warn))
            events = coordinator.run(
                plan, fleet, self.metrics, resumed, self._known, self._stop, copies, self._elsewhere
            )
            stack.enter_context(contextlib.closing(events))
            stack.enter_context(self._run.claim.lease.interrupting())
            yield events, sinks

    def _record(self, event: Event, recorders: Sequence[Recorder]) -> None:
        if isinstance(event, RunStarted):
            self._run.claim.keep()
            if self._elsewhere.is_wanted:
                self._run.claim.lease.on_folder_lost = self._leave_folder
        self._update = getattr(event, "update", self._update)
        self._view.handle(event)
        for recorder in recorders:
            recorder.handle(event)
        if isinstance(event, InstanceWarned):
            self._reporter.warn(f"{event.text} (instance {event.instance}; its log: {event.log_file})")
        self._reporter.show(event)

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
        is_users_mistake = isinstance(error, UserError) and self._view.started is None
        if is_users_mistake or isinstance(error, LeaseLost):  # the folder is restored, or another process has it
            return
        from raypod.observe.report.command import write_report

        try:
            write_report(self._run.claim.folder)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the run has ended as it has
            self._reporter.warn(f"the report was not written: {summarize_exception(failure)}")
