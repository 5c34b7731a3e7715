"""Train every file of `configs/` on generated data: `python scripts/prove_recipes.py [RECIPE...]`.

The data has the real format: CIFAR-10's pickled batches, ImageNet's folders of JPEG files. ResNet-101 and the ImageNet
recipes get one pattern per class instead of three, an easier task. A recipe keeps its model, stem, precision,
optimizer, schedule, placement on IPUs per replica and data path; the batch, the number of replicas and the warm-up are
those below, so that a CPU trains a few hundred updates in minutes, and the learning rate is scaled with the global
batch where the recipe has one for thousands of samples. GPT-2 and the vision transformers have fewer and narrower
layers, without dropout, on 4 IPUs, and learn little data by heart, the latter without augmentation. Of the networks on
several IPUs those with `SHARDED` are not pipelined, for one micro-batch per update. A recipe is proven if the mean loss
of the last tenth of the updates is below `FALLS_TO` of that of the first tenth; the difference is also printed in
standard errors. The exit code is 1 if a recipe is not proven.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, pvariance
from typing import Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
FALLS_TO = 0.8
LIMIT_S = 1800
IMAGENET = [
    *("--image-size", "64", "--batch-size", "16", "--gradient-accumulation", "2", "--num-workers", "1"),
    *("--replicas", "2", "--num-instances", "2", "--learning-rate", "0.004", "--warmup-updates", "20"),
]
ONE_REPLICA = [
    *("--image-size", "64", "--device-iterations", "1", "--num-workers", "1", "--replicas", "1"),
    *("--num-instances", "1", "--fleet", "inline", "--warmup-updates", "10"),
]
ONE_MICRO_BATCH = [*ONE_REPLICA, "--batch-size", "32", "--gradient-accumulation", "1"]
SHARDED = [*ONE_MICRO_BATCH, "--execution", "sharded"]  # a pipeline of n IPUs needs 2 n - 1 micro-batches
FEW_IMAGES = ["--batch-size", "16", "--no-augment", "--warmup-updates", "5"]  # 48, which are learnt by heart
NO_MIXING = ["--mixup-alpha=0", *(f"--cutmix-{name}=0" for name in ("lambda-low", "lambda-high", "disable-prob"))]
SMALL_VIT = [  # 6 layers of width 192, which learn the images by heart
    *(*ONE_REPLICA, "--model", "vit_tiny", "--vit-representation-size", "192", "--vit-dropout", "0"),
    *("--vit-attention-dropout", "0", "--recomputation-checkpoints", "encoder.layers.encoder_layer_?"),
    *("--pipeline-splits", ",".join(f"encoder.layers.encoder_layer_{layer}" for layer in (1, 3, 5))),
    *("--mixup-alpha", "0", "--no-augment", "--batch-size", "2", "--gradient-accumulation", "7"),
]
GPT2 = [  # 2 layers, which learn 36 windows of random tokens by heart
    *("--size", "tiny", "--ipus-per-replica", "4", "--layers-per-ipu", "0,1,1,0", "--recomputation-checkpoints"),
    *("blocks.?", "--available-memory-proportion", "0.15", "--sequence-length", "32", "--loss-tokens", "16"),
    *("--generated-windows", "36", "--vocabulary", "60", "--dropout", "0", "--device-iterations", "1"),
    *("--batch-size", "2", "--gradient-accumulation", "9", "--replicas", "2"),
    *("--learning-rate", "0.003", "--loss-scaling", "128"),
]
# The updates, and the flags that make a recipe small.
SMALL: Dict[str, Tuple[int, List[str]]] = {
    "cifar10-resnet18": (
        300,
        [
            *("--batch-size", "4", "--gradient-accumulation", "2", "--learning-rate", "0.02"),
            *("--warmup-updates", "50"),
        ],
    ),
    "cifar10-resnet50-2ipu": (
        200,
        [*("--batch-size", "4", "--gradient-accumulation", "4", "--device-iterations", "1", "--replicas", "2")],
    ),
    "cifar10-resnet101-2ipu": (
        150,
        [
            *("--batch-size", "16", "--gradient-accumulation", "3", "--device-iterations", "1"),
            *("--replicas", "2", "--num-instances", "2", "--learning-rate", "0.0005", "--warmup-updates", "20"),
        ],
    ),
    "digits": (660, []),
    **{f"gpt2{name}-pod16": (24, GPT2) for name in ("", "-medium", "-large-512")},
    "gpt-tiny": (300, ["--max-mb", "0.3"]),
    **{
        f"imagenet-efficientnet-{name}": (
            40,
            [*SHARDED, "--recomputation", "all", *FEW_IMAGES, *NO_MIXING, "--learning-rate", "0.00003"],
        )
        for name in ("b4-pod16", "b4-pod64", "b4-g1-pod16")
    },
    "imagenet-efficientnet-b0-pod16": (
        150,
        [
            *(*ONE_REPLICA, "--batch-size", "4", "--gradient-accumulation", "8", "--learning-rate", "0.002"),
            *("--warmup-updates", "20"),
        ],
    ),
    "imagenet-mobilenet-v3-small-pod4": (300, [*ONE_MICRO_BATCH, "--learning-rate", "0.016"]),
    "imagenet-mobilenet-v3-large-pod16": (300, [*SHARDED, "--learning-rate", "0.016"]),
    "imagenet-vit-b16-pod16": (60, [*SMALL_VIT, "--learning-rate", "0.001"]),
    "imagenet-vit-b16-lamb-pod16": (60, SMALL_VIT),
    "imagenet-resnet50-pod4": (200, IMAGENET),
    **{
        f"imagenet-resnet50-{name}": (40, [*ONE_MICRO_BATCH, *FEW_IMAGES, "--learning-rate", "0.004"])
        for name in ("pod16", "pod64")
    },
}


def write_data(recipe: str, folder: Path) -> List[str]:
    """Generate the data of a recipe; return the flags that name it."""
    if recipe.startswith("cifar10"):
        import make_cifar

        make_cifar.write(folder, 8000, 500, 10, patterns=1 if "resnet101" in recipe else make_cifar.PATTERNS)
    elif recipe.startswith("imagenet"):
        import make_image_folder

        is_augmented = "--no-augment" not in SMALL[recipe][1]
        make_image_folder.write(folder, 3200 if is_augmented else 160 if "vit" in recipe else 48, 40, 10, patterns=1)
    else:
        return []
    return ["--data-dir", str(folder)]


def losses_of(run: Path) -> List[float]:
    """Return the loss of every update of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [each["loss"] for each in found if each.get("loss") is not None]


