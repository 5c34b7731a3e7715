"""Writes checkpoints beside the training: a copy is taken between two calls, and a thread writes it. One at a time."""

from __future__ import annotations

import threading
from typing import List, Optional, Tuple

import torch

from raypod.checkpoint import folder, writer
from raypod.checkpoint.manifest import Manifest
from raypod.checkpoint.tensors import copied
from raypod.checkpoint.writer import State
from raypod.errors import WaitTimedOut
from raypod.events import SaveReport
from raypod.plan import Plan


class BackgroundWriter:
    """The checkpoints of one run folder, written by instance 0."""

    def __init__(self, plan: Plan) -> None:
        self._checkpoints = folder.folder_of(plan.run_dir)
        run = plan.config.run
        self._keep, self._timeout_s = run.keep_checkpoints, run.save_timeout_s
        self._grace_s = run.stop_timeout_s
        # From weights that are no numbers any more nobody can go on; the checkpoint before them is worth more.
        self._only_finite = run.on_nonfinite == "stop"
        self._thread: Optional[threading.Thread] = None
        self._done: List[SaveReport] = []

    def begin(self, manifest: Manifest, state: State) -> None:
        """Copy the state and write the copy, after the write under way if there is one.

        Raises:
            WaitTimedOut: that one does not end.
        """
        copy = State(copied(state.weights), copied(state.optimizer), copied(state.replicas))
        self._join()
        # A daemon: the second Ctrl-C does not wait for a disk, and what it cuts off is no checkpoint.
        self._thread = threading.Thread(target=self._write, args=(manifest, copy), name="checkpoint", daemon=True)
        self._thread.start()

    def taken(self) -> Tuple[SaveReport, ...]:
        """What has become of checkpoints since the last look."""
        done: List[SaveReport] = []
        while self._done:
            done.append(self._done.pop(0))
        return tuple(done)

    def finish(self) -> Tuple[SaveReport, ...]:
        """Wait for the write under way; as `taken`. WaitTimedOut if it does not end."""
        self._join()
        return self.taken()

    def close(self) -> None:
        """Give the write under way a moment to end: if it does not, it is no checkpoint."""
        if self._thread is not None:
            self._thread.join(self._grace_s)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise WaitTimedOut(f"a checkpoint to be written in {self._checkpoints}", self._timeout_s, _SETTING)
            self._thread = None

    def _write(self, manifest: Manifest, state: State) -> None:
        path = str(self._checkpoints / folder.name_of(manifest.update))
        try:
            turned = _not_finite(state) if self._only_finite else None
            if turned is not None:
                self._done.append(SaveReport(manifest.update, path, "", f"{turned} is not finite"))
                return
            written = writer.write(self._checkpoints, manifest, state, self._keep)
            self._done.append(SaveReport(manifest.update, str(written.path), written.manifest.weights_sha256, None))
        except Exception as error:  # noqa: BLE001 - the thread's border: whatever it is, the run hears of it
            told = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._done.append(SaveReport(manifest.update, path, "", told))


_SETTING = "run.save_timeout_s"


def _not_finite(state: State) -> Optional[str]:
    for name, tensor in state.weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
