"""The files of a checkpoint: what any safetensors reader can load, and what a foreign file cannot do."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.checkpoint import tensors
from raypod.errors import CheckpointDamaged
from raypod.host import files

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
STATE = {f"layer.{place}": torch.arange(6).reshape(2, 3).to(dtype) for place, dtype in enumerate(DTYPES)}
STATE["scalar"], STATE["empty"] = torch.tensor(7), torch.zeros(0, 3)
STATE["a view"] = torch.arange(12.0).reshape(3, 4).t()


def written(path: Path, state: Dict[str, torch.Tensor], metadata: Dict[str, str]) -> Path:
    path.unlink() if path.exists() else None
    with files.new_file(path) as file:
        tensors.write_tensors(file, state, metadata)
    return path


def equal(ours: Dict[str, torch.Tensor], theirs: Dict[str, torch.Tensor]) -> bool:
    return set(ours) == set(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    loaded, metadata = tensors.read_tensors(written(tmp_path / "file", STATE, {"made by": "a test"}))
    assert equal(loaded, STATE)
    assert metadata == {"made by": "a test"}


def test_the_safetensors_package_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    assert equal(package.load_file(str(written(tmp_path / "ours", STATE, {"a": "b"}))), STATE)
    contiguous = {name: tensor.contiguous() for name, tensor in STATE.items()}
    package.save_file(contiguous, str(tmp_path / "theirs"))
    assert equal(tensors.read_tensors(tmp_path / "theirs")[0], STATE)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nests = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(nests)
@settings(max_examples=60, deadline=None)
def test_what_is_packed_comes_back(nested: Any) -> None:
    named, metadata = tensors.pack_nested(nested)
    path = Path("/dev/shm") / f"raypod-test-{id(nested)}" if Path("/dev/shm").is_dir() else Path(f"t-{id(nested)}")
    try:
        assert tensors.unpack_nested(written(path, named, metadata)) == nested
    finally:
        path.unlink()


def test_a_nest_of_tensors_comes_back(tmp_path: Path) -> None:
    nested = {"state": {0: {"momentum": torch.ones(3)}}, "groups": [{"lr": 0.1, "params": (0, 1)}], "none": None}
    loaded = tensors.unpack_nested(written(tmp_path / "file", *tensors.pack_nested(nested)))
    assert torch.equal(loaded["state"][0].pop("momentum"), nested["state"][0].pop("momentum"))
    assert loaded == nested


def test_what_is_neither_tensor_nor_number_is_named() -> None:
    with pytest.raises(TypeError, match="cannot hold a PosixPath"):
        tensors.pack_nested({"where": Path()})


def test_a_copy_does_not_follow_the_training() -> None:
    weight = torch.zeros(2)
    copy = tensors.copied({"a": [weight], "lr": 0.1})
    weight += 1
    assert copy["a"][0].tolist() == [0.0, 0.0]
    assert copy["lr"] == 0.1


class Malicious:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("executed"), "by loading")


def foreign_files() -> Dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save({"weights": torch.ones(2)}, buffer)
    huge = b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    deep = b"[" * 100_000
    return {
        "empty": b"",
        "pickle": pickle.dumps(Malicious()),
        "torch.save": buffer.getvalue(),
        "text": b"hello, world",
        "huge": len(huge).to_bytes(8, "little") + huge,
        "deep": len(deep).to_bytes(8, "little") + deep,
        "a list": (2).to_bytes(8, "little") + b"[]",
        "negative": (lambda header: len(header).to_bytes(8, "little") + header)(
            b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}'
        ),
    }


@pytest.mark.parametrize("kind", list(foreign_files()))
def test_a_foreign_file_is_named_and_nothing_is_executed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(foreign_files()[kind])
    with pytest.raises(CheckpointDamaged, match="weights.safetensors is damaged"):
        tensors.unpack_nested(path)
    assert not Path("executed").exists()


def test_a_file_cut_off_anywhere_is_damaged(tmp_path: Path) -> None:
    path = written(tmp_path / "file", {"w": torch.arange(4.0)}, {})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointDamaged):
            tensors.read_tensors(path)
