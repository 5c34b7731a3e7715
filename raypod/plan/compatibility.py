"""Settings that contradict each other, or that have no effect, which a report leaves out."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan import ipu_options
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
    WITHOUT_FILES,
    Config,
    DataSection,
    TrainingSection,
)
from raypod.plan.learning_rate import check_settings
from raypod.plan.sections import RunSection
from raypod.plan.values import parse_interval
from raypod.system.command_line import counted, listed

# Keys of the section `data` that only images of folders have.
OF_IMAGE_FOLDERS = ("jpeg_decoder", "bounding_boxes", "policy", "random_erasing")
OF_SHARDS = ("shuffle_window", "cache_size")  # those that only data in shards have


def check_compatible(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other in every task."""
    training = config.training
    check_settings(training)
    ipu_options.check(config)
    check_data_folder(config)
    _check_data_set(config)
    _check_optimizer(config)
    check_mixing(config)
    _check_policy(config)
    _check_model(training)
    _check_layers(config)
    if config.run.fleet == "inline":
        for flag, reason in _without_effect_inline(config).items():
            raise ConfigError(f"{flag} has no effect with --fleet inline, {reason}; omit it")
    run = config.run
    if run.standby and not run.max_restarts:
        raise ConfigError(f"--standby {run.standby} has no effect with --max-restarts 0; omit one of them")
    if config.run.reset_command and config.run.reset_timeout_s >= config.run.report_timeout_s:
        raise ConfigError(
            f"--reset-timeout-s {config.run.reset_timeout_s:g} must be below --report-timeout-s "
            f"{config.run.report_timeout_s:g}, which ends every request to an instance"
        )
    if training.ema_every is not None:
        check_average(training, training.ema_every)
    if training.init_ignore and not training.init_weights:
        raise ConfigError(f"--init-ignore {','.join(training.init_ignore)} has no effect without --init-weights")


def _without_effect_inline(config: Config) -> Dict[str, str]:
    """Return the given flags that have no effect on an instance in this process, with the reason."""
    given = {
        "--bind-cores": (config.pod.bind_cores, "whose instance runs in this process"),
        "--snapshot-every": (config.run.snapshot_every, "which repairs no instance"),
        "--reset-command": (config.run.reset_command, "which repairs no instance"),
        "--standby": (config.run.standby, "which repairs no instance"),
    }
    return {flag: reason for flag, (value, reason) in given.items() if value}


def asks_for_ray(config: Config) -> bool:
    """Return whether settings ask for what only instances under Ray have: repairs, timeouts of calls, bound cores."""
    run, defaults = config.run, RunSection()
    limits = ("stuck_after_s", "silent_after_s", "dead_after_s")
    return (
        bool(_without_effect_inline(config))
        or config.pod.is_elastic
        or run.max_restarts > defaults.max_restarts
        or any(getattr(run, name) != getattr(defaults, name) for name in limits)
    )


def check_average(training: TrainingSection, every: int) -> None:
    """Raise ConfigError if the average of the weights cannot be updated every `every` updates."""
    if training.ema is None:
        raise ConfigError(f"--ema-every {every} has no effect without --ema")
    if every % training.device_iterations:
        raise ConfigError(
            f"--ema-every {every} is no multiple of --device-iterations {training.device_iterations}: the weights can "
            "be read after whole calls"
        )


def _check_layers(config: Config) -> None:
    """Raise ConfigError for numbers of layers that contradict the other settings of the pipeline."""
    training, ipus = config.training, config.pod.ipus_per_replica
    counts = training.layers_per_ipu
    if not counts:
        return
    flag = f"--layers-per-ipu {','.join(map(str, counts))}"
    if training.pipeline_splits or training.pipeline_balance:
        other = "--pipeline-splits" if training.pipeline_splits else "--pipeline-balance"
        raise ConfigError(f"{flag} and {other} both choose the stages; omit one")
    if len(counts) not in (1, ipus) or ipus == 1:
        raise ConfigError(f"{flag} has {len(counts)} numbers, and --ipus-per-replica is {ipus}: give one for each IPU")


def _check_optimizer(config: Config) -> None:
    """Raise ConfigError for settings of another optimizer than the chosen one. The momentum has a default."""
    training = config.training
    if training.max_grad_norm is not None and training.optimizer in ("lamb", "rmsprop"):
        name = {"lamb": "LAMB", "rmsprop": "RMSprop"}[training.optimizer]
        raise ConfigError(f"--max-grad-norm: poptorch.optim.{name} cannot clip gradients; use sgd, adam or adamw")
    for key, optimizers in OF_OPTIMIZERS.items():
        value = getattr(training, key)
        is_given = key != "momentum" and value is not None and (value is not False or key == "bias_correction")
        if is_given and training.optimizer not in optimizers:
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"{flag} has no effect on --optimizer {training.optimizer}; it is for {listed(optimizers)}"
            )
    if training.velocity_scaling is not None and not training.combined_accumulator:
        raise ConfigError("--velocity-scaling has no effect without --combined-accumulator")


