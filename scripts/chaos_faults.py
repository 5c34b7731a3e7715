"""Faults for chaos.py: processes are killed or frozen while the fleet trains, pauses, saves, evaluates or repairs.

The fault `device` kills a process, after which the devices of the others are unusable as their calls end.

`FaultyFleet` wraps a fleet and reports to `FaultInjector` what the fleet does. The faults follow from a seed: kind,
phase, victims and the delay after the beginning of the phase. The next one follows when the previous one is repaired.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Counter, Dict, Iterator, List, Set, Tuple

from raypod.events import CallReport, Event, Repaired, Resized, RunStarted, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runtime.workers.fleet import Fleet
from raypod.training.checkpoint import storage

# The longest delay of a fault after the beginning of its phase, in seconds. `writing` is the background write of a
# checkpoint; `rendezvous` begins when a replacement is built.
PHASES = {
    "training": 1.0,
    "pause": 0.02,
    "save": 0.01,
    "writing": 0.0,
    "evaluation": 0.2,
    "repair": 4.0,
    "rendezvous": 0.05,
    "seeding": 0.02,
}
KINDS = {
    "kill": ("training", "pause", "save", "writing", "evaluation"),
    "kill-two": ("training", "pause", "save", "evaluation"),
    "freeze": ("training", "pause", "save", "evaluation"),
    "device": ("training",),
    "kill-again": ("repair", "rendezvous", "seeding"),  # of another instance
}
_PHASE_OF_METHOD = {"save": "save", "evaluate": "evaluation", "open_seeding": "seeding", "seed_weights": "seeding"}
_QUIET_S = (0.5, 2.5)  # between a repair and the next fault
_POLL_S, _FILE_TIMEOUT_S = 0.001, 30.0


@dataclasses.dataclass
class Fault:
    """A fault in a phase. For a phase of a repair, the instance `trigger` is killed before."""

    kind: str
    phase: str
    victims: Tuple[int, ...]
    trigger: int
    delay_s: float


class FaultInjector:
    """Injects one fault after the other, and counts them by kind and by the phase in which the signal was sent."""

    def __init__(self, plan: Plan, seed: int, device_fault: Path) -> None:
        """`device_fault`: the file of EMULATED_POD_DEVICE_FAULT, which exists while a lost process fails the others."""
        self._plan, self._instances, self._random = plan, plan.geometry.num_instances, random.Random(seed)
        self._device_fault = device_fault
        self._device_line = ""
        self._kinds: List[str] = []  # of the next faults
        self._phases: Dict[str, List[str]] = {kind: [] for kind in KINDS}  # of the next faults of each kind
        self._fault: Any = None  # the present Fault
        self._phase, self._is_begun, self._pauses = "", False, False
        self._timers: List[threading.Timer] = []
        self._unrepaired: Set[int] = set()  # instances
        self._counted = ("", "")
        self._quiet_s, self._next_s = 0.0, 0.0  # after the present fault; until the next one
        self.injected: Counter[Tuple[str, str]] = collections.Counter()
        self.repaired: Counter[Tuple[str, str]] = collections.Counter()

    def handle(self, event: Event, may_begin: bool) -> None:
        """Follow the events of the run; begin the next fault if it is time to, and if `may_begin`."""
        if isinstance(event, RunStarted):
            self._device_line = event.device_line
        elif isinstance(event, Resized):  # the remaining faults are those of the instances that are left
            self._instances = len(event.hosts)
        elif isinstance(event, Repaired):
            self._unrepaired -= set(event.lost)
            with contextlib.suppress(FileNotFoundError):
                self._device_fault.unlink()
            self._next_s = time.monotonic() + self._quiet_s
        if self._fault is not None and self._is_over(event):
            self.repaired.update([self._counted] if self._counted[0] else [])
            self._fault, self._pauses = None, False
        if self.is_idle and may_begin and isinstance(event, UpdateDone) and time.monotonic() > self._next_s:
            self._begin(self._next_fault())

    @property
    def is_idle(self) -> bool:
        """Whether every fault so far is repaired."""
        return self._fault is None

    def cancel(self) -> None:
        """Discard a fault whose phase has not begun."""
        if not self._is_begun and not self._unrepaired and not any(timer.is_alive() for timer in self._timers):
            self._fault = None

    def enter(self, phase: str) -> None:
        """Begin a phase of the fleet."""
        self._phase = phase
        if self._fault is not None and self._fault.phase == phase and not self._is_begun:
            self._is_begun, self._pauses = True, False
            self._later(self._fault.delay_s, self._send_fault)

    def requests_pause(self) -> bool:
        """Return whether a pause is due, in which a fault is injected then."""
        if self._pauses:
            self.enter("pause")
        return self._phase == "pause"

    def _is_over(self, event: Event) -> bool:
        if any(timer.is_alive() for timer in self._timers) or self._unrepaired:
            return False
        return self._is_begun or isinstance(event, Repaired)  # a repair without the phase: nothing was injected

    def _next_fault(self) -> Fault:
        if not self._kinds:
            self._kinds = self._random.sample(list(KINDS), len(KINDS))
        kind = self._kinds.pop()
        if not self._phases[kind]:
            self._phases[kind] = self._random.sample(KINDS[kind], len(KINDS[kind]))
        phase = self._phases[kind].pop()
        self._quiet_s = self._random.uniform(*_QUIET_S)
        victims = self._random.sample(range(self._instances), min(3, self._instances))
        if phase == "writing":
            victims = [0, *(each for each in victims if each)]
        count = 2 if kind == "kill-two" else 1
        trigger = victims[min(count, len(victims) - 1)]  # of another instance, if a phase of a repair needs it
        return Fault(kind, phase, tuple(victims[:count]), trigger, self._random.uniform(0, PHASES[phase]))

    def _begin(self, fault: Fault) -> None:
        self._fault, self._is_begun, self._counted, self._timers = fault, False, ("", ""), []
        self._pauses = fault.phase == "pause"
        if fault.phase == "training":
            self.enter("training")
        elif fault.phase == "writing":
            self._is_begun = True
            self._later(0, self._when, self._is_writing, self._send_fault)
        elif fault.phase in KINDS["kill-again"]:
            if fault.phase == "rendezvous":
                built = self._builds(fault.trigger)
                self._later(0, self._when, lambda: self._builds(fault.trigger) > built, self._enter_rendezvous)
            self._later(0, self._send, signal.SIGKILL, fault.trigger)

    def _builds(self, instance: int) -> int:
        """Return how many processes of an instance have been built; each writes the device to the log."""
        return _log(self._plan, instance).count(self._device_line)

    def _enter_rendezvous(self) -> None:
        if self._phase == "repair":
            self.enter("rendezvous")

    def _is_writing(self) -> bool:
        folder = storage.checkpoints_folder(self._plan.run_dir)
        return folder.is_dir() and any(path.suffix == ".partial" for path in folder.iterdir())

    def _later(self, delay_s: float, action: Callable[..., Any], *arguments: Any) -> None:
        timer = threading.Timer(delay_s, action, arguments)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _when(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        """Perform `action` as soon as `condition` is true."""
        end_s = time.monotonic() + _FILE_TIMEOUT_S
        while time.monotonic() < end_s:
            if condition():
                action()
                return
            time.sleep(_POLL_S)

    def _send_fault(self) -> None:
        fault, phase = self._fault, "writing" if self._fault.phase == "writing" else self._phase
        number = signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL
        if fault.kind == "device":
            self._device_fault.write_text("unusable")
        sent = [self._send(number, victim) for victim in fault.victims]
        if any(sent):
            self._counted = (fault.kind, phase)
            self.injected[self._counted] += 1
            print(f"  fault {sum(self.injected.values())}: {fault.kind} {fault.victims} in {phase}", flush=True)

    def _send(self, number: int, instance: int) -> bool:
        """Send a signal to the newest process of an instance; return whether it was alive."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int(_log(self._plan, instance).rpartition(", pid ")[2].partition(":")[0]), number)
            self._unrepaired.add(instance)
            return True
        return False


