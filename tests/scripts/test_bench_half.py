from __future__ import annotations

import bench_half
import pytest
import torch


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_half.main(["--models", "bert"])
    assert refusal.value.code == 2
    assert "invalid choice: 'bert'" in capsys.readouterr().err


def test_errors_are_in_units_of_the_last_place_of_the_largest_value() -> None:
    expected = [torch.tensor([1.5, 0.0]), torch.tensor([4.0])]
    found = [torch.tensor([1.5, 2.0**-10]), torch.tensor([4.0 - 2.0**-7])]
    assert bench_half.summary(found, expected) == "1 / 1 / 2"
