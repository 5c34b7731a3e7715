"""The state of a training, with the random numbers of all instances, as checkpoints, snapshots and broadcasts have it.

PopTorch reads and sets the state of the replicas of its own process, once the model is compiled. The emulated SDK has
those of all replicas in the state that `program.read_replica_state` returns.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch

from raypod.plan.plan import Plan
from raypod.runtime.worker.replica_model import ReplicaModel
from raypod.training.checkpoint import snapshots, tensors
from raypod.training.models import program


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


_STATES, _LAYOUT = "rng_states", "layout"


class RandomStates:
    """Collects the states of all instances, and restores the one of this instance."""

    def __init__(self, plan: Plan, index: int, allgather: Callable[[Any], List[Any]]) -> None:
        """`allgather`: `hvd.allgather_object`."""
        geometry = plan.geometry
        self._layout = [geometry.num_instances, geometry.total_replicas, geometry.ipus_per_replica]
        self._index, self._allgather = index, allgather
        self._loaded: Optional[torch.Tensor] = None  # set in a model as soon as it is compiled

    def gather(self, training: Any) -> Optional[Dict[str, Any]]:
        """Return the states of all instances, a collective; None if one has none, or on the emulated SDK."""
        if program.has_replica_state(training):
            return None
        # The seed has 64 bits without a sign, and checkpoints have no such tensors.
        own = self._loaded
        if training.isCompiled():
            own = torch.from_numpy(np.array(training.rng_state, dtype=np.uint64).view(np.int64))
        states = self._allgather(own)
        return None if any(state is None for state in states) else {_LAYOUT: self._layout, _STATES: states}

    def load(self, training: Any, replicas: Optional[Dict[str, Any]]) -> None:
        """Load the state of this instance from the state of all replicas that a checkpoint contains, if it has one.

        A state of other instances or replicas does not fit: a warning, and the random numbers begin as in a new run.
        """
        if replicas is None or _STATES not in replicas or program.has_replica_state(training):
            return
        if replicas[_LAYOUT] != self._layout:
            warnings.warn(
                "the checkpoint's random states (of dropout) are those of {} instances, {} replicas and {} IPUs per "
                "replica: the random numbers begin again".format(*replicas[_LAYOUT]),
                stacklevel=2,
            )
            return
        self._loaded = replicas[_STATES][self._index]
        if training.isCompiled():
            self._restore(training)

    def compile(self, training: Any, inputs: Any) -> None:
        """Compile a model for a call if a state is loaded that must be set before its first call."""
        if self._loaded is not None and not training.isCompiled():
            training.compile(*inputs)
            self._restore(training)

    def _restore(self, training: Any) -> None:
        assert self._loaded is not None, "the callers check it"
        training.rng_state, self._loaded = self._loaded.numpy().view(np.uint64).tolist(), None
