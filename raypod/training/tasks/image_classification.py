"""Image classification by cross-entropy; the metric is the accuracy.

Read image files as the test samples of a data set: its number of channels, its size, its transform.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import MAX_IMAGE_PIXELS, Config
from raypod.training import data as datasets
from raypod.training.data.arrays import Splits
from raypod.training.data.image_files import KINDS, ImageFiles, ImageWalk
from raypod.training.data.images import ImageSource, Mixed, Mixing, input_shape, weighted_labels
from raypod.training.data.loading import NO_EPOCH, SeededSamples
from raypod.training.data.order import kept_samples
from raypod.training.data.pixels import eight_bit, open_image, thumbnail
from raypod.training.data.read_failures import ReadFailed
from raypod.training.data.source import Batch, Source
from raypod.training.data.transforms import activation_dtype, device_input, resize
from raypod.training.models import library_models
from raypod.training.models.networks import build_model
from raypod.training.models.predictions import most_probable
from raypod.training.tasks.classification import (
    calibration_error,
    classification_details,
    confident_errors,
    top_accuracy,
)
from raypod.training.tasks.image_facts import PREDICTIONS, TEST_METRICS
from raypod.training.tasks.task import Predicted, Ratios, Task

_TOP = 5  # classes that an evaluation returns for each image


class ImageClassification(Task):
    """Classifies images: batches of (images [n, channels, height, width], labels int64 [n])."""

    predictions, test_metrics = PREDICTIONS, TEST_METRICS

    def __init__(self, config: Config) -> None:
        super().__init__(library_models.with_image_size(config))
        self.user_code = config.training.model if config.training.has_own_model else None
        self._splits: Optional[Splits] = None

    def load(self) -> Source:
        self._splits = library_models.with_statistics(self.config, datasets.load(self.config))
        return ImageSource(self.config, self._splits)

    def network(self, first_batch: Batch) -> nn.Module:
        channels, side = input_shape(self.config, first_batch[0])
        return build_model(self.config, channels, side, self._num_classes())

    def device_input(self, first_batch: Batch) -> nn.Module:
        assert self._splits is not None, "call load first"
        height, width = first_batch[0].shape[2:]
        dtype = activation_dtype(self.config.training.precision)
        data = self.config.data
        module = device_input(dtype, self._splits.mean, self._splits.std, (height, width), data.image_size)
        return Mixing(data, module) if data.mixup_alpha or data.has_cutmix else module

    def example(self, samples: int) -> Batch:
        shape, dtype = datasets.image_shape(self.config), activation_dtype(self.config.training.precision)
        images = torch.zeros(1, shape.channels, shape.side, shape.side, dtype=dtype).expand(samples, -1, -1, -1)
        return images, torch.zeros(samples, dtype=torch.int64)

    def logits(self, network: Any, images: Any) -> torch.Tensor:
        """Return the output of the network for images: [n, classes]."""
        found: torch.Tensor = network(images)
        return found

    def _checked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the output of the network as float32. ConfigError if it has not one value per class."""
        classes = self._num_classes()
        if list(logits.shape[1:]) != [classes]:
            name, found = self.config.training.model, " x ".join(map(str, logits.shape[1:])) or "no"
            raise ConfigError(f"--model {name} has {found} outputs for an image, and the data set {classes} classes")
        return logits.float()

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the mean cross-entropy, with the label smoothing of the config, and the accuracy.

        The labels of mixed images are weighted; the accuracy is that of the labels of the batch.
        """
        images, labels, *words = batch
        smoothing = self.config.training.label_smoothing
        logits = self._checked(self.logits(network, Mixed((images, *words)) if words else images))
        loss = self._mixed_loss(logits, labels, words[0]) if words else functional.cross_entropy(logits, labels)
        if smoothing:
            of_all_classes = -functional.log_softmax(logits, dim=1).mean()
            loss = (1 - smoothing) * loss + smoothing * of_all_classes
        return loss, {"accuracy": ((logits.argmax(dim=1) == labels).sum(), len(labels))}

    def _mixed_loss(self, logits: torch.Tensor, labels: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        log_probabilities = functional.log_softmax(logits, dim=1)
        losses = [
            functional.nll_loss(log_probabilities, each, reduction="none") * share
            for each, share in weighted_labels(self.config.data, labels, words)
        ]
        return torch.stack(losses).sum(dim=0).mean()

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[Ratios, Predicted]:
        """Return cross-entropy and accuracy, and the most probable classes."""
        images, labels = batch
        logits, targets = self._checked(self.logits(network, images)), labels.to(torch.int64)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        ratios: Ratios = {"loss": (losses, 1), "accuracy": (logits.argmax(dim=1) == targets, 1)}
        values, classes = functional.softmax(logits, dim=1).topk(min(_TOP, logits.shape[1]), dim=1)
        return ratios, {"label": targets, "classes": classes, "probabilities": values}

    def prediction_metrics(self, predictions: Mapping[str, np.ndarray]) -> Dict[str, float]:
        """Return the accuracy among the 5 most probable classes, and the expected calibration error."""
        labels, classes = predictions["label"], predictions["classes"]
        error = calibration_error(labels, classes[:, 0], predictions["probabilities"][:, 0])
        return {"top5_accuracy": top_accuracy(labels, classes), "calibration_error": error}

    def prediction_details(self, predictions: Mapping[str, np.ndarray]) -> Dict[str, Any]:
        """See `classification_details`; `errors` are the samples of `--report-samples`."""
        labels, classes, probabilities = (predictions[name] for name in PREDICTIONS)
        predicted, confidence = classes[:, 0], probabilities[:, 0]
        details = classification_details(labels, predicted, confidence, self.description()["classes"])
        number = self.config.run.report_samples
        if number and self._splits is not None:
            indices = confident_errors(labels, predicted, confidence, number)
            kept = kept_samples(self.config.data.left_out("test"), len(self._splits.test))
            details["errors"] = [
                {
                    **self._shown(int(kept[index])),
                    "label": int(labels[index]),
                    "predicted": int(predicted[index]),
                    "confidence": float(confidence[index]),
                    "label_probability": _probability(classes[index], probabilities[index], labels[index]),
                }
                for index in indices
            ]
        return details

    def _shown(self, sample: int) -> Dict[str, Any]:
        """Return the number of a test sample and its image as a data URL; None if it cannot be read now."""
        assert self._splits is not None, "call load first"
        try:
            _, (image, _) = SeededSamples(self._splits.test, self.config.training.seed)[NO_EPOCH, sample]
        except ReadFailed as error:
            warnings.warn(f"the report has no image of test sample {sample}: {error}", RuntimeWarning, 2)
            return {"sample": sample, "image": None}
        pixels = torch.as_tensor(image)
        pixels = pixels if pixels.dtype == torch.uint8 else pixels.float()
        return {"sample": sample, "image": thumbnail(pixels.numpy())}

    def description(self) -> Dict[str, Any]:
        """See `Task.description`: the classes, and mean and standard deviation of images scaled to [0, 1]."""
        assert self._splits is not None, "call load first"
        return {"classes": self.class_names(), "mean": list(self._splits.mean), "std": list(self._splits.std)}

    def class_names(self) -> List[str]:
        """Return the names of the classes, which are their numbers in data sets without names."""
        names = () if self._splits is None else self._splits.names
        return list(names or map(str, range(self._num_classes())))

    def _num_classes(self) -> int:
        return datasets.image_shape(self.config).classes if self._splits is None else self._splits.classes

    def predict(self, network: Any, inputs: Sequence[str], top: int) -> Iterable[Dict[str, Any]]:
        """See `Task.predict`: `inputs` are image files, and folders that contain some."""
        assert self._splits is not None, "call load first"
        data, source = self.config.data, ImageSource(self.config, self._splits)
        reader = ImageReader(data.dataset, self._splits, data.max_image_pixels)
        names = self.description()["classes"]
        for path in image_files(inputs):
            labels = torch.zeros(1, dtype=torch.int64)
            images, _ = source.to_device_format((reader.read(path)[None], labels))
            yield {"image": str(path), "predictions": most_probable(self.logits(network, images)[0], names, top)}


def _probability(classes: np.ndarray, probabilities: np.ndarray, label: int) -> Optional[float]:
    """Return the probability of the label of a sample; None if it is none of the most probable classes."""
    found = probabilities[classes == label]
    return float(found[0]) if len(found) else None


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by the number of channels


def image_files(names: Sequence[str]) -> List[Path]:
    """Return the named files, and the images in the named folders in the order of their names.

    Raises:
        ConfigError: a name does not exist, or a folder contains no image or cannot be read.
    """
    found: List[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            try:
                inside = sorted(map(Path, ImageWalk().images(str(path))))
            except OSError as error:
                raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}") from None
            if not inside:
                raise ConfigError(f"{name} contains no images ({KINDS})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(f"{name}: there is no such image or folder")
    return found


class ImageReader:
    """Prepares image files for a model.

    Test splits with the attribute `transform`, as those of torchvision, transform the Pillow image themselves. Other
    images are resized to the size of the samples.
    """

    def __init__(self, dataset: str, splits: Splits, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        """`dataset` is the name of the data set, for messages; `max_pixels` the limit of an image.

        Raises:
            ConfigError: its samples are no images from which the preparation of others follows.
        """
        split: Any = splits.test if len(splits.test) else splits.train
        name = "test" if len(splits.test) else "training"
        with user_code.reported(f"{name} sample 0 of {dataset}"):
            sample = torch.as_tensor(split[0][0])
        channels, self._height, self._width = sample.shape
        self._transform = getattr(split, "transform", None)
        self._decode = split.transform.decode if isinstance(split, ImageFiles) else None
        if channels not in _MODES:
            raise ConfigError(f"{dataset}: the model gets images of {channels} channels, which image files do not have")
        if self._transform is None and sample.dtype != torch.uint8:
            raise ConfigError(
                f"{dataset}: its samples are {sample.dtype}, and how it computes them is unknown: give its test split "
                "the attribute transform, which maps a Pillow image to a tensor"
            )
        self._max_pixels = max_pixels
        self._mode, self._shape = _MODES[channels], tuple(sample.shape)

    def read(self, path: Path) -> torch.Tensor:
        """Return an image [channels, height, width] as a sample of the data set. ConfigError if it cannot be read."""
        try:
            if self._decode is not None:
                return self._decode(path.read_bytes())
            with open_image(path, self._max_pixels) as file:
                image = eight_bit(file, self._mode)
                if self._transform is not None:
                    return torch.as_tensor(self._transform(image))
        except Exception as error:  # noqa: BLE001 - Pillow and the user's transform raise many exception types
            raise ConfigError(f"cannot read the image {path}: {' '.join(str(error).split())}") from None
        pixels = np.array(image, dtype=np.uint8).reshape(image.height, image.width, self._shape[0])
        channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        return torch.from_numpy(resize(channels_first, (self._height, self._width)))[0]
