"""One popdist instance: the plain PopTorch program that each process of a run carries out.

It reads as a Graphcore user would write it; the environment (POPDIST_*, see environment.py) and the SDK (see sdk.py)
are settled before this module is imported. Whoever runs it (fleet/) calls its methods; it reports and never prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import horovod.torch as hvd
import popdist
import poptorch
import torch
from torch.nn import functional

from raypod import datasets
from raypod.checkpoint import tensors, writer
from raypod.checkpoint.format import Manifest
from raypod.checkpoint.writer import BackgroundWriter
from raypod.datasets import order
from raypod.datasets.feed import Feed
from raypod.datasets.loading import timed
from raypod.datasets.transforms import device_input
from raypod.events import CallReport, EvaluationReport, InstanceStarted, SaveReport
from raypod.host.interfaces import address_in, address_towards, interface_of
from raypod.host.process import versions
from raypod.host.sdk import Sdk
from raypod.instance import collectives
from raypod.instance.collectives import Rendezvous, horovod_door, horovod_interface, uses_installed_horovod
from raypod.instance.control import Pulse, StopGate
from raypod.instance.horovod_rendezvous import HorovodDoor
from raypod.instance.seeding import Place, Seeding, SeedingEnd
from raypod.model import networks, program
from raypod.model.program import (
    build_optimizer,
    inference_options,
    learning_rate,
    load_optimizer_state,
    training_options,
)
from raypod.plan.plan import Leg, Plan


class Instance:
    """The replicas of one host process, their model, optimizer and feed."""

    def __init__(self, plan: Plan, index: int, sdk: Sdk) -> None:
        self._plan, self._spec, self._sdk = plan, plan.instances[index], sdk
        self._gate = StopGate(plan.config.run.report_timeout_s)
        self.pulse = Pulse(index)
        self._update = self._host_update = -1  # after which the device's weights are, and the host's; -1: of no run yet
        self._feed: Optional[Feed] = None
        self._models: List[Any] = []  # that hold a device
        self._optimizer_is_set = True  # its values are those that the device has, or will be compiled with
        self._rendezvous: Optional[Rendezvous] = None
        self._seeding_end: Optional[SeedingEnd] = None
        self._horovod_door: Optional[HorovodDoor] = None  # of an installed Horovod
        self._saves: Optional[BackgroundWriter] = None  # of instance 0
        self._address = "127.0.0.1"  # by which other instances reach this one; the fleet's network once it has joined
        self._seconds: List[Tuple[str, float]] = []

    def build(self) -> InstanceStarted:
        """Load the data, build model, optimizer and options. The weights of instance 0 are the run's."""
        config = self._plan.config
        torch.set_num_threads(self._spec.threads_per_replica)
        began = time.monotonic()
        splits = datasets.load(config)
        self._feed = feed = Feed(self._plan, self._spec, splits)
        began = self._clock("load data", began)
        if self._spec.index == 0:
            torch.manual_seed(config.training.seed)
            self._saves = BackgroundWriter(self._plan)
        channels, side = feed.sample_shape()
        self._network = networks.build_model(config, channels, side, splits.classes)
        program.begin_blocks(self._network, self._plan.pipeline_splits)
        activations, stored = config.training.precision.split(".")
        if stored == "16":
            self._network.half()
        dtype = torch.float16 if activations == "16" else torch.float32
        prepare = device_input(dtype, splits.mean, splits.std, feed.sent_shape()[1:], config.data.image_size)
        step = program.TrainingStep(self._network, prepare, config.training.label_smoothing).train()
        self._step = step
        self._optimizer = build_optimizer(config, self._network)
        self._training = poptorch.trainingModel(step, options=training_options(self._plan), optimizer=self._optimizer)
        evaluation = program.EvaluationStep(self._network, prepare)
        self._inference = poptorch.inferenceModel(evaluation, options=inference_options(self._plan))
        self._models = [self._training, self._inference]
        self._clock("build model", began)
        return InstanceStarted(
            instance=self._spec.index,
            host=self._spec.host,
            pid=os.getpid(),
            device=self._sdk.device,
            device_line=self._sdk.line,
            parameters=sum(parameter.numel() for parameter in self._network.parameters()),
            seconds=tuple(self._seconds),
            data_fingerprint=splits.fingerprint,
            versions=versions(),
        )

    def data_address(self) -> Optional[str]:
        """This host's address in the data network of the cluster file, to which Gloo and Horovod are bound now.

        None where the file names none. ClusterError if the host has no address in it.
        """
        network = self._plan.cluster.data_network
        if network is None:
            return None
        address = address_in(network, "metadata.raypod.data_network")
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["HOROVOD_GLOO_IFACE"] = str(interface_of(address))
        return address

    def open_rendezvous(self, address: str, generation: int) -> Dict[str, str]:
        """Open the meeting point of the instances at this host's `address`; the variables that lead there.

        `address` is one of the network between the hosts; every repair makes a new `generation`.
        """
        self._close_rendezvous()
        self._rendezvous = Rendezvous(address, generation)
        return self._rendezvous.environment

    def join(self, environment: Dict[str, str]) -> None:
        """Meet the other instances."""
        os.environ.update(environment)
        if "EMULATED_POD_RENDEZVOUS" in environment:
            rendezvous = environment["EMULATED_POD_RENDEZVOUS"].rpartition(":")[0]
            self._address = self.data_address() or address_towards(rendezvous)
            if uses_installed_horovod():
                self._horovod_door = horovod_door(environment)
                os.environ.update(self._horovod_door.environment)
                if self._plan.cluster.data_network is None:
                    os.environ.update(horovod_interface(rendezvous))
        popdist.init()
        hvd.init()

    def leave(self) -> int:
        """Part from the other instances, after one of them was lost; the update whose state is here, -1 for none.

        Weights and state are read back and the device is given back, so that this process, with its compiled model, can
        `join` again. Where a failed call leaves the device in no state to be read, the host's last copy counts.
        """
        self._gate = StopGate(self._plan.config.run.report_timeout_s)
        self._network.train()
        state = None
        try:
            state = program.read_replica_state(self._training)
            self._give_back_devices()
            self._host_update = self._update
        except poptorch.Error:
            self._update = self._host_update
        program.show_replica_0(self._step.named_buffers(), state)
        program.load_replica_state(self._training, state)
        hvd.shutdown()
        popdist.finalizeBackend()
        collectives.part()
        self._close_rendezvous()
        return self._update

    def abandon(self) -> None:
        """From another thread: end every wait for other instances, because one is lost."""
        self._gate.stop_after(0)
        if self._seeding_end is not None:
            self._seeding_end.abandon()
        collectives.abandon("another instance is lost")

    def open_seeding(self) -> Place:
        """Be ready to take part in a seeding; where this instance listens for it."""
        timeout_s = self._plan.config.run.start_timeout_s
        self._seeding_end = SeedingEnd(self._spec.index, self._spec.host, self._address, timeout_s)
        return self._seeding_end.place

    def seed_weights(self, seeding: Seeding, checkpoint: Optional[str]) -> str:
        """Start from the weights and optimizer state of the root; the hash of the weights that are here now.

        The root starts from `checkpoint` if there is one. Who neither is the root nor a receiver keeps what it has.
        """
        assert self._seeding_end is not None, "open_seeding comes first"
        with contextlib.closing(self._seeding_end) as end:
            if self._spec.index == seeding.root:
                if checkpoint is not None:
                    self._load_state(writer.load_checkpoint(Path(checkpoint)))
                end.give(seeding, tensors.pack_flat({**self._state(), "update": self._update}))
            elif self._spec.index in seeding.receivers:
                self._load_state(tensors.unpack_flat(end.take(seeding)))
        return tensors.weights_sha256(self._network.state_dict())

    def run(self, leg: Leg) -> Iterator[CallReport]:
        """Run a leg; one report per call, as soon as the call has returned."""
        assert self._feed is not None, "build comes first"
        geometry = self._plan.geometry
        first_call = leg.first_update // geometry.device_iterations
        self._update = leg.first_update
        batches = timed(self.pulse.loading(self._feed.calls(leg)))
        for number, ((images, labels), wait_s) in enumerate(batches):
            if not self._gate.enter(first_call + number):
                return
            update = leg.first_update + number * geometry.device_iterations
            self._set_learning_rate(update)
            began = time.monotonic()
            with self.pulse.in_call(first_call + number):
                losses, correct = self._training(images, labels)
            self._update = update + geometry.device_iterations
            call_s = wait_s + time.monotonic() - began
            yield dataclasses.replace(self._report(update, losses, correct), data_wait_s=wait_s, call_s=call_s)

    def pause(self) -> int:
        """Start no further call until `stop_after` is told; the number of calls started since the run's first."""
        return self._gate.pause()

    def reopen(self) -> None:
        """After a stopped leg: the next one may start its calls."""
        self._gate.reopen()

    def stop_after(self, calls: int) -> None:
        """End the leg once `calls` calls are done. All instances must be told the same number."""
        self._gate.stop_after(calls)

    def evaluate(self) -> EvaluationReport:
        """This instance's share of the test split, with the BatchNorm statistics of global replica 0."""
        assert self._feed is not None, "build comes first"
        self._read_back()
        hvd.broadcast_parameters(dict(self._network.named_buffers()), root_rank=0)
        state = program.read_replica_state(self._training)
        self._give_back_devices()
        program.load_replica_state(self._training, state)
        # Both programs share the network, and each keeps the mode it is compiled in (contract section 13, trap 22).
        self._network.eval()
        samples = correct = 0
        losses: List[float] = []
        for images, labels, valid in self._feed.evaluation_calls():
            logits, wanted = self._inference(images)[:valid], labels[:valid].to(torch.int64)
            losses.extend(functional.cross_entropy(logits, wanted, reduction="none").tolist())
            correct += int((logits.argmax(dim=1) == wanted).sum())
            samples += valid
        self._give_back_devices()
        self._network.train()
        return EvaluationReport(self._spec.index, samples, correct, math.fsum(losses))

    def save(self, manifest: Manifest) -> None:
        """Read the weights back (all instances must); instance 0 copies them and writes them beside the next calls."""
        self._read_back()
        if self._saves is not None:
            self._saves.begin(manifest, writer.State(**self._state()))

    def finish_saves(self) -> Tuple[SaveReport, ...]:
        """Wait for the checkpoint that is being written; what became of those not reported yet."""
        return self._saves.finish() if self._saves is not None else ()

    def close(self) -> None:
        """Leave the fleet and end what this instance started."""
        if self._saves is not None:
            self._saves.close()
        if self._feed is not None:
            self._feed.close()
        for model in self._models:
            if model.isCompiled():
                model.destroy()
        hvd.shutdown()
        popdist.finalizeBackend()
        self._close_rendezvous()

    def _state(self) -> Dict[str, Any]:
        return {
            "weights": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "replicas": program.read_replica_state(self._training),
        }

    def _load_state(self, state: Dict[str, Any]) -> None:
        tensors.load_weights(self._network, state["weights"])
        load_optimizer_state(self._optimizer, state["optimizer"])
        self._optimizer_is_set = False
        program.load_replica_state(self._training, state["replicas"])
        self._update = self._host_update = state.get("update", -1)

    def _set_learning_rate(self, update: int) -> None:
        rate = learning_rate(self._plan.config, update, self._plan.total_updates, self._plan.updates_per_epoch)
        if self._optimizer_is_set and rate == self._optimizer.param_groups[0]["lr"]:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._training.setOptimizer(self._optimizer)
        self._optimizer_is_set = True

    def _report(self, update: int, losses: torch.Tensor, correct: torch.Tensor) -> CallReport:
        geometry = self._plan.geometry
        shape = (geometry.device_iterations, geometry.gradient_accumulation, geometry.local_replicas)
        mean_losses = losses.double().reshape(shape).mean(dim=1).tolist()
        counts = correct.to(torch.int64).reshape(shape).sum(dim=1).tolist()
        return CallReport(
            instance=self._spec.index,
            first_update=update,
            losses=tuple(tuple(row) for row in mean_losses),
            correct=tuple(tuple(row) for row in counts),
            saves=self._saves.taken() if self._saves is not None else (),
            samples_digest=order.digest(self._feed.samples) if self._feed is not None else "",
        )

    def _close_rendezvous(self) -> None:
        if self._horovod_door is not None:
            self._horovod_door.close()
            self._horovod_door = None
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _give_back_devices(self) -> None:
        for model in self._models:
            if model.isCompiled() and model.isAttachedToDevice():
                model.detachFromDevice()

    def _read_back(self) -> None:
        # On a pod with remote buffers this is a collective: every instance reads, whoever needs the result.
        if self._training.isCompiled():
            self._training.copyWeightsToHostIfNeeded()
            self._host_update = self._update

    def _clock(self, what: str, began: float) -> float:
        now = time.monotonic()
        self._seconds.append((what, now - began))
        return now
