"""Folders of tiny models of transformers, with a tokenizer of words, as `save_pretrained` writes them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Dict, List

from raypod.system import torchvision_import

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTH = 16
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT: Dict[str, Any] = {"vocab_size": 45, "max_position_embeddings": 24, "pad_token_id": 0}
_GPT2 = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 3, "bos_token_id": 3}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_CONFIGS: Dict[str, Dict[str, Any]] = {
    "bert": {**_SMALL, **_TEXT},
    "roberta": {**_SMALL, **_TEXT},
    "gpt2": {"vocab_size": 45, **_GPT2},
    "t5": {"vocab_size": 45, **_T5},
    "vit": {**_SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1},
}

# Of each task: the kind of a model for it, its head, and the option with its data.
KINDS = {
    "hf-causal-lm": ("gpt2", "ForCausalLM", "text"),
    "hf-masked-lm": ("bert", "ForMaskedLM", "text"),
    "hf-sequence-classification": ("bert", "ForMaskedLM", "examples"),
    "hf-token-classification": ("roberta", "", "examples"),
    "hf-image-classification": ("vit", "ForImageClassification", ""),
}


def config_of(kind: str, **settings: Any) -> Any:
    """Return the configuration of a tiny model of a kind."""
    transformers = _package()
    return transformers.AutoConfig.for_model(kind, **{**_CONFIGS[kind], **settings})


def hf_folder(folder: Path, kind: str, head: str = "", **settings: Any) -> Path:
    """Write the folder of a tiny model: with `head`, as in "ForMaskedLM", with its random weights."""
    import torch

    transformers, path = _package(), folder / kind
    config = config_of(kind, **settings)
    config.save_pretrained(str(path))
    if head:
        torch.manual_seed(3)
        model = getattr(transformers, f"AutoModel{head}").from_config(config)
        model.save_pretrained(str(path), safe_serialization=True)
    if kind == "vit":
        stated = {"image_mean": [0.25], "image_std": [0.5], "size": {"height": 8, "width": 8}}
        (path / "preprocessor_config.json").write_text(json.dumps(stated))
    else:
        _write_tokenizer(path)
    return path


def options(task: str, folder: Path) -> Dict[str, Any]:
    """Return the options of a task with a folder and data of its own."""
    kind, head, data = KINDS[task]
    path = hf_folder(folder, kind, head)
    files = {"hf-sequence-classification": sequences_file, "hf-token-classification": tokens_file}
    given: Dict[str, Any] = {"task": task, "model": f"hf:{path}"}
    if data:
        given.update({data: files.get(task, text_file)(folder), "sequence_length": 16})
    return given


def flags(given: Dict[str, Any]) -> List[str]:
    pairs = ((f"--{key.replace('_', '-')}", str(value)) for key, value in given.items())
    return [word for pair in pairs for word in pair]


def values(given: Dict[str, Any]) -> Dict[str, Any]:
    own = {key: value for key, value in given.items() if key not in ("task", "model")}
    return {"task": {"name": given["task"], **own}, "training": {"model": given["model"]}}


def _write_tokenizer(path: Path) -> None:
    import tokenizers

    known = {token: number for number, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    names.update(sep_token="[SEP]", mask_token="[MASK]", tokenizer_class="PreTrainedTokenizerFast")
    (path / "tokenizer_config.json").write_text(json.dumps(names))


def text_file(folder: Path, words: int = 2000) -> str:
    """Write a text in which each word follows from the one before; return its path."""
    lines = [" ".join(WORDS[(3 * number + line) % 40] for number in range(20)) for line in range(words // 20)]
    (folder / "text.txt").write_text("\n".join(lines))
    return str(folder / "text.txt")


def sequences_file(folder: Path, count: int = 96) -> str:
    """Write texts of two classes, of which each has words of its own."""
    rows: List[Dict[str, Any]] = []
    for number in range(count):
        low = 20 * (number % 2)
        text = " ".join(WORDS[low + (7 * number + place) % 20] for place in range(3 + number % 9))
        rows.append({"text": text, "label": ("no", "yes")[number % 2]})
    return _write(folder / "texts.jsonl", rows)


def tokens_file(folder: Path, count: int = 96) -> str:
    """Write words with a tag that follows from the word."""
    rows: List[Dict[str, Any]] = []
    for number in range(count):
        chosen = [(11 * number + 5 * place) % 40 for place in range(2 + number % 7)]
        rows.append({"tokens": [WORDS[each] for each in chosen], "tags": [("O", "B-X")[each % 2] for each in chosen]})
    return _write(folder / "words.jsonl", rows)


def _write(path: Path, rows: List[Dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def _package() -> Any:
    torchvision_import.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
