"""The hosts of a launch with a scripted Ray, and the supervision of the programs on scripted hosts."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from raypod.errors import ClusterError, HostLost, ProgramFailed, RunError, WaitTimedOut
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Sizes, place
from raypod.runtime.launcher.output import Console, Output
from raypod.runtime.launcher.ray_hosts import RayHosts
from raypod.runtime.launcher.records import STDERR, HostFacts, HostReport, ProgramEnd
from raypod.runtime.launcher.supervision import Interrupted, Signals, Supervision
from tests.support.scripted_ray import NEVER, ActorDied, Ref, ScriptedActor, ScriptedRay, TaskError

GRACE_S = 4.0
PLACEMENT = place(Cluster("two", (Host("a", "a"), Host("b", "b"))), Sizes(2, 2, 1))


class ScriptedHosts:
    """Two hosts. `script` holds (seconds, action) pairs in order; `calls` what was asked of the hosts, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.signals = 0.0, Signals()
        self.script: List[Tuple[float, Callable[[], Any]]] = []
        self.calls: List[Any] = []
        self.observed: List[int] = []
        self.are_done = False
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def reports(self, within_s: float) -> Iterator[Tuple[int, HostReport]]:
        self.now_s += within_s
        while self.script and self.script[0][0] <= self.now_s:
            found = self.script.pop(0)[1]()
            if found is not None:
                yield found

    def signal(self, number: int) -> None:
        self.calls.append((round(self.now_s), "signal", number))

    def end(self, grace_s: float) -> None:
        self.calls.append((round(self.now_s), "end", grace_s))

    def receive(self, number: int) -> Callable[[], None]:
        return lambda: signal.raise_signal(number)

    def exits(self, instance: int, code: int = 0, text: bytes = b"") -> Callable[[], Any]:
        ends = (ProgramEnd(instance, code, f"exit code {code}"),)
        return lambda: (instance, HostReport(((instance, STDERR, text),), ends, True, False))

    def finish(self) -> None:
        self.are_done = True

    def run(self, folder: Any) -> int:
        output = Output(str(folder), 2, Console())
        self.script.sort(key=lambda each: each[0])
        try:
            with self.signals.handled(record=True):
                observe = lambda host, report: self.observed.append(host)  # noqa: E731
                return Supervision(self, PLACEMENT, output, self.signals, GRACE_S, observe).run()
        finally:
            output.close()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> ScriptedHosts:
    (tmp_path / "logs").mkdir()
    return ScriptedHosts(monkeypatch)


def test_what_is_left_when_all_programs_have_ended_is_ended(hosts: ScriptedHosts, tmp_path: Any) -> None:
    hosts.script = [(1, hosts.exits(0)), (3, hosts.exits(1)), (9, hosts.finish)]
    assert (hosts.run(tmp_path), hosts.calls) == (0, [(3, "end", GRACE_S)])
    assert hosts.observed == [0, 1]


def test_descendants_that_keep_the_output_open_have_the_grace_period(hosts: ScriptedHosts, tmp_path: Any) -> None:
    def is_open(instance: int) -> Any:
        return instance, HostReport((), (ProgramEnd(instance, 0, ""),), False, False)

    hosts.script = [(1, lambda: is_open(0)), (3, lambda: is_open(1))]  # the hosts never answer
    assert (hosts.run(tmp_path), hosts.calls) == (0, [(3 + GRACE_S, "end", GRACE_S)])
    assert 3 + GRACE_S + 9 <= round(hosts.now_s, 1) <= 3 + GRACE_S + 9.5


CPP = "terminate called after throwing an instance of 'E'\n  what():  no device\n"


