"""The gRPC client, against servers that are not a GCS, and the reaper of a local session's processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List

import psutil
import pytest

from raypod.pod import active_runs, stop_cluster
from raypod.runtime.workers import gcs, ray_reaper
from raypod.runtime.workers.ray_processes import RayProcesses
from tests.support.bounded import wait_until


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_refuses_or_does_not_answer_is_silent(listener: socket.socket) -> None:
    answer = gcs.check(address_of(listener), timeout_s=0.2)
    assert (answer.state, answer.detail) == (gcs.SILENT, "no answer within 0.2 s")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_of(server)
    answer = gcs.check(address)
    assert (answer.state, answer.detail) == (gcs.SILENT, "Connection refused")
    assert gcs.check("somewhere").state == gcs.SILENT


def test_a_server_of_another_protocol_is_reported(listener: socket.socket) -> None:
    def reply_like_a_web_server() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=reply_like_a_web_server)
    thread.start()
    answer = gcs.check(address_of(listener))
    thread.join(10)
    assert answer.state == gcs.SILENT
    assert "does not use gRPC" in answer.detail


@pytest.fixture
def other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of this user are those of another one, who is not root."""
    monkeypatch.setattr(gcs, "_ROOT", -1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)


@pytest.mark.usefixtures("other_user")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_process_of_another_user_gets_no_token(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily) -> None:
    received = []

    def listen(server: socket.socket) -> None:
        for _ in range(3):
            connection, _ = server.accept()
            with connection:
                received.append(connection.recv(1 << 16))

    is_mapped = family == socket.AF_INET6  # as Ray listens: IPv4 clients have mapped addresses
    with socket.create_server(("::" if is_mapped else "127.0.0.1", 0), family=family, dualstack_ipv6=is_mapped) as it:
        thread = threading.Thread(target=listen, args=(it,))
        thread.start()
        address = address_of(it)
        answer = gcs.check(address, "secret")
        uid = Path("/proc/self").stat().st_uid
        assert (answer.state, answer.detail) == (gcs.FOREIGN, f"it is a process of uid {uid}, not of 12345")
        with pytest.raises(OSError, match=f"the GCS at {address} gets no token: it is a process of uid"):
            gcs.alive_addresses(address, "secret")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        assert gcs.driver_report(address)["foreign"]
        thread.join(10)
    assert received == [b"", b"", b""]


def test_a_process_that_accepts_no_connection_gets_no_token(listener: socket.socket) -> None:
    """The kernel names root as the owner of a connection that is not accepted yet."""
    answer = gcs.check(address_of(listener), "secret", timeout_s=0.1)
    assert (answer.state, answer.detail) == (gcs.FOREIGN, "no process accepts the connection")
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1 << 16) == b""


