"""URLs of storages: which are accepted, and that no message shows a secret."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from raypod import train
from raypod.errors import ConfigError
from raypod.system.remote import backends
from raypod.system.remote.errors import describe
from raypod.system.urls import check_url, check_words, is_url, run_url
from tests.support.mirrored_runs import FLAGS
from tests.support.storage_servers import SECRET


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
    assert [is_url(text) for text in ("s3://b", "a::b", "/x", "x", "C:/x", "training.model=a:b")] == [
        *(True, True, False, False, False, False)
    ]
    assert check_url("s3://b/p//", "x") == "s3://b/p"
    assert check_url("abfs://container@account.dfs.core.windows.net/p", "x")
    assert run_url("s3://b/run/checkpoints/update-00000007") == ("s3://b/run", "update-00000007")
    assert run_url("s3://b/run").name == "run"
    check_words(["--data-dir", "/x", "a.b=c", "--resume", "s3://b/p"])