def check_mixing(config: Config) -> None:
    """Raise ConfigError for settings of mixup and cutmix that contradict each other."""
    data, batch = config.data, config.training.batch_size
    low, high = data.cutmix_lambda_low, data.cutmix_lambda_high
    if low > high:
        raise ConfigError(f"--cutmix-lambda-low {low:g} is greater than --cutmix-lambda-high {high:g}")
    if data.cutmix_disable_prob and not data.has_cutmix:
        raise ConfigError("--cutmix-disable-prob has no effect without --cutmix-lambda-low and --cutmix-lambda-high")
    if not (data.mixup_alpha or data.has_cutmix):
        return
    name = "--mixup-alpha" if data.mixup_alpha else "--cutmix-lambda-high"
    if not data.augment:
        raise ConfigError(f"{name} has no effect with --no-augment; omit one of them")
    least = 3 if data.mixup_alpha and data.has_cutmix else 2
    if batch < least:
        what = "mixup with cutmix" if least == 3 else name[2:].partition("-")[0]
        raise ConfigError(
            f"--batch-size {batch}: {what} combines the images of a micro-batch, and needs at least {least}"
        )


def _check_policy(config: Config) -> None:
    """Raise ConfigError for changes of images that are not augmented."""
    data = config.data
    for key in ("bounding_boxes", "policy", "random_erasing"):
        value = getattr(data, key)
        if value and not data.augment:
            raise ConfigError(f"--{key.replace('_', '-')} {value} has no effect with --no-augment; omit one of them")
    for key in ("rand_augment_ops", "rand_augment_magnitude"):
        value = getattr(data, key)
        if data.policy != "rand-augment" and value != getattr(DataSection(), key):
            raise ConfigError(f"--{key.replace('_', '-')} {value} has no effect without --policy rand-augment")


def _check_model(training: TrainingSection) -> None:
    """Raise ConfigError for settings of another network or norm than the chosen one."""
    if training.norm != "group" and (training.norm_num_groups or training.norm_eps):
        raise ConfigError("--norm-num-groups and --norm-eps have no effect without --norm group")
    if training.zero_init_residual and training.model not in TORCHVISION_RESNETS:
        raise ConfigError(f"--zero-init-residual has no effect on --model {training.model}: omit it")
    has_layers = training.vit_dropout or training.vit_attention_dropout or training.vit_representation_size
    if has_layers and training.model not in VISION_TRANSFORMERS:
        raise ConfigError(f"--vit-... has no effect on --model {training.model}; use {listed(VISION_TRANSFORMERS)}")
    is_changed = training.efficientnet_expand_ratio != 6 or training.efficientnet_group_dim != 1
    if is_changed and training.model not in EFFICIENTNETS:
        raise ConfigError(f"--efficientnet-... has no effect on --model {training.model}; use {listed(EFFICIENTNETS)}")


def needs_of_data_set(dataset: str) -> Dict[str, Tuple[bool, str]]:
    """Return the keys of `data` that only some data sets of images have: whether this one has it, and which do."""
    is_synthetic = dataset == "synthetic"
    return {
        **dict.fromkeys(("samples", "image"), (is_synthetic, "--dataset synthetic")),
        "download": (dataset in DOWNLOADED, f"--dataset {listed(DOWNLOADED)}"),
        "classes": (is_synthetic or ":" in dataset, "--dataset synthetic or module:function"),
    }


def _check_data_set(config: Config) -> None:
    """Raise ConfigError for a setting that only images of folders, data in shards or synthetic images have."""
    is_image_task = config.task.name in IMAGE_TASKS
    of_shards = f"--dataset {listed((*IMAGE_FOLDERS, SHARDS))}" if is_image_task else "--data-dir"
    folders = f"--dataset {listed(IMAGE_FOLDERS)}"
    needs = {**dict.fromkeys(OF_IMAGE_FOLDERS, (config.decoder is not None, folders))}
    needs.update(dict.fromkeys(OF_SHARDS, (config.reads_shards, of_shards)))
    if is_image_task:
        needs.update(needs_of_data_set(config.data.dataset))
    for key, (has_effect, needed) in needs.items():
        value = getattr(config.data, key)
        if not has_effect and value != DataSection.model_fields[key].default:
            shown = "" if value is True else f" {value}"
            raise ConfigError(f"--{key.replace('_', '-')}{shown} has no effect without {needed}: omit it")


def check_data_folder(config: Config) -> None:
    """Raise ConfigError for a data folder that the data set of images does not read."""
    data = config.data
    if data.data_dir is not None and data.dataset in WITHOUT_FILES and config.task.name in IMAGE_TASKS:
        raise ConfigError(
            f"--data-dir has no effect on --dataset {data.dataset}: omit it, or add --dataset imagefolder for a "
            "folder of class folders"
        )


