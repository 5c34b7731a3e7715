"""`raypod export --format hf`: a folder that transformers reads."""

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
from tests.support.trained_runs import train_inline

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers with old and new versions of torch


def test_transformers_reads_the_exported_folder(tmp_path: Path, capsys: Any) -> None:
    examples, folder = hf_folders.sequences_file(tmp_path), hf_folders.hf_folder(tmp_path, "bert", "ForMaskedLM")
    given = ["--task", "hf-sequence-classification", "--model", f"hf:{folder}", "--examples", examples]
    run = train_inline(tmp_path / "run", *given, "--sequence-length", "16", "--replicas", "1", "--updates", "2")
    found = export(run, "hf", tmp_path / "exported")
    assert found["max_difference"] == 0.0
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        found["output"], output_loading_info=True
    )
    assert not any(loading.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
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


@pytest.mark.parametrize("task", HF_TASKS)
def test_transformers_reads_the_exported_folder_of_every_task(task: str, tmp_path: Path) -> None:
    words = hf_folders.flags(hf_folders.options(task, tmp_path))
    run = train_inline(tmp_path / "run", *words, "--replicas", "1", "--updates", "2", "--learning-rate", "0.01")
    found = export(run, "hf", tmp_path / "exported")
    assert found["max_difference"] == 0.0  # of the logits of what was written, and of the network
    model, loading = getattr(transformers, hf_models.CLASSES[task]).from_pretrained(
        found["output"], output_loading_info=True
    )
    assert not any(loading.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = tensors.read_tensors(run / "checkpoints" / "update-00000002" / "weights.safetensors")[0]
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in weights.items() if name in own)
    assert len(weights.keys() & own.keys()) > 10


def test_another_model_is_none_of_transformers(tmp_path: Path) -> None:
    run = train_inline(tmp_path / "run", "--model", "tiny", "--updates", "1", "--replicas", "1")
    with pytest.raises(ConfigError, match="the task image-classification trains no model of transformers"):
        export(run, "hf", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
