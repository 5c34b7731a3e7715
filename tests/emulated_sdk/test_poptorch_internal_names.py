"""Names with an underscore that published programs import: mmcv, graphium, poptorch_geometric."""

from __future__ import annotations

import copy

import poptorch
import pytest
import torch
from poptorch._args_parser import ArgsParser
from poptorch._logging import logger
from poptorch._utils import flattenTensorStructure, reconstructTensorStructure

from tests.support.poptorch_models import Line


class DictArgsParser(ArgsParser):
    """As mmcv has it."""

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
    assert found["name"] == "loss"
    assert found["loss"].item() == pytest.approx(0.99)
    assert training.options.output_mode == poptorch.OutputMode.Final
    assert options._is_frozen
    inference = DictExecutor(Line(), options=None, training=False)
    assert inference.step(torch.ones(2))["loss"].item() == 1
    assert inference.options.output_mode == poptorch.OutputMode.All


def test_arguments_in_the_order_of_the_signature():
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
    with pytest.raises(poptorch.Error, match="Mandatory parameter x missing"):
        parser((), {"y": 1})
    with pytest.raises(AssertionError, match="z is not a valid parameter"):
        parser((), {"z": 1})
    with pytest.raises(AssertionError, match="Too many arguments"):
        parser((1, 2, 3), {})


def test_tensors_of_structures():
    structure = {"a": [torch.zeros(1), 2], "b": (torch.ones(1),)}
    assert [tensor.item() for tensor in flattenTensorStructure(structure)] == [0, 1]
    assert reconstructTensorStructure(structure, iter("xy")) == {"a": ["x", 2], "b": ("y",)}


def test_attributes_of_the_package():
    assert isinstance(poptorch.createPoptorchError("text"), poptorch.Error)
    assert poptorch.logger is logger is poptorch._logging.logger
    assert poptorch._args_parser.ArgsParser is ArgsParser
