"""Image classification with a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.training.data.hf_folder import HfFolder
from raypod.training.data.images import input_shape
from raypod.training.data.source import Batch
from raypod.training.models import hf_models
from raypod.training.tasks.hf_facts import ImageOptions
from raypod.training.tasks.image_classification import ImageClassification


class HfImageClassification(ImageClassification):
    """Classifies the images of `--dataset`; batches as those of `ImageClassification`."""

    Options = ImageOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = HfFolder(config)

    def network(self, first_batch: Batch) -> nn.Module:
        """See `Task.network`."""
        channels, _ = input_shape(self.config, first_batch[0])
        expected = self.folder.config.get("num_channels", channels)
        if expected != channels:
            raise ConfigError(f"--model {self.config.training.model} has {expected} channels, the images {channels}")
        return hf_models.build(self.config.task.name, self.folder, self.options.from_scratch, self.class_names())

    def logits(self, network: Any, images: Any) -> torch.Tensor:
        """See `ImageClassification.logits`."""
        found: torch.Tensor = network(images).logits
        return found
