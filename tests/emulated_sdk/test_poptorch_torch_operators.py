"""`torch.ops.poptorch`, `poptorch._impl` and `custom_op`: what published programs use besides the documented API."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import poptorch
import pytest
import torch
import torch.fx
from poptorch._impl import NameScopeHook, internal_cast, isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._utils import combine_batch_tensors_gen
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options, wrapped


class Scoped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.ops.poptorch.push_name_scope("linear")
        y = torch.ops.poptorch.set_available_memory(self.linear(x), 0.2)
        torch.ops.poptorch.pop_name_scope()
        y = torch.ops.poptorch.internal_cast(torch.ops.poptorch.recomputation_checkpoint(y), "FLOAT")
        return torch.ops.poptorch.identity_loss((y - target) ** 2, 1)


BATCH = torch.ones(4, 2), torch.ones(4, 1)


def test_operators_that_act_on_the_compiler_are_missing():
    assert not hasattr(torch.ops.poptorch, "start_for_loop")


def test_internal_cast_rounds_to_half_on_the_device_only():
    def cast(x):
        return torch.ops.poptorch.internal_cast(x, "FLOAT16")

    x = torch.tensor([0.1])
    found = on_device(cast, x)
    assert (found.dtype, cast(x).dtype) == (torch.half, torch.float32)
    assert torch.equal(found, x.half())
    assert internal_cast(x, torch.float) is x
    with pytest.raises(poptorch.Error, match="FLOAT16"):
        torch.ops.poptorch.internal_cast(x, "INT8")
    with pytest.raises(ValueError, match="half"):
        internal_cast(x, torch.int8)


def test_ipu_print_tensor_takes_the_float_format_as_a_number(capsys):
    layout = ("x", 0, 1000, 3, 80, 1, 2, ",", "[", "]")
    on_device(lambda x: torch.ops.poptorch.ipu_print_tensor(x, *layout), torch.ones(2))
    assert capsys.readouterr().err.endswith("x: [1.0e+00,1.0e+00]\n")


def test_an_unwrapped_model_is_plain_until_it_is_wrapped_again_and_does_not_keep_its_executor():
    model = Scoped()
    training = wrapped(model)
    training(*BATCH)
    before = model.linear.weight.clone()
    unwrapModelIfNecessary(model)
    assert not isWrapped(model)
    assert type(model.linear.weight) is nn.Parameter
    rewrapModelIfNecessary(model)
    assert isWrapped(model)
    training(*BATCH)
    assert not torch.equal(model.linear.weight, before)
    unwrapModelIfNecessary(model)
    executor = weakref.ref(training)
    del model, training
    gc.collect()
    assert executor() is None
    destroyed = wrapped(Scoped())
    destroyed(*BATCH)
    destroyed.destroy()
    rewrapModelIfNecessary(destroyed.model)
    assert not isWrapped(destroyed.model)


def test_name_scope_hooks_are_removed():
    model = Scoped()
    hooks = NameScopeHook(model)
    poptorch.inferenceModel(model, options())(*BATCH)
    hooks.remove()
    assert not model.linear._forward_hooks


def test_custom_op_returns_zeros_like_the_examples_on_the_host():
    examples = [torch.ones(2), torch.ones(3, dtype=torch.int32)]
    outputs = poptorch.custom_op([torch.ones(1)], "Cube", "com.acme", 1, examples, {"alpha": 0.5, "pads": [1, 2]})
    for output, example in zip(outputs, examples):
        torch.testing.assert_close(output, example * 0)
    assert len(outputs) == 2


@pytest.mark.parametrize("attributes", [{1: 2}, {"a": None}, {"a": [1, 2.0]}, {"ä": 1}, {"a": ["ä"]}])
def test_custom_op_rejects_attributes_that_have_no_type(attributes):
    with pytest.raises(ValueError, match="Attribute|attribute|ASCII"):
        poptorch.custom_op([torch.ones(1)], "Cube", "com.acme", 1, [torch.ones(1)], attributes)


def test_custom_operation_takes_no_attributes_on_the_device():
    def call(x):
        return torch.ops.poptorch.custom_operation([x], "Cube", "com.acme", 1, 1, [x], "0")[0]

    assert torch.equal(call(torch.ones(1)), torch.ones(1))
    with pytest.raises(poptorch.Error, match="pass the attributes of Cube by poptorch.custom_op"):
        on_device(call, torch.ones(1))


class Hooked(nn.Module):
    """Has attributes whose names end as those of torch's hooks do, as timm's models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.feature_hooks = None
        self.own_hooks = ["a"]
        self.last_hooks = nn.Identity()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.last_hooks(self.linear(x)), target)


@pytest.mark.parametrize("make", [Scoped, Hooked, lambda: torch.fx.symbolic_trace(Hooked())])
def test_operators_and_modules_with_own_attributes_named_hooks_train_on_two_replicas(make):
    training = wrapped(make(), options(2))
    losses = [training(*BATCH).mean().item() for _ in range(5)]
    assert losses[-1] < losses[0] / 2


class Substitute:
    """A manager that replaces `torch.relu` by a function of another result."""

    def replace(self) -> None:
        self.original, torch.relu = torch.relu, lambda x: x * 0 + 7

    def restore(self) -> None:
        torch.relu = self.original


class Broken(Substitute):
    def replace(self) -> None:
        super().replace()
        raise ValueError("no such function")


def test_registered_functions_are_replaced_on_the_device_only(monkeypatch):
    manager = poptorch._poplar_executor._OverwriteContextManager
    monkeypatch.setattr(manager, "_subsitution_manager_types", [])
    for _ in range(2):
        manager.registerSubsitutionManager(Substitute)
    original = torch.relu
    model = poptorch.inferenceModel(Apply(lambda x: torch.relu(x)), options())
    assert [model(torch.ones(1)).item() for _ in range(2)] == [7, 7]
    assert torch.relu is original
    manager.registerSubsitutionManager(Broken)
    with pytest.raises(ValueError, match="no such function"):
        on_device(torch.neg, torch.ones(1))
    assert torch.relu is original


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("types", "printed"), [("def registerCustomArgParsers(): print('registered')", "registered"), ("import absent", "")]
)
def test_importing_poptorch_registers_the_parsers_of_poptorch_geometric(tmp_path, types, printed):
    (tmp_path / "poptorch_geometric").mkdir()
    (tmp_path / "poptorch_geometric" / "__init__.py").touch()
    (tmp_path / "poptorch_geometric" / "types.py").write_text(types)
    sdk = str(Path(poptorch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([sdk, str(tmp_path)])}
    command = [sys.executable, "-c", "import poptorch"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == printed
    assert printed or "absent" in result.stderr


def test_batches_of_tensors_are_combined_column_by_column():
    batches = [[torch.ones(1), torch.zeros(2)], [torch.ones(2), torch.ones(1)]]
    assert [each.tolist() for each in combine_batch_tensors_gen(batches)] == [[1, 1, 1], [0, 0, 1]]
