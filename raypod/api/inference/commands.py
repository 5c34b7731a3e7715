"""The commands `raypod evaluate`, `export`, `average` and `predict`: their flags and their output."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod.api.inference import checkpoints, settings
from raypod.errors import ConfigError, as_utf8
from raypod.plan.plan import Plan
from raypod.runs.predictions import check_format
from raypod.system.command_line import FlagParser, counted, format_table, show
from raypod.system.files import replace_file, strict_json

_CHECKPOINT = (
    "last, best, the name or update of a checkpoint of the run, or the path of a checkpoint or safetensors file"
)


def evaluate_parser() -> FlagParser:
    parser = _parser(_evaluate, "evaluate", "Evaluate a checkpoint of a run on its test split, or on another data set.")
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the result to this JSON file")
    what = "also write the predictions for each sample: Parquet if FILE is named so, which needs pyarrow, else CSV"
    parser.add_argument("--predictions", metavar="FILE", help=what)
    settings.add_flags(parser, settings.EVALUATION)
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    from raypod.api.inference.evaluate import evaluate_run  # as below: the command line is parsed without torch

    if args.output:
        settings.check_writable(Path(args.output))
    if args.predictions:
        check_format(Path(args.predictions))
        settings.check_writable(Path(args.predictions), "--predictions")
    found, plan = evaluate_run(*_opened(args, settings.EVALUATION), args.predictions)
    text = strict_json(found, indent=2)
    if args.output:
        _write(Path(args.output), f"{text}\n")
    show(text if args.json else f"{_checkpoint_line(found)}\n{_measured_line(plan, found, found['device'])}")
    return 0


def export_parser() -> FlagParser:
    parser = _parser(
        _export, "export", "Write the model of a checkpoint to a file, and compare its outputs with the network's."
    )
    kinds = "{safetensors,torchscript,onnx,hf}"
    parser.add_argument(
        "--format", required=True, metavar=kinds, help="the format of the file; hf: a folder of transformers"
    )
    parser.add_argument("--output", metavar="FILE", help="the file [MODEL-update-N with the suffix, in the run folder]")
    _add_checkpoint(parser)
    pixels = "torchscript, onnx: the model gets uint8 images, and normalizes and enlarges them itself"
    parser.add_argument("--pixels", action="store_true", help=pixels)
    tolerance = "largest difference of an output, relative to the largest output; above 0 [1e-4]"
    parser.add_argument("--tolerance", type=float, default=1e-4, help=tolerance)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    settings.add_flags(parser, settings.DATA)
    return parser


def _export(args: argparse.Namespace) -> int:
    from raypod.api.inference.export import export_run

    opened = _opened(args, settings.DATA)
    found = export_run(*opened, args.format, args.output, args.pixels, args.tolerance)
    if args.json:
        show(strict_json(found, indent=2))
        return 0
    inputs = ", ".join(f"{each['name']} {each['dtype']} {_shape(each['shape'])}" for each in found["inputs"])
    show(
        f"{_checkpoint_line(found)} -> {found['output']} ({found['format']}, {found['bytes']:,} bytes)\n"
        f"inputs: {inputs}\n"
        f"largest difference of the outputs of {counted(found['checked_samples'], 'sample')}: "
        f"{found['max_difference']:.3g}"
    )
    return 0


def average_parser() -> FlagParser:
    parser = _parser(_average, "average", "Average the weights of the newest checkpoints, and evaluate the average.")
    parser.add_argument("--last", type=int, default=3, metavar="N", help="number of checkpoints, at least 1 [3]")
    parser.add_argument("--output", metavar="FILE", help="safetensors file [average-N.safetensors in the run folder]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    settings.add_flags(parser, settings.EVALUATION)
    return parser


def _average(args: argparse.Namespace) -> int:
    from raypod.api.inference.average import average_run

    run = checkpoints.open_run(args.run, args.trust)
    found, plan = average_run(run, args.last, args.output, settings.given(args, settings.EVALUATION))
    if args.json:
        show(strict_json(found, indent=2))
        return 0
    show(
        f"average of {', '.join(found['checkpoints'])} -> {found['output']}\n"
        f"average: {_measured_line(plan, found['average'], found['device'])}\n"
        f"newest:  {_measured_line(plan, found['newest'], found['device'])}"
    )
    return 0


def predict_parser() -> FlagParser:
    parser = _parser(
        _predict,
        "predict",
        "Print the predictions of a run's model for images or texts, or its continuation of a text.",
    )
    inputs = "image files (PNG, JPEG), and folders of images; hf-sequence-classification: files of texts, .txt with "
    inputs += "one per line, or .jsonl or .csv with the column text"
    parser.add_argument("inputs", nargs="*", default=(), metavar="FILE", help=inputs)
    _add_checkpoint(parser)
    parser.add_argument("--top", type=int, help="number of classes per image or text, at least 1 [5]")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print JSON")
    kinds.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument("--prompt", metavar="TEXT", help="language model: the text to continue")
    parser.add_argument("--length", type=int, help="with --prompt: tokens to generate, at least 1 [100]")
    temperature = "with --prompt: divides the logits; 0 chooses the most probable token [1]"
    parser.add_argument("--temperature", type=float, help=temperature)
    parser.add_argument("--seed", type=int, help="with --prompt: seed of the random numbers [0]")
    settings.add_flags(parser, settings.DATA, overrides=False)
    return parser


def _predict(args: argparse.Namespace) -> int:
    if bool(args.inputs) == (args.prompt is not None):
        raise ConfigError("name images, as in `raypod predict RUN image.png`, or give --prompt TEXT; one of the two")
    _check_used(args)
    from raypod.api.inference.predict import generate_run, predict_run

    opened = _opened(args, settings.DATA)
    if args.prompt is not None:
        length, seed = 100 if args.length is None else args.length, args.seed or 0
        divisor = 1.0 if args.temperature is None else args.temperature
        text = generate_run(*opened, args.prompt, length, divisor, seed)
        show(strict_json({"prompt": args.prompt, "text": text}, indent=2) if args.json else f"{args.prompt}{text}")
        return 0
    records = predict_run(*opened, args.inputs, 5 if args.top is None else args.top)
    if args.json:
        show(strict_json(records, indent=2))
    elif args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(_rows(records, "{:.6f}"))
    else:
        show("\n".join(format_table(_rows(records, "{:.4f}"))))
    return 0


def _check_used(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag of images with `--prompt`, or the other way around."""
    has_prompt = args.prompt is not None
    for name in ("csv", "top") if has_prompt else ("length", "temperature", "seed"):
        value = getattr(args, name)
        if value is not None and value is not False:  # a seed or a temperature can be 0
            raise ConfigError(f"--{name} has no effect {'with' if has_prompt else 'without'} --prompt: omit it")


