"""The process that mirrors a run folder, on a folder, OpenSSH's sftp server and moto's S3 server."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import List

import pytest
from bounded import wait_until
from storage import mirrored_runs
from storage.mirrored_runs import (
    LARGE,
    Place,
    finish,
    mirror,
    mirroring,
    reached,
    same_files,
    save,
    store_of,
    verified,
    whole_checkpoints,
    write_run,
)

from raypod.checkpoint import storage
from raypod.checkpoint.format import Retention
from raypod.plan.metric import Metric
from raypod.storage import memory
from raypod.storage.mirrored_checkpoints import MirroredCheckpoints
from raypod.storage.store import Store


def test_a_run_is_mirrored_and_verified(place: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run")
    first = save(run, 1, LARGE)
    with mirroring(run, place.url) as process:
        assert reached(run, 1)
        second = save(run, 2)
        assert process.stdin is not None
        process.stdin.write(f"{second}\n".encode())
        process.stdin.flush()
        assert reached(run, 2)
        assert finish(process) == 0
    found = memory.read(run)
    assert (found.is_complete, found.failures, found.pending) == (True, 0, ())
    assert verified(place.url, "a run", tmp_path / "copy") == [first, second]
    assert same_files(run, tmp_path / "copy")
    summary = json.loads((tmp_path / "copy" / "summary.json").read_text())
    assert summary["storage"]["url"] == f"{place.url}/a run"
    assert (summary["updates"], summary["storage"]["checkpoints"]) == (1, 2)
    again = mirror(run, place.url)
    assert again.checkpoints == found.checkpoints, "what is on the storage is not uploaded again"


def test_tokens_and_leases_stay_on_the_host(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    mirror(run, local.url)
    names = {path.name for path in (tmp_path / "remote").rglob("*")}
    assert not names & {"status-token", "lease-1.json", "storage.json", "storage.lock"}
    assert "metrics.jsonl" in names


@pytest.mark.parametrize(("keep", "kept"), [(1, [1, 4]), (2, [1, 3, 4]), (9, [1, 2, 3, 4])])
def test_retention_keeps_the_newest_and_the_best(place: Place, tmp_path: Path, keep: int, kept: List[int]) -> None:
    run = write_run(tmp_path / "run")
    flags = [f"--keep={keep}", "--metric=accuracy", "--better=higher"]
    for update, accuracy in ((1, 90.0), (2, 10.0), (3, 20.0)):
        save(run, update, accuracy=accuracy)
    mirror(run, place.url, *flags)
    save(run, 4, keep=2, accuracy=30.0)  # fewer are kept on the host
    mirror(run, place.url, *flags)
    assert verified(place.url, "run", tmp_path / "copy") == [f"update-{update:08d}" for update in kept]


def test_a_file_that_is_removed_on_the_host_while_it_is_uploaded_is_complete(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    name = save(run, 1)

    class Removing(Store):
        def write(self, *arguments: object) -> str:
            shutil.rmtree(str(run / "checkpoints" / name), ignore_errors=True)
            return super().write(*arguments)  # type: ignore[arg-type]

    checkpoints = MirroredCheckpoints(run, Removing(f"{local.url}/run"), Retention(3))
    checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.skipped) == (1, set())
    assert whole_checkpoints(local.url, "run", tmp_path / "copy") == [name]


def test_a_checkpoint_that_is_removed_before_its_upload_is_counted(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    checkpoints = MirroredCheckpoints(run, Store(f"{local.url}/run"), Retention(3))
    checkpoints.announce("update-00000007")
    save(run, 8)
    checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.skipped) == (1, {"update-00000007"})


def test_a_damaged_checkpoint_is_not_uploaded(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    weights = run / "checkpoints" / save(run, 1) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    checkpoints = MirroredCheckpoints(run, Store(f"{local.url}/run"), Retention(3))
    with pytest.raises(mirrored_runs.CheckpointDamaged):
        checkpoints.sync()
    assert whole_checkpoints(local.url, "run", tmp_path / "copy") == []


def test_an_evaluation_replaces_only_the_manifest(place: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    name = save(run, 1)
    checkpoints = MirroredCheckpoints(run, store_of(place.url, "run"), Retention(3, Metric("accuracy", "higher")))
    checkpoints.sync()
    (local,), _ = storage.list_checkpoints(run / "checkpoints")
    content = {**local.manifest.__dict__, "tested": {"accuracy": 12.0}}
    storage.replace_manifest(local, type(local.manifest)(**content))
    assert checkpoints.pending() == [name]
    checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.pending()) == (1, [])
    assert whole_checkpoints(place.url, "run", tmp_path / "copy") == [name]
    (copy,), _ = storage.list_checkpoints(tmp_path / "copy" / "checkpoints")
    assert copy.manifest.tested == {"accuracy": 12.0}


def test_the_same_update_with_other_weights_replaces_a_checkpoint(place: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    name = save(run, 1)
    mirror(run, place.url)
    shutil.rmtree(str(run / "checkpoints" / name))
    save(run, 1, LARGE)
    assert mirror(run, place.url).checkpoints == 2
    assert verified(place.url, "run", tmp_path / "copy") == [name]
    assert same_files(run, tmp_path / "copy")


def test_another_run_is_not_overwritten(place: Place, tmp_path: Path) -> None:
    mirror(write_run(tmp_path / "run"), place.url)
    other = write_run(tmp_path / "other" / "run")
    with mirroring(other, place.url) as process:
        assert finish(process) == 1
    assert "/run holds another run; use another --run-dir" in memory.read(other).error
    assert memory.read(other).pending[:2] == ("config.yaml", "metrics.jsonl")


def test_a_folder_with_other_files_is_not_used(local: Place, tmp_path: Path) -> None:
    (tmp_path / "remote" / "run").mkdir(parents=True)
    (tmp_path / "remote" / "run" / "thesis.pdf").write_text("")
    run = write_run(tmp_path / "run")
    with mirroring(run, local.url) as process:
        assert finish(process) == 1
    assert "holds other files" in memory.read(run).error


def test_an_older_process_of_the_run_ends_when_another_one_mirrors_it(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with mirroring(run, local.url) as process:
        assert wait_until(lambda: bool(memory.read(run).place))
        copy = tmp_path / "taken over" / "run"
        shutil.copytree(str(run), str(copy))
        mirror(copy, local.url)
        (run / "metrics.jsonl").write_text("{}\n")
        assert process.stdin is not None
        process.stdin.write(b"update-00000001\n")
        process.stdin.flush()
        assert process.wait(60.0) == 1
    assert "another process mirrors the run" in memory.read(run).error


def test_objects_that_were_removed_or_truncated_are_uploaded_again(place: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    names = [save(run, 1), save(run, 2)]
    remote = store_of(place.url, "run")
    with mirroring(run, place.url) as process:
        assert reached(run, 2)
        remote.remove(f"checkpoints/{names[0]}/weights.safetensors")
        remote.write_bytes(f"checkpoints/{names[1]}/weights.safetensors", b"short")
        remote.remove("metrics.jsonl")
        remote.write_bytes("config.yaml", b"x")
        remote.remove("index.json")
        assert finish(process) == 0
    assert verified(place.url, "run", tmp_path / "copy") == names
    assert same_files(run, tmp_path / "copy")


def test_a_growing_file_is_uploaded_as_its_lines_come(local: Place, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with mirroring(run, local.url) as process:
        copy = tmp_path / "remote" / "run" / "metrics.jsonl"
        assert wait_until(copy.exists)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"update": 2}\n')
        assert process.stdin is not None
        process.stdin.write(b"update-00000002\n")
        process.stdin.flush()
        assert wait_until(lambda: len(copy.read_text().splitlines()) == 2)


def test_the_process_ends_by_itself_after_the_run(s3: Place, tmp_path: Path) -> None:
    assert s3.server is not None
    s3.server.kill()
    run = write_run(tmp_path / "run")
    with mirroring(run, s3.url, "--timeout-s=2") as process:
        began_s = time.monotonic()
        assert finish(process) == 1
        assert time.monotonic() - began_s < 30.0
