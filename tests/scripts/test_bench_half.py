from __future__ import annotations

import bench_half
import pytest


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_half.main(["--models", "bert"])
    assert refusal.value.code == 2
    assert "invalid choice: 'bert'" in capsys.readouterr().err
