"""Training, compared with plain torch loops; losses; the threads of the replicas, which change no result."""

from __future__ import annotations

import copy
import functools
import os
import queue
import threading
import time

import poptorch
import pytest
import torch
import torch.nn.functional as F
from poptorch.device.execute.replica import ReplicaThreads
from torch import nn

from tests.support.poptorch_models import Apply, Classifier, Line, batch, fastest, options, seeded, trained, wrapped
from tests.support.refused import rejects

MICRO = 2


def gradients_of(model, images, labels):
    model = copy.deepcopy(model)
    for micro_images, micro_labels in zip(images, labels):
        model(micro_images.clone(), micro_labels.clone())[1].backward()
    return [parameter.grad for parameter in model.parameters()]


def tree(values):
    while len(values) > 1:
        values = [a if b is None else a + b for a, b in zip(values[::2], [*values[1::2], None][: len(values[::2])])]
    return values[0]


def plain_torch_loop(model, optimizer, images, labels, replicas, accumulation, scale):
    """Run one weight update per iteration, with gradients reduced in a tree over the replicas."""
    images = images.view(-1, accumulation, replicas, MICRO, *images.shape[1:])
    labels = labels.view(-1, accumulation, replicas, MICRO)
    for iteration in range(len(images)):
        mine = (images[iteration], labels[iteration])
        per_replica = [gradients_of(model, *(each[:, replica] for each in mine)) for replica in range(replicas)]
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = tree([gradients[index] for gradients in per_replica]) * scale
        optimizer.step()


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("reduction", ["Mean", "Sum"])
def test_weights_equal_a_plain_torch_loop_bit_for_bit(replicas, accumulation, reduction):
    by_hand, on_device = seeded(), seeded()
    opts = options(replicas, accumulation, iterations=2)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType[reduction])
    arguments = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
    training = wrapped(on_device, opts, **arguments)
    optimizer = torch.optim.SGD(by_hand.parameters(), **arguments, **fastest(torch.optim.SGD))
    scale = 1 / (accumulation * replicas) if reduction == "Mean" else 1
    for seed in range(2):
        images, labels = batch(2 * replicas * accumulation * MICRO, seed)
        training(images, labels)
        plain_torch_loop(by_hand, optimizer, images, labels, replicas, accumulation, scale)
    for ours, theirs in zip(on_device.parameters(), by_hand.parameters()):
        assert torch.equal(ours, theirs)


def test_outputs_and_buffers_of_one_replica_equal_a_plain_torch_loop():
    by_hand, on_device = seeded(), seeded()
    training = wrapped(on_device)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, **fastest(torch.optim.SGD))
    for seed in range(3):
        images, labels = batch(4, seed)
        outputs = training(images, labels)
        optimizer.zero_grad()
        expected = by_hand(images, labels)
        expected[1].backward()
        optimizer.step()
        assert all(map(torch.equal, outputs, expected))
    assert torch.equal(on_device.norm.running_mean, by_hand.norm.running_mean)


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_torch_and_poptorch_optimizers_are_equal(algorithm):
    weights = []
    for family in (torch.optim, poptorch.optim):
        model = seeded()
        training = poptorch.trainingModel(model, options(), getattr(family, algorithm)(model.parameters(), lr=0.01))
        for seed in range(2):
            training(*batch(4, seed))
        weights.append(model.conv.weight.detach().clone())
    assert torch.equal(*weights)


