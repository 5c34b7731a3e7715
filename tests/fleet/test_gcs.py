"""The gRPC client, against servers that are not a GCS."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from raypod.fleet import gcs
from raypod.pod import stop_cluster


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_refused_connection_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_of(server)
    answer = gcs.check(address)
    assert (answer.state, answer.detail) == (gcs.SILENT, "Connection refused")


def test_a_silent_server_is_waited_for_within_the_timeout(listener: socket.socket) -> None:
    answer = gcs.check(address_of(listener), timeout_s=0.2)
    assert (answer.state, answer.detail) == (gcs.SILENT, "no answer within 0.2 s")


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


def test_an_address_without_a_port_is_invalid() -> None:
    assert gcs.check("somewhere").state == gcs.SILENT


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        (gcs.__file__, ["127.0.0.1:1", "0", "here"], {"missing": ["here"]}),
        (stop_cluster.__file__, ["no-such-cluster"], {"found": 0, "left": 0}),
    ],
)
def test_files_that_are_sent_to_hosts_need_only_python(
    file: str, arguments: List[str], expected: Dict[str, object]
) -> None:
    command = [sys.executable, "-I", "-S", "-", *arguments]
    done = subprocess.run(command, input=Path(file).read_text(), capture_output=True, text=True, timeout=60, check=True)
    assert expected.items() <= json.loads(done.stdout).items()
