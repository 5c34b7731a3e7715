"""The operators of graphcore/examples: GPT-2, Swin, MAE, DINO, Conformer, YOLO and the tutorial on custom operators."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
import torch.nn.functional as F

from poptorch.custom_operators.registry import built_in_emulation
from poptorch.device_mode import request_average, updated_average
from poptorch.errors import Error

_NO_INDEX, _NO_CLASS = -1, torch.iinfo(torch.int32).max  # of an output without a detection


@built_in_emulation("RemapCE")
def remap(x: torch.Tensor, **layout: Any) -> torch.Tensor:
    """Return the tensor itself: the operator spreads it over the tiles of an IPU in another way.

    GPT-2 passes `grain_size` only; Swin, MAE and Conformer that and more for the forward and the backward pass.
    """
    return x


@built_in_emulation("CopyTensor")
def copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy (YOLO)."""
    return x


@built_in_emulation("LeakyRelu", domain="custom.ops")
def leaky_relu(x: torch.Tensor, alpha: float = 0.01) -> torch.Tensor:
    """Return the negative elements times alpha, and the others as they are (the tutorial on custom operators)."""
    return torch.where(x < 0, alpha * x, x)


@built_in_emulation("ExpMovAvg", domain="com.acme")
def moving_average(weight: torch.Tensor, average: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Update a parameter to factor x average + (1 - factor) x weight, once per weight update, and return it (DINO).

    The weight is the one before the update, as PopART runs what reads a variable before what changes it. [inferred]
    """
    if not isinstance(average, torch.nn.Parameter):
        raise Error("ExpMovAvg: its second input is the parameter that it updates, not another tensor")
    request_average(average, weight, factor)
    return updated_average(average, weight, factor).to(average.dtype)


@built_in_emulation("Ctc")
def ctc(  # noqa: PLR0913  # the operator's attributes
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    reduction: str,
    blank: int,
    outDataType: Any = "UNDEFINED",  # PopART's name
    zeroInfinity: int = 0,  # as above
    enableReducedClassesInLabel: int = 0,  # as above
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the CTC loss and its gradient by the log-probabilities; PopART's operator, which Conformer calls.

    Args:
        log_probs: [steps, batch, classes].
        targets: [batch, labels].
        reduction: "Sum", "Mean" (over the batch) or "NoReduction".
        outDataType: the dtype is that of `log_probs`.
        zeroInfinity: losses of targets that do not fit into the input are 0.
        enableReducedClassesInLabel: changes the memory only.
    """
    lengths = input_lengths.long(), target_lengths.long()
    with torch.enable_grad():  # the second output is a gradient also where the model is for inference
        source = log_probs.detach().float().requires_grad_()
        each = F.ctc_loss(source, targets.long(), *lengths, blank, "none", bool(zeroInfinity))
        (gradient,) = torch.autograd.grad(each.sum(), source)
    losses = _CtcLoss.apply(log_probs, each.detach().to(log_probs.dtype), gradient)  # type: ignore[no-untyped-call]
    reduced = {"Sum": losses.sum, "Mean": losses.mean, "NoReduction": losses.clone}
    if reduction not in reduced:
        raise Error(f"Ctc: unknown reduction {reduction!r}; known are {', '.join(reduced)}")
    return reduced[reduction](), gradient.to(log_probs.dtype)


class _CtcLoss(torch.autograd.Function):
    """Losses whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, losses: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * scale[:, None]).to(scale.dtype), None, None


@built_in_emulation("Nms")
def non_maximum_suppression(  # the operator's attributes
    scores: torch.Tensor,
    boxes: torch.Tensor,
    threshold: float = 0.5,
    scoreThreshold: float = -torch.finfo(torch.float32).max,  # the operator's name
    numDetections: int = 100,  # as above
    sigma: float = 0.0,
    useGather: int = 0,  # as above
) -> Tuple[torch.Tensor, ...]:
    """Return the best boxes of each image, of which no two of a class overlap (YOLO); without gradients.

    Args:
        scores: [batch, boxes, classes].
        boxes: [batch, boxes, 4], as (left, top, right, bottom).
        threshold: a box whose intersection over union with a better one of its class is larger is dropped.
        scoreThreshold: boxes are considered while their score is larger.
        sigma: if not 0, scores of overlapping boxes are multiplied by exp(-overlap^2 / sigma) instead (soft).
        useGather: changes how the IPU computes only.

    Returns:
        indices [batch, numDetections], -1 without a detection; scores; boxes; classes, the largest int32 without a
        detection; and the number of detections of each image.
    """
    found = [
        _detections(*each, threshold, scoreThreshold, numDetections, sigma)
        for each in zip(scores.detach().float(), boxes.detach().float())
    ]
    rows, columns = (len(found), numDetections), torch.tensor([len(each) for each in found])
    indices = torch.full(rows, _NO_INDEX)
    classes = torch.full(rows, _NO_CLASS)
    kept_scores, kept_boxes = torch.zeros(rows), torch.zeros(*rows, 4)
    for row, detections in enumerate(found):
        for column, (index, kind, score) in enumerate(detections):
            indices[row, column], classes[row, column], kept_scores[row, column] = index, kind, score
            kept_boxes[row, column] = boxes[row, index].detach()
    return indices, kept_scores.to(scores.dtype), kept_boxes.to(boxes.dtype), classes, columns


def _detections(
    scores: torch.Tensor, boxes: torch.Tensor, threshold: float, least: float, count: int, sigma: float
) -> List[Tuple[int, int, float]]:
    """Return (box, class, score) of the detections in one image, best first."""
    scores = scores.clone()
    kept: List[Tuple[int, int, float]] = []
    while len(kept) < count:
        index, kind = divmod(int(scores.argmax()), scores.shape[1])
        score = float(scores[index, kind])
        if not score > least or score == -torch.inf:
            break
        kept.append((index, kind, score))
        scores[index, kind] = -torch.inf
        overlap = _overlap(boxes, boxes[index])
        of_class = scores[:, kind]
        weaker = of_class * torch.exp(-overlap.square() / sigma) if sigma else of_class.clone()
        if not sigma:
            weaker[overlap > threshold] = -torch.inf
        scores[:, kind] = torch.where(of_class > least, weaker, of_class)
    return kept


def _overlap(boxes: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of each box with one."""
    sides = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp(min=0)
    intersection = sides.prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return intersection / (areas + (box[2:] - box[:2]).prod() - intersection)
