"""Predict seeding, gradient exchange and report traffic of a pod; check the model on small pods of network namespaces.

    python scripts/simulate_pod.py                    # 16 hosts x 16 instances at 100 Gbit/s
    sudo python scripts/simulate_pod.py --measure     # calibrate the model here, and compare it with small pods

Assumptions:
- Every instance has two cores. All links of hosts have one speed, both directions at the same time, behind a switch
  that forwards all of them; `--efficiency` of the speed carries payload. Instances of a host are connected by its
  loopback interface, without a limit but that of their cores.
- Seeding is a chain over all instances (`raypod/runtime/worker/seeding.py`): a link passes a chunk on while the next
  one arrives. A stage, which receives, authenticates and forwards, takes a constant time per byte, whatever the link.
- The exchange is `_pod.reduce`'s recursive halving and doubling, nearest instance first. Its instances transfer at the
  same time, and each takes a constant time per byte that it sends and receives. On IPUs the exchange is that of the
  IPU-Links; this one is the emulated SDK's between hosts.
- A report costs the driver a constant time, which `scripts/bench_watch.py` measures, and a constant number of bytes,
  which is a guess.
- No loss, no congestion, no other traffic. Latencies: `--latency-us` per message between hosts.
- Where processes share fewer cores than there are processes (the small pods here), their times per byte add up.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from typing import Any, Dict, List, Tuple

import bench_seeding

CHUNK_BYTES = 1 << 18  # raypod.runtime.worker.seeding
EXCHANGE_CHUNK_BYTES = 1 << 24  # _pod.reduce


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per byte of a stage of the chain and of an instance in the exchange; seconds and bytes per report.

    `report_s` is the CPU time of the driver's receiving thread, `driver_s` that of all its threads.
    """

    stage_s: float
    exchange_s: float
    report_s: float
    driver_s: float
    report_bytes: float
    latency_s: float = 50e-6


@dataclasses.dataclass(frozen=True)
class Pod:
    """Hosts with equal numbers of instances; `gbit` per second and direction of a host's link, 0 for no limit."""

    hosts: int
    per_host: int
    gbit: float
    cores_of_all: int = 0  # 0: a core for each instance
    efficiency: float = 0.95

    @property
    def instances(self) -> int:
        """The number of instances."""
        return self.hosts * self.per_host

    @property
    def link_s(self) -> float:
        """Seconds per byte of payload on a link."""
        return 8 / (self.gbit * 1e9 * self.efficiency) if self.gbit else 0.0

    @property
    def sharing(self) -> float:
        """Instances per core, at least 1."""
        return max(1.0, self.instances / (self.cores_of_all or self.instances))


def seeding_s(pod: Pod, costs: Costs, size: float) -> float:
    """Return the seconds until all instances have `size` bytes."""
    # The stages of all links run at the same time. Each occupies two threads, which may have to share the cores.
    stages, between_hosts = pod.instances - 1, pod.hosts - 1
    busy_s = costs.stage_s * max(1.0, 2 * stages / (pod.cores_of_all or 2 * stages))
    link_s = pod.link_s if between_hosts else 0.0
    first_s = min(CHUNK_BYTES, size) * ((stages - between_hosts) * costs.stage_s + between_hosts * max(busy_s, link_s))
    return size * max(busy_s, link_s) + first_s + between_hosts * costs.latency_s


def exchange_rounds(pod: Pod) -> List[Tuple[bool, float]]:
    """Return whether each round is between hosts, and the part of the tensor that an instance sends in it."""
    rounds, distance, part = [], 1, 0.5
    while distance < pod.instances:
        rounds.append((distance >= pod.per_host, part))
        distance, part = 2 * distance, part / 2
    return rounds + rounds[::-1]


def exchange_s(pod: Pod, costs: Costs, size: float) -> float:
    """Return the seconds of an exchange of `size` bytes; all instances are a power of two."""
    total = 0.0
    for is_between, part in exchange_rounds(pod):
        link_s = pod.per_host * pod.link_s if is_between else 0.0
        latency_s = costs.latency_s * max(1.0, size / EXCHANGE_CHUNK_BYTES) if is_between else 0.0
        total += size * part * max(link_s, costs.exchange_s * pod.sharing) + latency_s
    return total


def sent_by_a_host(pod: Pod, size: float) -> float:
    """Return the bytes that a host sends to others in an exchange."""
    return size * pod.per_host * sum(part for is_between, part in exchange_rounds(pod) if is_between)


