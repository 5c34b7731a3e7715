"""Blocks: the IPU of operations during compilation, and no effect elsewhere."""

from __future__ import annotations

import copy
import io
import pickle

import poptorch
import pytest
import torch
from poptorch_models import options, seeded
from torch import nn


class Mlp(nn.Module):
    """Three linear layers with tanh in between, and a loss if there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, target=None):
        out = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out if target is None else (out, nn.functional.cross_entropy(out, target))


def placed(forward, iterations=8, strategy=None):
    """Return the placement of a module with this forward, compiled for inference."""
    module = nn.Module()
    module.forward = forward
    opts = options(iterations=iterations)
    model = poptorch.inferenceModel(module, opts.setExecutionStrategy(strategy or poptorch.PipelinedExecution()))
    model.compile(torch.ones(iterations, 2))
    return model.emulatedPlacement()


def ipus(placement):
    return [stage.ipu for stage in placement.stages]


def test_operations_without_a_block_are_on_ipu_0():
    placement = placed(lambda x: x + 1)
    assert ipus(placement) == [0]
    assert placement.stages[0].blocks == ()


def test_stage_starts_where_the_ipu_changes_even_to_an_earlier_one():
    def forward(x):
        for number, ipu in enumerate((0, 0, 1, 0)):
            with poptorch.Block(f"block {number}", ipu_id=ipu):
                x = x + 1
        return x

    placement = placed(forward)
    assert ipus(placement) == [0, 1, 0]
    assert [stage.blocks for stage in placement.stages] == [("block 0", "block 1"), ("block 2",), ("block 3",)]


def test_operation_after_a_nested_block_raises_error():
    def forward(x):
        with poptorch.Block("outer", ipu_id=1):
            with poptorch.Block("inner", ipu_id=2):
                x = x + 1
            return x + 1

    with pytest.raises(poptorch.Error, match="No active Block"):
        placed(forward)


def test_operation_after_the_last_block_raises_error():
    def forward(x):
        with poptorch.Block(ipu_id=0):
            x = x + 1
        return x * 2

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block"):
        placed(forward)


def test_id_of_a_block_may_be_an_integer():
    def forward(x):
        with poptorch.Block(3, ipu_id=1):
            return x + 1

    assert placed(forward).stages[0].blocks == (3,)


def test_module_repr_and_executors_repr_have_the_blocks(capsys):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[1], user_id=1, ipu_id=2)
    assert "(1): BeginBlock(user_id=1, ipu_id=2) ReLU()" in poptorch.module_repr(copy.deepcopy(model))
    assert repr(poptorch.inferenceModel(model, options())) == poptorch.module_repr(model)
    poptorch.print(model)
    assert capsys.readouterr().out == poptorch.module_repr(model) + "\n"


def test_block_without_operations_needs_no_ipu():
    def forward(x):
        with poptorch.Block(ipu_id=3):
            one = torch.ones(2)
        poptorch.Block.start("rest", ipu_id=0)
        return x + one

    assert ipus(placed(forward)) == [0]


def test_use_auto_id_numbers_blocks_without_id():
    def forward(x):
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = x + 1
        with poptorch.Block("special", ipu_id=1):
            x = x + 1
        with poptorch.Block(ipu_id=2):
            return x + 1

    assert [stage.blocks for stage in placed(forward).stages] == [("0",), ("special",), ("1",)]


def test_block_function_and_begin_block_of_a_function():
    @poptorch.BlockFunction("body", ipu_id=1)
    def body(x, *, plus):
        return x + plus

    tail = poptorch.BeginBlock(torch.tanh, "tail", ipu_id=2)
    assert isinstance(tail, poptorch.LegacyBeginBlockFn)
    placement = placed(lambda x: tail(body(x + 1, plus=1)))
    assert [(stage.ipu, stage.blocks) for stage in placement.stages] == [(0, ()), (1, ("body",)), (2, ("tail",))]
    assert body.__name__ == "body"


def test_begin_block_returns_the_layer_and_lasts_until_the_next():
    model = seeded(Mlp)
    assert poptorch.BeginBlock(model.second, "tail", ipu_id=1) is model.second
    inference = poptorch.inferenceModel(model, options(iterations=2))
    inference(torch.ones(2, 4))
    stages = inference.emulatedPlacement().stages
    assert [(stage.ipu, stage.modules) for stage in stages] == [(0, ("first",)), (1, ("second", "third"))]
    assert set(stages[1].parameters) == {"second.bias", "second.weight", "third.bias", "third.weight"}


def test_begin_block_twice_raises_error_until_blocks_are_removed():
    layer = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1)
    with pytest.raises(poptorch.Error, match="already been called on this Linear"):
        poptorch.BeginBlock(layer, ipu_id=0)
    poptorch.removeBlocks(nn.Sequential(layer))
    poptorch.BeginBlock(layer, ipu_id=0)


def test_begin_block_survives_copy_and_pickle_and_keeps_class_and_state_dict():
    model = seeded(Mlp)
    keys, kind, text = list(model.state_dict()), type(model.second), repr(model)
    poptorch.BeginBlock(model.second, "tail", ipu_id=1)
    assert (list(model.state_dict()), type(model.second), repr(model)) == (keys, kind, text)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False) if torch.__version__ >= "2.6" else torch.load(buffer)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        inference = poptorch.inferenceModel(twin, options(iterations=2))
        inference(torch.ones(2, 4))
        assert ipus(inference.emulatedPlacement()) == [0, 1]


def test_pickled_layer_does_not_need_poptorch():
    assert b"poptorch." not in pickle.dumps(poptorch.BeginBlock(nn.Linear(2, 2), "name", 1))


def test_blocks_have_no_effect_outside_a_wrapped_model():
    model, plain = seeded(Mlp), seeded(Mlp)
    poptorch.BeginBlock(model.first, ipu_id=5)
    poptorch.Block.useAutoId()
    poptorch.Block.start("anything", 70)
    with poptorch.Block("unknown", ipu_id=99):
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert not list(poptorch.Block("unknown").parameters())


@pytest.mark.parametrize("bad", [{"user_id": 3.0}, {"ipu_id": -1}, {"ipu_id": "1"}, {"ipu_id": True}, {"ipu_id": 0.5}])
def test_ids_of_other_types_raise_error(bad):
    for make in (poptorch.Block, poptorch.Block.start, poptorch.BlockFunction):
        with pytest.raises(AssertionError, match="got"):
            make(**bad)
    with pytest.raises(AssertionError, match="got"):
        poptorch.BeginBlock(nn.Linear(1, 1), **bad)


def test_layer_must_be_a_module_or_function():
    with pytest.raises(poptorch.Error, match="not int"):
        poptorch.BeginBlock(3)
    with pytest.raises(AssertionError, match="not int"):
        poptorch.removeBlocks(3)


def test_attribute_takes_dictionaries_of_strings():
    with poptorch.Attribute(__outline={"layer": "embedding"}) as context:
        assert context is None
    with pytest.raises(AssertionError, match="__outline"):
        poptorch.Attribute(__outline="embedding")


@pytest.mark.parametrize("is_closure", [False, True])
def test_a_layer_starts_its_block_however_forward_reaches_it(is_closure):
    base = nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=0), poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = base

        def forward(self, x):
            return base(x) if is_closure else self.base(x)

    model = poptorch.inferenceModel(Model(), options(iterations=8))
    model.compile(torch.ones(8, 2))
    stages = model.emulatedPlacement().stages
    assert [(stage.ipu, stage.modules) for stage in stages] == [(0, ("base.0",)), (1, ("base.1",))]


def test_layers_with_the_same_id_0_are_in_one_block():
    layers = [poptorch.BeginBlock(nn.Linear(2, 2), user_id=0) for _ in range(2)]
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    placement = placed(lambda x: layers[1](layers[0](x)), strategy=strategy)
    assert [stage.blocks for stage in placement.stages] == [(0,)]
