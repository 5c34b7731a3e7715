"""Tensor files and flat buffers return what was written; foreign and damaged files raise and execute nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.system import files
from raypod.training.checkpoint import tensors
from raypod.training.checkpoint.tensors import read_into

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
STATE = {f"layer.{number}": torch.arange(6).reshape(2, 3).to(dtype) for number, dtype in enumerate(DTYPES)}
STATE["scalar"], STATE["empty"] = torch.tensor(7), torch.zeros(0, 3)
STATE["transposed"], STATE["strided"] = torch.arange(12.0).reshape(3, 4).t(), torch.arange(10)[::2]
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


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


def test_a_file_truncated_anywhere_is_damaged_or_ends_too_soon(tmp_path: Path) -> None:
    path = write(tmp_path / "file", {"w": torch.arange(4.0)}, {})
    complete = path.read_bytes()
    for size in range(len(complete)):
        path.write_bytes(complete[:size])
        with pytest.raises(CheckpointDamaged):
            tensors.read_tensors(path)


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


def test_a_file_that_ends_before_is_an_error(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group_bytes in (16, 1000):
        monkeypatch.setattr(tensors, "_GROUP_BYTES", group_bytes)
        with pytest.raises(EOFError):
            read(numbers, 10, [200, 47])
