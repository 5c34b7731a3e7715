"""A folder as `save_pretrained` of transformers writes it: its configuration and its tokenizer. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Dict, Optional

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import HF, Config
from raypod.system.files import looked_in, parse_json
from raypod.training.data.corpus import Tokenizer

INSTALL = "pip install 'raypod[hf]'"
TOKENIZER = "tokenizer.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTHS = ("max_position_embeddings", "n_positions")
_AFTER_PADDING = ("roberta", "camembert", "xlm-roberta", "longformer")  # positions are counted from the padding's


class HfFolder:
    """The folder of `--model hf:FOLDER`.

    Attributes:
        path: the folder.
        config: the content of its `config.json`.

    Raises:
        ConfigError: transformers is not installed, or the model is none of `hf:`.
        DataMissing: the folder, or its `config.json`, is missing.
    """

    def __init__(self, config: Config) -> None:
        task, model = config.task.name, config.training.model
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(f"--task {task} needs the package transformers, which is not installed: {INSTALL}")
        if not model.startswith(HF):
            raise ConfigError(f"--task {task} needs --model hf:FOLDER, a folder that save_pretrained has written")
        self.path, self._flag = Path(model[len(HF) :]).expanduser(), f"--model {model}"
        if not self.path.is_dir():
            raise DataMissing(f"{self._flag}: there is no such folder{looked_in(self.path)}")
        self.config = self._json("config.json")
        if not self.config:
            raise DataMissing(f"{self._flag}: the folder has no config.json, which save_pretrained writes")

    @property
    def kind(self) -> str:
        """The kind of the model, as in "bert"."""
        return str(self.config.get("model_type", "model"))

    def has_weights(self) -> bool:
        """Return whether the folder has weights. ConfigError if they are pickled, which is not read."""
        if any((self.path / name).is_file() for name in _WEIGHTS):
            return True
        if any((self.path / name).is_file() for name in _PICKLED):
            raise ConfigError(
                f"{self._flag} has its weights in pytorch_model.bin, which can contain code: write them with "
                "save_pretrained(FOLDER, safe_serialization=True), or add --from-scratch"
            )
        return False

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. ConfigError as `Tokenizer`, or if it has more tokens than the model."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise DataMissing(
                f"{self._flag}: the folder has no {TOKENIZER}, which "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes"
            )
        end = self.special_token("eos_token") or self.special_token("sep_token")
        found = Tokenizer(str(path), f"{self._flag}: {TOKENIZER}", end)
        size = self.config.get("vocab_size")
        if isinstance(size, int) and found.vocabulary > size:
            raise ConfigError(f"{self._flag}: the tokenizer has {found.vocabulary} tokens, and the model has {size}")
        return found

    def special_token(self, name: str) -> Optional[str]:
        """Return a special token by its name in `tokenizer_config.json`, as "pad_token"; None without one."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            value = self._json(file).get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if value is not None:
                return str(value)
        return None

    def check_length(self, length: int) -> None:
        """Raise ConfigError for more tokens than the model has positions."""
        most = next((self.config[name] for name in _LENGTHS if isinstance(self.config.get(name), int)), length)
        if self.kind in _AFTER_PADDING:
            most -= 1 + int(self.config.get("pad_token_id", 1))
        if length > most:
            raise ConfigError(f"--sequence-length {length}: the model of {self._flag} has {most} positions")

    def preprocessor(self) -> Dict[str, Any]:
        """Return the content of `preprocessor_config.json`; {} without one."""
        return self._json("preprocessor_config.json")

    def _json(self, name: str) -> Dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return content
