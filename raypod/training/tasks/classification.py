"""Of the predictions of a classifier for all test samples: confusions, precision, recall, calibration."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from raypod.errors import ConfigError

_MAX_MATRIX = 50  # classes, up to which the report draws the confusion matrix
_MOST_CONFUSED = 20
_BINS = 15  # of the calibration, as in Guo et al. (2017)


def top_accuracy(labels: np.ndarray, classes: np.ndarray) -> float:
    """Return the share of samples whose label is among their most probable classes, in percent.

    Args:
        labels: the classes of the samples, int64 [samples].
        classes: the most probable ones, int64 [samples, number].
    """
    return 100.0 * float(np.mean((classes == labels[:, None]).any(axis=1))) if len(labels) else float("nan")


def calibration_error(labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray) -> float:
    """Return the expected calibration error in percent: the mean distance of confidence and accuracy, over 15 bins.

    Args:
        labels, predicted: the classes of the samples, int64 [samples].
        confidence: the probabilities of the predicted classes, float [samples].
    """
    bins = _calibration(labels, predicted, confidence)
    if not len(labels) or not np.isfinite(confidence).all():  # of a network whose weights are not finite
        return float("nan")
    distances = (each["samples"] * abs(each["accuracy"] - each["confidence"]) for each in bins)
    return 100.0 * float(sum(distances)) / len(labels)


def classification_details(
    labels: np.ndarray,
    predicted: np.ndarray,
    confidence: Optional[np.ndarray] = None,
    names: Optional[Sequence[str]] = None,
) -> Dict[str, Any]:
    """Return what `Task.prediction_details` of a classifier returns, and the report shows.

    Args:
        labels, predicted: the classes of the samples, int [samples].
        confidence: the probabilities of the predicted classes, float [samples]; None: no calibration.
        names: of the classes; default: their numbers.

    Returns:
        `classes`, the names; `per_class`, for each its `samples`, `precision`, `recall` (NaN where there are none);
        `confusion`, the matrix [label, predicted] of up to 50 classes, else None; `confused`, [label, predicted,
        samples] of the most frequent errors; `calibration`, for each bin with samples its `samples`, mean `confidence`
        and `accuracy`.

    Raises:
        ConfigError: there are fewer names than classes.
    """
    labels, predicted = np.asarray(labels, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    largest = int(max(labels.max(initial=-1), predicted.max(initial=-1)))
    number = len(names) if names else largest + 1
    if largest >= number:
        raise ConfigError(f"classification_details: class {largest} has no name; there are {number} names")
    pairs, counts = np.unique(labels * number + predicted, return_counts=True)
    of_label, of_predicted = np.bincount(labels, minlength=number), np.bincount(predicted, minlength=number)
    correct = np.bincount(labels[labels == predicted], minlength=number)
    wrong = [(int(count), int(pair // number), int(pair % number)) for pair, count in zip(pairs, counts)]
    wrong = sorted((each for each in wrong if each[1] != each[2]), key=lambda each: (-each[0], each[1], each[2]))
    matrix = np.zeros(number * number, dtype=np.int64)
    if number <= _MAX_MATRIX:
        matrix[pairs] = counts
    return {
        "classes": list(names) if names else [str(each) for each in range(number)],
        "per_class": {
            "samples": of_label.tolist(),
            "precision": _ratios(correct, of_predicted),
            "recall": _ratios(correct, of_label),
        },
        "confusion": matrix.reshape(number, number).tolist() if number <= _MAX_MATRIX else None,
        "confused": [[label, other, count] for count, label, other in wrong[:_MOST_CONFUSED]],
        "calibration": [] if confidence is None else _calibration(labels, predicted, confidence),
    }


def confident_errors(labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray, number: int) -> List[int]:
    """Return the indices of up to `number` samples with a wrong class, the most confident first."""
    wrong = np.flatnonzero(labels != predicted)
    order = np.argsort(-np.nan_to_num(confidence[wrong].astype(np.float64), nan=2.0), kind="stable")
    return [int(index) for index in wrong[order[:number]]]


def _ratios(numerators: np.ndarray, denominators: np.ndarray) -> List[float]:
    return [float(a / b) if b else float("nan") for a, b in zip(numerators, denominators)]


def _calibration(labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray) -> List[Dict[str, Any]]:
    """Return samples, mean confidence and accuracy of each bin of confidences that has samples."""
    values = np.nan_to_num(np.asarray(confidence, dtype=np.float64))
    bins = np.clip((values * _BINS).astype(np.int64), 0, _BINS - 1)
    found = []
    for number in np.unique(bins):
        chosen = bins == number
        share = float(np.mean(labels[chosen] == predicted[chosen]))
        found.append({"samples": int(chosen.sum()), "confidence": float(values[chosen].mean()), "accuracy": share})
    return found
