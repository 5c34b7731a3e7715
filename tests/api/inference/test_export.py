"""`raypod export`: files that other programs load, with the outputs of the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from raypod.__main__ import main
from raypod.api.inference import export as module
from raypod.api.inference.export import export
from raypod.api.inference.formats import METADATA_FILE
from raypod.errors import ConfigError, RunError
from raypod.training.checkpoint import tensors
from tests.support.trained_runs import check_export, digits, train_inline, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.jit and of the ONNX packages


def run_file(path: Path, images: torch.Tensor) -> torch.Tensor:
    """Return the output of a file, loaded without raypod."""
    with torch.no_grad():
        output: torch.Tensor = torch.jit.load(str(path))(images)
    return output


@pytest.mark.parametrize("pixels", [False, True])
def test_a_file_has_the_outputs_of_the_network(digits_run: Path, tmp_path: Path, pixels: bool) -> None:
    check_export(digits_run, "torchscript", tmp_path / "model.pt", pixels, run_file)


def test_safetensors_has_the_weights_and_describes_them(digits_run: Path, tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors", reason="an independent reader of the format").safe_open
    file = tmp_path / "model.safetensors"
    assert main(["export", str(digits_run), "--format", "safetensors", "--output", str(file)]) == 0
    with safe_open(str(file), "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        metadata = opened.metadata()
    summary = json.loads((digits_run / "summary.json").read_text())
    sha256 = tensors.weights_sha256({name: found[name] for name in weights_of(digits_run, 22)})
    assert (sha256, metadata["raypod.update"]) == (summary["weights_sha256"], "22")
    assert json.loads(metadata["raypod.description"])["classes"] == [str(digit) for digit in range(10)]
    assert "resnet8" in metadata["raypod.config"]


def test_a_pipeline_in_half_precision_is_exported_in_float32(half_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    found = export(half_run, "torchscript", file, pixels=True)
    assert found["inputs"] == [{"name": "input_0", "dtype": "uint8", "shape": ["batch", 1, 8, 8]}]
    extra = {METADATA_FILE: ""}
    loaded = torch.jit.load(str(file), _extra_files=extra)
    assert json.loads(extra[METADATA_FILE])["raypod.update"] == "2"
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    assert run_file(file, digits()).shape == (20, 10)


def test_a_file_of_other_outputs_is_removed(digits_run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    suffix, write = module._FORMATS["torchscript"]

    def wrong(path: Path, exported: Any, metadata: Dict[str, str]) -> Any:
        loaded = write(path, exported, metadata)
        return lambda *inputs: [each + 1 for each in loaded(*inputs)]

    monkeypatch.setitem(module._FORMATS, "torchscript", (suffix, wrong))
    file = tmp_path / "model.pt"
    assert main(["export", str(digits_run), "--format", "torchscript", "--output", str(file)]) == 1
    assert "differ by 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_traced_and_packages_that_are_missing(
    tmp_path: Path, digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "tests.support.trained_runs:Untraceable"
    run = train_inline(tmp_path / "run", "--replicas", "1", "--updates", "1", "--model", model)
    with pytest.raises(RunError, match="cannot be exported as torchscript: ValueError: no tracing"):
        export(run, "torchscript", tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxruntime: pip install 'raypod\[onnx\]'"):
        export(digits_run, "onnx")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "tflite"], "known are safetensors, torchscript, onnx"),
        ([], "the following arguments are required: --format {safetensors,torchscript,onnx,hf} ("),
        (["--format", "safetensors", "--pixels"], "--pixels has no effect on safetensors"),
        (["--format", "torchscript", "--tolerance", "0"], "--tolerance 0 must be positive"),
        (["--format", "torchscript", "--output", "/no/such/x.pt"], "does not exist"),
        (["--format", "torchscript", "--dataset", "synthetic"], "use the data set on which the model was trained"),
    ],
)
def test_wrong_requests(digits_run: Path, fails: Any, flags: List[str], message: str) -> None:
    assert message in fails(["export", str(digits_run), *flags])
    assert not list(digits_run.glob("resnet8-*"))