@pytest.mark.parametrize(
    ("code", "stderr", "cause"),
    [
        (1, "Traceback:\nValueError: broken\n", "exit code 1 (ValueError: broken)"),
        (3, "Traceback:\nValueError: broken\n", "exit code 3"),
        (134, CPP, "exit code 134 (what(): no device)"),
    ],
)
def test_the_first_failure_ends_all(hosts: ScriptedHosts, tmp_path: Any, code: int, stderr: str, cause: str) -> None:
    hosts.script = [(1, hosts.exits(1, code, stderr.encode())), (2, hosts.exits(0, 9)), (3, hosts.finish)]
    with pytest.raises(ProgramFailed) as found:
        hosts.run(tmp_path)
    assert str(found.value) == f"instance 1 on host b failed: {cause}; its log: {tmp_path}/logs/instance-1.log"
    assert (found.value.exit_code, hosts.calls) == (code, [(1, "end", GRACE_S)])


OF_PEER = "[rank1]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6"
NEVER_JOINED = "E: rank 1 waited 60 s for rank 0 of group 'horovod' at 10.0.0.1:5"


@pytest.mark.parametrize(
    "stderr",
    [OF_PEER, "horovod.common.HorovodInternalError: shut down", "E: a peer has ended", NEVER_JOINED]
    + ["RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] timed out connecting"],
)
@pytest.mark.parametrize("seconds", [(1, 2), (2, 2), (3, 2)])  # its process may end after its connections
def test_an_early_end_is_the_cause(hosts: ScriptedHosts, tmp_path: Any, stderr: str, seconds: Tuple[int, int]) -> None:
    stderr = stderr.replace("E: ", "_pod.store_protocol.PeerFailed: ")
    failure = (seconds[1], hosts.exits(1, 1, stderr.encode()))
    hosts.script = [failure, (seconds[0], hosts.exits(0)), (5, hosts.finish)]
    with pytest.raises(ProgramFailed) as found:
        hosts.run(tmp_path)
    shown = stderr.replace("[rank1]: ", "")
    assert str(found.value) == (
        "instance 0 on host a failed: it ended too early, with exit code 0; instance 1 still needed it: exit code 1 "
        f"({shown}); its log: {tmp_path}/logs/instance-0.log"
    )
    assert (found.value.exit_code, hosts.calls) == (1, [(max(seconds), "end", GRACE_S)])


def test_the_failure_of_a_peer_is_not_the_cause_if_the_peer_fails_next(hosts: ScriptedHosts, tmp_path: Any) -> None:
    hosts.script = [(1, hosts.exits(1, 1, OF_PEER.encode())), (2, hosts.exits(0, 3)), (3, hosts.finish)]
    with pytest.raises(ProgramFailed, match="^instance 0 on host a failed: exit code 3") as found:
        hosts.run(tmp_path)
    assert (found.value.exit_code, hosts.calls) == (3, [(2, "end", GRACE_S)])


