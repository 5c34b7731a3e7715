"""The plan of a run: all sizes, instances and segments, computed from the config, the cluster and the data set's size.

A plan is immutable data. `Geometry` and `placement.Sizes` define all products of sizes; those that each update of a run
reads are computed once.

The updates that `--profile` records, as whole calls.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Dict, List, Optional, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan.cluster import Cluster
from raypod.plan.compatibility import check_compatible, check_metrics, check_min_hosts, check_whole_calls
from raypod.plan.config import Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.placement import Placement, Sizes, hint, is_power_of_two, place
from raypod.plan.sections import PodSection
from raypod.plan.values import ipus_of, parse_evaluations, parse_interval, parse_updates
from raypod.system.command_line import counted


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
        """Samples of one replica per update."""
        return self.micro_batch_size * self.gradient_accumulation

    @functools.cached_property
    def global_batch_size(self) -> int:
        """Samples of all replicas per update."""
        return self.replica_samples * self.total_replicas

    @property
    def call_shape(self) -> Tuple[int, int, int]:
        """Device iterations, gradient accumulation and local replicas: the order of an instance's micro-batches."""
        return self.device_iterations, self.gradient_accumulation, self.local_replicas

    @functools.cached_property
    def micro_batches_per_call(self) -> int:
        """Micro-batches of one instance per call: the leading dimensions of its combined batch."""
        return self.device_iterations * self.gradient_accumulation * self.local_replicas

    @functools.cached_property
    def combined_batch_size(self) -> int:
        """Samples of one instance per call, ordered [device iteration, accumulation, local replica, micro-batch]."""
        return self.micro_batches_per_call * self.micro_batch_size

    @functools.cached_property
    def samples_per_call(self) -> int:
        """Samples of all instances per call."""
        return self.combined_batch_size * self.num_instances

    @property
    def evaluation_batch_size(self) -> int:
        """Samples of one instance per inference call; PopTorch does not accumulate in inference."""
        return self.micro_batch_size * self.local_replicas * self.evaluation_iterations

    def calls_per_epoch(self, train_samples: int) -> int:
        """Return the whole calls in one pass over the training split; that pass drops the remaining samples."""
        return train_samples // self.samples_per_call

    def updates_per_epoch(self, train_samples: int) -> int:
        """Return the updates in one pass over the training split."""
        return self.calls_per_epoch(train_samples) * self.device_iterations

    def replicas_of(self, instance: int) -> range:
        """Return the global replica indices of one instance."""
        first = instance * self.local_replicas
        return range(first, first + self.local_replicas)

    @property
    def is_aligned(self) -> bool:
        """Whether instances are subtrees of the reduction: local replicas and instances are powers of two."""
        return is_power_of_two(self.local_replicas) and is_power_of_two(self.num_instances)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive updates of one epoch, at whose end the coordinator saves, evaluates or ends the run."""

    epoch: int  # 0-based
    first_update: int  # 0-based
    num_updates: int
    ends_epoch: bool

    @property
    def end(self) -> int:
        """The update after the last one of the segment."""
        return self.first_update + self.num_updates


@dataclasses.dataclass(frozen=True)
class DatasetSize:
    """The sizes of the splits of a data set.

    Attributes:
        train_samples, test_samples: the numbers of samples.
        is_published: the published sizes, because the files are missing.
        notes: what the user has to know of the files, a line each.
        shards: the number of training samples in each shard, if `data.shuffle_window` shuffles within some of them.
    """

    train_samples: int
    test_samples: int
    is_published: bool = False
    notes: Tuple[str, ...] = dataclasses.field(default=(), compare=False)
    shards: Tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What is known about a task before its data is loaded.

    Attributes:
        size: the numbers of samples.
        metrics: what it measures; the first is the loss.
        test_metrics: what is computed from the predictions for all test samples, besides.
        predictions: the names of the predictions that an evaluation returns for each sample.
        best: the name of the metric by which the best checkpoint is kept.
        samples_are: what a sample is, in the plural, as in "images".
        parts: what the throughput also counts, in the plural, and their number in a sample, as in ("tokens", 128).
        data, model: what the plan shows as its data set and its model.
        pickled: the task's class, if it cannot be imported by its name: cloudpickle's bytes.
    """

    size: DatasetSize
    metrics: Tuple[Metric, ...] = (LOSS,)
    best: str = LOSS.name
    samples_are: str = "samples"
    parts: Optional[Tuple[str, int]] = None
    data: str = ""
    model: str = ""
    pickled: bytes = dataclasses.field(default=b"", repr=False)
    test_metrics: Tuple[Metric, ...] = ()
    predictions: Tuple[str, ...] = ()

    @property
    def evaluated_metrics(self) -> Tuple[Metric, ...]:
        """What an evaluation measures."""
        return (*self.metrics, *self.test_metrics)

    def part_rates(self, samples_per_s: float) -> Dict[str, float]:
        """Return the throughput in parts of samples by its key in files, as `tokens_per_s`; {} without parts."""
        return {f"{self.parts[0]}_per_s": self.parts[1] * samples_per_s} if self.parts else {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    config: Config
    placement: Placement
    geometry: Geometry
    task: TaskFacts
    run_dir: str
    pipeline_splits: Tuple[str, ...] = ()  # where the stages after the first begin, as `values` reads them
    is_inline: bool = False  # its one instance runs in the process of the coordinator, without Ray
    has_default_rate: bool = False  # the learning rate follows from the optimizer and the global batch

    @property
    def dataset_size(self) -> DatasetSize:
        """The numbers of samples."""
        return self.task.size

    @property
    def best_metric(self) -> Metric:
        """The metric by which the best checkpoint is kept."""
        return self._metric(self.config.run.best_metric or self.task.best)

    @property
    def early_stopping_metric(self) -> Metric:
        """The metric that must improve."""
        return self._metric(self.config.training.early_stopping_metric or self.best_metric.name)

    @property
    def patience(self) -> Optional[int]:
        """The evaluations without improvement that end the run; None: it does not end early."""
        text = self.config.training.early_stopping
        return None if text is None else parse_evaluations(text)

    def _metric(self, name: str) -> Metric:
        return next(metric for metric in self.task.evaluated_metrics if metric.name == name)

    @functools.cached_property
    def updates_per_epoch(self) -> int:
        """Updates in one pass over the training split."""
        return self.geometry.updates_per_epoch(self.dataset_size.train_samples)

    @functools.cached_property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        in_epochs = self.updates_per_epoch * self.config.training.epochs
        return min(self.config.training.updates or in_epochs, in_epochs)

    def eta_s(self, update: int, samples_per_s: float) -> Optional[float]:
        """Return the seconds of training after an update, without evaluations and checkpoints; None without a rate."""
        left = max(0, self.total_updates - update)
        return left * self.geometry.global_batch_size / samples_per_s if samples_per_s > 0 else None

    def segments(self, first_update: int = 0) -> List[Segment]:
        """Return all segments from `first_update` on."""
        segments, update = [], first_update
        while update < self.total_updates:
            segments.append(self.next_segment(update))
            update = segments[-1].end
        return segments

    def is_evaluated_after(self, update: int) -> bool:
        """Return whether the test split is evaluated after `update` updates; it always is after the last one."""
        every = (self.config.training.evaluate_every or 0) * self.updates_per_epoch
        is_due = update == self.total_updates or (update > 0 and every > 0 and update % every == 0)
        return is_due and self.dataset_size.test_samples > 0

    def next_segment(self, update: int) -> Segment:
        """Return the segment from `update` to the end of the epoch, the next checkpoint or the end of the run."""
        epoch = update // self.updates_per_epoch
        end_of_epoch = (epoch + 1) * self.updates_per_epoch
        end = min(end_of_epoch, self.total_updates)
        if self.save_every_updates:
            end = min(end, (update // self.save_every_updates + 1) * self.save_every_updates)
        return Segment(epoch, update, end - update, ends_epoch=end == end_of_epoch)

    @property
    def save_every_updates(self) -> int:
        """Updates between two checkpoints; 0 if the interval is in minutes."""
        return parse_interval(self.config.run.checkpoint_every).updates(self.updates_per_epoch)

    def log_file(self, instance: int) -> str:
        return f"{self.run_dir}/logs/instance-{instance}.log"


def make_plan(config: Config, cluster: Cluster, task: TaskFacts, run_dir: str) -> Plan:
    """Return the plan of a run, with the pipeline splits of the config.

    Raises:
        ConfigError: two settings contradict each other, or a setting contradicts the size of the data set.
        ClusterError: a host has fewer IPUs than the plan needs.
    """
    training, pod = config.training, config.pod
    _check_instances(pod, cluster)
    geometry = Geometry(
        micro_batch_size=training.batch_size,
        gradient_accumulation=training.gradient_accumulation,
        device_iterations=training.device_iterations,
        total_replicas=pod.replicas,
        num_instances=pod.num_instances,
        ipus_per_replica=pod.ipus_per_replica,
        evaluation_iterations=training.evaluation_iterations or pipeline_stages(config),
    )
    _check_against_data(geometry, task.size, config)
    check_compatible(config)
    check_metrics(config, [metric.name for metric in task.evaluated_metrics], task.size.test_samples)
    if config.run.fleet == "inline" and geometry.num_instances > 1:
        raise ConfigError(
            f"the inline fleet runs one instance, not {geometry.num_instances}; "
            "add --num-instances 1, or omit --fleet inline"
        )
    if pod.bind_cores is not None:
        cluster = dataclasses.replace(cluster, numa=pod.bind_cores)
    placement = place(cluster, geometry, pod.threads_per_replica)
    check_min_hosts(config, geometry.total_replicas, len(placement.hosts))
    splits = tuple(training.pipeline_splits or ())
    _check_pipeline(config, geometry, splits, cluster)
    return Plan(config, placement, geometry, task, run_dir, splits, is_inline=config.run.fleet == "inline")


def with_splits(plan: Plan, splits: Sequence[str]) -> Plan:
    """Return a plan with the pipeline splits that were found in its model.

    Raises:
        ConfigError: it has fewer micro-batches than its stages need.
    """
    config, geometry = plan.config, plan.geometry
    iterations = config.training.evaluation_iterations or pipeline_stages(config, splits)
    geometry = dataclasses.replace(geometry, evaluation_iterations=iterations)
    _check_pipeline(config, geometry, splits, plan.placement.cluster)
    return dataclasses.replace(plan, geometry=geometry, pipeline_splits=tuple(splits))


def pipeline_stages(config: Config, splits: Sequence[str] = ()) -> int:
    """Return the number of forward stages that run at the same time: 1 for sharded execution and models on one IPU.

    Args:
        config: the config.
        splits: those of the model, if they are known; else the config's, or one stage per IPU.
    """
    if config.training.execution != "pipelined":
        return 1
    known = splits or config.training.pipeline_splits
    return len(known) + 1 if known else config.pod.ipus_per_replica


def _check_instances(pod: PodSection, cluster: Cluster) -> None:
    """Raise ConfigError if replicas cannot be divided equally between instances. `Sizes` does not know the hosts."""
    if pod.replicas % max(1, pod.num_instances):
        raise ConfigError(
            f"{counted(pod.replicas, 'replica')} cannot be divided equally between {pod.num_instances} instances"
            + hint(cluster, pod.replicas, pod.num_instances, pod.ipus_per_replica)
        )


def _check_pipeline(config: Config, geometry: Geometry, splits: Sequence[str], cluster: Cluster) -> None:
    """Raise ConfigError for what PopTorch would reject after minutes of compilation."""
    training, ipus, stages = config.training, geometry.ipus_per_replica, pipeline_stages(config, splits)
    _check_ipus(splits, ipus)
    if not is_power_of_two(geometry.local_ipus):
        others = hint(cluster, geometry.total_replicas, geometry.num_instances, ipus)
        raise ConfigError(
            f"one instance would use {counted(geometry.local_replicas, 'replica')} x {counted(ipus, 'IPU')} = "
            f"{geometry.local_ipus} IPUs, and PopTorch attaches to a power of two"
            f"{others or '; use 1, 2, 4, 8, ... IPUs per replica'}"
        )
    if training.gradient_accumulation < 2 * stages - 1:
        raise ConfigError(
            f"a pipeline of {stages} stages needs at least {2 * stages - 1} = 2 x {stages} - 1 micro-batches, and "
            f"--gradient-accumulation is {training.gradient_accumulation}: use {2 * stages - 1} or more, or "
            "--execution sharded"
        )
    if geometry.evaluation_iterations < stages:
        raise ConfigError(
            f"a pipeline of {stages} stages needs at least {stages} micro-batches in inference, and "
            f"--evaluation-iterations is {geometry.evaluation_iterations}: omit it, or use {stages} or more"
        )


def _check_ipus(splits: Sequence[str], ipus: int) -> None:
    """Raise ConfigError unless the stages are on all IPUs of a replica, and on no others."""
    used = sorted(set(ipus_of(splits)))
    if not splits or used == list(range(ipus)):
        return
    if len(used) == len(splits) + 1 == used[-1] + 1:
        raise ConfigError(
            f"--pipeline-splits {','.join(splits)} makes {len(used)} stages, and --ipus-per-replica is {ipus}: "
            f"use --ipus-per-replica {len(used)}, or {counted(ipus - 1, 'split') if ipus > 1 else 'omit the splits'}"
        )
    raise ConfigError(
        f"--pipeline-splits {','.join(splits)} has stages on the IPUs {', '.join(map(str, used))}, and with "
        f"--ipus-per-replica {ipus} they are 0 to {ipus - 1}: each needs one"
    )


def _check_against_data(geometry: Geometry, size: DatasetSize, config: Config) -> None:
    training = config.training
    for split, count in (("train", size.train_samples), ("test", size.test_samples)):
        left_out = config.data.left_out(split)
        if left_out and (left_out[-1] >= count or len(left_out) == count):
            named = ",".join(config.data.leave_out or ())
            numbered = f", numbered from 0 to {count - 1}" if count else ""
            raise ConfigError(
                f"--leave-out {named}: the {split} split has {count} samples{numbered}; name some of them"
            )
    if geometry.samples_per_call > size.train_samples:
        raise ConfigError(
            f"one call needs {training.batch_size} (batch size) x {training.gradient_accumulation} (accumulation) x "
            f"{training.device_iterations} (device iterations) x {geometry.total_replicas} (replicas) = "
            f"{geometry.samples_per_call} samples, and the training split has {size.train_samples}; "
            "reduce one of the four"
        )
    check_whole_calls(config)


def default_run_dir(config: Config, now: str) -> str:
    """Return `run.run_dir`, or `runs/<now>-<data set>-<model>`; for other tasks than images, `runs/<now>-<task>`."""
    return config.run.run_dir or "-".join([f"runs/{now}", *map(short_name, config.names)])


def short_name(name: str) -> str:
    """Return the end of a name, as "make" of "nets:make" and "bert" of "hf:models/bert"."""
    return name.rpartition(":")[2].rstrip("/").rpartition("/")[2]


def window_of(plan: Plan) -> Optional[range]:
    """Return the 0-based updates of the calls that contain the updates of `--profile`; None without a profile.

    Raises:
        ConfigError: the run has fewer updates.
    """
    text = plan.config.run.profile
    if text is None:
        return None
    first, last = parse_updates(text)
    if last > plan.total_updates:
        raise ConfigError(
            f"--profile {text}: the run has {counted(plan.total_updates, 'update')}; choose a range within them"
        )
    in_call = plan.geometry.device_iterations
    return range((first - 1) // in_call * in_call, -(-last // in_call) * in_call)


def rounding_of(plan: Plan) -> Optional[str]:
    """Return a line for the user if the window of `--profile` contains more updates than requested."""
    window = window_of(plan)
    if window is None or parse_updates(str(plan.config.run.profile)) == (window.start + 1, window.stop):
        return None
    return (
        f"--profile {plan.config.run.profile} records the updates {window.start + 1}-{window.stop}: whole calls of "
        f"{counted(plan.geometry.device_iterations, 'update')}"
    )
