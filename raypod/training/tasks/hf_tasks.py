"""Tasks with models of transformers: language models, classification of sequences, tokens and images."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.training.data import corpus
from raypod.training.data.hf_folder import HfFolder
from raypod.training.data.images import input_shape
from raypod.training.data.labelled_text import SEQUENCES, texts_in
from raypod.training.data.samples import Arrays, SampleSource
from raypod.training.data.source import Batch, Source
from raypod.training.data.text import IGNORED, MaskedSource, TextSource, Windows
from raypod.training.models import hf_models
from raypod.training.models.predictions import most_probable
from raypod.training.tasks.classification import classification_details
from raypod.training.tasks.hf_facts import (
    ImageOptions,
    LabelledOptions,
    MaskedOptions,
    WindowOptions,
    examples_of,
    packed_text_of,
)
from raypod.training.tasks.image_classification import ImageClassification
from raypod.training.tasks.language_facts import pieces_of
from raypod.training.tasks.language_model import LanguageModel
from raypod.training.tasks.task import Predicted, Ratios, Task


class HfCausalLm(LanguageModel):
    """Predicts each token of a window from those before it; batches as those of `LanguageModel`."""

    Options = WindowOptions

    def __init__(self, config: Config) -> None:
        Task.__init__(self, config)
        self.folder = HfFolder(config)
        self._tokenizer = self.folder.tokenizer()
        self._vocabulary = self._tokenizer.vocabulary

    def load(self) -> Source:
        train, test, content = _windows(self)
        return TextSource(train, test, content)

    def network(self, first_batch: Batch) -> nn.Module:
        return hf_models.build(self.config.task.name, self.folder, self.options.from_scratch)

    def parameter_groups(self, network: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
        return Task.parameter_groups(self, network, weight_decay)

    def logits(self, network: Any, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = network(input_ids=tokens).logits
        return found


class HfMaskedLm(Task):
    """Predicts masked tokens of a window: batches of (tokens int32 [n, length], labels int32 [n, length])."""

    Options = MaskedOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = HfFolder(config)
        self._tokenizer = self.folder.tokenizer()

    def load(self) -> Source:
        mask = self.folder.special_token("mask_token")
        number = self._tokenizer.number_of(mask or "[MASK]")
        if number is None:
            raise ConfigError(f"--model {self.config.training.model}: the tokenizer has no token for masked ones")
        train, test, content = _windows(self)
        drawn = self.config.training.seed, self.options.masked
        return MaskedSource(train, test, *drawn, self._tokenizer, number, content)

    def example(self, samples: int) -> Batch:
        tokens = torch.zeros(samples, self.options.sequence_length, dtype=torch.int32)
        return tokens, tokens.clone()

    def network(self, first_batch: Batch) -> nn.Module:
        return hf_models.build(self.config.task.name, self.folder, self.options.from_scratch)

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the mean cross-entropy of the masked tokens, the perplexity and the accuracy."""
        tokens, labels = batch
        loss, accuracy = _token_outputs(self._logits(network, tokens), labels)
        return loss, {"perplexity": (loss, 1), "accuracy": accuracy}

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Ratios:
        """Return cross-entropy, perplexity and accuracy."""
        tokens, labels = batch
        ratios = _token_ratios(self._logits(network, tokens), labels)
        return {**ratios, "perplexity": ratios["loss"]}

    def _logits(self, network: Any, tokens: torch.Tensor) -> torch.Tensor:
        # With a mask, transformers does not look for padding in the tokens.
        found: torch.Tensor = network(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        return found


def _windows(task: Any) -> Tuple[Windows, Windows, Optional[str]]:
    """Return the windows of both splits of a task's text, and `text.hash_of` them if it is known."""
    packed, length = packed_text_of(task.config, task.options, task.folder), task.options.sequence_length
    if packed is None:
        tokenizer = task.folder.tokenizer()
        train, test = (corpus.encode(pieces, tokenizer) for pieces in pieces_of(task.options))
        return Windows(train, length), Windows(test, length), None
    train, test = packed.texts()
    return Windows(train, length), Windows(test, length), packed.content


class _Labelled(Task):
    """Classifies texts or their tokens: batches of `input_ids`, `attention_mask` and `labels`, int32, by name."""

    Options = LabelledOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = HfFolder(config)
        self.names = ("input_ids", "attention_mask", "labels")
        found = examples_of(config, self.folder)
        self._splits, self._classes = (found.train, found.test), found.names

    def load(self) -> Source:
        train, test = (self._arrays(examples) if examples else None for examples in self._splits)
        seed, first = self.config.training.seed, self.config.data.first_sample
        return SampleSource(self.config.task.name, (train, test), seed, first)

    def _arrays(self, examples: List[Any]) -> Arrays:
        tokenizer, length = self.folder.tokenizer(), self.options.sequence_length
        encoded = tokenizer.padded([inputs for inputs, _ in examples], length, self._padding())
        rows = [self._label(each, labels) for each, (_, labels) in zip(encoded, examples)]
        return Arrays(
            input_ids=np.array([each.ids for each in encoded], dtype=np.int32),
            attention_mask=np.array([each.attention_mask for each in encoded], dtype=np.int32),
            labels=np.array(rows, dtype=np.int32),
        )

    def _label(self, encoded: Any, labels: Any) -> Any:
        raise NotImplementedError

    def _padding(self) -> Optional[str]:
        return self.folder.special_token("pad_token") or self.folder.special_token("eos_token")

    def network(self, first_batch: Batch) -> nn.Module:
        settings = {}
        if self.folder.config.get("pad_token_id") is None:  # with which a decoder finds the last token of a text
            settings["pad_token_id"] = self.folder.tokenizer().number_of(self._padding() or "") or 0
        name, from_scratch = self.config.task.name, self.options.from_scratch
        return hf_models.build(name, self.folder, from_scratch, self._classes, **settings)

    def description(self) -> Dict[str, Any]:
        """See `Task.description`: the classes."""
        return {"classes": list(self._classes)}


class HfSequenceClassification(_Labelled):
    """Classifies texts."""

    predictions = ("label", "predicted", "probability")

    def _label(self, encoded: Any, labels: Any) -> Any:
        return self._classes.index(labels)

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the mean cross-entropy and the accuracy."""
        labels = named.pop("labels").to(torch.int64)
        logits = network(**named).logits.float()
        loss = functional.cross_entropy(logits, labels)
        return loss, {"accuracy": ((logits.argmax(dim=1) == labels).sum(), len(labels))}

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[Ratios, Predicted]:
        """Return cross-entropy and accuracy, and the most probable class."""
        labels = named.pop("labels").to(torch.int64)
        logits = network(**named).logits.float()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        values, classes = functional.softmax(logits, dim=1).max(dim=1)
        ratios: Ratios = {"loss": (losses, 1), "accuracy": (classes == labels, 1)}
        return ratios, {"label": labels, "predicted": classes, "probability": values}

    def prediction_details(self, predictions: Mapping[str, np.ndarray]) -> Dict[str, Any]:
        """See `classification_details`."""
        labels, predicted, confidence = (predictions[name] for name in self.predictions)
        return classification_details(labels, predicted, confidence, self._classes)

    def predict(self, network: Any, inputs: Sequence[str], top: int) -> Iterable[Dict[str, Any]]:
        """See `Task.predict`: `inputs` are files of texts, which are tokenized as those of the training."""
        for text in texts_in(SEQUENCES, inputs):
            (encoded,) = self.folder.tokenizer().padded([text], self.options.sequence_length, self._padding())
            ids, mask = (torch.tensor([each], dtype=torch.int32) for each in (encoded.ids, encoded.attention_mask))
            logits = network(input_ids=ids, attention_mask=mask).logits[0]
            yield {"text": text, "predictions": most_probable(logits, self._classes, top)}


class HfTokenClassification(_Labelled):
    """Classifies the words of texts, each by its first token."""

    def _label(self, encoded: Any, labels: Any) -> Any:
        words = encoded.word_ids
        firsts = [word is not None and word not in words[:place] for place, word in enumerate(words)]
        return [self._classes.index(labels[word]) if first else IGNORED for word, first in zip(words, firsts)]

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the mean cross-entropy and the accuracy of the words."""
        labels = named.pop("labels")
        loss, accuracy = _token_outputs(network(**named).logits, labels)
        return loss, {"accuracy": accuracy}

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Ratios:
        """Return cross-entropy and accuracy."""
        labels = named.pop("labels")
        return _token_ratios(network(**named).logits, labels)


def _token_outputs(logits: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, Tuple[Any, Any]]:
    """Return the mean cross-entropy of the tokens with a label, and numerator and denominator of their accuracy."""
    logits, targets = logits.float().flatten(0, 1), labels.to(torch.int64).flatten()
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    return loss, ((logits.argmax(dim=1) == targets).sum(), (targets != IGNORED).sum())


def _token_ratios(logits: torch.Tensor, labels: torch.Tensor) -> Ratios:
    """Return cross-entropy and accuracy per sample, over the tokens with a label."""
    logits, targets = logits.float(), labels.to(torch.int64)
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
    count = (targets != IGNORED).sum(dim=1)
    return {"loss": (losses.sum(dim=1), count), "accuracy": ((logits.argmax(dim=2) == targets).sum(dim=1), count)}


class HfImageClassification(ImageClassification):
    """Classifies the images of `--dataset`; batches as those of `ImageClassification`."""

    Options = ImageOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = HfFolder(config)

    def network(self, first_batch: Batch) -> nn.Module:
        channels, _ = input_shape(self.config, first_batch[0])
        expected = self.folder.config.get("num_channels", channels)
        if expected != channels:
            raise ConfigError(f"--model {self.config.training.model} has {expected} channels, the images {channels}")
        return hf_models.build(self.config.task.name, self.folder, self.options.from_scratch, self.class_names())

    def logits(self, network: Any, images: Any) -> torch.Tensor:
        found: torch.Tensor = network(images).logits
        return found
