"""`poptorch.optim`: compile-time constants, values and state."""

from __future__ import annotations

import copy
import warnings

import poptorch
import pytest
import torch
from poptorch_models import Line, batch, options, seeded


def sgd(model, **kwargs):
    return poptorch.optim.SGD(model.parameters(), **{"lr": 0.1, **kwargs})


def test_changes_take_effect_with_set_optimizer():
    model = Line()
    optimizer = sgd(model)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    optimizer.param_groups[0]["lr"] = 10.0
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.8)
    training.setOptimizer(optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(-9.2)


def test_explicit_attributes_are_variable_and_defaults_constant():
    optimizer = sgd(Line(), momentum=0.9)
    assert not optimizer.variable_attrs.isConstant("momentum")
    assert not optimizer.variable_attrs.isConstant("lr")
    assert optimizer.variable_attrs.isConstant("weight_decay")
    with pytest.raises(AssertionError, match="no_such"):
        optimizer.variable_attrs.markAsVariable("no_such")


@pytest.mark.parametrize("make_variable", [False, True])
def test_changing_a_constant_after_compilation_raises_error(make_variable):
    model = Line()
    optimizer = sgd(model)
    if make_variable:
        optimizer.variable_attrs.markAsVariable("weight_decay")
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    if make_variable:
        training.setOptimizer(optimizer)
        return
    with pytest.raises(poptorch.Error, match="'weight_decay' was compiled as the constant 0"):
        training.setOptimizer(optimizer)


def test_defaults_of_a_torch_optimizer_are_constants():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    optimizer.param_groups[0]["momentum"] = 0.5
    training.setOptimizer(optimizer)
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(poptorch.Error, match="nesterov"):
        training.setOptimizer(optimizer)


def test_another_algorithm_or_number_of_groups_raises_error():
    model = Line()
    training = poptorch.trainingModel(model, options(), sgd(model))
    training(torch.ones(1))
    with pytest.raises(poptorch.Error, match="compiled for SGD, not Adam"):
        training.setOptimizer(poptorch.optim.Adam(model.parameters()))
    with pytest.raises(poptorch.Error, match="1 parameter groups, not 2"):
        training.setOptimizer(
            poptorch.optim.SGD([{"params": [model.weight]}, {"params": [torch.nn.Parameter(torch.ones(1))]}], lr=0.1)
        )


def test_parameter_groups_have_their_own_values():
    model = seeded()
    before = copy.deepcopy(model.state_dict())
    groups = [{"params": model.conv.parameters(), "lr": 0.0}, {"params": model.linear.parameters()}]
    poptorch.trainingModel(model, options(2), poptorch.optim.SGD(groups, lr=0.1))(*batch(4))
    assert torch.equal(model.conv.weight, before["conv.weight"])
    assert not torch.equal(model.linear.weight, before["linear.weight"])


def test_state_is_none_before_compilation():
    state = sgd(Line()).state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    assert {"state", "param_groups"} <= set(state)


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_loaded_state_resumes_exactly(algorithm, replicas):
    arguments = {"lr": 0.01, **({"momentum": 0.9} if algorithm in ("SGD", "RMSprop") else {})}

    def make():
        model = seeded()
        optimizer = getattr(poptorch.optim, algorithm)(model.parameters(), **arguments)
        return model, optimizer, poptorch.trainingModel(model, options(replicas), optimizer)

    model, optimizer, training = make()
    training(*batch(4, 0))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    training(*batch(4, 1))

    resumed, resumed_optimizer, resumed_training = make()
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    resumed_training(*batch(4, 1))
    assert torch.equal(resumed.conv.weight, model.conv.weight)


def test_learning_rate_set_after_load_state_dict_is_used():
    saving_model = Line()
    saving = sgd(saving_model)
    poptorch.trainingModel(saving_model, options(), saving)(torch.ones(1))
    model = Line()
    optimizer = sgd(model)
    training = poptorch.trainingModel(model, options(), optimizer)
    optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.5
    training.setOptimizer(optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.5)


def test_state_can_be_loaded_during_training():
    model = Line()
    optimizer = sgd(model, momentum=0.9)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    fresh = copy.deepcopy(optimizer.state_dict())
    training(torch.ones(1))
    optimizer.load_state_dict(fresh)
    training.load_state_dict({"weight": torch.tensor(0.9)})
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.9 - 0.19)