def check_whole_calls(config: Config) -> None:
    """Raise ConfigError for a number of updates that ends within a call."""
    every = parse_interval(config.run.checkpoint_every)
    updates = {
        "--updates": config.training.updates,
        "--checkpoint-every": int(every.count) if every.unit == "update" else None,
        "--snapshot-every": config.run.snapshot_every,
    }
    iterations = config.training.device_iterations
    for flag, count in updates.items():
        if count is not None and count % iterations:
            below = count // iterations * iterations
            allowed = " or ".join(str(n) for n in (below, below + iterations) if n)
            raise ConfigError(
                f"{flag} {count} is not a whole number of calls of {iterations} updates (device iterations); "
                f"use {allowed}"
            )


def check_min_hosts(config: Config, replicas: int, hosts: int) -> None:
    """Raise ConfigError if a plan of `replicas` replicas uses fewer hosts than `--min-hosts`."""
    least = config.pod.min_hosts or 1
    if hosts < least:
        used = counted(hosts, "host")
        raise ConfigError(f"--min-hosts {least}: a plan of {counted(replicas, 'replica')} uses {used}")


def check_copies(config: Config, hosts: int) -> None:
    """Raise ConfigError if a cluster of so many hosts cannot keep `--checkpoint-copies`."""
    copies, is_inline = config.run.checkpoint_copies, config.run.fleet == "inline"
    usable = 1 if is_inline else hosts
    if copies > usable:
        there, remedy = f"the run has {usable}", f"use at most {usable}"
        if is_inline:
            there, remedy = "the inline fleet uses one", "omit --fleet inline, or use 1"
        elif hosts == 1:
            remedy = "name more in a --cluster file, or use 1"
        raise ConfigError(f"--checkpoint-copies {copies} needs {copies} hosts, and {there}: {remedy}")


def check_metrics(config: Config, names: Sequence[str], test_samples: int) -> None:
    """Raise ConfigError for a metric that the task does not have, or if no evaluation can end the run early.

    Args:
        config: the config.
        names: of the task's metrics.
        test_samples: the size of its test split.
    """
    training = config.training
    chosen = (("--best-metric", config.run.best_metric), ("--early-stopping-metric", training.early_stopping_metric))
    for flag, name in chosen:
        if name is not None and name not in names:
            raise ConfigError(f"{flag} {name}: the task measures {', '.join(names)}")
    if training.early_stopping is None:
        if training.early_stopping_metric is not None:
            raise ConfigError("--early-stopping-metric has no effect without --early-stopping")
    elif training.evaluate_every is None or not test_samples:
        lacks = "a test split" if training.evaluate_every else "evaluations during the run: add --evaluate-every 1"
        raise ConfigError(f"--early-stopping {training.early_stopping} needs {lacks}")


# The keys of data in shards, which replace the data sets of a task of the user.
SHARD_KEYS = ("data.data_dir", "data.cache_dir", "data.cache_size", "data.shuffle_window")
_OF_GROUP_NORM = ("training.norm_num_groups", "training.norm_eps")
_OF_EFFICIENTNETS = ("training.efficientnet_expand_ratio", "training.efficientnet_group_dim")
_OF_TRANSFORMERS = ("training.vit_dropout", "training.vit_attention_dropout", "training.vit_representation_size")
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
    *(*_OF_GROUP_NORM, "training.zero_init_residual", *_OF_EFFICIENTNETS, *_OF_TRANSFORMERS),
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
    **dict.fromkeys(("data.samples", "data.image", "data.classes"), ("data.dataset", ("synthetic",))),
    "data.download": ("data.dataset", DOWNLOADED),
    **{f"data.{key}": ("data.dataset", IMAGE_FOLDERS) for key in OF_IMAGE_FOLDERS},
    **{f"data.{key}": ("data.dataset", (*IMAGE_FOLDERS, SHARDS)) for key in OF_SHARDS},
    **dict.fromkeys(("data.rand_augment_ops", "data.rand_augment_magnitude"), ("data.policy", ("rand-augment",))),
    "data.cutmix_disable_prob": ("data.cutmix_lambda_high", _GIVEN),
    **dict.fromkeys(("data.crop_padding", "data.flip"), ("data.augment", (True,))),
    "training.ema_every": ("training.ema", _GIVEN),
    "training.init_ignore": ("training.init_weights", _GIVEN),
    "training.early_stopping_metric": ("training.early_stopping", _GIVEN),
    "pod.min_hosts": ("pod.elastic", _GIVEN),
    **dict.fromkeys(("run.storage_timeout_s", "run.keep_remote"), ("run.storage_path", _GIVEN)),
    "run.reset_timeout_s": ("run.reset_command", _GIVEN),
    **dict.fromkeys(("run.tracker_artifacts", "run.tracker_timeout_s"), ("run.trackers", _GIVEN)),
    **dict.fromkeys(_OF_GROUP_NORM, ("training.norm", ("group",))),
    "training.zero_init_residual": ("training.model", TORCHVISION_RESNETS),
    **dict.fromkeys(_OF_EFFICIENTNETS, ("training.model", EFFICIENTNETS)),
    **dict.fromkeys(_OF_TRANSFORMERS, ("training.model", VISION_TRANSFORMERS)),
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
