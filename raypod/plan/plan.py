"""The plan: every number, every instance and every leg of a run, before anything runs.

Inert data made from the config, the cluster and the size of the data set; printing it needs neither Ray nor torch nor
an SDK. Every product of sizes is named here once; elsewhere nobody multiplies.
"""

from __future__ import annotations

import dataclasses
from typing import List, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan.cluster import Cluster
from raypod.plan.config import VISION_TRANSFORMERS, Config, parse_interval
from raypod.plan.placement import Placement, Sizes, place


@dataclasses.dataclass(frozen=True)
class Geometry(Sizes):
    """The sizes of a run with its batches.

    Raises:
        ConfigError: a size is less than 1; or as `Sizes`.
    """

    micro_batch_size: int
    gradient_accumulation: int
    device_iterations: int
    evaluation_iterations: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} = {getattr(self, field.name)} must be at least 1")
        super().__post_init__()

    @property
    def replica_samples(self) -> int:
        """Samples per update of one replica."""
        return self.micro_batch_size * self.gradient_accumulation

    @property
    def global_batch_size(self) -> int:
        """Samples per update over all replicas."""
        return self.replica_samples * self.total_replicas

    @property
    def micro_batches_per_call(self) -> int:
        """Micro-batches that one instance feeds per call: the leading factors of its combined batch."""
        return self.device_iterations * self.gradient_accumulation * self.local_replicas

    @property
    def combined_batch_size(self) -> int:
        """Samples that one instance feeds per call: [device iteration, accumulation, local replica, micro-batch]."""
        return self.micro_batches_per_call * self.micro_batch_size

    @property
    def samples_per_call(self) -> int:
        """Samples of one call over all instances."""
        return self.combined_batch_size * self.num_instances

    @property
    def evaluation_batch_size(self) -> int:
        """Samples that one instance feeds per inference call (no accumulation there: contract section 1.3)."""
        return self.micro_batch_size * self.local_replicas * self.evaluation_iterations

    def calls_per_epoch(self, train_samples: int) -> int:
        """Whole calls in one pass over the training split; what is left over is not visited in that pass."""
        return train_samples // self.samples_per_call

    def updates_per_epoch(self, train_samples: int) -> int:
        """Updates in one pass over the training split."""
        return self.calls_per_epoch(train_samples) * self.device_iterations

    def replicas_of(self, instance: int) -> range:
        """Global replica indices of one instance."""
        first = instance * self.local_replicas
        return range(first, first + self.local_replicas)

    @property
    def is_aligned(self) -> bool:
        """Whether every instance is a whole, equal subtree of the reduction tree, and their number a power of two."""
        return _is_power_of_two(self.local_replicas) and _is_power_of_two(self.num_instances)


@dataclasses.dataclass(frozen=True)
class Leg:
    """Updates `first_update .. first_update + num_updates - 1` (0-based) of one epoch; then the coordinator acts."""

    epoch: int  # 0-based
    first_update: int
    num_updates: int
    ends_epoch: bool

    @property
    def end(self) -> int:
        """The update after its last."""
        return self.first_update + self.num_updates


@dataclasses.dataclass(frozen=True)
class DatasetSize:
    """What the plan has to know of a data set."""

    train_samples: int
    test_samples: int
    is_published: bool = False  # not counted: the files are not here


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run before it runs."""

    config: Config
    placement: Placement
    geometry: Geometry
    size: DatasetSize
    run_dir: str
    pipeline_splits: Tuple[str, ...] = ()  # modules of the model with which the next IPU of a replica begins

    @property
    def updates_per_epoch(self) -> int:
        """Updates in one pass over the training split."""
        return self.geometry.updates_per_epoch(self.size.train_samples)

    @property
    def total_updates(self) -> int:
        """The last update of the run."""
        in_epochs = self.updates_per_epoch * self.config.training.epochs
        return min(self.config.training.updates or in_epochs, in_epochs)

    def legs(self, first_update: int = 0) -> List[Leg]:
        """The stretches between two points where the coordinator acts, from `first_update` on."""
        legs, update = [], first_update
        while update < self.total_updates:
            legs.append(self.next_leg(update))
            update = legs[-1].end
        return legs

    def is_evaluated_after(self, update: int) -> bool:
        """Whether the test split is evaluated after `update` updates; after the last one it is anyway."""
        every = (self.config.training.evaluate_every or 0) * self.updates_per_epoch
        is_due = update == self.total_updates or (update > 0 and every > 0 and update % every == 0)
        return is_due and self.size.test_samples > 0

    def next_leg(self, update: int) -> Leg:
        """The stretch from `update` to the next point where the coordinator acts."""
        epoch = update // self.updates_per_epoch
        end_of_epoch = (epoch + 1) * self.updates_per_epoch
        end = min(end_of_epoch, self.total_updates)
        if self.save_every_updates:
            end = min(end, (update // self.save_every_updates + 1) * self.save_every_updates)
        return Leg(epoch, update, end - update, ends_epoch=end == end_of_epoch)

    @property
    def save_every_updates(self) -> int:
        """Updates between two checkpoints; 0 where the clock says when one is due."""
        return parse_interval(self.config.run.checkpoint_every).updates(self.updates_per_epoch)

    def log_file(self, instance: int) -> str:
        """Where an instance's output goes."""
        return f"{self.run_dir}/logs/instance-{instance}.log"


