"""How often something is due: "100 updates", "2 epochs", "10 minutes"."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Iterator, Optional, Tuple

import pydantic
import yaml
from pydantic import Field
from pydantic.fields import FieldInfo
from typing_extensions import Annotated, Literal

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(update|epoch|minute)s?\s*$")


@dataclasses.dataclass(frozen=True)
class Interval:
    """`count` updates, epochs or minutes; whole ones but for minutes."""

    count: float
    unit: str  # "update", "epoch" or "minute"

    def updates(self, updates_per_epoch: int) -> int:
        """The same in updates; 0 for minutes, which cannot be counted in updates."""
        return {"update": int(self.count), "epoch": int(self.count) * updates_per_epoch, "minute": 0}[self.unit]

    @property
    def seconds(self) -> float:
        """The same in seconds; infinity for updates and epochs."""
        return self.count * 60 if self.unit == "minute" else float("inf")


def parse_interval(text: str) -> Interval:
    """Read "1 epoch", "100 updates" or "0.5 minutes". ValueError for anything else."""
    found = _FORM.match(text)
    if found is None:
        raise ValueError("write a number and its unit: 100 updates, 1 epoch, 10 minutes")
    interval = Interval(float(found.group(1)), found.group(2))
    if interval.count <= 0 or (interval.unit != "minute" and interval.count != int(interval.count)):
        raise ValueError(f"{interval.unit}s are counted in whole numbers from 1 on")
    return interval


# --- from config: What the user asked for, as frozen sections: every key, its default and its bounds; out of YAML, too.
#
# Defaults live in the sections and nowhere else; sums and products of these numbers belong to the plan.
#

MANIFEST = "manifest.json"  # its presence makes a folder a checkpoint
SMALL_RESNETS = ("resnet8", "resnet14", "resnet20")
TORCHVISION_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
VISION_TRANSFORMERS = ("vit_tiny", "vit_small", "vit_b_16")
_LONGEST_S = 1e6  # of every wait: longer ones are beyond what the system's clocks take


def _split_words(value: Any) -> Any:
    """A list on the command line is words with commas between them; in YAML it may be one."""
    return [word for word in value.replace(" ", "").split(",") if word] if isinstance(value, str) else value


def _split_numbers(value: Any) -> Any:
    return [value] if isinstance(value, int) else _split_words(value)


Names = Annotated[Optional[Tuple[str, ...]], pydantic.BeforeValidator(_split_words)]
Epochs = Annotated[Optional[Tuple[Annotated[int, Field(ge=1)], ...]], pydantic.BeforeValidator(_split_numbers)]


class Section(pydantic.BaseModel):
    """Base of the sections: frozen, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class DataSection(Section):
    """What to train on, and how it reaches the replicas."""

    dataset: str = Field(
        "digits",
        description="digits, synthetic, cifar10, cifar100, imagefolder, imagenet, or your own module:function",
    )
    data_dir: Optional[str] = Field(None, description="folder of the data set's files; handed to one of your own")
    download: bool = Field(False, description="fetch the files of cifar10 or cifar100 where they are missing")
    cache_dir: Optional[str] = Field(None, description="folder of decoded data (default: beside the data)")
    samples: int = Field(4096, ge=1, description="size of the synthetic data set")
    image: str = Field("3x32x32", pattern=r"^[1-9]\d*x[1-9]\d*x[1-9]\d*$", description="CxHxW of the synthetic images")
    classes: int = Field(10, ge=2, description="classes of the synthetic data set")
    augment: bool = Field(True, description="crop and flip training images at random, as is usual for the data set")
    crop_padding: Optional[int] = Field(None, ge=0, description="pixels that an augmented image is shifted by at most")
    flip: Optional[bool] = Field(None, description="mirror half of the augmented images")
    image_size: Optional[int] = Field(None, ge=1, le=16_384, description="height and width that images are resized to")
    num_workers: int = Field(0, ge=0, description="loader processes per instance; threads for data held in memory")
    async_dataloader: bool = Field(False, description="prepare the next calls in the background")
    eight_bit_io: bool = Field(False, description="send images as uint8 and normalise them on the device")


