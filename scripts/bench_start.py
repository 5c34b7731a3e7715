"""The time from a command to its first update, against torchrun: `python scripts/bench_start.py [--rounds 5]`.

The work is that of the default run: a ResNet-8 on digits, 16 images per process and update, 2 processes. Rounds are
interleaved, and medians are printed with the smallest and largest round; the ratio is the median of the ratios to
torchrun in the same round. All times include the start of the interpreter:

* torchrun: DistributedDataParallel over gloo, with the same network and data;
* raypod.train: it starts Ray on this host;
* raypod.train, one instance: the same replicas in one instance, without Ray;
* raypod.train, Ray runs: the same with `ray start --head`, which this script starts before and ends afterwards;
* raypod.train, Ray runs with a template: the same on a head that was started by `raypod/pod/with_template.py`;
* raypod plan, raypod plan --memory, raypod --help, import torch: until the process has ended.
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
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "torchrun"
TARGETS = {
    "raypod.train": ("of torchrun", 1.1),
    "raypod.train, Ray runs with a template": ("s", 2.0),
    "raypod plan": ("s", 0.3),
    "raypod --help": ("s", 0.15),
}
TEMPLATE = ROOT / "raypod" / "pod" / "with_template.py"
_RUN_S, _HEAD_S = 120, 60
PEER = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from raypod import datasets
from raypod.training.models import networks
from raypod.plan.resolve import from_values
torch.set_num_threads(1)
dist.init_process_group("gloo")
config = from_values({"pod": {"replicas": 2, "num_instances": 2}})
torch.manual_seed(0)
model = DistributedDataParallel(networks.build_model(config, 1, 8, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
splits = datasets.load(config)
images = (torch.from_numpy(splits.train.images).float() / 255 - splits.mean[0]) / splits.std[0]
data = torch.utils.data.TensorDataset(images, torch.from_numpy(splits.train.labels))
sampler = torch.utils.data.DistributedSampler(data)
batch, labels = next(iter(torch.utils.data.DataLoader(data, 16, sampler=sampler)))
torch.nn.functional.cross_entropy(model(batch), labels).backward()
optimizer.step()
print("first update", flush=True)
dist.destroy_process_group()
"""


def environment(root: Path, ray_folder: str) -> Dict[str, str]:
    """Return the environment of a command; `ray_folder` has the sessions of Ray."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE")}
    return {**kept, "PYTHONPATH": str(root), "RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled"}


def torchrun(env: Dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "peer.py")
        script.write_text(PEER)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        began = time.monotonic()
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as started:
            assert started.stdout is not None
            found = any("first update" in line for line in started.stdout)
            seconds = time.monotonic() - began
            started.wait(_RUN_S)  # it aborts at times at its end
            if not found:
                raise SystemExit("torchrun failed")
        return seconds


def train(env: Dict[str, str], *flags: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "raypod.train", "--updates", "3", "--run-dir", f"{folder}/run", *flags]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_RUN_S, check=False)
        if done.returncode:
            raise SystemExit(f"raypod.train failed: {done.stderr[-2000:]}")
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["seconds_to_first_update"])


def command(*words: str) -> Callable[[Dict[str, str]], float]:
    """Return a function that returns the seconds of a command of this interpreter."""

    def run(env: Dict[str, str]) -> float:
        began = time.monotonic()
        # With a pipe the wait ends with the process; without one, `run` polls in steps of up to 50 ms.
        words_, folder, pipe = [sys.executable, *words], tempfile.gettempdir(), subprocess.PIPE
        subprocess.run(words_, env=env, stdout=pipe, timeout=_RUN_S, check=True, cwd=folder)
        return time.monotonic() - began

    return run


@contextlib.contextmanager
def running_ray(env: Dict[str, str], *by: str) -> Iterator[None]:
    """Run the head of a Ray cluster within the context; `by` are words before the command that starts it."""
    words = ["start", "--head", "--block", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    ray = str(Path(sys.executable).parent / "ray")
    head = subprocess.Popen(
        [*by, ray, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + _HEAD_S
        while not Path(env["RAY_TMPDIR"], "ray", "ray_current_cluster").exists():
            if head.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("ray start failed")
            time.sleep(0.1)
        time.sleep(10)
        yield
    finally:
        os.killpg(head.pid, signal.SIGTERM)  # `--block` ends the processes of Ray
        head.wait(_HEAD_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout of raypod, measured in the same rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these besides torchrun")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        cold, warm, forked = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix=each)) for each in ("rs", "rw", "rt")
        )
        kinds: Dict[str, Tuple[Callable[[Dict[str, str]], float], str]] = {
            "raypod.train": (train, cold),
            "raypod.train, one instance": (lambda env: train(env, "--num-instances", "1"), cold),
            "raypod.train, Ray runs": (train, warm),
            "raypod.train, Ray runs with a template": (train, forked),
            "raypod plan": (command("-m", "raypod", "plan"), cold),
            "raypod plan --memory": (command("-m", "raypod", "plan", "--memory"), cold),
            "raypod --help": (command("-m", "raypod", "--help"), cold),
            "import torch": (command("-c", "import torch"), cold),
        }
        if args.only:
            kinds = {name: kind for name, kind in kinds.items() if name in args.only}
        roots = {"": ROOT, **({", before": args.before.resolve()} if args.before else {})}
        taken: Dict[str, List[float]] = {BASELINE: []}
        if "raypod.train, Ray runs" in kinds:
            stack.enter_context(running_ray(environment(ROOT, warm)))
        if "raypod.train, Ray runs with a template" in kinds:
            stack.enter_context(running_ray(environment(ROOT, forked), sys.executable, str(TEMPLATE)))
        for number in range(args.rounds + 1):  # the first one fills the page cache
            found = {BASELINE: torchrun(environment(ROOT, cold))}
            for suffix in list(roots)[:: -1 if number % 2 else 1]:
                for name, (measure, folder) in kinds.items():
                    if not suffix or name not in ("import torch", "raypod plan --memory"):
                        found[name + suffix] = measure(environment(roots[suffix], folder))
            for name, value in found.items():
                taken.setdefault(name, []).extend([value] if number else [])
            print(f"{number}: {found}", file=sys.stderr, flush=True)
    print("| from the command | s | of torchrun | target |\n|---|---|---|---|")
    for name, values in taken.items():
        ratio = statistics.median(a / b for a, b in zip(values, taken[BASELINE]))
        unit, bound = TARGETS.get(name, ("", 0.0))
        target = f"<= {bound} {unit}" if unit else ""
        spread = f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
        print(f"| {name} | {spread} | {ratio:.2f} | {target} |")


if __name__ == "__main__":
    main()
