"""One popdist instance: the PopTorch program that runs in each process of a run.

The environment (POPDIST_*, see plan/environment.py) and the SDK (see system/sdk.py) must be set up before this module
is imported. The fleet calls its methods; results are returned as records (events.py), and nothing is printed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import horovod.torch as hvd
import numpy as np
import poptorch
import torch

from raypod.errors import CollectiveBroken
from raypod.events import CallReport, EvaluationReport, InstanceStarted, ProcessSpans, SaveReport
from raypod.plan import ipu_options
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Plan, Segment, window_of
from raypod.runtime.worker import devices
from raypod.runtime.worker.collectives import ProcessGroup
from raypod.runtime.worker.control import ATTACHING, LOADING, SNAPSHOT, Heartbeat, StopGate
from raypod.runtime.worker.replica_model import EvaluationSums, ReplicaModel, ScheduledRate
from raypod.runtime.worker.seeding import Endpoint, Seeding, SeedingPeer
from raypod.runtime.worker.training_state import RandomStates, Snapshots, TrainingState
from raypod.system.process import StepTimer, sources_digest, versions
from raypod.system.sdk import Sdk, telemetry
from raypod.system.spans import recorder
from raypod.training.checkpoint import snapshots, tensors
from raypod.training.checkpoint.format import Checkpoint, Manifest
from raypod.training.checkpoint.snapshots import Place
from raypod.training.checkpoint.transfer import Server
from raypod.training.checkpoint.writer import BackgroundWriter, State, load_or_fetch
from raypod.training.data.feed import Feed
from raypod.training.data.loading import timed
from raypod.training.data.source import Source
from raypod.training.models import norms, program
from raypod.training.models.predictions import Predictions, measured
from raypod.training.tasks.registry import task_of_plan
from raypod.training.tasks.task import Task


def load_data(plan: Plan) -> Tuple[Task, Source]:
    """Return the task of a plan and its data."""
    task = task_of_plan(plan)
    return task, task.load()


class Instance:
    """The replicas of one host process, with their model, optimizer and feed. Call `build` first."""

    reset_devices = staticmethod(devices.reset)

    def __init__(self, plan: Plan, index: int, sdk: Sdk) -> None:
        self._plan, self._spec, self._sdk = plan, plan.placement.instances[index], sdk
        self._gate = StopGate(plan.config.run.report_timeout_s)
        self.heartbeat = Heartbeat(index, reports_host=self._spec.local_index == 0)
        self._update = self._host_update = -1  # of the weights on the device and on the host; -1: not trained yet
        self._feed: Optional[Feed] = None
        self._poptorch_models: List[Any] = []
        self._rate = ScheduledRate(plan)
        self._random_states = RandomStates(plan, index, hvd.allgather_object)
        self._group = ProcessGroup(plan.placement.cluster.data_network)
        self._seeding_peer: Optional[SeedingPeer] = None
        self._saves: Optional[BackgroundWriter] = None  # only in instance 0
        self._snapshots = Snapshots(None)
        self._is_evaluation_abandoned = False
        self._guard, self._timer = devices.CallGuard(), StepTimer()
        self._profile = Profile(plan, self._spec)
        self._cache = devices.executable_folder(plan, sdk)

    def build(self, loaded: Optional[Tuple[Task, Source]] = None) -> InstanceStarted:
        """Build model, optimizer and options. The run starts from the weights of instance 0.

        `loaded` is the result of `load_data`, which is called if it is None.
        """
        plan = self._plan
        torch.set_num_threads(self._spec.threads_per_replica)
        self._timer.begin()
        task, source = loaded or load_data(plan)
        self._task = task
        pause = functools.partial(self._gate.wait_to_load, heartbeat=self.heartbeat)
        self._feed = Feed(plan, self._spec, source, pause, in_processes=self._sdk.holds_interpreter_lock)
        self._timer.end("load data")
        if self._spec.index == 0:
            torch.manual_seed(plan.config.training.seed)
            self._saves = BackgroundWriter(plan)
        first_batch = source.first_batch(plan.config.training.seed)
        self._model = model = ReplicaModel(plan, task, first_batch)
        if self._spec.index == 0:
            model.check_evaluation(plan, task, first_batch)
        options = program.training_options(plan, self._cache)
        self._training = poptorch.trainingModel(model.training_step, options, model.optimizer)
        self._inference = poptorch.inferenceModel(model.evaluation_step, program.inference_options(plan, self._cache))
        self._poptorch_models = [self._training, self._inference]
        self._state = TrainingState(model, self._training, self._random_states)
        self._norms = norms.NormMeter(plan, model.network, self._training)
        self._timer.end("build model")
        return InstanceStarted(
            instance=self._spec.index,
            host=self._spec.host,
            pid=os.getpid(),
            device=self._sdk.device,
            device_line=self._sdk.line + ipu_options.without_effect(plan.config, self._sdk.has_ipus),
            parameters=sum(parameter.numel() for parameter in model.network.parameters()),
            seconds=tuple(self._timer.steps),
            data_fingerprint=source.fingerprint,
            versions=versions(),
            sources=sources_digest(),
        )

    def data_address(self) -> Optional[str]:
        """Return this host's address in the data network; see `ProcessGroup.data_address`."""
        return self._group.data_address()

    def open_rendezvous(self, address: str, generation: int) -> Dict[str, str]:
        """Open the rendezvous of a generation at `address`, this host's; return the environment to connect to it."""
        return self._group.open_rendezvous(address, generation)

    def join(self, environment: Dict[str, str]) -> None:
        """Join the process group of all instances.

        Without `popdist.init`, which initializes MPI on IPUs: that needs mpirun, and a repair cannot repeat it. The
        collectives are Horovod's, and `popdist.poptorch.Options` reads the environment.
        """
        devices.remove_stale_locks(self._cache)
        self._group.configure(environment)
        hvd.init()

    def leave(self) -> int:
        """Leave the process group after an instance was lost; return the update of the state kept here, -1 for none.

        The weights and the replica state are read back and the device is released, so that this process can `join`
        again with its compiled model. If the device cannot be read, the host's last copy is kept. RuntimeError if it
        cannot be released, or failed in a call.
        """
        self._gate = StopGate(self._plan.config.run.report_timeout_s)
        self._model.train()
        state = None
        try:
            self._guard.check()
            state = program.read_replica_state(self._training)
            devices.detach(self._poptorch_models)
            self._host_update = self._update
            self._model.average_after(self._update)
        except poptorch.Error as error:
            devices.check_released(self._poptorch_models, error)
            self._update = self._host_update
        program.copy_replica_0_buffers(self._model.training_step.named_buffers(), state)
        program.load_replica_state(self._training, state)
        hvd.shutdown()
        self._group.leave()
        return self._update

    def lost_reports(self, missing: Sequence[Tuple[int, int]]) -> List[CallReport]:
        """Return the reports of (first update of the call, instance) whose results the replicas' buffers here have."""
        return list(self._model.lost_reports(self._training, missing))

    def abort_collectives(self) -> None:
        """End a segment, an evaluation and every wait for other instances, from another thread: one is lost."""
        self._gate.stop_after(0)
        if self._seeding_peer is not None:
            self._seeding_peer.abort()
        self._group.abort()

    def open_seeding(self) -> Endpoint:
        """Listen for the next broadcast of the weights; return the endpoint."""
        timeout_s = self._plan.config.run.start_timeout_s
        self._seeding_peer = SeedingPeer(self._spec.index, self._spec.host, self._group.address, timeout_s)
        return self._seeding_peer.endpoint

    def load_checkpoint(
        self, root: int, checkpoint: Checkpoint, identity: Tuple[int, ...], server: Optional[Server] = None
    ) -> bool:
        """Load a checkpoint in instance `root`; return whether that is done here. See `writer.load_or_fetch`."""
        if self._spec.index != root:
            return False
        state = load_or_fetch(checkpoint, identity, server, self._plan.config.run.save_timeout_s)
        if state is not None:
            self._load_state(state)
        return state is not None

    def load_weights(self, flat: np.ndarray) -> str:
        """Load weights alone, for an evaluation; return their hash. See `ReplicaModel.load_weights`."""
        return self._model.load_weights(flat)

    def load_initial_weights(self) -> None:
        """Load the file of `--init-weights` in instance 0. ConfigError as `initial_weights.load`."""
        if self._spec.index == 0:
            self._model.load_initial_weights(self._plan)

    def keep_snapshots(self, places: Sequence[Optional[Place]]) -> None:
        """Write the snapshots to the place of this instance, by index; None: another one of its host writes them."""
        self._snapshots = Snapshots(places[self._spec.index])

    def load_snapshot(self, root: int, place: Place, update: int) -> None:
        """Load the snapshot after `update` updates in instance `root`. OSError if it cannot be read."""
        if self._spec.index == root:
            self._load_state(tensors.unpack_flat(snapshots.read(place, update)))

    def seed_weights(self, seeding: Seeding) -> str:
        """Broadcast the root's weights and optimizer state to the receivers; return the hash of this one's weights.

        All other instances keep their state.
        """
        assert self._seeding_peer is not None, "call open_seeding first"
        with contextlib.closing(self._seeding_peer) as peer:
            if self._spec.index == seeding.root:
                peer.send(seeding, tensors.pack_flat({**self._state.of_host(), "update": self._update}))
            elif self._spec.index in seeding.receivers:
                self._load_state(tensors.unpack_flat(peer.receive(seeding)))
        return self._model.weights_sha256()

    def run(self, segment: Segment) -> Iterator[CallReport]:
        """Run a segment; yield a report after each call."""
        assert self._feed is not None, "call build first"
        device_iterations = self._plan.geometry.device_iterations
        first_call = segment.first_update // device_iterations
        self._update = segment.first_update
        self._model.begin_average_at(self._update)
        self._profile.begin_call(segment.first_update)
        self._norms.begin(self._read_back)
        batches = timed(self._feed.calls(segment), lambda: self.heartbeat.set_activity(LOADING))
        for number, (batch, wait_s) in enumerate(batches):
            if not self._gate.enter(first_call + number):
                return
            update = segment.first_update + number * device_iterations
            self._rate.set(self._training, self._model.optimizer, update)
            began, peer_wait_before = time.monotonic(), telemetry.peer_wait_s()
            self._attach()
            with self.heartbeat.in_call(first_call + number), self._guard:
                digest = self._feed.samples_digest()
                inputs = (*batch, *self._model.call_words(update, digest))
                self._random_states.compile(self._training, inputs)
                outputs = self._training(*inputs)
            self._update = update + device_iterations
            if self._model.is_averaged_after(self._update) or self._norms.reads_weights:
                self._read_back()
                self._model.average_after(self._update)
            call_s, peer_wait_s = wait_s + time.monotonic() - began, telemetry.peer_wait_s()
            peer_wait_s = None if peer_wait_s is None else peer_wait_s - (peer_wait_before or 0.0)
            yield CallReport(
                instance=self._spec.index,
                first_update=update,
                sums=self._model.sums(outputs),
                saves=self._saves.take_reports() if self._saves is not None else (),
                samples_digest=digest,
                data_wait_s=wait_s,
                call_s=call_s,
                peer_wait_s=peer_wait_s,
                profile=self._profile.end_call(self._update),
                norms=self._norms.after_call(),
            )
            # After the report, so that the coordinator has those of the updates in a snapshot.
            if self._plan.config.run.has_snapshot_after(self._update):
                with self.heartbeat.set_activity(SNAPSHOT), self._guard:
                    self._read_back()
                    self._snapshots.take(self._update, self._state)

    def take_profile(self) -> ProcessSpans:
        """Return what was recorded for the profile since the last report."""
        return self._profile.take()

    def pause(self) -> int:
        """Start no more calls until `stop_after`; return the number of calls started since the beginning of the run."""
        return self._gate.pause()

    def reopen(self) -> None:
        """Allow calls again after a stopped segment."""
        self._gate.reopen()

    def stop_after(self, calls: int) -> None:
        """End the segment after `calls` calls of the run. All instances must get the same number."""
        self._gate.stop_after(calls)

    def abandon_evaluation(self) -> None:
        """End an evaluation after its current call, from another thread; its report is incomplete."""
        self._is_evaluation_abandoned = True

    def end_loading(self) -> None:
        """Do not wait for the data of a call that may not start, from another thread. This is the end of the run."""
        if self._feed is not None and self._gate.is_over:
            self._feed.interrupt()

    def evaluate(self, is_abandoned: Callable[[], bool] = lambda: False) -> EvaluationReport:
        """Evaluate this instance's share of the test split, with the BatchNorm statistics of global replica 0."""
        assert self._feed is not None, "call build first"
        self._read_back()
        hvd.broadcast_parameters(self._model.buffers(), root_rank=0)
        state = program.read_replica_state(self._training)
        devices.detach(self._poptorch_models)  # PopTorch gives a model new weights only as it attaches
        program.load_replica_state(self._training, state)
        # PopTorch compiles a model in the mode (train or eval) that its network has then, and both share the network.
        self._model.network.eval()
        sums, predictions = EvaluationSums(2 * len(self._plan.task.metrics)), Predictions(self._plan.task)
        with self._model.evaluated_weights():
            for batch, valid in self._feed.evaluation_calls():
                if self._is_evaluation_abandoned or is_abandoned():
                    break
                if self._gate.is_closed:  # a long evaluation must not delay the repair; it is repeated afterwards
                    raise CollectiveBroken(self._spec.index, "the evaluation was aborted")
                sums.add(predictions.add(self._inference(*batch), valid))
            devices.detach(self._poptorch_models)
        self._model.train()
        is_whole = not self._is_evaluation_abandoned and not is_abandoned()
        return sums.report(self._spec.index, predictions.arrays(self._feed.evaluation_samples()) if is_whole else None)

    def prediction_metrics(self, predictions: Mapping[str, Any]) -> Tuple[Dict[str, float], Any]:
        """Return the test metrics and the details of the predictions for all test samples; see `Task`."""
        return measured(self._task, self._plan.task, predictions)

    def save(self, manifest: Manifest) -> None:
        """Read the state back, in all instances; instance 0 copies it and writes it in the background."""
        self._read_back()
        state = self._state.gather(is_needed=self._saves is not None)
        if self._saves is not None and state is not None:
            self._saves.begin(self._model.recorded(manifest, self._training), State(**state))

    def save_kept(self, manifest: Manifest, server: Optional[Server]) -> Tuple[SaveReport, ...]:
        """Write the state that `leave` has kept, in any instance; return the reports not returned yet."""
        self._saves = self._saves or BackgroundWriter(self._plan)
        if server is not None:
            self._saves.send_to(server)
        self._saves.begin(self._model.recorded(manifest, self._training), State(**self._state.of_host()))
        return self._saves.finish()

    def has_file(self, path: str) -> bool:
        """Return whether a file exists on this host."""
        return Path(path).exists()

    def send_checkpoints_to(self, server: Server) -> None:
        """Send the checkpoints to a `CheckpointReceiver`, instead of writing them on this host."""
        if self._saves is not None:
            self._saves.send_to(server)

    def finish_saves(self) -> Tuple[SaveReport, ...]:
        """Wait for the checkpoint that is being written; return the reports not returned yet."""
        return self._saves.finish() if self._saves is not None else ()

    def close(self) -> None:
        """Leave the process group and release everything that this instance started."""
        if self._saves is not None:
            self._saves.close()
        if self._feed is not None:
            self._feed.close()
        self._guard.destroy(self._poptorch_models)
        hvd.shutdown()
        self._group.close()
        self._profile.close()

    def _load_state(self, state: Dict[str, Any]) -> None:
        self._update = self._host_update = -1  # there is no state until all of it is loaded
        self._state.load(state)
        self._rate.is_set = False
        self._update = self._host_update = state.get("update", -1)
        self._model.begin_average_at(self._update)

    def _attach(self) -> None:
        """Attach the device again. The first call does that itself, after its compilation."""
        if self._training.isCompiled() and not self._training.isAttachedToDevice():
            with self.heartbeat.set_activity(ATTACHING), self._guard:
                self._training.attachToDevice()

    def _read_back(self) -> None:
        # With remote buffers this is a collective, so every instance calls it, even if only one needs the weights.
        if self._training.isCompiled():
            self._training.copyWeightsToHostIfNeeded()
            self._host_update = self._update


