"""The options of the language model, and what planning has to know of it, without torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Optional, Sequence, Tuple

from pydantic import Field
from typing_extensions import Literal

from raypod.errors import ConfigError
from raypod.plan.config import Config, TaskOptions
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import DatasetSize, TaskFacts
from raypod.plan.values import Names
from raypod.training.data import corpus

if TYPE_CHECKING:
    from raypod.training.data.packed_text import PackedText

# An optimizer and a length with which the default run learns something.
DEFAULTS = {
    "training.optimizer": "adamw",
    "training.learning_rate": 2e-3,
    "training.weight_decay": 0.1,
    "training.epochs": 1,
}
_GPT2_TOKENS = 50_257
_PADDED_TO = 32
_BEST = Metric("bits_per_byte", scale=1 / math.log(2), label="bits/byte")
PERPLEXITY = Metric("perplexity", transform=math.exp, label="ppl", formats=(".2f", ".3f"))
METRICS = (LOSS, PERPLEXITY, _BEST)


class TextOptions(TaskOptions):
    """The options of every language model: which text it learns."""

    sequence_length: int = Field(128, ge=2, le=65_536, description="tokens that a window predicts, 2 to 65,536")
    text: Names = Field(
        None,
        description="text files and folders (.txt .md .rst .py), separated by commas, of which the model learns "
        f"(default: {corpus.MAX_DEFAULT_MB:g} MB source text of Python's standard library)",
    )
    held_out: float = Field(0.05, ge=0, le=0.5, description="fraction of the text in the test split, 0 to 0.5")
    max_mb: Optional[float] = Field(
        None, gt=0, le=1e6, description="megabytes of text that are used at most (default: all files of --text)"
    )


class LanguageOptions(TextOptions):
    """The options of the task language-model."""

    size: Literal["tiny", "small", "gpt2", "gpt2-medium", "gpt2-large"] = Field(
        "tiny",
        description="layers x width of the decoder: tiny 2 x 128, small 6 x 384, gpt2 12 x 768, gpt2-medium 24 x 1024, "
        "gpt2-large 36 x 1280",
    )
    tokenizer: Optional[str] = Field(
        None, description="file tokenizer.json of the package tokenizers (default: a token is a byte)"
    )
    tied_embeddings: bool = Field(False, description="the output layer has the weights of the embedding, as in GPT-2")
    serialize: int = Field(
        1,
        ge=1,
        le=64,
        description="parts in which an IPU computes the output layer, and an embedding of its own, to save memory",
    )
    loss_tokens: Optional[int] = Field(
        None, ge=1, description="tokens of a window whose loss is computed at once, to save memory (default: all)"
    )
    generated_windows: Optional[int] = Field(
        None, ge=1, le=10_000_000, description="train on so many windows of random tokens in place of text"
    )
    vocabulary: Optional[int] = Field(
        None, ge=2, le=1_000_000, description="number of different generated tokens (default: 50257, as GPT-2)"
    )
    pack_sequences: bool = Field(
        False, description="pack several files into a window, each of which attends to itself alone"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropout, 0 to less than 1")


def facts(config: Config, is_dry: bool) -> TaskFacts:
    """Return the facts; see `registry.facts_of`."""
    del is_dry  # nothing is downloaded
    options = LanguageOptions.model_validate(config.task.options)
    length, generated, packed = options.sequence_length, generated_windows(options), packed_text_of(config, options)
    if packed is not None:
        has_tokens, size = packed.has_tokenizer, packed_size(config, options, packed)
    else:
        tokenizer = tokenizer_of(options)
        has_tokens = tokenizer is not None or generated is not None
        size = DatasetSize(*generated) if generated is not None else text_windows(options, tokenizer)
    data = ", ".join(options.text or ["the standard library of Python"]) if generated is None else "random tokens"
    return TaskFacts(
        size,
        METRICS,
        best=_BEST.name,
        samples_are="windows",
        parts=("tokens", length),
        data=data if packed is None else str(config.data.data_dir),
        model=f"decoder {options.size}, windows of {length} {'tokens' if has_tokens else 'bytes'}",
    )


def text_windows(options: TextOptions, tokenizer: Optional[corpus.Tokenizer]) -> DatasetSize:
    """Return the windows of both splits of a text. ConfigError if it is shorter than one."""
    counts = [corpus.tokens_of_pieces(pieces, tokenizer) for pieces in pieces_of(options)]
    if getattr(options, "pack_sequences", False):
        return _sequence_windows(options.sequence_length, counts)
    return _windows(options.sequence_length, [sum(each) for each in counts])


def _windows(length: int, tokens_of_splits: Sequence[int]) -> DatasetSize:
    counts = [corpus.num_windows(tokens, length) for tokens in tokens_of_splits]
    for name, tokens, count in zip(("training", "held-out"), tokens_of_splits, counts):
        if tokens and not count:
            raise ConfigError(
                f"the {name} text has {tokens} tokens, and a window of --sequence-length {length} needs {length + 1}: "
                "use a smaller one, or more text"
            )
    return DatasetSize(counts[0], counts[1])


def _sequence_windows(length: int, counts: Sequence[Sequence[int]]) -> DatasetSize:
    train, test = (corpus.pack_sequences(each, length) for each in counts)
    if not train.num_windows:
        raise ConfigError("the training text has no file of two tokens: --pack-sequences predicts none")
    share = train.sizes.sum() / (length * train.num_windows)
    note = f"{len(train.sizes)} sequences packed into {train.num_windows} windows, {100 * share:.1f} % of their tokens"
    return DatasetSize(train.num_windows, test.num_windows, notes=(note,))


def packed_text_of(config: Config, options: TextOptions) -> Optional[PackedText]:
    """Return the text that `raypod pack` has written; None without `data.data_dir`.

    Raises:
        ConfigError: as `packed_text.opened`, or an option has no effect on a packed text.
    """
    if config.data.data_dir is None:
        if config.data.cache_dir is not None:
            raise ConfigError("--cache-dir has no effect without --data-dir URL: omit it")
        return None
    for key in ("text", "held_out", "max_mb", "tokenizer", "generated_windows"):
        field = type(options).model_fields.get(key)
        if field is not None and getattr(options, key) != field.default:
            began = "; a run continues with the kind of text with which it began" if config.run.resume else ""
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect on the packed text of --data-dir; omit one{began}")
    from raypod.training.data import packed_text  # imports NumPy, as above

    return packed_text.opened(config)


def packed_size(config: Config, options: TextOptions, packed: PackedText) -> DatasetSize:
    """Return the windows of a packed text, without reading it."""
    if getattr(options, "pack_sequences", False):
        size = _sequence_windows(options.sequence_length, packed.tokens_of_files())
    else:
        size = _windows(options.sequence_length, [packed.index.train.samples, packed.index.test.samples])
    # The order of a single shard, whatever the window, is that of all samples.
    shards = () if config.data.shuffle_window is None else (size.train_samples,)
    return dataclasses.replace(size, notes=(packed.note(), *size.notes), shards=shards)


def generated_windows(options: LanguageOptions) -> Optional[Tuple[int, int]]:
    """Return the windows of random tokens of both splits; None for a text.

    Raises:
        ConfigError: an option of the other kind of data is given.
    """
    if options.generated_windows is None:
        if options.vocabulary is not None:
            raise ConfigError(f"--vocabulary {options.vocabulary} has no effect without --generated-windows")
        return None
    for key in ("text", "max_mb", "tokenizer", "pack_sequences"):
        if getattr(options, key):
            raise ConfigError(f"--{key.replace('_', '-')} has no effect on --generated-windows; omit one")
    return options.generated_windows, int(options.held_out * options.generated_windows)


def vocabulary_of(options: LanguageOptions, tokenizer: Optional[corpus.Tokenizer]) -> int:
    """Return the number of different tokens."""
    if options.generated_windows is not None:
        return options.vocabulary or _GPT2_TOKENS
    return corpus.BYTES if tokenizer is None else tokenizer.vocabulary


def padded(vocabulary: int, parts: int) -> int:
    """Return the outputs of a decoder: with several parts a multiple of them, and of `_PADDED_TO`.

    50,257 tokens become the 50,272 of Graphcore's GPT-2.
    """
    unit = 1 if parts == 1 else _PADDED_TO if _PADDED_TO % parts == 0 else parts
    return -(-vocabulary // unit) * unit


def pieces_of(options: TextOptions) -> corpus.Pieces:
    """Return the text of both splits. ConfigError if there is none."""
    return corpus.find_pieces(options.text, options.held_out, options.max_mb)


def tokenizer_of(options: LanguageOptions) -> Optional[corpus.Tokenizer]:
    """Return the tokenizer; None if tokens are bytes. ConfigError if it cannot be used."""
    return None if options.tokenizer is None else corpus.Tokenizer(options.tokenizer)
