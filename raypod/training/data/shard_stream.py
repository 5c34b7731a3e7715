"""Shards at a URL: an instance reads them from the cache of its host, into which its process downloads them in advance.

The order of the samples is known before they are needed (`order.epoch_order`): so is that of the shards.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Set, Tuple, Union

import numpy as np

from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.values import parse_size
from raypod.system.companion import end_session, start_module
from raypod.system.files import parse_json
from raypod.system.private import why_not_own
from raypod.system.remote.backends import check_scheme
from raypod.system.remote.errors import describe
from raypod.system.remote.store import Store
from raypod.system.retries import growing, retried
from raypod.training.data import shards
from raypod.training.data.arrays import load_mapped
from raypod.training.data.order import EpochSamples
from raypod.training.data.read_failures import ReadFailed, StillLoading
from raypod.training.data.shard_cache import DamagedShard, ShardCache
from raypod.training.data.shards import Index, PackedFiles, Shard, shown_bytes

_MODULE = "raypod.training.data.shard_process"
_ATTEMPTS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 4, 0.5, 4.0  # to read the index, or a single sample
_POLL_S = 0.02
_WAIT_S = 10.0  # for shards, before the instance shows that it waits and can be stopped
_STALL_S = 45.0  # without a byte, after which the storage counts as unreachable
_TEST_SHARDS = 2  # that have room besides those of the training
_MOST_CALLS = 4096  # of which the samples are computed in advance


class DownloadProcess:
    """The process of `shard_process`, for one instance."""

    def __init__(self, url: str, cache: ShardCache) -> None:
        self._process = start_module(_MODULE, [url, str(cache.folder), str(cache.limit_bytes)], None)

    def send(self, content: Dict[str, Any]) -> None:
        """Write a line to the process. One that has ended reads none."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def answers(self) -> Iterator[Dict[str, Any]]:
        """Yield the lines of the process until it ends."""
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                yield parse_json(line)

    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, whatever it does."""
        end_session(self._process)


class Downloads:
    """What one instance downloads, in a process that is started if a shard is not on this host."""

    def __init__(self, url: str, cache: ShardCache) -> None:
        self.url, self.cache = url, cache
        self._process: Optional[DownloadProcess] = None
        self._wanted: Dict[str, Shard] = {}
        self._failed: Dict[str, Dict[str, Any]] = {}  # answers, by checksum
        self._progress: Optional[Tuple[Tuple[int, int], float]] = None  # of what is waited for, and since when

    def begin(self, shards: Iterable[Shard]) -> None:
        """Start the process ahead of the first `want`, as its imports take a second, unless these shards are here."""
        if self._process is None and not all(self.cache.path(shard).exists() for shard in shards):
            self._begin()

    def want(self, shard: Shard) -> None:
        """Keep a shard, and download it after those wanted before, unless it is on this host."""
        self._failed.pop(shard.xxh3_128, None)
        self._wanted[shard.xxh3_128] = shard
        is_here = self.cache.has(shard)
        if self._process is not None:
            self._process.send({"want": shard.model_dump()})
        elif not is_here:
            self._begin()

    def release(self, shard: Shard) -> None:
        """Allow that a shard is removed."""
        self._wanted.pop(shard.xxh3_128, None)
        if self._process is not None:
            self._process.send({"release": shard.xxh3_128})

    def wait(self, needed: Iterable[Shard], interrupted: threading.Event) -> None:
        """Wait until shards that are wanted are on this host.

        Raises:
            InterruptedError: another thread has set `interrupted`.
            StillLoading: they arrive, but not within 10 s.
            ReadFailed: the storage cannot be reached, or nothing has arrived for 45 s.
            ConfigError: a shard is missing or damaged on the storage, or may not be read.
        """
        until_s, missing = time.monotonic() + _WAIT_S, list(needed)
        while True:
            missing = [shard for shard in missing if not self.cache.has(shard)]
            if not missing:
                self._progress = None
                return
            for shard in missing:
                self._raise_failure(shard)
            now_s, progress = time.monotonic(), (len(missing), sum(map(self.cache.received_bytes, missing)))
            if self._process is None or not self._process.is_running():
                self._end()
                raise ReadFailed(f"the process that downloads the shards of {self.url} has ended")
            if self._progress is None or progress != self._progress[0]:
                self._progress = progress, now_s
            if now_s - self._progress[1] > _STALL_S:
                self._end()
                raise ReadFailed(f"no byte of {self.url}/{missing[0].file} has arrived for {_STALL_S:g} s")
            if now_s > until_s:
                raise StillLoading(f"shards of {self.url}, which arrive more slowly than they are needed")
            if interrupted.wait(_POLL_S):
                raise InterruptedError

    def close(self) -> None:
        """End the process. What is wanted later starts another one."""
        self._wanted.clear()
        self._end()

    def _raise_failure(self, shard: Shard) -> None:
        failure = self._failed.get(shard.xxh3_128)
        if failure is None:
            return
        if failure["is_final"]:
            raise _unusable(self.url, shard, failure["cause"])
        del self._failed[shard.xxh3_128]
        raise ReadFailed(f"{self.url}/{shard.file}: {failure['cause']}")

    def _begin(self) -> None:
        process = self._process = DownloadProcess(self.url, self.cache)
        threading.Thread(target=self._listen, args=(process,), name="shards", daemon=True).start()
        for shard in list(self._wanted.values()):
            process.send({"want": shard.model_dump()})

    def _listen(self, process: DownloadProcess) -> None:
        for answer in process.answers():
            if "failed" in answer:
                self._failed[answer["failed"]] = answer

    def _end(self) -> None:
        process, self._process, self._progress = self._process, None, None
        if process is not None:
            process.end()


class StreamedFiles(PackedFiles):
    """The files of a split whose shards are at a URL; implements `Files`.

    Args:
        downloads: of this instance.
        budget_bytes: of the shards that are wanted at a time.
    """

    def __init__(
        self, downloads: Downloads, budget_bytes: int, shards: Tuple[Shard, ...], arrays: Dict[str, np.ndarray]
    ) -> None:
        super().__init__(downloads.cache.folder, shards, arrays)
        self._paths = [str(downloads.cache.path(shard)) for shard in shards]
        self._url, self._budget_bytes, self._shards = downloads.url, budget_bytes, shards
        self._downloads: Optional[Downloads] = downloads
        self._interrupted: Optional[threading.Event] = threading.Event()
        self._process = os.getpid()
        self._calls: Optional[_Calls] = None

    def __getstate__(self) -> Dict[str, Any]:
        """Return the state without what another process cannot use."""
        return {**super().__getstate__(), "_downloads": None, "_calls": None, "_interrupted": None}

    def begin(self) -> None:
        """See `Downloads.begin`."""
        assert self._downloads is not None
        self._downloads.begin(self._shards)

    def prepared(self, calls: Iterator[EpochSamples], behind: int) -> Iterator[EpochSamples]:
        """Yield the same calls, each when its shards are on this host; those of later calls are downloaded meanwhile.

        Args:
            behind: calls whose shards are kept although they were yielded, as their samples may not be read yet.

        Raises:
            ReadFailed, ConfigError: as `Downloads.wait`.
        """
        assert self._downloads is not None
        assert self._interrupted is not None
        if self._calls is not None:
            self._calls.release_all()
        self._calls = _Calls(self._downloads, self._shards, self._arrays["shards"], self._budget_bytes)
        return self._calls.prepared(calls, behind, self._interrupted)

    def interrupt(self) -> None:
        """End the waits of `prepared`, now and later, from another thread."""
        if self._interrupted is not None:
            self._interrupted.set()

    def close(self) -> None:
        """End the downloads."""
        if self._downloads is not None:
            self._downloads.close()

    def read(self, index: int) -> bytes:
        """See `PackedFiles.read`. A single sample of a shard that is not on this host comes from the URL."""
        shard = int(self._arrays["shards"][index])
        try:
            return super().read(index)
        except FileNotFoundError:
            if os.getpid() != self._process:  # that one downloads the shard when the call is asked for again
                raise OSError(errno.ESTALE, "its shard was removed from the cache", self._paths[shard]) from None
            return self._read_remote(shard, index)
        except OSError as error:
            if error.errno is not None:
                raise
            self._drop(shard)  # it was right when it was downloaded
            raise OSError(errno.EIO, f"{error}, by this disk") from error

    def name(self, index: int) -> str:
        shard = self._shards[int(self._arrays["shards"][index])]
        return self._named(index, f"{self._url}/{shard.file}")

    def _read_remote(self, shard: int, index: int) -> bytes:
        """Return a sample from the URL. ConfigError as `Downloads.wait`."""
        first, size, own = int(self._arrays["offsets"][index]), self.size(index), self._shards[shard]
        try:
            data: bytes = _tried(lambda: Store(self._url).read_range(own.file, first, size))
        except (FileNotFoundError, PermissionError) as error:
            raise _unusable(self._url, own, describe(error)) from None
        if len(data) != size:
            raise _unusable(self._url, own, f"it ends before byte {first + size}, expected {own.bytes} bytes")
        if shards.checksum_of_sample(data) != self.checksum(index):
            raise _unusable(self._url, own, f"the bytes of sample {index} have changed since it was packed")
        return data

    def _descriptor(self, shard: int) -> int:
        if shard not in self._open:
            for number, descriptor in list(self._open.items()):
                if not os.fstat(descriptor).st_nlink:  # removed to make room, which an open file still occupies
                    os.close(self._open.pop(number))
        return super()._descriptor(shard)

    def _drop(self, shard: int) -> None:
        """Close a shard, and remove it unless it was replaced already."""
        descriptor = self._open.pop(shard)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), Path(self._paths[shard]).stat()):
                Path(self._paths[shard]).unlink()
        os.close(descriptor)


class _Calls:
    """The calls of a split that are computed in advance, and the shards that are wanted for them."""

    def __init__(
        self, downloads: Downloads, shards: Tuple[Shard, ...], shard_of: np.ndarray, budget_bytes: int
    ) -> None:
        self._downloads, self._shards, self._shard_of = downloads, shards, np.asarray(shard_of)
        self._budget_bytes = budget_bytes
        self._uses: Dict[int, int] = collections.Counter()  # calls that need each wanted shard
        self._bytes = 0  # of the wanted shards

    def prepared(
        self, calls: Iterator[EpochSamples], behind: int, interrupted: threading.Event
    ) -> Iterator[EpochSamples]:
        """See `StreamedFiles.prepared`."""
        ahead: Deque[Tuple[EpochSamples, Set[int]]] = collections.deque()
        yielded: Deque[Set[int]] = collections.deque()
        upcoming = self._next(calls)
        try:
            while upcoming or ahead:
                while upcoming and not ahead and yielded and not self._fits(upcoming[1]):
                    self._release(yielded.popleft())
                while upcoming and len(ahead) < _MOST_CALLS and (not ahead or self._fits(upcoming[1])):
                    self._want(upcoming[1])
                    ahead.append(upcoming)
                    upcoming = self._next(calls)
                call, needed = ahead.popleft()
                self._downloads.wait([self._shards[number] for number in needed], interrupted)
                yielded.append(needed)
                yield call
                if len(yielded) > behind:
                    self._release(yielded.popleft())
        finally:
            self.release_all()

    def release_all(self) -> None:
        """Release the shards of all calls."""
        for number in list(self._uses):
            self._downloads.release(self._shards[number])
        self._uses.clear()
        self._bytes = 0

    def _next(self, calls: Iterator[EpochSamples]) -> Optional[Tuple[EpochSamples, Set[int]]]:
        for call in calls:
            return call, set(np.unique(self._shard_of[call[1]]).tolist())
        return None

    def _fits(self, needed: Set[int]) -> bool:
        more = sum(self._shards[number].bytes for number in needed if not self._uses[number])
        return self._bytes + more <= self._budget_bytes

    def _want(self, needed: Set[int]) -> None:
        for number in sorted(needed):
            if not self._uses[number]:
                self._bytes += self._shards[number].bytes
                self._downloads.want(self._shards[number])
            self._uses[number] += 1

    def _release(self, needed: Set[int]) -> None:
        for number in needed:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
                self._bytes -= self._shards[number].bytes
                self._downloads.release(self._shards[number])


class StreamedShards:
    """What `raypod pack` has written, at a URL. ConfigError if it cannot be read, or does not fit into the cache.

    Attributes:
        index: the content of index.json.
    """

    def __init__(self, config: Config) -> None:
        data = config.data
        assert data.data_dir is not None
        check_scheme(data.data_dir, "--data-dir", writes=False)
        self._url, self._window = data.data_dir, data.shuffle_window
        chosen = data.cache_dir or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "raypod")
        self.cache = ShardCache(Path(chosen).expanduser() / "shards", parse_size(data.cache_size))
        problem = why_not_own(str(self.cache.folder))
        if problem:
            raise ConfigError(f"--cache-dir {chosen}: {problem}; choose another folder")
        self._store, self._downloads = Store(self._url), Downloads(self._url, self.cache)
        path = f"{self._url}/{shards.INDEX}"
        content = self._try(path, lambda: self._store.read(shards.INDEX))
        if content is None:
            raise ConfigError(f"there is no {path}: --data-dir needs the URL of what `raypod pack` has written")
        self.index: Index = shards.parse_index(content, path)
        self._check_cache()

    def __str__(self) -> str:
        return self._url

    def arrays(self) -> Dict[str, np.ndarray]:
        """Return the arrays of the index, as `shards.read_arrays`; they are downloaded once per host."""
        return {name: self._array(name) for name in shards.array_names(self.index)}

    def file(self, shard: Shard) -> Path:
        """Return where a shard is on this host, after it was downloaded. ConfigError if it cannot be read."""
        kept = {each.xxh3_128 for each in self.index.shards}
        self._try(f"{self._url}/{shard.file}", lambda: self.cache.fetch(self._store, shard, kept))
        return self.cache.path(shard)

    def files(self, split: str, arrays: Dict[str, np.ndarray]) -> StreamedFiles:
        """Return the files of a split."""
        reserved = _reserved_bytes(self.index)
        budget = reserved if split == "test" else self.cache.limit_bytes - reserved
        return StreamedFiles(self._downloads, budget, *shards.columns_of(self.index, split, arrays))

    def notes(self, config: Config) -> List[str]:
        """Return lines about the shards for the plan."""
        size = shards.bytes_of(self.index)
        lines = [
            f"{len(self.index.shards)} shards ({shown_bytes(size)}) at {self._url}; each host keeps up to "
            f"{config.data.cache_size} of them in {self.cache.folder}"
        ]
        return [*lines, *shards.window_notes(self.index, config.data.shuffle_window)]

    def _check_cache(self) -> None:
        """Raise ConfigError if the shards that are needed at a time do not fit into the cache."""
        if self.index.text is not None:
            if shards.bytes_of(self.index) > self.cache.limit_bytes:
                raise ConfigError(
                    f"--cache-size {shown_bytes(self.cache.limit_bytes)} is too small for the text of {self._url}, "
                    f"which every host keeps whole: it has {shown_bytes(shards.bytes_of(self.index))}"
                )
            return
        assert self._window is not None  # that of the configuration, with a URL
        windows = shards.window_bytes(self.index, 2 * self._window)
        needed = windows + _reserved_bytes(self.index)
        if needed > self.cache.limit_bytes:
            raise ConfigError(
                f"--cache-size {shown_bytes(self.cache.limit_bytes)} is too small for two windows of "
                f"--shuffle-window {self._window} shards, and {_TEST_SHARDS} test shards: they have "
                f"{shown_bytes(needed)}; give a larger cache or a smaller window"
            )

    def _array(self, name: str) -> np.ndarray:
        file = f"{shards.ARRAYS}/{name}.npy"
        if name not in self.index.arrays:
            raise ConfigError(f"{self._url}: its index has no {file}; copy it again, or pack again")
        shard = Shard(file=file, bytes=0, xxh3_128=self.index.arrays[name])
        self._try(f"{self._url}/{file}", lambda: self.cache.fetch(self._store, shard))
        try:
            return load_mapped(self.cache.path(shard))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.cache.path(shard)}, {name} of {self._url}: {error}") from None

    def _try(self, path: str, action: Callable[[], Any]) -> Any:
        try:
            return _tried(action)
        except ConfigError:  # of the cache
            raise
        except Exception as error:  # noqa: BLE001 - storage libraries raise many exception types
            cause = str(error) if isinstance(error, DamagedShard) else describe(error)
            raise ConfigError(f"--data-dir: cannot read {path}: {cause}") from None


Packed = Union[shards.PackedFolder, StreamedShards]  # what `raypod pack` has written


def _unusable(url: str, shard: Shard, cause: str) -> ConfigError:
    return ConfigError(
        f"cannot use the shard {url}/{shard.file}: {cause}; upload it again, or see whether this host may read it"
    )


def _reserved_bytes(index: Index) -> int:
    """Return the bytes of the cache that are kept for the test split."""
    return sum(sorted((shard.bytes for shard in index.test.shards), reverse=True)[:_TEST_SHARDS])


def _tried(action: Callable[[], Any]) -> Any:
    """Return what an action returns; repeat it a few times if the storage fails."""
    final = (FileNotFoundError, PermissionError, DamagedShard, ConfigError)
    pauses = growing(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    return retried(action, pauses, lambda error: not isinstance(error, final), _ATTEMPTS)