class FaultyFleet:
    """A fleet whose instances suffer faults. See `Fleet` for the methods; those without a fault are the fleet's."""

    def __init__(self, fleet: Fleet, faults: FaultInjector) -> None:
        self._fleet, self._faults = fleet, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `Fleet.call`."""
        if method not in _PHASE_OF_METHOD:
            return self._fleet.call(method, *arguments)
        self._faults.enter(_PHASE_OF_METHOD[method])
        results = self._fleet.call(method, *arguments)
        self._faults.enter("training")
        return results

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """See `Fleet.run`."""
        self._faults.enter("training")
        yield from self._fleet.run(segment, lambda: stop_requested() or self._faults.requests_pause())

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """See `Fleet.repair`."""
        self._faults.enter("repair")
        return self._fleet.repair(lost, may_share_hosts)


def _log(plan: Plan, instance: int) -> str:
    return Path(plan.log_file(instance)).read_text()


def render_table(faults: FaultInjector) -> str:
    """Return a table of the faults by kind and phase: repaired of injected."""
    rows = [["", *PHASES]]
    for kind in KINDS:
        counts = [(faults.repaired[kind, phase], faults.injected[kind, phase]) for phase in PHASES]
        rows.append([kind, *(f"{repaired} of {injected}" if injected else "-" for repaired, injected in counts)])
    return "\n".join("".join(cell.ljust(12) for cell in row).rstrip() for row in rows)
