"""One replica of a language model against a plain loop: `python scripts/bench_decoder.py [--work decoder-tiny]`.

Both train the same network and micro-batches in this process with one thread, in interleaved rounds; the ratio is that
of the CPU time. With EMULATED_POD_COMPILE=1 the replica's program is compiled. `--profile` prints the time of each
operator instead.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import torch
from bench_train import spread
from bench_train_peer import Peer

from raypod.system import process, sdk

ACCUMULATION = 2


class Step(torch.nn.Module):
    """The network with its loss."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.network = peer.network
        self.loss = lambda network, batch: peer.task.training_outputs(network, *batch)[0]

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.loss(self.network, batch)
        return loss


def plain(peer: Peer, batch: Tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Return an update of a plain loop, as the limit of bench_train.py."""

    def update() -> None:
        peer.optimizer.zero_grad()
        for _ in range(ACCUMULATION):
            peer.backward(peer.network, batch)
        peer.optimizer.step()

    return update


def emulated(peer: Peer, batch: Tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Return an update of a replica."""
    import poptorch

    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    groups: Any = peer.task.parameter_groups(peer.network, peer.config.training.weight_decay)
    optimizer = poptorch.optim.AdamW(groups, lr=peer.config.training.learning_rate)
    training = poptorch.trainingModel(Step(peer), options, optimizer)
    inputs = tuple(torch.cat([each] * ACCUMULATION) for each in batch)
    return lambda: training(*inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["decoder", "decoder-tiny"], default="decoder-tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=5, help="in each round")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    process.keep_freed_memory()  # as in an instance
    torch.set_num_threads(1)
    sdk.select("emulated")
    batch = Peer(args.work).data[:8]
    updates = {make.__name__: make(Peer(args.work), batch) for make in (plain, emulated)}
    times: Dict[str, List[float]] = {name: [] for name in updates}
    for update in updates.values():
        update()
    if args.profile:
        for name, update in updates.items():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for _ in range(args.updates):
                    update()
            print(name, profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20), sep="\n")
        return
    for _ in range(args.rounds):
        for name, update in updates.items():
            began = time.process_time()
            for _ in range(args.updates):
                update()
            times[name].append((time.process_time() - began) / args.updates)
    print(*(f"{name}: {1e3 * median(found):.1f} ms of CPU per update" for name, found in times.items()), sep="\n")
    print(f"speed of a plain loop: {spread(times['plain'], times['emulated'])}")


if __name__ == "__main__":
    main()
