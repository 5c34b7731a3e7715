"""`poptorch.DataLoader` in all modes: combined batches, the partition of data over processes, the batch arithmetic."""

from __future__ import annotations

import logging
import pickle
from typing import NamedTuple

import numpy as np
import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch.data.fetcher import stack_into
from poptorch.pytree import flatten_element
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset, default_collate

from tests.support.poptorch_data import (
    FORK,
    PADDED,
    SAMPLER,
    Numbers,
    Pair,
    Stream,
    Where,
    collate_padded,
    epoch,
    numbers,
)
from tests.support.poptorch_models import Echo, options, wrapped
from tests.support.refused import rejects

SYNC, ASYNC, REBATCHED = poptorch.DataLoaderMode


def loader(data, batch_size=1, process=0, processes=1, opts=None, **kwargs):
    opts = options() if opts is None else opts
    opts.Distributed.configureProcessId(process, processes)
    return poptorch.DataLoader(opts, Numbers(data) if isinstance(data, int) else data, batch_size, **kwargs)


@pytest.fixture
def load(processes):
    made = []

    def make(data, batch_size=1, mode=ASYNC, **kwargs):
        if mode == SYNC:
            return loader(data, batch_size, **kwargs)
        made.append(loader(data, batch_size, mode=mode, **{"async_options": FORK, **kwargs}))
        return made[-1]

    yield make
    for each in made:
        each.terminate()


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [23, 24])
def test_length_and_content_equal_synchronous_loading(load, mode, drop_last, samples):
    data = load(samples, 2, mode, opts=options(2, 2), drop_last=drop_last, num_workers=1)
    expected = list(loader(samples, 2, opts=options(2, 2), drop_last=drop_last))
    assert (data.combinedBatchSize, len(data)) == (8, len(expected))
    for _ in range(2):
        assert [numbers(batch) for batch in data] == [numbers(batch) for batch in expected]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("worker_size", [None, 1, 3, 4, 8])
def test_worker_batches_are_joined(load, worker_size, drop_last):
    data = load(20, 4, REBATCHED, opts=options(2), rebatched_worker_size=worker_size, drop_last=drop_last)
    assert data.batch_size == (worker_size or 8)
    assert [len(batch) for batch in data] == ([8, 8] if drop_last else [8, 8, 4])
    assert epoch(data) == list(range(16 if drop_last else 20))


