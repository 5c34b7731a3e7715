"""The state of a training, as checkpoints, snapshots and broadcasts contain it."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Optional

from raypod.runtime.worker.random_states import RandomStates
from raypod.runtime.worker.replica_model import ReplicaModel
from raypod.training.checkpoint import snapshots, tensors


class TrainingState:
    """Reads and loads the state of the model, the optimizer, the replicas and the random numbers of an instance."""

    def __init__(self, model: ReplicaModel, training: Any, random_states: RandomStates) -> None:
        """`training` is the wrapped training model."""
        self._model, self._training, self._random_states = model, training, random_states

    def of_host(self) -> Dict[str, Any]:
        """Return the state that this instance alone can read: the fields of `writer.State`. Tensors are not copied."""
        return {**self._model.state(), "replicas": self._model.replica_state(self._training)}

    def gather(self, is_needed: bool) -> Optional[Dict[str, Any]]:
        """Return the same with the random states of all instances; None unless `is_needed`. Called by all instances."""
        state = self._model.state()  # reading the optimizer state is a collective if it is sharded or off the chip
        random_states = self._random_states.gather(self._training)
        if not is_needed:
            return None
        replicas = random_states or self._model.replica_state(self._training)
        return {**state, "replicas": replicas}

    def memory_format(self) -> Optional[str]:
        """Return the memory format of the model; see `ReplicaModel.memory_format`."""
        return self._model.memory_format(self._training)

    def load(self, state: Dict[str, Any]) -> None:
        """Load a state of `of_host` or `gather`. ConfigError if it is that of another model."""
        self._model.load_state(state)
        self._model.load_replica_state(self._training, state["replicas"])
        self._random_states.load(self._training, state["replicas"])


class Snapshots:
    """Writes the snapshots of a host, if `place` is where they are; None: another instance of the host does that."""

    def __init__(self, place: Optional[snapshots.Place]) -> None:
        self._place = place

    def take(self, update: int, training: TrainingState) -> None:
        """Write the state after `update` updates. Called by all instances, which gather it.

        If it cannot be written, a warning says so, and this instance writes none from then on.
        """
        state = training.gather(is_needed=self._place is not None)
        if self._place is None or state is None:
            return
        further = {"update": update, "memory_format": training.memory_format()}
        try:
            snapshots.write(self._place, update, tensors.pack_flat({**state, **further}))
        except OSError as error:
            self._place = None
            text = f"no snapshots of this host until the next repair: {error.strerror or error}"
            warnings.warn(f"--snapshot-every: {text}", stacklevel=2)
