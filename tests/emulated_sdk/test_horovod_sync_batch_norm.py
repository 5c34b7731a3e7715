"""`hvd.SyncBatchNorm` equals batch normalization in one process with the samples of all ranks."""

from __future__ import annotations

from typing import Any, Dict, List

import horovod.torch as hvd
import pytest
import torch

from tests.support.ranks import set_rank

SAMPLES = [3, 5]  # samples of each rank


def samples() -> torch.Tensor:
    return torch.randn(sum(SAMPLES), 4, 6, generator=torch.Generator().manual_seed(3)) * 2 + 1


def results(layer: torch.nn.Module, own: torch.Tensor) -> Dict[str, torch.Tensor]:
    own = own.clone().requires_grad_()
    output = layer(own)
    (output**3).sum().backward()
    assert own.grad is not None
    return {
        "output": output.detach(),
        "gradient": own.grad,
        "weight": layer.weight.grad,
        "mean": layer.running_mean,
        "variance": layer.running_var,
        "inference": layer.eval()(own).detach(),
    }


def normalize(rank: int, size: int) -> Dict[str, torch.Tensor]:
    set_rank(rank, [("a", size)])
    hvd.init()
    return results(hvd.SyncBatchNorm(4), samples().split(SAMPLES)[rank])


@pytest.fixture(scope="module")
def found(ranks: Any) -> List[Dict[str, torch.Tensor]]:
    return ranks(__file__, ["normalize"], 2)["normalize"]


@pytest.mark.parametrize("what", ["output", "gradient", "inference"])
def test_samples_are_normalized_over_all_ranks(found: List[Any], what: str) -> None:
    expected = results(torch.nn.BatchNorm1d(4), samples())[what]
    torch.testing.assert_close(torch.cat([each[what] for each in found]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["mean", "variance"])
def test_running_statistics_are_those_of_all_ranks(found: List[Any], what: str) -> None:
    expected = results(torch.nn.BatchNorm1d(4), samples())[what]
    for each in found:
        torch.testing.assert_close(each[what], expected)


def test_weight_gradients_are_local(found: List[Any]) -> None:
    expected = results(torch.nn.BatchNorm1d(4), samples())["weight"]
    torch.testing.assert_close(found[0]["weight"] + found[1]["weight"], expected, rtol=1e-4, atol=1e-3)


def test_inputs_need_a_channel_dimension() -> None:
    with pytest.raises(ValueError, match="1D input"):
        hvd.SyncBatchNorm(4).train(False)(torch.zeros(4))
