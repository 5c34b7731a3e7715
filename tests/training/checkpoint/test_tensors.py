"""Tensor files and flat buffers return what was written; weights of other runs and files of torch begin a run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from raypod import train
from raypod.errors import CheckpointDamaged, ConfigError
from raypod.system import files
from raypod.training.checkpoint import initial_weights, storage, tensors
from raypod.training.checkpoint.tensors import read_into, read_tensors
from raypod.training.data.digits import load_digits
from raypod.training.models import optimizers
from tests.support.refused import one_line

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
STATE = {f"layer.{number}": torch.arange(6).reshape(2, 3).to(dtype) for number, dtype in enumerate(DTYPES)}
STATE["scalar"], STATE["empty"] = torch.tensor(7), torch.zeros(0, 3)
STATE["transposed"], STATE["strided"] = torch.arange(12.0).reshape(3, 4).t(), torch.arange(10)[::2]
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
INLINE = ["--fleet", "inline", "--device", "emulated"]
TINY = [*INLINE, "--model", "tiny", "--updates", "2"]
Samples = List[Tuple[torch.Tensor, int]]
KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def write(path: Path, state: Dict[str, torch.Tensor], metadata: Dict[str, str]) -> Path:
    path.unlink() if path.exists() else None
    with files.new_file(path) as file:
        tensors.write_tensors(file, state, metadata)
    return path


def through_a_file(state: Any, folder: Path) -> Any:
    return tensors.read_nested(write(folder / "file", *tensors.pack_nested(state)))


def through_a_buffer(state: Any, folder: Path) -> Any:
    return tensors.unpack_flat(np.concatenate(tensors.pack_flat(state)))


def equal(left: Any, right: Any) -> bool:
    """Whether two nested states have equal values and types, and dicts of equal order."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right)


def test_a_file_returns_tensors_and_metadata_also_through_the_safetensors_package(tmp_path: Path) -> None:
    loaded, metadata = tensors.read_tensors(write(tmp_path / "file", STATE, {"made by": "a test"}))
    assert equal(loaded, STATE)
    assert metadata == {"made by": "a test"}
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    ours = package.load_file(str(write(tmp_path / "ours", STATE, {"a": "b"})))
    assert equal({name: ours[name] for name in STATE}, STATE)
    package.save_file({name: tensor.contiguous() for name, tensor in STATE.items()}, str(tmp_path / "theirs"))
    theirs = tensors.read_tensors(tmp_path / "theirs")[0]
    assert equal({name: theirs[name] for name in STATE}, STATE)


