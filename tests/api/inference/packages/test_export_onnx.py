"""`raypod export --format onnx`: the outputs of the network in onnxruntime, loaded without raypod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trained_runs import check_export

pytest.importorskip("onnx", reason="the extra raypod[onnx] is not installed")
onnxruntime: Any = pytest.importorskip("onnxruntime", reason="the extra raypod[onnx] is not installed")


def run_file(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input_0": images.numpy()})[0])


@pytest.mark.filterwarnings("ignore")  # of the ONNX packages
@pytest.mark.parametrize("pixels", [False, True])
def test_a_file_has_the_outputs_of_the_network(digits_run: Path, tmp_path: Path, pixels: bool) -> None:
    check_export(digits_run, "onnx", tmp_path / "model.onnx", pixels, run_file)
