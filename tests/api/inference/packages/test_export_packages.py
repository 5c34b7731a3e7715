"""`raypod export` for transformers and onnxruntime, which read the files without raypod."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raypod.__main__ import main
from raypod.api.inference.export import export
from raypod.errors import ConfigError
from raypod.plan.config import HF_TASKS
from raypod.training.checkpoint import tensors
from raypod.training.models import hf_models
from tests.support import hf_folders
from tests.support.trained_runs import check_export, train_inline

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers with old and new versions of torch


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.mark.parametrize("task", HF_TASKS)
def test_transformers_reads_the_exported_folder_of_every_task(task: str, tmp_path: Path, transformers: Any) -> None:
    words = hf_folders.flags(hf_folders.options(task, tmp_path))
    run = train_inline(tmp_path / "run", *words, "--replicas", "1", "--updates", "2", "--learning-rate", "0.01")
    found = export(run, "hf", tmp_path / "exported")
    assert found["max_difference"] == 0.0  # of the logits of what was written, and of the network
    kind = getattr(transformers, hf_models.CLASSES[task])
    model, loading = kind.from_pretrained(found["output"], output_loading_info=True)
    assert not any(loading.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = tensors.read_tensors(run / "checkpoints" / "update-00000002" / "weights.safetensors")[0]
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in weights.items() if name in own)
    assert len(weights.keys() & own.keys()) > 10


def test_the_labels_and_the_tokenizer_are_exported_and_what_cannot_be_is_an_error(
    tmp_path: Path, capsys: Any, transformers: Any
) -> None:
    examples, folder = hf_folders.sequences_file(tmp_path), hf_folders.hf_folder(tmp_path, "bert", "ForMaskedLM")
    given = ["--task", "hf-sequence-classification", "--model", f"hf:{folder}", "--examples", examples]
    run = train_inline(tmp_path / "run", *given, "--sequence-length", "16", "--replicas", "1", "--updates", "2")
    found = export(run, "hf", tmp_path / "exported")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(found["output"])
    weights = tensors.read_tensors(run / "checkpoints" / "update-00000002" / "weights.safetensors")[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.config.id2label == {0: "no", 1: "yes"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(found["output"])
    assert tokenizer("w1 w2")["input_ids"] == [2, 6, 7, 3]
    assert json.loads((tmp_path / "exported" / "raypod.json").read_text())["raypod.update"] == "2"
    with pytest.raises(ConfigError, match="it is a folder"):
        export(run, "hf", tmp_path / "exported")
    capsys.readouterr()
    assert main(["export", str(run), "--format", "hf", "--pixels"]) == 2
    assert "--pixels has no effect on hf" in capsys.readouterr().err
    run = train_inline(tmp_path / "other", "--model", "tiny", "--updates", "1", "--replicas", "1")
    with pytest.raises(ConfigError, match="the task image-classification trains no model of transformers"):
        export(run, "hf", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("pixels", [False, True])
def test_an_onnx_file_has_the_outputs_of_the_network(digits_run: Path, tmp_path: Path, pixels: bool) -> None:
    pytest.importorskip("onnx", reason="the extra raypod[onnx] is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="the extra raypod[onnx] is not installed")

    def run_file(path: Path, images: torch.Tensor) -> torch.Tensor:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"input_0": images.numpy()})[0])

    check_export(digits_run, "onnx", tmp_path / "model.onnx", pixels, run_file)
