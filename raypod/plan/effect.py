"""The settings of a config that have no effect with the others: a report leaves them out."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

from raypod.plan.config import (
    DOWNLOADED,
    EFFICIENTNETS,
    HF_TASKS,
    IMAGE_CLASSIFICATION,
    IMAGE_FOLDERS,
    IMAGE_TASKS,
    SHARDS,
    TORCHVISION_RESNETS,
    VISION_TRANSFORMERS,
    WINDOW_TASKS,
)

# The keys of data in shards, which replace the data sets of a task of the user.
SHARD_KEYS = ("data.data_dir", "data.cache_dir", "data.cache_size", "data.shuffle_window")
# The keys that only the tasks of images have, besides the model of those of transformers.
IMAGE_KEYS = (
    *("data.dataset", "data.download", "data.samples", "data.image", "data.classes"),
    *SHARD_KEYS,
    *("data.augment", "data.crop_padding", "data.flip", "data.image_size", "data.eight_bit_io"),
    "data.bounding_boxes",
    *("data.policy", "data.rand_augment_ops", "data.rand_augment_magnitude", "data.random_erasing"),
    *("data.mixup_alpha", "data.cutmix_lambda_low", "data.cutmix_lambda_high", "data.cutmix_disable_prob"),
    *(
        "run.report_samples",
        "data.max_image_pixels",
        "training.model",
        "training.stem",
        "training.norm",
        "training.label_smoothing",
    ),
    *("training.norm_num_groups", "training.norm_eps", "training.zero_init_residual"),
    *("training.efficientnet_expand_ratio", "training.efficientnet_group_dim"),
    *("training.vit_dropout", "training.vit_attention_dropout", "training.vit_representation_size"),
)
# The optimizers that have each key of the section `training`.
OF_OPTIMIZERS: Dict[str, Tuple[str, ...]] = {
    "momentum": ("sgd", "rmsprop"),
    "combined_accumulator": ("sgd",),
    "velocity_scaling": ("sgd",),
    "betas": ("adam", "adamw", "lamb"),
    "eps": ("adam", "adamw", "lamb", "rmsprop"),
    "bias_correction": ("adamw", "lamb"),
    "max_weight_norm": ("lamb",),
    "max_bias_norm": ("lamb",),
    "rmsprop_alpha": ("rmsprop",),
    "rmsprop_tf": ("rmsprop",),
}
_GIVEN = None  # any value but null, false and 0
# Of keys that need certain values of another one: that one, and the values.
_NEEDS: Dict[str, Tuple[str, Optional[Tuple[Any, ...]]]] = {
    "data.samples": ("data.dataset", ("synthetic",)),
    "data.image": ("data.dataset", ("synthetic",)),
    "data.classes": ("data.dataset", ("synthetic",)),
    "data.download": ("data.dataset", DOWNLOADED),
    "data.jpeg_decoder": ("data.dataset", IMAGE_FOLDERS),
    "data.cache_size": ("data.dataset", (*IMAGE_FOLDERS, SHARDS)),
    "data.shuffle_window": ("data.dataset", (*IMAGE_FOLDERS, SHARDS)),
    "data.bounding_boxes": ("data.dataset", IMAGE_FOLDERS),
    "data.policy": ("data.dataset", IMAGE_FOLDERS),
    "data.rand_augment_ops": ("data.policy", ("rand-augment",)),
    "data.rand_augment_magnitude": ("data.policy", ("rand-augment",)),
    "data.random_erasing": ("data.dataset", IMAGE_FOLDERS),
    "data.cutmix_disable_prob": ("data.cutmix_lambda_high", _GIVEN),
    "data.crop_padding": ("data.augment", (True,)),
    "data.flip": ("data.augment", (True,)),
    "training.ema_every": ("training.ema", _GIVEN),
    "training.init_ignore": ("training.init_weights", _GIVEN),
    "training.early_stopping_metric": ("training.early_stopping", _GIVEN),
    "pod.min_hosts": ("pod.elastic", _GIVEN),
    "run.storage_timeout_s": ("run.storage_path", _GIVEN),
    "run.keep_remote": ("run.storage_path", _GIVEN),
    "run.reset_timeout_s": ("run.reset_command", _GIVEN),
    "run.tracker_artifacts": ("run.trackers", _GIVEN),
    "run.tracker_timeout_s": ("run.trackers", _GIVEN),
    "training.norm_num_groups": ("training.norm", ("group",)),
    "training.norm_eps": ("training.norm", ("group",)),
    "training.zero_init_residual": ("training.model", TORCHVISION_RESNETS),
    "training.efficientnet_expand_ratio": ("training.model", EFFICIENTNETS),
    "training.efficientnet_group_dim": ("training.model", EFFICIENTNETS),
    "training.vit_dropout": ("training.model", VISION_TRANSFORMERS),
    "training.vit_attention_dropout": ("training.model", VISION_TRANSFORMERS),
    "training.vit_representation_size": ("training.model", VISION_TRANSFORMERS),
    "training.lr_floor": ("training.lr_schedule", ("linear", "cosine", "polynomial")),
    "training.lr_power": ("training.lr_schedule", ("polynomial",)),
    "training.lr_steps": ("training.lr_schedule", ("step",)),
    "training.lr_frequency": ("training.lr_schedule", ("step", "exponential", "linear", "cosine", "polynomial")),
    "training.lr_gamma": ("training.lr_schedule", ("step", "exponential")),
    **{f"training.{key}": ("training.optimizer", optimizers) for key, optimizers in OF_OPTIMIZERS.items()},
}
_OF_CUSTOM_DATA = ("data.classes",)  # the number of classes, unless the user's function returns it


def with_effect(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the settings, by full name, without those that the others leave without an effect.

    What a config of another version does not contain decides nothing.
    """
    return {name: value for name, value in settings.items() if _has_effect(name, settings)}


def _has_effect(name: str, settings: Mapping[str, Any]) -> bool:
    task = settings.get("task.name", IMAGE_CLASSIFICATION)
    if name in SHARD_KEYS and (":" in str(task) or task in WINDOW_TASKS):
        return bool(settings.get("data.data_dir"))
    if name in (*IMAGE_KEYS, "data.jpeg_decoder") and task not in IMAGE_TASKS:
        return name == "training.model" and task in HF_TASKS
    deciding, values = _NEEDS.get(name, ("", ()))
    if deciding not in settings:
        return True
    decided = settings[deciding]
    if bool(decided) if values is _GIVEN else decided in values:
        return True
    return name in _OF_CUSTOM_DATA and ":" in str(decided)
