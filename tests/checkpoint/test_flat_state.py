"""States as flat bytes: what is packed comes back, whatever it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raypod.checkpoint.tensors import pack_flat, unpack_flat


def there_and_back(state: Any) -> Any:
    return unpack_flat(np.concatenate(pack_flat(state)))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_a_state_of_weights_and_optimizer_comes_back() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    network(torch.rand(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    state = {"weights": dict(network.state_dict()), "optimizer": optimizer.state_dict()}
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"nothing": None, "flags": (True, False), "numbers": [1, -2.5, 1e-300, float("inf")], "word": "ä"},
        {0: {"step": torch.tensor(3.0)}, 7: {"empty": torch.empty(0, 4)}},
        {str(dtype): torch.arange(5).to(dtype) for dtype in (torch.bfloat16, torch.half, torch.int64, torch.bool)},
        {"transposed": torch.arange(6.0).reshape(2, 3).t(), "every other": torch.arange(10)[::2]},
    ],
    ids=str,
)
def test_every_kind_of_value_comes_back(state: Any) -> None:
    assert same(there_and_back(state), state)


def test_tensors_are_neither_copied_there_nor_back() -> None:
    sent = torch.ones(3)
    flat = np.concatenate(pack_flat({"a": sent}))
    assert any(np.shares_memory(part, sent.numpy()) for part in pack_flat({"a": sent}))
    assert np.shares_memory(unpack_flat(flat)["a"].numpy(), flat)


def test_equal_states_are_equal_bytes() -> None:
    states = [{"a": torch.ones(3), "b": torch.zeros(5, dtype=torch.int8)} for _ in range(2)]
    packed = [np.concatenate(pack_flat(state)).tobytes() for state in states]
    assert packed[0] == packed[1]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"optimizer": {"hook": print}}, "state.optimizer.hook is a builtin_function_or_method"),
        ({(1, 2): 3}, r"state has the key \(1, 2\)"),
    ],
)
def test_what_cannot_be_packed_is_named(state: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        pack_flat(state)