def prove(recipe: str, updates: int, folder: Path) -> bool:
    """Train a recipe in a subprocess and print its losses; return whether they fall."""
    data = write_data(recipe, folder / "data")
    run, config, flags = folder / "run", folder / f"{recipe}.yaml", SMALL[recipe][1]
    text = (ROOT / "configs" / config.name).read_text()
    # --no-augment, which the small vision transformers have, and a policy exclude each other.
    config.write_text(re.sub(r"\n +policy:.*", "", text) if "--no-augment" in flags else text)
    line = [sys.executable, "-m", "raypod.train", "--config", str(config), *flags, *data]
    line += ["--epochs", "1000", "--evaluate-every", "1000", "--updates", str(updates), "--run-dir", str(run)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    began_s = time.monotonic()
    done = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        print(f"{recipe}: {' '.join(line)} ended with {done.returncode}\n{done.stderr[-2000:]}", flush=True)
        return False
    losses = losses_of(run)
    tenth = max(2, len(losses) // 10)
    first, last = mean(losses[:tenth]), mean(losses[-tenth:])
    error = math.sqrt((pvariance(losses[:tenth]) + pvariance(losses[-tenth:])) / tenth)
    errors = (first - last) / max(error, 1e-9)
    accuracy = json.loads((run / "summary.json").read_text()).get("test_accuracy")
    tested = "" if accuracy is None else f", test accuracy {accuracy:.2f} %"
    seconds = time.monotonic() - began_s
    verdict = f"{'falls' if last < FALLS_TO * first else 'DOES NOT FALL'} ({errors:.1f} standard errors)"
    print(
        f"{recipe}: {len(losses)} updates, loss {first:.3f} -> {last:.3f} {verdict}{tested}, {seconds:.0f} s",
        flush=True,
    )
    return last < FALLS_TO * first


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Train the recipes of configs/ on generated data.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(SMALL)}; default: all")
    parser.add_argument("--updates", type=int, metavar="N", help="instead of those of each recipe")
    args = parser.parse_args()
    unknown = [each for each in args.recipes if each not in SMALL]
    if unknown:
        parser.error(f"no such recipe: {', '.join(unknown)}")
    proven = []
    for recipe in args.recipes or SMALL:
        with tempfile.TemporaryDirectory() as folder:
            proven.append(prove(recipe, args.updates or SMALL[recipe][0], Path(folder)))
    return 0 if all(proven) else 1


if __name__ == "__main__":
    sys.exit(main())