def prediction(pod: Pod, costs: Costs, sizes: Dict[str, float], calls_per_s: float) -> List[str]:
    """Return the rows of the table of a pod."""
    rows = []
    for name, size in sizes.items():
        seeded, exchanged, sent = seeding_s(pod, costs, size), exchange_s(pod, costs, size), sent_by_a_host(pod, size)
        rows.append(f"| seeding of {name}, {size / 1e6:.0f} MB | {1e3 * seeded:.0f} ms |")
        rows.append(
            f"| exchange of {name} | {1e3 * exchanged:.0f} ms; a host sends {sent / 1e6:.0f} MB, which takes its link "
            f"{1e3 * sent * pod.link_s:.0f} ms |"
        )
    reports = pod.instances * calls_per_s
    traffic = f"{8e-6 * reports * costs.report_bytes:.1f} Mbit/s at the head"
    thread, process = (f"{100 * reports * each:.0f} %" for each in (costs.report_s, costs.driver_s))
    share = f"{thread} of the driver's receiving thread, {process} of a core for its whole process"
    rows.append(f"| reports of {calls_per_s:g} calls per second | {reports:.0f} per second, {traffic}, {share} |")
    most = 1 / costs.report_s / pod.instances
    rows.append(f"| calls per second at which the receiving thread is busy | {most:.0f} |")
    return rows


def measured(hosts: int, gbit: float, rounds: int) -> Dict[str, Any]:
    """Return the seconds of seeding and exchange of a ResNet-50 on a pod of network namespaces; see bench_seeding."""
    with bench_seeding.pod_of(hosts, gbit) as (shared, environment):
        return bench_seeding.measure(hosts, "ResNet-50", rounds, shared, environment, "seeding,exchange")


def calibrated(costs: Costs, rounds: int) -> Tuple[Costs, float]:
    """Return the costs per byte of two hosts without a limit, each with a core, and the size of the state."""
    found = measured(2, 0.0, rounds)
    size = float(found["bytes"])
    seconds = {name: statistics.median(each) for name, each in found["seconds"].items()}
    # Seeding: one stage. Exchange of two: half of the tensor twice.
    return dataclasses.replace(costs, stage_s=seconds["seeding"] / size, exchange_s=seconds["exchange"] / size), size


def compare(pods: List[Tuple[int, float]], costs: Costs, size: float, rounds: int) -> None:
    """Print predictions and measurements of small pods on this machine."""
    print("| hosts | Gbit/s | | predicted, s | measured, s | predicted / measured |\n|---|---|---|---|---|---|")
    for hosts, gbit in pods:
        found = measured(hosts, gbit, rounds)["seconds"]
        pod = Pod(hosts, 1, gbit, cores_of_all=len(os.sched_getaffinity(0)))
        for name, predicted in (("seeding", seeding_s(pod, costs, size)), ("exchange", exchange_s(pod, costs, size))):
            median = statistics.median(found[name])
            spread = f"{median:.2f} ({min(found[name]):.2f} - {max(found[name]):.2f})"
            print(
                f"| {hosts} | {gbit:g} | {name} | {predicted:.2f} | {spread} | {predicted / median:.2f} |", flush=True
            )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--per-host", type=int, default=16, help="instances per host")
    parser.add_argument("--gbit", type=float, default=100.0, help="speed of a host's link, in each direction")
    parser.add_argument("--efficiency", type=float, default=0.95, help="share of the speed that carries payload")
    parser.add_argument("--calls", type=float, default=5.0, help="calls per second and instance")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message between hosts")
    parser.add_argument("--stage-gb", type=float, default=0.38, help="GB/s of a stage of the seeding")
    parser.add_argument("--exchange-gb", type=float, default=0.62, help="GB/s of an instance in the exchange")
    parser.add_argument("--report-us", type=float, default=171.0, help="of the driver's receiving thread per report")
    parser.add_argument("--driver-us", type=float, default=515.0, help="of all threads of the driver per report")
    parser.add_argument("--report-bytes", type=float, default=2000.0, help="bytes per report, with Ray's messages")
    parser.add_argument("--measure", action="store_true", help="calibrate here, and compare with small pods (root)")
    parser.add_argument("--pods", nargs="+", default=["2:1", "4:1", "8:0.25"], help="HOSTS:GBIT of the small pods")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    stage_s, exchange_s = 1e-9 / args.stage_gb, 1e-9 / args.exchange_gb
    reports = (args.report_us / 1e6, args.driver_us / 1e6, args.report_bytes)
    costs = Costs(stage_s, exchange_s, *reports, args.latency_us / 1e6)
    if args.measure:
        costs, size = calibrated(costs, args.rounds)
        print(f"calibrated: stage {1e-9 / costs.stage_s:.2f} GB/s, exchange {1e-9 / costs.exchange_s:.2f} GB/s\n")
        compare([(int(each.split(":")[0]), float(each.split(":")[1])) for each in args.pods], costs, size, args.rounds)
    pod = Pod(args.hosts, args.per_host, args.gbit, efficiency=args.efficiency)
    print(f"\n| {pod.hosts} hosts x {pod.per_host} instances at {pod.gbit:g} Gbit/s | predicted |\n|---|---|")
    sizes = {"a ResNet-50": 102.5e6, "a state of 1 GB": 1e9}
    print("\n".join(prediction(pod, costs, sizes, args.calls)))


if __name__ == "__main__":
    main()
