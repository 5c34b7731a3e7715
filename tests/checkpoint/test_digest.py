"""Small files have a SHA-256, large ones an XXH3-128; both find a damaged byte, and older checkpoints stay valid."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from other_disks import DirectServer, Request
from saved_runs import save

from raypod.checkpoint import digest, resume, storage, transfer, writer
from raypod.checkpoint.format import FileRecord, Manifest, Retention, manifest_from_json
from raypod.checkpoint.resume import manifest_of
from raypod.checkpoint.storage import checkpoints_folder
from raypod.checkpoint.transfer import CheckpointFiles, CheckpointReceiver
from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.plan import Plan

Make = Callable[..., Plan]
WEIGHTS = "weights.safetensors"


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every file counts as a large one; return the package of their hash."""
    monkeypatch.setattr(digest, "LARGE_BYTES", 1)
    return pytest.importorskip("xxhash", reason="the package xxhash is not installed")


@pytest.fixture
def without_xxhash(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which the package xxhash is not installed."""
    return lambda: monkeypatch.setitem(sys.modules, "xxhash", None)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def test_small_files_have_the_hash_of_sha256sum(make: Make) -> None:
    path = save(make(), 44).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert record == {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_large_files_have_the_hash_of_xxh128sum(make: Make, all_are_large: Any) -> None:
    path = save(make(), 44).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 2
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert record == {"size_bytes": len(content), "xxh3_128": all_are_large.xxh3_128(content).hexdigest()}
    storage.verify(storage.read_manifest(path))


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors"])
def test_a_damaged_byte_of_a_large_file_is_found_and_named(make: Make, all_are_large: Any, name: str) -> None:
    plan = make()
    older = save(plan, 44)
    flip_a_bit(save(plan, 88).path / name)
    valid, damaged = resume.newest_valid(checkpoints_folder(plan.run_dir))
    assert valid == older
    (message,) = damaged
    assert message.endswith(f"the XXH3-128 of {name} does not match manifest.json")


def test_without_the_package_every_file_has_a_sha256(
    make: Make, monkeypatch: pytest.MonkeyPatch, without_xxhash: Callable[[], None]
) -> None:
    monkeypatch.setattr(digest, "LARGE_BYTES", 1)
    without_xxhash()
    saved = save(make(), 44)
    assert [record.algorithm for record in saved.manifest.files.values()] == ["sha256"] * 2
    storage.verify(storage.read_manifest(saved.path))


def test_without_the_package_the_error_names_it(
    make: Make, tmp_path: Path, all_are_large: Any, without_xxhash: Callable[[], None]
) -> None:
    plan = make()
    saved = save(plan, 44)
    without_xxhash()
    with pytest.raises(ConfigError, match=r"weights.safetensors cannot be verified: .* pip install xxhash"):
        resume.find_checkpoint(make(run={"resume": str(saved.path)}))
    with pytest.raises(CheckpointDamaged, match="pip install xxhash"):
        transfer.fetch(DirectServer(CheckpointFiles(str(saved.path))), saved, tmp_path, 60)


def test_a_checkpoint_of_before_stays_valid(make: Make, all_are_large: Any) -> None:
    saved = save(make(), 44)
    content = json.loads((saved.path / "manifest.json").read_text())
    files = {name: (saved.path / name).read_bytes() for name in content["files"]}
    content["files"] = {
        name: {"size_bytes": len(each), "sha256": hashlib.sha256(each).hexdigest()} for name, each in files.items()
    }
    text = json.dumps({**content, "format": 1}, indent=2) + "\n"
    (saved.path / "manifest.json").write_text(text)
    line = f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n"
    (saved.path / "manifest.sha256").write_text(line)
    found = storage.read_manifest(saved.path)
    storage.verify(found)
    assert found.manifest.to_json().decode() == text  # `replace_manifest` depends on it
    flip_a_bit(saved.path / WEIGHTS)
    with pytest.raises(CheckpointDamaged, match=f"the SHA-256 of {WEIGHTS} does not match manifest.json"):
        storage.verify(found)


@pytest.mark.parametrize("record", [{"size_bytes": 1}, {"size_bytes": 1, "sha256": "a", "xxh3_128": "b"}])
def test_a_file_has_one_hash(record: Any) -> None:
    manifest = Manifest(4, 0, 0, 1, {}, {}, {}, files={WEIGHTS: FileRecord(1, "a")})
    content = json.loads(manifest.to_json())
    content["files"][WEIGHTS] = record
    with pytest.raises(ValueError, match="a file has one hash"):
        manifest_from_json(json.dumps(content).encode())


def test_an_unreadable_file_is_damaged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(make(), 44)

    def fail(path: Path, algorithm: str) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(digest, "digest_of_file", fail)
    with pytest.raises(CheckpointDamaged, match=f"{WEIGHTS}.*Input/output error"):
        storage.verify(saved)


def test_large_files_are_sent_and_fetched_with_their_hash(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_are_large: Any
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    plan = make()
    there = checkpoints_folder(tmp_path / "there")
    state = writer.State({"weight": torch.arange(100.0)}, {"momentum": torch.arange(50.0)})

    def send(fault: Callable[[int, Request], Request]) -> Any:
        server = DirectServer(CheckpointReceiver(str(there)), fault)
        return writer.send_checkpoint(
            server, manifest_of(plan, 44, 1, "", {}), state, Retention(3, plan.best_metric), 60
        )

    def damage(number: int, request: Request) -> Request:
        method, arguments = request
        return (method, (arguments[0], bytes(len(arguments[1])))) if method == "write" else request

    with pytest.raises(ConnectionError, match="differ from those that were sent"):
        send(damage)
    assert storage.list_checkpoints(there) == ([], [])
    sent = send(lambda number, request: request)
    assert {record.algorithm for record in sent.manifest.files.values()} == {"xxh3_128"}
    storage.verify(sent)
    (tmp_path / "copy").mkdir()
    transfer.fetch(DirectServer(CheckpointFiles(str(sent.path))), sent, tmp_path / "copy", 60)
    assert (tmp_path / "copy" / WEIGHTS).read_bytes() == (sent.path / WEIGHTS).read_bytes()
    flip_a_bit(sent.path / WEIGHTS)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointDamaged, match=f"{WEIGHTS} differs"):
        transfer.fetch(DirectServer(CheckpointFiles(str(sent.path))), sent, tmp_path / "other", 60)