def test_new_optimizer_object_keeps_the_momentum_on_the_device():
    model = Line()
    training = poptorch.trainingModel(model, options(), sgd(model, momentum=0.9))
    training(torch.ones(1))
    training.setOptimizer(sgd(model, momentum=0.9))
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(1 - 0.1 - 0.19)


def test_state_of_a_torch_optimizer_raises_error():
    model = Line()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        sgd(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_copied_optimizer_has_the_state():
    model = Line()
    optimizer = sgd(model, momentum=0.9)
    poptorch.trainingModel(model, options(), optimizer)(torch.ones(1))
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["ipu_state"]["Accl1___weight"].item() == 1
    assert not copied.variable_attrs.isConstant("momentum")


def test_schedulers_do_not_warn():
    model = Line()
    optimizer = sgd(model)
    training = poptorch.trainingModel(model, options(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(torch.ones(1))
        scheduler.step()
    training.setOptimizer(optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(1 - 0.1 - 0.05)


def test_amsgrad_raises_error_and_kernel_arguments_warn():
    with pytest.raises(ValueError, match="amsgrad"):
        poptorch.optim.Adam(Line().parameters(), amsgrad=True)
    with pytest.warns(UserWarning, match="ignores foreach"):
        sgd(Line(), foreach=True)


def test_unknown_algorithm_raises_error():
    model = Line()
    with pytest.raises(poptorch.Error, match="Unknown optimizer Adagrad"):
        poptorch.trainingModel(model, options(), torch.optim.Adagrad(model.parameters()))(torch.ones(1))


def test_rmsprop_tensorflow_variant():
    model = Line()
    optimizer = poptorch.optim.RMSprop(
        model.parameters(), lr=0.1, alpha=0.9, eps=1e-3, momentum=0.5, use_tf_variant=True
    )
    training = poptorch.trainingModel(model, options(), optimizer)
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
    model = Line()
    optimizer = sgd(model, momentum=0.9)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    state = optimizer.state_dict()
    state["ipu_state"] = ipu_state
    optimizer.load_state_dict(state)
    with pytest.raises(poptorch.Error, match=message):
        training(torch.ones(1))


def test_state_of_another_algorithm_raises_error():
    model = Line()
    adam = poptorch.optim.Adam(model.parameters())
    poptorch.trainingModel(model, options(), adam)(torch.ones(1))
    optimizer = sgd(Line())
    optimizer.set_state_dict(adam.state_dict())
    training = poptorch.trainingModel(Line(), options(), optimizer)
    with pytest.raises(poptorch.Error, match="SGD as compiled has no 'learningRate___specific___weight'"):
        training(torch.ones(1))


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_added_attribute_warns_once(caplog, is_relaxed):
    model = Line()
    optimizer = sgd(model)
    training = poptorch.trainingModel(model, options().relaxOptimizerAttributesChecks(is_relaxed), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.trust = 0.5
    optimizer.param_groups[0]["decay"] = 0.1
    for _ in range(2):
        training.setOptimizer(optimizer)
    messages = [record.getMessage() for record in caplog.records]
    expected = [
        "Ignoring unexpected optimizer attribute in SGD optimizer: ['trust']",
        "Ignoring unexpected group 0 attribute in SGD optimizer: ['decay']",
    ]
    assert messages == ([] if is_relaxed else expected)


def test_same_parameters_in_other_groups_raise_error():
    model = seeded()
    first, second = list(model.parameters())[:3], list(model.parameters())[3:]
    make = lambda *groups: poptorch.optim.SGD([{"params": group} for group in groups], lr=0.1)  # noqa: E731
    training = poptorch.trainingModel(model, options(), make(first, second))
    training(*batch(2))
    training.setOptimizer(make(first, second))
    with pytest.raises(poptorch.Error, match="other groups"):
        training.setOptimizer(make(second, first))


def test_ipu_state_and_ipu_param_names():
    model = seeded()
    optimizer = poptorch.optim.AdamW(model.parameters())
    poptorch.trainingModel(model, options(2), optimizer)(*batch(4))
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert set(state["ipu_state"]) == {f"{kind}___{name}" for kind in ("Step", "Accl1", "Accl2") for name in names}
    assert state["ipu_state"]["Accl1___conv.weight"].shape == model.conv.weight.shape
    assert set(state["ipu_param"]) == {f"learningRate___specific___{name}" for name in names}
    assert state["ipu_param"]["learningRate___specific___conv.weight"].item() == 1e-3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"weight_decay": 0.5, "loss_scaling": 4.0},
            {"scaledLearningRate0": 0.1 / 4, "weightDecayScaleFactor0": 1 - 0.1 * 0.5},
        ),
        (
            {"momentum": 0.9, "weight_decay": 0.5, "dampening": 0.5},
            {
                "scaledLearningRate2": 0.1,
                "scaledMomentum2": 0.9,
                "dampeningScaleFactor2": 0.5,
                "scaledWeightDecay1": 0.25,
            },
        ),
        (
            {"momentum": 0.9, "use_combined_accum": True, "velocity_scaling": 2.0},
            {
                "scaledLearningRate1": 0.05,
                "scaledMomentum1": 0.9,
                "dampeningScaleFactor1": 2.0,
                "scaledWeightDecay1": 0,
            },
        ),
    ],
)
def test_ipu_param_of_sgd_and_its_reload(arguments, expected):
    model = Line()
    optimizer = sgd(model, **arguments)
    training = poptorch.trainingModel(model, options(), optimizer)
    training.compile(torch.ones(1))
    state = optimizer.state_dict()
    found = {name.partition("___")[0]: tensor.item() for name, tensor in state["ipu_param"].items()}
    expected = {**expected, **({"lossScaling_FLOAT": 4.0} if "loss_scaling" in arguments else {})}
    assert found == pytest.approx(expected)
    assert all(not tensor.any() for tensor in state["ipu_state"].values())  # before the first update
    learning_rate = next(name for name in state["ipu_param"] if name.startswith("scaledLearningRate"))
    state["ipu_param"] = {learning_rate: 2 * state["ipu_param"][learning_rate]}  # the others stay
    optimizer.load_state_dict(state)
    training(torch.ones(1))
    once = Line()
    poptorch.trainingModel(once, options(), poptorch.optim.SGD(once.parameters(), **{"lr": 0.2, **arguments}))(
        torch.ones(1)
    )
    if "weightDecayScaleFactor0" not in expected and "dampening" not in arguments:
        assert model.weight.item() == pytest.approx(once.weight.item())


def test_values_that_differ_within_a_group_warn(caplog):
    model = seeded()
    optimizer = poptorch.optim.Adam(model.parameters())
    training = poptorch.trainingModel(model, options(2), optimizer)
    training.compile(*batch(4))
    state = optimizer.state_dict()
    first, second = list(state["ipu_param"])[:2]
    state["ipu_param"][second] = torch.tensor(0.5)
    optimizer.load_state_dict(state)
    training(*batch(4))
    assert "a parameter group takes learningRate of" in caplog.text
    assert optimizer.state_dict()["ipu_param"][second] == 0.5


def test_model_compiled_offline_has_no_optimizer_state():
    model = Line()
    optimizer = sgd(model)
    poptorch.trainingModel(model, options().useOfflineIpuTarget(), optimizer).compile(torch.ones(1))
    assert optimizer.state_dict()["ipu_state"] is None


def test_betas_of_a_torch_optimizer_are_constants():
    model = Line()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    optimizer.param_groups[0]["betas"] = (0.7, 0.9)
    with pytest.raises(poptorch.Error, match="'betas' was compiled as the constant"):
        training.setOptimizer(optimizer)


@pytest.mark.parametrize("arguments", [{"loss_scaling": 0.0}, {"max_grad_norm": -1.0}, {"accum_type": torch.int32}])
def test_invalid_values_raise_error_in_the_constructor(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        sgd(Line(), **arguments)


def test_first_update_of_sgd_is_not_dampened():
    model = Line()
    poptorch.trainingModel(model, options(), sgd(model, momentum=0.9, dampening=0.5))(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.9)


def test_a_parameter_that_is_not_the_models_raises_error():
    model = seeded()
    optimizer = poptorch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(poptorch.Error, match="1 parameters of the optimizer are not parameters of the model"):
        poptorch.trainingModel(model, options(), optimizer)(*batch(2))
