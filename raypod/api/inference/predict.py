"""`raypod predict`: what the model of a checkpoint says about images, or how it continues a text."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from raypod.api.inference import settings
from raypod.api.inference.checkpoints import PathLike, Run, Weights
from raypod.api.inference.network import open_network
from raypod.errors import ConfigError


def predict(
    run: PathLike,
    inputs: Sequence[PathLike],
    top: int = 5,
    checkpoint: Optional[str] = None,
    ema: Optional[bool] = None,
    **changes: Any,
) -> List[Dict[str, Any]]:
    """Return the predictions of a run's model for images or texts, computed in float32 on the CPU of this host.

    Args:
        run: a run folder, or a checkpoint in it.
        inputs: files, and folders of images. Images get the channels and the size of the data set's samples. A run of
            hf-sequence-classification reads files of texts: `.txt` with one per line, `.jsonl` or `.csv` with `text`.
        top: the number of classes per image or text, at least 1.
        checkpoint, ema: as of `evaluate`.
        changes: where the data is: `dataset`, `data_dir`, `cache_dir`, ...

    Returns:
        For each image `image`, its path, or for each text `text`, and `predictions`: `class`, `name` and `probability`,
        the most probable first.

    Raises:
        UserError: there is no such run, checkpoint or image, or the run's task has no predictions.
    """
    return predict_run(*settings.opened(run, checkpoint, ema, changes), [str(each) for each in inputs], top)


def predict_run(
    run: Run, weights: Weights, changes: Mapping[str, Any], inputs: Sequence[str], top: int
) -> List[Dict[str, Any]]:
    """Return the result of `predict`; `changes` are by section.key."""
    if top < 1:
        raise ConfigError(f"--top {top} must be at least 1")
    config = settings.host_config(run, changes)
    with open_network(config, weights, "predict") as network:
        return list(network.task.predict(network.of_task(), inputs, top))


def generate(
    run: PathLike,
    prompt: str,
    length: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
    checkpoint: Optional[str] = None,
    ema: Optional[bool] = None,
    **changes: Any,
) -> str:
    """Return how a language model continues a text.

    Args:
        run, checkpoint, ema, changes: as of `predict`.
        prompt: the text.
        length: the number of tokens to generate, at least 1.
        temperature: divides the logits; 0 chooses the most probable token.
        seed: of the random numbers.

    Raises:
        UserError: there is no such run or checkpoint, or the run's task generates no text.
    """
    return generate_run(*settings.opened(run, checkpoint, ema, changes), prompt, length, temperature, seed)


def generate_run(
    run: Run,
    weights: Weights,
    changes: Mapping[str, Any],
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> str:
    """Return the result of `generate`; `changes` are by section.key."""
    if length < 1 or not 0 <= temperature < float("inf"):
        wrong = f"--length {length} must be at least 1" if length < 1 else f"--temperature {temperature:g} must be >= 0"
        raise ConfigError(wrong)
    config = settings.host_config(run, changes)
    with open_network(config, weights, "generate") as network:
        return network.task.generate(network.of_task(), prompt, length, temperature, seed)
