"""Values of config keys that have a syntax of their own: intervals, lists of names and of epochs, and name patterns.

The forward stages of a pipeline, as `--pipeline-splits` writes them.

A split is MODULE or MODULE=IPU: the next stage begins with that module, on the next IPU or on that one. The first stage
begins with the input, on IPU 0. Several stages may be on one IPU, as the embedding and the output layer that shares its
weights.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import pydantic
import yaml
from pydantic import Field
from typing_extensions import Annotated

from raypod.errors import ConfigError
from raypod.system.command_line import nearest
from raypod.system.urls import check_url, is_url

_SPLIT = re.compile(r"([^=]+)(?:=(\d{1,2}))?")


class Stage(NamedTuple):
    """A stage after the first: the module with which it begins, and its IPU within the replica."""

    module: str
    ipu: int


def stages_of(splits: Sequence[str]) -> Tuple[Stage, ...]:
    """Return the stages after the first one. ValueError for a split that is no MODULE and no MODULE=IPU."""
    stages: List[Stage] = []
    for split in splits:
        found = _SPLIT.fullmatch(split)
        if found is None:
            raise ValueError(f"{split}: write MODULE, or MODULE=IPU as in head=0")
        before = stages[-1].ipu if stages else 0
        stages.append(Stage(found.group(1), before + 1 if found.group(2) is None else int(found.group(2))))
    return tuple(stages)


def splits_of(stages: Sequence[Stage]) -> Tuple[str, ...]:
    """Return the splits that `stages_of` reads; a stage on the next IPU has no number."""
    before = [0, *(stage.ipu for stage in stages)]
    return tuple(
        stage.module if stage.ipu == last + 1 else f"{stage.module}={stage.ipu}" for last, stage in zip(before, stages)
    )


def ipus_of(splits: Sequence[str]) -> Tuple[int, ...]:
    """Return the IPU of each stage, the first one included."""
    return (0, *(stage.ipu for stage in stages_of(splits)))


def stages_return(splits: Sequence[str]) -> bool:
    """Return whether the IPUs of the stages are in another order than that of their numbers."""
    ipus = ipus_of(splits)
    return list(ipus) != sorted(ipus)


def check_stages(splits: Sequence[str]) -> None:
    """Raise ValueError for a module that begins two stages, or a stage on the IPU of the one before."""
    stages = stages_of(splits)
    modules = [stage.module for stage in stages]
    for before, (module, ipu) in zip(ipus_of(splits), stages):
        if modules.count(module) > 1:
            raise ValueError(f"{module} is listed twice")
        if ipu == before:
            raise ValueError(f"{module}={ipu} is on the IPU of the stage before it; omit it")


TENSOR_KINDS = ("optimizer", "weights", "activations", "accumulators")
LOGGED = ("grad-norm", "weight-norm", "update-ratio")
NORMS = tuple(name.replace("-", "_") for name in LOGGED)  # their keys in metrics.jsonl
TRACES = ("learning_rate", "loss_scaling", *NORMS)
TRACKERS = ("tensorboard", "mlflow", "wandb")
_INTERVAL = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(update|epoch|minute)s?\s*$")
_UPDATES = re.compile(r"\s*updates?\s+(\d{1,12})(?:\s*-\s*(\d{1,12}))?\s*$")
_IMAGE = re.compile(r"[1-9]\d*x[1-9]\d*x[1-9]\d*")
_SAMPLE = re.compile(r"(test:)?(0|[1-9]\d{0,11})")
_UNSAVED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(checkpoint|minute)s?\s*$")
_EVALUATIONS = re.compile(r"\s*(\d{1,9})\s*evaluations?\s*$")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A period such as "100 updates", "2 epochs" or "0.5 minutes"; only minutes can be fractional."""

    count: float
    unit: str  # "update", "epoch", "minute" or "checkpoint"

    def updates(self, updates_per_epoch: int) -> int:
        """Return the period in updates; 0 for minutes."""
        return {"update": int(self.count), "epoch": int(self.count) * updates_per_epoch, "minute": 0}[self.unit]

    @property
    def seconds(self) -> float:
        """The period in seconds; infinity for other units than minutes."""
        return self.count * 60 if self.unit == "minute" else float("inf")


