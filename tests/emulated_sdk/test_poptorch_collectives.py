"""PopART's collective operators by `custom_op`, over the replicas of one process and of several; `replicaGrouping`."""

from __future__ import annotations

import copy
import os
import pickle

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, options, trained
from tests.support.ranks import error_of
from tests.support.refused import rejects

REPLICAS = 4


def call(name, x, example=None, **attributes):
    return poptorch.custom_op([x], name, "ai.graphcore", 1, [x if example is None else example], attributes)[0]


def inputs(replicas=REPLICAS):
    """Return one row for each replica: [replicas, 4]."""
    return (torch.arange(float(replicas * 4)) + 1).view(replicas, 4)


def of_process(process, processes, *tensors):
    """Return the options of a process, and its share of the rows of each tensor."""
    opts = options(REPLICAS // processes)
    opts.Distributed.configureProcessId(process, processes)
    return opts, [x.view(processes, -1, *x.shape[1:])[process] for x in tensors]


def run(function, x, process=0, processes=1):
    """Return what each of the local replicas computes from its row of x."""
    opts, local = of_process(process, processes, x)
    return poptorch.inferenceModel(Apply(function), opts)(*local)


def row_of(function):
    """Return a function of a row of one replica as one of its micro-batch of one sample."""
    return lambda x: function(x[0])[None]


def gradient(function, scale, process=0, processes=1):
    """Return the gradient of weights, over all replicas, with a scale of each element of the result of each replica."""

    def forward(model, x, scale):
        y = function(model.weight * x[0])
        return poptorch.identity_loss((y.reshape(-1) * scale[0]).sum(), "sum")

    opts, local = of_process(process, processes, inputs(), scale)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    model = Apply(forward, weight=nn.Parameter(torch.ones(4)))
    return 1 - trained(model, *local, opts=opts, lr=1.0).weight.detach()


def gathered(x, **attributes):
    return call("ReplicatedAllGather", x, x.new_zeros(REPLICAS, *x.shape), **attributes)


OPERATORS = {0: torch.sum, 1: torch.mean, 2: torch.prod, 3: torch.amin, 4: torch.amax, 7: lambda x, _: (x**2).sum(0)}


@pytest.mark.parametrize("number", [*OPERATORS, 8])
def test_all_reduce_has_the_operators_of_popart(number):
    x = inputs()
    found = run(row_of(lambda x: call("ReplicatedAllReduce", x, __collectiveOperator=number)), x)
    assert torch.equal(found, OPERATORS[number](x, 0).expand(4, 4) if number in OPERATORS else x)


def test_an_all_reduce_adds_integers_and_half_and_has_no_gradient_as_in_popart(caplog):
    x = inputs()
    for dtype in (torch.int32, torch.half):
        found = run(row_of(lambda x: call("ReplicatedAllReduce", x)), x.to(dtype))
        assert torch.equal(found, x.sum(0).expand(4, 4).to(dtype))
    found = gradient(lambda x: call("ReplicatedAllReduce", x) + x, torch.ones(4, 4))
    assert torch.equal(found, x.sum(0))
    assert "ReplicatedAllReduce has no gradient" in caplog.text


@pytest.mark.parametrize("backwards", [True, False])
def test_a_tensor_parallel_all_reduce_sums_forward_or_backward(backwards):
    def reduced(x):
        return call("ReplicatedAllReduceTP", x, op="sum", backwards=backwards, __collectiveReplicaGrouping=[4, 1, 4])

    x, scale = inputs(), torch.arange(16.0).view(4, 4)
    assert torch.equal(run(row_of(reduced), x), x if backwards else x.sum(0).expand(4, 4))
    assert torch.equal(gradient(reduced, scale), (x * (scale.sum(0) if backwards else scale)).sum(0))


def test_reduce_scatter_gives_each_replica_its_part_with_padding_and_has_a_gradient_if_local():
    def scattered(number, length):
        return lambda x: call("ReplicatedReduceScatter", x, x.new_zeros(length), __collectiveOperator=number)

    x, scale = torch.arange(20.0).view(4, 5), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    total = torch.cat([x.sum(0), torch.zeros(3)]).view(4, 2)
    assert torch.equal(run(row_of(lambda x: call("ReplicatedReduceScatter", x, x.new_zeros(2))), x), total)
    assert run(row_of(scattered(8, 2)), x)[1].tolist() == x[1, 2:4].tolist()
    assert torch.equal(gradient(scattered(8, 1), scale), (inputs() * scale.view(1, 4)).sum(0))
    with pytest.raises(poptorch.Error, match="only implemented when CollectiveOperator==CollectiveOperator::Local"):
        gradient(scattered(0, 1), scale)


def exchanged(x, **attributes):
    return call("ReplicatedAllToAll", x, **attributes)


def reduced(name="ReplicatedAllReduce", **attributes):
    return lambda x: call(name, x, **attributes)


def test_all_gather_and_all_to_all_exchange_tensors_and_their_gradients():
    x, scale = inputs(), torch.arange(64.0).view(4, 16)
    assert torch.equal(run(row_of(gathered), x), x.expand(4, 4, 4))
    own = torch.stack([scale[replica].view(4, 4)[replica] for replica in range(4)])
    assert torch.equal(gradient(gathered, scale), (x * own).sum(0))
    x, scale = inputs(), torch.arange(16.0).view(4, 4)
    assert torch.equal(run(row_of(exchanged), x), x.T)
    assert torch.equal(gradient(exchanged, scale), (x * scale.T).sum(0))


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ({"__collectiveReplicaGrouping": [4, 1, 2]}, [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ({"__collectiveReplicaGrouping": [4, 2, 2]}, [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ({"__collectiveCommGroup": [1, 2]}, [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ({"__collectiveCommGroup": [2, 2]}, [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ({"__collectiveCommGroup": [0, 0]}, [(0, 1, 2, 3)] * 4),
        ({"__collectiveReplicaGrouping": [4, 1, 1]}, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups_of_replicas(attributes, groups):
    x = inputs()
    assert torch.equal(run(row_of(reduced(**attributes)), x), torch.stack([x[list(group)].sum(0) for group in groups]))


BOTH = {"__collectiveCommGroup": [0, 0], "__collectiveReplicaGrouping": [4, 1, 4]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reduced(__collectiveReplicaGrouping=[8, 1, 8]), "for 8 replicas, but the program has 4"),
        (reduced(__collectiveReplicaGrouping=[4, 2, 4]), "stride 2 do not divide 4 replicas"),
        (reduced(__collectiveCommGroup=[7, 2]), "is .type 0, 1 or 2, size., not .7, 2."),
        (reduced(__collectiveOperator=5), r"the collective operator 5 \(LogicalAnd\)"),
        (reduced("ReplicatedAllReduceTP", __collectiveOperator=4), "Add is the only one"),
        (reduced(**BOTH), "setting both attributes"),
        (lambda x: exchanged(x[:3]), r"dimension 0 of \[3\] is not a multiple of 4 replicas"),
        (lambda x: exchanged(x > 0), "32-bit integer tensors, not torch.bool"),
        (lambda x: call("ReplicatedAllGather", x), r"returned float32\[16\], but example_outputs .* float32\[4\]"),
    ],
)
def test_wrong_attributes_and_tensors_are_an_error(function, message):
    rejects(poptorch.Error, message, lambda: run(row_of(function), inputs()))


def test_all_replicas_run_at_once_whatever_the_cores(monkeypatch):
    cpus = ",".join(map(str, os.sched_getaffinity(0)))
    for setting, value in (("EMULATED_POD_REPLICAS_AT_A_TIME", "1"), ("EMULATED_POD_REPLICA_CPUS", cpus)):
        with monkeypatch.context() as context:
            context.setenv(setting, value)
            assert torch.equal(run(row_of(exchanged), inputs()), inputs().T)


def only_for(replicas, name="ReplicatedAllToAll"):
    """Return a function that calls an operator on these replicas only, which a compiled program cannot."""

    def forward(x):
        index = (x[0, 0].item() - 1) // 4
        return call(name, x[0])[None] if index in replicas else x.clone()

    return forward


def test_replicas_exchange_tensors_in_a_forward_that_changes_an_object_of_the_program(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_TIMEOUT_S", "20")  # of a wait for a forward that waits for this one
    record = []

    def forward(x):
        record.append("before")
        sums = gathered(x[0]).sum(0)
        record.append(len(record))
        return gathered(sums).sum(0)[None]

    assert torch.equal(run(forward, inputs()), REPLICAS * inputs().sum(0).expand(REPLICAS, 4))
    assert record == ["before", 1]


def test_errors_of_replicas_are_those_of_the_call_and_of_all():
    model = poptorch.inferenceModel(Apply(fails_for_a_negative_number), options(REPLICAS))
    x = inputs()
    model(x)
    rejects(ValueError, "a negative number", model, x * torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None])
    assert torch.equal(model(x), x.T)

    def different(x):
        name = "ReplicatedAllToAll" if x[0, 0].item() < 2 else "ReplicatedAllReduce"
        return call(name, x[0])[None]

    for forward, message in (
        (only_for({0, 1}), "all must call it|ended its pass while others wait for it in .*AllToAll"),
        (different, "all must call the same operators"),
        (only_for({1}), "ReplicatedAllToAll was not part of the forward when the model was"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            run(forward, inputs())


def fails_for_a_negative_number(x):
    if x.max() < 0:
        raise ValueError("a negative number")
    return exchanged(x[0])[None]


def in_processes(process, processes):
    torch.set_num_threads(1)
    place = {"process": process, "processes": processes}
    scale = torch.arange(64.0).view(4, 16)
    functions = gathered, exchanged, reduced(__collectiveReplicaGrouping=[4, 2, 2])
    results = [run(row_of(function), inputs(), **place) for function in functions]
    results += [gradient(gathered, scale, **place), gradient(exchanged, scale[:, :4].contiguous(), **place)]
    return [result.numpy().tobytes() for result in results]


def fails_in_one_process(process, processes):
    opts, (x,) = of_process(process, processes, inputs())
    model = poptorch.inferenceModel(Apply(fails_for_a_negative_number), opts)
    model(x)
    return error_of(lambda: model(-x if process else x))


def test_two_processes_have_the_bits_of_one_and_a_failure_in_one_ends_the_exchange_of_the_other(ranks):
    before = torch.get_num_threads()
    alone = in_processes(0, 1)
    torch.set_num_threads(before)
    everything = ranks(__file__, ["in_processes", "fails_in_one_process"], 2)
    found = everything["in_processes"]
    for each in range(3):  # each process has the results of its replicas
        assert b"".join(results[each] for results in found) == alone[each]
    for each in (3, 4):  # and all gradients
        assert {results[each] for results in found} == {alone[each]}
    other, own = everything["fails_in_one_process"]
    assert own == "ValueError: a negative number"
    assert "rank 0 of 2" in other


ALL, CONSECUTIVE, ORTHOGONAL, NO_GROUPING = poptorch.CommGroupType
EACH_GROUP, EACH_REPLICA = poptorch.VariableRetrievalMode.OnePerGroup, poptorch.VariableRetrievalMode.AllReplicas


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.shared = nn.Parameter(torch.ones(()))

    def forward(self, x):
        result = self.shared * (x @ self.weight)
        return result, poptorch.identity_loss(result**2, reduction="mean")


def wrapped(weight, kind, size, optimizer=torch.optim.SGD, mode=EACH_GROUP):
    model = Product(weight)
    opts = options(4).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, opts, optimizer(model.parameters(), lr=0.1))
    training.weight.replicaGrouping(kind, size, mode)
    return model, training


def reference(weight, x, group_of):
    """Return the weights after one update of SGD, by autograd over all replicas."""
    leaf, shared = weight.clone().requires_grad_(), torch.ones((), requires_grad=True)
    losses = [((shared * (x[r : r + 1] @ leaf[g])) ** 2).mean() for r, g in enumerate(group_of)]
    (sum(losses) / len(losses)).backward()
    return weight - 0.1 * leaf.grad, 1 - 0.1 * shared.grad


@pytest.mark.parametrize(
    ("kind", "size", "group_of"),
    [(CONSECUTIVE, 2, [0, 0, 1, 1]), (ORTHOGONAL, 2, [0, 1, 0, 1]), (NO_GROUPING, 0, [0, 1, 2, 3])],
)
@pytest.mark.parametrize("mode", [EACH_GROUP, EACH_REPLICA])
def test_each_group_computes_and_trains_its_own_values(kind, size, group_of, mode):
    of_replicas, x = torch.randn(4, 3, 2), torch.randn(4, 3)
    weight = of_replicas[[group_of.index(group) for group in sorted(set(group_of))]]  # of the first of each group
    model, training = wrapped(of_replicas if mode == EACH_REPLICA else weight.clone(), kind, size, mode=mode)
    results, _ = training(x)
    for replica, group in enumerate(group_of):
        torch.testing.assert_close(results[replica], x[replica] @ weight[group])
    expected_weight, expected_shared = reference(weight, x, group_of)
    expected_weight = expected_weight[group_of] if mode == EACH_REPLICA else expected_weight
    torch.testing.assert_close(model.weight.detach(), expected_weight)
    torch.testing.assert_close(model.shared.detach(), expected_shared)


def test_optimizer_state_has_a_value_of_each_group_and_an_inference_model_has_groups():
    weight, x = torch.randn(4, 3, 2), torch.randn(4, 3)
    model, training = wrapped(weight.clone(), NO_GROUPING, 0, poptorch.optim.AdamW)
    training(x)
    state, values = training._optimizer.state_dict(), {name: v.clone() for name, v in model.state_dict().items()}
    assert state["ipu_state"]["Step___weight"].tolist() == [1, 1, 1, 1]
    assert state["ipu_state"]["Accl1___weight"].shape == weight.shape
    training(x)
    again, resumed = wrapped(weight.clone(), NO_GROUPING, 0, poptorch.optim.AdamW)
    again.load_state_dict(values)
    resumed._optimizer.load_state_dict(state)
    resumed(x)
    assert torch.equal(again.weight, model.weight)
    model = Product(torch.arange(4.0).reshape(2, 2, 1))
    inference = poptorch.inferenceModel(model, options(2))
    inference.weight.replicaGrouping(CONSECUTIVE, 1, EACH_GROUP)
    assert torch.cat([inference.weight, inference.weight]).shape == (4, 2, 1)
    for copied in (copy.copy(inference.weight), pickle.loads(pickle.dumps(inference.weight))):
        assert torch.equal(copied, model.weight)
    inference.weight.requires_grad = False
    assert not model.weight.requires_grad
    assert inference(torch.ones(2, 2))[0].flatten().tolist() == [1, 5]


def test_a_wrong_shape_grouping_after_the_compilation_and_norms_of_groups_raise_error():
    for shape, kind, size, message in (
        ((3, 3, 2), CONSECUTIVE, 2, "must be 2"),
        ((2, 3, 2), CONSECUTIVE, 3, "do not divide the 4 replicas"),
        ((), NO_GROUPING, 0, "Scalars cannot be passed"),
    ):
        rejects(poptorch.Error, message, wrapped(torch.ones(shape), kind, size)[1], torch.ones(4, 3))
    _, plain = wrapped(torch.ones(3, 2), ALL, 0)
    assert plain(torch.ones(4, 3))[0].shape == (4, 2), "one group of all replicas has no effect"
    _, training = wrapped(torch.ones(2, 3, 2), CONSECUTIVE, 2)
    training(torch.ones(4, 3))
    rejects(poptorch.Error, "before the model is compiled", training.weight.replicaGrouping, CONSECUTIVE, 2, EACH_GROUP)
    rejects(AssertionError, "not a CommGroupType", training.weight.replicaGrouping, "All", 0)
    _, lamb = wrapped(torch.ones(2, 3, 2), CONSECUTIVE, 2, poptorch.optim.LAMB)
    rejects(poptorch.Error, "LAMB", lamb, torch.ones(4, 3))