def make_plan(config: Config, cluster: Cluster, size: DatasetSize, run_dir: str) -> Plan:
    """Return the plan of a run, with the pipeline splits of the config.

    Raises:
        ConfigError: two settings contradict each other, or a setting contradicts the size of the data set.
        ClusterError: a host has fewer IPUs than the plan needs.
    """
    training, pod = config.training, config.pod
    geometry = Geometry(
        micro_batch_size=training.batch_size,
        gradient_accumulation=training.gradient_accumulation,
        device_iterations=training.device_iterations,
        total_replicas=pod.replicas,
        num_instances=pod.num_instances,
        ipus_per_replica=pod.ipus_per_replica,
        evaluation_iterations=training.evaluation_iterations or pipeline_stages(config),
    )
    _check_against_data(geometry, size, config)
    _check_choices(config)
    if config.run.fleet == "inline" and geometry.num_instances > 1:
        raise ConfigError(
            f"the inline fleet runs one instance in this process, not {geometry.num_instances}; "
            "add --num-instances 1, or leave out --fleet inline"
        )
    placement = place(cluster, geometry, pod.threads_per_replica)
    splits = tuple(training.pipeline_splits or ())
    _check_pipeline(config, geometry, splits)
    return Plan(config, placement, geometry, size, run_dir, splits)


def pipeline_stages(config: Config) -> int:
    """Forward stages whose work overlaps: 1 for a model on one IPU, and where IPUs take turns (contract section 3)."""
    return config.pod.ipus_per_replica if config.training.execution == "pipelined" else 1


def _check_choices(config: Config) -> None:
    """Choices that say nothing beside another one."""
    training = config.training
    if (training.lr_schedule == "step") != (training.lr_steps is not None):
        raise ConfigError(
            "--lr-schedule step and --lr-steps 30,60,80 (epochs) go together: one is given without the other"
        )
    if training.norm != "batch" and training.model in ("tiny", *VISION_TRANSFORMERS):
        raise ConfigError(f"--norm {training.norm} stands for BatchNorm, and {training.model} has none: leave it out")


def _check_pipeline(config: Config, geometry: Geometry, splits: Sequence[str]) -> None:
    """What PopTorch would refuse after minutes of compiling (contract section 3)."""
    training, ipus, stages = config.training, geometry.ipus_per_replica, pipeline_stages(config)
    if splits and len(splits) + 1 != ipus:
        raise ConfigError(
            f"--pipeline-splits {','.join(splits)} makes {len(splits) + 1} stages, and --ipus-per-replica is {ipus}: "
            f"use --ipus-per-replica {len(splits) + 1}, or {ipus - 1} splits"
        )
    if not _is_power_of_two(geometry.local_ipus):
        fits = [n for n in range(1, geometry.total_replicas + 1) if geometry.total_replicas % n == 0]
        fits = [n for n in fits if _is_power_of_two(geometry.total_replicas // n * ipus)]
        hint = f"--num-instances can be {', '.join(map(str, fits))}" if fits else "use 1, 2, 4, 8, ... IPUs per replica"
        raise ConfigError(
            f"one instance would drive {geometry.local_replicas} replicas x {ipus} IPUs = {geometry.local_ipus} IPUs, "
            f"and PopTorch reserves a power of two; {hint}"
        )
    if training.gradient_accumulation < 2 * stages - 1:
        raise ConfigError(
            f"a pipeline of {stages} stages is filled by {2 * stages - 1} = 2 x {stages} - 1 micro-batches, and "
            f"--gradient-accumulation is {training.gradient_accumulation}: use {2 * stages - 1} or more, or "
            "--execution sharded"
        )
    if geometry.evaluation_iterations < stages:
        raise ConfigError(
            f"a pipeline of {stages} stages is filled by as many micro-batches in inference, and "
            f"--evaluation-iterations is {geometry.evaluation_iterations}: leave it out, or use {stages} or more"
        )


def _check_against_data(geometry: Geometry, size: DatasetSize, config: Config) -> None:
    training = config.training
    if geometry.samples_per_call > size.train_samples:
        raise ConfigError(
            f"one call needs {training.batch_size} (batch size) x {training.gradient_accumulation} (accumulation) x "
            f"{training.device_iterations} (device iterations) x {geometry.total_replicas} (replicas) = "
            f"{geometry.samples_per_call} samples, and the training split has {size.train_samples}; "
            "make one of the four smaller"
        )
    if training.updates is not None:
        _check_whole_calls("--updates", training.updates, training.device_iterations)
    every = parse_interval(config.run.checkpoint_every)
    if every.unit == "update":
        _check_whole_calls("--checkpoint-every", int(every.count), training.device_iterations)


def _check_whole_calls(flag: str, updates: int, device_iterations: int) -> None:
    if updates % device_iterations:
        below = updates // device_iterations * device_iterations
        way_out = [n for n in (below, below + device_iterations) if n]
        raise ConfigError(
            f"{flag} {updates} is not a whole number of calls of {device_iterations} updates "
            f"(device iterations); use {' or '.join(map(str, way_out))}"
        )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def default_run_dir(config: Config, now: str) -> str:
    """`runs/<time>-<name>`, where `name` says what is trained on what."""
    dataset = config.data.dataset.rpartition(":")[2]
    model = config.training.model.rpartition(":")[2]
    return config.run.run_dir or f"runs/{now}-{dataset}-{model}"
