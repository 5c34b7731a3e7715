"""The template of a host's workers: what a forked worker gets, when none is forked, and when it ends."""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional
from unittest import mock

import psutil
import pytest

from raypod.runtime.workers import ray_template, worker_request, worker_template
from tests.support.bounded import wait_until

WITHIN_S = 60.0
# Instead of Ray's: writes what it got.
WORKER = """
import json, os, sys
from pathlib import Path
try:
    import added
except ImportError:
    added = None
name = Path("/proc/self/cmdline").read_text().split(chr(0))[1].rpartition("/")[2]
print(json.dumps({
    "pid": os.getpid(), "script": name, "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path[0],
    "environment": dict(os.environ), "niceness": os.nice(0), "main": sys.modules["__main__"].__file__,
    "has_torch": "torch" in sys.modules, "has_raypod": "raypod" in sys.modules, "ray": "ray" in sys.modules,
    "group": os.getpgrp(), "added": getattr(added, "__file__", None), "read": os.read(7, 100).decode(),
}))
"""


class Services:
    """Starts processes like `ray._private.services`."""

    def __init__(self) -> None:
        self.command: List[str] = []
        self.environment: Dict[str, str] = {}

    def ConsolePopen(self, command: List[str], env: Optional[Dict[str, str]] = None) -> Any:
        assert env is not None
        self.command, self.environment = command, env
        return subprocess.Popen(["sleep", "300"])


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder, self.services = folder, Services()
        self.template = ray_template.Template()
        workers = f"--python_worker_command={sys.executable} setup_worker.py default_worker.py --node-ip-address=1"
        with self.template.used_by(self.services):
            command = ["/ray/core/src/ray/raylet/raylet", f"--log_dir={folder}", workers, "--other"]
            self.raylet = self.services.ConsolePopen(command)
        assert wait_until((folder / worker_template.LOG).exists, WITHIN_S)  # it has imported its modules
        (folder / "default_worker.py").write_text(WORKER)
        (folder / "other.py").write_text(WORKER)

    def worker(self, script: str = "default_worker.py", cwd: Optional[Path] = None, **changed: str) -> Dict[str, Any]:
        """Start a worker as the raylet would; return what it has written."""
        python = self.services.command[2].partition("=")[2].split()[0]
        environment = {**self.services.environment, "RAY_JOB_ID": "01", **changed}
        reading, writing = os.pipe()
        os.write(writing, b"a descriptor")
        (self.folder / "out").write_text("")
        with (self.folder / "out").open("a") as out:
            # Descriptors have other numbers here than there.
            line = f'exec 7<&{reading}; exec {python} {self.folder / script} --one "two words"'
            process = subprocess.Popen(
                ["nice", "-n", "3", "bash", "-c", line], env=environment, cwd=cwd, stdout=out, pass_fds=(reading,)
            )
        os.close(reading)
        os.close(writing)
        assert process.wait(WITHIN_S) == 0
        assert wait_until(lambda: bool((self.folder / "out").read_text()), WITHIN_S)
        return {**json.loads((self.folder / "out").read_text()), "started": process.pid}

    def log(self) -> str:
        return (self.folder / worker_template.LOG).read_text()


