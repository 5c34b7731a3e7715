"""`poptorch.optim`: compile-time constants, values and state."""

from __future__ import annotations

import copy
import warnings

import poptorch
import pytest
import torch

from tests.support.poptorch_models import Line, batch, options, seeded, trained, wrapped

ONE = torch.ones(1)


def sgd(model, **kwargs):
    return poptorch.optim.SGD(model.parameters(), **{"lr": 0.1, **kwargs})


def test_changes_take_effect_with_set_optimizer_and_schedulers_do_not_warn():
    model = Line()
    training = wrapped(model)
    optimizer = training._optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(ONE)
        scheduler.step()
    training(ONE)
    assert model.weight.item() == pytest.approx(0.8)
    training.setOptimizer(optimizer)
    training(ONE)
    assert model.weight.item() == pytest.approx(0.75)


def test_explicit_attributes_are_variable_and_defaults_constant():
    optimizer = sgd(Line(), momentum=0.9)
    for each in (optimizer, copy.deepcopy(optimizer)):
        assert not each.variable_attrs.isConstant("momentum")
        assert not each.variable_attrs.isConstant("lr")
        assert each.variable_attrs.isConstant("weight_decay")
    with pytest.raises(AssertionError, match="no_such"):
        optimizer.variable_attrs.markAsVariable("no_such")


def test_changing_a_constant_after_compilation_raises_error():
    for makes_variable in (True, False):
        training = wrapped(Line())
        if makes_variable:
            training._optimizer.variable_attrs.markAsVariable("weight_decay")
        training(ONE)
        training._optimizer.param_groups[0]["weight_decay"] = 0.5
        if makes_variable:
            training.setOptimizer(training._optimizer)
    with pytest.raises(poptorch.Error, match="'weight_decay' was compiled as the constant 0"):
        training.setOptimizer(training._optimizer)


@pytest.mark.parametrize(
    ("make", "variable", "constant"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("momentum", 0.5), ("nesterov", True)),
        (lambda p: torch.optim.Adam(p, betas=(0.8, 0.9)), ("lr", 0.5), ("betas", (0.7, 0.9))),
    ],
)
def test_defaults_of_a_torch_optimizer_are_constants(make, variable, constant):
    model = Line()
    optimizer = make(model.parameters())
    training = poptorch.trainingModel(model, options(), optimizer)
    training(ONE)
    optimizer.param_groups[0].update([variable])
    training.setOptimizer(optimizer)
    optimizer.param_groups[0].update([constant])
    with pytest.raises(poptorch.Error, match=f"'{constant[0]}' was compiled as the constant"):
        training.setOptimizer(optimizer)


def test_another_algorithm_or_other_groups_raise_error():
    model = seeded()
    first, second = list(model.parameters())[:3], list(model.parameters())[3:]
    make = lambda *groups: poptorch.optim.SGD([{"params": group} for group in groups], lr=0.1)  # noqa: E731
    training = poptorch.trainingModel(model, options(), make(first, second))
    training(*batch(2))
    training.setOptimizer(make(first, second))
    with pytest.raises(poptorch.Error, match="other groups"):
        training.setOptimizer(make(second, first))
    with pytest.raises(poptorch.Error, match="2 parameter groups, not 1"):
        training.setOptimizer(make([*first, *second]))
    with pytest.raises(poptorch.Error, match="compiled for SGD, not Adam"):
        training.setOptimizer(poptorch.optim.Adam(model.parameters()))
    model = Line()
    optimizer = poptorch.optim.SGD([model.weight, torch.nn.Parameter(ONE.clone())], lr=0.1)
    with pytest.raises(poptorch.Error, match="1 parameters of the optimizer are not parameters of the model"):
        poptorch.trainingModel(model, options(), optimizer)(ONE)


def test_state_is_none_before_compilation_and_for_an_offline_target():
    training = wrapped(Line(), options().useOfflineIpuTarget())
    state = training._optimizer.state_dict()
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    assert {"state", "param_groups"} <= set(state)
    training.compile(ONE)
    assert training._optimizer.state_dict()["ipu_state"] is None


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_loaded_state_resumes_exactly(algorithm):
    arguments = {"momentum": 0.9} if algorithm in ("SGD", "RMSprop") else {}
    training, resumed = (wrapped(seeded(), options(2), algorithm, lr=0.01, **arguments) for _ in range(2))
    training(*batch(4, 0))
    saved = copy.deepcopy((training.model.state_dict(), training._optimizer.state_dict()))
    training(*batch(4, 1))
    resumed.model.load_state_dict(saved[0])
    resumed._optimizer.load_state_dict(saved[1])
    resumed(*batch(4, 1))
    assert torch.equal(resumed.model.conv.weight, training.model.conv.weight)
    unchanged = resumed.model.conv.weight.detach().clone()
    resumed._optimizer.load_state_dict(saved[1])
    resumed._optimizer.param_groups[0]["lr"] = 0.0
    resumed.setOptimizer(resumed._optimizer)
    resumed(*batch(4, 1))
    assert torch.equal(resumed.model.conv.weight, unchanged), "a learning rate that is set after loading is used"


def test_state_can_be_copied_and_loaded_during_training_and_outlives_the_optimizer_object():
    model = Line()
    training = wrapped(model, momentum=0.9)
    training(ONE)
    fresh = copy.deepcopy(training._optimizer)
    assert fresh.state_dict()["ipu_state"]["Accl1___weight"].item() == 1
    training.setOptimizer(sgd(model, momentum=0.9))
    training(ONE)
    assert model.weight.item() == pytest.approx(1 - 0.1 - 0.19)
    training._optimizer.load_state_dict(fresh.state_dict())
    training.load_state_dict({"weight": torch.tensor(0.9)})
    training(ONE)
    assert model.weight.item() == pytest.approx(0.9 - 0.19)