def optimizer_state() -> Dict[str, Any]:
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    network(torch.rand(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    return {"weights": dict(network.state_dict()), "optimizer": optimizer.state_dict()}


nested_states = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize("through", [through_a_file, through_a_buffer])
class TestNestedState:
    def test_tensors_of_all_kinds_are_restored(self, through: Callable[..., Any], tmp_path: Path) -> None:
        nested = {0: [(torch.ones(2), None)], (1, 2): {"step": torch.tensor(3.0)}}
        state = {"named": STATE, "nested": nested, **optimizer_state()}
        assert equal(through(state, tmp_path), state)

    @given(state=nested_states)
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def test_any_nesting_is_restored(self, through: Callable[..., Any], tmp_path: Path, state: Any) -> None:
        assert equal(through(state, tmp_path), state)

    def test_other_values_are_refused_with_their_path(self, through: Callable[..., Any], tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"state\.optimizer\.hooks\.0 is a builtin_function_or_method"):
            through({"optimizer": {"hooks": [len]}}, tmp_path)  # not print: Ray replaces it


def test_a_flat_buffer_shares_memory_with_its_tensors_and_equal_states_give_equal_bytes() -> None:
    sent = torch.ones(3)
    buffers = tensors.pack_flat({"a": sent})
    assert any(np.shares_memory(buffer, sent.numpy()) for buffer in buffers)
    flat = np.concatenate(buffers)
    assert np.shares_memory(tensors.unpack_flat(flat)["a"].numpy(), flat)
    states = [{"a": torch.ones(3), "b": torch.zeros(5, dtype=torch.int8)} for _ in range(2)]
    packed = [np.concatenate(tensors.pack_flat(state)).tobytes() for state in states]
    assert packed[0] == packed[1]


def test_a_copy_is_a_plain_contiguous_tensor_that_does_not_change_with_the_original() -> None:
    class Buffer(torch.Tensor):
        """As PopTorch's, which reads the weights back at each access."""

    (copy,) = tensors.copy_to_cpu([torch.ones(2, 3).t().as_subclass(Buffer)])

    assert type(copy) is torch.Tensor
    assert copy.is_contiguous()
    image = torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    before = image.clone()
    copy = tensors.copy_to_cpu({"a": [image], "lr": 0.1})
    image += 1
    assert torch.equal(copy["a"][0], before)
    assert copy["a"][0].is_contiguous()
    assert copy["lr"] == 0.1


class Malicious:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("executed"), "by loading")


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def foreign_files() -> Dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save({"weights": torch.ones(2)}, buffer)
    return {
        "empty": b"",
        "pickle": pickle.dumps(Malicious()),
        "torch.save": buffer.getvalue(),
        "text": b"hello, world",
        "huge": with_length(b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'),
        "deep": with_length(b"[" * 100_000),
        "a list": with_length(b"[]"),
        "negative": with_length(b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}'),
    }


@pytest.mark.parametrize("kind", list(foreign_files()))
def test_a_foreign_file_is_damaged_and_executes_nothing(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(foreign_files()[kind])
    with pytest.raises(CheckpointDamaged, match="weights.safetensors is damaged"):
        tensors.read_nested(path)
    assert not Path("executed").exists()


def test_weights_of_another_network_name_the_first_difference() -> None:
    def network(width: int, *more: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2), *more)

    for saved, message in (
        (network(3), r"0.weight is \[5, 4\] in the model and \[3, 4\] in the checkpoint"),
        (network(5, nn.Linear(2, 2)), r"2.weight is missing in the model and \[2, 2\] in the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            tensors.load_weights(network(5), saved.state_dict())
    own = {"a": torch.zeros(2), "scalar": torch.tensor(1), "own": torch.tensor(1), "b": torch.zeros(0, 3)}
    other = {"other": torch.tensor(1), "a": torch.zeros(2, dtype=torch.int64), "scalar": torch.tensor(2)}
    assert list(tensors.different_shapes(own, {**other, "b": torch.zeros(3)}).items()) == [
        ("own", ("[]", tensors.MISSING)),
        ("b", ("[0, 3]", "[3]")),
        ("other", (tensors.MISSING, "[]")),
    ]


def read(path: Path, offset: int, sizes: List[int]) -> bytes:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with path.open("rb") as file:
        read_into(file.fileno(), offset, buffers)
    return b"".join(buffers)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    return tmp_path / "file"


@pytest.mark.parametrize("sizes", [[], [5], [0, 3, 0], [1] * 40, [30, 7, 16, 16, 1], [100]], ids=str)
@pytest.mark.parametrize("most", [None, 3])
def test_buffers_of_any_size_are_filled(numbers: Path, monkeypatch: pytest.MonkeyPatch, sizes: Any, most: Any) -> None:
    monkeypatch.setattr(tensors, "_GROUP_BYTES", 16)
    monkeypatch.setattr(tensors, "_GROUP_BUFFERS", 4)
    real, calls = os.preadv, []

    def preadv(descriptor: int, buffers: List[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(descriptor, buffers if most is None else [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(numbers, 10, sizes) == bytes(range(10, 10 + sum(sizes)))
    assert max(calls, default=0) <= 4


def test_a_file_truncated_anywhere_is_damaged_and_one_that_ends_before_is_an_error(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for group_bytes in (16, 1000):
        monkeypatch.setattr(tensors, "_GROUP_BYTES", group_bytes)
        with pytest.raises(EOFError):
            read(numbers, 10, [200, 47])
    path = write(tmp_path / "file", {"w": torch.arange(4.0)}, {})
    complete = path.read_bytes()
    for size in range(len(complete)):
        path.write_bytes(complete[:size])
        with pytest.raises(CheckpointDamaged):
            tensors.read_tensors(path)


def digits_from_5(folder: object) -> Tuple[Samples, Samples, int]:
    """Return the digits 5 to 9 as classes 0 to 4: every fourth image is a test image."""
    chosen = [(image, int(label)) for image, label in zip(*load_digits()) if label >= 5]
    pairs = [(torch.from_numpy(image).float().reshape(1, 8, 8) / 16, label - 5) for image, label in chosen]
    test = pairs[::4]
    return [pair for index, pair in enumerate(pairs) if index % 4], test, 5


def command(folder: Path, *flags: str) -> Dict[str, Any]:
    assert train.main([*INLINE, "--run-dir", str(folder), *flags]) == 0
    return json.loads((folder / "summary.json").read_text())


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


class Evil:
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
        (Evil(), r"more than tensors, or is damaged \(it refers to \w+.exec\); write the state dict alone: "),
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
    line = one_line(capsys, train.main, flags)
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
    line = one_line(capsys, train.main, flags)
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
    assert message in one_line(capsys, train.main, [*TINY, "--run-dir", str(tmp_path / "run"), *flags])


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
        "dtypes": [torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in KINDS],
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
