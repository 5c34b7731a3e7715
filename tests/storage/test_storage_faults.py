"""Storages that fail while a run is mirrored: nothing is lost, and a checkpoint is complete there or absent."""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from pathlib import Path
from typing import Any, Callable, List

import pytest
from bounded import wait_until
from storage.mirrored_runs import (
    LARGE,
    Place,
    finish,
    mirror,
    mirroring,
    reached,
    same_files,
    save,
    verified,
    whole_checkpoints,
    write_run,
)
from storage.storage_servers import BUCKET, SECRET, create_bucket, s3_server, use_s3

from raypod.checkpoint.format import Retention
from raypod.host.files import replace_file
from raypod.storage import memory, run_files
from raypod.storage import store as store_module
from raypod.storage.digests import Digests, checksum_in
from raypod.storage.errors import StorageError, describe
from raypod.storage.mirrored_checkpoints import MirroredCheckpoints
from raypod.storage.mirrored_files import MirroredFiles
from raypod.storage.remote_index import RemoteIndex
from raypod.storage.remote_run import RemoteRun
from raypod.storage.store import Store

SLOW_BYTES_PER_S = 125_000.0  # 1 Mbit/s


class Killed(BaseException):
    """The process ends at this operation."""


class Dying:
    """The file system of a folder; the process dies at one of its operations, before or after half of a write."""

    def __init__(self, file_system: Any, dies_at: int) -> None:
        self._file_system, self._left = file_system, dies_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file_system, name)
        if name not in ("open", "mv", "rm_file", "rmdir", "makedirs"):
            return found

        def operation(*arguments: Any, **options: Any) -> Any:
            self.count()
            result = found(*arguments, **options)
            return DyingFile(result, self) if name == "open" and arguments[1] == "wb" else result

        return operation

    def count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Killed


