"""The elements that `AsynchronousDataAccessor` yields."""

from __future__ import annotations

import itertools
import multiprocessing
from multiprocessing import resource_tracker

import poptorch
import pytest
import torch
from poptorch import pytree

from tests.support.bounded import wait_until
from tests.support.poptorch_data import (
    FORK,
    Boxed,
    BoxParser,
    Broken,
    Numbers,
    Pair,
    RandomNumbers,
    Stream,
    epoch,
    numbers,
)
from tests.support.poptorch_models import options
from tests.support.refused import rejects

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture(autouse=True, scope="module")
def _fork_server():
    """Start the fork server here: Python keeps it running, which is not a leak of a test."""
    resource_tracker.ensure_running()
    multiprocessing.forkserver.set_forkserver_preload(["torch"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def access():
    made = []

    def make(dataset, **kwargs):
        made.append(poptorch.AsynchronousDataAccessor(dataset, **{**FORK, **kwargs}))
        return made[-1]

    yield make
    for accessor in made:
        accessor.terminate()


def loader(samples, batch_size=1, iterations=1, **kwargs):
    return poptorch.DataLoader(options(iterations=iterations), Numbers(samples), batch_size, **kwargs)


@pytest.mark.parametrize("strategy", list(poptorch.SharingStrategy), ids=lambda strategy: strategy.name)
def test_all_sharing_strategies_load_the_same_samples(access, strategy):
    torch.manual_seed(5)
    drawn = RandomNumbers(6)
    accessor = access(poptorch.DataLoader(options(iterations=2), drawn, shuffle=True), sharing_strategy=strategy)
    expected = [batch for _ in range(2) for batch in poptorch.DataLoader(options(iterations=2), drawn, shuffle=True)]
    got = [batch.clone() for _ in range(2) for batch in accessor]
    assert len(accessor) == 3
    # The fetcher has this process's random state, and loads the epochs in order.
    assert torch.stack(got).equal(torch.stack(expected))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [1, 3])
def test_epochs_are_complete_and_in_order(access, workers, buffer_size):
    accessor = access(loader(20, 2, 2, num_workers=workers), buffer_size=buffer_size)
    assert len(accessor) == 5
    for _ in range(3):
        assert epoch(accessor) == list(range(20))


@pytest.mark.parametrize("load_indefinitely", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_iteration_after_break_starts_a_new_epoch(access, load_indefinitely, workers):
    accessor = access(loader(12, 3, num_workers=workers), load_indefinitely=load_indefinitely)
    for stop in (1, 3, 2):
        assert epoch(itertools.islice(accessor, stop)) == list(range(3 * stop))
    assert epoch(accessor) == list(range(12))
    assert list(accessor) != []


def test_elements_are_views_of_the_slots_and_valid_until_the_next(access):
    accessor = access(loader(8), buffer_size=2, early_preload=True)
    first = next(iter(accessor))
    assert wait_until(lambda: accessor._fetcher.header.published == 2)
    assert numbers(first) == [0]
    addresses = [first.data_ptr(), next(accessor).data_ptr()]
    assert wait_until(lambda: numbers(first) == [2])
    addresses += [next(accessor).data_ptr() for _ in range(6)]
    assert (len(set(addresses)), addresses[:2] * 4) == (2, addresses)


@pytest.mark.parametrize(("early_preload", "filled"), [(True, 4), (False, 1)])
def test_early_preload_fills_the_ring_before_the_first_iteration(access, early_preload, filled):
    accessor = access(loader(10), early_preload=early_preload, buffer_size=4)
    header = accessor._fetcher.header
    assert wait_until(lambda: header.published == filled)
    assert not wait_until(lambda: header.published > filled, within_s=0.2)
    assert epoch(accessor) == list(range(10))


@pytest.mark.parametrize(
    "collate",
    [
        torch.stack,
        lambda samples: (torch.stack(samples), torch.ones(1)),
        lambda samples: [torch.stack(samples)],
        lambda samples: {"x": torch.stack(samples), 3: torch.zeros(0, 2)},
        lambda samples: Pair(torch.stack(samples), torch.stack(samples).bool()),
    ],
    ids=["tensor", "tuple", "list", "dict", "named tuple"],
)
def test_elements_keep_their_type(access, collate):
    data = torch.utils.data.DataLoader(Numbers(4), 2, collate_fn=collate)
    for got, expected in zip(access(data), data):
        assert type(got) is type(expected)
        as_tuple = (lambda value: (value,)) if isinstance(got, torch.Tensor) else tuple
        values = (as_tuple(each.values() if isinstance(each, dict) else each) for each in (got, expected))
        assert all(one.equal(other) and one.dtype == other.dtype for one, other in zip(*values))


@pytest.mark.parametrize("strategy", [poptorch.SharingStrategy.Fork, poptorch.SharingStrategy.ForkServer])
def test_registered_types_are_elements(access, monkeypatch, strategy):
    monkeypatch.setattr(pytree, "_parsers", {})
    poptorch.registerCustomArgParser(Boxed, BoxParser())
    data = [Boxed(torch.tensor([number])) for number in (0.0, 1.0)]
    assert [box.inside.tolist() for box in access(data, sharing_strategy=strategy)] == [[0.0], [1.0]]


UNSUPPORTED = "(?s)worker thread failed to start. An error .*supports tensors, flat"
WRONG = [{"buffer_size": 0}, {"buffer_size": 1.5}, {"buffer_size": True}, {"miss_sleep_time_in_ms": -1}]


@pytest.mark.parametrize(
    ("data", "arguments", "error", "message"),
    [
        ([(torch.ones(1), (torch.ones(1),))], {}, AssertionError, UNSUPPORTED),
        *(([element], {}, AssertionError, UNSUPPORTED) for element in ({"x": "text"}, 3, [[torch.ones(1)]])),
        ([(torch.ones(2), torch.ones(3))], {"rebatched_size": 2}, AssertionError, "same number of samples"),
        ({"samples": 13, "batch_size": 3}, {"rebatched_size": 2}, AssertionError, "has 3 samples"),
        ({"samples": 5, "batch_size": 2, "drop_last": False}, {}, AssertionError, "rebatched_size=2"),
        ({"samples": 0}, {}, poptorch.Error, "data set is empty"),
        *(({"samples": 4}, {"rebatched_size": size}, poptorch.Error, "rebatched_s") for size in (0, 1, -3, 2.5, "2")),
        *(({"samples": 4}, arguments, AssertionError, next(iter(arguments))) for arguments in WRONG),
    ],
)
def test_unsupported_elements_and_arguments_raise_error(access, data, arguments, error, message):
    rejects(error, message, lambda: access(loader(**data) if isinstance(data, dict) else data, **arguments))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [3, 5])
def test_rebatched_size_joins_elements(access, drop_last, size):
    data = loader(13, 3, drop_last=drop_last)
    accessor = access(data, rebatched_size=size)
    samples = 12 if drop_last else 13
    expected = [size] * (samples // size) + ([samples % size] if samples % size and not drop_last else [])
    for _ in range(2):
        assert [len(batch) for batch in accessor] == expected
    assert (epoch(accessor), len(accessor)) == (list(range(sum(expected))), len(expected))


def test_the_next_epoch_is_prefetched_and_samples_of_an_abandoned_one_are_not_joined(access):
    accessor = access(loader(3), buffer_size=5)
    assert epoch(accessor) == [0, 1, 2]
    # 3 elements and the end of the epoch, then a full ring: 5 elements and the end of an epoch.
    assert wait_until(lambda: accessor._fetcher.header.published == 4 + 5 + 1)
    accessor = access(torch.utils.data.DataLoader(Numbers(10), 2), rebatched_size=5, buffer_size=1)
    for _ in range(3):
        assert numbers(next(iter(accessor))) == [0, 1, 2, 3, 4]


def test_map_style_iterable_indexable_and_large_data_sets(access):
    # As in PopTorch, which iterates over it: only an IndexError of the data set ends the epoch.
    accessor = access(Numbers(3))
    assert len(accessor) == 3
    for _ in range(2):
        assert [int(item[0]) for item in itertools.islice(accessor, 7)] == list(range(7))
    assert [int(number) for (number,) in access(torch.utils.data.TensorDataset(torch.arange(3)))] == [0, 1, 2]
    assert epoch(access(torch.utils.data.DataLoader(Stream(8), 2, num_workers=2))) == [0, 2, 1, 3, 4, 6, 5, 7]
    many = [torch.tensor([number]) for number in range(400)]
    assert epoch(access(many, sharing_strategy=poptorch.SharingStrategy.ForkServer)) == list(range(400))


def test_a_generator_has_one_epoch_and_next_after_the_end_of_an_epoch_raises_stop_iteration(access):
    accessor = access(loader(2))
    assert len([next(accessor), next(accessor)]) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(accessor)
    assert epoch(accessor) == [0, 1]
    accessor = access(torch.ones(1) * number for number in range(3))
    assert [int(tensor) for tensor in accessor] == [0, 1, 2]
    assert list(accessor) == list(accessor) == []
    with pytest.raises(TypeError):
        len(accessor)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("broken", [0, 5])
def test_error_of_the_data_set_is_raised_with_its_traceback(access, workers, broken):
    data = poptorch.DataLoader(options(), Broken(8, broken), num_workers=workers)
    got = []
    with pytest.raises(AssertionError, match=f"(?s)An error occurred in the data fetcher.*sample {broken} cannot") as e:
        got.extend(map(int, (batch[0, 0] for batch in access(data))))
    assert isinstance(e.value, poptorch.Error)
    assert got == list(range(broken))


def test_an_element_gets_the_dtype_and_the_shape_of_the_first_or_is_an_error(access):
    batches = access([torch.ones(2), torch.tensor([3, 4])])
    assert [(batch.dtype, batch.tolist()) for batch in batches] == [(torch.float32, [1, 1]), (torch.float32, [3, 4])]
    # As in PopTorch, which copies it into a buffer of that shape.
    assert [numbers(batch) for batch in access(torch.utils.data.DataLoader(Numbers(5), 2))] == [[0, 1], [2, 3], [4, 4]]
    others = ([torch.ones(2), second] for second in (torch.ones(3), torch.ones(2, 2), [torch.ones(2)]))
    for data in (torch.utils.data.DataLoader(Numbers(5), 3), *others):
        accessor = access(data)
        next(iter(accessor))
        rejects(AssertionError, "first", next, accessor)
