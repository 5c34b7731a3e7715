"""The batch arithmetic of loader and executor, compared with loops over single samples."""

from __future__ import annotations

from typing import NamedTuple

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch_data import Numbers, numbers
from poptorch_models import Echo, options

OutputMode = poptorch.OutputMode
REJECTIONS = (poptorch.Error, AssertionError)
small = st.integers(1, 3)
replica_counts = st.sampled_from([1, 2, 4])


class Geometry(NamedTuple):
    """The factors of a combined batch."""

    iterations: int
    accumulation: int
    replicas: int
    micro: int


geometries = st.builds(Geometry, small, small, replica_counts, small)


def combined_size(geometry):
    samples = 0
    for _ in range(geometry.iterations):
        for _ in range(geometry.accumulation):
            for _ in range(geometry.replicas):
                samples += geometry.micro
    return samples


def window(length, step, process, processes, drop_last, epoch):
    """Return the positions that a process reads in an epoch (from 0; None without shuffling)."""
    if not drop_last:
        shares = [0] * processes
        for sample in range(length):
            shares[sample % processes] += 1
        start = sum(shares[:process])
        return list(range(start, start + shares[process]))
    owned, rest = 0, length
    while rest >= step * processes:
        rest -= step * processes
        owned += step
    start = process * owned
    if epoch is not None and epoch % 2 == 0:
        leftovers = length
        while leftovers >= owned:
            leftovers -= owned
        start += leftovers
    return list(range(start, start + owned))


def in_batches(samples, size, drop_last):
    batches, rest = [], list(samples)
    while len(rest) >= size:
        batches.append(rest[:size])
        rest = rest[size:]
    return batches if drop_last or not rest else [*batches, rest]


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(geometries, st.integers(1, 90), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_process_reads_its_batches(geometry, length, processes, drop_last, shuffle):
    size = combined_size(geometry)
    shuffle = shuffle and processes > 1
    for process in range(processes):
        opts = options(geometry.replicas, geometry.accumulation, geometry.iterations).randomSeed(9)
        opts.Distributed.configureProcessId(process, processes)
        arguments = {"drop_last": drop_last, "shuffle": shuffle or None}
        if drop_last and processes > 1 and length < size * processes:
            with pytest.raises(ZeroDivisionError):
                poptorch.DataLoader(opts, Numbers(length), geometry.micro, **arguments)
            continue
        loader = poptorch.DataLoader(opts, Numbers(length), geometry.micro, **arguments)
        generator = torch.Generator().manual_seed(9)
        for epoch in range(2):
            order = torch.randperm(length, generator=generator).tolist() if shuffle else list(range(length))
            if processes == 1:
                positions = list(range(length))
            else:
                positions = window(length, size, process, processes, drop_last, epoch if shuffle else None)
            expected = in_batches([order[position] for position in positions], size, drop_last)
            assert [numbers(batch) for batch in loader] == expected
            assert len(loader) == len(expected)
        assert loader.combinedBatchSize == size


def micro_batches(batch, geometry):
    """Return the samples as [iteration][step][replica]."""
    rest, nested = list(batch), []
    for _ in range(geometry.iterations):
        steps = []
        for _ in range(geometry.accumulation):
            steps.append([[rest.pop(0) for _ in range(geometry.micro)] for _ in range(geometry.replicas)])
        nested.append(steps)
    assert not rest
    return nested


def returned(nested, mode, period):
    """Return the micro-batches that an output mode returns, in order; those of Sum are added up."""
    if mode == OutputMode.Final:
        return list(nested[-1][-1])
    if mode == OutputMode.Sum:
        sums = None
        for steps in nested:
            for replicas in steps:
                if sums is None:
                    sums = [list(samples) for samples in replicas]
                else:
                    sums = [[a + b for a, b in zip(total, more)] for total, more in zip(sums, replicas)]
        return sums
    kept = []
    for iteration, steps in enumerate(nested):
        if mode == OutputMode.All or (iteration + 1) % period == 0:
            for replicas in steps:
                kept.extend(replicas)
    return kept


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(geometries, st.sampled_from([mode for mode in OutputMode if mode != OutputMode.Default]), small)
def test_outputs_of_training_are_in_the_order_of_the_samples(geometry, mode, period):
    period = min(period, geometry.iterations)
    opts = options(geometry.replicas, geometry.accumulation, geometry.iterations).outputMode(mode, period)
    model = Echo()
    wrapped = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.0))
    batch = torch.arange(float(combined_size(geometry)))
    values, losses = wrapped(batch)
    expected = returned(micro_batches(range(len(batch)), geometry), mode, period)
    assert values.tolist() == [sample for samples in expected for sample in samples]
    sums = [float(sum(samples)) for samples in expected]
    assert losses.tolist() == (sums if len(sums) > 1 else sums[0])
    wrapped.destroy()


