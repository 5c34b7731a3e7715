"""Checkpoints contain the state of the random numbers of every instance, also with an SDK that reads only its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional

import poptorch
import pytest

from raypod import train
from raypod.plan.plan import Plan
from raypod.runtime.worker.instance import Instance
from raypod.runtime.worker.training_state import RandomStates, TrainingState
from raypod.training.checkpoint.tensors import read_nested

LARGEST_SEED = (1 << 64) - 1


class Model:
    """A training model of PopTorch: no attribute of the emulation, and no random state before it is compiled."""

    def __init__(self, compiled: Optional[List[int]] = None) -> None:
        self._state = compiled

    def isCompiled(self) -> bool:
        return self._state is not None

    def compile(self, *inputs: Any) -> None:
        self._state = [0]

    @property
    def rng_state(self) -> List[int]:
        if self._state is None:
            raise poptorch.Error("Model has not been compiled or has been destroyed.")
        return self._state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        assert self.rng_state, "it is compiled"
        self._state = list(state)


def run(folder: Path, *flags: str) -> Dict[str, Any]:
    text = folder.parent / "text.txt"
    text.write_text("one two three " * 100)
    common = ["--task", "language-model", "--text", str(text), "--sequence-length", "16", "--dropout", "0.2"]
    common += ["--batch-size", "2", "--replicas", "2", "--lr-schedule", "constant"]
    inline = ["--fleet", "inline", "--device", "emulated"]
    assert train.main([*common, *inline, "--run-dir", str(folder), *flags]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture
def only_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated SDK has the methods of PopTorch only."""
    for name in ("emulatedReplicaState", "loadEmulatedReplicaState"):
        monkeypatch.delattr(f"poptorch.executor.measurements.ReplicaState.{name}")


def test_a_resumed_run_continues_its_random_numbers(tmp_path: Path, only_own: None) -> None:
    whole = run(tmp_path / "whole", "--updates", "4")
    run(tmp_path / "part", "--updates", "2")
    resumed = run(tmp_path / "rest", "--updates", "4", "--resume", str(tmp_path / "part"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    with pytest.MonkeyPatch.context() as patch:  # as checkpoints were written before
        patch.setattr(RandomStates, "gather", lambda self, training: None)
        run(tmp_path / "old", "--updates", "2")
    repeated = run(tmp_path / "repeated", "--updates", "4", "--resume", str(tmp_path / "old"))
    assert repeated["weights_sha256"] != whole["weights_sha256"]


def test_a_checkpoint_of_ipus_continues_on_the_emulated_sdk_and_back(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(tmp_path / "emulated", "--updates", "2")
    request.getfixturevalue("only_own")
    run(tmp_path / "ipus", "--updates", "4", "--resume", str(tmp_path / "emulated"))
    (saved,) = (tmp_path / "ipus").rglob("replicas.safetensors")
    assert [state.tolist() for state in read_nested(saved)["rng_states"]] == [[42, 2]]  # of its own two updates
    request.getfixturevalue("monkeypatch").undo()
    run(tmp_path / "again", "--updates", "5", "--resume", str(tmp_path / "ipus"))


@pytest.mark.parametrize("index", [0, 1])
def test_every_instance_reads_its_whole_state_for_a_checkpoint(index: int) -> None:
    """Reading the optimizer state is a collective if it is sharded over the replicas or off the chip."""
    instance, called = object.__new__(Instance), []
    model: Any = SimpleNamespace(
        state=lambda: called.append("state") or {"weights": {}, "optimizer": {}},
        replica_state=lambda training: None,
        recorded=lambda manifest, training: manifest,
    )
    training = SimpleNamespace(isCompiled=lambda: True, copyWeightsToHostIfNeeded=lambda: called.append("weights"))
    random_states: Any = SimpleNamespace(gather=lambda training: called.append("random numbers"))
    instance.__dict__.update(
        _training=training,
        _state=TrainingState(model, training, random_states),
        _saves=SimpleNamespace(begin=lambda manifest, state: called.append("begin")) if index == 0 else None,
        _model=model,
        _update=7,
    )
    instance.save(SimpleNamespace(update=7))  # type: ignore[arg-type]
    assert called == ["weights", "state", "random numbers", *(["begin"] if index == 0 else [])]


def test_every_instance_gets_its_own_state_once_its_model_is_compiled(make: Callable[..., Plan]) -> None:
    plan = make(pod={"num_instances": 2})
    own: List[Any] = []
    first, second = (RandomStates(plan, index, lambda state: own.append(state) or own) for index in (0, 1))
    first.gather(Model([LARGEST_SEED, 1]))
    saved = second.gather(Model([LARGEST_SEED, 2]))
    models = [Model(), Model()]
    for states, model in zip((first, second), models):
        states.load(model, saved)
        states.compile(model, ())
        states.load(model, saved)  # of a compiled model, as after a roll-back
    assert [model.rng_state for model in models] == [[LARGEST_SEED, 1], [LARGEST_SEED, 2]]
    own.clear()
    other = RandomStates(make(pod={"num_instances": 1}), 0, list)
    with pytest.warns(UserWarning, match="those of 2 instances, 4 replicas .*: the random numbers begin again"):
        other.load(models[0], saved)
    assert first.gather(Model()) is None
