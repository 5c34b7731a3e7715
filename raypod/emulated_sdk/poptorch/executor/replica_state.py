"""The state of each replica of a training model, as a copy: only the emulation has it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from poptorch.device.execute.program import TrainingProgram
from poptorch.errors import Error
from poptorch.executor.measurements import Measurements
from poptorch.options import Options


class ReplicaState(Measurements):
    """Base class of `PoplarExecutor`: reads and loads the state of the replicas."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._loaded_replica_state: Optional[Dict[str, Any]] = None  # and not uploaded yet
        self._is_attached = False
        self._measures_gradients = False

    def emulatedReplicaState(self) -> Dict[str, Any]:
        """Return the state of each replica of ALL processes after the last complete call; only the emulation has this.

        With weights and optimizer state, which are the same in all processes, any process can continue the training.

        Returns:
            A copy: `buffers` has each floating point buffer of the module, of shape [total replicas, *shape], and
            `rng_state` the state of the random numbers.

        Raises Error unless the model is a compiled training model.
        """
        if self._loaded_replica_state is not None:
            return self._loaded_replica_state
        return self._training_program().replica_state()

    def loadEmulatedReplicaState(self, state: Dict[str, Any]) -> None:
        """Load a state of `emulatedReplicaState`: at once if attached, else with the next upload of the weights.

        Raises Error at that time if its buffers or its number of replicas differ.
        """
        self._loaded_replica_state = state
        if self._is_attached:
            self._upload_replica_state()

    def emulatedMeasureGradients(self) -> None:
        """Measure the norm of the gradients in every update; call it before the first call.

        Only the emulation has this.
        """
        self._measures_gradients = True

    def emulatedGradientNorms(self) -> List[float]:
        """Return the norm of all gradients together of each update of the last call; only the emulation has this.

        The gradients are those of all replicas, scaled as the optimizer gets them, before `max_grad_norm` clips them.

        Raises Error unless the model is a compiled training model.
        """
        return self._training_program().gradient_norms()

    def _training_program(self) -> TrainingProgram:
        program = self._compiled()
        if not isinstance(program, TrainingProgram):
            raise Error("Only a training model with an optimizer has a state of its replicas")
        return program

    def _upload_replica_state(self) -> None:
        state, self._loaded_replica_state = self._loaded_replica_state, None
        if state is not None:
            self._training_program().load_replica_state(state)
