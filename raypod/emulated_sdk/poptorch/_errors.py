"""The errors of `poptorch` (contract 2.6).

Exception
|-- Error                       what the device, the compiler or a wrapper refuses
|   |-- RecoverableError        a reset named by `recovery_action` makes the device usable again
|   |-- UnrecoverableError      the hardware needs service
|   |-- DataFetcherError        the process that loads asynchronously failed; also an AssertionError
|   `-- ModelFileError          a file is no saved model that fits; also an AssertionError
`-- ConfigFileError             a line of an options file that cannot be applied
"""

from __future__ import annotations


class Error(Exception):
    """Anything the device, the compiler or a model wrapper refuses.

    Attributes:
        message: what went wrong.
        type: the category of the SDK ("poptorch_cpp_error", "poplar_runtime_error", ...).
        location: where in the stack it arose; empty when unknown.
    """

    def __init__(self, message: str, type: str = "poptorch_py_error", location: str = "") -> None:
        # All fields are positional in `args`, so the error crosses processes by pickle.
        super().__init__(message, type, location)
        self.message = message
        self.type = type
        self.location = location

    def __str__(self) -> str:
        return self.message


class RecoverableError(Error):
    """A device error that the reset named by `recovery_action` cures.

    `recovery_action` is one of "IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET".
    """

    def __init__(
        self,
        message: str,
        type: str = "poplar_recoverable_runtime_error",
        location: str = "",
        recovery_action: str = "IPU_RESET",
    ) -> None:
        super().__init__(message, type, location)
        self.args = (message, type, location, recovery_action)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A device error that no reset cures."""

    def __init__(self, message: str, type: str = "poplar_unrecoverable_runtime_error", location: str = "") -> None:
        super().__init__(message, type, location)


class DataFetcherError(Error, AssertionError):
    """The process that loads asynchronously failed (contract 1.9).

    The contract names AssertionError for errors of the data set and Error for a start that fails: a broken first
    element is both.
    """


class ModelFileError(Error, AssertionError):
    """A file is not what `save` wrote, or not for this version, or without what is needed of it (contract 2.6).

    The contract names no type: the SDK asserts [I], and the errors of everything else that concerns models are Errors.
    """


class ConfigFileError(Exception):
    """A line of an options file cannot be applied (`Options.loadFromFile`)."""