class DyingFile:
    def __init__(self, file: Any, owner: Dying) -> None:
        self._file, self._owner = file, owner

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._owner.count()
        self._file.write(data[len(data) // 2 :])

    def close(self) -> None:
        self._file.close()
        self._owner.count()


def sync(run: Path, store: Store) -> None:
    """One round of the mirror."""
    index = RemoteIndex(store, "run id", "writer", is_known=True)
    files = MirroredFiles(run, store, index)
    index.check()
    files.sync(files.pending())
    MirroredCheckpoints(run, store, Retention(2)).sync()


def test_a_process_that_dies_at_any_operation_leaves_whole_checkpoints_and_files(
    local: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = store_module.connect
    run = write_run(tmp_path / "run")
    save(run, 1, accuracy=1.0)
    operations = 0
    while True:
        operations += 1
        shutil.rmtree(str(tmp_path / "remote"), ignore_errors=True)
        save(run, 1)
        sync(run, Store(f"{local.url}/run"))  # an older state, which is replaced
        replace_file(run / "metrics.jsonl", b'{"update": 1}\n' * operations)
        for update in (1, 2, 3):
            save(run, update, numbers=4 + operations % 2)
        store = Store(f"{local.url}/run")

        def dying(url: str, dies_at: int = operations) -> Any:
            file_system, path = connect(url)
            return Dying(file_system, dies_at), path

        monkeypatch.setattr(store_module, "connect", dying)
        try:
            sync(run, store)
        except Killed:
            has_died = True
        else:
            has_died = False
        monkeypatch.setattr(store_module, "connect", connect)
        names = whole_checkpoints(local.url, "run", tmp_path / f"copy-{operations}")
        _, messages = RemoteRun(f"{local.url}/run", "").fetch_files(tmp_path / f"copy-{operations}", lambda name: True)
        assert not messages, f"operation {operations}"
        if not has_died:
            assert names == ["update-00000002", "update-00000003"]
            break
        sync(run, Store(f"{local.url}/run"))
        assert whole_checkpoints(local.url, "run", tmp_path / f"again-{operations}") == names[:0] + [
            "update-00000002",
            "update-00000003",
        ]
    assert operations > 40


def test_killed_while_it_uploads(network_place: Place, tmp_path: Path) -> None:
    assert network_place.proxy is not None
    run = write_run(tmp_path / "run")
    save(run, 1)
    mirror(run, network_place.url)
    name = save(run, 2, LARGE)  # 1.2 MB
    for attempt in range(3):
        network_place.proxy.bytes_per_s = 400_000.0
        before = network_place.proxy.forwarded_bytes
        with mirroring(run, network_place.url):
            began = lambda start=before: network_place.proxy.forwarded_bytes > start + 300_000  # noqa: E731
            assert wait_until(began)
        network_place.proxy.bytes_per_s = None
        assert whole_checkpoints(network_place.url, "run", tmp_path / f"copy-{attempt}") == ["update-00000001"]
    mirror(run, network_place.url)
    assert verified(network_place.url, "run", tmp_path / "copy") == ["update-00000001", name]
    assert same_files(run, tmp_path / "copy")


def test_a_server_that_is_killed_and_started_again(sftp: Place, tmp_path: Path) -> None:
    assert sftp.server is not None
    run = write_run(tmp_path / "run")
    names = [save(run, 1)]
    with mirroring(run, sftp.url) as process:
        assert reached(run, 1)
        sftp.server.kill()
        names.append(save(run, 2, LARGE))
        assert wait_until(lambda: memory.read(run).failures >= 2)
        assert memory.read(run).error
        sftp.server.start()
        assert reached(run, 2)
        assert memory.read(run).error == ""
        assert finish(process) == 0
    assert verified(sftp.url, "run", tmp_path / "copy") == names


def test_a_server_that_forgets_everything(s3: Place, tmp_path: Path) -> None:
    assert s3.server is not None
    run = write_run(tmp_path / "run")
    names = [save(run, 1)]
    with mirroring(run, s3.url) as process:
        assert reached(run, 1)
        s3.server.kill()
        s3.server.start()  # moto keeps the objects in memory
        create_bucket(s3.server.port)
        names.append(save(run, 2))
        assert finish(process) == 0
    assert verified(s3.url, "run", tmp_path / "copy") == names
    assert same_files(run, tmp_path / "copy")


def test_a_connection_that_is_lost_in_an_upload(network_place: Place, tmp_path: Path) -> None:
    assert network_place.proxy is not None
    run = write_run(tmp_path / "run")
    name = save(run, 1, LARGE)
    network_place.proxy.bytes_per_s = 400_000.0
    with mirroring(run, network_place.url) as process:
        assert wait_until(lambda: network_place.proxy.forwarded_bytes > 300_000)
        network_place.proxy.cut()
        assert wait_until(lambda: memory.read(run).failures >= 1)
        network_place.proxy.bytes_per_s = None
        network_place.proxy.mend()
        assert finish(process) == 0
    assert verified(network_place.url, "run", tmp_path / "copy") == [name]


def test_a_slow_network_delays_and_loses_nothing(network_place: Place, tmp_path: Path) -> None:
    assert network_place.proxy is not None
    run = write_run(tmp_path / "run")
    name = save(run, 1, 40_000)  # 160 kB
    network_place.proxy.bytes_per_s = SLOW_BYTES_PER_S
    found = mirror(run, network_place.url)
    assert (found.failures, found.is_complete) == (0, True)
    network_place.proxy.bytes_per_s = None
    assert verified(network_place.url, "run", tmp_path / "copy") == [name]


def test_the_limit_of_time_ends_a_slow_upload_without_a_partial_checkpoint(
    network_place: Place, tmp_path: Path
) -> None:
    assert network_place.proxy is not None
    run = write_run(tmp_path / "run")
    save(run, 1, LARGE)
    network_place.proxy.bytes_per_s = SLOW_BYTES_PER_S
    with mirroring(run, network_place.url, "--timeout-s=4") as process:
        began_s = time.monotonic()
        assert finish(process) == 1
        assert time.monotonic() - began_s < 30.0
    assert "update-00000001" in memory.read(run).pending
    network_place.proxy.bytes_per_s = None
    assert whole_checkpoints(network_place.url, "run", tmp_path / "copy") == []


def test_a_full_storage(tmp_path: Path, small_disk: Callable[..., Path]) -> None:
    remote = small_disk(tmp_path / "remote", kib=1000)
    run = write_run(tmp_path / "run")
    save(run, 1)
    with mirroring(run, f"file://{remote}", "--keep=1") as process:
        assert reached(run, 1)
        name = save(run, 2, LARGE)  # 1.2 MB
        assert wait_until(lambda: "No space left" in memory.read(run).error)
        names = whole_checkpoints(f"file://{remote}", "run", tmp_path / "copy-1")
        assert names == ["update-00000001"], "the older one is removed only after the newer one is complete"
        small_enough = save(run, 3)
        assert finish(process, 5.0 + 85.0) == 0 if make_room(remote, run, name) else False
    assert verified(f"file://{remote}", "run", tmp_path / "copy-2") == [small_enough]


def make_room(remote: Path, run: Path, name: str) -> bool:
    """Remove what does not fit on the host: the newest checkpoint does fit."""
    shutil.rmtree(str(run / "checkpoints" / name))
    return remote.is_dir()


def test_wrong_credentials_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server(denied=True)
    server.start()
    use_s3(monkeypatch, server.port)
    run = write_run(tmp_path / "run")
    try:
        create_bucket(server.port)
        with mirroring(run, f"s3://{BUCKET}/prefix", "--timeout-s=3") as process:
            assert wait_until(lambda: bool(memory.read(run).error))
            assert finish(process) == 1
    finally:
        server.kill()
    assert memory.read(run).error.startswith("PermissionError: ")
    assert_no_secret(run)


def test_wrong_credentials_of_sftp(sftp: Place, tmp_path: Path) -> None:
    (tmp_path / "sshd" / "authorized_keys").write_text("")
    run = write_run(tmp_path / "run")
    with mirroring(run, sftp.url, "--timeout-s=3") as process:
        assert wait_until(lambda: bool(memory.read(run).error))
        assert finish(process) == 1
    assert "Authentication failed" in memory.read(run).error


@pytest.mark.parametrize("known", ["nothing", "another key"])
def test_an_sftp_server_with_an_unknown_host_key_is_refused(sftp: Place, tmp_path: Path, known: str) -> None:
    hosts = tmp_path / "sshd" / "home" / ".ssh" / "known_hosts"
    client_key = (tmp_path / "sshd" / "home" / ".ssh" / "id_ed25519.pub").read_text().split()[1]
    changed = [" ".join([*line.split()[:2], client_key]) for line in hosts.read_text().splitlines()]
    hosts.write_text("\n".join(changed) + "\n" if known == "another key" else "")
    run = write_run(tmp_path / "run")
    with mirroring(run, sftp.url, "--timeout-s=3") as process:
        assert wait_until(lambda: bool(memory.read(run).error))
        assert finish(process) == 1
    words = "not found in known_hosts" if known == "nothing" else "does not match"
    assert words in memory.read(run).error


def assert_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_secrets_of_the_files_of_backends_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[default]\naws_access_key_id = AKIA1234567890\naws_secret_access_key = {SECRET}\n")
    google = tmp_path / "google.json"
    google.write_text('{"private_key": "-----BEGIN abcdef", "client_email": "me@example.com"}')
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google))
    monkeypatch.setenv("MY_API_TOKEN", "tok-123456")
    shown = describe(OSError(f"AKIA1234567890 with {SECRET} and -----BEGIN abcdef\nand tok-123456: denied"))
    assert shown == "OSError: *** with *** and *** and ***: denied"


class Garbling(Store):
    """A storage that keeps other bytes than it was given."""

    def _path(self, name: str) -> str:
        found = super()._path(name)
        if self._fs is not None and not hasattr(self._fs, "is_garbling"):
            self._fs.is_garbling = True
            opened = self._fs.open

            def garbled(path: str, mode: str, **options: Any) -> Any:
                return io.BytesIO(b"garbled") if mode == "rb" else opened(path, mode, **options)

            self._fs.open = garbled
        return found


def test_an_upload_is_read_back_where_the_storage_has_no_checksum(local: Place) -> None:
    with pytest.raises(StorageError, match="another content on the storage"):
        Garbling(local.url).write_bytes("name", b"1234567")


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 25])
def test_checksums_of_objects(size: int) -> None:
    import base64
    import hashlib

    data = bytes(range(size))
    digests = Digests(10)
    for first in range(0, size, 3):
        digests.add(data[first : first + 3])
    whole = hashlib.md5(data)
    parts: List[bytes] = [hashlib.md5(data[first : first + 10]).digest() for first in range(0, size, 10)]
    combined = f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"
    assert checksum_in({"ETag": f'"{whole.hexdigest().upper()}"'}) in digests.checksums
    assert checksum_in({"md5Hash": base64.b64encode(whole.digest()).decode()}) in digests.checksums
    assert checksum_in({"ETag": f'"{combined}"'}) in digests.checksums
    assert checksum_in({"ETag": '"0-1"'}) not in digests.checksums
    assert checksum_in({"size": 1}) is None
    assert digests.sha256 == hashlib.sha256(data).hexdigest()


def test_an_object_in_parts_is_verified_by_its_checksum(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reading(self: Store, file: Any, most_bytes: int) -> Any:
        raise AssertionError("the object is read back")

    monkeypatch.setattr(Store, "_chunks", no_reading)
    content = bytes(1 << 20) * 17 + b"1"  # two parts of 8 MiB and one more
    Store(s3.url).write_bytes("large", content)
    Store(s3.url).write_bytes("small", b"1")


def test_a_file_that_changes_while_it_is_uploaded_is_uploaded_again(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    store = Store(f"{local.url}/run")
    index = RemoteIndex(store, "run id", "writer", is_known=False)
    index.check()
    snapshot = run_files.opened(run / "metrics.jsonl")
    assert snapshot is not None
    with contextlib.closing(snapshot):
        with (run / "metrics.jsonl").open("a") as file:
            file.write("grown\n")
        assert snapshot.content().size_bytes == snapshot.size_bytes
    files = MirroredFiles(run, store, index)
    files.sync(["metrics.jsonl"])
    assert "metrics.jsonl" not in files.pending()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("grown\n")
    assert "metrics.jsonl" in files.pending()
