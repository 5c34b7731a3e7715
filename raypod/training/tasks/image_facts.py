"""What planning has to know of image classification, without torch."""

from __future__ import annotations

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import HF, HF_IMAGES, TIMM, TORCHVISION, VISION_TRANSFORMERS, Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import TaskFacts
from raypod.system import sdk, torchvision_import
from raypod.training import data as datasets
from raypod.training.data.hf_folder import HfFolder

ACCURACY = Metric("accuracy", "higher", label="acc", unit="%", scale=100.0, formats=(".1f", ".2f"))
TEST_METRICS = (
    Metric("top5_accuracy", "higher", label="top 5", unit="%", formats=(".1f", ".2f")),
    Metric("calibration_error", label="calibration error", unit="%", formats=(".1f", ".2f")),
)
PREDICTIONS = ("label", "classes", "probabilities")  # of the 5 most probable classes


def facts(config: Config, is_dry: bool) -> TaskFacts:
    """Return the facts; see `registry.facts_of`."""
    _check_model(config)
    if not is_dry:
        datasets.download(config)
    size = datasets.dataset_size_or_published(config) if is_dry else datasets.dataset_size(config)
    return TaskFacts(
        size,
        (LOSS, ACCURACY),
        best=ACCURACY.name,
        samples_are="images",
        data=config.data.dataset,
        model=config.training.model,
        test_metrics=TEST_METRICS,
        predictions=PREDICTIONS,
    )


def _check_model(config: Config) -> None:
    """Raise ConfigError if the user's model cannot be imported; instances import it after they have started."""
    name, norm = config.training.model, config.training.norm
    if config.task.name == HF_IMAGES:
        HfFolder(config)
        return
    if name.startswith(HF):
        raise ConfigError(f"--model {name} needs a task of transformers: add --task {HF_IMAGES}, or another hf-... one")
    if norm != "batch" and name in ("tiny", *VISION_TRANSFORMERS):
        raise ConfigError(f"--norm {norm} replaces BatchNorm, and {name} has none: omit it")
    if name.startswith(TIMM):
        from raypod.training.models.networks import timm_with  # imports torch

        timm_with(name)
    elif name.startswith(TORCHVISION):
        from raypod.training.models.library_models import check_torchvision  # as above

        check_torchvision(name)
    elif config.training.has_own_model:
        torchvision_import.install()  # the user's module may import torchvision
        with sdk.importable(config.run.device):
            user_code.check(name, "training.model", ("channels", "classes"))