class Profile:
    """Turns the recorder of this process on for the calls of the window.

    It is also on before the first segment, so that the profile shows the start of the instance, and after the last
    update of the run if the window contains that.
    """

    def __init__(self, plan: Plan, spec: InstanceSpec) -> None:
        self._spec, self._window = spec, window_of(plan)
        self._is_last = self._window is not None and self._window.stop == plan.total_updates
        self._was_on = False
        recorder.reset(is_on=self._window is not None)
        if self._window is not None:
            telemetry.listen(recorder)

    def begin_call(self, update: int) -> None:
        """Turn the recorder on or off for what follows: the call that begins at `update` (0-based)."""
        if self._window is not None:
            recorder.is_on = self._was_on = update in self._window or (self._is_last and update >= self._window.stop)

    def end_call(self, next_update: int) -> Optional[ProcessSpans]:
        """Return the spans of a call in the window, and `begin_call` the next one."""
        if self._window is None:
            return None
        was_on = self._was_on
        self.begin_call(next_update)
        return self.take(with_open=not self._was_on) if was_on else None

    def take(self, with_open: bool = True) -> ProcessSpans:
        """Return the spans since the previous time."""
        spans, dropped = recorder.take(with_open)
        return ProcessSpans(self._spec.index, self._spec.host, os.getpid(), spans, dropped)

    def close(self) -> None:
        """Turn the recorder off, and forget what it holds."""
        recorder.reset(is_on=False)
