"""Small files have a SHA-256, large ones an XXH3-128; both find a damaged byte, and older checkpoints stay valid."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Callable

import pytest
import xxhash

from raypod.errors import CheckpointDamaged
from raypod.plan.plan import Plan
from raypod.training.checkpoint import format, resume, storage
from raypod.training.checkpoint.format import FileRecord, Manifest, manifest_from_json
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.saved_runs import flip_a_bit, save

Make = Callable[..., Plan]
WEIGHTS = "weights.safetensors"


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "LARGE_BYTES", 1)


@pytest.mark.parametrize("is_large", [False, True], ids=["sha256sum", "xxh128sum"])
def test_the_hash_is_that_of_a_common_command(make: Make, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    algorithm, of = ("xxh3_128", xxhash.xxh3_128) if is_large else ("sha256", hashlib.sha256)
    saved = save(make(), 44)
    size_bytes = min(record.size_bytes for record in saved.manifest.files.values())
    monkeypatch.setattr(format, "LARGE_BYTES", size_bytes if is_large else 1 << 20)
    path = save(make(), 44).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == (2 if is_large else 1)
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert record == {"size_bytes": len(content), algorithm: of(content).hexdigest()}
    storage.verify(storage.read_manifest(path))


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors"])
def test_a_damaged_byte_of_a_large_file_is_found_and_named(make: Make, name: str) -> None:
    plan = make()
    older = save(plan, 44)
    flip_a_bit(save(plan, 88).path / name)
    valid, damaged = resume.newest_valid(checkpoints_folder(plan.run_dir))
    assert valid == older
    (message,) = damaged
    assert message.endswith(f"the XXH3-128 of {name} does not match manifest.json")


@pytest.mark.usefixtures("all_are_large")
def test_a_checkpoint_of_before_stays_valid(make: Make) -> None:
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

    monkeypatch.setattr(format, "digest_of_file", fail)
    with pytest.raises(CheckpointDamaged, match=f"{WEIGHTS}.*Input/output error"):
        storage.verify(saved)
