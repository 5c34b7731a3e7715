"""The order of samples, and their loading in the background."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.errors import ConfigError
from raypod.plan.plan import Geometry
from raypod.training.data import arrays, loading
from raypod.training.data.arrays import load_mapped
from raypod.training.data.loaders import SampleLoader
from raypod.training.data.loading import map_ahead, prefetch, reading, timed
from raypod.training.data.order import augmentation_integers, call_positions, epoch_order, sample_seed
from raypod.training.data.read_failures import ReadFailed
from raypod.training.data.samples import SampleSource
from tests.support.bounded import wait_until


def test_an_epoch_visits_every_sample_once_in_an_order_of_seed_and_epoch() -> None:
    for samples in (1, 2, 1437, 10000):
        assert sorted(epoch_order(42, 3, samples)) == list(range(samples))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(1, 1, 500))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(2, 0, 500))
    assert epoch_order(42, 0, 10).tolist() == [2, 9, 7, 6, 5, 8, 4, 3, 0, 1]  # with every version of NumPy


sizes = st.builds(
    lambda micro, accumulation, iterations, local, instances: Geometry(
        local * instances, instances, 1, micro, accumulation, iterations
    ),
    *(st.integers(1, 4) for _ in range(5)),
)


def slow_positions(geometry: Geometry, instance: int, call: int) -> list[int]:
    """Compute the positions one sample at a time."""
    positions = []
    for iteration in range(geometry.device_iterations):
        update = call * geometry.device_iterations + iteration
        for step in range(geometry.gradient_accumulation):
            for replica in geometry.replicas_of(instance):
                for place in range(geometry.micro_batch_size):
                    micro_batch = (update * geometry.gradient_accumulation + step) * geometry.total_replicas + replica
                    positions.append(micro_batch * geometry.micro_batch_size + place)
    return positions


@settings(deadline=None, derandomize=True)
@given(sizes, st.integers(0, 3))
def test_positions_are_laid_out_by_update_step_replica_and_micro_batch(geometry: Geometry, call: int) -> None:
    found = [call_positions(geometry, instance, call).tolist() for instance in range(geometry.num_instances)]
    assert found == [slow_positions(geometry, instance, call) for instance in range(geometry.num_instances)]
    first = call * geometry.samples_per_call
    assert sorted(sum(found, [])) == list(range(first, first + geometry.samples_per_call))


def test_random_numbers_are_a_function_of_seed_epoch_and_sample() -> None:
    samples = np.array([5, 900, 5])
    drawn = augmentation_integers(1, 2, samples, bounds=3, draws=4)
    assert drawn[0].tolist() == drawn[2].tolist()
    assert drawn[1].tolist() == augmentation_integers(1, 2, np.array([900]), 3, 4)[0].tolist()
    many = augmentation_integers(1, 2, np.arange(3000), 3, 1)
    assert np.bincount(many.ravel()).tolist() == pytest.approx([1000, 1000, 1000], abs=120)
    seeds = {sample_seed(1, epoch, sample) for epoch in range(3) for sample in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)


def no_interrupt() -> None:
    raise AssertionError("nothing is blocked")


def numbers(last: int, made: List[int]) -> Iterator[int]:
    for number in range(last):
        made.append(number)
        yield number
    raise OSError("the disk is gone")


def test_prefetch_keeps_the_order_fills_its_queue_in_advance_and_raises_at_the_position() -> None:
    made: List[int] = []
    taken = prefetch(numbers(6, made), 2, no_interrupt)
    assert next(taken) == 0
    assert wait_until(lambda: made == [0, 1, 2, 3])  # two in the queue, and the thread holds a third
    assert [next(taken) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)
    assert list(prefetch(iter(range(3)), 1, no_interrupt)) == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 3])
def test_map_ahead_keeps_the_order(workers: int) -> None:
    def make(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # later requests finish earlier
        return number * number

    assert list(map_ahead(make, iter(range(20)), workers, depth=workers)) == [number * number for number in range(20)]


def test_map_ahead_raises_an_error_at_its_position_and_ends_its_threads() -> None:
    before = threading.active_count()
    taken = map_ahead(lambda number: 6 // number, iter([3, 0, 1]), workers=1, depth=2)
    assert next(taken) == 2
    with pytest.raises(ZeroDivisionError):
        next(taken)
    assert threading.active_count() == before


def test_waits_are_timed_and_closing_ends_the_prefetch_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    taken = timed(prefetch(iter(range(1000)), 1, no_interrupt))
    next(taken)
    taken.close()
    assert threading.active_count() == before
    clock = iter([1.0, 1.5, 7.0, 9.0, 10.0])
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(timed(iter("ab"))) == [("a", 0.5), ("b", 2.0)]


def test_the_context_is_entered_only_while_waiting() -> None:
    active, closed = [], []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        active.append(True)
        yield
        active.pop()

    def batches() -> Iterator[bool]:
        try:
            while True:
                yield bool(active)
        finally:
            closed.append(True)

    taken = timed(batches(), waiting)
    assert next(taken)[0]
    assert not active
    taken.close()
    assert closed


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"x": "a"}, "the entry 'x' of training sample 3 is a str"),
        ({"x": np.array(["a"])}, "the entry 'x' of training sample 3 is a ndarray"),
        ({"x": None}, "the entry 'x' of training sample 3 is a NoneType"),
        ({"x": np.zeros(3)}, r"samples 0 and 3 cannot be combined to a batch: 'x': \[2\] and \[3\]; resize or pad"),
        ({"y": np.zeros(2)}, "samples 0 and 3 cannot be combined to a batch: their keys are x and y"),
    ],
)
def test_the_error_of_an_odd_sample_of_a_task_has_its_index(odd: Any, message: str) -> None:
    source = SampleSource("own", ([*[{"x": np.zeros(2)}] * 3, odd], None), seed=0)

    def check(sample: Any, index: int) -> None:
        source.check_sample(sample, f"training sample {index}")

    loader = SampleLoader(source.train, 0, 0, source.to_device_format, check)
    with pytest.raises(ConfigError, match=message):
        list(loader.load([(0, np.arange(4))]))


def test_a_mapped_file_that_is_truncated_is_an_error_instead_of_a_sigbus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_mapped", weakref.WeakKeyDictionary())  # later tests read samples, too
    file = tmp_path / "images.npy"
    np.save(str(file), np.zeros(10_000))
    array = load_mapped(file)
    with reading():
        assert array[-1] == 0
    with file.open("rb+") as opened:
        opened.truncate(4096)
    message = f"truncated from 80128 to 4096 bytes while the run uses it: '{file}'"
    with pytest.raises(ReadFailed, match=message), reading():
        pytest.fail("the samples were read")
