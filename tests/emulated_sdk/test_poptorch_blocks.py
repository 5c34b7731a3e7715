"""Blocks: the IPU of operations during compilation, and no effect elsewhere."""

from __future__ import annotations

import copy
import io
import pickle

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, options


def stages_of(model, iterations=8, auto_stage=poptorch.AutoStage.SameAsIpu):
    """Return the IPU, blocks and modules of each stage of a model that is compiled for inference."""
    opts = options(iterations=iterations).setExecutionStrategy(poptorch.PipelinedExecution(auto_stage))
    inference = poptorch.inferenceModel(model, opts)
    inference.compile(torch.ones(iterations, 2))
    return [(stage.ipu, stage.blocks, stage.modules) for stage in inference.emulatedPlacement().stages]


def placed(forward):
    return [(ipu, blocks) for ipu, blocks, _ in stages_of(Apply(forward))]


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def in_blocks(*blocks):
    """Return a forward that adds 1 in each of these blocks (id, IPU)."""

    def forward(x):
        for name, ipu in blocks:
            with poptorch.Block(name, ipu_id=ipu):
                x = x + 1
        return x

    return forward


def test_a_stage_starts_where_the_ipu_changes_even_to_an_earlier_one():
    assert placed(lambda x: x + 1) == [(0, ())]
    found = placed(in_blocks(("a", 0), ("b", 0), ("c", 1), (3, 0)))
    assert found == [(0, ("a", "b")), (1, ("c",)), (0, (3,))]


def nested(x):
    with poptorch.Block("outer", ipu_id=1):
        return in_blocks(("inner", 2))(x) + 1


@pytest.mark.parametrize("forward", [nested, lambda x: in_blocks((None, 0))(x) * 2])
def test_an_operation_after_a_block_raises_error(forward):
    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block"):
        placed(forward)


def test_module_repr_and_executors_repr_have_the_blocks(capsys):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[1], user_id=1, ipu_id=2)
    assert "(1): BeginBlock(user_id=1, ipu_id=2) ReLU()" in poptorch.module_repr(copy.deepcopy(model))
    assert repr(poptorch.inferenceModel(model, options())) == poptorch.module_repr(model)
    poptorch.print(model)
    assert capsys.readouterr().out == poptorch.module_repr(model) + "\n"


def test_a_block_without_operations_needs_no_ipu():
    def forward(x):
        with poptorch.Block(ipu_id=3):
            one = torch.ones(2)
        poptorch.Block.start("rest", ipu_id=0)
        return x + one

    assert placed(forward) == [(0, ("rest",))]


def test_use_auto_id_numbers_blocks_without_id():
    def forward(x):
        poptorch.Block.useAutoId()
        return in_blocks((None, 0), ("special", 1), (None, 2))(x)

    assert placed(forward) == [(0, ("0",)), (1, ("special",)), (2, ("1",))]


def test_block_function_and_begin_block_of_a_function():
    @poptorch.BlockFunction("body", ipu_id=1)
    def body(x, *, plus):
        return x + plus

    tail = poptorch.BeginBlock(torch.tanh, "tail", ipu_id=2)
    assert isinstance(tail, poptorch.LegacyBeginBlockFn)
    assert placed(lambda x: tail(body(x + 1, plus=1))) == [(0, ()), (1, ("body",)), (2, ("tail",))]
    assert body.__name__ == "body"


def test_begin_block_lasts_until_the_next_and_changes_neither_class_nor_state_nor_pickle():
    model = layers()
    keys, kind, text = list(model.state_dict()), type(model[1]), repr(model)
    assert poptorch.BeginBlock(model[1], "tail", ipu_id=1) is model[1]
    assert (list(model.state_dict()), type(model[1]), repr(model)) == (keys, kind, text)
    assert b"poptorch." not in pickle.dumps(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False) if torch.__version__ >= "2.6" else torch.load(buffer)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert stages_of(twin, iterations=2) == [(0, (), ("0",)), (1, ("tail",), ("1", "2"))]


def test_begin_block_twice_raises_error_until_blocks_are_removed():
    layer = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1)
    with pytest.raises(poptorch.Error, match="already been called on this Linear"):
        poptorch.BeginBlock(layer, ipu_id=0)
    poptorch.removeBlocks(nn.Sequential(layer))
    poptorch.BeginBlock(layer, ipu_id=0)


def test_blocks_have_no_effect_outside_a_wrapped_model():
    model = layers()
    expected = model(torch.ones(2, 2))
    poptorch.BeginBlock(model[0], ipu_id=5)
    poptorch.Block.useAutoId()
    poptorch.Block.start("anything", 70)
    with poptorch.Block("unknown", ipu_id=99):
        assert torch.equal(model(torch.ones(2, 2)), expected)
    assert not list(poptorch.Block("unknown").parameters())


@pytest.mark.parametrize("bad", [{"user_id": 3.0}, {"ipu_id": -1}, {"ipu_id": "1"}, {"ipu_id": True}, {"ipu_id": 0.5}])
def test_ids_of_other_types_raise_error(bad):
    begin = lambda **bad: poptorch.BeginBlock(nn.Linear(1, 1), **bad)  # noqa: E731
    for make in (poptorch.Block, poptorch.Block.start, poptorch.BlockFunction, begin):
        with pytest.raises(AssertionError, match="got"):
            make(**bad)


def test_a_layer_must_be_a_module_or_function_and_an_attribute_a_dictionary():
    with pytest.raises(poptorch.Error, match="not int"):
        poptorch.BeginBlock(3)
    with pytest.raises(AssertionError, match="not int"):
        poptorch.removeBlocks(3)
    with poptorch.Attribute(__outline={"layer": "embedding"}) as context:
        assert context is None
    with pytest.raises(AssertionError, match="__outline"):
        poptorch.Attribute(__outline="embedding")


def test_a_layer_starts_its_block_if_forward_reaches_it_through_a_closure():
    base = layers()
    for ipu, layer in enumerate(base):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    model = Apply(lambda model, x: base(x), base=base)
    assert [(ipu, modules) for ipu, _, modules in stages_of(model)] == [(n, (f"base.{n}",)) for n in range(3)]


def test_layers_with_the_same_id_0_are_in_one_block():
    model = nn.Sequential(*(poptorch.BeginBlock(layer, user_id=0) for layer in layers()))
    assert stages_of(model, auto_stage=poptorch.AutoStage.AutoIncrement) == [(0, (0,), ("0", "1", "2"))]
