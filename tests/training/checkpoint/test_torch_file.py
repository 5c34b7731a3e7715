"""`torch_file.read`: the values of `torch.load`, in every dtype and layout, and nothing that executes code."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypod.training.checkpoint import initial_weights

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def _saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, str(path), **options)
    return path


def test_the_content_is_that_of_torch_load(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    content = {
        "dtypes": [torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in DTYPES],
        "views": [base[1], base.permute(2, 0, 1), base[:, 1:, ::2], base.expand(2, 2, 3, 4), torch.zeros(0, 3)],
        "state": network.state_dict(),
        "parameters": OrderedDict(network.named_parameters()),
        "values": {"epoch": 3, "rate": 0.1, "name": "a", "betas": (0.9, 0.99), "none": None, "shape": base.shape},
    }
    found = initial_weights.read_torch_file(_saved(tmp_path / "a.pt", content))
    expected = torch.load(str(tmp_path / "a.pt"), weights_only=True)
    for name in ("dtypes", "views"):
        assert [each.dtype for each in found[name]] == [each.dtype for each in expected[name]]
        assert all(torch.equal(*pair) for pair in zip(found[name], expected[name]))
        assert [each.shape for each in found[name]] == [each.shape for each in expected[name]]
    for name in ("state", "parameters"):
        assert list(found[name]) == list(expected[name])
        assert all(torch.equal(found[name][key], expected[name][key]) for key in expected[name])
    assert found["values"] == expected["values"]


def _with(path: Path, data: bytes, storage: bytes = b"\0" * 8) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", storage)
    return path


class _Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("function", [exec, torch.load, getattr, torch.nn.Linear, OrderedDict.fromkeys])
def test_a_file_that_calls_anything_else_is_refused(function: Any, tmp_path: Path) -> None:
    path = _with(tmp_path / "a.pt", pickle.dumps(_Call(function, "1"), protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="it refers to"):
        initial_weights.read_torch_file(path)


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pt", torch.zeros(4))
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        data = archive.read(name)
    size = data.index(b"K\x04\x85")  # the tuple (4,)
    damaged = data[:size] + b"K\x7f\x85" + data[size + 3 :]
    with pytest.raises(pickle.UnpicklingError, match="RuntimeError"):
        initial_weights.read_torch_file(_with(tmp_path / "b.pt", damaged, b"\0" * 16))


@pytest.mark.parametrize("content", [b"", b"no zip", pickle.dumps(1)])
def test_damaged_files_and_those_before_torch_1_6_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match="zip"):
        initial_weights.read_torch_file(tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="zip"):
        initial_weights.read_torch_file(
            _saved(tmp_path / "old.pt", {"a": torch.zeros(1)}, _use_new_zipfile_serialization=False)
        )
