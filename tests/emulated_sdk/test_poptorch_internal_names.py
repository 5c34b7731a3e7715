"""`torch.ops.poptorch`, `poptorch._impl` and others: what published programs use besides the documented API."""

from __future__ import annotations

import copy
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
from poptorch._args_parser import ArgsParser
from poptorch._impl import NameScopeHook, internal_cast, isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._logging import logger
from poptorch._utils import combine_batch_tensors_gen, flattenTensorStructure, reconstructTensorStructure
from torch import nn

from tests.support.poptorch_models import Apply, Line, on_device, options, wrapped
from tests.support.refused import rejects


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


def test_custom_op_returns_zeros_on_the_host_and_rejects_attributes_that_have_no_type_or_are_no_dictionary():
    examples = [torch.ones(2), torch.ones(3, dtype=torch.int32)]
    outputs = poptorch.custom_op([torch.ones(1)], "Cube", "com.acme", 1, examples, {"alpha": 0.5, "pads": [1, 2]})
    for output, example in zip(outputs, examples):
        torch.testing.assert_close(output, example * 0)
    assert len(outputs) == 2
    one = [torch.ones(1)]
    for wrong in ({1: 2}, {"a": None}, {"a": [1, 2.0]}, {"ä": 1}, {"a": ["ä"]}):
        message = "Attribute|attribute|ASCII"
        rejects(ValueError, message, poptorch.custom_op, one, "Cube", "com.acme", 1, one, wrong)

    def call(x):
        return torch.ops.poptorch.custom_operation([x], "Cube", "com.acme", 1, 1, [x], "0")[0]

    assert torch.equal(call(torch.ones(1)), torch.ones(1))
    rejects(poptorch.Error, "pass the attributes of Cube by poptorch.custom_op", on_device, call, torch.ones(1))
    model = Scoped()
    hooks = NameScopeHook(model)
    poptorch.inferenceModel(model, options())(*BATCH)
    hooks.remove()
    assert not model.linear._forward_hooks


class Hooked(nn.Module):
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
    rejects(ValueError, "no such function", on_device, torch.neg, torch.ones(1))
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


def test_internal_cast_rounds_on_the_device_only_and_batches_are_combined_column_by_column(capsys):
    assert not hasattr(torch.ops.poptorch, "start_for_loop"), "operators that act on the compiler are missing"

    def cast(x):
        return torch.ops.poptorch.internal_cast(x, "FLOAT16")

    x = torch.tensor([0.1])
    found = on_device(cast, x)
    assert (found.dtype, cast(x).dtype) == (torch.half, torch.float32)
    assert torch.equal(found, x.half())
    assert internal_cast(x, torch.float) is x
    rejects(poptorch.Error, "FLOAT16", torch.ops.poptorch.internal_cast, x, "INT8")
    rejects(ValueError, "half", internal_cast, x, torch.int8)
    layout = ("x", 0, 1000, 3, 80, 1, 2, ",", "[", "]")
    on_device(lambda x: torch.ops.poptorch.ipu_print_tensor(x, *layout), torch.ones(2))
    assert capsys.readouterr().err.endswith("x: [1.0e+00,1.0e+00]\n")
    batches = [[torch.ones(1), torch.zeros(2)], [torch.ones(2), torch.ones(1)]]
    assert [each.tolist() for each in combine_batch_tensors_gen(batches)] == [[1, 1, 1], [0, 0, 1]]


class DictArgsParser(ArgsParser):
    def __init__(self, inputs):
        self._has_variadic_arguments = True
        self._varnames = list(inputs)


class Wrapped(torch.nn.Module):
    def __init__(self, model, outputs):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, tensors):
        loss = self.model(*tensors)
        self.outputs.tree = {"loss": loss, "name": "loss"}
        return [loss]


class Outputs:
    tree = None


class DictExecutor(poptorch.PoplarExecutor):
    """As mmcv has it: the forward leaves the structure of its outputs in an object."""

    def __init__(self, model, **arguments):
        self.outputs = Outputs()
        super().__init__(Wrapped(copy.copy(model), self.outputs), poptorch_version=poptorch.__version__, **arguments)
        self._args_parser = None

    def step(self, x):
        self._args_parser = self._args_parser or DictArgsParser({"args": (x,)})
        (loss,) = self((x,))
        return {key: loss if isinstance(value, torch.Tensor) else value for key, value in self.outputs.tree.items()}


def test_a_class_derived_from_the_executor_gets_the_defaults_of_the_wrappers():
    options = poptorch.Options().showCompilationProgressBar(False)
    model = Line()
    training = DictExecutor(model, options=options, training=True, optimizer=None, user_model=model)
    for _ in range(2):
        found = training.step(torch.ones(2))
    assert (found["name"], found["loss"].item()) == ("loss", pytest.approx(0.99))
    assert training.options.output_mode == poptorch.OutputMode.Final
    assert options._is_frozen
    inference = DictExecutor(Line(), options=None, training=False)
    assert inference.step(torch.ones(2))["loss"].item() == 1
    assert inference.options.output_mode == poptorch.OutputMode.All


def test_arguments_in_the_order_of_the_signature_and_tensors_of_structures():
    def function(a, b=2, *rest, c=3, **others):
        return a

    parsed = ArgsParser(function)((torch.ones(2, 3).t(), 5, 6), {"c": 7, "d": 8})
    assert parsed.args[0].is_contiguous()
    assert (parsed.args[1:], parsed.arg_names, parsed.kwargs) == ([5, 6], ["a", "b", "*rest[0]"], {"c": 7, "d": 8})
    assert len(parsed.clone().asPackedFlatTuple()) == 1
    parser = ArgsParser(Line())
    parser._varnames, parser._defaults = ["x", "y"], {"y": 4}
    parser._var_kinds *= 2
    assert parser((1,), {}).args == [1, 4]
    rejects(poptorch.Error, "Mandatory parameter x missing", parser, (), {"y": 1})
    rejects(AssertionError, "z is not a valid parameter", parser, (), {"z": 1})
    rejects(AssertionError, "Too many arguments", parser, (1, 2, 3), {})
    structure = {"a": [torch.zeros(1), 2], "b": (torch.ones(1),)}
    assert [tensor.item() for tensor in flattenTensorStructure(structure)] == [0, 1]
    assert reconstructTensorStructure(structure, iter("xy")) == {"a": ["x", 2], "b": ("y",)}
    assert isinstance(poptorch.createPoptorchError("text"), poptorch.Error)
    assert poptorch.logger is logger is poptorch._logging.logger
    assert poptorch._args_parser.ArgsParser is ArgsParser