@settings(derandomize=True, deadline=None, max_examples=30, database=None)
@given(replica_counts, replica_counts, small, st.sampled_from([1, 2]), st.booleans())
def test_outputs_of_inference_contain_every_replica(replicas, group, micro, iterations, is_consecutive):
    group = min(group, replicas)
    iterations = iterations if group == 1 else 1
    kind = poptorch.CommGroupType.Consecutive if is_consecutive else poptorch.CommGroupType.Orthogonal
    opts = options(replicas, 1, iterations).inputReplicaGrouping(group, kind)
    groups = replicas // group
    loader = poptorch.DataLoader(opts, Numbers(iterations * groups * micro), micro)
    (batch,) = loader
    expected = []
    for iteration in range(iterations):
        for replica in range(replicas):
            read = replica // group if is_consecutive else replica % groups
            expected += [(iteration * groups + read) * micro + sample for sample in range(micro)]
    wrapped = poptorch.inferenceModel(torch.nn.Identity(), opts)
    assert numbers(wrapped(batch)) == expected
    wrapped.destroy()


odd_values = st.one_of(st.none(), st.integers(-2, 3), st.sampled_from(["2", 2.5, [], object(), True]))


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "batch_size": odd_values,
            "shuffle": st.sampled_from([None, True, False]),
            "num_workers": st.sampled_from([0, -1]),
            "drop_last": st.booleans(),
            "persistent_workers": st.booleans(),
            "auto_distributed_partitioning": st.booleans(),
            "mode": st.sampled_from([poptorch.DataLoaderMode.Sync] * 12 + [7, -1, "Async", None]),
            "async_options": st.sampled_from([None, {}, {"rebatched_size": 2}]),
            "rebatched_worker_size": odd_values,
            "batch_sampler": st.sampled_from([None, [[0, 1], [2]]]),
            "sampler": st.sampled_from([None, [2, 0, 1]]),
            "timeout": st.sampled_from([0, -1]),
        },
    ),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_wrong_arguments_of_a_loader_are_rejected_by_its_constructor(arguments, length, processes):
    opts = options()
    opts.Distributed.configureProcessId(processes - 1, processes)
    try:
        loader = poptorch.DataLoader(opts, Numbers(length), **arguments)
    except (*REJECTIONS, ValueError):
        return
    except ZeroDivisionError:
        assert processes > 1
        return
    if arguments.get("sampler") is None and arguments.get("batch_sampler") is None:
        assert len(list(loader)) == len(loader)


odd_tensors = st.builds(
    torch.zeros,
    st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.float64, torch.bool, torch.half]),
)
odd_inputs = st.recursive(
    st.one_of(odd_tensors, st.none(), st.sampled_from([3, "text"])),
    lambda inside: st.one_of(st.lists(inside, max_size=2), st.dictionaries(st.sampled_from("ab"), inside, max_size=2)),
    max_leaves=3,
)


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.lists(odd_inputs, max_size=2), st.sampled_from([1, 2]))
def test_other_inputs_than_compiled_are_rejected(inputs, replicas):
    wrapped = poptorch.inferenceModel(torch.nn.Identity(), options(replicas))
    right = torch.ones(2 * replicas, 3)
    wrapped.compile(right)
    fits = len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and inputs[0].shape == right.shape
    try:
        result = wrapped(*inputs)
    except REJECTIONS:
        assert not fits or inputs[0].dtype not in (torch.float32, torch.float64)
    except TypeError:
        assert len(inputs) != 1  # forward has another signature
    else:
        assert result.shape == right.shape
    assert wrapped(right).equal(right)
    wrapped.destroy()


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(odd_tensors, small, replica_counts)
def test_the_first_call_is_rejected_unless_samples_divide(tensor, iterations, replicas):
    wrapped = poptorch.inferenceModel(torch.nn.Identity(), options(replicas, 1, iterations))
    samples = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() and samples % (iterations * replicas) == 0:
        assert wrapped(tensor).shape == tensor.shape
    else:
        with pytest.raises((AssertionError, poptorch.Error), match="Invalid batch dimension|Zero-sized tensors"):
            wrapped(tensor)
    wrapped.destroy()
