"""The batch arithmetic of loader and executor, compared with tensors of all samples."""

from __future__ import annotations

from typing import NamedTuple

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.poptorch_data import Numbers, numbers
from tests.support.poptorch_models import Echo, options, wrapped

OutputMode = poptorch.OutputMode
small = st.integers(1, 3)
replica_counts = st.sampled_from([1, 2, 4])


class Geometry(NamedTuple):
    iterations: int
    accumulation: int
    replicas: int
    micro: int


geometries = st.builds(Geometry, small, small, replica_counts, small)


def combined_size(geometry):
    return geometry.iterations * geometry.accumulation * geometry.replicas * geometry.micro


def window(length, step, process, processes, drop_last, epoch):
    """Return the positions that a process reads in an epoch (from 0; None without shuffling)."""
    if not drop_last:
        shares = [len(range(other, length, processes)) for other in range(processes)]
        start = sum(shares[:process])
        return range(start, start + shares[process])
    owned = length // (step * processes) * step
    leftovers = length % owned if epoch is not None and epoch % 2 == 0 else 0
    return range(process * owned + leftovers, (process + 1) * owned + leftovers)


def in_batches(samples, size, drop_last):
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


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
            positions = range(length)
            if processes > 1:
                positions = window(length, size, process, processes, drop_last, epoch if shuffle else None)
            expected = in_batches([order[position] for position in positions], size, drop_last)
            assert [numbers(batch) for batch in loader] == expected
            assert len(loader) == len(expected)
        assert loader.combinedBatchSize == size


def returned(samples, geometry, mode, period):
    """Return the micro-batches that an output mode returns, in order; those of Sum are added up."""
    nested = samples.view(geometry.iterations, geometry.accumulation, geometry.replicas, geometry.micro)
    if mode == OutputMode.Final:
        return nested[-1, -1]
    if mode == OutputMode.Sum:
        return nested.sum((0, 1))
    return (nested if mode == OutputMode.All else nested[period - 1 :: period]).flatten(0, 2)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(geometries, st.sampled_from([mode for mode in OutputMode if mode != OutputMode.Default]), small)
def test_outputs_of_training_are_in_the_order_of_the_samples(geometry, mode, period):
    period = min(period, geometry.iterations)
    opts = options(geometry.replicas, geometry.accumulation, geometry.iterations).outputMode(mode, period)
    training = wrapped(Echo(), opts, lr=0.0)
    batch = torch.arange(float(combined_size(geometry)))
    values, losses = training(batch)
    expected = returned(batch, geometry, mode, period)
    assert values.tolist() == expected.flatten().tolist()
    assert losses.tolist() == (expected.sum(1) if len(expected) > 1 else expected.sum()).tolist()
    training.destroy()


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
    read = [replica // group if is_consecutive else replica % groups for replica in range(replicas)]
    expected = torch.arange(len(batch)).view(iterations, groups, micro)[:, read].flatten()
    inference = poptorch.inferenceModel(torch.nn.Identity(), opts)
    assert numbers(inference(batch)) == expected.tolist()
    inference.destroy()


odd_values = st.one_of(st.none(), st.integers(-2, 3), st.sampled_from(["2", 2.5, [], object(), True]))


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
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
    except (poptorch.Error, AssertionError, ValueError):
        return
    except ZeroDivisionError:
        assert processes > 1
        return
    if arguments.get("sampler") is None and arguments.get("batch_sampler") is None:
        assert len(list(loader)) == len(loader)
