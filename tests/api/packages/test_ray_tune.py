"""`raypod.Trainable`: trials of Ray Tune, their resources, reports and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

import raypod
from tests.support.ray_cluster import ray_cluster

for package in ("pandas", "pyarrow"):
    pytest.importorskip(package, reason="Ray Tune needs it", exc_type=ImportError)

# Ray's own code leaves sockets and files to the garbage collector, and warns of its own interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"replicas": 2, "num_instances": 1, "batch_size": 4, "updates": 4, "warmup_updates": 0}
TINY: Dict[str, Any] = {"device": "emulated", "model": "tiny", "lr_schedule": "constant", **SIZES}
RATES = (0.3, 0.1, 0.03, 0.01)


@pytest.fixture(scope="module")
def tune() -> Iterator[Any]:
    """`ray.tune`, in a session of two CPUs."""
    with ray_cluster(("",), num_cpus=2) as started:
        yield __import__("ray.tune", fromlist=["Tuner"])
        assert started.ray.is_initialized()


def test_a_sweep_of_four_learning_rates(tune: Any, tmp_path: Path) -> None:
    space = {**TINY, "learning_rate": tune.grid_search(list(RATES))}
    checkpoints = tune.CheckpointConfig(checkpoint_at_end=True)
    run = tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0, checkpoint_config=checkpoints)
    wanted = tune.TuneConfig(metric="test_loss", mode="min")
    results = tune.Tuner(raypod.Trainable, param_space=space, tune_config=wanted, run_config=run).fit()
    assert not results.errors
    assert sorted(result.config["learning_rate"] for result in results) == sorted(RATES)
    losses = {}
    for result in results:
        assert (result.metrics["update"], result.metrics["training_iteration"]) == (4, 1)
        losses[result.config["learning_rate"]] = result.metrics["test_loss"]
        with result.checkpoint.as_directory() as folder:
            assert Path(folder, "raypod", "weights.safetensors").is_file()
    assert len(set(losses.values())) == 4
    best = results.get_best_result()
    assert losses[best.config["learning_rate"]] == min(losses.values())
    alone = raypod.fit(run_dir=tmp_path / "alone", fleet="inline", progress=False, learning_rate=0.1, **TINY)
    assert alone.summary["test_loss"] == losses[0.1]


def test_a_trial_is_restored_with_another_learning_rate(tune: Any, tmp_path: Path) -> None:
    space = {**TINY, "fleet": "inline", "checkpoint_every": "2 updates", "epochs": 2, "updates": 14, "batch_size": 64}
    trial = raypod.Trainable({**space, "learning_rate": 0.1, "run_dir": str(tmp_path / "first")})
    assert trial.step()["update"] == 11
    (tmp_path / "saved").mkdir()
    trial.save_checkpoint(str(tmp_path / "saved"))
    trial.cleanup()
    other = raypod.Trainable({**space, "learning_rate": 0.2, "run_dir": str(tmp_path / "second")})
    other.load_checkpoint(str(tmp_path / "saved"))
    measured = other.step()
    assert (measured["update"], measured["epoch"], measured["done"]) == (14, 2, True)
    other.cleanup()


def test_the_resources_of_a_trial(tune: Any) -> None:
    def bundles(**flags: Any) -> Any:
        return raypod.Trainable.default_resource_request({**TINY, **flags}).bundles

    assert (bundles(fleet="inline"), bundles(num_instances=2)) == ([{"CPU": 1}], [{"CPU": 2}])
    assert bundles(num_instances=4, replicas=4) == [{"CPU": 2}]  # no more than a host has
