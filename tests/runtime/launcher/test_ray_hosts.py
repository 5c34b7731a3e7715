"""The hosts of a launch with a scripted Ray: hosts that are lost, pauses of this process, errors, stdin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest

from raypod.errors import ClusterError, HostLost, RunError, WaitTimedOut
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Sizes, place
from raypod.runtime.launcher.ray_hosts import RayHosts
from raypod.runtime.launcher.records import HostFacts, HostReport
from tests.support.scripted_ray import NEVER, ActorDied, Ref, ScriptedActor, ScriptedRay, TaskError

LIVES = HostReport((), (), False, False)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


@pytest.fixture
def hosts(ray: ScriptedRay) -> Callable[..., RayHosts]:
    """`hosts(*scripts)`: a host with an instance for each, connected to Ray; see ScriptedActor."""

    def connect(*scripts: Dict[str, Any]) -> RayHosts:
        named = tuple(Host(f"h{index}", f"10.0.0.{index}") for index in range(len(scripts)))
        made = RayHosts(place(Cluster("pod", named), Sizes(len(scripts), len(scripts), 1)), None, 30.0)
        made._ray, made._actors = ray, [ScriptedActor(index, each) for index, each in enumerate(scripts)]
        made._addresses = [host.address for host in named]
        return made

    return connect


def read_in(ray: ScriptedRay, seconds: float, report: HostReport = LIVES) -> Dict[str, Any]:
    return {"read": lambda within_s: Ref(report, ray.now_s + seconds)}


def test_reports_arrive_until_all_hosts_are_done(ray: ScriptedRay, hosts: Callable[..., RayHosts]) -> None:
    done = HostReport((), (), True, True)
    found = hosts(read_in(ray, 0.5), read_in(ray, 0.5, done))
    assert list(found.reports(1.0)) == [(0, LIVES), (1, done)]
    assert not found.are_done
    assert list(found.reports(0.2)) == []
    assert list(found.reports(1.0)) == [(0, LIVES)]  # the other one is not read again
    assert found._actors[1].called == ["read"]


def test_a_host_that_does_not_answer_is_lost_after_the_reports_of_the_others(
    ray: ScriptedRay, hosts: Callable[..., RayHosts]
) -> None:
    found, seen, began_s = hosts(read_in(ray, 0.5), read_in(ray, NEVER)), [], ray.now_s

    def read() -> None:
        while True:
            seen.extend(found.reports(0.2))

    with pytest.raises(HostLost, match="host h1 is lost, with instance 1: no answer for 10 s"):
        read()
    assert 11 < ray.now_s - began_s < 12
    assert len(seen) > 10


def test_a_pause_of_this_process_makes_no_host_late(ray: ScriptedRay, hosts: Callable[..., RayHosts]) -> None:
    found = hosts(read_in(ray, 20.0))
    assert list(found.reports(0.2)) == []
    ray.now_s += 14.0  # stopped for longer than a host may take to answer
    assert list(found.reports(0.2)) == []
    assert list(found.reports(9.0)) == [(0, LIVES)]


def test_a_host_that_died_is_lost(ray: ScriptedRay, hosts: Callable[..., RayHosts]) -> None:
    died = ActorDied("The actor died.\n\tThe node has died: it lost its power\n")
    found = hosts({"read": lambda within_s: Ref(died)})
    with pytest.raises(HostLost, match="host h0 is lost, with instance 0: its process died: node has died: it lost"):
        list(found.reports(0.2))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TaskError(ClusterError("has no address in --host-subnet")), ClusterError, "^has no address in --host-subnet$"),
        (TaskError(OSError("no files left")), RunError, "^host h1: OSError: no files left$"),
    ],
)
def test_an_error_of_a_host_is_that_of_the_launch(
    hosts: Callable[..., RayHosts], error: Exception, kind: type, message: str
) -> None:
    found = hosts({"address_in": lambda subnet: Ref("10.0.0.0")}, {"address_in": lambda subnet: Ref(error)})
    with pytest.raises(kind, match=message):
        found.connect("10.0.0.0/8", 2)


def test_a_host_that_does_not_start_is_waited_for_within_the_bound(
    ray: ScriptedRay, hosts: Callable[..., RayHosts]
) -> None:
    found, began_s = hosts({"start": lambda *_: Ref(None)}, {"start": lambda *_: Ref(None, NEVER)}), ray.now_s
    with pytest.raises(WaitTimedOut, match=r"waited 30 s for start on h1; --start-timeout"):
        found.start([(), ()], 1.0, "logs")
    assert 30 <= ray.now_s - began_s < 31


def test_hosts_meet_at_the_first_one_in_the_chosen_network(hosts: Callable[..., RayHosts]) -> None:
    joined: List[Any] = []

    def host(address: str, problem: Any) -> Dict[str, Any]:
        def join(*given: Any) -> Ref:
            joined.append(given)
            return Ref(HostFacts(address, {}, problem))

        return {
            "address_in": lambda subnet: Ref(address),
            "open_rendezvous": lambda at: Ref({"at": at}),
            "join_rendezvous": join,
        }

    found = hosts(host("192.168.0.1", None), host("192.168.0.2", "its name is 127.0.1.1"))
    assert [each.address for each in found.connect("192.168.0.0/16", 2)] == ["192.168.0.1", "192.168.0.2"]
    assert joined == [({"at": "192.168.0.1"}, "192.168.0.1"), ({"at": "192.168.0.1"}, "192.168.0.2")]
    assert found.warnings == ["host h1: a program that uses Horovod aborts: its name is 127.0.1.1"]
    found.connect(None, 2)
    assert joined[2:] == [({"at": "10.0.0.0"}, ""), ({"at": "10.0.0.0"}, "")]
    assert found.connect(None, 1) == [HostFacts("10.0.0.0", {}), HostFacts("10.0.0.1", {})]


def test_stdin_is_written_once(ray: ScriptedRay, hosts: Callable[..., RayHosts]) -> None:
    answers = [Ref(True, ray.now_s + 1.0), Ref(False), Ref(ActorDied("gone"))]
    found = hosts({"write_stdin": lambda data: answers.pop(0)})
    assert found.write_stdin(b"a", 0.5) is None
    assert [found.write_stdin(b"a", 0.6), found.write_stdin(b"b", 1.0), found.write_stdin(b"c", 1.0)] == [
        True,
        False,
        False,
    ]
    assert found._actors[0].called == ["write_stdin"] * 3


def test_the_end_kills_the_actors_and_releases_the_hosts_even_if_ray_fails(hosts: Callable[..., RayHosts]) -> None:
    found, done = hosts({}, {}), []  # type: ignore[var-annotated]
    found._session = SimpleNamespace(close=lambda: done.append("closed"))  # type: ignore[assignment]
    found._ray = SimpleNamespace(is_initialized=lambda: True, kill=lambda actor: done.append(actor.index))
    found._reservation = SimpleNamespace(release=lambda ray: done.append("released"))  # type: ignore[assignment]
    found.close()
    assert done == [0, 1, "released", "closed"]
