"""What this Horovod was built with: Gloo only."""

from __future__ import annotations

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Return False."""
    return False


def mpi_enabled() -> bool:
    """Return False."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError, as Horovod does without MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def gloo_built() -> bool:
    """Return True: the emulated collectives use Gloo."""
    return True


def gloo_enabled() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return 0: there is no NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
