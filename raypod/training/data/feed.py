"""The combined batches that one instance feeds to its calls.

`order` decides which samples a call gets; the shuffling and partitioning of `poptorch.DataLoader` are not used, so that
the order does not depend on the number of instances. Arrays are gathered a whole call at a time in a background thread;
other data sets are loaded sample by sample, in worker processes. With an SDK that holds the interpreter lock during its
calls, worker processes do both: a thread would stand still meanwhile.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Generator, Iterable, Iterator, Optional, Tuple

import numpy as np

from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Plan, Segment
from raypod.system import spans
from raypod.training.data.loaders import CallLoader, GatherLoader, SampleLoader
from raypod.training.data.loading import NO_EPOCH, FixedShapes, Retry, map_ahead, prefetch, reading
from raypod.training.data.order import (
    EpochSamples,
    call_positions,
    epoch_order,
    in_place_of,
    kept_samples,
    samples_digest,
)
from raypod.training.data.read_failures import ReadFailed
from raypod.training.data.source import Batch, Source

Call = Tuple[np.ndarray, Batch]  # sample indices int64 [combined_batch_size], and their batch
_PER_WORKER = 2  # calls that a worker process has been given, at most
_AHEAD, _ASYNC_AHEAD = 1, 3  # calls loaded in advance: arrays by default, and any data with --async-dataloader


class Feed:
    """Load the calls of one instance, for training and for evaluation.

    Samples that cannot be read because of their disk or network are read again, within `run.read_retry_s`.

    Args:
        plan, spec: of the run and of the instance.
        source: of the samples.
        pause: waits some seconds before samples are read again; what it raises ends the attempts.
        in_processes: nothing is loaded in threads of this process, as its SDK holds the interpreter lock.
    """

    def __init__(
        self,
        plan: Plan,
        spec: InstanceSpec,
        source: Source,
        pause: Callable[[float], object] = time.sleep,
        in_processes: bool = False,
    ) -> None:
        self._new_retry = functools.partial(Retry, spec, plan.config.run.read_retry_s, pause)
        self._plan, self._spec, self._source = plan, spec, source
        source.begin()
        self._loader, self._test_loader = self._loaders(int(in_processes))
        self._has_thread = plan.config.data.async_dataloader and not in_processes
        self._stream: Optional[Generator[Call, None, None]] = None
        self._samples = np.zeros(0, dtype=np.int64)  # indices of the call that `calls` yielded last
        self._shapes = FixedShapes("training", source.names, source.train)
        self._is_interrupted = False
        self._next_update = 0  # the update whose batch the stream yields next

    def _loaders(self, least_workers: int) -> Tuple[Optional[CallLoader], Optional[CallLoader]]:
        """Return the loaders of the training and of the test split; None if threads of this process gather batches."""
        data, source, seed = self._plan.config.data, self._source, self._plan.config.training.seed
        workers = max(data.num_workers, least_workers)
        if source.is_in_memory:
            if not least_workers:
                return None, None
            train, test = (functools.partial(self._gather_call, split) for split in (source.train, source.test))
            return GatherLoader(train, workers), GatherLoader(test, 1)
        # The samples may draw from the process's global generators, as the replicas do: a background thread must
        # therefore load them in another process.
        workers_ahead = max(workers, int(data.async_dataloader))
        finish, check = source.to_device_format, functools.partial(_check, source)
        return (
            SampleLoader(source.train, seed, workers_ahead, finish, functools.partial(check, "training"), "training"),
            SampleLoader(source.test, seed, workers, finish, functools.partial(check, "test"), "test"),
        )

    def calls(self, segment: Segment) -> Iterator[Batch]:
        """Yield the batch of each call of a segment; every tensor is [combined_batch_size, ...].

        Background loading continues beyond the end of the segment, so that the next segment starts without a wait.
        """
        iterations = self._plan.geometry.device_iterations
        for update in range(segment.first_update, segment.first_update + segment.num_updates, iterations):
            if self._is_interrupted:
                return
            try:
                self._samples, batch = self._next_call(update)
            except BaseException:
                self._end_stream()
                if self._is_interrupted:
                    return
                raise
            self._next_update = update + iterations
            self._shapes.check(self._samples, batch)
            training = self._plan.config.training
            random = training.seed, update // self._plan.updates_per_epoch
            yield self._source.with_pairs(batch, self._samples, training.batch_size, random)

    def _next_call(self, update: int) -> Call:
        retry = self._new_retry()
        while True:
            if self._stream is None or self._next_update != update:
                self._end_stream()
                self._stream = self._batches_from(update)
            try:
                return next(self._stream)
            except ReadFailed as error:
                self._end_stream()
                retry.wait(error)

    def samples_digest(self) -> str:
        """Return the digest of the sample indices of the call that `calls` yielded last, as loaded."""
        return samples_digest(self._samples)

    def evaluation_calls(self) -> Iterator[Tuple[Batch, int]]:
        """Yield (batch, valid) for this instance's share of the test split.

        All calls have the same shape; rows from `valid` on are padding that repeats other samples.
        """
        kept = kept_samples(self._plan.config.data.left_out("test"), len(self._source.test))
        total = len(kept)
        calls = list(self._evaluation_samples(total))
        retry, shapes = self._new_retry(), FixedShapes("test", self._source.names, self._source.test)
        while calls:
            batches = self._evaluation_batches([kept[call % total] for call in calls])
            try:
                for batch in batches:
                    shapes.check(kept[calls[0] % total], batch)
                    yield batch, int((calls.pop(0) < total).sum())
                    retry = self._new_retry()
            except ReadFailed as error:
                retry.wait(error)

    def evaluation_samples(self) -> np.ndarray:
        """Return the numbers of the test samples of `evaluation_calls`, without padding."""
        kept = kept_samples(self._plan.config.data.left_out("test"), len(self._source.test))
        calls = [call[call < len(kept)] for call in self._evaluation_samples(len(kept))]
        return kept.take(np.concatenate(calls))

    def interrupt(self) -> None:
        """End `calls`, from another thread, also while it waits for samples. It yields nothing more."""
        self._is_interrupted = True
        self._source.interrupt()
        if self._loader is not None:
            self._loader.interrupt()

    def close(self) -> None:
        """End background loading and the worker processes."""
        self._end_stream()
        for loader in (self._loader, self._test_loader):
            if loader is not None:
                loader.close()
        self._source.close()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _batches_from(self, first_update: int) -> Generator[Call, None, None]:
        """Yield the calls from an update to the end of the run."""
        data = self._plan.config.data
        samples = self._prepared(self._source.train, self._samples_from(first_update))
        if self._loader is None:
            workers = max(1, data.num_workers)
            depth = max(workers, _ASYNC_AHEAD if data.async_dataloader else _AHEAD)
            yield from map_ahead(functools.partial(self._gather_call, self._source.train), samples, workers, depth)
        elif self._has_thread:
            yield from prefetch(self._load_calls(self._loader, samples), _ASYNC_AHEAD, self._loader.close)
        else:
            yield from self._load_calls(self._loader, samples)

    def _samples_from(self, first_update: int) -> Iterator[EpochSamples]:
        plan, iterations = self._plan, self._plan.geometry.device_iterations
        epoch, order = -1, np.empty(0)
        for update in range(first_update, plan.total_updates, iterations):
            if update // plan.updates_per_epoch != epoch:
                epoch = update // plan.updates_per_epoch
                count = plan.dataset_size.train_samples
                data, shards = plan.config.data, plan.dataset_size.shards
                order = epoch_order(plan.config.training.seed, epoch, count, shards, data.shuffle_window)
                order = in_place_of(data.left_out("train"), order, count)
            call = update % plan.updates_per_epoch // iterations
            yield epoch, order[call_positions(plan.geometry, self._spec.index, call)]

    def _prepared(self, split: Any, calls: Iterator[EpochSamples]) -> Iterator[EpochSamples]:
        behind = _PER_WORKER * max(1, self._plan.config.data.num_workers) + _ASYNC_AHEAD + 1
        return self._source.prepared(split, calls, behind)

    def _evaluation_samples(self, total: int) -> Iterator[np.ndarray]:
        """Yield the numbers of the test samples of each of this instance's calls; those from `total` on are padding."""
        size, instances = self._plan.geometry.evaluation_batch_size, self._plan.geometry.num_instances
        for call in range(-(-total // (size * instances))):
            first = (call * instances + self._spec.index) * size
            yield np.arange(first, first + size)

    def _evaluation_batches(self, calls: Iterable[np.ndarray]) -> Iterator[Batch]:
        samples = self._prepared(self._source.test, ((NO_EPOCH, call) for call in calls))
        if self._test_loader is None:
            make = functools.partial(self._gather_call, self._source.test)
            yield from (batch for _, batch in map_ahead(make, samples, 1, _AHEAD))
            return
        try:
            yield from (batch for _, batch in self._load_calls(self._test_loader, samples))
        finally:
            self._test_loader.close()  # idle workers would occupy memory until the next evaluation

    def _load_calls(self, loader: CallLoader, calls: Iterable[EpochSamples]) -> Iterator[Call]:
        return ((samples.numpy(), tuple(batch)) for samples, batch in loader.load(calls))

    def _gather_call(self, split: Any, call: EpochSamples) -> Call:
        epoch, samples = call
        random = None if epoch == NO_EPOCH else (self._plan.config.training.seed, epoch)
        with spans.measured("gather a batch", "loading"), reading():
            return samples, self._source.gather(split, samples, random)


def _check(source: Source, split: str, sample: Any, index: int) -> None:
    source.check_sample(sample, f"{split} sample {index}")