def _rows(records: Sequence[Dict[str, Any]], number: str) -> List[List[str]]:
    """Return a table with its header: a row per prediction of a record, after the record's other values."""
    rows: List[Dict[str, Any]] = []
    for record in records:
        own = {key: value for key, value in record.items() if key != "predictions"}
        rows += [{**own, "rank": rank, **each} for rank, each in enumerate(record.get("predictions", ()), start=1)]
        if "predictions" not in record:
            rows.append(own)
    header = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(key, "") for key in header] for row in rows]
    shown = [[number.format(each) if isinstance(each, float) else str(each) for each in row] for row in cells]
    return [header, *shown]


def _measured_line(plan: Plan, found: Dict[str, Any], device: str) -> str:
    values = ", ".join(f"{metric.name} {metric.text(found[metric.name])}" for metric in plan.task.evaluated_metrics)
    return f"{values} ({found['samples']} {plan.task.samples_are} of {plan.task.data}, {device})"


def _checkpoint_line(found: Dict[str, Any]) -> str:
    update = "" if found["update"] is None else f" (update {found['update']})"
    return f"{found['checkpoint']}{update}"


def _shape(sizes: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, as_utf8(text).encode())
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


def _parser(run: Callable[[argparse.Namespace], int], verb: str, description: str) -> FlagParser:
    parser = FlagParser(run, prog=f"raypod {verb}", description=description)
    parser.add_argument("run", metavar="RUN", help="run folder, a checkpoint in it, or the URL of one of them")
    trust = "import this module:function of a run that you have not written on this host; can be repeated"
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help=trust)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="NAME", help=f"{_CHECKPOINT} [last]")
    average = "use the moving average of the weights (--ema of the training) [if the checkpoint has one]"
    parser.add_argument("--ema", action="store_true", default=None, help=average)
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="use the weights that were trained")


def _opened(
    args: argparse.Namespace, names: Sequence[str]
) -> Tuple[checkpoints.Run, checkpoints.Weights, Dict[str, Any]]:
    """Return the run of a command line, the weights that it names, and its changes of the keys `names`."""
    run = checkpoints.open_run(args.run, args.trust)
    changes = settings.given(args, names)
    return run, checkpoints.load(run, args.checkpoint, args.ema), changes
