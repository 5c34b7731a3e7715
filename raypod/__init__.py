"""raypod: PyTorch training on Graphcore IPU-PODs under Ray; without IPUs, on an emulated SDK.

`fit` trains, `stream` yields the events of a training, `run` runs a function in every instance of a pod, and
`Trainable` is a training for `ray.tune.Tuner`; `log_image` and `log_text` are for callbacks. `Task` is the base class
of what is trained. The errors are subclasses of `RaypodError`. Importing this package imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

from raypod import former_names
from raypod.errors import (
    CheckpointDamaged,
    CheckpointNotSaved,
    ClusterError,
    CollectiveBroken,
    ConfigError,
    DataMissing,
    FunctionFailed,
    HostLost,
    InstanceFailed,
    LeaseHeld,
    LeaseLost,
    LossNotFinite,
    PeerLost,
    RaypodError,
    RunError,
    SdkError,
    UserError,
    WaitTimedOut,
    WeightsDiffer,
)

if TYPE_CHECKING:
    from raypod.api.fit import STOP, Stream, fit, stream
    from raypod.api.functions import run
    from raypod.api.media import log_image, log_text
    from raypod.api.ray_tune import Trainable as Trainable
    from raypod.api.result import Interrupted, Result
    from raypod.plan.config import Config, TaskOptions
    from raypod.plan.metric import Metric
    from raypod.training.data.samples import Arrays, pad_collate
    from raypod.training.data.tables import from_hf, from_parquet, from_ray_data
    from raypod.training.tasks.classification import classification_details
    from raypod.training.tasks.task import Task

_MODULES = {  # of the names that are imported when they are used
    name: f"raypod.{module}"
    for module, names in {
        "api.fit": ("STOP", "fit", "stream", "Stream"),
        "api.media": ("log_image", "log_text"),
        "api.functions": ("run",),
        "api.ray_tune": ("Trainable",),  # not in __all__: it needs an optional package
        "api.result": ("Interrupted", "Result"),
        "training.data.samples": ("Arrays", "pad_collate"),
        "training.data.tables": ("from_hf", "from_parquet", "from_ray_data"),
        "plan.config": ("Config", "TaskOptions"),
        "plan.metric": ("Metric",),
        "training.tasks.classification": ("classification_details",),
        "training.tasks.task": ("Task",),
    }.items()
    for name in names
}

former_names.accept()

__all__ = [
    "STOP",
    "Arrays",
    "CheckpointDamaged",
    "CheckpointNotSaved",
    "ClusterError",
    "CollectiveBroken",
    "Config",
    "ConfigError",
    "DataMissing",
    "FunctionFailed",
    "HostLost",
    "InstanceFailed",
    "Interrupted",
    "LeaseHeld",
    "LeaseLost",
    "LossNotFinite",
    "Metric",
    "PeerLost",
    "RaypodError",
    "Result",
    "RunError",
    "SdkError",
    "Stream",
    "Task",
    "TaskOptions",
    "UserError",
    "WaitTimedOut",
    "WeightsDiffer",
    "classification_details",
    "fit",
    "from_hf",
    "from_parquet",
    "from_ray_data",
    "log_image",
    "log_text",
    "pad_collate",
    "run",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _version() -> str:
    """Return the version of the installed package, which is that in pyproject.toml."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raypod")
    except PackageNotFoundError:
        raise AttributeError(
            "raypod is imported from a source folder: only an installed package has a version"
        ) from None


def __dir__() -> List[str]:
    return sorted({*globals(), *_MODULES})