class TrainingSection(Section):
    """The arithmetic of the run: the model, the sizes, the optimizer."""

    model: str = Field(
        "resnet8", description="resnet8/14/20, resnet18/34/50/101/152, vit_tiny/small/b_16, tiny, or module:function"
    )
    stem: Literal["auto", "cifar", "imagenet"] = Field("auto", description="of ResNets; auto: cifar under 64 pixels")
    norm: Literal["batch", "group", "frozen"] = Field("batch", description="what stands for every BatchNorm2d")
    pipeline_splits: Names = Field(None, description="modules with which the next IPU begins, as in layer2.0,layer3.8")
    pipeline_balance: Optional[Literal["parameters", "time"]] = Field(
        None, description="split a model over the IPUs of a replica by itself; without splits: parameters"
    )
    execution: Literal["pipelined", "sharded"] = Field("pipelined", description="of the IPUs of a replica")
    precision: Literal["16.16", "16.32", "32.32"] = Field("32.32", description="activations.weights, in bits")
    batch_size: int = Field(8, ge=1, description="micro-batch: samples that forward sees")
    gradient_accumulation: int = Field(1, ge=1, description="micro-batches per replica and update")
    device_iterations: int = Field(1, ge=1, description="updates per call")
    epochs: int = Field(15, ge=1, le=100_000, description="passes over the training split")
    updates: Optional[int] = Field(None, ge=1, description="stop after this many updates")
    optimizer: Literal["sgd", "adam", "adamw", "lamb"] = Field("sgd", description="poptorch.optim class")
    learning_rate: float = Field(0.1, gt=0, allow_inf_nan=False, description="peak learning rate")
    lr_schedule: Literal["constant", "cosine", "step"] = Field("cosine", description="over the whole run")
    lr_steps: Epochs = Field(None, description="step: epochs after which the rate falls, as in 30,60,80")
    lr_gamma: float = Field(0.1, gt=0, allow_inf_nan=False, description="step: factor by which it falls")
    warmup_updates: int = Field(20, ge=0, description="linear warm-up of the learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(
        5e-4, ge=0, allow_inf_nan=False, description="on all parameters of more than one dimension"
    )
    loss_scaling: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="multiplies the loss, divided out before the update"
    )
    reduction: Literal["sum", "mean"] = Field("mean", description="of gradients over accumulation and replicas")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of a label spread over all classes")
    evaluate_every: Optional[int] = Field(None, ge=1, description="epochs between evaluations (one at the end anyway)")
    evaluation_iterations: Optional[int] = Field(
        None,
        ge=1,
        le=65_536,
        description="device iterations of an evaluation call; default: as few as the pipeline needs",
    )
    seed: int = Field(42, ge=0, lt=2**31, description="of weights, sample order, augmentation and dropout")

    @pydantic.field_validator("model")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known = ("tiny", *SMALL_RESNETS, *TORCHVISION_RESNETS, *VISION_TRANSFORMERS)
        if value not in known and ":" not in value:
            raise ValueError(f"known are {', '.join(known)}, or module:function for one of your own")
        return value

    @pydantic.field_validator("precision", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> str:
        return str(value)  # YAML reads 16.16 as a number


class PodSection(Section):
    """Placement: replicas over instances over hosts. With equal replicas it never changes the result."""

    replicas: int = Field(4, ge=1, description="model replicas, TOTAL over all instances")
    num_instances: int = Field(2, ge=1, description="host processes; the replicas are divided between them")
    ipus_per_replica: int = Field(1, ge=1, description="IPUs of one replica")
    num_ipus: Optional[int] = Field(None, ge=1, description="IPUs in total; the replicas follow from it")
    threads_per_replica: int = Field(
        1, ge=0, le=4096, description="intra-op threads; 0: the host's cores / its replicas"
    )
    cluster: Optional[str] = Field(None, description="cluster YAML, the one of `ray up`; default: this host")
    wait_hosts: float = Field(
        0, ge=0, le=_LONGEST_S, description="seconds to wait for hosts of the cluster that are not there yet"
    )
    executable_cache_path: Optional[str] = Field(None, description="folder of compiled executables")


class RunSection(Section):
    """How the run is carried out, and where it leaves its files."""

    device: Literal["auto", "ipu", "emulated"] = Field("auto", description="which SDK computes")
    fleet: Literal["ray", "inline"] = Field("ray", description="inline: one instance, in this process, no Ray")
    collectives: Literal["auto", "horovod", "gloo"] = Field("auto", description="auto: Horovod where installed")
    run_dir: Optional[str] = Field(None, description="run folder (default runs/<time>-<name>)")
    resume: Optional[str] = Field(None, description="run folder or checkpoint to go on from")
    resume_anyway: Optional[str] = Field(None, description="settings that may differ from the checkpoint's, by commas")
    checkpoint_every: str = Field("1 epoch", description="as in 100 updates, 2 epochs, 10 minutes")
    keep_checkpoints: int = Field(3, ge=1, description="newest ones that are kept, and the best by test accuracy")
    on_nonfinite: Literal["stop", "continue"] = Field("stop", description="when the loss is no number any more")
    tensorboard: bool = Field(False, description="curves for TensorBoard in the run folder, too")
    save_timeout_s: float = Field(
        600, gt=0, le=_LONGEST_S, description="bound of the wait for a checkpoint to be written"
    )
    start_timeout_s: float = Field(
        120, gt=0, le=_LONGEST_S, description="bound of every step of starting the instances"
    )
    report_timeout_s: float = Field(
        1800, gt=0, le=_LONGEST_S, description="bound of the wait for the next report (compiling included)"
    )
    stop_timeout_s: float = Field(10, gt=0, le=_LONGEST_S, description="grace for an instance to end by itself")
    max_restarts: int = Field(3, ge=0, description="repairs before the run fails; refilled by an hour of progress")
    dead_after_s: float = Field(1, gt=0, le=_LONGEST_S, description="bound for noticing that a process is dead")
    silent_after_s: float = Field(
        15, gt=0, le=_LONGEST_S, description="bound for noticing a frozen process or a silent host"
    )
    stuck_after_s: float = Field(
        30, gt=0, le=_LONGEST_S, description="least bound of a call; else 3 x the slowest so far"
    )

    @pydantic.field_validator("checkpoint_every")
    @classmethod
    def _is_an_interval(cls, value: str) -> str:
        parse_interval(value)
        return value


class Config(pydantic.BaseModel):
    """All sections. `Config()` is the default run."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    pod: PodSection = PodSection()
    run: RunSection = RunSection()

    def to_yaml(self) -> str:
        """The resolved config; `load_yaml` of it gives an equal object."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def fields() -> Iterator[Tuple[str, str, FieldInfo]]:
    """(section, key, field) of every key; keys are unique over all sections, so that flags can be flat."""
    for section, info in Config.model_fields.items():
        kind = info.annotation
        assert kind is not None
        for key, field in kind.model_fields.items():
            yield section, key, field