def parse_interval(text: str) -> Interval:
    """Parse "1 epoch", "100 updates" or "0.5 minutes". ValueError for anything else."""
    found = _INTERVAL.match(text)
    if found is None:
        raise ValueError("write a number and its unit: 100 updates, 1 epoch, 10 minutes")
    interval = Interval(float(found.group(1)), found.group(2))
    if interval.count <= 0 or (interval.unit != "minute" and interval.count != int(interval.count)):
        raise ValueError("must be positive" if interval.count <= 0 else f"must be a whole number of {interval.unit}s")
    return interval


def parse_unsaved(text: str) -> Interval:
    """Parse "60 minutes" or "3 checkpoints". ValueError for anything else."""
    found = _UNSAVED.match(text)
    if found is None:
        raise ValueError("write a number and its unit: 60 minutes, 3 checkpoints")
    limit = Interval(float(found.group(1)), found.group(2))
    if limit.unit == "checkpoint" and (limit.count < 1 or limit.count != int(limit.count)):
        raise ValueError("must be a whole number of checkpoints, at least 1")
    return limit


def parse_evaluations(text: str) -> int:
    """Parse "5 evaluations". ValueError for anything else."""
    found = _EVALUATIONS.match(text)
    if found is None:
        raise ValueError("write a number of evaluations: 5 evaluations")
    if int(found.group(1)) < 1:
        raise ValueError("must be at least 1 evaluation")
    return int(found.group(1))


def parse_size(text: str) -> int:
    """Return the bytes of a size as 256MB or 1GB; powers of 1000. ValueError for anything else."""
    units: Tuple[Tuple[str, int], ...] = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
    for unit, factor in units:
        number = text[: -len(unit)].strip()
        if text.lower().endswith(unit.lower()) and number.isdigit() and int(number):
            return int(number) * factor
    raise ValueError("expected a size such as 256MB or 1GB")


def parse_updates(text: str) -> Tuple[int, int]:
    """Parse "updates 20-25" or "update 20"; return the first and the last update, 1-based. ValueError otherwise."""
    found = _UPDATES.match(text)
    if found is None:
        raise ValueError("write a range of updates: updates 20-25")
    first, last = int(found.group(1)), int(found.group(2) or found.group(1))
    if first < 1:
        raise ValueError("the first update is 1")
    if last < first:
        raise ValueError(f"the range ends before it begins; write updates {last}-{first}")
    return first, last


def _split_words(value: Any) -> Any:
    """Split a comma-separated list of the command line; a YAML list passes unchanged."""
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if isinstance(words, (list, tuple)) and not all(word != "" for word in words or [""]):
        raise ValueError("must be a list without empty entries")
    return words


def _split_numbers(value: Any) -> Any:
    numbers = [value] if isinstance(value, int) else _split_words(value)
    if isinstance(numbers, (list, tuple)) and any(isinstance(each, bool) for each in numbers):
        raise ValueError("must be a list of numbers")
    return numbers


def _as_samples(value: Any) -> Any:
    """Return a list of samples as words: 17 and "test:3"."""
    words = _split_words(str(value) if isinstance(value, int) else value)
    return [str(each) for each in words] if isinstance(words, (list, tuple)) else words


def _check_samples(samples: Sequence[str]) -> None:
    if not all(map(_SAMPLE.fullmatch, samples)):
        raise ValueError("write the numbers of samples, as in 17,208,test:3")


