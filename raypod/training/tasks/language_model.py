"""Causal language modeling of text with a GPT-2 style decoder; loss, perplexity and bits per byte."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, List, Sequence, Tuple, Type

import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan.config import Config, TaskOptions
from raypod.training.data import corpus
from raypod.training.data.source import Batch, Source
from raypod.training.data.text import IGNORED, PackedWindows, SequenceSource, TextSource, Windows
from raypod.training.models.decoder import SIZES, Decoder
from raypod.training.tasks.language_facts import (
    LanguageOptions,
    generated_windows,
    packed_text_of,
    padded,
    pieces_of,
    tokenizer_of,
    vocabulary_of,
)
from raypod.training.tasks.task import Ratios, Task


class LanguageModel(Task):
    """Predicts each token of a window from those before it.

    A batch is (tokens int32 [n, sequence_length + 1], bytes of the predicted tokens int32 [n]), or that of
    `SequenceSource`.
    """

    Options: ClassVar[Type[TaskOptions]] = LanguageOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._packed = packed_text_of(config, self.options)
        self._tokenizer = tokenizer_of(self.options) if self._packed is None else self._packed.tokenizer()
        self._vocabulary = vocabulary_of(self.options, self._tokenizer)

    def load(self) -> Source:
        length, counts = self.options.sequence_length, generated_windows(self.options)
        content = None
        if self._packed is not None:
            (train, test), content = self._packed.texts(), self._packed.content
        elif counts is None:
            train, test = (corpus.encode(pieces, self._tokenizer) for pieces in pieces_of(self.options))
        else:
            seed = self.config.training.seed
            sizes = (count * length + 1 for count in counts)
            train, test = (corpus.random_text(size, self._vocabulary, (seed, part)) for part, size in enumerate(sizes))
        if self.options.pack_sequences:
            return SequenceSource(PackedWindows(train, length), PackedWindows(test, length), content)
        return TextSource(Windows(train, length), Windows(test, length), content)

    def example(self, samples: int) -> Batch:
        length, num_bytes = self.options.sequence_length, torch.zeros(samples, dtype=torch.int32)
        if getattr(self.options, "pack_sequences", False):
            zeros = torch.zeros(samples, length, dtype=torch.int32)
            return zeros, zeros.clone(), zeros.clone(), zeros.clone(), num_bytes
        return torch.zeros(samples, length + 1, dtype=torch.int32), num_bytes

    def network(self, first_batch: Batch) -> nn.Module:
        options = self.options
        vocabulary = padded(self._vocabulary, options.serialize)
        sizes = (SIZES[options.size], vocabulary, options.sequence_length)
        return Decoder(*sizes, options.dropout, options.tied_embeddings, options.serialize)

    def parameter_groups(self, network: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
        """Return the parameter groups of the optimizer. Norms, biases and embeddings have no weight decay.

        The weights of a tied embedding have that of the output layer.
        """
        decayed = [module.weight for module in network.modules() if isinstance(module, nn.Linear)]
        others = [each for each in network.parameters() if not any(each is weight for weight in decayed)]
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

    def logits(self, network: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return the output of the network for tokens [n, length]: [n, length, vocabulary]."""
        found: torch.Tensor = network(tokens)
        return found

    def _logits_and_targets(self, network: Any, batch: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        if len(batch) > 2:
            tokens, labels, segments, places = batch[:-1]
            return network(tokens, segments, places), labels.to(torch.int64)
        tokens = batch[0]
        return self.logits(network, tokens[:, :-1]), tokens[:, 1:].to(torch.int64)

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the mean cross-entropy per token, and perplexity and bits per byte."""
        from raypod.training.models.program import mean_loss  # imports the SDK, which only a training has

        logits, targets = self._logits_and_targets(network, batch)
        count = (targets != IGNORED).sum() if len(batch) > 2 else None
        loss = mean_loss(logits, targets, getattr(self.options, "loss_tokens", None), count)
        total = loss * (targets.numel() if count is None else count)
        return loss, {"perplexity": (loss, 1), "bits_per_byte": (total, batch[-1].sum())}

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Ratios:
        """Return cross-entropy, perplexity and bits per byte."""
        logits, targets = self._logits_and_targets(network, batch)
        losses = functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").sum(dim=1)
        per_token = (losses, (targets != IGNORED).sum(dim=1) if len(batch) > 2 else targets.shape[1])
        return {"loss": per_token, "perplexity": per_token, "bits_per_byte": (losses, batch[-1])}

    def generate(self, network: Any, prompt: str, length: int, temperature: float, seed: int) -> str:
        """See `Task.generate`. Each token is predicted from the `sequence_length` tokens before it."""
        tokens = corpus.tokens_of(prompt, self._tokenizer)
        if not tokens:
            raise ConfigError("--prompt must not be empty")
        generator, given = torch.Generator().manual_seed(seed), len(tokens)
        for _ in range(length):
            window = torch.tensor([tokens[-self.options.sequence_length :]], dtype=torch.int32)
            logits = self.logits(network, window)[0, -1, : self._vocabulary].double()
            if temperature:
                chosen = torch.multinomial(functional.softmax(logits / temperature, dim=0), 1, generator=generator)
            else:
                chosen = logits.argmax()
            tokens.append(int(chosen))
        return corpus.text_of(tokens[given:], self._tokenizer)
