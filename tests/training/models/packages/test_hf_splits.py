"""Models of transformers divided over IPUs by their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import pytest

from raypod.api.planning import plan_from
from raypod.errors import ConfigError
from tests.support import hf_folders

pytest.importorskip("transformers", reason="the extra hf is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers with old and new versions of torch

FILES = {"text": hf_folders.text_file, "sequences": hf_folders.sequences_file, "words": hf_folders.tokens_file}


def splits(task: str, kind: str, data: str, folder: Path, ipus: int = 2, **training: Any) -> Tuple[str, ...]:
    options = (
        {} if data == "" else {"text" if data == "text" else "examples": FILES[data](folder), "sequence_length": 16}
    )
    model = f"hf:{hf_folders.hf_folder(folder, kind)}"
    values = {
        "task": {"name": task, **options},
        "training": {"model": model, "gradient_accumulation": 9, "batch_size": 1, **training},
        "pod": {"ipus_per_replica": ipus, "replicas": 1, "num_instances": 1},
    }
    found: Tuple[str, ...] = plan_from(values, "the test", is_dry=True).pipeline_splits
    return found


@pytest.mark.parametrize(
    ("task", "kind", "data", "layer", "others"),
    [
        ("hf-sequence-classification", "bert", "sequences", "bert.encoder.layer.1", ()),
        ("hf-masked-lm", "bert", "text", "bert.encoder.layer.1", ("cls=0",)),  # its output layer is the embedding
        ("hf-token-classification", "roberta", "words", "roberta.encoder.layer.1", ()),
        ("hf-token-classification", "t5", "words", "transformer.encoder.block.1", ()),
        ("hf-causal-lm", "gpt2", "text", "transformer.h.1", ("lm_head=0",)),
        ("hf-sequence-classification", "gpt2", "sequences", "transformer.h.1", ()),
    ],
)
def test_the_layers_of_each_ipu(
    task: str, kind: str, data: str, layer: str, others: Tuple[str, ...], tmp_path: Path
) -> None:
    assert splits(task, kind, data, tmp_path, layers_per_ipu="1,1") == (layer, *others)


def test_the_layers_of_a_vision_transformer(tmp_path: Path) -> None:
    (found,) = splits("hf-image-classification", "vit", "", tmp_path, layers_per_ipu="1,1")
    assert found.startswith("vit.")  # layers have other names in other versions
    assert found.endswith(("layer.1", "layers.1"))


def test_stages_can_be_named_or_balanced(tmp_path: Path) -> None:
    named = ("bert.encoder.layer.0", "bert.encoder.layer.1", "classifier")
    given = ("hf-sequence-classification", "bert", "sequences", tmp_path)
    assert splits(*given, ipus=4, pipeline_splits=",".join(named)) == named
    assert len(splits(*given, ipus=4)) == 3
    with pytest.raises(ConfigError, match="has 3 layers, and the model has 2: bert.encoder.layer.0"):
        splits(*given, layers_per_ipu="2,1")
