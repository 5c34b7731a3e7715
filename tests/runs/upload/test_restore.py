"""Runs that resume from a storage into a new folder, commands that read a run there, and URLs of storages."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, Callable, List

import pytest

from raypod import train
from raypod.__main__ import main
from raypod.api import training
from raypod.errors import ClusterError, ConfigError, RunError
from raypod.system.remote import backends
from raypod.system.remote.errors import describe
from raypod.system.urls import check_url, check_words, is_url, run_url
from tests.support.mirrored_runs import FLAGS, mirror, summary_of
from tests.support.storage_servers import SECRET

NEWEST = "update-00000004"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder on the storage of a run of 4 updates with a checkpoint at each second one, which has evaluated."""
    folder = tmp_path_factory.mktemp("template")
    flags = [*FLAGS, "--updates", "4", "--checkpoint-every", "2 updates", "--run-dir", str(folder / "run")]
    assert train.main(flags) == 0
    mirror(folder / "run", f"file://{folder}/remote")
    return folder / "remote" / "run"


@pytest.fixture
def stored(template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    capfd.readouterr()
    return Path(shutil.copytree(str(template), str(tmp_path / "remote" / "run")))


@pytest.fixture
def resume(stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Resume the run until update 5 into the folder `new`, which must end with a code; return stderr."""

    def run(*flags: str, code: int = 0) -> str:
        folder = str(tmp_path / "new")
        assert train.main(["--resume", f"file://{stored}", "--run-dir", folder, "--updates", "5", *flags]) == code
        return capfd.readouterr().err

    return run


def test_commands_read_a_run_that_is_on_a_storage(stored: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify-data", f"file://{stored}"]) == 0
    assert "proved: 4 updates" in capfd.readouterr().out
    assert main(["report", f"file://{stored}"]) == 0
    assert Path("report.html").is_file()
    assert main(["evaluate", f"file://{stored}", "--fleet", "inline", "--output", "result.json"]) == 0
    result = json.loads(Path("result.json").read_text())
    assert result["accuracy"] == summary_of(stored)["test_accuracy"]
    assert result["checkpoint"] == f"file://{stored}/checkpoints/{NEWEST}"
    url = f"file://{tmp_path}/nothing"
    for command in (["verify-data", url], ["report", url], ["evaluate", url]):
        assert main(command) == 2
        assert f"{url}: there is no such run on the storage" in capfd.readouterr().err
    assert train.main(["--resume", url]) == 2
    assert f"--resume {url}: there is no such run on the storage" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "changed", "deleted", "no manifest"])
def test_a_damaged_stored_checkpoint_is_passed_over(stored: Path, resume: Any, tmp_path: Path, damage: str) -> None:
    newest = stored / "checkpoints" / NEWEST
    weights = newest / "weights.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    else:
        (weights if damage == "deleted" else newest / "manifest.json").unlink()
    err = resume()
    assert "restored update-00000002" in err
    assert (NEWEST in err) == (damage != "no manifest")
    assert len((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()) == 5
    assert main(["verify-data", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "index.json", "evaluations.jsonl"])
def test_a_damaged_file_on_the_storage_is_named_and_not_used(stored: Path, resume: Any, name: str) -> None:
    (stored / name).write_bytes((stored / name).read_bytes()[:-3])
    assert f"warning: {name} on file://{stored} is missing or damaged" in resume(*FLAGS)


def test_a_checkpoint_by_its_url(stored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, code in (("new", 0), ("none", 2)):
        url = f"file://{stored}/checkpoints/update-0000000{2 if code == 0 else 3}"
        assert train.main(["--resume", url, "--updates", "3", "--run-dir", str(tmp_path / name)]) == code
    assert "there is no such checkpoint on the storage" in capfd.readouterr().err
    assert summary_of(tmp_path / "new")["updates"] == 3
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_by_its_url_counts_in_the_folder_of_the_run(
    stored: Path,
    resume: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def lost(*arguments: object) -> None:
        raise RunError("the pod is lost")

    resume()
    new, url = tmp_path / "new", f"file://{stored}/checkpoints/update-00000002"

    def again(updates: int, code: int = 0) -> str:
        flags = ["--updates", str(updates), "--checkpoint-every", "2 updates", "--run-dir", str(new)]
        assert train.main(["--resume", url, *flags]) == code
        if code:
            return capfd.readouterr().err
        assert len((new / "metrics.jsonl").read_text().splitlines()) == updates
        assert (new / "checkpoints" / "LATEST").read_text() == f"update-{updates:08d}\n"
        return capfd.readouterr().err

    assert "restored update-00000002" in again(3)
    assert main(["verify-data", str(new)]) == 0
    assert "holds update-00000002 already; resuming from it" in again(5)
    state = json.loads((new / "state.json").read_text())
    (new / "state.json").write_text(json.dumps({**state, "state": "interrupted"}))
    assert "holds update-00000005 of the same run already; resuming from it" in again(6)
    with monkeypatch.context() as patched:
        patched.setattr(training, "fleet_for", lost)
        assert "the pod is lost" in again(7, code=1)
    assert "holds update-00000002 already; resuming from it" in again(7), "it had not begun"


def test_the_files_of_a_folder_stay_if_no_stored_checkpoint_is_valid(stored: Path, resume: Any, tmp_path: Path) -> None:
    resume()
    new, before = tmp_path / "new", {}
    shutil.rmtree(str(new / "checkpoints"))
    for name in ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "storage.json"):
        (new / name).write_bytes((new / name).read_bytes() + b"\n")
        before[name] = (new / name).read_bytes()
    for weights in stored.glob("checkpoints/*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert "no valid checkpoint" in resume(code=2)
    assert {name: (new / name).read_bytes() for name in before} == before


def test_the_same_command_continues_where_the_host_is_newer(resume: Any, tmp_path: Path, capfd: Any) -> None:
    resume()
    (tmp_path / "new" / "storage.json").write_bytes(b"")  # after a loss of power
    assert "holds update-00000005 of the same run already; resuming from it" in resume("--updates", "6")
    shutil.rmtree(str(tmp_path / "new"))
    assert train.main([*FLAGS, "--updates", "4", "--run-dir", str(tmp_path / "new")]) == 0
    assert "holds another run" in resume(code=2)


@pytest.mark.parametrize(
    ("flags", "words"), [(["--batch-size", "2"], "global_batch_size is"), (["--updates", "4"], "already at update 4")]
)
@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_a_run_that_cannot_resume_leaves_nothing(
    stored: Path, resume: Callable[..., str], tmp_path: Path, flags: List[str], words: str, mode: List[str]
) -> None:
    before = sorted(stored.rglob("*"))
    err = resume(*flags, *mode, code=2)
    assert words in err
    assert f"file://{stored}" in err, "the message names the URL, not its copy"
    assert not (tmp_path / "new").exists()
    assert sorted(stored.rglob("*")) == before


def test_what_was_restored_is_removed_if_the_pod_cannot_run_it(resume: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def no_pod(*arguments: object) -> None:
        raise ClusterError("the pod has no hosts")

    resume("--dry-run")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(training, "fleet_for", no_pod)
    err = resume(code=2)
    assert f"restored {NEWEST}" in err
    assert "the pod has no hosts" in err
    assert not (tmp_path / "new").exists()


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
        assert (len(err.splitlines()), out) == (1, "")
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


def test_secrets_of_the_files_of_backends_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials, google = tmp_path / "credentials", tmp_path / "google.json"
    credentials.write_text(f"[default]\naws_access_key_id = AKIA1234567890\naws_secret_access_key = {SECRET}\n")
    google.write_text('{"private_key": "-----BEGIN abcdef", "client_email": "me@example.com"}')
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google))
    monkeypatch.setenv("MY_API_TOKEN", "tok-123456")
    shown = describe(OSError(f"AKIA1234567890 with {SECRET} and -----BEGIN abcdef\nand tok-123456: denied"))
    assert shown == "OSError: *** with *** and *** and ***: denied"


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("sftp", "paramiko")])
def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == package else find(name, *more)  # noqa: E731
    monkeypatch.setattr(backends.importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=rf"needs the package {package}, .*pip install 'raypod\[{scheme}\]'"):
        backends.check_scheme(f"{scheme}://bucket/x", "--storage-path")


def test_urls() -> None:
    texts = ("s3://b", "a::b", "/x", "x", "C:/x", "training.model=a:b")
    assert [text for text in texts if is_url(text)] == ["s3://b", "a::b"]
    assert check_url("s3://b/p//", "x") == "s3://b/p"
    assert check_url("abfs://container@account.dfs.core.windows.net/p", "x")
    assert run_url("s3://b/run/checkpoints/update-00000007") == ("s3://b/run", "update-00000007")
    assert run_url("s3://b/run").name == "run"
    check_words(["--data-dir", "/x", "a.b=c", "--resume", "s3://b/p"])
