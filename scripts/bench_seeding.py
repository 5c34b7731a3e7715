"""Measure the broadcast of weights over a network: seconds until every host has the state.

    sudo python scripts/bench_seeding.py [--hosts 2 4 8] [--large-hosts 4] [--gbit 1] [--rounds 3]

The hosts are those of `scripts/pod.sh`, with links of limited speed in both directions. The ideal is the size divided
by the speed of one link. The baselines are `hvd.broadcast_parameters` (of an installed Horovod, else of the emulated
one) and torch.distributed's broadcast over Gloo, tensor by tensor. The time of raypod's seeding includes packing the
root's state dict and unpacking it on all others. Results are medians of interleaved rounds; every state is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

SCRIPTS = Path(__file__).resolve().parent
NETWORK = "10.78.0"
NAMES = {"seeding": "seeding", "horovod": "hvd.broadcast_parameters", "per tensor": "gloo, per tensor"}


def measure(
    hosts: int, state: str, rounds: int, shared: str, environment: Dict[str, str], ways: str = ",".join(NAMES)
) -> Dict[str, Any]:
    """Start the peers and return the JSON that the first one prints. `ways` are those of the peers, by commas."""
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        started: List[subprocess.Popen[str]] = []
        for rank in range(hosts):
            words = [str(rank), str(hosts), state, str(rounds), NETWORK, folder, ways]
            peer = ["python", str(SCRIPTS / "bench_seeding_peer.py"), *words]
            line = [str(SCRIPTS / "pod.sh"), "on", str(rank + 1), *peer]
            piped = subprocess.PIPE if rank == 0 else None
            started.append(subprocess.Popen(line, env=environment, stdout=piped, text=True))
        try:
            out, _ = started[0].communicate(timeout=540)
            assert all(each.wait(30) == 0 for each in started), "a peer failed"
        finally:
            for each in started:
                each.kill()
    found: Dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8], help="for the state of a ResNet-50")
    parser.add_argument("--large-hosts", type=int, nargs="*", default=[4], help="for the state of 1 GB: 2 GB a host")
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of every link, in both directions")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = [("ResNet-50", hosts) for hosts in args.hosts] + [("1 GB", hosts) for hosts in args.large_hosts]
    with pod_of(max(hosts for _, hosts in cases), args.gbit) as (shared, environment):
        print("\n| state | hosts | ideal, s | " + " | ".join(f"{name}, s | of ideal" for name in NAMES.values()) + " |")
        print("|---|---|---|" + "---|---|" * len(NAMES), flush=True)
        for state, hosts in cases:
            result = measure(hosts, state, args.rounds, shared, environment)
            print(row(state, hosts, result, args.gbit), flush=True)
    which = result["horovod"]
    print(f"\nhvd: the {which} Horovod; links of {args.gbit:g} Gbit/s; medians of {args.rounds} rounds")


@contextlib.contextmanager
def pod_of(hosts: int, gbit: float) -> Iterator[Tuple[str, Dict[str, str]]]:
    """Yield a folder that the hosts of a new pod share, and the environment of `pod.sh`; 0 Gbit/s: without a limit."""
    repository = str(SCRIPTS.parent)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the pod is removed on SIGTERM too
    with tempfile.TemporaryDirectory() as shared:
        environment = {
            **os.environ,
            "POD_NAME": "seeding",
            "POD_NET": NETWORK,
            "POD_HOSTS": "full",  # an installed Horovod listens on the address of the host's name
            "POD_VENV": sys.prefix,
            "POD_SHARE": f"{repository}:{shared}",
            "POD_ENV": f"PYTHONPATH={repository}",
        }

        def pod(*words: str) -> None:
            subprocess.run([str(SCRIPTS / "pod.sh"), *words], env=environment, check=True, timeout=120)

        pod("up", str(hosts))
        try:
            pod("speed", f"{gbit:g}gbit" if gbit else "off")
            yield shared, environment
        finally:
            pod("down")


def row(state: str, hosts: int, result: Dict[str, Any], gbit: float) -> str:
    """Return a row of the table."""
    ideal = result["bytes"] * 8 / (gbit * 1e9)
    medians = [statistics.median(result["seconds"][name]) for name in NAMES]
    cells = " | ".join(f"{median:.2f} | {median / ideal:.2f}" for median in medians)
    return f"| {state} | {hosts} | {ideal:.2f} | {cells} |"


if __name__ == "__main__":
    main()
