"""Training, compared with plain torch loops."""

from __future__ import annotations

import copy
import functools

import poptorch
import pytest
import torch
from poptorch_models import Classifier, Line, batch, fastest, options, seeded
from torch import nn


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread, as kernels that are split over threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients_of(model, images, labels):
    """Return the gradients of one replica, accumulated over its micro-batches."""
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
    micro = 2
    images = images.view(-1, accumulation, replicas, micro, *images.shape[1:])
    labels = labels.view(-1, accumulation, replicas, micro)
    for iteration in range(len(images)):
        per_replica = [
            gradients_of(model, images[iteration, :, replica], labels[iteration, :, replica])
            for replica in range(replicas)
        ]
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = tree([gradients[index] for gradients in per_replica]) * scale
        optimizer.step()


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reduction", ["Mean", "Sum"])
def test_weights_equal_a_plain_torch_loop_bit_for_bit(replicas, accumulation, reduction):
    by_hand, on_device = seeded(), seeded()
    opts = options(replicas, accumulation, iterations=2)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType[reduction])
    arguments = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
    training = poptorch.trainingModel(on_device, opts, poptorch.optim.SGD(on_device.parameters(), **arguments))
    optimizer = torch.optim.SGD(by_hand.parameters(), **arguments, **fastest(torch.optim.SGD))
    scale = 1 / (accumulation * replicas) if reduction == "Mean" else 1
    for seed in range(3):
        images, labels = batch(2 * replicas * accumulation * 2, seed)
        training(images, labels)
        plain_torch_loop(by_hand, optimizer, images, labels, replicas, accumulation, scale)
    for ours, theirs in zip(on_device.parameters(), by_hand.parameters()):
        assert torch.equal(ours, theirs)


def test_outputs_and_buffers_of_one_replica_equal_a_plain_torch_loop():
    by_hand, on_device = seeded(), seeded()
    training = poptorch.trainingModel(on_device, options(), poptorch.optim.SGD(on_device.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, **fastest(torch.optim.SGD))
    for seed in range(3):
        images, labels = batch(4, seed)
        logits, loss = training(images, labels)
        optimizer.zero_grad()
        by_hand_logits, by_hand_loss = by_hand(images, labels)
        by_hand_loss.backward()
        optimizer.step()
        assert torch.equal(logits, by_hand_logits)
        assert torch.equal(loss, by_hand_loss)
    assert torch.equal(on_device.norm.running_mean, by_hand.norm.running_mean)
    assert torch.equal(on_device.conv.weight, by_hand.conv.weight)


def test_the_mean_is_over_accumulation_steps_and_replicas():
    for accumulation, replicas in [(1, 1), (4, 1), (1, 4), (2, 2)]:
        model = Line()
        training = poptorch.trainingModel(
            model, options(replicas, accumulation), poptorch.optim.SGD(model.parameters(), lr=1.0)
        )
        training(torch.ones(accumulation * replicas * 2))
        assert model.weight.item() == 0


def test_a_sum_reduction_adds_the_means_of_the_micro_batches():
    model = Line()
    opts = options(replicas=2, accumulation=2)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.5))(torch.ones(8))
    assert model.weight.item() == 1 - 0.5 * 4


