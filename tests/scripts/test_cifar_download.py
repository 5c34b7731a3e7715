"""`--download` of CIFAR-10 from a local server: an archive with the real layout, and servers that fail."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import pickle
import tarfile
import threading
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import make_cifar
import numpy as np
import pytest

from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.training.data import cache, cifar

NAME = "cifar-10-python.tar.gz"


class Archive(NamedTuple):
    content: bytes
    source: Path  # the folder that it contains


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = make_cifar.write(tmp_path_factory.mktemp("source"), train=50, test=10, classes=10)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        packed.add(str(folder), arcname=folder.name)
    return Archive(buffer.getvalue(), folder)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves an archive as the path says: /whole, /cut, /stalled, /unknown-length or /missing."""

    content = b""
    released = threading.Event()

    def do_GET(self) -> None:
        way = self.path.split("/")[1]
        if way == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if way != "unknown-length":
            self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        sent = self.content if way == "whole" else self.content[: len(self.content) // 2]
        self.wfile.write(sent)
        if way == "stalled":
            self.wfile.flush()
            self.released.wait(30)

    def log_message(self, *words: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def url(archive: Archive) -> Iterator[str]:
    Handler.content = archive.content
    Handler.released.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Handler.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return from_values({"data": {"dataset": "cifar10", "data_dir": str(tmp_path), "download": True}})


def served(monkeypatch: pytest.MonkeyPatch, url: str, md5: str) -> None:
    """Let CIFAR-10 be downloaded from another address."""
    published = dataclasses.replace(cifar.CIFAR10.archive, url=f"{url}/{NAME}", md5=md5)
    replaced = dataclasses.replace(cifar.CIFAR10, archive=published)
    monkeypatch.setattr("raypod.training.data.cifar.CIFAR10", replaced)


def test_the_files_are_downloaded_unpacked_and_read(
    archive: Archive, url: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, f"{url}/whole", hashlib.md5(archive.content).hexdigest())
    splits = cifar.CIFAR10.load(config)
    folder = tmp_path / "cifar-10-batches-py"
    for file in archive.source.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert (len(splits.train), len(splits.test), splits.classes) == (50, 10, 10)
    assert cifar.CIFAR10.archive.name == NAME
    batch = pickle.loads((archive.source / "test_batch").read_bytes())
    assert np.array_equal(np.asarray(splits.test.images).reshape(10, -1), batch["data"])
    assert not [*tmp_path.glob(".partial*")]


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("cut", r"ended the connection after \d+ of \d+ bytes|IncompleteRead"),
        ("unknown-length", "its MD5 checksum is"),
        ("stalled", "timed out"),
        ("missing", "HTTP Error 404: Not Found"),
    ],
)
def test_a_server_that_fails_is_one_line_and_leaves_nothing(
    way: str, cause: str, archive: Archive, url: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, f"{url}/{way}", hashlib.md5(archive.content).hexdigest())
    monkeypatch.setattr(cache, "_READ_TIMEOUT_S", 0.3)
    with pytest.raises(ConfigError, match=cause) as caught:
        cifar.CIFAR10.load(config)
    assert "\n" not in str(caught.value)
    assert f"copy the file to this host and unpack it in {tmp_path}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.lock"]


def test_another_archive_is_refused(url: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, f"{url}/whole", cifar.CIFAR10.archive.md5)  # of the published file
    with pytest.raises(ConfigError, match=f"expected {cifar.CIFAR10.archive.md5}"):
        cifar.CIFAR10.load(config)
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.lock"]


def test_a_generated_batch_may_be_empty(tmp_path: Path) -> None:
    folder = make_cifar.write(tmp_path, train=4, test=2, classes=10)
    batches = [pickle.loads((folder / f"data_batch_{number}").read_bytes()) for number in range(1, 6)]
    assert [batch["data"].shape for batch in batches].count((0, 3072)) == 1
