"""The instances of `raypod.run` under Ray: an actor each, which form a process group and call one function."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from raypod.errors import FunctionFailed, RaypodError, WaitTimedOut
from raypod.runtime.worker.function_process import FunctionProcess, Outcome, Setup, unpack
from raypod.runtime.workers.ray_nodes import host_name, wait_for_nodes
from raypod.runtime.workers.ray_reservation import Reservation, reserve
from raypod.runtime.workers.ray_session import RaySession
from raypod.runtime.workers.ray_wait import Arrival, death_reason, take_ready

_POLL_S = 0.1  # between two requests of the output
_GRACE_S = 5.0  # after a failure, for the failures of other instances, one of which may be the first cause
_LAST_OUTPUT_S = 1.0  # for the instances to send their last output
_CLOSE_S = 5.0  # for the instances to leave their process group
_SETTING = "start_timeout_s"
_OnOutput = Callable[[int, int, bytes], None]


class RayFunctions:
    """Runs a function in every instance of a placement."""

    def __init__(self, setup: Setup, cluster_file: Optional[str], start_timeout_s: float, on_output: _OnOutput) -> None:
        """`on_output` receives (instance, 1 for stdout or 2 for stderr, bytes)."""
        self._setup, self._placement, self._timeout_s = setup, setup.placement, start_timeout_s
        self._session = RaySession(setup.placement, cluster_file, start_bound=(start_timeout_s, _SETTING))
        self._on_output = on_output
        self._ray: Any = None
        self._reservation: Optional[Reservation] = None
        self._actors: List[Any] = []
        self._hosts: List[str] = []
        self._is_idle = False

    def start(self, wait_hosts_s: float, log: Callable[[str], None]) -> None:
        """Start the instances, and form their process group.

        Raises:
            RaypodError: hosts are missing, a process does not start, or the SDK cannot be imported.
        """
        self._ray = self._session.open(log)
        nodes = wait_for_nodes(self._ray, self._placement, wait_hosts_s, log)
        self._reservation = reserve(self._ray, self._placement, nodes, (self._timeout_s, _SETTING))
        actor_class = self._ray.remote(FunctionProcess)
        for spec in self._placement.instances:
            options = self._reservation.options(spec.host_index, len(self._placement.instances_on(spec.host_index)))
            actor = actor_class.options(**options, max_concurrency=4).remote(self._setup, spec.index)
            self._actors.append(actor)
            self._hosts.append(host_name(self._placement, nodes[spec.host_index]))
        self._all("prepare")
        environment: Dict[str, str] = {}
        if len(self._actors) > 1:
            addresses = [nodes[spec.host_index]["NodeManagerAddress"] for spec in self._placement.instances]
            if self._placement.cluster.data_network is not None:
                addresses = self._all("data_address")
            environment = self._all("open_rendezvous", addresses[0], actors=self._actors[:1])[0]
        self._all("join", environment)
        self._is_idle = True

    def call(self, pickled: bytes, timeout_s: Optional[float]) -> List[Any]:
        """Call a function in every instance; return the results in instance order.

        Raises:
            FunctionFailed: it raised an exception, or the process of an instance died.
            WaitTimedOut: it has not ended everywhere after `timeout_s` seconds.
        """
        self._is_idle = False
        pending = {actor.call.remote(pickled): index for index, actor in enumerate(self._actors)}
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        output: Dict[Any, int] = {}
        values: Dict[int, bytes] = {}
        failures: List[Tuple[bool, FunctionFailed, bytes]] = []
        while pending and not any(not is_of_peer for is_of_peer, *_ in failures):
            output = self._poll(output)
            for arrival in take_ready(self._ray, pending, _POLL_S):
                index = pending.pop(arrival.ref)
                outcome = self._outcome(arrival)
                if outcome.cause:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    failed = FunctionFailed(index, self._hosts[index], outcome.cause, "", outcome.trace)
                    failures.append((outcome.is_of_peer, failed, outcome.value))
                values[index] = outcome.value
            if time.monotonic() > deadline:
                break
        self._take_rest(output)
        if failures:
            _, failed, pickled_cause = min(failures, key=lambda each: each[0])
            raise failed from (unpack(pickled_cause) if pickled_cause else None)
        if pending:
            missing = ", ".join(f"{index} on host {self._hosts[index]}" for index in sorted(pending.values()))
            raise WaitTimedOut(f"the function to end in instance {missing}", timeout_s or 0.0, "timeout_s")
        self._is_idle = True
        return [unpack(values[index]) for index in range(len(self._actors))]

    def close(self) -> None:
        """End the instances, the reservation, and a Ray session that `start` has started."""
        try:
            if self._ray is not None and self._ray.is_initialized():
                if self._is_idle:
                    refs = [actor.close.remote() for actor in self._actors]
                    self._ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_S)
                for actor in self._actors:
                    self._ray.kill(actor)
                if self._reservation is not None:
                    self._reservation.release(self._ray)
        finally:
            self._actors, self._reservation, self._ray = [], None, None
            self._session.close()

    def _all(self, method: str, *arguments: Any, actors: Optional[List[Any]] = None) -> List[Any]:
        """Return the results of a method of all instances, or of some, in instance order."""
        actors = self._actors if actors is None else actors
        refs = [getattr(actor, method).remote(*arguments) for actor in actors]
        pending, results = {ref: index for index, ref in enumerate(refs)}, {}
        deadline = time.monotonic() + self._timeout_s
        while pending:
            for arrival in take_ready(self._ray, pending, _POLL_S):
                index = pending.pop(arrival.ref)
                if arrival.error is not None:
                    raise self._start_error(index, arrival.error)
                results[index] = arrival.value
            if pending and time.monotonic() > deadline:
                missing = ", ".join(f"instance {index} on host {self._hosts[index]}" for index in pending.values())
                raise WaitTimedOut(f"{method} of {missing}", self._timeout_s, _SETTING)
        return [results[index] for index in range(len(refs))]

    def _start_error(self, index: int, error: Exception) -> RaypodError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaypodError):
            return cause
        text = f"{type(cause).__name__}: {cause}" if cause is not None else death_reason(str(error))
        return FunctionFailed(index, self._hosts[index], " ".join(text.split()), "")

    def _outcome(self, arrival: Arrival) -> Outcome:
        if arrival.error is None:
            outcome: Outcome = arrival.value
            return outcome
        return Outcome(b"", " ".join(death_reason(str(arrival.error)).split()))

    def _poll(self, requests: Dict[Any, int]) -> Dict[Any, int]:
        """Pass on the output that has arrived; return the pending requests, one per instance that answers."""
        requests = requests or {actor.output.remote(): index for index, actor in enumerate(self._actors)}
        for arrival in take_ready(self._ray, requests, 0.0):
            index = requests.pop(arrival.ref)
            for number, data in arrival.value if arrival.error is None else ():
                self._on_output(index, number, data)
        return requests

    def _take_rest(self, requests: Dict[Any, int]) -> None:
        """Pass on what was written until now, by the instances that answer."""
        deadline = time.monotonic() + _LAST_OUTPUT_S
        for request in (requests, {actor.output.remote(): index for index, actor in enumerate(self._actors)}):
            while request and time.monotonic() < deadline:
                request = self._poll(request)
                time.sleep(0.01 if request else 0.0)
