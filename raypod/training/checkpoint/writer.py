"""Write checkpoints atomically, in a background thread: a checkpoint is complete or absent, and never damages another.

The order of steps guarantees this: write all files into a temporary folder and flush each to disk, write the manifest
that describes them, rename the folder, update `LATEST`, and only then remove older checkpoints. Other threads compute
the hashes meanwhile, from the tensors in memory.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Tuple, Union

import torch

from raypod.errors import WaitTimedOut
from raypod.events import SaveReport
from raypod.plan.plan import Plan
from raypod.system import spans
from raypod.system.files import NewFile
from raypod.system.retries import is_passing_write
from raypod.training.checkpoint import format, storage, tensors
from raypod.training.checkpoint.format import (
    EMA,
    OPTIMIZER,
    REPLICAS,
    WEIGHTS,
    Checkpoint,
    FileRecord,
    Manifest,
    Retention,
)
from raypod.training.checkpoint.transfer import CheckpointSender, Server, fetch

_HASHING_THREADS = 2  # one for the SHA-256 of the weights, which takes longest, one for the files
_CHECKED_VALUES = 1 << 16  # at a time: `torch.isfinite` allocates more memory than its argument has


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a training."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Any  # nested, see tensors.pack_nested
    ema: Optional[Mapping[str, torch.Tensor]] = None  # the averaged weights
    replicas: Any = None  # per-replica statistics and random states; None if the SDK does not expose them


def write_checkpoint(checkpoints: Path, manifest: Manifest, state: State, kept: Retention) -> Checkpoint:
    """Write a checkpoint of CPU tensors that do not change meanwhile, and remove those that are not kept.

    Raises:
        OSError: the file system's own, for example on a full disk. Partial files are removed.
    """
    with storage.new_checkpoint(checkpoints, manifest.update) as partial:
        manifest = _write_files(lambda name: storage.new_file(partial, name), manifest, state)
        storage.write_manifest(partial, manifest)
    storage.remove_old(checkpoints, kept)
    return Checkpoint(storage.checkpoint_path(checkpoints, manifest.update), manifest)


def send_checkpoint(server: Server, manifest: Manifest, state: State, kept: Retention, timeout_s: float) -> Checkpoint:
    """Do the same on the host of a `CheckpointReceiver`, within a timeout.

    Raises:
        OSError: that of the other host's file system, or the host does not respond. No checkpoint is left there.
    """
    sender = CheckpointSender(server, manifest.update, timeout_s)
    return sender.commit(_write_files(sender.new_file, manifest, state), kept)


def load_checkpoint(path: Union[str, Path]) -> Dict[str, Any]:
    """Return the state of a checkpoint: `weights`, `optimizer`, and `ema` and `replicas` (None if it has none).

    Raises:
        CheckpointDamaged: a file is missing, truncated or not a checkpoint file.
    """
    path = Path(path)
    ema, replicas = path / EMA, path / REPLICAS
    return {
        "weights": tensors.read_tensors(path / WEIGHTS)[0],
        "optimizer": tensors.read_nested(path / OPTIMIZER),
        "ema": tensors.read_tensors(ema)[0] if ema.exists() else None,
        "replicas": tensors.read_nested(replicas) if replicas.exists() else None,
    }


def load_or_fetch(
    checkpoint: Checkpoint, identity: Tuple[int, ...], server: Optional[Server], timeout_s: float
) -> Optional[Dict[str, Any]]:
    """Return the state of a checkpoint of the coordinator's host as `load_checkpoint`.

    If this host shares the disk with it, which `storage.identity` shows, the checkpoint is read from there. Otherwise
    `server`, a `CheckpointFiles`, sends the files within a timeout. Returns None if that is needed and it is None.

    Raises:
        CheckpointDamaged: as `load_checkpoint`, or a file differs from its record in the manifest.
        OSError: that of the file system for temporary files, or the coordinator's host does not respond.
    """
    if server is None:
        is_here = storage.is_checkpoint(checkpoint.path) and storage.identity(checkpoint.path) == identity
        return load_checkpoint(checkpoint.path) if is_here else None
    with tempfile.TemporaryDirectory(prefix="raypod-") as folder:
        fetch(server, checkpoint, Path(folder), timeout_s)
        return load_checkpoint(folder)


class BackgroundWriter:
    """Writes the checkpoints of one run folder in a thread, one at a time. Used by instance 0."""

    def __init__(self, plan: Plan) -> None:
        self._checkpoints = storage.checkpoints_folder(plan.run_dir)
        run = plan.config.run
        self._kept, self._timeout_s = Retention(run.keep_checkpoints, plan.best_metric), run.save_timeout_s
        self._close_timeout_s = run.stop_timeout_s
        # A checkpoint with NaN weights must not replace the finite one before it.
        self._require_finite = plan.config.stops_if_not_finite
        self._server: Optional[Server] = None
        self._thread: Optional[threading.Thread] = None
        self._reports: List[SaveReport] = []

    def send_to(self, server: Server) -> None:
        """Send all further checkpoints to a `CheckpointReceiver`, instead of writing them on this host."""
        self._server = server

    def begin(self, manifest: Manifest, state: State) -> None:
        """Copy the state and start writing the copy, after the previous write has ended.

        Raises:
            WaitTimedOut: the previous write does not end.
        """
        copy = State(*map(tensors.copy_to_cpu, (state.weights, state.optimizer, state.ema, state.replicas)))
        self._join()
        # A daemon thread: exit does not wait for a slow disk, and an interrupted write leaves no checkpoint.
        thread = threading.Thread(target=self._run, args=(manifest, copy), name="checkpoint", daemon=True)
        thread.start()  # a lost lease can interrupt it: a thread that has not started cannot be joined
        self._thread = thread

    def take_reports(self) -> Tuple[SaveReport, ...]:
        """Return and clear the reports of writes that have ended."""
        taken: List[SaveReport] = []
        while self._reports:
            taken.append(self._reports.pop(0))
        return tuple(taken)

    def finish(self) -> Tuple[SaveReport, ...]:
        """Wait for the current write, then `take_reports`. WaitTimedOut if it does not end."""
        self._join()
        return self.take_reports()

    def close(self) -> None:
        """Wait for the current write for a limited time; if it does not end, it leaves no checkpoint."""
        if self._thread is not None:
            self._thread.join(self._close_timeout_s)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                what = f"a checkpoint to be written in {self._checkpoints}"
                raise WaitTimedOut(what, self._timeout_s, "run.save_timeout_s")
            self._thread = None

    def _run(self, manifest: Manifest, state: State) -> None:
        with spans.measured(f"write the checkpoint of update {manifest.update}", "save"):
            self._write(manifest, state)

    def _write(self, manifest: Manifest, state: State) -> None:
        path = str(storage.checkpoint_path(self._checkpoints, manifest.update))
        try:
            nonfinite = _first_nonfinite(state) if self._require_finite else None
            if nonfinite is not None:
                self._reports.append(SaveReport(manifest.update, path, "", f"{nonfinite} is not finite"))
                return
            if self._server is None:
                written = write_checkpoint(self._checkpoints, manifest, state, self._kept)
            else:
                written = send_checkpoint(self._server, manifest, state, self._kept, self._timeout_s)
            manifest = written.manifest
            report = SaveReport(manifest.update, str(written.path), manifest.weights_sha256, None, manifest.ema_sha256)
            self._reports.append(report)
        except Exception as error:  # noqa: BLE001 - the thread's top level: every error becomes a report
            cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._reports.append(SaveReport(manifest.update, path, "", cause, can_pass=is_passing_write(error)))


def _write_files(new_file: Callable[[str], ContextManager[NewFile]], manifest: Manifest, state: State) -> Manifest:
    """Write the tensor files; return the manifest with their records and the hash of the weights."""
    contents = {
        WEIGHTS: tensors.TensorFile(state.weights, {}),
        OPTIMIZER: tensors.TensorFile(*tensors.pack_nested(state.optimizer)),
    }
    if state.ema is not None:
        contents[EMA] = tensors.TensorFile(state.ema, {})
    if state.replicas is not None:
        contents[REPLICAS] = tensors.TensorFile(*tensors.pack_nested(state.replicas))
    algorithms = {name: format.algorithm_for(content.size_bytes) for name, content in contents.items()}
    with ThreadPoolExecutor(_HASHING_THREADS, "checkpoint-hash") as pool:
        sha256 = pool.submit(tensors.weights_sha256, state.weights)
        ema = pool.submit(tensors.weights_sha256, state.ema) if state.ema is not None else None
        digests = {name: pool.submit(format.digest_of, content, algorithms[name]) for name, content in contents.items()}
        try:
            for name, content in contents.items():
                with new_file(name) as file:
                    for buffer in content:
                        file.write(buffer)
        except BaseException:
            for each in digests.values():
                each.cancel()
            raise
    records = {
        name: FileRecord(content.size_bytes, **{algorithms[name]: digests[name].result()})
        for name, content in contents.items()
    }
    ema_sha256 = ema.result() if ema is not None else None
    return dataclasses.replace(manifest, files=records, weights_sha256=sha256.result(), ema_sha256=ema_sha256)


def _first_nonfinite(state: State) -> Optional[str]:
    for name, tensor in state.weights.items():
        if tensor.is_floating_point():
            values = tensor.reshape(-1)
            if not all(bool(torch.isfinite(part).all()) for part in torch.split(values, _CHECKED_VALUES)):
                return name
    return None
