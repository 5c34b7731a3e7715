"""The storages on which the tests of the mirror run: a folder, sftp, S3 and Google Cloud Storage."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import pytest
from storage.mirrored_runs import Place
from storage.storage_servers import (
    BUCKET,
    Proxy,
    create_bucket,
    gs_server,
    know_host,
    s3_server,
    sftp_server,
    sftp_url,
    use_gs,
    use_s3,
)

pytest.importorskip("fsspec", reason="the package fsspec is not installed")
pytest.importorskip("tenacity", reason="the package tenacity is not installed")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = s3_server()
    server.start()
    create_bucket(server.port)
    proxy = Proxy(server.port)
    use_s3(monkeypatch, proxy.port)
    yield Place(f"s3://{BUCKET}/prefix", server, proxy)
    proxy.stop()
    server.kill()


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = gs_server()
    server.start()
    use_gs(monkeypatch, server.port)
    yield Place(f"gs://{BUCKET}/prefix", server)
    server.kill()


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    folder = tmp_path / "sshd"
    with sftp_server(folder, monkeypatch) as (server, home):
        proxy = Proxy(server.port)
        know_host(folder, home, proxy.port)
        yield Place(sftp_url(proxy.port, tmp_path / "remote"), server, proxy)
        proxy.stop()


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(f"file://{tmp_path}/remote")


@pytest.fixture(params=["local", "sftp", "s3", "gs"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each storage in turn."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["sftp", "s3"])
def network_place(request: pytest.FixtureRequest) -> Place:
    """Each storage behind a network in turn."""
    found: Place = request.getfixturevalue(request.param)
    return found
