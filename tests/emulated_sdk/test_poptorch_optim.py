"""`poptorch.optim`: constants, values, state, and updates that equal torch's."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import poptorch
import pytest
import torch
from poptorch.optimizers.device_optimizer import plain_step
from torch import nn

from tests.support.poptorch_models import Apply, Line, batch, options, seeded, trained, wrapped
from tests.support.refused import rejects

ONE = torch.ones(1)


def sgd(model, **kwargs):
    return poptorch.optim.SGD(model.parameters(), **{"lr": 0.1, **kwargs})


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
    rejects(poptorch.Error, f"'{constant[0]}' was compiled as the constant", training.setOptimizer, optimizer)


def test_explicit_attributes_are_variable_and_algorithm_and_groups_constant():
    optimizer = sgd(Line(), momentum=0.9)
    for each in (optimizer, copy.deepcopy(optimizer)):
        constant = [each.variable_attrs.isConstant(name) for name in ("momentum", "lr", "weight_decay")]
        assert constant == [False, False, True]
    rejects(AssertionError, "no_such", optimizer.variable_attrs.markAsVariable, "no_such")
    for makes_variable in (True, False):
        training = wrapped(Line())
        if makes_variable:
            training._optimizer.variable_attrs.markAsVariable("weight_decay")
        training(ONE)
        training._optimizer.param_groups[0]["weight_decay"] = 0.5
        if makes_variable:
            training.setOptimizer(training._optimizer)
    rejects(poptorch.Error, "'weight_decay' was compiled as the constant 0", training.setOptimizer, training._optimizer)
    model = seeded()
    first, second = list(model.parameters())[:3], list(model.parameters())[3:]
    make = lambda *groups: poptorch.optim.SGD([{"params": group} for group in groups], lr=0.1)  # noqa: E731
    training = poptorch.trainingModel(model, options(), make(first, second))
    training(*batch(2))
    training.setOptimizer(make(first, second))
    for other, message in (
        (make(second, first), "other groups"),
        (make([*first, *second]), "2 parameter groups, not 1"),
        (poptorch.optim.Adam(model.parameters()), "compiled for SGD, not Adam"),
    ):
        rejects(poptorch.Error, message, training.setOptimizer, other)
    model, other = Line(), torch.nn.Parameter(ONE.clone())
    for parameters in ([model.weight, other], [other]):
        training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(parameters, lr=0.1))
        words = "1 parameters of the optimizer are not parameters of the model"
        rejects(poptorch.Error, words, training, ONE)
        model = Line()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", "0.1", "Expected a number for the optimizer's 'lr', not '0.1'"),
        ("eps", None, "Expected a number for the optimizer's 'eps', not None"),
        ("betas", (0.9,), r"Expected 2 numbers for the optimizer's 'betas', not \(0.9,\)"),
        ("betas", (0.9, "x"), r"Expected a number for the optimizer's 'betas\[1\]', not 'x'"),
        ("loss_scaling", "8", "Expected a number for the optimizer's 'loss_scaling', not '8'"),
    ],
)
def test_a_value_that_is_no_number_is_an_error_and_changes_nothing(name, value, words):
    training = wrapped(Line(), algorithm="Adam")
    training(ONE)
    optimizer = training._optimizer
    before, holder = optimizer.state_dict()["ipu_param"], optimizer.param_groups[0]
    if name == "loss_scaling":
        optimizer.loss_scaling = value
    else:
        holder[name] = value
    rejects(AssertionError, words, training.setOptimizer, optimizer)
    assert optimizer.state_dict()["ipu_param"] == before
    training(ONE)


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


def test_an_optimizer_whose_state_does_not_fit_does_not_replace_the_present_one():
    training = wrapped(Line(), momentum=0.9)
    training(ONE)
    state = copy.deepcopy(training._optimizer.state_dict())
    state["ipu_state"]["Accl1___weight"] = torch.ones(2)
    other = sgd(training.model, momentum=0.9)
    other.load_state_dict(state)
    rejects(poptorch.Error, r"Accl1___weight of the optimizer state has shape \[2\]", training.setOptimizer, other)
    training(ONE)
    momentum = training._optimizer.state_dict()["ipu_state"]["Accl1___weight"]
    assert momentum.item() == pytest.approx(1.9), "that of the second call"


def test_state_is_none_before_compilation_and_can_be_copied_and_loaded_during_training():
    training = wrapped(Line(), options().useOfflineIpuTarget())
    state = training._optimizer.state_dict()
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    assert {"state", "param_groups"} <= set(state)
    training.compile(ONE)
    assert training._optimizer.state_dict()["ipu_state"] is None
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


def test_invalid_arguments_and_the_state_of_a_torch_optimizer_raise_error_and_kernel_arguments_warn():
    rejects(ValueError, "amsgrad", lambda: poptorch.optim.Adam(Line().parameters(), amsgrad=True))
    with pytest.warns(UserWarning, match="ignores foreach"):
        sgd(Line(), foreach=True)
    for arguments in ({"loss_scaling": 0.0}, {"max_grad_norm": -1.0}, {"accum_type": torch.int32}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            sgd(Line(), **arguments)
    model = Line()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        sgd(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_state_of_another_model_raises_error():
    training, adam = wrapped(Line(), momentum=0.9), wrapped(Line(), None, "Adam")
    training(ONE)
    adam(ONE)
    wrong_shape = r"Accl1___weight of the optimizer state has shape \[2\]"
    for ipu_state, message in (
        ({"Accl___weight": torch.ones(())}, "unknown tensors: Accl___weight"),
        ({"Accl1___weight": torch.ones(2)}, wrong_shape),
    ):
        training._optimizer.load_state_dict({**training._optimizer.state_dict(), "ipu_state": ipu_state})
        rejects(poptorch.Error, message, training, ONE)
        training._optimizer.set_state_dict(adam._optimizer.state_dict())
        rejects(poptorch.Error, "SGD as compiled has no 'learningRate___specific___weight'", training, ONE)
        training = wrapped(Line(), momentum=0.9)
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
        ({"momentum": 0.9, "use_combined_accum": True, "velocity_scaling": 2.0}, {**COMBINED, "scaledWeightDecay1": 0}),
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


def test_changes_take_effect_with_set_optimizer_and_the_first_update_of_sgd_is_not_dampened():
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
    assert trained(Line(), ONE, momentum=0.9, dampening=0.5).weight.item() == pytest.approx(0.9)


CASES = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "use_combined_accum": True}),
    ("Adam", {"betas": (0.8, 0.95), "eps": 1e-5}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "bias_correction": True}),
    ("RMSprop", {"alpha": 0.8, "momentum": 0.9}),
    ("RMSprop", {"centered": True, "weight_decay": 0.1}),
]
OWN = ("use_combined_accum", "bias_correction")


def two_layers():
    def forward(model, x):
        return poptorch.identity_loss(model.second(torch.tanh(model.first(x))).pow(2), "mean")

    torch.manual_seed(3)
    return Apply(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))


def groups_of(model):
    second = {"params": model.second.parameters(), "lr": 0.02, "weight_decay": 0.01}
    return [{"params": model.first.parameters()}, second]


def inputs(count):
    return torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(0))


def assert_same_training(ours, theirs, own=None, schedule=None, clipped_to=None, **arguments):
    """Train with the optimizer `ours` on the device, which alone has the arguments `own`, and on the host."""
    device, host = two_layers(), two_layers()
    optimizer, reference = ours(groups_of(device), **arguments, **(own or {})), theirs(groups_of(host), **arguments)
    schedulers = [schedule(each) for each in (optimizer, reference)] if schedule else []
    training = poptorch.trainingModel(device, options(), optimizer)
    for x in inputs(4):
        training(x)
        reference.zero_grad()
        host(x).backward()
        if clipped_to is not None:
            nn.utils.clip_grad_norm_(host.parameters(), clipped_to)
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        if schedulers:
            training.setOptimizer(optimizer)
    for a, b in zip(device.parameters(), host.parameters()):
        torch.testing.assert_close(a.detach(), b.detach())


def of_both(algorithm):
    return getattr(poptorch.optim, algorithm), getattr(torch.optim, algorithm)


@pytest.mark.parametrize(("algorithm", "arguments"), CASES)
@pytest.mark.parametrize("loss_scaling", [1.0, 1000.0])
def test_updates_equal_torch(algorithm, arguments, loss_scaling):
    own = {name: value for name, value in arguments.items() if name in OWN}
    shared = {name: value for name, value in arguments.items() if name not in OWN}
    assert_same_training(*of_both(algorithm), own={"loss_scaling": loss_scaling, **own}, lr=0.05, **shared)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_torch_schedulers_set_the_devices_learning_rate(schedule):
    assert_same_training(*of_both("SGD"), schedule=schedule, lr=0.05, momentum=0.9)


HAS_DECOUPLED = "decoupled_weight_decay" in torch.optim.Adam.__init__.__code__.co_varnames


def test_clipping_equals_torch_and_lamb_on_the_device_that_on_the_host():
    for algorithm in ("SGD", "AdamW"):
        own = {"max_grad_norm": 0.01, "loss_scaling": 64}
        assert_same_training(*of_both(algorithm), own=own, clipped_to=0.01, lr=0.1)
    for arguments in ({}, {"bias_correction": False}, {"max_weight_norm": 0.1, "weight_decay": 0.0}):
        assert_same_training(poptorch.optim.LAMB, poptorch.optim.LAMB, lr=0.1, **arguments)
    assert_same_training(poptorch.optim.LAMB, poptorch.optim.LAMB, lr=0.1, max_weight_norm=0.0)


@pytest.mark.skipif(not HAS_DECOUPLED, reason="this torch has no such Adam")
def test_adam_with_decoupled_weight_decay_is_adamw():
    own = {"decoupled_weight_decay": True}
    assert_same_training(torch.optim.Adam, torch.optim.AdamW, own=own, lr=0.1, weight_decay=0.5)


def test_lamb_scales_the_step_to_the_norm_of_the_weights_and_by_bias_correction():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = poptorch.optim.LAMB([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, -2.0])
    assert optimizer.step(lambda: "the loss") == "the loss"
    # Adam's first step is the sign of the gradient, of norm sqrt(2); the trust ratio scales it to norm 0.1 * 5.
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.5 / 2**0.5 * torch.tensor([1.0, -1.0]))
    for corrects, expected in ((True, -1), (False, -0.1 / 0.001**0.5)):
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        poptorch.optim.LAMB([weight], lr=1.0, weight_decay=0.0, bias_correction=corrects).step()
        assert weight.item() == pytest.approx(expected, rel=1e-4)


def test_derived_class_uses_the_rule_of_its_base(caplog):
    class OwnSgd(torch.optim.SGD):
        pass

    class Lookahead(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("the device does not call this")

    for kind in (OwnSgd, Lookahead):
        model = Line()
        poptorch.trainingModel(model, options(), kind(model.parameters(), lr=0.1))(torch.ones(1))
        assert model.weight.item() == pytest.approx(0.9)
        assert ("Lookahead.step() is not used" in caplog.text) == (kind is Lookahead)


def test_unsupported_algorithms_raise_error_when_wrapping_and_maximize_is_ignored_with_a_warning():
    model = Line()
    for name in ("Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"):
        optimizer, message = getattr(torch.optim, name)(model.parameters()), f"Unknown optimizer {name}: the device sup"
        rejects(poptorch.Error, f"{message}ports SGD, Adam", poptorch.trainingModel, model, options(), optimizer)
    poptorch.trainingModel(model, options())(torch.ones(1))
    with pytest.warns(UserWarning, match="maximize"):
        assert trained(Line(), torch.ones(1), maximize=True).weight.item() == pytest.approx(0.9)
    model = Line()
    with pytest.warns(UserWarning, match="maximize"):
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_rmsprop_has_a_tensorflow_variant_and_its_momentum_may_change_from_zero():
    model = Line()
    training = wrapped(model, None, "RMSprop", alpha=0.9, eps=1e-3, momentum=0.5, use_tf_variant=True)
    weight, square, momentum = 1.0, 1.0, 0.0
    for gradient in (2.0, 3.0):
        training(torch.tensor([gradient]))
        square = 0.9 * square + 0.1 * gradient**2
        momentum = 0.5 * momentum + 0.1 * gradient / (square + 1e-3) ** 0.5
        weight -= momentum
    assert model.weight.item() == pytest.approx(weight)
    model = Line()
    training = wrapped(model, None, "RMSprop", momentum=0.0)
    training(torch.ones(1))
    training._optimizer.param_groups[0]["momentum"] = 0.5
    training.setOptimizer(training._optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(1 - 0.1 / 0.01**0.5 - 0.1 / 0.0199**0.5, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_deep_copy_of_model_and_optimizer(algorithm):
    model = two_layers()
    optimizer = getattr(poptorch.optim, algorithm)(groups_of(model), lr=0.1, loss_scaling=8.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(inputs(1)[0])
    training.detachFromDevice()
    training.destroy()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for net, of_net in ((model, optimizer), (twin, twin_optimizer)):
        poptorch.trainingModel(net, options(), of_net)(inputs(2)[1])
    assert twin_optimizer.loss_scaling == 8.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


PROGRAM = """
import sys
from tests.support.poptorch_models import batch, seeded, wrapped
training = wrapped(seeded(dropout=0.5), momentum=0.9)
for _ in range(3):
    training(*batch(4))
training._optimizer.state_dict()
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.usefixtures("processes")
def test_training_does_not_import_torch_dynamo():
    command = [sys.executable, "-c", PROGRAM]
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("algorithm", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_plain_step_equals_step(algorithm):
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2)]
    optimizers = [algorithm([weight], lr=0.1) for weight in weights]
    for number in range(3):
        for weight in weights:
            weight.grad = torch.linspace(0, number, 7)
        optimizers[0].step()
        plain_step(optimizers[1])
    assert torch.equal(weights[0], weights[1])
    assert optimizers[1].state[weights[1]].keys() == optimizers[0].state[weights[0]].keys()
