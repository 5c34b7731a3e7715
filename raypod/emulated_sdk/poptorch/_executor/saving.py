"""`save`, `compileAndExport`, `loadExecutable` and `poptorch.load` (contract 2.6)."""

from __future__ import annotations

import io
import json
import os
import pickle
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple, Union

import torch

from poptorch._device.executable import Executable
from poptorch._errors import Error, ModelFileError
from poptorch._executor import container
from poptorch.options import Options

if TYPE_CHECKING:
    from poptorch._device.program import Program

_Filename = Union[str, "os.PathLike[str]"]
_EXECUTABLE, _MODEL, _RNG_STATE = "executable", "model", "rng_state"
# What pickling an arbitrary Python object may raise.
_UNPICKLABLE = (TypeError, AttributeError, RuntimeError, ValueError, pickle.PickleError)


class Saving:
    """The part of an executor that deals with files."""

    _model: torch.nn.Module
    _options: Options
    _training: bool
    _optimizer: Optional[torch.optim.Optimizer]

    def save(self, filename: _Filename, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the executable to a file, and with `export_model` the model, its weights, optimizer and options.

        An existing directory gets a file `model.poptorch`; missing parents are made. Error unless compiled, and when
        something of the model cannot be pickled.
        """
        program = self._compiled()
        self.copyWeightsToHostIfNeeded()
        sections = {_EXECUTABLE: _pickled("the executable", self._executable())}
        if export_model:
            content = (self._model, self._optimizer, self._options, self._training)
            sections[_MODEL] = _pickled("the model (export_model=False leaves it out)", content)
        if save_rng_state:
            sections[_RNG_STATE] = json.dumps(program.rng_state).encode()
        container.write(filename, sections)

    def compileAndExport(self, filename: _Filename, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """Compile for these arguments without running, and `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: _Filename) -> None:
        """Take a saved executable instead of compiling; weights and optimizer stay those of the host.

        Error for a file that `save` did not write, of another version, truncated or damaged; for an executable of
        another model or other options; and when compiled already.
        """
        self._load_sections(container.read(filename))

    def _load_sections(self, sections: Dict[str, bytes]) -> None:
        if self.isCompiled():
            raise Error("An executable can be loaded only before the model is compiled")
        self._start(_unpickled("the executable", sections[_EXECUTABLE]))
        if _RNG_STATE in sections:
            self._compiled().rng_state = json.loads(sections[_RNG_STATE])

    # -- what the rest of an executor gives ---------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile without running."""
        raise NotImplementedError

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        raise NotImplementedError

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Bring the host's copy up to date."""
        raise NotImplementedError

    def _compiled(self) -> Program:
        raise NotImplementedError

    def _executable(self) -> Executable:
        raise NotImplementedError

    def _start(self, executable: Executable) -> None:
        raise NotImplementedError


def content_of(
    filename: _Filename,
) -> Tuple[Dict[str, bytes], Tuple[torch.nn.Module, Optional[torch.optim.Optimizer], Options, bool]]:
    """The sections of a file, and out of them model, optimizer, options and whether they are for training.

    Error for a file without a model, and as `loadExecutable`.
    """
    sections = container.read(filename)
    if _MODEL not in sections:
        raise ModelFileError(
            f"{filename} is a valid PopTorch file but was created with 'export_model=False' which means you need to "
            "re-create the PopTorch model using poptorch.inferenceModel or poptorch.trainingModel then call "
            f'`model.loadExecutable("{filename}")` to restore its state.'
        )
    return sections, _unpickled("the model", sections[_MODEL])


def edited(options: Options, edit: Optional[Callable[[Options], Any]]) -> Options:
    """An unfrozen copy of the options, after the program's function has changed it."""
    chosen = options.clone()
    if edit is not None:
        edit(chosen)
    return chosen


def _pickled(what: str, content: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except _UNPICKLABLE as error:
        raise Error(f"{what} cannot be saved: {error}") from error
    return file.getvalue()


def _unpickled(what: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=False)
    except (AttributeError, ImportError) as error:
        raise Error(f"{what} needs classes that cannot be imported here: {error}") from error