@pytest.fixture
def host(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'later'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    host = Host(tmp_path)
    yield host
    host.raylet.kill()
    host.raylet.wait()
    host.template.close()


def test_a_worker_is_forked_with_torch_and_has_what_the_raylet_gave_it(host: Host, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    worker = host.worker(cwd=other)
    assert (worker["script"], worker["pid"] == worker["started"]) == ("worker_template.py", False)
    assert (worker["has_torch"], worker["has_raypod"], worker["ray"]) == (True, False, False)
    assert worker["arguments"] == [str(tmp_path / "default_worker.py"), "--one", "two words"]
    assert (worker["folder"], worker["path"]) == (str(other), str(tmp_path))
    assert worker["main"] == str(tmp_path / "default_worker.py")
    assert worker["environment"]["RAY_JOB_ID"] == "01"
    assert worker["group"] == worker["pid"], "the raylet kills the group of a worker that has died"
    assert (worker["niceness"], worker["read"]) == (os.nice(0) + 3, "a descriptor")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "added.py").touch()
    again = host.worker()
    assert (again["script"], again["added"]) == ("worker_template.py", str(tmp_path / "later" / "added.py"))
    assert again["pid"] != worker["pid"]
    assert "differs" not in host.log()


def test_a_worker_that_is_no_fork_and_a_request_that_was_given_up(host: Host, tmp_path: Path) -> None:
    worker = host.worker(OMP_NUM_THREADS="3", NEW="")
    assert (worker["script"], worker["has_torch"]) == ("default_worker.py", False)
    assert worker["pid"] == worker["started"]
    assert host.log() == "not forked, because its environment differs: NEW, OMP_NUM_THREADS\n"
    assert host.worker("other.py")["script"] == "other.py"  # as Ray's setup_worker.py, for a runtime environment
    default, marker = tmp_path / "default_worker.py", tmp_path / "marker"
    worker_text = default.read_text()
    default.write_text(f"open({str(marker)!r}, 'a')")
    request = {"arguments": [str(default)], "environment": host.services.environment, "folder": "/"}
    text = json.dumps({**request, "descriptors": [], "niceness": 0, "oom_score": "0"}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(host.services.environment["RAYPOD_TEMPLATE"])
        connection.sendall(len(text).to_bytes(4, "little") + text)
        assert connection.recv(1) == b"y"
    assert wait_until(lambda: not psutil.Process(host.template.pid).children(), WITHIN_S)
    assert not marker.exists()
    default.write_text(worker_text)
    host.template.close()
    assert host.worker()["script"] == "default_worker.py"


def test_other_users_cannot_reach_it_and_it_ends_with_the_raylet(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.worker()
    path = Path(host.services.environment["RAYPOD_TEMPLATE"])
    assert (path.is_socket(), path.parent) == (True, host.folder), "a folder of mode 0700"
    left, right = socket.socketpair()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: os.geteuid() + 1)  # as if the socket were another user's
        with pytest.raises(PermissionError, match="a template of another user"):
            worker_request.fork(str(path), ["default_worker.py"])
        with left, right, pytest.raises(PermissionError, match="a process of another user"):
            worker_template.receive(left)
    host.raylet.kill()
    host.raylet.wait()
    assert wait_until(lambda: psutil.Process(host.template.pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("logs", [None, "long" * 30], ids=["no logs", "no place for the socket"])
def test_a_raylet_without_a_template_is_started_as_it_is(processes: None, tmp_path: Path, logs: Optional[str]) -> None:
    template, services = ray_template.Template(), Services()
    command = ["/raylet/raylet", f"--python_worker_command={sys.executable}"]
    command += [f"--log_dir={tmp_path / logs}"] if logs else []
    with template.used_by(services):
        raylet = services.ConsolePopen(command, env={})
    raylet.kill()
    raylet.wait()
    template.close()
    assert (services.command, services.environment) == (command, {})


def test_nothing_waits_for_a_template_that_the_kernel_cannot_end(processes: None) -> None:
    template = ray_template.Template()
    process, waits = template._process, []

    def wait(timeout: float) -> None:
        waits.append(timeout)
        raise subprocess.TimeoutExpired("template", timeout)

    template._process = mock.Mock(wraps=process, stdin=process.stdin, wait=wait)
    template.close()
    assert (waits, process.wait(WITHIN_S)) == ([5.0], -9)


@pytest.mark.parametrize("text", [b"{}", b"", b"[["])
def test_the_descriptors_of_a_broken_request_are_closed(text: bytes) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    left, right = socket.socketpair()
    with left, right:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 1, 2]))]
        right.sendmsg([(len(text) + (text == b"{}")).to_bytes(4, "little")], rights)
        right.sendall(text)
        right.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionError, ValueError)):
            worker_template.receive(left)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_resident_pages_of_files_are_released_except_those_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, maps = 8 << 20, {}
    for name, access in (("read", mmap.ACCESS_READ), ("unwritten", mmap.ACCESS_COPY), ("written", mmap.ACCESS_COPY)):
        path = tmp_path / name
        path.write_bytes(name[:1].encode() * size)
        with path.open("rb") as file:
            maps[name] = mmap.mmap(file.fileno(), size, access=access)
    maps["written"][:3] = b"new"
    # As the linker does with what it has written.
    library, page = ctypes.CDLL(None), ctypes.c_char.from_buffer(maps["written"])
    assert library.mprotect(ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_size_t(size), mmap.PROT_READ) == 0
    for each in maps.values():
        assert each[:: mmap.PAGESIZE].count(each[-1:]) >= size // mmap.PAGESIZE - 1  # every page is read

    def resident() -> Dict[str, int]:
        found = {}
        for each in psutil.Process().memory_maps():
            if Path(each.path).parent == tmp_path:
                found[Path(each.path).name] = each.rss
        return found

    assert resident() == dict.fromkeys(maps, size)
    worker_template.release_files()
    assert resident() == {"read": 0, "unwritten": size, "written": size}
    assert (maps["read"][:3], maps["read"][-1:]) == (b"rrr", b"r")
    assert (maps["written"][:4], maps["written"][-1:]) == (b"neww", b"w")
    with monkeypatch.context() as patched:
        patched.setattr(worker_template, "Path", lambda name: tmp_path / "none")
        worker_template.release_files()  # a kernel without this file
    del page
    for each in maps.values():
        each.close()


def test_packages_with_threads_forbid_forks(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
    (tmp_path / "poptorch.py").write_text(thread)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    host = Host(tmp_path)
    try:
        assert host.worker()["script"] == "default_worker.py"
        assert host.log() == "packages have started threads as they were imported (1): no worker is forked\n"
    finally:
        host.raylet.kill()
        host.raylet.wait()
        host.template.close()