@pytest.mark.parametrize(
    ("listens_on", "host"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1")], ids=lambda each: each
)
@pytest.mark.parametrize("has_diag", [True, False])
def test_the_owner_of_the_other_end_of_a_connection(
    listens_on: str, host: str, has_diag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("not needed, or not there")

    monkeypatch.setattr(*((gcs, "_in_tables", fail) if has_diag else (gcs, "_NETLINK_SOCK_DIAG", -1)))
    is_dual, family = listens_on == "::", socket.AF_INET6 if ":" in listens_on else socket.AF_INET
    server = socket.create_server((listens_on, 0), family=family, dualstack_ipv6=is_dual)
    with server, socket.create_connection((host, server.getsockname()[1])) as connection:
        ends = connection.getpeername()[:2], connection.getsockname()[:2]
        assert gcs._owner(*ends) is None, "it is not accepted yet"
        accepted, _ = server.accept()
        with accepted:
            assert gcs._owner(*ends) == os.getuid()
            found = (gcs._looked_up if has_diag else gcs._in_tables)(*ends)
            assert found == (os.getuid(), os.fstat(accepted.fileno()).st_ino)


def distrust_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    ends: Any = {"getpeername": lambda: (host, int(port)), "getsockname": lambda: ("10.0.0.9", 7)}
    return gcs.distrust(SimpleNamespace(**ends), time.monotonic())  # type: ignore[arg-type]


@pytest.mark.usefixtures("processes")
def test_another_machine_gets_the_token_if_a_raylet_here_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/a/raylet", "-c", "import sys; sys.stdin.read()", "--gcs-address=10.0.0.1:6379"]
    with subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE) as raylet:
        assert wait_until(lambda: "/a/raylet" in Path(f"/proc/{raylet.pid}/cmdline").read_text())
        assert distrust_of("10.0.0.1:6379") == ""
        assert distrust_of("10.0.0.1:6380").endswith("belongs to it; run this on one of its hosts")
        monkeypatch.setattr(gcs, "_ROOT", -1)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert distrust_of("10.0.0.1:6379").startswith("no Ray node of uid 12345 on this machine")


def test_the_drivers_of_a_cluster_are_known_except_rays(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the next line sets
    from ray.core.generated import gcs_service_pb2

    reply = gcs_service_pb2.GetAllJobInfoReply()
    for namespace, pid in (("raypod", 1), ("_ray_internal_dashboard", 2), ("raypod", 3), ("", 4)):
        job = reply.job_info_list.add(driver_ip_address="10.0.0.1", driver_pid=pid, entrypoint=f"run {pid}")
        job.config.ray_namespace, job.is_dead = namespace, pid == 3
    job.driver_ip_address, job.driver_address.ip_address = "", "10.0.0.2"
    answer = gcs.Answer(gcs.ANSWERED, "", reply.SerializeToString())
    monkeypatch.setattr(gcs, "_call", lambda *_: answer)
    names = ("address", "pid", "entrypoint", "namespace")
    found = [tuple(each[name] for name in names) for each in gcs.drivers("head:1")]
    assert found == [("10.0.0.1", 1, "run 1", "raypod"), ("10.0.0.2", 4, "run 4", "")]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        (gcs.__file__, ["--drivers", "127.0.0.1:1"], {"drivers": [], "error": "", "runs": False}),
        (active_runs.__file__, ["folders", "[]"], {"folders": {}}),
        (gcs.__file__, ["127.0.0.1:1", "0", "here"], {"missing": ["here"]}),
        (stop_cluster.__file__, ["no-such-cluster"], {"found": 0, "left": 0}),
    ],
)
def test_files_for_hosts_need_only_python(file: str, arguments: List[str], expected: Dict[str, object]) -> None:
    command = [sys.executable, "-I", "-S", "-", *arguments]
    done = subprocess.run(command, input=Path(file).read_text(), capture_output=True, text=True, timeout=60, check=True)
    assert expected.items() <= json.loads(done.stdout).items()


@pytest.fixture
def leader(processes: None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session with one child, and prints a line when both run."""
    script = "sleep 300 & echo; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        yield process
        ray_reaper.kill({process.pid: ray_reaper.process_of(process.pid)})


def test_the_processes_of_a_session_also_without_their_leader(leader: subprocess.Popen[bytes]) -> None:
    (child,) = psutil.Process(leader.pid).children()
    leaders = {leader.pid: ray_reaper.process_of(leader.pid)}
    assert sorted(ray_reaper.members(leaders)) == sorted([leader.pid, child.pid])
    leader.kill()
    assert wait_until(lambda: ray_reaper.members(leaders) == [child.pid])  # the leader is a zombie
    leader.wait()
    assert ray_reaper.members(leaders) == [child.pid]
    ray_reaper.kill(leaders)
    assert ray_reaper.members(leaders) == []


def test_a_reused_pid_is_another_session(leader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray_reaper.process_of(leader.pid)
    assert before is not None
    monkeypatch.setattr(before, "is_running", lambda: False)  # the pid exists, and is another process
    assert ray_reaper.members({leader.pid: before}) == []
    assert ray_reaper.members({leader.pid: None}) == []  # its pid belongs to another process by now
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    assert ray_reaper.process_of(ended.pid) is None
    assert ray_reaper.members({ended.pid: None}) == []


def test_the_end_of_a_session_waits_for_the_reaper(processes: None) -> None:
    session = RayProcesses(has_template=False)
    session.close()
    assert session._reaper.returncode == 0
