"""The exceptions of `poptorch`.

Exception
|-- Error                       rejected or failed on the device, in the compiler or in a model wrapper
|   |-- RecoverableError        the reset in `recovery_action` makes the device usable again
|   |-- UnrecoverableError      the hardware needs service
|   |-- DataFetcherError        the data fetcher process failed; also an AssertionError
|   `-- ModelFileError          not a saved model, or one that does not fit; also an AssertionError
`-- ConfigFileError             a line of an options file cannot be applied
"""

from __future__ import annotations


class Error(Exception):
    """Base class of the errors of the device, the compiler and the model wrappers.

    Attributes:
        message: what went wrong.
        type: the SDK's category ("poptorch_cpp_error", "poplar_runtime_error", ...).
        location: where in the software stack the error was raised; empty if unknown.
    """

    def __init__(self, message: str, type: str = "poptorch_py_error", location: str = "") -> None:
        # All fields are in `args`, so that the error can be pickled.
        super().__init__(message, type, location)
        self.message = message
        self.type = type
        self.location = location

    def __str__(self) -> str:
        return self.message


class RecoverableError(Error):
    """A device error after which a reset makes the device usable again.

    Attributes:
        recovery_action: "IPU_RESET", "LINK_RESET", "PARTITION_RESET" or "FULL_RESET".
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
    """A device error that no reset clears."""

    def __init__(self, message: str, type: str = "poplar_unrecoverable_runtime_error", location: str = "") -> None:
        super().__init__(message, type, location)


class DataFetcherError(Error, AssertionError):
    """The data fetcher process failed, was terminated, or cannot run with the given arguments.

    The SDK raises AssertionError for an error of the data set and Error for a failed start. A data set whose first
    element fails is both.
    """


class ModelFileError(Error, AssertionError):
    """A file was not written by `save`, has another version, or lacks what the call needs.

    Both base classes, as the SDK's documentation names no type (inferred: the SDK asserts).
    """


class ConfigFileError(Exception):
    """A line of an options file cannot be applied; raised by `Options.loadFromFile`."""