def dropout_outputs(replicas, seed=3, calls=2):
    opts = options(replicas, accumulation=4 // replicas).outputMode(poptorch.OutputMode.All).randomSeed(seed)
    training = wrapped(seeded(dropout=0.5), opts)
    return torch.stack([training(*batch(8, call))[0] for call in range(calls)])


def test_random_numbers_depend_on_seed_replica_and_micro_batch_and_on_no_process_or_host_generator():
    state = torch.get_rng_state()
    expected = dropout_outputs(2)
    assert torch.equal(dropout_outputs(2), expected)
    assert not torch.equal(dropout_outputs(2, seed=4), expected)
    torch.set_rng_state(state)
    training = poptorch.trainingModel(seeded(dropout=0.5), options(2))
    state = torch.get_rng_state()
    training(*batch(4))
    assert torch.equal(state, torch.get_rng_state())

    def drawn(process, processes, replicas):
        opts = options(replicas, iterations=2).randomSeed(5)
        opts.Distributed.configureProcessId(process, processes)
        return poptorch.inferenceModel(nn.Dropout(0.5), opts)(torch.ones(2 * replicas * 50)).view(2, replicas, 50)

    expected = drawn(0, 1, 4)
    assert len({tuple(row.tolist()) for row in expected.view(8, 50)}) == 8
    assert torch.equal(expected, torch.cat([drawn(0, 2, 2), drawn(1, 2, 2)], 1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_parameters_that_are_not_to_be_trained_do_not_change(replicas):
    class Partial(Classifier):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    model = trained(Partial(), *batch(4), opts=options(replicas), weight_decay=0.5, momentum=0.9)
    assert model.unused.tolist() == model.frozen.tolist() == [1, 1, 1]
    model = seeded()
    before = model.conv.weight.detach().clone()
    optimizer = poptorch.optim.SGD(model.linear.parameters(), lr=0.1)
    poptorch.trainingModel(model, options(replicas), optimizer)(*batch(4))
    assert torch.equal(model.conv.weight, before)


def tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("make", [tied, lambda: nn.LSTM(3, 4, batch_first=True)])
def test_tied_and_recurrent_weights_are_trained(make):
    def forward(self, x):
        out = self.inner(x)
        return poptorch.identity_loss(out[0] if isinstance(out, tuple) else out, "mean")

    by_hand, model = (seeded(lambda: Apply(forward, inner=make())) for _ in range(2))
    x = torch.ones(2, 5, 3)
    trained(model, x, opts=options(2), lr=0.5)
    by_hand(x).backward()
    for ours, theirs in zip(model.parameters(), by_hand.parameters()):
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.5 * theirs.grad)
    assert make is not tied or model.inner[1].weight is model.inner[0].weight


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_error_of_one_replica_is_raised_and_leaves_no_gradients(replicas):
    class Failing(Line):
        def forward(self, x):
            if x.sum() > 5:
                raise ValueError("sample is bad")
            return super().forward(x)

    training = wrapped(Failing(), options(replicas, accumulation=2), lr=0.5)
    samples = torch.ones(2 * replicas)
    training.compile(samples)
    rejects(ValueError, "sample is bad", lambda: training(torch.cat([samples[1:], torch.tensor([9.0])])))
    training(samples)
    assert training.model.weight.item() == 0.5


def test_the_callers_modes_are_disabled_and_weights_in_another_memory_format_train_the_same():
    results = []
    for mode in (torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu")):
        training = wrapped(seeded())
        with mode():
            for _ in range(2):
                training(*batch(4))
        results.append(training.model.conv.weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])

    def weights_in(memory_format):
        model = seeded()
        model.conv.to(memory_format=memory_format)
        training = wrapped(model, options(2))
        for number in range(3):
            training(*batch(4, number))
        return model.conv.weight.detach().contiguous()

    torch.testing.assert_close(weights_in(torch.channels_last), weights_in(torch.contiguous_format))


AT_A_TIME, CPUS = "EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"


def weights_of_four_replicas(seen):
    """Return the weights after ten updates; add (thread, its CPUs) of each forward to `seen`."""
    forwards = queue.SimpleQueue()  # objects of libraries show what every forward does

    class Observed(Classifier):
        def forward(self, images, labels=None):
            forwards.put((threading.current_thread().name, tuple(sorted(os.sched_getaffinity(0)))))
            return super().forward(images, labels)

    training = wrapped(seeded(Observed, dropout=0.25), options(4, accumulation=2).randomSeed(7), momentum=0.9)
    for seed in range(10):  # in threads and, where that is faster, in the caller's
        training(*batch(16, seed))
    training.copyWeightsToHost()
    training.destroy()
    seen.update(forwards.get() for _ in range(forwards.qsize()))
    return training.model.state_dict()


def test_threads_and_their_cpus_change_no_bit(monkeypatch):
    one, three, allowed = set(), set(), sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(AT_A_TIME, "1")
    expected = weights_of_four_replicas(one)
    assert {thread for thread, _ in one} == {threading.current_thread().name}
    bound = [[allowed[0]], [allowed[-1]], allowed]
    monkeypatch.setenv(CPUS, ";".join(",".join(map(str, cpus)) for cpus in bound))
    found = weights_of_four_replicas(three)
    of_replicas = sorted(cpus for thread, cpus in three if thread.startswith("replica"))
    assert of_replicas == sorted(tuple(cpus) for cpus in bound)
    assert sorted(os.sched_getaffinity(0)) == allowed  # those of the caller's thread
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("at_a_time", ["1", "2"])
def test_an_autocast_in_forward_casts_the_present_weights(at_a_time, monkeypatch):
    class Cast(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = super().forward(super().forward(x).relu())  # the weight is used twice
            return poptorch.identity_loss(y.float() ** 2, "mean")

    def weight(iterations):
        training = wrapped(seeded(functools.partial(Cast, 4, 4)), options(2, 2, iterations), lr=0.5)
        for part in torch.randn(96, 4, generator=torch.Generator().manual_seed(1)).split(4 * iterations):
            training(part)
        return training.model.weight.detach()

    monkeypatch.setenv(AT_A_TIME, at_a_time)
    assert torch.equal(weight(iterations=4), weight(iterations=1))


def test_short_work_runs_in_the_callers_thread():
    threads = ReplicaThreads(2)

    def ran_in(kind, work):
        ran = queue.SimpleQueue()
        threads.each(kind, lambda replica: (work(), ran.put((replica, threading.current_thread().name))))
        found = sorted(ran.get() for _ in range(2))
        assert [replica for replica, _ in found] == [0, 1]
        return {"replica" if name.startswith("replica") else name for _, name in found}

    in_replicas, in_caller = {"replica"}, {threading.current_thread().name}
    assert ran_in("step", lambda: None) == in_replicas  # its time is not known yet
    assert [ran_in("step", lambda: None) for _ in range(20)][-1] == in_caller
    assert [ran_in("forward", lambda: time.sleep(0.003)) for _ in range(20)][-1] == in_replicas
    assert [ran_in("long", lambda: time.sleep(0.01)) for _ in range(8)] == [in_replicas] * 8  # without a trial
    threads.close()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (AT_A_TIME, "0", "EMULATED_POD_REPLICAS_AT_A_TIME=0: must be a whole number, 1 or more"),
        (AT_A_TIME, "two", "must be a whole number"),
        (CPUS, "0;", "EMULATED_POD_REPLICA_CPUS=0;: must be lists of CPUs, as in 0,1;2,3"),
    ],
)
def test_an_invalid_number_or_list_of_cpus_is_an_error(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    rejects(poptorch.Error, words, lambda: weights_of_four_replicas(set()))


def with_loss(loss):
    return Apply(lambda model, x, y: loss(model.weight * x, y), weight=nn.Parameter(torch.tensor([2.0])))


def step_of(loss):
    """Return by how much one update with a learning rate of 0.1 lowers the weight of 2, for a target of 0."""
    return 2 - trained(with_loss(loss), torch.ones(2), torch.zeros(2)).weight.item()


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [
        (F.mse_loss, 4),
        (nn.MSELoss(), 4),
        (lambda p, y: F.mse_loss(p, y) * 10, 4),  # gradients start at the marked loss and not at the output
        (lambda p, y: F.mse_loss(p, y).mul_(10), 4),
        (lambda p, y: (p, F.mse_loss(p, y))[0], 4),  # a loss does not have to be returned
        (lambda p, y: poptorch.identity_loss(F.mse_loss(p, y) * 0.5, "none"), 2),
        (lambda p, y: poptorch.identity_loss(F.mse_loss(p, y) + F.l1_loss(p, y), "sum"), 4 + 1),
        (F.l1_loss, 1),
        (F.smooth_l1_loss, 1),
        (F.huber_loss, 1),
        (F.binary_cross_entropy_with_logits, torch.tensor(2.0).sigmoid().item()),
    ],
)
def test_gradients_start_at_the_marked_loss(loss, gradient):
    assert step_of(loss) == pytest.approx(0.1 * gradient)


def test_a_forward_has_one_independent_marked_loss_of_one_number():
    independent = r"Multiple independent losses found in graph\. Graph must have one final loss\. Wrap"
    for loss, message in (
        (lambda p, y: ((p - y) ** 2).mean(), r"Couldn't find a loss in graph!"),
        (lambda p, y: (F.mse_loss(p, y), F.l1_loss(p, y)), independent),
        (lambda p, y: F.mse_loss(p, y, reduction="none"), "reduce it to one number"),
    ):
        rejects(poptorch.Error, message, step_of, loss)
    inference = poptorch.inferenceModel(with_loss(lambda p, y: poptorch.identity_loss(p, "mean")), options())
    assert inference(torch.ones(2), torch.ones(2)).item() == 2


def test_identity_loss_on_the_host_is_the_plain_reduction():
    for reduction, expected in (("sum", 6.0), ("mean", 2.0), ("none", [1.0, 2.0, 3.0])):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        loss = poptorch.identity_loss(x, reduction)
        loss.sum().backward()
        assert loss.tolist() == expected
        assert x.grad is not None
    rejects(AssertionError, "median", poptorch.identity_loss, torch.ones(1), "median")
