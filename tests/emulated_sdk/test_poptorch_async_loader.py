"""`poptorch.DataLoader` in its asynchronous modes."""

from __future__ import annotations

import logging

import poptorch
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from tests.support.poptorch_data import FORK, PADDED, SAMPLER, Numbers, Stream, Where, collate_padded, epoch, numbers
from tests.support.poptorch_models import options

pytestmark = pytest.mark.usefixtures("processes")

MODES = [poptorch.DataLoaderMode.Async, poptorch.DataLoaderMode.AsyncRebatched]


@pytest.fixture
def load():
    """Create asynchronous loaders that are terminated after the test."""
    made = []

    def make(dataset, batch_size=1, mode=poptorch.DataLoaderMode.Async, opts=None, process=(0, 1), **kwargs):
        opts = options() if opts is None else opts
        opts.Distributed.configureProcessId(*process)
        kwargs.setdefault("async_options", FORK)
        made.append(poptorch.DataLoader(opts, dataset, batch_size, mode=mode, **kwargs))
        return made[-1]

    yield make
    for loader in made:
        loader.terminate()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [23, 24])
def test_length_and_content_equal_synchronous_loading(load, mode, drop_last, samples):
    data = load(Numbers(samples), 2, mode, options(2, 2), drop_last=drop_last, num_workers=1)
    expected = list(poptorch.DataLoader(options(2, 2), Numbers(samples), 2, drop_last=drop_last))
    assert data.combinedBatchSize == 8
    assert len(data) == len(expected)
    for _ in range(2):
        assert [numbers(batch) for batch in data] == [numbers(batch) for batch in expected]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("worker_size", [None, 1, 3, 4, 8])
def test_worker_batches_are_joined(load, worker_size, drop_last):
    data = load(Numbers(20), 4, MODES[1], options(2), rebatched_worker_size=worker_size, drop_last=drop_last)
    assert data.batch_size == (worker_size or 8)
    assert [len(batch) for batch in data] == ([8, 8] if drop_last else [8, 8, 4])
    assert epoch(data) == list(range(16 if drop_last else 20))


def test_short_batches_of_a_streams_workers_are_joined(load):
    data = load(Stream(12), 4, MODES[1], num_workers=2, rebatched_worker_size=4, worker_init_fn=print)
    assert [sorted(numbers(batch)) for batch in data] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_shuffled_windows_equal_the_reference(load, processes, workers, persistent):
    samples, step = 53, 4
    per_process = step * (samples // (step * processes))
    generator = torch.Generator().manual_seed(11)
    orders = [torch.randperm(samples, generator=generator).tolist() for _ in range(3)]
    for process in range(processes):
        opts = options().randomSeed(11)
        arguments = {"shuffle": True, "num_workers": workers, "persistent_workers": persistent}
        data = load(Numbers(samples), step, opts=opts, process=(process, processes), **arguments)
        for number, order in enumerate(orders):
            # Persistent workers keep the window of their first epoch, as PopTorch's do.
            is_moved = persistent or number % 2 == 0
            start = process * per_process + (samples % per_process if is_moved else 0)
            assert epoch(data) == order[start : start + per_process]


def test_prefetching_does_not_change_the_order_of_the_wrapped_loader(load):
    opts = options().randomSeed(3)
    opts.Distributed.configureProcessId(0, 2)
    data = poptorch.DataLoader(opts, Numbers(40), 4, shuffle=True)
    alone = poptorch.DataLoader(opts, Numbers(40), 4, shuffle=True)
    accessor = poptorch.AsynchronousDataAccessor(data, sharing_strategy=poptorch.SharingStrategy.Fork)
    for _ in range(2):
        epoch(accessor)
        assert epoch(data) == epoch(alone)
    accessor.terminate()


def test_workers_belong_to_the_fetcher_and_persist(load):
    data = load(Where(8), num_workers=2)
    first, second = set(epoch(data)), set(epoch(data))
    assert first == second
    assert len(first) == 2
    assert data._accessor._fetcher._process.pid not in first


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_a_batch_sampler_are_joined(load, mode, drop_last):
    sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=True)
    data = load(Numbers(11), mode=mode, opts=options(2), batch_sampler=sampler, drop_last=drop_last)
    assert [numbers(batch) for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]][: 2 if drop_last else 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_of_a_batch_sampler_is_collated_by_itself(load, workers):
    data = load(
        Numbers(10), opts=options(iterations=2), batch_sampler=SAMPLER, collate_fn=collate_padded, num_workers=workers
    )
    for _ in range(2):
        assert [batch.tolist() for batch in data] == PADDED


def test_without_batch_size_yields_single_elements(load):
    assert [element.tolist() for element in load(Numbers(2), None, drop_last=False)] == [[0, 0], [1, 1]]
    with pytest.raises(poptorch.Error, match="batch_size"):
        load(Numbers(2), None, MODES[1], drop_last=False)
    with pytest.raises(ValueError, match="drop_last"):  # as torch's loader
        load(Numbers(2), None)


def test_async_options_are_passed_to_the_accessor(load):
    data = load(Numbers(9), 3, async_options={**FORK, "buffer_size": 2})
    assert len({batch.data_ptr() for batch in data}) == 2
    for mode in MODES:
        with pytest.raises(poptorch.Error, match="rebatched_size"):
            load(Numbers(9), 3, mode, async_options={"rebatched_size": 3})
    with pytest.raises(TypeError, match="buffers"):
        load(Numbers(9), 3, async_options={"buffers": 3})


@pytest.mark.parametrize("size", [0, 9, -1, "2"])
def test_rebatched_worker_size_is_at_most_the_combined_batch_size(load, size):
    with pytest.raises(AssertionError, match="rebatched_worker_size"):
        load(Numbers(20), 4, MODES[1], options(2), rebatched_worker_size=size)


def test_rebatched_worker_size_has_no_effect_without_joining(load):
    assert [len(batch) for batch in load(Numbers(20), 4, opts=options(2), rebatched_worker_size=64)] == [8, 8]


def test_terminated_loader_raises_error(load):
    data = load(Numbers(9), 3)
    for _ in range(2):
        data.terminate()
    with pytest.raises(poptorch.Error, match="terminated"):
        next(iter(data))


def test_model_takes_the_batches(load, caplog):
    data = load(Numbers(16), 2, opts=options(replicas=2, iterations=2), num_workers=1)
    model = poptorch.inferenceModel(torch.nn.Identity(), data.options)
    with caplog.at_level(logging.WARNING):
        assert [numbers(model(batch)) for batch in data] == [list(range(8)), list(range(8, 16))]
    assert not caplog.text
