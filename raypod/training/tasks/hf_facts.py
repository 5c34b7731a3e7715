"""The options of the tasks of transformers for text, and what planning has to know of them, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Tuple

from pydantic import Field

from raypod.errors import ConfigError
from raypod.plan.config import HF_CAUSAL_LM, HF_SEQUENCES, LANGUAGE_MODEL, Config, TaskOptions
from raypod.plan.metric import LOSS
from raypod.plan.plan import DatasetSize, TaskFacts
from raypod.plan.values import Names
from raypod.training.data.hf_folder import TOKENIZER, HfFolder
from raypod.training.data.labelled_text import SEQUENCES, TOKENS, Examples, read_examples
from raypod.training.tasks import language_facts
from raypod.training.tasks.image_facts import ACCURACY
from raypod.training.tasks.language_facts import TextOptions

if TYPE_CHECKING:
    from raypod.training.data.packed_text import PackedText

# As transformers' Trainer, with the weight decay of its examples.
DEFAULTS = {
    "training.optimizer": "adamw",
    "training.learning_rate": 5e-5,
    "training.lr_schedule": "linear",
    "training.weight_decay": 0.01,
    "training.epochs": 3,
}
_SCRATCH = "begin with random weights, also if the folder of --model has some"


class ImageOptions(TaskOptions):
    """The options of the task hf-image-classification."""

    from_scratch: bool = Field(False, description=_SCRATCH)


class WindowOptions(TextOptions):
    """The options of the tasks hf-causal-lm and hf-masked-lm."""

    from_scratch: bool = Field(False, description=_SCRATCH)


class MaskedOptions(WindowOptions):
    """The options of the task hf-masked-lm."""

    masked: float = Field(0.15, gt=0, lt=1, description="fraction of the tokens that are predicted")


class LabelledOptions(TaskOptions):
    """The options of the tasks hf-sequence-classification and hf-token-classification."""

    examples: Names = Field(
        None, description="files of JSON lines or CSV, separated by commas: text and label, or tokens and tags"
    )
    test_examples: Names = Field(None, description="files of the test split (default: a part of --examples)")
    held_out: float = Field(0.1, ge=0, le=0.5, description="fraction of --examples in the test split, 0 to 0.5")
    sequence_length: int = Field(128, ge=2, le=65_536, description="tokens of a sample; longer ones are cut")
    from_scratch: bool = Field(False, description=_SCRATCH)


def window_facts(config: Config, is_dry: bool) -> TaskFacts:
    """Return the facts of a language model; see `registry.facts_of`."""
    del is_dry  # nothing is downloaded
    is_causal = config.task.name == HF_CAUSAL_LM
    options = (WindowOptions if is_causal else MaskedOptions).model_validate(config.task.options)
    folder = HfFolder(config)
    folder.check_length(options.sequence_length)
    tokenizer, packed = folder.tokenizer(), packed_text_of(config, options, folder)
    metrics = language_facts.METRICS if is_causal else (LOSS, language_facts.PERPLEXITY, ACCURACY)
    return TaskFacts(
        language_facts.text_windows(options, tokenizer)
        if packed is None
        else language_facts.packed_size(config, options, packed),
        metrics,
        best=metrics[-1].name,
        samples_are="windows",
        parts=("tokens", options.sequence_length),
        data=", ".join(options.text or ["the standard library of Python"]) if packed is None else str(packed),
        model=described(folder, options.from_scratch, f", windows of {options.sequence_length} tokens"),
    )


def packed_text_of(config: Config, options: TextOptions, folder: HfFolder) -> Optional[PackedText]:
    """Return the text that `raypod pack` has written; None without `data.data_dir`.

    Raises:
        ConfigError: as `language_facts.packed_text_of`, or its tokens are not those of the folder.
    """
    packed = language_facts.packed_text_of(config, options)
    if packed is None:
        return None
    theirs, ours, place = packed.tokenizer(), folder.tokenizer(), f"--data-dir {packed}"
    if theirs is None or not theirs.encodes_as(ours):
        raise ConfigError(
            f"{place}: its tokens are not those of {folder.path}: pack the text with raypod pack --task "
            f"{LANGUAGE_MODEL} --text FILES --tokenizer {folder.path / TOKENIZER} OUT"
        )
    if theirs.end != ours.end:
        raise ConfigError(
            f"{place} ends a file with token {theirs.end}, and {folder.path} with {ours.end}: give the files by --text"
        )
    return packed


def labelled_facts(config: Config, is_dry: bool) -> TaskFacts:
    """Return the facts of a classification; see `registry.facts_of`."""
    del is_dry  # nothing is downloaded
    options = LabelledOptions.model_validate(config.task.options)
    folder = HfFolder(config)
    folder.check_length(options.sequence_length)
    folder.tokenizer()
    found, is_sequence = examples_of(config, folder), config.task.name == HF_SEQUENCES
    return TaskFacts(
        DatasetSize(len(found.train), len(found.test)),
        (LOSS, ACCURACY),
        best=ACCURACY.name,
        samples_are="texts",
        data=", ".join(options.examples or ()),
        model=described(folder, options.from_scratch, f", {len(found.names)} classes"),
        predictions=("label", "predicted", "probability") if is_sequence else (),
    )


def examples_of(config: Config, folder: HfFolder) -> Examples:
    """Return the examples of a task. ConfigError as `read_examples`."""
    options = LabelledOptions.model_validate(config.task.options)
    form = SEQUENCES if config.task.name == HF_SEQUENCES else TOKENS
    return read_examples(form, options.examples, options.test_examples, options.held_out, known_labels(folder))


def known_labels(folder: HfFolder) -> Tuple[str, ...]:
    """Return the names of the classes in a folder's configuration; () for those that transformers has invented."""
    names = folder.config.get("id2label") or {}
    found = tuple(str(names[key]) for key in sorted(names, key=int))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(found)) else found


def described(folder: HfFolder, from_scratch: bool, more: str = "") -> str:
    """Return what the plan shows as the model."""
    weights = "its weights" if not from_scratch and folder.has_weights() else "random weights"
    return f"{folder.kind} of {folder.path} with {weights}{more}"
