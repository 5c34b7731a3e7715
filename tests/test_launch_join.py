"""Tests of `raypod launch` when Ray does not answer: no V-IPU partition is left."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import List

import pytest
from ray_cluster import ray_cluster

ROOT = Path(__file__).resolve().parent.parent
FAKE_VIPU = ROOT / "tests" / "launcher" / "fake_vipu.py"


class Relay:
    """A port that forwards raypod's own checks of a GCS, and accepts Ray's connections without an answer."""

    def __init__(self, gcs: str = "") -> None:
        self._gcs = gcs.rpartition(":")[::2] if gcs else None
        self._listener = socket.create_server(("0.0.0.0", 0))  # Ray replaces 127.0.0.1 by the address of this host
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: List[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        request = connection.recv(1 << 16)
        if self._gcs and b"/ray.rpc.NodeInfoGcsService/" in request:  # Ray's own client compresses this header
            with socket.create_connection((self._gcs[0], int(self._gcs[1]))) as gcs:
                gcs.sendall(request)
                back = threading.Thread(target=_copy, args=(gcs, connection), daemon=True)
                back.start()
                _copy(connection, gcs)
                back.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            each.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            data = source.recv(1 << 16)
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
    except OSError:  # the other side closed the connection
        pass


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A folder with a `vipu` tool and a `poptorch` package, so that a launch uses IPUs."""
    (tmp_path / "vipu").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_VIPU} {tmp_path} "$@"\n')
    (tmp_path / "vipu").chmod(stat.S_IRWXU)
    (tmp_path / "poptorch").mkdir()
    (tmp_path / "poptorch" / "__init__.py").touch()
    return tmp_path


def launch(pod: Path, address: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": f"{ROOT}:{pod}", "PATH": f"{pod}:{os.environ['PATH']}"}
    line = [sys.executable, "-m", "raypod.launch", "--vipu-partition", "p", "--start-timeout", "3", "true"]
    return subprocess.run(line, cwd=pod, env=env, capture_output=True, text=True, timeout=100, check=False)


def assert_nothing_is_left(pod: Path) -> None:
    assert not list(pod.glob("*.partition")), (pod / "commands").read_text()
    assert {each.name for each in pod.iterdir()} == {"vipu", "poptorch"}  # `vipu` was not called at all


def test_a_gcs_that_never_answers(pod: Path) -> None:
    relay = Relay()
    try:
        found = launch(pod, relay.address)
    finally:
        relay.close()
    assert found.returncode == 2
    assert found.stderr == (f"raypod: error: no Ray cluster responds at {relay.address}: no answer within 3 s\n")
    assert_nothing_is_left(pod)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_a_join_that_hangs(pod: Path) -> None:
    with ray_cluster(addresses=("",)) as made:
        relay = Relay(made.cluster.address)
        try:
            found = launch(pod, relay.address)
        finally:
            relay.close()
    assert found.returncode == 1
    assert f"error: cannot join the Ray cluster at {relay.address} within 3 s" in found.stderr
    assert_nothing_is_left(pod)