def test_short_batches_of_a_streams_workers_are_joined(load):
    data = load(Stream(12), 4, REBATCHED, num_workers=2, rebatched_worker_size=4, worker_init_fn=print)
    assert [sorted(numbers(batch)) for batch in data] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_shuffled_windows_equal_the_reference(load, mode, processes, workers, persistent):
    samples, step = 53, 4
    per_process = step * (samples // (step * processes))
    generator = torch.Generator().manual_seed(11)
    orders = [torch.randperm(samples, generator=generator).tolist() for _ in range(3)]
    for process in range(processes):
        arguments = {"shuffle": True, "num_workers": workers, "persistent_workers": persistent}
        place = {"process": process, "processes": processes, "opts": options().randomSeed(11)}
        data = load(samples, step, mode, **place, **arguments)
        for number, order in enumerate(orders):
            # Persistent workers keep the window of their first epoch, as PopTorch's do.
            is_moved = persistent or number % 2 == 0
            start = process * per_process + (samples % per_process if is_moved else 0)
            assert epoch(data) == order[start : start + per_process]


def test_shuffling_follows_the_seed_which_several_processes_need():
    rejects(AssertionError, "randomSeed", loader, 8, 1, 0, 2, shuffle=True)
    first, second = (loader(20, 4, opts=options().randomSeed(seed), shuffle=True) for seed in (1, 1))
    torch.manual_seed(1)
    order = epoch(first)
    torch.manual_seed(1)
    assert order == epoch(second) != list(range(20))


def test_prefetching_does_not_change_the_order_and_workers_belong_to_the_fetcher(processes, load):
    data, alone = (loader(40, 4, 0, 2, options().randomSeed(3), shuffle=True) for _ in range(2))
    accessor = poptorch.AsynchronousDataAccessor(data, **FORK)
    for _ in range(2):
        epoch(accessor)
        assert epoch(data) == epoch(alone)
    accessor.terminate()
    data = load(Where(8), num_workers=2)
    first, second = set(epoch(data)), set(epoch(data))
    assert (first, len(first)) == (second, 2)
    assert data._accessor._fetcher._process.pid not in first
    assert loader(4, num_workers=1).persistent_workers
    assert not loader(4, num_workers=1, persistent_workers=False).persistent_workers


def test_a_stream_is_not_partitioned_and_workers_without_worker_init_fn_warn(caplog):
    rejects(AssertionError, "IterableDataset", lambda: loader(Stream(8), 2, 0, 2))
    data = loader(Stream(8), 4, 0, 2, auto_distributed_partitioning=False)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        loader(Stream(8), 4, num_workers=2)
    assert "yields its data 2 times" in caplog.text


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_of_a_batch_sampler_is_collated_by_itself(load, mode, workers):
    arguments = {"batch_sampler": SAMPLER, "collate_fn": collate_padded, "num_workers": workers}
    data = load(10, mode=mode, opts=options(iterations=2), **arguments)
    assert data.combinedBatchSize is None
    for _ in range(2):
        assert [batch.tolist() for batch in data] == PADDED


@pytest.mark.parametrize(
    ("replicas", "processes", "accumulation", "micro", "combined", "steps", "per_process", "leftovers"),
    [
        (2, 8, 57, 18, 2052, 78, 160056, 719),
        (2, 2, 228, 18, 8208, 78, 640224, 719),
        (2, 32, 14, 18, 504, 79, 39816, 7055),
    ],
)
def test_imagenet_example(replicas, processes, accumulation, micro, combined, steps, per_process, leftovers):
    data = loader(1281167, micro, 1, processes, options(replicas, accumulation))
    assert (data.combinedBatchSize, len(data), len(data.dataset)) == (combined, steps, per_process)
    assert data.dataset._leftovers == leftovers


def test_short_last_batch_warns(caplog):
    for samples, processes, is_short in ((7, 1, 1), (8, 1, 0), (8, 2, 0), (10, 2, 1), (12, 2, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="poptorch::python"):
            data = loader(samples, 2, 0, processes, drop_last=False)
        assert ("last batch is short" in caplog.text) == (len(list(data)[-1]) < 2) == is_short


def test_nested_samples_are_collated_to_combined_batches():
    samples = [{"pair": Pair(torch.tensor(number), [number, str(number)])} for number in range(4)]
    (batch,) = loader(samples, 2, opts=options(replicas=2))
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].first.tolist() == batch["pair"].second[0].tolist() == [0, 1, 2, 3]
    assert list(batch["pair"].second[1]) == ["0", "1", "2", "3"]


def test_batch_size_is_a_positive_integer_and_batch_sampler_excludes_it_shuffle_and_partitioning():
    for size in (0, -1, 2.5, "2", True):
        for processes in (1, 2):
            rejects(ValueError, "batch_size must be", loader, 8, size, 0, processes)
    sampler = BatchSampler(SequentialSampler(range(8)), 2, drop_last=True)
    for conflict in ({"batch_size": 2}, {"shuffle": True}, {"processes": 2}):
        rejects(poptorch.Error, "batch_sampler excludes", loader, 8, batch_sampler=sampler, **conflict)


def test_async_options_are_passed_to_the_accessor_and_rebatched_worker_size_is_limited_if_batches_are_joined(load):
    data = load(9, 3, async_options={**FORK, "buffer_size": 2})
    assert len({batch.data_ptr() for batch in data}) == 2
    for mode in (ASYNC, REBATCHED):
        rejects(poptorch.Error, "rebatched_size", load, 9, 3, mode, async_options={"rebatched_size": 3})
    rejects(TypeError, "buffers", load, 9, 3, async_options={"buffers": 3})
    for size in (0, 9, -1, "2"):
        wrong = {"opts": options(2), "rebatched_worker_size": size}
        rejects(AssertionError, "rebatched_worker_size", load, 20, 4, REBATCHED, **wrong)
    assert [len(batch) for batch in load(20, 4, opts=options(2), rebatched_worker_size=64)] == [8, 8]


def test_an_asynchronous_loader_cannot_be_wrapped_or_used_after_it_is_terminated(load):
    data = load(9, 3)
    rejects(poptorch.Error, "already", poptorch.AsynchronousDataAccessor, data, **FORK)
    for _ in range(2):
        data.terminate()
    rejects(poptorch.Error, "terminated", lambda: next(iter(data)))


SAMPLED = BatchSampler(SequentialSampler(range(11)), 2, drop_last=True)
JOINED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_of_a_batch_sampler_are_joined_nothing_is_combined_without_size_and_a_model_takes_the_batches():
    for drop_last in (True, False):
        data = loader(11, opts=options(2), batch_sampler=SAMPLED, drop_last=drop_last)
        assert [numbers(batch) for batch in data] == JOINED[: 2 if drop_last else 3]
        assert (data.combinedBatchSize, len(data)) == (4, len(SAMPLED))
    data = loader(TensorDataset(torch.ones(2, 4)), None, opts=options(replicas=2), drop_last=False)
    assert data.combinedBatchSize is None
    assert [batch[0].shape for batch in data] == [(4,), (4,)]
    with pytest.raises(AttributeError, match="batch_size=None"):
        data.options  # noqa: B018
    rejects(AssertionError, "batch_size=None", loader, 8, None, 0, 2, drop_last=False)
    rejects(ValueError, "excludes drop_last", loader, 8, None)
    data = loader(16, 2, opts=options(replicas=2, iterations=2))
    model = poptorch.inferenceModel(torch.nn.Identity(), data.options)
    assert [numbers(model(batch)) for batch in data] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
def test_asynchronous_batches_are_joined_and_taken_by_a_model(load, mode, caplog):
    for drop_last in (True, False):
        data = load(11, mode=mode, opts=options(2), batch_sampler=SAMPLED, drop_last=drop_last)
        assert [numbers(batch) for batch in data] == JOINED[: 2 if drop_last else 3]
    assert [element.tolist() for element in load(2, None, drop_last=False)] == [[0, 0], [1, 1]]
    rejects(poptorch.Error, "batch_size", load, 2, None, REBATCHED, drop_last=False)
    rejects(ValueError, "drop_last", load, 2, None)  # as torch's loader
    data = load(16, 2, mode, opts=options(replicas=2, iterations=2), num_workers=1)
    model = poptorch.inferenceModel(torch.nn.Identity(), data.options)
    with caplog.at_level(logging.WARNING):
        assert [numbers(model(batch)) for batch in data] == [list(range(8)), list(range(8, 16))]
    assert not caplog.text


def test_a_partition_can_be_pickled_and_a_sampler_counts_from_the_start_of_the_process():
    data = loader(40, 5, 1, 2, options().randomSeed(2), shuffle=True)
    iter(data)
    sent = pickle.loads(pickle.dumps(data.dataset))
    assert all(sent[index].equal(data.dataset[index]) for index in range(20))
    assert epoch(loader(4, 2, 1, 2, sampler=SequentialSampler(Numbers(4)))) == [2, 3, 4, 5]


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
        for number in range(2):
            order = torch.randperm(length, generator=generator).tolist() if shuffle else list(range(length))
            positions = range(length)
            if processes > 1:
                positions = window(length, size, process, processes, drop_last, number if shuffle else None)
            expected = in_batches([order[position] for position in positions], size, drop_last)
            assert ([numbers(batch) for batch in loader], len(loader)) == (expected, len(expected))
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


ONE, OTHER = torch.arange(3.0), torch.arange(3.0, 6.0)


def stacked(first, samples):
    """Return the result of `stack_into` and the targets, which have the format of the batch `first`."""
    tensors, spec = flatten_element(default_collate(first))
    targets = [torch.full_like(tensor, -1) for tensor in tensors]
    return stack_into(targets, spec, samples), targets


STACKED = [
    [ONE, OTHER],
    [(ONE, 1), (OTHER, 2)],
    [[ONE, 0.5], [OTHER, 2.0]],
    [{"x": ONE, "y": 3}, {"x": OTHER, "y": -3}],
    [(ONE.bool(), ONE.half()), (OTHER.bool(), OTHER.half())],
    [(ONE[:0], torch.tensor(1)), (OTHER[:0], torch.tensor(2))],
    [3, 4],
]
NOT_STACKED = [
    *(([ONE, OTHER], other) for other in ([ONE], [ONE, OTHER.double()], [ONE, OTHER[:2]], [ONE, 3])),
    *(([3, 4], other) for other in ([3, 4.5], [True, False])),
    *(([(ONE, 1), (OTHER, 2)], other) for other in ([(ONE, 1), (OTHER,)], [Pair(ONE, 1), Pair(OTHER, 2)])),
    ([{"x": ONE}, {"x": OTHER}], [{"x": ONE}, {"y": OTHER}]),
    ([ONE, OTHER], [np.zeros(3, np.float32), np.zeros(3, np.float32)]),
]


@pytest.mark.parametrize(("first", "samples"), [*((each, each) for each in STACKED), *NOT_STACKED])
def test_stack_into_writes_the_common_batches_of_default_collate(first, samples):
    is_done, tensors = stacked(first, samples)
    assert is_done == (first is samples)
    if is_done:
        expected, _ = flatten_element(default_collate(samples))
        assert all(got.equal(wanted) for got, wanted in zip(tensors, expected))
