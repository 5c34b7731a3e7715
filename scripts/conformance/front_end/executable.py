"""A compiled model: the rules of the core, the memory of its device, and its calls."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from .device import Device, Peers, error
from .optimizers import DeviceOptimizer
from .trace import Graph

_MAX_IPUS = 64  # of a process
_PIPELINED = 0  # execution mode
_FINAL, _EVERY_N, _ALL, _SUM = range(4)  # output modes


class InternalPoplarExecutable:
    """A compiled model and the memory of its device."""

    def __init__(self, options: Dict[str, Any], training: bool, optimizer: Dict[str, Any], graph: Graph) -> None:
        self.options, self.training, self.graph = options, training, graph
        self.replicas = int(options["replication_factor"])
        self.iterations = int(options["device_iterations"])
        self.accumulation = int(options["gradient_accumulation"]) if training else 1
        self.rank = int(options.get("distributed_process_id", 0))
        self.instances = int(options.get("num_distributed_processes", 1))
        self.device = Device(options.get("ipu_id"))
        self.peers = Peers(self.rank, self.instances, "training" if training else "inference")
        self.is_loaded = False
        self.seed = int(options.get("random_seed", 42))
        self.micro_batches = 0  # of each replica, the state of its random numbers
        self.constants = graph.named_constants
        floats = {
            name: torch.zeros(meta.shape, dtype=meta.dtype, device="cpu") for name, meta in graph.named_floats.items()
        }
        self.loss = graph.loss() if training else None
        groups = {index: [graph.names[each] for each in group] for index, group in graph.groups.items()}
        trained = [name for names in groups.values() for name in names]
        self.trained = [name for name in trained if name in graph.trainable]
        self.memory = [{name: tensor.clone() for name, tensor in floats.items()} for _ in range(self.replicas)]
        self.optimizer: Optional[DeviceOptimizer] = None
        if training:
            kept = {index: [name for name in names if name in graph.trainable] for index, names in groups.items()}
            self.optimizer = DeviceOptimizer(optimizer, kept, floats)

    def check(self) -> None:
        """ValueError if the graph breaks a rule of the core."""
        stages, ipus = self.graph.forward_stages(), (max(self.graph.ipus) + 1) * self.replicas
        if ipus > _MAX_IPUS:
            raise ValueError(
                f"Too many IPUs requested ({ipus}). Experiments that need more than 64 IPUs require distributed"
                " execution."
            )
        if ipus & (ipus - 1) and not self.options.get("auto_round_num_ipus"):
            raise ValueError(f"PopTorch must reserve a power of 2 IPUs, not {ipus}")
        if self.options.get("execution_mode", _PIPELINED) == _PIPELINED:
            if self.training and stages > 1 and self.accumulation < 2 * stages - 1:
                raise ValueError(
                    "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of"
                    f" pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution."
                )
            if not self.training and self.iterations < stages:
                raise ValueError(
                    "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages"
                    f" ({stages}) when using PopTorch.PipelinedExecution."
                )

    def require_device(self) -> None:
        """Error without a working device."""
        Device.check()
        if not self.device.is_attached or not self.is_loaded:
            raise error("Must be attached to a device")

    def run(self, inputs: List[torch.Tensor]) -> List[torch.Tensor]:
        """All device iterations of a call."""
        count = self.iterations * self.accumulation * self.replicas
        parts = [each.chunk(count) if each.dim() else [each] for each in inputs]
        outputs: List[List[torch.Tensor]] = [[] for _ in range(count)]
        for iteration in range(self.iterations):
            sums: Dict[str, torch.Tensor] = {}
            for step in range(self.accumulation):
                for replica in range(self.replicas):
                    number = (iteration * self.accumulation + step) * self.replicas + replica
                    outputs[number] = self._micro_batch(replica, [part[number] for part in parts], sums)
                self.micro_batches += 1
            if self.training:
                self._update(sums)
        return [self._combined([each[index] for each in outputs]) for index in range(len(self.graph.outputs))]

    def _micro_batch(
        self, replica: int, inputs: List[torch.Tensor], sums: Dict[str, torch.Tensor]
    ) -> List[torch.Tensor]:
        named = {**{name: value.clone() for name, value in self.constants.items()}, **self.memory[replica]}
        leaves = [named[name].detach().requires_grad_(self.training) for name in self.trained]
        named.update(zip(self.trained, leaves))
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(self.training):
            torch.manual_seed(hash((self.seed, self.rank * self.replicas + replica, self.micro_batches)))
            values = self.graph.run(named, inputs)
            if self.optimizer is not None and self.loss is not None:
                loss = values[self.loss].sum() * self.optimizer.loss_scaling
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
                for name, gradient in zip(self.trained, gradients):
                    if gradient is not None:
                        kept = gradient.to(self.optimizer.accumulator)
                        sums[name] = sums[name] + kept if name in sums else kept
        return [values[number].detach().clone() for number in self.graph.outputs]

    def _update(self, sums: Dict[str, torch.Tensor]) -> None:
        assert self.optimizer is not None
        names = sorted(sums)
        summed = self.peers.sum([sums[name].float() for name in names])
        mean = self.options.get("accumulation_and_replication_reduction_type", 1) == 1
        divisor = self.optimizer.loss_scaling
        divisor *= self.accumulation * self.replicas * self.instances if mean else 1
        gradients = {name: tensor / divisor for name, tensor in zip(names, summed)}
        self.optimizer.step(self.memory[0], gradients)
        for memory in self.memory[1:]:
            for name in self.trained:
                memory[name].copy_(self.memory[0][name])

    def _combined(self, outputs: List[torch.Tensor]) -> torch.Tensor:
        mode, per_iteration = int(self.options["output_mode"]), self.accumulation * self.replicas
        if mode == _FINAL:
            outputs = outputs[-self.replicas :]
        elif mode == _SUM:
            outputs = [torch.stack(outputs[replica :: self.replicas]).sum(0) for replica in range(self.replicas)]
        elif mode == _EVERY_N:
            period = int(self.options["output_return_period"])
            outputs = [each for at, each in enumerate(outputs) if (at // per_iteration + 1) % period == 0]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([each.reshape(1) if not each.dim() else each for each in outputs])
