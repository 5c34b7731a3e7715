"""The state of a training, as checkpoints and broadcasts contain it."""

from __future__ import annotations

from typing import Any, Dict, Optional

from raypod.instance.random_states import RandomStates
from raypod.instance.replica_model import ReplicaModel


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
        return {**state, "replicas": random_states or self._model.replica_state(self._training)}

    def load(self, state: Dict[str, Any]) -> None:
        """Load a state of `of_host` or `gather`. ConfigError if it is that of another model."""
        self._model.load_state(state)
        self._model.load_replica_state(self._training, state["replicas"])
        self._random_states.load(self._training, state["replicas"])
