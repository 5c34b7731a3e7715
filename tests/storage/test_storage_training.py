"""Trainings that are mirrored, resumed from a storage on a new folder, and read there by commands."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from bounded import wait_until
from storage.mirrored_runs import FLAGS, Place, same_files, store_of, verified
from storage.storage_servers import SECRET, free_port, use_s3

import raypod
import raypod.events
from raypod import train
from raypod.__main__ import main
from raypod.api import training
from raypod.checkpoint import storage as checkpoint_storage
from raypod.errors import ClusterError, ConfigError
from raypod.plan.urls import check_url, check_words, is_url, run_url
from raypod.storage import backends, memory
from raypod.storage.store import Store

EPOCHS = [*FLAGS, "--updates", "40", "--checkpoint-every", "10 updates"]


def summary_of(run: Path) -> Dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def warnings_of(capfd: pytest.CaptureFixture[str]) -> List[str]:
    out, err = capfd.readouterr()
    return [line for line in [*out.splitlines(), *err.splitlines()] if "warning" in line]


def test_a_run_continues_on_another_host_from_the_storage(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut, again = tmp_path / "whole", tmp_path / "cut", tmp_path / "again"
    assert train.main([*EPOCHS, "--run-dir", str(whole)]) == 0
    mirrored = [*EPOCHS, "--storage-path", place.url, "--run-dir", str(cut)]
    assert train.main(mirrored) == 0
    assert "warning" not in capfd.readouterr().out
    found = summary_of(cut)["storage"]
    assert (found["url"], found["not_mirrored"], found["failures"]) == (f"{place.url}/cut", [], 0)
    assert verified(place.url, "cut", tmp_path / "copy")
    assert same_files(cut, tmp_path / "copy")
    shutil.rmtree(str(cut))  # the head's disk is lost
    assert train.main(["--resume", f"{place.url}/cut", "--updates", "60", "--run-dir", str(again)]) == 0
    assert summary_of(again)["storage"]["not_mirrored"] == []
    assert len((again / "metrics.jsonl").read_text().splitlines()) == 60
    capfd.readouterr()
    assert main(["verify-data", f"{place.url}/again"]) == 0
    assert "proved: 60 updates" in capfd.readouterr().out
    reference = tmp_path / "reference"
    assert train.main([*EPOCHS, "--resume", str(whole), "--updates", "60", "--run-dir", str(reference)]) == 0
    assert summary_of(again)["weights_sha256"] == summary_of(reference)["weights_sha256"]
    monkeypatch.chdir(tmp_path)
    assert main(["report", f"{place.url}/again"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["evaluate", f"{place.url}/again", "--fleet", "inline", "--output", "result.json"]) == 0
    result = json.loads(Path("result.json").read_text())
    assert result["accuracy"] == summary_of(again)["test_accuracy"]
    assert result["checkpoint"] == f"{place.url}/again/checkpoints/update-00000060"


@pytest.fixture
def stored(local: Place, tmp_path: Path) -> Path:
    """The folder on the storage of a run of 40 updates, whose own folder is lost."""
    assert train.main([*EPOCHS, "--storage-path", local.url, "--run-dir", str(tmp_path / "run")]) == 0
    shutil.rmtree(str(tmp_path / "run"))
    return tmp_path / "remote" / "run"


@pytest.mark.parametrize("damage", ["truncated", "changed", "deleted", "no manifest"])
def test_a_damaged_checkpoint_on_the_storage_is_passed_over(
    stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    newest = stored / "checkpoints" / "update-00000040"
    weights = newest / "weights.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    elif damage == "deleted":
        weights.unlink()
    else:
        (newest / "manifest.json").unlink()
    run = tmp_path / "new"
    capfd.readouterr()
    assert train.main(["--resume", f"file://{stored}", "--updates", "50", "--run-dir", str(run)]) == 0
    err = capfd.readouterr().err
    assert "restored update-00000030" in err
    assert ("update-00000040" in err) == (damage != "no manifest")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 50
    assert main(["verify-data", str(run)]) == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "index.json", "evaluations.jsonl"])
def test_a_damaged_file_on_the_storage_is_named_and_not_used(
    stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (stored / name).write_bytes((stored / name).read_bytes()[:-3])
    capfd.readouterr()
    flags = ["--resume", f"file://{stored}", "--updates", "50", "--run-dir", str(tmp_path / "new")]
    assert train.main([*FLAGS, *flags]) == 0
    assert f"warning: {name} on file://{stored} is missing or damaged" in capfd.readouterr().err


def test_a_checkpoint_by_its_url(stored: Path, tmp_path: Path) -> None:
    url = f"file://{stored}/checkpoints/update-00000020"
    assert train.main(["--resume", url, "--updates", "30", "--run-dir", str(tmp_path / "new")]) == 0
    assert summary_of(tmp_path / "new")["updates"] == 30
    with pytest.raises(ConfigError, match="there is no such checkpoint on the storage"):
        raypod.fit(resume=f"file://{stored}/checkpoints/update-00000021", run_dir=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_the_same_command_continues_where_the_host_is_newer(
    stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "new"
    command = ["--resume", f"file://{stored}", "--run-dir", str(run), "--storage-path", f"file://{tmp_path}/other"]
    assert train.main([*command, "--updates", "50"]) == 0
    capfd.readouterr()
    assert train.main([*command, "--updates", "60"]) == 0
    assert "holds update-00000050 of the same run already; resuming from it" in capfd.readouterr().err
    other = tmp_path / "another"
    assert train.main([*EPOCHS, "--run-dir", str(other)]) == 0
    assert train.main(["--resume", f"file://{stored}", "--updates", "60", "--run-dir", str(other)]) == 2
    assert "holds another run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "2", "--updates", "60"], "global_batch_size is"),
        (["--updates", "40"], "already at update 40 of 40"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_a_run_that_cannot_resume_leaves_nothing(
    stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: List[str], words: str, mode: List[str]
) -> None:
    before = sorted(stored.rglob("*"))
    run = tmp_path / "new"
    capfd.readouterr()
    assert train.main(["--resume", f"file://{stored}", "--run-dir", str(run), *flags, *mode]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert f"file://{stored}" in err, "the message names the URL, not its copy"
    assert not run.exists()
    assert sorted(stored.rglob("*")) == before


def test_what_was_restored_is_removed_if_the_pod_cannot_run_it(
    stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pod(*arguments: object) -> None:
        raise ClusterError("the pod has no hosts")

    monkeypatch.setattr(training, "fleet_for", no_pod)
    run = tmp_path / "new"
    assert train.main(["--resume", f"file://{stored}", "--run-dir", str(run), "--updates", "60"]) == 2
    err = capfd.readouterr().err
    assert "restored update-00000040" in err
    assert "the pod has no hosts" in err
    assert not run.exists()


def test_a_dry_run_copies_nothing(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    assert train.main(["--resume", f"file://{stored}", "--run-dir", str(run), "--updates", "60", "--dry-run"]) == 0
    assert not run.exists()


def test_an_absent_storage_costs_one_warning_and_the_time_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("s3fs") is None:
        pytest.skip("the package s3fs is not installed: pip install 'raypod[s3]'")
    use_s3(monkeypatch, free_port())
    run = tmp_path / "run"
    flags = ["--storage-path", "s3://bucket/prefix", "--storage-timeout-s", "2", "--run-dir", str(run)]
    began_s = time.monotonic()
    assert train.main([*EPOCHS, *flags]) == 0
    assert time.monotonic() - began_s < 120.0
    assert len(warnings_of(capfd)) == 1
    found = summary_of(run)["storage"]
    assert "metrics.jsonl" in found["not_mirrored"] or found["not_mirrored"] == ["everything since the last upload"]
    checkpoints, _ = checkpoint_storage.list_checkpoints(run / "checkpoints")
    assert len(checkpoints) == 3
    for path in run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_training_whose_storage_server_is_killed_and_started_again(
    sftp: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server, run = sftp.server, tmp_path / "run"
    assert server is not None
    remote = tmp_path / "remote" / "run" / "checkpoints" / "update-00000010" / "manifest.json"

    def react(event: raypod.events.Event) -> None:
        if isinstance(event, raypod.events.UpdateDone) and event.update == 20:
            assert wait_until(remote.exists)
            server.kill()
        elif isinstance(event, raypod.events.RunEnded):
            assert wait_until(lambda: memory.read(run).failures >= 2)
            server.start()

    fit = {"fleet": "inline", "device": "emulated", "model": "tiny", "replicas": 2, "lr_schedule": "constant"}
    raypod.fit(
        callbacks=react, updates=40, checkpoint_every="10 updates", storage_path=sftp.url, run_dir=str(run), **fit
    )
    found = summary_of(run)["storage"]
    assert found["not_mirrored"] == []
    assert found["failures"] >= 2
    assert len(warnings_of(capfd)) <= 1, "none if the server answers before the coordinator looks"
    assert verified(sftp.url, "run", tmp_path / "copy")
    assert same_files(run, tmp_path / "copy")
    whole = tmp_path / "whole"
    assert train.main([*EPOCHS, "--run-dir", str(whole)]) == 0
    assert summary_of(whole)["weights_sha256"] == summary_of(run)["weights_sha256"]


def test_keep_remote_keeps_more_than_the_host(local: Place, tmp_path: Path) -> None:
    flags = ["--keep-checkpoints", "1", "--keep-remote", "9", "--storage-path", local.url]
    assert train.main([*EPOCHS, *flags, "--run-dir", str(tmp_path / "run")]) == 0
    found = summary_of(tmp_path / "run")["storage"]
    assert found["checkpoints"] + found["skipped_checkpoints"] >= 4
    assert len(verified(local.url, "run", tmp_path / "copy")) == found["checkpoints"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://bucket/x", "--storage-path foo://bucket/x: unknown scheme foo://"),
        ("/mnt/store", "write a URL, as in s3://bucket/prefix, or file:///mnt/store for a folder"),
        ("s3://", "--storage-path s3://: the URL names no folder"),
        ("file://relative", "the URL names no folder; write it as in file:///mnt/store"),
        ("memory://x", "which is read-only or volatile"),
        ("simplecache::s3://b/p", "chained URLs are not supported"),
        (f"s3://key:{SECRET}@bucket/x", "--storage-path s3://...: a URL holds no credentials"),
        ("s3://AKIAKEYID@bucket/x", "--storage-path s3://...: a URL holds no credentials"),
        (f"s3://bucket/x?secret={SECRET}", "--storage-path s3://...: a URL holds no credentials"),
        (f"sftp://user:{SECRET}@host/x", "--storage-path sftp://...: a URL holds no credentials"),
        ("sftp://host:port/x", "--storage-path sftp://...: Port could not be cast"),
    ],
)
def test_wrong_urls_are_one_line(url: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for spelling in (["--storage-path", url], [f"--storage-path={url}"], [f"run.storage_path={url}"]):
        assert train.main([*FLAGS, *spelling, "--run-dir", str(tmp_path / "run")]) == 2
        out, err = capfd.readouterr()
        assert words.partition("--storage-path ")[2] in err.replace("run.storage_path ", "") or words in err
        assert len(err.splitlines()) == 1
        assert not out
        assert SECRET not in err
    assert list(tmp_path.iterdir()) == []


def test_secrets_in_a_config_file_are_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for key in ("storage_path", "resume"):
        (tmp_path / "config.yaml").write_text(f"run:\n  {key}: s3://key:{SECRET}@bucket/x\n")
        assert train.main(["--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]) == 2
        err = capfd.readouterr().err
        assert "a URL holds no credentials" in err
        assert SECRET not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs"), ("sftp", "paramiko", "sftp")]
)
def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, extra: str) -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == package else find(name, *more)  # noqa: E731
    monkeypatch.setattr(backends.importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=rf"needs the package {package}, .*pip install 'raypod\[{extra}\]'"):
        backends.check_scheme(f"{scheme}://bucket/x", "--storage-path")


def test_a_run_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/nothing"
    for command in (["verify-data", url], ["report", url], ["evaluate", url]):
        assert main(command) == 2
        assert f"{url}: there is no such run on the storage" in capfd.readouterr().err
    assert train.main(["--resume", url]) == 2
    assert f"--resume {url}: there is no such run on the storage" in capfd.readouterr().err


def test_an_unreachable_storage_is_a_failure_not_a_users_mistake(
    sftp: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sftp.server is not None
    Store(f"{sftp.url}/run").write_bytes("index.json", b"{}")
    sftp.server.kill()
    assert train.main(["--resume", f"{sftp.url}/run", "--run-dir", str(tmp_path / "run")]) == 1
    err = capfd.readouterr().err
    assert "the storage cannot be read: " in err
    assert not (tmp_path / "run").exists()
    assert store_of(sftp.url, "run").url


def test_urls() -> None:
    assert [is_url(text) for text in ("s3://b", "a::b", "/x", "x", "C:/x", "training.model=a:b")] == [
        *(True, True, False, False, False, False)
    ]
    assert check_url("s3://b/p//", "x") == "s3://b/p"
    assert check_url("abfs://container@account.dfs.core.windows.net/p", "x")
    assert run_url("s3://b/run/checkpoints/update-00000007") == ("s3://b/run", "update-00000007")
    assert run_url("s3://b/run").name == "run"
    check_words(["--data-dir", "/x", "a.b=c", "--resume", "s3://b/p"])
