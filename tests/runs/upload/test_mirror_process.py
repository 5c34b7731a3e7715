"""The process that mirrors a run folder."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from raypod import train
from raypod.runs.upload import mirror_record
from tests.support.mirrored_runs import (
    FLAGS,
    announce,
    different_files,
    finish,
    mirroring,
    reached,
    save,
    summary_of,
    verified,
    write_run,
)
from tests.support.storage_servers import SECRET

pytestmark = pytest.mark.usefixtures("processes")


def test_the_process_uploads_what_it_is_told_and_ends_with_its_input(url: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run")
    first = save(run, 1)
    with mirroring(run, url) as process:
        assert reached(run, 1)
        second = save(run, 2)
        announce(process, second)
        assert reached(run, 2)
        assert finish(process) == 0
    assert mirror_record.read(run).is_complete
    assert verified(url, "a run", tmp_path / "copy") == [first, second]
    assert not different_files(run, tmp_path / "copy")


def test_a_process_that_cannot_upload_ends_at_its_limit_and_shows_no_secret(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_API_TOKEN", SECRET)
    (tmp_path / SECRET).touch()  # no folder
    run = write_run(tmp_path / "run")
    with mirroring(run, f"file://{tmp_path}/{SECRET}", "--timeout-s=3") as process:
        assert finish(process) == -signal.SIGKILL
    found = mirror_record.read(run)
    assert "***" in found.error
    assert (found.place, found.is_complete) == ("", False)
    assert "***" in (run / "logs" / "storage.log").read_text()
    assert not [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_training_continues_on_another_host_from_the_storage(url: str, tmp_path: Path, capfd: Any) -> None:
    whole, cut, again = tmp_path / "whole", tmp_path / "cut", tmp_path / "again"
    flags = [*FLAGS, "--checkpoint-every", "10 updates"]
    assert train.main([*flags, "--updates", "40", "--run-dir", str(whole)]) == 0
    assert train.main([*flags, "--updates", "20", "--storage-path", url, "--run-dir", str(cut)]) == 0
    assert "warning" not in capfd.readouterr().out
    found = summary_of(cut)["storage"]
    assert (found["url"], found["not_mirrored"], found["failures"]) == (f"{url}/cut", [], 0)
    assert verified(url, "cut", tmp_path / "copy")
    assert not different_files(cut, tmp_path / "copy")
    shutil.rmtree(str(cut))  # the head's disk is lost
    assert train.main(["--resume", f"{url}/cut", "--updates", "40", "--run-dir", str(again)]) == 0
    assert summary_of(again)["storage"]["not_mirrored"] == []
    assert summary_of(again)["weights_sha256"] == summary_of(whole)["weights_sha256"]