@pytest.mark.parametrize(
    ("stderr", "seconds"),
    [("ValueError: broken", 1), (OF_PEER, 5)],  # an exception of its own; the other one was ended after the failure
)
def test_an_end_with_0_is_no_cause_otherwise(hosts: ScriptedHosts, tmp_path: Any, stderr: str, seconds: int) -> None:
    hosts.script = [(2, hosts.exits(1, 1, stderr.encode())), (seconds, hosts.exits(0)), (6, hosts.finish)]
    with pytest.raises(ProgramFailed, match="^instance 1 on host b failed: exit code 1"):
        hosts.run(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_and_is_the_exit_code(hosts: ScriptedHosts, tmp_path: Any, number: int) -> None:
    hosts.script = [(1, hosts.receive(number)), (2, hosts.exits(0, 5)), (2, hosts.exits(1)), (3, hosts.finish)]
    with pytest.raises(Interrupted) as found:
        hosts.run(tmp_path)
    assert found.value.exit_code == 128 + number
    assert hosts.calls == [(1, "signal", number), (2, "end", GRACE_S)]


@pytest.mark.parametrize(("second_s", "end"), [(None, (1 + 10 * GRACE_S, "end", GRACE_S)), (3, (3, "end", 0.0))])
def test_a_signal_that_is_ignored_or_repeated(hosts: ScriptedHosts, tmp_path: Any, second_s: Any, end: Any) -> None:
    hosts.script = [(at_s, hosts.receive(signal.SIGINT)) for at_s in (1, second_s) if at_s] + [(60, hosts.finish)]
    with pytest.raises(Interrupted):
        hosts.run(tmp_path)
    assert hosts.calls == [(1, "signal", signal.SIGINT), end]


def test_a_message_for_the_programs_is_passed_on_and_ends_no_launch(hosts: ScriptedHosts, tmp_path: Any) -> None:
    messages = (signal.SIGUSR1, signal.SIGUSR2)
    hosts.script = [(1, hosts.receive(number)) for number in messages]
    hosts.script += [(2, hosts.exits(0)), (2, hosts.exits(1)), (3, hosts.finish)]
    assert hosts.run(tmp_path) == 0
    assert hosts.calls == [*((1, "signal", number) for number in messages), (2, "end", GRACE_S)]
    assert hosts.signals.take_messages() == []


def test_a_signal_before_the_programs_run_is_raised_at_once_and_again_where_it_was_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    signals, printed = Signals(), []
    with pytest.raises(Interrupted), signals.handled():
        signal.raise_signal(signal.SIGTERM)
    signals = Signals()
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with signals.handled():
        Finalized()
    with pytest.raises(Interrupted) as again, signals.handled():
        raise AssertionError("the exception in the finalizer was ignored")
    assert again.value.exit_code == 128 + signal.SIGTERM
    assert printed == []


LIVES = HostReport((), (), False, False)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


@pytest.fixture
def connect(ray: ScriptedRay) -> Callable[..., RayHosts]:
    """`connect(*scripts)`: a host with an instance for each, connected to Ray; see ScriptedActor."""

    def connect(*scripts: Dict[str, Any]) -> RayHosts:
        named = tuple(Host(f"h{index}", f"10.0.0.{index}") for index in range(len(scripts)))
        made = RayHosts(place(Cluster("pod", named), Sizes(len(scripts), len(scripts), 1)), None, 30.0)
        made._ray, made._actors = ray, [ScriptedActor(index, each) for index, each in enumerate(scripts)]
        made._addresses = [host.address for host in named]
        return made

    return connect


def read_in(ray: ScriptedRay, seconds: float, report: HostReport = LIVES) -> Dict[str, Any]:
    return {"read": lambda within_s: Ref(report, ray.now_s + seconds)}


def test_reports_until_all_are_done_also_after_a_pause(ray: ScriptedRay, connect: Callable[..., RayHosts]) -> None:
    done = HostReport((), (), True, True)
    found = connect(read_in(ray, 0.5), read_in(ray, 0.5, done))
    assert list(found.reports(1.0)) == [(0, LIVES), (1, done)]
    assert not found.are_done
    assert list(found.reports(0.2)) == []
    assert list(found.reports(1.0)) == [(0, LIVES)]  # the other one is not read again
    assert found._actors[1].called == ["read"]
    found = connect(read_in(ray, 20.0))
    assert list(found.reports(0.2)) == []
    ray.now_s += 14.0  # stopped for longer than a host may take to answer
    assert (list(found.reports(0.2)), list(found.reports(9.0))) == ([], [(0, LIVES)])


def test_a_dead_and_a_silent_host_are_lost(ray: ScriptedRay, connect: Callable[..., RayHosts]) -> None:
    found, seen, began_s = connect(read_in(ray, 0.5), read_in(ray, NEVER)), [], ray.now_s

    def read() -> None:
        while True:
            seen.extend(found.reports(0.2))

    with pytest.raises(HostLost, match="host h1 is lost, with instance 1: no answer for 10 s"):
        read()
    assert 11 < ray.now_s - began_s < 12
    assert len(seen) > 10
    died = ActorDied("The actor died.\n\tThe node has died: it lost its power\n")
    found = connect({"read": lambda within_s: Ref(died)})
    with pytest.raises(HostLost, match="host h0 is lost, with instance 0: its process died: node has died: it lost"):
        list(found.reports(0.2))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TaskError(ClusterError("has no address in --host-subnet")), ClusterError, "^has no address in --host-subnet$"),
        (TaskError(OSError("no files left")), RunError, "^host h1: OSError: no files left$"),
    ],
)
def test_a_hosts_error_is_raised(connect: Callable[..., RayHosts], error: Exception, kind: type, message: str) -> None:
    found = connect({"address_in": lambda subnet: Ref("10.0.0.0")}, {"address_in": lambda subnet: Ref(error)})
    with pytest.raises(kind, match=message):
        found.connect("10.0.0.0/8", 2)