def test_state_of_a_torch_optimizer_raises_error():
    model = Line()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        sgd(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_invalid_arguments_raise_error_and_kernel_arguments_warn():
    with pytest.raises(ValueError, match="amsgrad"):
        poptorch.optim.Adam(Line().parameters(), amsgrad=True)
    with pytest.warns(UserWarning, match="ignores foreach"):
        sgd(Line(), foreach=True)
    for arguments in ({"loss_scaling": 0.0}, {"max_grad_norm": -1.0}, {"accum_type": torch.int32}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            sgd(Line(), **arguments)


def test_rmsprop_tensorflow_variant():
    model = Line()
    training = wrapped(model, None, "RMSprop", alpha=0.9, eps=1e-3, momentum=0.5, use_tf_variant=True)
    weight, square, momentum = 1.0, 1.0, 0.0
    for gradient in (2.0, 3.0):
        training(torch.tensor([gradient]))
        square = 0.9 * square + 0.1 * gradient**2
        momentum = 0.5 * momentum + 0.1 * gradient / (square + 1e-3) ** 0.5
        weight -= momentum
    assert model.weight.item() == pytest.approx(weight)


@pytest.mark.parametrize(
    ("ipu_state", "message"),
    [
        ({"Accl___weight": torch.ones(())}, "unknown tensors: Accl___weight"),
        ({"Accl1___weight": torch.ones(2)}, r"Accl1___weight of the optimizer state has shape \[2\]"),
    ],
)
def test_state_of_another_model_raises_error(ipu_state, message):
    training = wrapped(Line(), momentum=0.9)
    training(ONE)
    state = {**training._optimizer.state_dict(), "ipu_state": ipu_state}
    training._optimizer.load_state_dict(state)
    with pytest.raises(poptorch.Error, match=message):
        training(ONE)
    adam = wrapped(Line(), None, "Adam")
    adam(ONE)
    training._optimizer.set_state_dict(adam._optimizer.state_dict())
    with pytest.raises(poptorch.Error, match="SGD as compiled has no 'learningRate___specific___weight'"):
        training(ONE)


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_added_attribute_warns_once(caplog, is_relaxed):
    training = wrapped(Line(), options().relaxOptimizerAttributesChecks(is_relaxed))
    torch.optim.lr_scheduler.StepLR(training._optimizer, step_size=1)
    training._optimizer.trust = 0.5
    training._optimizer.param_groups[0]["decay"] = 0.1
    for _ in range(2):
        training.setOptimizer(training._optimizer)
    expected = [
        "Ignoring unexpected optimizer attribute in SGD optimizer: ['trust']",
        "Ignoring unexpected group 0 attribute in SGD optimizer: ['decay']",
    ]
    assert [record.getMessage() for record in caplog.records] == ([] if is_relaxed else expected)


def test_values_that_differ_within_a_group_warn(caplog):
    model = seeded()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.001)
    training = poptorch.trainingModel(model, options(2), optimizer)
    training.compile(*batch(4))
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert set(state["ipu_state"]) == {f"{kind}___{name}" for kind in ("Step", "Accl1", "Accl2") for name in names}
    assert state["ipu_state"]["Accl1___conv.weight"].shape == model.conv.weight.shape
    assert set(state["ipu_param"]) == {f"learningRate___specific___{name}" for name in names}
    assert {value.item() for value in state["ipu_param"].values()} == {1e-3}
    second = list(state["ipu_param"])[1]
    state["ipu_param"][second] = torch.tensor(0.5)
    optimizer.load_state_dict(state)
    training(*batch(4))
    assert "a parameter group takes learningRate of" in caplog.text
    assert optimizer.state_dict()["ipu_param"][second] == 0.5


PLAIN = {"scaledLearningRate0": 0.1 / 4, "weightDecayScaleFactor0": 1 - 0.1 * 0.5, "lossScaling_FLOAT": 4.0}
MOMENTUM = {"scaledLearningRate2": 0.1, "scaledMomentum2": 0.9, "dampeningScaleFactor2": 0.5}
COMBINED = {"scaledLearningRate1": 0.05, "scaledMomentum1": 0.9, "dampeningScaleFactor1": 2.0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"weight_decay": 0.5, "loss_scaling": 4.0}, PLAIN),
        ({"momentum": 0.9, "weight_decay": 0.5, "dampening": 0.5}, {**MOMENTUM, "scaledWeightDecay1": 0.25}),
        (
            {"momentum": 0.9, "use_combined_accum": True, "velocity_scaling": 2.0},
            {**COMBINED, "scaledWeightDecay1": 0},
        ),
    ],
)
def test_ipu_param_of_sgd_and_its_reload(arguments, expected):
    model = Line()
    training = wrapped(model, **arguments)
    training.compile(ONE)
    state = training._optimizer.state_dict()
    found = {name.partition("___")[0]: value.item() for name, value in state["ipu_param"].items()}
    assert found == pytest.approx(expected)
    assert all(not tensor.any() for tensor in state["ipu_state"].values())  # before the first update
    learning_rate = next(name for name in state["ipu_param"] if name.startswith("scaledLearningRate"))
    state["ipu_param"] = {learning_rate: 2 * state["ipu_param"][learning_rate]}  # the others stay
    training._optimizer.load_state_dict(state)
    training(ONE)
    if "weight_decay" not in arguments:
        once = trained(Line(), ONE, lr=0.2, **arguments)
        assert model.weight.item() == pytest.approx(once.weight.item())


def test_first_update_of_sgd_is_not_dampened():
    assert trained(Line(), ONE, momentum=0.9, dampening=0.5).weight.item() == pytest.approx(0.9)
