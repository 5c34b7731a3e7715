"""Runs that are mirrored to real servers, which are slow, lose connections, are killed, or refuse the user."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest

import raypod
import raypod.events
from raypod import train
from raypod.runs.upload import mirror_record
from raypod.system.remote.store import Store
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Retention
from tests.support.bounded import wait_until
from tests.support.mirrored_runs import (
    ACCURACY,
    FLAGS,
    LARGE,
    Place,
    different_files,
    finish,
    mirror,
    mirroring,
    name_of,
    save,
    summary_of,
    verified,
    whole_checkpoints,
    write_run,
)
from tests.support.storage_servers import (
    BUCKET,
    SECRET,
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

SLOW_BYTES_PER_S = 125_000.0  # 1 Mbit/s


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


@pytest.fixture(params=["sftp", "s3", "gs"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["sftp", "s3"])
def network_place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    assert found.proxy is not None
    return found


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, about the requests of gcsfs
def test_a_storage_holds_what_the_run_folder_holds(place: Place, tmp_path: Path) -> None:
    """Uploads, retention, replaced checkpoints and manifests, and objects that were removed or truncated."""
    run, kept = write_run(tmp_path / "a run"), Retention(2, ACCURACY)
    remote = Store(f"{place.url}/a run")

    def evaluate() -> None:
        (newest, *_), _ = storage.list_checkpoints(run / "checkpoints")
        tested = {**vars(newest.manifest), "tested": {"accuracy": 30.0}}
        storage.replace_manifest(newest, type(newest.manifest)(**tested))
        remote.remove(f"checkpoints/{name_of(1)}/weights.safetensors")
        remote.write_bytes(f"checkpoints/{name_of(3)}/weights.safetensors", b"short")
        remote.remove("metrics.jsonl")
        remote.remove("index.json")

    def replace() -> str:
        shutil.rmtree(str(run / "checkpoints" / name_of(3)))
        return save(run, 3, LARGE, accuracy=20.0)

    for update, accuracy in ((1, 90.0), (2, 10.0), (3, 20.0)):
        save(run, update, accuracy=accuracy)
    found = mirror(run, place.url, lambda: save(run, 4), evaluate, replace, lambda: None, kept=kept)
    assert (found.is_complete, found.failures, found.pending) == (True, 0, ())
    assert verified(place.url, "a run", tmp_path / "copy") == [name_of(1), name_of(3), name_of(4)]
    shutil.rmtree(str(run / "checkpoints" / name_of(2)))  # the storage keeps fewer
    assert not different_files(run, tmp_path / "copy")
    assert mirror(run, place.url, kept=kept).checkpoints == found.checkpoints, "nothing is uploaded again"
    other = mirror(write_run(tmp_path / "other" / "a run"), place.url)
    assert "/a run holds another run; use another --run-dir" in other.error


def test_an_upload_through_a_network_that_is_slow_or_lost(network_place: Place, tmp_path: Path) -> None:
    proxy, url, run = network_place.proxy, network_place.url, write_run(tmp_path / "run")
    assert proxy is not None

    def begin_slowly(bytes_per_s: float) -> None:
        proxy.bytes_per_s, proxy.forwarded_bytes = bytes_per_s, 0

    save(run, 1, 40_000)  # 160 kB
    begin_slowly(SLOW_BYTES_PER_S)
    assert mirror(run, url).failures == 0
    name = save(run, 2, LARGE)  # 1.2 MB
    begin_slowly(400_000.0)
    with mirroring(run, url):
        assert wait_until(lambda: proxy.forwarded_bytes > 300_000)  # then it is killed
    begin_slowly(SLOW_BYTES_PER_S)
    with mirroring(run, url, "--timeout-s=4") as process:
        assert finish(process) != 0
    assert name in mirror_record.read(run).pending
    proxy.bytes_per_s = None
    assert whole_checkpoints(url, "run", tmp_path / "partial") == [name_of(1)]
    begin_slowly(400_000.0)
    failures = mirror_record.read(run).failures
    with mirroring(run, url) as process:
        assert wait_until(lambda: proxy.forwarded_bytes > 300_000)
        proxy.cut()
        assert wait_until(lambda: mirror_record.read(run).failures > failures)
        proxy.bytes_per_s = None
        proxy.mend()
        assert finish(process) == 0
    assert verified(url, "run", tmp_path / "copy") == [name_of(1), name]
    assert not different_files(run, tmp_path / "copy")


def test_a_training_whose_storage_server_is_killed(network_place: Place, tmp_path: Path, capfd: Any) -> None:
    server, url, run = network_place.server, network_place.url, tmp_path / "run"

    def react(event: raypod.events.Event) -> None:
        if isinstance(event, raypod.events.UpdateDone) and event.update == 20:
            assert wait_until(lambda: mirror_record.read(run).checkpoints > 0)
            server.kill()
        elif isinstance(event, raypod.events.RunEnded):
            assert wait_until(lambda: mirror_record.read(run).failures >= 2)
            server.start()
            if url.startswith("s3"):  # moto keeps the objects in memory
                create_bucket(server.port)

    fit: Any = {"fleet": "inline", "device": "emulated", "model": "tiny", "replicas": 2, "lr_schedule": "constant"}
    raypod.fit(callbacks=react, updates=40, checkpoint_every="10 updates", storage_path=url, run_dir=str(run), **fit)
    found = summary_of(run)["storage"]
    assert found["not_mirrored"] == []
    assert found["failures"] >= 2
    out, err = capfd.readouterr()
    assert (out + err).count("warning") <= 1, "none if the server answers before the coordinator looks"
    assert verified(url, "run", tmp_path / "copy")
    assert not different_files(run, tmp_path / "copy")
    flags = ["--updates", "50", "--run-dir"]
    assert train.main(["--resume", f"{url}/run", *flags, str(tmp_path / "again")]) == 0
    assert train.main([*FLAGS, *flags, str(tmp_path / "whole")]) == 0
    assert summary_of(tmp_path / "whole")["weights_sha256"] == summary_of(tmp_path / "again")["weights_sha256"]


def refused(run: Path, url: str) -> mirror_record.MirrorRecord:
    """Return what a process remembers that cannot use the storage."""
    with mirroring(run, url, "--timeout-s=3") as process:
        assert wait_until(lambda: bool(mirror_record.read(run).error))
        assert finish(process) != 0
    return mirror_record.read(run)


def test_wrong_credentials_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server(denied=True)
    server.start()
    use_s3(monkeypatch, server.port)
    run = write_run(tmp_path / "run")
    try:
        create_bucket(server.port)
        assert refused(run, f"s3://{BUCKET}/prefix").error.startswith("PermissionError: ")
    finally:
        server.kill()
    assert not [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("the user's key", "Authentication failed"),
        ("no host key", "not found in known_hosts"),
        ("another host key", "does not match"),
    ],
)
def test_wrong_keys_of_sftp(sftp: Place, tmp_path: Path, wrong: str, words: str) -> None:
    folder = tmp_path / "sshd"
    hosts, client_key = folder / "home/.ssh/known_hosts", (folder / "home/.ssh/id_ed25519.pub").read_text().split()[1]
    if wrong == "the user's key":
        (folder / "authorized_keys").write_text("")
    else:
        changed = [" ".join([*line.split()[:2], client_key]) for line in hosts.read_text().splitlines()]
        hosts.write_text("\n".join(changed) + "\n" if wrong == "another host key" else "")
    assert words in refused(write_run(tmp_path / "run"), sftp.url).error


def test_an_unreachable_sftp_server_is_a_failure_not_a_users_mistake(sftp: Place, tmp_path: Path, capfd: Any) -> None:
    Store(f"{sftp.url}/run").write_bytes("index.json", b"{}")
    sftp.server.kill()
    assert train.main(["--resume", f"{sftp.url}/run", "--run-dir", str(tmp_path / "run")]) == 1
    assert "the storage cannot be read: " in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_object_in_parts_is_verified_by_its_checksum(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reading(self: Store, file: Any, most_bytes: int) -> List[bytes]:
        raise AssertionError("the object is read back")

    monkeypatch.setattr(Store, "_chunks", no_reading)
    Store(s3.url).write_bytes("large", bytes(1 << 20) * 17 + b"1")  # two parts of 8 MiB and one more
    Store(s3.url).write_bytes("small", b"1")


def test_a_file_is_read_in_one_request_and_after_a_lost_connection(s3: Place, tmp_path: Path, monkeypatch: Any) -> None:
    import s3fs

    data, proxy, call = os.urandom(20_000_000), s3.proxy, s3fs.S3FileSystem._call_s3
    assert proxy is not None
    Store(s3.url).write_bytes("large", data)
    Store(s3.url).write_bytes("empty", b"")
    requests: List[Tuple[str, Optional[str]]] = []

    async def observed(self: Any, method: str, *parts: Any, **options: Any) -> Any:
        requests.append((method, options.get("Range")))
        return await call(self, method, *parts, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", observed)
    store, target = Store(s3.url), tmp_path / "target"
    store.download("large", target, len(data) + 1)
    assert target.read_bytes() == data
    assert store.read("large", 1000) == data[:1000]
    assert store.read("empty") == b""
    assert store.read("missing") is None
    assert requests == [("get_object", None)] * 4

    def lose() -> None:
        assert wait_until(lambda: target.stat().st_size > 0)
        proxy.cut()
        proxy.mend()

    target.unlink()
    target.touch()
    proxy.bytes_per_s = 20e6
    losing = threading.Thread(target=lose)
    losing.start()
    store.download("large", target, len(data) - 1)
    losing.join()
    assert target.read_bytes() == data[:-1]
    ranges = [part for method, part in requests if method == "get_object" and part]
    assert ranges
    assert not ranges[0].startswith("bytes=0-"), "what had arrived is not read again"
