"""The calls of `poptorch.Options` that the section `ipu` makes, with the defaults of Graphcore's applications.

They are plain data: the plan prints them, `model.sdk_options` makes them. Imports no SDK.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan.config import Config

TORCH = "torch."  # before the name of a dtype among the arguments of a call
SDK_NUMERICS: Dict[str, Any] = {"stochastic_rounding": False, "partials": "float"}  # the defaults of the SDK
_HALF_NUMERICS: Dict[str, Any] = {"stochastic_rounding": True, "partials": "half"}  # with half weights
# The keys that change the results of a training: a checkpoint records them.
CHANGE_RESULTS = ("stochastic_rounding", "partials", "automatic_loss_scaling", "stable_norm")
# What the emulated SDK accepts and checks, although nothing on a CPU corresponds to it.
_WITHOUT_EFFECT_ON_CPU = ("partials", "stable_norm")


class Call(NamedTuple):
    """A call of a setter of `poptorch.Options`.

    Attributes:
        setter: its name, as in "Precision.enableStochasticRounding".
        arguments: plain data; "torch.half" is the dtype.
        key: the key of the section `ipu` that decides about it.
        is_for_training: whether the options of the evaluation do without it.
    """

    setter: str
    arguments: Tuple[Any, ...]
    key: str
    is_for_training: bool = True

    def __str__(self) -> str:
        shown = [text if str(text).startswith(TORCH) else repr(text) for text in self.arguments]
        return f"{self.setter}({', '.join(map(str, shown))})"


def calls_of(config: Config) -> List[Call]:
    """Return the calls for a config, in their order."""
    return [*_numerics(config)]


def numerics_of(config: Config) -> Dict[str, Any]:
    """Return what the keys of `SDK_NUMERICS` are, as their defaults follow from the precision."""
    chosen = {key: getattr(config.ipu, key) for key in SDK_NUMERICS}
    defaults = _HALF_NUMERICS if config.training.precision == "16.16" else SDK_NUMERICS
    return {key: defaults[key] if value is None else value for key, value in chosen.items()}


def _numerics(config: Config) -> Iterator[Call]:
    ipu, numerics = config.ipu, numerics_of(config)
    is_default = numerics == SDK_NUMERICS
    if ipu.stochastic_rounding is not None or not is_default:
        yield Call("Precision.enableStochasticRounding", (numerics["stochastic_rounding"],), "stochastic_rounding")
    if ipu.partials is not None or not is_default:
        partials = f"{TORCH}{numerics['partials']}"
        yield Call("Precision.setPartialsType", (partials,), "partials", is_for_training=False)
    if ipu.automatic_loss_scaling:
        yield Call("Training.setAutomaticLossScaling", (True,), "automatic_loss_scaling")
    if ipu.stable_norm is not None:
        yield Call("enableStableNorm", (ipu.stable_norm,), "stable_norm", is_for_training=False)
    if ipu.floating_point_exceptions:
        yield Call("Precision.enableFloatingPointExceptions", (True,), "floating_point_exceptions")


def check(config: Config) -> None:
    """Raise ConfigError for options that the SDK would reject after its compilation, or that have no effect."""
    if config.ipu.automatic_loss_scaling and config.training.precision == "32.32":
        raise ConfigError(
            "--automatic-loss-scaling needs gradients in half, by which the device scales; add --precision 16.16"
        )


def describe(config: Config) -> Dict[str, List[str]]:
    """Return the calls as texts, for `plan.json`: those of the training, and those of the evaluation."""
    calls = calls_of(config)
    evaluation = [str(call) for call in calls if not call.is_for_training]
    return {"training": [str(call) for call in calls], "evaluation": evaluation}


def rows(config: Config) -> List[Tuple[str, str]]:
    """Return rows for the plan: the calls, and the flag that changes each."""
    calls = calls_of(config)
    width = max((len(str(call)) for call in calls), default=0)
    texts = [
        f"{str(call).ljust(width)}  --{call.key.replace('_', '-')}{', training only' * call.is_for_training}"
        for call in calls
    ]
    return [("IPU options" * (not index), text) for index, text in enumerate(texts or ["those of the SDK"])]


def without_effect(config: Config, has_ipus: bool) -> str:
    """Return the end of the line about the SDK: the flags given that have no effect on it; "" for none."""
    default = type(config.ipu)()
    given = [key for key in _WITHOUT_EFFECT_ON_CPU if getattr(config.ipu, key) != getattr(default, key)]
    flags = [f"--{key.replace('_', '-')}" for key in given if not has_ipus]
    return f", on which {_listed(flags)} ha{'s' if len(flags) == 1 else 've'} no effect" if flags else ""


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