def test_every_device_iteration_is_a_weight_update():
    model = Line()
    training = poptorch.trainingModel(model, options(iterations=3), poptorch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(3))
    assert model.weight.item() == pytest.approx(0.7)


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_torch_and_poptorch_optimizers_are_equal(algorithm):
    weights = []
    for family in (torch.optim, poptorch.optim):
        model = seeded()
        optimizer = getattr(family, algorithm)(model.parameters(), lr=0.01)
        training = poptorch.trainingModel(model, options(), optimizer)
        for seed in range(3):
            training(*batch(4, seed))
        weights.append(model.conv.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("algorithm", ["Adam", "AdamW", "RMSprop"])
def test_other_optimizers_of_torch_are_equal(algorithm):
    by_hand, on_device = seeded(), seeded()
    ours = getattr(poptorch.optim, algorithm)(on_device.parameters(), lr=0.01)
    training = poptorch.trainingModel(on_device, options(), ours)
    optimizer = getattr(torch.optim, algorithm)(by_hand.parameters(), lr=0.01)
    for seed in range(3):
        images, labels = batch(4, seed)
        training(images, labels)
        optimizer.zero_grad()
        by_hand(images, labels)[1].backward()
        optimizer.step()
    torch.testing.assert_close(on_device.conv.weight.detach(), by_hand.conv.weight.detach())


def dropout_outputs(replicas, seed=3, calls=2):
    model = seeded(dropout=0.5)
    opts = options(replicas, accumulation=4 // replicas).outputMode(poptorch.OutputMode.All).randomSeed(seed)
    training = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    return torch.stack([training(*batch(8, call))[0] for call in range(calls)]), model.linear.weight.detach().clone()


def test_dropout_is_reproducible_and_depends_on_the_seed():
    assert torch.equal(dropout_outputs(2)[0], dropout_outputs(2)[0])
    assert not torch.equal(dropout_outputs(2)[0], dropout_outputs(2, seed=4)[0])


def test_replicas_and_micro_batches_draw_different_numbers():
    ones = torch.ones(4 * 50)
    opts = options(replicas=2, iterations=2).outputMode(poptorch.OutputMode.All).randomSeed(0)
    drawn = poptorch.inferenceModel(nn.Dropout(0.5), opts)(ones).view(4, 50)
    assert len({tuple(row.tolist()) for row in drawn}) == 4


def test_random_numbers_do_not_depend_on_other_replicas():
    def drawn(process, processes, replicas):
        opts = options(replicas).randomSeed(5)
        opts.Distributed.configureProcessId(process, processes)
        return poptorch.inferenceModel(nn.Dropout(0.5), opts)(torch.ones(replicas * 50))

    assert torch.equal(drawn(0, 1, 4), torch.cat([drawn(0, 2, 2), drawn(1, 2, 2)]))


def test_the_host_generator_does_not_change():
    model = seeded(dropout=0.5)
    training = poptorch.trainingModel(model, options(replicas=2))
    state = torch.get_rng_state()
    training(*batch(4))
    assert torch.equal(state, torch.get_rng_state())


def test_rng_state_can_be_restored():
    model = poptorch.inferenceModel(nn.Dropout(0.5), options().randomSeed(9))
    x = torch.ones(50)
    model(x)
    state = model.rng_state
    first, other = model(x), model(x)
    model.rng_state = state
    assert torch.equal(first, model(x))
    assert not torch.equal(first, other)


def test_parameters_that_the_loss_does_not_depend_on_do_not_change():
    class Partial(Classifier):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    for replicas in (1, 2):
        model = Partial()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
        poptorch.trainingModel(model, options(replicas), optimizer)(*batch(4))
        assert model.unused.tolist() == model.frozen.tolist() == [1, 1, 1]


def test_parameters_that_are_not_in_the_optimizer_do_not_change():
    model = seeded()
    before = model.conv.weight.detach().clone()
    optimizer = poptorch.optim.SGD(model.linear.parameters(), lr=0.1)
    poptorch.trainingModel(model, options(2), optimizer)(*batch(4))
    assert torch.equal(model.conv.weight, before)


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return poptorch.identity_loss(self.second(self.first(x)), "mean")

    by_hand, model = seeded(Tied), seeded(Tied)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.5))(torch.ones(2, 3))
    by_hand(torch.ones(2, 3)).backward()
    torch.testing.assert_close(
        model.first.weight.detach(), by_hand.first.weight.detach() - 0.5 * by_hand.first.weight.grad
    )
    assert model.second.weight is model.first.weight


def test_loss_scaling_does_not_change_weights():
    weights = []
    for scaling in (1.0, 1024.0):
        model = seeded()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scaling)
        poptorch.trainingModel(model, options(2, 2), optimizer)(*batch(8))
        weights.append(model.conv.weight.detach().clone())
    assert torch.equal(*weights)