def test_a_host_that_does_not_start_is_waited_for(ray: ScriptedRay, connect: Callable[..., RayHosts]) -> None:
    found, began_s = connect({"start": lambda *_: Ref(None)}, {"start": lambda *_: Ref(None, NEVER)}), ray.now_s
    with pytest.raises(WaitTimedOut, match=r"waited 30 s for start on h1; --start-timeout"):
        found.start([(), ()], 1.0, "logs")
    assert 30 <= ray.now_s - began_s < 31


def test_hosts_meet_at_the_first_one_in_the_chosen_network(connect: Callable[..., RayHosts]) -> None:
    joined: List[Any] = []

    def host(address: str, problem: Any) -> Dict[str, Any]:
        def join(*given: Any) -> Ref:
            joined.append(given)
            return Ref(HostFacts(address, {}, problem))

        rendezvous = {"open_rendezvous": lambda at: Ref({"at": at}), "join_rendezvous": join}
        return {"address_in": lambda subnet: Ref(address), **rendezvous}

    found = connect(host("192.168.0.1", None), host("192.168.0.2", "its name is 127.0.1.1"))
    assert [each.address for each in found.connect("192.168.0.0/16", 2)] == ["192.168.0.1", "192.168.0.2"]
    assert joined == [({"at": "192.168.0.1"}, "192.168.0.1"), ({"at": "192.168.0.1"}, "192.168.0.2")]
    assert found.warnings == ["host h1: a program that uses Horovod aborts: its name is 127.0.1.1"]
    found.connect(None, 2)
    assert joined[2:] == [({"at": "10.0.0.0"}, ""), ({"at": "10.0.0.0"}, "")]
    assert found.connect(None, 1) == [HostFacts("10.0.0.0", {}), HostFacts("10.0.0.1", {})]


def test_stdin_is_written_once(ray: ScriptedRay, connect: Callable[..., RayHosts]) -> None:
    answers = [Ref(True, ray.now_s + 1.0), Ref(False), Ref(ActorDied("gone"))]
    found = connect({"write_stdin": lambda data: answers.pop(0)})
    assert found.write_stdin(b"a", 0.5) is None
    written = [found.write_stdin(data, within_s) for data, within_s in ((b"a", 0.6), (b"b", 1.0), (b"c", 1.0))]
    assert (written, found._actors[0].called) == ([True, False, False], ["write_stdin"] * 3)


def test_the_end_kills_the_actors_and_releases_the_hosts_even_if_ray_fails(connect: Callable[..., RayHosts]) -> None:
    found, done = connect({}, {}), []  # type: ignore[var-annotated]
    found._session = SimpleNamespace(close=lambda: done.append("closed"))  # type: ignore[assignment]
    found._ray = SimpleNamespace(is_initialized=lambda: True, kill=lambda actor: done.append(actor.index))
    found._reservation = SimpleNamespace(release=lambda ray: done.append("released"))  # type: ignore[assignment]
    found.close()
    assert done == [0, 1, "released", "closed"]
