"""What was built in, and the timeline (contract section 8): the answers of a Horovod built for Gloo alone."""

from __future__ import annotations

import os
import warnings

from horovod.torch import _identity


def mpi_built() -> bool:
    """False."""
    return False


def mpi_enabled() -> bool:
    """False."""
    return False


def mpi_threads_supported() -> bool:
    """ValueError, as everywhere without MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def gloo_built() -> bool:
    """True: the emulated collectives go over Gloo's wires."""
    return True


def gloo_enabled() -> bool:
    """True."""
    return True


def nccl_built() -> int:
    """0, the version of NCCL."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False."""
    return False


def rocm_built() -> bool:
    """False."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Warns that no timeline is written.

    ValueError before `init`, and unless HOROVOD_TIMELINE=DYNAMIC asks for timelines.
    """
    _identity.identity()
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    warnings.warn(f"the emulated Horovod writes no timeline; {file_path} stays unwritten", stacklevel=2)


def stop_timeline() -> None:
    """Nothing: there is no timeline. ValueError before `init`."""
    _identity.identity()