def test_max_grad_norm_clips_the_global_norm():
    by_hand, model = seeded(), seeded()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, max_grad_norm=0.01)
    poptorch.trainingModel(model, options(), optimizer)(*batch(4))
    by_hand(*batch(4))[1].backward()
    torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
    torch.testing.assert_close(model.conv.weight.detach(), by_hand.conv.weight.detach() - by_hand.conv.weight.grad)


class HalfClassifier(Classifier):
    """Half weights and activations with 8-bit input."""

    def forward(self, images, labels=None):
        return super().forward(images.half(), labels)


def test_a_half_model_trains_and_returns_half():
    model = seeded(HalfClassifier).half()
    training = poptorch.trainingModel(
        model, options(2, 2), poptorch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )
    images, labels = torch.randint(0, 4, (8, 3, 6, 6), dtype=torch.uint8), torch.arange(8) % 5
    losses = [training(images, labels)[1].float().mean().item() for _ in range(20)]
    logits, loss = training(images, labels)
    assert (logits.dtype, loss.dtype, model.conv.weight.dtype) == (torch.half, torch.half, torch.half)
    assert losses[-1] < losses[0]


def test_half_weights_are_rounded_after_every_update():
    model = Line().half()
    training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(5):
        training(torch.ones(2, dtype=torch.half))
    # 1 - 1e-4 rounds to 1 in half, so no update changes the weight; in float32 five updates would.
    assert model.weight.item() == 1


def test_half_inputs_with_float_weights_return_half():
    model = poptorch.inferenceModel(Classifier(), options())
    assert model(torch.ones(2, 3, 6, 6, dtype=torch.half)).dtype == torch.half


def test_casting_to_the_dtype_of_the_weights_keeps_half():
    class Casting(Classifier):
        def forward(self, images, labels=None):
            return super().forward(images.to(self.conv.weight.dtype), labels)

    model = poptorch.inferenceModel(Casting().half(), options())
    assert model(torch.ones(2, 3, 6, 6)).dtype == torch.half


def test_a_recurrent_model_trains():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x):
            return poptorch.identity_loss(self.lstm(x)[0], "mean")

    by_hand, model = seeded(Recurrent), seeded(Recurrent)
    poptorch.trainingModel(model, options(2), poptorch.optim.SGD(model.parameters(), lr=1.0))(torch.ones(2, 5, 3))
    by_hand(torch.ones(2, 5, 3)).backward()
    expected = by_hand.lstm.weight_hh_l0.detach() - by_hand.lstm.weight_hh_l0.grad
    torch.testing.assert_close(model.lstm.weight_hh_l0.detach(), expected)


def test_the_callers_modes_are_disabled_on_the_device():
    results = []
    for mode in (torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu")):
        model = seeded()
        training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=0.1))
        with mode():
            training(*batch(4))
            training(*batch(4))
        results.append(model.conv.weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_error_of_one_replica_is_raised_and_leaves_no_gradients(replicas):
    class Failing(Line):
        def forward(self, x):
            if x.sum() > 5:
                raise ValueError("sample is bad")
            return super().forward(x)

    model = Failing()
    opts = options(replicas, accumulation=2)
    training = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.5))
    samples = torch.ones(2 * replicas)
    training.compile(samples)
    with pytest.raises(ValueError, match="sample is bad"):
        training(torch.cat([samples[1:], torch.tensor([9.0])]))
    training(samples)
    assert model.weight.item() == 0.5


def test_weights_in_another_memory_format_train_the_same():
    """Reduced gradients must have the strides of the weights, as fused kernels iterate over both."""

    def trained(memory_format):
        model = seeded()
        model.conv.to(memory_format=memory_format)
        training = poptorch.trainingModel(model, options(2), poptorch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            training(*batch(4, number))
        return model.conv.weight.detach().contiguous()

    torch.testing.assert_close(trained(torch.channels_last), trained(torch.contiguous_format))