def _check_different(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice")


def _check_ascending(numbers: Sequence[int]) -> None:
    if list(numbers) != sorted(set(numbers)):
        raise ValueError("must be in ascending order, each number once")


def _check_tensor_kinds(kinds: Sequence[str]) -> None:
    if not set(kinds) <= set(TENSOR_KINDS):
        raise ValueError(f"known are {', '.join(TENSOR_KINDS)}")


def _split_shares(value: Any) -> Any:
    """Split a list of numbers of the command line; one number is a list of one."""
    return [value] if isinstance(value, (int, float)) else _split_words(value)


def _parse_pairs(value: Any) -> Any:
    """Return KEY=VALUE texts as a mapping, with values as YAML reads them; a YAML mapping passes unchanged."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        return texts
    pairs = {}
    for text in texts:
        key, equals, word = str(text).partition("=")
        if not (key.strip() and equals and word.strip()):
            raise ValueError("write KEY=VALUE")
        if key.strip() in pairs:
            raise ValueError(f"{key.strip()} is given twice")
        try:
            pairs[key.strip()] = yaml.safe_load(word)
        except yaml.YAMLError:
            raise ValueError(f"cannot read the value of {key.strip()}") from None
    return pairs


def _check_trackers(names: Sequence[str]) -> None:
    if not all(name in TRACKERS or ":" in name for name in names):
        raise ValueError(f"known are {', '.join(TRACKERS)}, or module:Class for your own")


def _check_logged(names: Sequence[str]) -> None:
    for name in names:
        if name not in LOGGED:
            raise ValueError(f"{name!r} is not known; known are {', '.join(LOGGED)}")


def _check_image(text: str) -> None:
    if _IMAGE.fullmatch(text) is None:
        raise ValueError("must be channels x height x width, as in 3x32x32")


def _read_by(parse: Callable[[Any], Any]) -> pydantic.AfterValidator:
    """Return the validator of a value that `parse` can read, or of None."""

    def check(value: Any) -> Any:
        if value is not None:
            parse(value)
        return value

    return pydantic.AfterValidator(check)


def _place(flag: str) -> pydantic.AfterValidator:
    """Return the validator of a path or a URL."""
    return pydantic.AfterValidator(lambda place: check_url(place, flag) if place and is_url(place) else place)


Names = Annotated[Optional[Tuple[str, ...]], pydantic.BeforeValidator(_split_words), _read_by(_check_different)]
Splits = Annotated[Optional[Tuple[str, ...]], pydantic.BeforeValidator(_split_words), _read_by(check_stages)]
Epochs = Annotated[
    Optional[Tuple[Annotated[int, Field(ge=1)], ...]],
    pydantic.BeforeValidator(_split_numbers),
    _read_by(_check_ascending),
]
Counts = Annotated[Optional[Tuple[Annotated[int, Field(ge=0)], ...]], pydantic.BeforeValidator(_split_numbers)]
Samples = Annotated[
    Optional[Tuple[str, ...]],
    pydantic.BeforeValidator(_as_samples),
    _read_by(_check_samples),
    _read_by(_check_different),
]
Shares = Annotated[Optional[Tuple[Annotated[float, Field(ge=0, le=1)], ...]], pydantic.BeforeValidator(_split_shares)]
Betas = Annotated[
    Optional[Tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]],
    pydantic.BeforeValidator(_split_words),
]
Pairs = Annotated[Optional[Dict[str, Any]], pydantic.BeforeValidator(_parse_pairs)]
TensorKinds = Annotated[Names, _read_by(_check_tensor_kinds)]
ImageShape = Annotated[str, _read_by(_check_image)]
Logged = Annotated[Names, _read_by(_check_logged)]
Trackers = Annotated[Names, _read_by(_check_trackers)]
Updates = Annotated[Optional[str], _read_by(parse_updates)]
Evaluations = Annotated[Optional[str], _read_by(parse_evaluations)]
Period = Annotated[str, _read_by(parse_interval)]
Unsaved = Annotated[str, _read_by(parse_unsaved)]
Size = Annotated[str, _read_by(parse_size)]
StorageUrl = Annotated[Optional[str], pydantic.AfterValidator(lambda url: url and check_url(url, "--storage-path"))]
ResumePath = Annotated[Optional[str], _place("--resume")]
DataPath = Annotated[Optional[str], _place("--data-dir")]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a name or one of its modules: `layer1` and `layer?` match `layer1.0.weight`."""
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(prefix, pattern) for pattern in patterns for prefix in prefixes)


def check_all_match(flag: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for the first pattern that matches no name; the message has names that are similar."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            modules = [name.rpartition(".")[0] for name in names]
            similar = nearest(pattern, dict.fromkeys([*names, *filter(None, modules)]), 3) or _first(names)
            raise ConfigError(f"{flag} {pattern} matches no name of the network; there are {', '.join(similar)}")


def _first(names: Sequence[str], count: int = 5) -> List[str]:
    return [*names[:count], "..."] if len(names) > count else list(names)
