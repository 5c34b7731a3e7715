"""PopART's collective operators by `custom_op`: over the replicas of one process and of several, with gradients."""

from __future__ import annotations

import os

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, options

REPLICAS = 4


def call(name, x, example=None, **attributes):
    examples = [x if example is None else example]
    return poptorch.custom_op([x], name, "ai.graphcore", 1, examples, attributes)[0]


def inputs(replicas=REPLICAS):
    """Return one row for each replica: [replicas, 4]."""
    return (torch.arange(float(replicas * 4)) + 1).view(replicas, 4)


def run(function, x, replicas=REPLICAS, process=0, processes=1):
    """Return what each of the local replicas computes from its row of x."""
    opts = options(replicas // processes)
    opts.Distributed.configureProcessId(process, processes)
    local = x.view(processes, -1, *x.shape[1:])[process]
    return poptorch.inferenceModel(Apply(function), opts)(local)


def row_of(function):
    """Return a function of a row of one replica as one of its micro-batch of one sample."""
    return lambda x: function(x[0])[None]


class Scaled(nn.Module):
    """The weighted sum of the results of an operator, whose gradient differs between replicas and elements."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x, scale):
        y = self.function(self.weight * x[0])
        return poptorch.identity_loss((y.reshape(-1) * scale[0]).sum(), "sum")


def gradient(function, scale, replicas=REPLICAS, process=0, processes=1):
    """Return the gradient of the weights, summed over all replicas, with a scale of each element of each replica."""
    opts = options(replicas // processes)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    opts.Distributed.configureProcessId(process, processes)
    model = Scaled(function)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    local = [x.view(processes, -1, *x.shape[1:])[process] for x in (inputs(replicas), scale)]
    poptorch.trainingModel(model, opts, optimizer)(*local)
    return 1 - model.weight.detach()


def gathered(x, **attributes):
    return call("ReplicatedAllGather", x, x.new_zeros(REPLICAS, *x.shape), **attributes)


def test_all_gather_stacks_the_tensors_of_all_replicas():
    x = inputs()
    found = run(row_of(gathered), x)
    assert torch.equal(found, x.expand(4, 4, 4))


def test_an_all_gather_passes_the_own_part_of_the_gradient_on():
    scale = torch.arange(64.0).view(4, 16)
    own = torch.stack([scale[replica].view(4, 4)[replica] for replica in range(4)])
    assert torch.equal(gradient(gathered, scale), (inputs() * own).sum(0))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, torch.sum), (1, torch.mean), (2, torch.prod), (3, torch.amin), (4, torch.amax), (8, None)],
)
def test_all_reduce_has_the_operators_of_popart(number, expected):
    x = inputs()
    found = run(row_of(lambda x: call("ReplicatedAllReduce", x, __collectiveOperator=number)), x)
    assert torch.equal(found, x if expected is None else expected(x, 0).expand(4, 4))


def test_all_reduce_adds_squares_and_integers_and_half():
    x = inputs()
    squares = run(row_of(lambda x: call("ReplicatedAllReduce", x, __collectiveOperator=7)), x)
    assert torch.equal(squares, (x**2).sum(0).expand(4, 4))
    for dtype in (torch.int32, torch.half):
        found = run(row_of(lambda x: call("ReplicatedAllReduce", x)), x.to(dtype))
        assert torch.equal(found, x.sum(0).expand(4, 4).to(dtype))


def test_an_all_reduce_has_no_gradient_as_in_popart(caplog):
    found = gradient(lambda x: call("ReplicatedAllReduce", x) + x, torch.ones(4, 4))
    assert torch.equal(found, inputs().sum(0))
    assert "ReplicatedAllReduce has no gradient" in caplog.text


@pytest.mark.parametrize("backwards", [True, False])
def test_a_tensor_parallel_all_reduce_sums_forward_or_backward(backwards):
    def reduced(x):
        return call("ReplicatedAllReduceTP", x, op="sum", backwards=backwards, __collectiveReplicaGrouping=[4, 1, 4])

    x, scale = inputs(), torch.arange(16.0).view(4, 4)
    assert torch.equal(run(row_of(reduced), x), x if backwards else x.sum(0).expand(4, 4))
    assert torch.equal(gradient(reduced, scale), (x * (scale.sum(0) if backwards else scale)).sum(0))


def test_reduce_scatter_gives_each_replica_its_part_with_padding():
    def scattered(x, **attributes):
        return call("ReplicatedReduceScatter", x, x.new_zeros(2), **attributes)

    x = torch.arange(20.0).view(4, 5)
    total = torch.cat([x.sum(0), torch.zeros(3)]).view(4, 2)
    assert torch.equal(run(row_of(scattered), x), total)
    own = run(row_of(lambda x: scattered(x, __collectiveOperator=8)), x)
    assert own[1].tolist() == x[1, 2:4].tolist()


def test_only_a_local_reduce_scatter_has_a_gradient():
    def scattered(number):
        return lambda x: call("ReplicatedReduceScatter", x, x.new_zeros(1), __collectiveOperator=number)

    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert torch.equal(gradient(scattered(8), scale), (inputs() * scale.view(1, 4)).sum(0))
    with pytest.raises(poptorch.Error, match="only implemented when CollectiveOperator==CollectiveOperator::Local"):
        gradient(scattered(0), scale)


def exchanged(x, **attributes):
    return call("ReplicatedAllToAll", x, **attributes)


def test_all_to_all_exchanges_parts_and_their_gradients():
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
    found = run(row_of(lambda x: call("ReplicatedAllReduce", x, **attributes)), x)
    assert torch.equal(found, torch.stack([x[list(group)].sum(0) for group in groups]))


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("ReplicatedAllReduce", {"__collectiveReplicaGrouping": [8, 1, 8]}, "for 8 replicas, but the program has 4"),
        ("ReplicatedAllReduce", {"__collectiveReplicaGrouping": [4, 2, 4]}, "stride 2 do not divide 4 replicas"),
        ("ReplicatedAllReduce", {"__collectiveCommGroup": [7, 2]}, "is .type 0, 1 or 2, size., not .7, 2."),
        ("ReplicatedAllReduce", {"__collectiveOperator": 5}, r"the collective operator 5 \(LogicalAnd\)"),
        ("ReplicatedAllReduceTP", {"__collectiveOperator": 4}, "Add is the only one"),
        (
            "ReplicatedAllReduce",
            {"__collectiveCommGroup": [0, 0], "__collectiveReplicaGrouping": [4, 1, 4]},
            "setting both attributes",
        ),
    ],
)
def test_wrong_attributes_are_an_error(name, attributes, message):
    with pytest.raises(poptorch.Error, match=message):
        run(row_of(lambda x: call(name, x, **attributes)), inputs())


def test_wrong_tensors_are_an_error():
    with pytest.raises(poptorch.Error, match=r"dimension 0 of \[3\] is not a multiple of 4 replicas"):
        run(row_of(lambda x: exchanged(x[:3])), inputs())
    with pytest.raises(poptorch.Error, match="32-bit integer tensors, not torch.bool"):
        run(row_of(lambda x: exchanged(x > 0)), inputs())
    with pytest.raises(poptorch.Error, match=r"returned float32\[16\], but example_outputs .* float32\[4\]"):
        run(row_of(lambda x: call("ReplicatedAllGather", x)), inputs())


@pytest.mark.parametrize("setting", ["EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"])
def test_all_replicas_run_at_once_whatever_the_cores(monkeypatch, setting):
    cpus = ",".join(map(str, os.sched_getaffinity(0)))
    monkeypatch.setenv(setting, "1" if setting.endswith("TIME") else cpus)
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


def test_a_replica_that_does_not_take_part_is_an_error_for_all():
    with pytest.raises(poptorch.Error, match="all must call it|ended its pass while others wait for it in .*AllToAll"):
        run(only_for({0, 1}), inputs())


def test_different_operators_are_an_error_for_all():
    def forward(x):
        name = "ReplicatedAllToAll" if x[0, 0].item() < 2 else "ReplicatedAllReduce"
        return call(name, x[0])[None]

    with pytest.raises(poptorch.Error, match="all must call the same operators"):
        run(forward, inputs())


def test_an_operator_that_the_compilation_did_not_meet_is_an_error():
    with pytest.raises(poptorch.Error, match="ReplicatedAllToAll was not part of the forward when the model was"):
        run(only_for({1}), inputs())


def test_the_error_of_a_replica_is_that_of_the_call_and_the_next_call_works():
    def forward(x):
        if x.max() < 0:
            raise ArithmeticError("a negative number")
        return exchanged(x[0])[None]

    model = poptorch.inferenceModel(Apply(forward), options(REPLICAS))
    x = inputs()
    model(x)
    with pytest.raises(ArithmeticError, match="a negative number"):
        model(x * torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None])
    assert torch.equal(model(x), x.T)


def in_processes(process, processes):
    """Return results and gradients of each operator in one of several processes."""
    torch.set_num_threads(1)
    place = {"process": process, "processes": processes}
    scale = torch.arange(64.0).view(4, 16)
    pairs = run(
        row_of(lambda x: call("ReplicatedAllReduce", x, __collectiveReplicaGrouping=[4, 2, 2])), inputs(), **place
    )
    results = [run(row_of(gathered), inputs(), **place), run(row_of(exchanged), inputs(), **place), pairs]
    results += [gradient(gathered, scale, **place), gradient(exchanged, scale[:, :4].contiguous(), **place)]
    return [result.numpy().tobytes() for result in results]


def test_two_processes_have_the_bits_of_one(ranks):
    before = torch.get_num_threads()
    alone = in_processes(0, 1)
    torch.set_num_threads(before)
    found = ranks(__file__, ["in_processes"], 2)["in_processes"]
    for each in range(3):  # each process has the results of its replicas
        assert b"".join(results[each] for results in found) == alone[each]
    for each in (3, 4):  # and all gradients
        assert {results[each] for results in found} == {alone[each]}


def fails_in_one_process(process, processes):
    """Return the errors of an inference of which a replica fails in process 1, and the next result."""

    def forward(x):
        if x.max() < 0:
            raise ArithmeticError("a negative number")
        return exchanged(x[0])[None]

    opts = options(2)
    opts.Distributed.configureProcessId(process, processes)
    model = poptorch.inferenceModel(Apply(forward), opts)
    x = inputs().view(2, 2, 4)[process]
    model(x)
    try:
        model(-x if process else x)
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_a_failure_in_one_process_ends_the_exchange_of_the_others(ranks):
    other, own = ranks(__file__, ["fails_in_one_process"], 2)["fails_in_one_process"]
    assert own == "a negative number"
    assert "rank 0 of 2" in other
