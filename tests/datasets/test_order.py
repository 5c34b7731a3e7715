from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.datasets.order import augmentation_integers, call_positions, epoch_order, sample_seed
from raypod.plan.plan import Geometry


@pytest.mark.parametrize("samples", [1, 2, 1437, 10000])
def test_an_epoch_visits_every_sample_once(samples: int) -> None:
    assert sorted(epoch_order(42, 3, samples)) == list(range(samples))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert np.array_equal(epoch_order(1, 0, 500), epoch_order(1, 0, 500))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(1, 1, 500))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(2, 0, 500))


def test_the_order_does_not_depend_on_the_numpy_version() -> None:
    assert epoch_order(42, 0, 10).tolist() == [2, 9, 7, 6, 5, 8, 4, 3, 0, 1]


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
    for instance in range(geometry.num_instances):
        assert call_positions(geometry, instance, call).tolist() == slow_positions(geometry, instance, call)


@settings(deadline=None, derandomize=True)
@given(sizes, st.integers(1, 3))
def test_the_instances_cover_each_position_once(geometry: Geometry, calls: int) -> None:
    fed = [call_positions(geometry, i, call) for i in range(geometry.num_instances) for call in range(calls)]
    assert sorted(np.concatenate(fed).tolist()) == list(range(calls * geometry.samples_per_call))


@pytest.mark.parametrize("instances", [1, 2, 4, 8])
def test_the_samples_of_a_replica_do_not_depend_on_its_instance(instances: int) -> None:
    """Replica 5 of 8, whatever the number of instances."""
    geometry = Geometry(8, instances, 1, 3, 2, 2)
    owner, local = divmod(5, geometry.local_replicas)
    shape = (2, 2, geometry.local_replicas, 3)
    seen = call_positions(geometry, owner, 1).reshape(shape)[:, :, local].ravel().tolist()
    alone = call_positions(Geometry(8, 8, 1, 3, 2, 2), 5, 1).tolist()
    assert seen == alone


def test_augmentation_is_a_function_of_seed_epoch_and_sample() -> None:
    samples = np.array([5, 900, 5])
    drawn = augmentation_integers(1, 2, samples, bounds=3, draws=4)
    assert drawn[0].tolist() == drawn[2].tolist()
    assert drawn[1].tolist() == augmentation_integers(1, 2, np.array([900]), 3, 4)[0].tolist()
    many = augmentation_integers(1, 2, np.arange(3000), 3, 1)
    assert np.bincount(many.ravel()).tolist() == pytest.approx([1000, 1000, 1000], abs=120)


def test_sample_seeds_differ() -> None:
    seeds = {sample_seed(1, epoch, sample) for epoch in range(3) for sample in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)
