"""Runs that start from the weights of another one or of a file of torch, which executes no code."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from raypod import train
from raypod.training.checkpoint import initial_weights, storage
from raypod.training.checkpoint.tensors import read_tensors
from raypod.training.data.digits import load_digits
from raypod.training.models import optimizers

INLINE = ["--fleet", "inline", "--device", "emulated"]
TINY = [*INLINE, "--model", "tiny", "--updates", "2"]
Samples = List[Tuple[torch.Tensor, int]]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def digits_from_5(folder: object) -> Tuple[Samples, Samples, int]:
    """Return the digits 5 to 9 as classes 0 to 4: every fourth image is a test image."""
    chosen = [(image, int(label)) for image, label in zip(*load_digits()) if label >= 5]
    pairs = [(torch.from_numpy(image).float().reshape(1, 8, 8) / 16, label - 5) for image, label in chosen]
    test = pairs[::4]
    return [pair for index, pair in enumerate(pairs) if index % 4], test, 5


def command(folder: Path, *flags: str) -> Dict[str, Any]:
    assert train.main([*INLINE, "--run-dir", str(folder), *flags]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def weights(folder: Path) -> Dict[str, torch.Tensor]:
    name = storage.latest_name(folder)
    assert name is not None
    return read_tensors(folder / "checkpoints" / name / "weights.safetensors")[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the model `tiny`, with `head.weight` and `head.bias`, and with two checkpoints."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    command(folder, *TINY, "--checkpoint-every", "1 updates")
    return folder


def test_fine_tuning_on_half_of_the_digits_trains_a_new_head_only(tmp_path: Path) -> None:
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    command(pretrained, "--updates", "2")
    half = ["--dataset", f"{__name__}:digits_from_5", "--updates", "2", "--checkpoint-every", "1 updates"]
    start = ["--init-weights", str(pretrained), "--init-ignore", "head.*", "--freeze", "features"]
    command(tuned, *half, *start)
    before, after = weights(pretrained), weights(tuned)
    assert after["head.weight"].shape == (5, 64)
    first = read_tensors(tuned / "checkpoints" / "update-00000001" / "weights.safetensors")[0]
    assert not torch.equal(first["head.weight"], after["head.weight"])
    features = [name for name in before if name.startswith("features.")]
    assert any(name.endswith("running_mean") for name in features)
    assert all(torch.equal(before[name], after[name]) for name in features)


def test_any_form_of_the_weights_is_the_same_start_and_a_resume_needs_no_file(tiny: Path, tmp_path: Path) -> None:
    pickled, checkpoint = tmp_path / "weights.pt", tiny / "checkpoints" / "update-00000002"
    torch.save({"state_dict": {name: value.double() for name, value in weights(tiny).items()}}, pickled)
    flags = ["--model", "tiny", "--lr-schedule", "constant", "--updates"]
    hashes = [
        command(tmp_path / str(index), *flags, "4", "--init-weights", str(path))["weights_sha256"]
        for index, path in enumerate((pickled, tiny, checkpoint, checkpoint / "weights.safetensors"))
    ]
    command(tmp_path / "part", *flags, "2", "--init-weights", str(pickled))
    pickled.unlink()
    hashes.append(command(tmp_path / "part", "--resume", str(tmp_path / "part"), "--updates", "4")["weights_sha256"])
    assert len(set(hashes)) == 1


class Malicious:
    def __reduce__(self) -> Tuple[Any, Tuple[str]]:
        return exec, ("raise AssertionError('code of the file was executed')",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"head.weight": torch.zeros(3, 1), "extra": torch.zeros(1)}, "it lacks head.bias; the network has no extra; "),
        ({"head.weight": torch.zeros(3, 1)}, r"head.weight is \[3, 1\] there and \[10, 1\] in the network"),
        ({"head.weight": torch.zeros(10, 1).long(), "head.bias": torch.zeros(10)}, "torch.int64 there"),
        ({"epoch": 3, "head.weight": torch.zeros(10, 1)}, "epoch are no tensors"),
        ([1, 2], "it contains a list"),
        (Malicious(), r"more than tensors, or is damaged \(it refers to \w+.exec\); write the state dict alone: "),
        (b"no weights", r"or is damaged \(File is not a zip file; torch writes zip files since 1.6\); write the "),
        (None, "there is no such file, run folder or checkpoint"),
    ],
    ids=["names", "shapes", "dtypes", "values", "list", "code", "damaged", "missing"],
)
def test_weights_that_cannot_be_used_are_one_line(content: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    flags = [*TINY, "--run-dir", str(tmp_path / "run"), "--init-weights", str(path)]
    assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"raypod: error: --init-weights {path}")
    assert re.search(message, line)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "flipped"),
    [
        ("", "update-00000002/weights.safetensors"),
        ("", "update-00000001/manifest.json"),
        ("checkpoints/update-00000002", "update-00000002/weights.safetensors"),
        ("checkpoints/update-00000002", "update-00000002/optimizer.safetensors"),
        ("checkpoints/update-00000002/weights.safetensors", "update-00000002/weights.safetensors"),
    ],
)
def test_a_flipped_byte_in_a_checkpoint_is_one_line(
    name: str, flipped: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(str(tiny), str(tmp_path / "copy")))
    file = copy / "checkpoints" / flipped
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    flags = [*TINY, "--run-dir", str(tmp_path / "run"), "--init-weights", str(copy / name)]
    capsys.readouterr()
    assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"raypod: error: --init-weights {copy / name}: {file.parent} is damaged: the SHA-256 of ")
    assert line.endswith("; name another checkpoint of the run")
    assert not (tmp_path / "run").exists()
    undamaged = copy / "checkpoints" / ("update-00000001" if "2" in flipped else "update-00000002")
    command(tmp_path / "run", *TINY, "--init-weights", str(undamaged))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--init-ignore", "head.*"], "--init-ignore head.* has no effect without --init-weights"),
        (["--init-weights", "RUN", "--init-ignore", "haed.*"], "--init-ignore haed.* matches no name of the network"),
        (["--freeze", "heed.weight"], "--freeze heed.weight matches no name of the network; there are head.weight"),
        (["--freeze", "*"], "--freeze * matches all parameters: nothing is left to train"),
        (["--init-weights", "RUN/logs"], "contains no checkpoint"),
    ],
)
def test_patterns_that_have_no_effect_are_one_line(
    flags: List[str], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag.replace("RUN", str(tiny)) for flag in flags]
    assert train.main([*TINY, "--run-dir", str(tmp_path / "run"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_norm_keeps_its_statistics_if_all_its_parameters_are_frozen() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    optimizers.freeze(network, ["0", "1.bias"])
    optimizers.train(network)
    assert [module.training for module in network] == [False, True]


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


def test_files_that_are_damaged_old_or_call_anything_are_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pt", torch.zeros(4))
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        data = archive.read(name)
    size = data.index(b"K\x04\x85")  # the tuple (4,)
    damaged = data[:size] + b"K\x7f\x85" + data[size + 3 :]
    with pytest.raises(pickle.UnpicklingError, match="RuntimeError"):
        initial_weights.read_torch_file(_with(tmp_path / "b.pt", damaged, b"\0" * 16))
    for function in (exec, torch.load, getattr, torch.nn.Linear, OrderedDict.fromkeys):
        with pytest.raises(pickle.UnpicklingError, match="it refers to"):
            initial_weights.read_torch_file(_with(path, pickle.dumps(_Call(function, "1"), protocol=2)))
    _saved(path, {"a": torch.zeros(1)}, _use_new_zipfile_serialization=False)  # as before torch 1.6
    for content in (path.read_bytes(), b"", b"no zip", pickle.dumps(1)):
        path.write_bytes(content)
        with pytest.raises(pickle.UnpicklingError, match="zip"):
            initial_weights.read_torch_file(path)
