"""Models of transformers from a local folder: built, loaded and written back, without code from the folder."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence

import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import HF_CAUSAL_LM, HF_IMAGES, HF_MASKED_LM, HF_SEQUENCES, HF_TOKENS
from raypod.system import torchvision_import
from raypod.training.data.hf_folder import HfFolder

CLASSES = {  # of transformers
    HF_CAUSAL_LM: "AutoModelForCausalLM",
    HF_MASKED_LM: "AutoModelForMaskedLM",
    HF_SEQUENCES: "AutoModelForSequenceClassification",
    HF_TOKENS: "AutoModelForTokenClassification",
    HF_IMAGES: "AutoModelForImageClassification",
}
# What `save_pretrained` of a model does not write, and `from_pretrained` of a tokenizer or a processor reads.
_OTHER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "preprocessor_config.json"),
    *("chat_template.jinja", "generation_config.json"),
)


def build(
    task: str, folder: HfFolder, from_scratch: bool, classes: Optional[Sequence[str]] = None, **settings: Any
) -> nn.Module:
    """Return the model of a folder in float32, with its weights, or from scratch if it has none.

    Args:
        task: one of `HF_TASKS`, which chooses the model's last layer.
        folder: the folder.
        from_scratch: leave the weights of the folder.
        classes: the names of the classes. A last layer for another number of them is initialized anew.
        settings: further values of the configuration.

    Raises:
        ConfigError: transformers cannot build the model, or the weights do not fit its configuration.
    """
    has_weights = not from_scratch and folder.has_weights()
    if classes is not None:
        settings["id2label"] = dict(enumerate(classes))
        settings["label2id"] = {name: number for number, name in enumerate(classes)}
    flag = f"--model hf:{folder.path}"
    with user_code.reported(flag), _quiet() as transformers, _without_pickles(flag):
        _mask_always(transformers)
        config = transformers.AutoConfig.from_pretrained(str(folder.path), **_LOCAL, **settings)
        kind = getattr(transformers, CLASSES[task])
        options: Dict[str, Any] = {"attn_implementation": "eager"}  # of operators that PopTorch has
        config.use_cache = False  # of generation; the device's program has no state between its calls
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        setattr(config, name, torch.float32)
        if not has_weights:
            network: Any = kind.from_config(config, **options)
        else:
            options = {**options, name: torch.float32, "use_safetensors": True, "output_loading_info": True}
            network, found = kind.from_pretrained(
                str(folder.path), config=config, ignore_mismatched_sizes=True, **_LOCAL, **options
            )
            _check_loaded(folder, found, None if classes is None else len(classes))
        return _as_module(network.float())


_LOCAL: Dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def _check_loaded(folder: HfFolder, found: Dict[str, Any], classes: Optional[int]) -> None:
    """Raise ConfigError for weights of other shapes, unless it is a last layer for another number of classes."""
    for name, saved, own in found["mismatched_keys"]:
        if not (classes and own and own[0] == classes and tuple(saved[1:]) == tuple(own[1:])):
            raise ConfigError(
                f"--model hf:{folder.path}: {name} is {list(saved)} in the weights and {list(own)} by config.json"
            )


def save(network: nn.Module, folder: HfFolder, path: Path) -> None:
    """Write a network of `build` into a new folder, with the tokenizer or the preprocessor of its own folder."""
    model: Any = network
    before, model.config.use_cache = model.config.use_cache, folder.config.get("use_cache", True)
    try:
        with _quiet():
            model.save_pretrained(str(path), safe_serialization=True)
    finally:
        model.config.use_cache = before
    for name in _OTHER_FILES:
        if (folder.path / name).is_file() and not (path / name).exists():
            shutil.copyfile(str(folder.path / name), str(path / name))


def load(kind: type, path: Path) -> nn.Module:
    """Return the model of a class of transformers that `save` has written, in evaluation mode."""
    model: Any = kind
    with _quiet():
        return _as_module(model.from_pretrained(str(path), local_files_only=True, attn_implementation="eager").eval())


@contextlib.contextmanager
def _without_pickles(flag: str) -> Iterator[None]:
    """Refuse weights that `torch.load` would read, which an index or an adapter in the folder can name.

    `weights_only`, with which transformers calls it, executes code before torch 2.6. `flag` begins the message.
    """
    module: Any = torch
    refused = []

    def refuse(file: Any, *_: Any, **_options: Any) -> None:
        refused.append(ConfigError(f"{flag} has weights in {file}, which can contain code: only safetensors are read"))
        raise refused[0]

    before, module.load = module.load, refuse
    try:
        yield
    except Exception:
        if refused:  # transformers reports another error in its place
            raise refused[0] from None
        raise
    finally:
        module.load = before


def _as_module(network: Any) -> nn.Module:
    module: nn.Module = network
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Yield the package transformers, which in the context prints no progress and no remarks about its loading."""
    torchvision_import.install()  # transformers imports it if it is installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers: Any = importlib.import_module("transformers")
        logging = transformers.utils.logging
        level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield transformers
        finally:
            logging.set_verbosity(level)
            if shows:
                logging.enable_progress_bar()


def _mask_always(transformers: Any) -> None:
    """Let transformers 5 make the mask of attention without reading it: a compiled program cannot read values."""
    interface = getattr(transformers, "AttentionMaskInterface", None)
    if interface is None or getattr(interface()["eager"], "_raypod", False):
        return
    made = interface()["eager"]

    def mask(*arguments: Any, **named: Any) -> Any:
        return made(*arguments, **{**named, "allow_is_bidirectional_skip": False})

    mask._raypod = True  # type: ignore[attr-defined]
    interface.register("eager", mask)
