#!/usr/bin/env python3
"""Compares the session options of a recipe with those that Graphcore's own training records; prints what differs.

    python scripts/conformance/compare_options.py POPTORCH_GIT_DIR EXAMPLES_GIT_DIR [--config resnet50] [--show]

The folders are clones of graphcore/poptorch and graphcore/examples, bare or not. Their `train.py --config CONFIG` and
`raypod compile --config configs/imagenet-CONFIG.yaml` compile for an offline target with the front end and the core of
`real_front_end.py`, as instance 0 of the published number of instances, on generated images; the core keeps the options
that it is given. Libraries that `train.py` imports and this comparison does not need are replaced by `_STAND_INS`. The
status is 1 if there is a difference that `EXPLAINED` does not name, or one that it names is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

_SCRIPTS = Path(__file__).resolve().parents[1]
if not __package__:  # started by its path
    sys.path[:0] = [str(_SCRIPTS), str(_SCRIPTS.parent)]

import make_image_folder  # noqa: E402  # after the path is set
import torch  # noqa: E402  # as above

from conformance import front_end_runs  # noqa: E402  # as above
from conformance.clone import CloneError, extract  # noqa: E402  # as above
from conformance.command import exit_with, refuse  # noqa: E402  # as above
from raypod.system.sdk import activation  # noqa: E402  # as above

_APPLICATION = "vision/cnns/pytorch"


class Published(NamedTuple):
    """How a training is published to be started: its script in `train/`."""

    recipe: str
    instances: int
    replicas: int
    engine_options: Dict[str, str]


_SCRIPT = {"opt.enableMultiAccessCopies": "false"}
PUBLISHED = {
    "resnet50": Published("imagenet-resnet50-pod16", 8, 16, _SCRIPT),
    "resnet50-pod64": Published("imagenet-resnet50-pod64", 32, 64, _SCRIPT),
}
EXPLAINED = {  # docs/reference/recipes.md has this table, too
    "cachePath": "raypod keeps executables by default; theirs with --model-cache-path",
    "enableEngineCaching": "as cachePath",
    "compilation_progress_bar_fn": "a bar on the terminal; raypod has a line of its own",
    "disableGradAccumulationTensorStreams": "accumulators of a combined SGD have the velocity, part of checkpoints",
    "disableOptimizerStateTensorStreams": "checkpoints and repairs read the optimizer's state",
    "enableFloatingPointChecks": "false is the default of PopART",
    "groupNormStridedChannelGrouping": "false is the default of PopART; ResNet-50 has no group norm",
    "output_mode": "All in place of Sum: the loss of every micro-batch, a few scalars, is added on the host",
}
# What train.py and its modules refer to while they are imported, and what this comparison does not need.
_STAND_INS = {
    "wandb.py": "",
    "timm.py": "",
    "horovod/__init__.py": "",
    "horovod/torch.py": """
def init():
    pass
def local_rank():
    return 0
def broadcast_parameters(parameters, root_rank):
    pass
""",
    "turbojpeg.py": """
TJPF_RGB = TJFLAG_FASTUPSAMPLE = TJFLAG_FASTDCT = 0
class TurboJPEG:
    def __init__(self, path):
        raise OSError(path)
""",
}
# `raypod compile` without the estimate of the memory, which takes most of its time.
_COMPILE = "import sys; from raypod.cli import compile; compile._print_estimate = lambda *_: 0"
_COMPILE += "; sys.exit(compile.run(compile.parser(sys.argv[1:]).parse_args(sys.argv[1:])))"
_WIDTH = 70


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Compare session options with those of Graphcore's train.py.")
    parser.add_argument("poptorch", metavar="POPTORCH_GIT_DIR", type=Path, help="a clone of graphcore/poptorch")
    parser.add_argument("examples", metavar="EXAMPLES_GIT_DIR", type=Path, help="a clone of graphcore/examples")
    parser.add_argument("--config", choices=PUBLISHED, default="resnet50", help="of configs.yml (%(default)s)")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of a command (%(default)g)")
    parser.add_argument("--show", action="store_true", help="print the options that are equal, too")
    args = parser.parse_args(arguments)
    if torch.__version__.split("+")[0] != front_end_runs.TORCH:
        return refuse(f"this PopTorch needs torch {front_end_runs.TORCH}, found {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="front-end-") as name:
        folder = Path(name).resolve()
        try:
            front_end_runs.prepare(args.poptorch, folder)
            extract(args.examples, [_APPLICATION], folder / "examples")
        except CloneError as error:
            return refuse(str(error))
        bench = front_end_runs.Bench(folder, args.limit)
        theirs = _theirs(bench, args.config)
        ours = _ours(bench, PUBLISHED[args.config])
    return report(theirs, ours, args.show)


def report(theirs: Dict[str, Any], ours: Dict[str, Any], show: bool = False) -> int:
    """Print the table; return the status. `show`: also of what is equal."""
    problems = 0
    for option in sorted({*theirs, *ours}):
        values = (_shown(theirs, option), _shown(ours, option))
        differs, reason = values[0] != values[1], EXPLAINED.get(option, "")
        if differs or reason or show:
            verdict = reason or ("UNEXPLAINED" if differs else "equal")
            print(f"{option:{_WIDTH}}  {values[0]:>24}  {values[1]:>24}  {verdict}")
            problems += differs != bool(reason)
    print(f"{len({*theirs, *ours})} options, {problems} problems")
    return 1 if problems else 0


def _shown(options: Dict[str, Any], name: str) -> str:
    return json.dumps(options[name]) if name in options else "not set"


def _theirs(bench: front_end_runs.Bench, config: str) -> Dict[str, Any]:
    """The options of `train.py`, as instance 0 of its script."""
    published, stand_ins = PUBLISHED[config], bench.folder / "stand-ins"
    for name, text in _STAND_INS.items():
        (stand_ins / name).parent.mkdir(parents=True, exist_ok=True)
        (stand_ins / name).write_text(text)
    environment = {
        "POPDIST_NUM_TOTAL_REPLICAS": str(published.replicas),
        "POPDIST_NUM_LOCAL_REPLICAS": str(published.replicas // published.instances),
        "POPDIST_REPLICA_INDEX_OFFSET": "0",
        "FRONT_END_MPI": "1",
        "POPLAR_ENGINE_OPTIONS": json.dumps(published.engine_options),
    }
    command = ["train.py", "--config", config, "--data", "generated", "--compile-only", "--dataloader-worker", "1"]
    paths = [str(stand_ins), activation.FOLDER]  # the module popart is that of the emulated SDK
    return bench.options_of(command, environment, bench.folder / "examples" / _APPLICATION / "train", paths)


def _ours(bench: front_end_runs.Bench, published: Published) -> Dict[str, Any]:
    """The options of the recipe in `raypod compile`."""
    data = bench.folder / "data"
    make_image_folder.write(data, 1, 1, 1)
    for split, count in (("train", 20_000), ("val", 1)):  # the same image, enough of them for a call
        image = next((data / split).glob("*/*.jpg"))
        for number in range(1, count):
            os.link(image, image.with_name(f"{number:06d}.jpg"))
    recipe = _SCRIPTS.parent / "configs" / f"{published.recipe}.yaml"
    command = ["-c", _COMPILE, "--device", "ipu", "--config", str(recipe), "--data-dir", str(data)]
    pod = _SCRIPTS.parent / "cluster" / f"{published.recipe.rpartition('-')[2]}.yaml"
    return bench.options_of([*command, "--cluster", str(pod)], {}, bench.folder)


if __name__ == "__main__":
    exit_with(main)
