"""The emulation's own questions to an executor, no part of PopTorch: a program asks for them by `getattr`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional

from poptorch._device.program import TrainingProgram
from poptorch._errors import Error
from poptorch._parallel.placement import Placement
from poptorch._parallel.schedule import Schedule, side_by_side
from poptorch.options import Options

if TYPE_CHECKING:
    from poptorch._device.program import Program


class Emulated:
    """The part of an executor that tells what a pod does not."""

    _options: Options
    _training: bool
    _program: Optional[Program]
    _is_attached: bool
    _replica_state: Optional[Dict[str, Any]] = None  # loaded, and not on the device yet

    def emulatedPlacement(self) -> Placement:
        """What lies on which IPU. Error unless compiled."""
        return self._compiled().placement

    def emulatedSchedules(self) -> Dict[str, Schedule]:
        """One weight update, or one call of inference, by each execution strategy. Error unless compiled."""
        placement, training = self._compiled().placement, self._training
        batches = self._options.Training.gradient_accumulation if training else self._options.device_iterations
        return side_by_side([stage.cost for stage in placement.stages], batches, training)

    def emulatedReplicaState(self) -> Dict[str, Any]:
        """What every replica of ALL processes has of its own, as of the last complete call of training.

        `buffers`: for each floating point buffer of the module its values, [total replicas, *shape]; `rng_state`: see
        `rng_state`. Copies. With weights and optimizer state, which are the same everywhere, it is all that a program
        needs to go on as if nothing had happened, in any process. Error unless a compiled training model.
        """
        if self._replica_state is not None:
            return self._replica_state
        return self._compiled_training().replica_state()

    def loadEmulatedReplicaState(self, state: Dict[str, Any]) -> None:
        """Take over such a state: now if the device is attached, else when it is, after the host's weights.

        Error if it has other buffers, or is of another number of replicas; raised when it is taken over.
        """
        self._replica_state = state
        if self._is_attached:
            self._use_replica_state()

    def _use_replica_state(self) -> None:
        """After an upload: what was loaded before goes to the device."""
        state, self._replica_state = self._replica_state, None
        if state is not None:
            self._compiled_training().load_replica_state(state)

    def _compiled_training(self) -> TrainingProgram:
        program = self._compiled()
        if not isinstance(program, TrainingProgram):
            raise Error("Only a training model with an optimizer has a state of its replicas")
        return program

    def _compiled(self) -> Program:
        raise NotImplementedError
