"""Models of transformers from local folders: each task trains, resumes and evaluates, and is divided over IPUs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from safetensors.torch import load_file

from raypod.__main__ import main
from raypod.api.planning import plan_from
from raypod.errors import ConfigError
from raypod.plan.config import HF_TASKS
from raypod.plan.resolve import from_values
from raypod.plan.stored_code import names_of
from raypod.training.data.hf_folder import HfFolder
from raypod.training.models.hf_models import build
from raypod.training.tasks.registry import facts_of, schema_of, task_of
from tests.support import ROOT, hf_folders
from tests.support.documented import execute
from tests.support.hf_folders import KINDS, flags, options, values
from tests.support.refused import one_line, refused
from tests.support.trained_runs import train_inline

pytest.importorskip("transformers", reason="the extra hf is not installed")


pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers with old and new versions of torch
FILES = {"text": hf_folders.text_file, "sequences": hf_folders.sequences_file, "words": hf_folders.tokens_file}


def config_of(given: Dict[str, Any]) -> Any:
    return from_values(values(given), schema=schema_of(given["task"]))


@pytest.mark.parametrize("task", HF_TASKS)
def test_a_task_trains_and_resumes_with_the_bits_of_an_undisturbed_run(task: str, tmp_path: Path, capsys: Any) -> None:
    words = [*flags(options(task, tmp_path)), "--lr-schedule", "constant", "--warmup-updates", "0"]
    words += ["--batch-size", "4", "--learning-rate", "0.01", "--replicas", "2", "--updates", "8"]
    whole = train_inline(tmp_path / "whole", *words, "--checkpoint-every", "4 updates")
    again = train_inline(tmp_path / "again", "--resume", str(whole / "checkpoints" / "update-00000004"))
    found = [json.loads((run / "summary.json").read_text()) for run in (whole, again)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "eager mode" not in capsys.readouterr().err  # what a compiled program cannot do


@pytest.mark.parametrize("task", ["hf-causal-lm", "hf-masked-lm"])
def test_a_packed_text_gives_the_weights_of_the_text(task: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = options(task, tmp_path)
    tokenizer = str(tmp_path / KINDS[task][0] / "tokenizer.json")
    packed = tmp_path / "packed"
    words = ["--task", "language-model", "--text", given["text"], "--tokenizer", tokenizer]
    assert main(["pack", *words, str(packed)]) == 0
    found = set()
    places = ({"text": given.pop("text")}, {"data_dir": packed}, {"data_dir": f"file://{packed}"})
    for number, data in enumerate(places):
        words = flags({**given, **data, "batch_size": 4, "learning_rate": 0.01, "replicas": 2, "updates": 4})
        run = train_inline(tmp_path / f"run-{number}", *words)
        found.add(json.loads((run / "summary.json").read_text())["weights_sha256"])
    assert len(found) == 1


def test_a_packed_text_of_other_tokens_is_refused(tmp_path: Path, capsys: Any) -> None:
    given = options("hf-causal-lm", tmp_path)
    path, text = tmp_path / "gpt2", given.pop("text")
    words = ["pack", "--task", "language-model", "--text", text]
    assert main([*words, str(tmp_path / "bytes")]) == 0
    assert main([*words, "--tokenizer", str(path / "tokenizer.json"), str(tmp_path / "words")]) == 0
    assert main(["plan", *flags({**given, "data_dir": tmp_path / "words"})]) == 0
    assert f"at {tmp_path / 'words'}" in capsys.readouterr().out
    names = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": "w0"}))
    of_words = "ends a file with token 3, and .* with 5"
    for place, message in (("bytes", "its tokens are not those of"), ("words", of_words)):
        assert re.search(message, one_line(capsys, main, ["plan", *flags({**given, "data_dir": tmp_path / place})]))
    assert main(["pack", *flags({**given, "text": text}), str(tmp_path / "other")]) == 2
    assert "pack its text with --task language-model" in capsys.readouterr().err


def test_the_weights_of_the_folder_count_unless_from_scratch_and_a_new_last_layer_is_random(tmp_path: Path) -> None:
    given = options("hf-sequence-classification", tmp_path)  # a folder of a masked language model
    saved = load_file(str(tmp_path / "bert" / "model.safetensors"))
    own, scratch = (_network({**given, "from_scratch": each}) for each in (False, True))
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(own.state_dict()[name], saved[name])
    assert not torch.equal(scratch.state_dict()[name], saved[name])
    assert (own.classifier.out_features, own.config.id2label) == (2, {0: "no", 1: "yes"})
    assert torch.equal(own.classifier.weight, _network(given).classifier.weight)  # by the seed


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    given = options("hf-sequence-classification", tmp_path)
    path = hf_folders.hf_folder(tmp_path / "other", "bert", "ForSequenceClassification")
    task = task_of(config_of({**given, "model": f"hf:{path}"}))
    batch = task.load().first_batch(1)
    texts = [json.loads(line)["text"] for line in Path(given["examples"]).read_text().splitlines()]
    encoded = AutoTokenizer.from_pretrained(str(path))(texts, padding="max_length", max_length=16, truncation=True)
    number = next(index for index, ids in enumerate(encoded["input_ids"]) if ids == batch["input_ids"][0].tolist())
    assert encoded["attention_mask"][number] == batch["attention_mask"][0].tolist()
    network = task.network(batch).eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(str(path)).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(network(**inputs).logits, theirs(**inputs).logits)


def test_masked_tokens_follow_from_seed_epoch_and_window(tmp_path: Path) -> None:
    task = task_of(config_of(options("hf-masked-lm", tmp_path)))
    source, samples = task.load(), torch.arange(60).numpy()
    tokens, labels = source.gather(source.train, samples, (1, 0))
    again, other = source.gather(source.train, samples, (1, 0))[0], source.gather(source.train, samples, (1, 1))[0]
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    predicted = labels != -100
    assert predicted.any(dim=1).all()
    assert 0.1 < predicted.float().mean() < 0.25
    assert 0.7 < (tokens[predicted] == 4).float().mean() < 0.9  # [MASK]
    assert torch.equal(*(source.gather(source.test, samples[:3], None)[0] for _ in range(2)))


def test_images_are_prepared_as_the_folder_says_and_words_have_their_tags_at_their_first_tokens(tmp_path: Path) -> None:
    task = task_of(config_of(options("hf-token-classification", tmp_path)))
    batch = task.load().first_batch(1)
    tokens, labels = batch["input_ids"][0], batch["labels"][0]
    words = tokens >= len(hf_folders.SPECIAL)
    expected = [["O", "B-X"][(int(token) - len(hf_folders.SPECIAL)) % 2] for token in tokens[words]]
    assert [task.description()["classes"][label] for label in labels[words]] == expected
    assert (labels[~words] == -100).all()
    task = task_of(config_of(options("hf-image-classification", tmp_path)))
    assert task.load().first_batch(1)[0].shape == (1, 1, 8, 8)
    assert (task.description()["mean"], task.description()["std"]) == ([0.25], [0.5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet8"}, "needs --model hf:FOLDER"),
        ({"model": "hf:nowhere"}, "hf:nowhere: there is no such folder"),
        ({"sequence_length": 25}, "--sequence-length 25: the model of --model hf:.* has 24 positions"),
        ({"examples": "none.csv"}, "--examples none.csv does not exist"),
        ({"examples": None}, "--examples FILE is missing: JSON lines or CSV with text and label"),
    ],
)
def test_a_mistake_is_one_line(changes: Dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(words, facts_of, config_of({**options("hf-sequence-classification", tmp_path), **changes}))


def test_pickled_weights_and_other_shapes_are_refused(tmp_path: Path) -> None:
    path = hf_folders.hf_folder(tmp_path, "bert", "ForMaskedLM")
    given = {"task": "hf-masked-lm", "model": f"hf:{path}", "text": hf_folders.text_file(tmp_path)}
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "intermediate_size": 64}))
    refused("is .* in the weights and .* by config.json", build, "hf-masked-lm", HfFolder(config_of(given)), False)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(str(path / "model.safetensors")), "other.bin")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    torch.save({}, str(path / "other.bin"))
    with pytest.raises(ConfigError, match="has weights in .*/other.bin, which can contain code"):
        build("hf-masked-lm", HfFolder(config_of(given)), False)
    (path / "model.safetensors.index.json").unlink()
    refused("pytorch_model.bin, which can contain code", facts_of, config_of({**given, "sequence_length": 16}))
    assert names_of({"training": {"model": f"hf:{path}"}}) == []
    with pytest.raises(ConfigError, match="add --task hf-image-classification"):
        plan_from({"training": {"model": f"hf:{tmp_path}"}}, "the test", is_dry=True)


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
def test_the_commands_of_the_page(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    # As raypod's own processes: a torch for CPUs and a torchvision for CUDA, which transformers imports, do not match.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "raypod" / "host" / "startup"))
    execute("how-to/hugging-face.md")


def _network(given: Dict[str, Any]) -> Any:
    task = task_of(config_of(given))
    torch.manual_seed(5)
    return task.network(task.load().first_batch(1))


def test_a_classifier_of_texts_predicts_those_of_files(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    given = options("hf-sequence-classification", tmp_path)
    run = train_inline(tmp_path / "run", *flags({**given, "batch_size": 4, "replicas": 1, "updates": 2}))
    lines = Path(given["examples"]).read_text().splitlines()[:3]
    texts = [json.loads(line)["text"] for line in lines]
    contents = {"jsonl": "\n".join(lines), "txt": "\n".join(texts), "csv": "\n".join(["text", *texts])}
    found = []
    for suffix, content in contents.items():
        path = tmp_path / f"texts.{suffix}"
        path.write_text(content)
        capsys.readouterr()
        assert main(["predict", str(run), str(path), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert [each["text"] for each in found[0]] == texts
    assert all(sum(each["probability"] for each in record["predictions"]) == pytest.approx(1) for record in found[0])
    (tmp_path / "texts.csv").write_text("words\nw1\n")
    for words, message in (
        ([str(tmp_path / "texts.csv")], "texts.csv, line 2 has no text; it has words"),
        (["w1 w2"], "w1 w2 does not exist"),
        (["--prompt", "w1"], "generates no text: it implements no `generate`; name files in place of --prompt"),
    ):
        assert main(["predict", str(run), *words]) == 2
        assert message in capsys.readouterr().err


def test_a_task_without_predictions_of_files_is_refused_before_it_is_loaded(tmp_path: Path, capsys: Any) -> None:
    given = options("hf-token-classification", tmp_path)
    run = train_inline(tmp_path / "run", *flags({**given, "batch_size": 4, "replicas": 1, "updates": 1}))
    Path(given["examples"]).unlink()
    assert main(["predict", str(run), "texts.txt"]) == 2
    words = "has no predictions of files: it implements no `predict`; raypod export RUN --format hf writes a folder"
    assert words in capsys.readouterr().err


pytest.importorskip("transformers", reason="the extra hf is not installed")


def splits(task: str, kind: str, data: str, folder: Path, ipus: int = 2, **training: Any) -> Tuple[str, ...]:
    key = "text" if data == "text" else "examples"
    options = {key: FILES[data](folder), "sequence_length": 16} if data else {}
    model = f"hf:{hf_folders.hf_folder(folder, kind)}"
    values = {
        "task": {"name": task, **options},
        "training": {"model": model, "gradient_accumulation": 9, "batch_size": 1, **training},
        "pod": {"ipus_per_replica": ipus, "replicas": 1, "num_instances": 1},
    }
    return plan_from(values, "the test", is_dry=True).pipeline_splits


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
def test_the_layers_of_each_ipu(task: str, kind: str, data: str, layer: str, others: Any, tmp_path: Path) -> None:
    assert splits(task, kind, data, tmp_path, layers_per_ipu="1,1") == (layer, *others)


def test_stages_can_be_named_or_balanced_and_layers_of_a_vision_transformer_have_other_names(tmp_path: Path) -> None:
    named = ("bert.encoder.layer.0", "bert.encoder.layer.1", "classifier")
    given = ("hf-sequence-classification", "bert", "sequences", tmp_path)
    assert (splits(*given, ipus=4, pipeline_splits=",".join(named)), len(splits(*given, ipus=4))) == (named, 3)
    refused("has 3 layers, and the model has 2: bert.encoder.layer.0", splits, *given, layers_per_ipu="2,1")
    (found,) = splits("hf-image-classification", "vit", "", tmp_path, layers_per_ipu="1,1")
    assert found.startswith("vit.")  # layers have other names in other versions
    assert found.endswith(("layer.1", "layers.1"))
