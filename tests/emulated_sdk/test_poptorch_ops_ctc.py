"""`ctc_beam_search_decoder` compared with an exhaustive search of all alignments."""

from __future__ import annotations

import itertools
import math
from typing import Dict, Tuple

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.poptorch_models import options

BLANK = 1


def log_probs(steps: int, batch: int, classes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, batch, classes, generator=generator).log_softmax(-1)


def all_sequences(sample: torch.Tensor, blank: int) -> Dict[Tuple[int, ...], float]:
    """Return the log-probability of every label sequence: the sum over the alignments that collapse to it."""
    found: Dict[Tuple[int, ...], float] = {}
    for alignment in itertools.product(range(sample.shape[1]), repeat=sample.shape[0]):
        labels = tuple(label for label, _ in itertools.groupby(alignment) if label != blank)
        score = sum(float(sample[step, label]) for step, label in enumerate(alignment))
        found[labels] = math.log(math.exp(found.get(labels, -math.inf)) + math.exp(score))
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(2, 3), st.integers(0, 1000), st.integers(0, 1))
def test_wide_beam_finds_the_best_sequences(steps, classes, seed, blank):
    probs, top = log_probs(steps, 1, classes, seed), 3
    scores, lengths, labels = poptorch.ctc_beam_search_decoder(probs, torch.tensor([steps]), blank, 200, top)
    reference = all_sequences(probs[:, 0], blank)
    best = sorted(reference.values(), reverse=True)[:top]
    for rank, expected in enumerate(best):
        path = tuple(labels[0, rank, : lengths[0, rank]].tolist())
        assert scores[0, rank].item() == pytest.approx(expected, abs=1e-4)
        assert reference[path] == pytest.approx(expected, abs=1e-4)


class Decoder(nn.Module):
    def forward(self, probs: torch.Tensor, lengths: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        # The inputs of a model have the batch in dimension 0.
        return poptorch.ctc_beam_search_decoder(probs.transpose(0, 1), lengths, BLANK, 8, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_model_returns_the_same_as_the_host(dtype):
    probs, lengths = log_probs(6, 4, 3).to(dtype), torch.tensor([6, 0, 3, 1])
    model = poptorch.inferenceModel(Decoder(), options(replicas=2))
    scores, sizes, labels = model(probs.transpose(0, 1).contiguous(), lengths)
    on_host = poptorch.ctc_beam_search_decoder(probs, lengths, BLANK, 8, 2)
    assert [tensor.dtype for tensor in on_host] == [dtype, torch.int32, torch.int32]
    assert (scores.shape, sizes.shape, labels.shape) == ((4, 2), (4, 2), (4, 2, 6))
    for got, expected in zip((scores, sizes, labels), on_host):
        assert torch.equal(got, expected)


def test_empty_input_returns_only_the_empty_sequence():
    scores, sizes, labels = poptorch.ctc_beam_search_decoder(log_probs(3, 1, 3), torch.tensor([0]), BLANK, 4, 2)
    assert scores.tolist() == [[0.0, -math.inf]]
    assert not sizes.any()
    assert (labels == BLANK).all()


def test_steps_beyond_length_are_ignored():
    probs = log_probs(5, 1, 3)
    full = poptorch.ctc_beam_search_decoder(probs[:3], torch.tensor([3]), BLANK, 8, 1)
    padded = poptorch.ctc_beam_search_decoder(probs, torch.tensor([3]), BLANK, 8, 1)
    assert torch.equal(full[0], padded[0])
    assert torch.equal(full[2], padded[2][:, :, :3])


def test_repeated_label_needs_a_blank_in_between():
    steps = torch.full((3, 1, 3), -50.0)
    steps[0, 0, 2] = steps[1, 0, BLANK] = steps[2, 0, 2] = 0.0
    _, sizes, labels = poptorch.ctc_beam_search_decoder(steps, torch.tensor([3]), BLANK)
    assert (sizes.tolist(), labels.tolist()) == ([[2]], [[[2, 2, BLANK]]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probs": torch.ones(3, 2)}, r"\[input length, batch, classes\], not float32 \[3, 2\]"),
        ({"probs": torch.ones(3, 2, 3).long()}, "floating point"),
        ({"lengths": torch.tensor([3])}, r"`lengths` must be \[2\] integers"),
        ({"lengths": torch.tensor([3, 4])}, r"`lengths` must be in 0...3, the input length, not \[3, 4\]"),
        ({"lengths": [3, 3]}, "`lengths` must be a tensor"),
        ({"blank": 3}, "`blank` is 3, but there are 3 classes"),
        ({"beam_width": 0}, "`beam_width` must be a constant int of at least 1"),
        ({"beam_width": 2, "top_paths": 3}, "top_paths=3 is more than beam_width=2"),
    ],
)
def test_rejects_invalid_arguments(change, message):
    arguments = {"probs": log_probs(3, 2, 3), "lengths": torch.tensor([3, 3]), **change}
    with pytest.raises(poptorch.Error, match=message):
        poptorch.ctc_beam_search_decoder(**arguments)
