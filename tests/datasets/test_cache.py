from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path
from typing import Iterator, List

import pytest

from raypod import datasets
from raypod.datasets import cifar
from raypod.datasets.cache import Archive, download
from raypod.errors import ConfigError, WaitTimedOut
from raypod.host.files import file_lock
from raypod.plan.resolve import from_values


def packed(folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(f"{folder}/data_batch_1")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"bytes"))
    return buffer.getvalue()


class Server:
    """An HTTP server for one file; `requests` are the requested paths."""

    def __init__(self, content: bytes) -> None:
        requests: List[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                """Keep the test's output clean."""

        self.requests = requests
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/small.tar.gz"
        self.archive = Archive(self.url, hashlib.md5(content).hexdigest(), "cifar-10-batches-py")


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(packed("cifar-10-batches-py"))
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def test_concurrent_callers_download_once(server: Server, tmp_path: Path) -> None:
    root = tmp_path / "new"
    threads = [threading.Thread(target=download, args=(server.archive, root, 30)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.requests == ["/small.tar.gz"]
    assert (root / "cifar-10-batches-py" / "data_batch_1").read_bytes() == b"bytes"
    assert not list(root.glob(".partial*"))


def test_a_wrong_checksum_is_an_error(server: Server, tmp_path: Path) -> None:
    wrong = Archive(server.url, "0" * 32, "cifar-10-batches-py")
    with pytest.raises(ConfigError, match="MD5 checksum is .*, expected 000"):
        download(wrong, tmp_path, 30)
    assert [path.name for path in tmp_path.iterdir()] == [".small.tar.gz.lock"]


def test_a_failed_download_is_a_one_line_error_with_a_remedy(tmp_path: Path) -> None:
    unreachable = Archive("http://127.0.0.1:9/small.tar.gz", "0" * 32, "cifar-10-batches-py")
    with pytest.raises(
        ConfigError, match="cannot get http://127.0.0.1:9/.*refused.*copy the file to this host"
    ) as caught:
        download(unreachable, tmp_path, 30)
    assert "\n" not in str(caught.value)


def test_the_wait_for_another_download_is_bounded(server: Server, tmp_path: Path) -> None:
    with file_lock(tmp_path / ".small.tar.gz.lock", 1, "test"), pytest.raises(
        WaitTimedOut, match=r"run\.start_timeout_s"
    ):
        download(server.archive, tmp_path, 0.2)
    assert server.requests == []


@pytest.mark.parametrize("flag", [False, True])
def test_cifar_is_downloaded_only_with_the_flag(server: Server, tmp_path: Path, flag: bool) -> None:
    ours = dataclasses.replace(cifar.CIFAR10, archive=server.archive)
    ours.download(from_values({"data": {"dataset": "cifar10", "data_dir": str(tmp_path), "download": flag}}))
    assert (tmp_path / "cifar-10-batches-py").is_dir() == flag
    assert len(server.requests) == flag


def test_the_flag_is_an_error_for_data_without_a_download() -> None:
    with pytest.raises(ConfigError, match="digits cannot be downloaded"):
        datasets.download(from_values({"data": {"download": True}}))
