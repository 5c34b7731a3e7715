"""`poptorch.DataLoader`: combined batches, and the partition of data over processes."""

from __future__ import annotations

import logging
import pickle

import poptorch
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

from tests.support.poptorch_data import PADDED, SAMPLER, Pair, collate_padded
from tests.support.poptorch_models import options


class Numbers(torch.utils.data.Dataset):
    """Samples 0, 1, 2, ..."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def loader(samples, batch_size=1, process=0, processes=1, opts=None, **kwargs):
    opts = options() if opts is None else opts
    opts.Distributed.configureProcessId(process, processes)
    return poptorch.DataLoader(opts, Numbers(samples), batch_size, **kwargs)


def epoch(data):
    return [index for batch in data for index in batch.tolist()]


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


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [23, 24])
def test_length_and_content_of_one_process(samples, drop_last):
    data = loader(samples, 2, opts=options(replicas=2, accumulation=2), drop_last=drop_last)
    expected = samples // 8 if drop_last else -(-samples // 8)
    assert data.combinedBatchSize == 8
    assert len(data) == len(list(data)) == expected
    assert epoch(data) == list(range(min(samples, expected * 8)))


def test_replicas_of_an_input_group_share_samples():
    opts = options(replicas=4).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    assert loader(100, 3, opts=opts).combinedBatchSize == 6


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("samples", [40, 53])
def test_processes_read_contiguous_parts(processes, samples):
    parts = [epoch(loader(samples, 3, process, processes)) for process in range(processes)]
    per_process = 3 * (samples // (3 * processes))
    assert sum(parts, []) == list(range(processes * per_process))
    assert {len(part) for part in parts} == {per_process}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("processes", [2, 3])
def test_shuffled_windows_equal_the_reference(processes, workers, persistent):
    samples, step, epochs = 53, 4, 3
    per_process = step * (samples // (step * processes))
    generator = torch.Generator().manual_seed(11)
    orders = [torch.randperm(samples, generator=generator).tolist() for _ in range(epochs)]
    for process in range(processes):
        arguments = {"shuffle": True, "num_workers": workers, "persistent_workers": persistent}
        data = loader(samples, step, process, processes, options().randomSeed(11), **arguments)
        for number in range(epochs):
            # Persistent workers keep the window of their first epoch, as PopTorch's do.
            is_moved = persistent or number % 2 == 0
            start = process * per_process + (samples % per_process if is_moved else 0)
            assert epoch(data) == orders[number][start : start + per_process]


def test_without_drop_last_the_first_processes_have_one_sample_more():
    parts = [epoch(loader(11, 2, process, 3, drop_last=False)) for process in range(3)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_too_few_samples_raise_zero_division_error_as_in_the_sdk():
    with pytest.raises(ZeroDivisionError):
        loader(7, 2, 0, 4)


def test_shuffling_in_several_processes_needs_a_seed():
    with pytest.raises(AssertionError, match="randomSeed"):
        loader(8, 1, 0, 2, shuffle=True)


def test_shuffling_in_one_process_follows_the_seed():
    first, second = (loader(20, 4, opts=options().randomSeed(seed), shuffle=True) for seed in (1, 1))
    torch.manual_seed(1)
    order = epoch(first)
    torch.manual_seed(1)
    assert order == epoch(second) != list(range(20))


class Stream(IterableDataset):
    """A stream of 8 numbers."""

    def __iter__(self):
        return iter(range(8))


def test_stream_is_not_partitioned():
    opts = options()
    opts.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="IterableDataset"):
        poptorch.DataLoader(opts, Stream(), 2)
    data = poptorch.DataLoader(opts, Stream(), 4, auto_distributed_partitioning=False)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stream_with_workers_without_worker_init_fn_warns(caplog):
    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        poptorch.DataLoader(options(), Stream(), 4, num_workers=2)
    assert "yields its data 2 times" in caplog.text


def test_batches_of_a_batch_sampler_are_joined():
    sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=True)
    for drop_last, expected in [(True, [4, 4]), (False, [4, 4, 2])]:
        data = loader(11, opts=options(replicas=2), batch_sampler=sampler, drop_last=drop_last)
        assert data.combinedBatchSize == 4
        assert [len(batch) for batch in data] == expected
        assert len(data) == len(sampler)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_of_a_batch_sampler_is_collated_by_itself(workers):
    data = loader(10, opts=options(iterations=2), batch_sampler=SAMPLER, collate_fn=collate_padded, num_workers=workers)
    assert data.combinedBatchSize is None
    assert [batch.tolist() for batch in data] == PADDED


@pytest.mark.parametrize("conflict", [{"batch_size": 2}, {"shuffle": True}, {"processes": 2}])
def test_batch_sampler_excludes_batch_size_shuffle_and_partitioning(conflict):
    sampler = BatchSampler(SequentialSampler(range(8)), 2, drop_last=True)
    with pytest.raises(poptorch.Error, match="batch_sampler excludes"):
        loader(8, batch_sampler=sampler, **conflict)


def test_without_batch_size_nothing_is_combined():
    data = poptorch.DataLoader(options(replicas=2), TensorDataset(torch.ones(2, 4)), batch_size=None, drop_last=False)
    assert data.combinedBatchSize is None
    assert [batch[0].shape for batch in data] == [(4,), (4,)]
    with pytest.raises(AttributeError, match="batch_size=None"):
        data.options  # noqa: B018
    with pytest.raises(AssertionError, match="batch_size=None"):
        loader(8, None, 0, 2, drop_last=False)
    with pytest.raises(ValueError, match="excludes drop_last"):
        loader(8, None)


@pytest.mark.parametrize(
    ("samples", "processes", "is_short"), [(7, 1, True), (8, 1, False), (8, 2, False), (10, 2, True), (12, 2, False)]
)
def test_short_last_batch_warns(caplog, samples, processes, is_short):
    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        data = loader(samples, 2, 0, processes, drop_last=False)
    assert ("last batch is short" in caplog.text) == is_short
    assert (len(list(data)[-1]) < 2) == is_short


def test_partition_can_be_pickled():
    data = loader(40, 5, 1, 2, options().randomSeed(2), shuffle=True)
    iter(data)
    sent = pickle.loads(pickle.dumps(data.dataset))
    assert [sent[index] for index in range(20)] == [data.dataset[index] for index in range(20)]


def test_workers_are_persistent_by_default():
    assert loader(4, num_workers=1).persistent_workers
    assert not loader(4, num_workers=1, persistent_workers=False).persistent_workers


def test_nested_samples_are_collated_to_combined_batches():
    samples = [{"pair": Pair(torch.tensor(number), [number, str(number)])} for number in range(4)]
    (batch,) = poptorch.DataLoader(options(replicas=2), samples, 2)
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].first.tolist() == batch["pair"].second[0].tolist() == [0, 1, 2, 3]
    assert list(batch["pair"].second[1]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("size", [0, -1, 2.5, "2", True])
@pytest.mark.parametrize("processes", [1, 2])
def test_batch_size_must_be_a_positive_integer(size, processes):
    with pytest.raises(ValueError, match="batch_size must be"):
        loader(8, size, 0, processes)


def test_model_takes_the_batches():
    data = loader(16, 2, opts=options(replicas=2, iterations=2))
    model = poptorch.inferenceModel(torch.nn.Identity(), data.options)
    assert [model(batch).tolist() for batch in data] == [list(range(8)), list(range(8, 16))]


def test_a_sampler_of_the_whole_data_set_counts_from_the_start_of_the_process():
    second = loader(4, 2, process=1, processes=2, sampler=SequentialSampler(Numbers(4)))
    assert epoch(second) == [2, 3, 4, 5]
