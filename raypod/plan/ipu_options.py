"""The calls of `poptorch.Options` that the section `ipu` makes, with the defaults of Graphcore's applications.

They are plain data: the plan prints them, `training.models.program` makes them. Imports no SDK.

The file `ipu_config.json` of optimum-graphcore, as values of a configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.values import TENSOR_KINDS
from raypod.system.command_line import counted, listed, suggestion

TORCH = "torch."  # before the name of a dtype among the arguments of a call
SDK_NUMERICS: Dict[str, Any] = {"stochastic_rounding": False, "partials": "float"}  # the defaults of the SDK
_HALF_NUMERICS: Dict[str, Any] = {"stochastic_rounding": True, "partials": "half"}  # with half weights
# The keys that change the results of a training: a checkpoint records them.
CHANGE_RESULTS = (
    *("stochastic_rounding", "partials", "automatic_loss_scaling", "stable_norm", "synthetic_data_on_device"),
    *("engine_options", "popart", "popart_patterns"),  # some of them do
)
# What the emulated SDK accepts and checks, although nothing on a CPU corresponds to it.
_WITHOUT_EFFECT_ON_CPU = (
    *("partials", "stable_norm", "available_memory_proportion", "io_tiles", "overlap_io", "prefetch_depth"),
    *("merged_all_reduces", "accumulator_streams", "engine_options", "popart_patterns", "ipu_profile"),
)
# The keys that an evaluation has, too.
OF_EVALUATION = (
    *("partials", "stable_norm", "available_memory_proportion", "prefetch_depth"),
    *("engine_options", "popart", "popart_patterns", "ipu_profile"),
)


_RECOMPUTATIONS = ("none", "standard", "norms", "pipeline", "all")  # in the order of PopART's RecomputationType
_SCHEDULER = 0  # of PopART's AccumulateOuterFragmentSchedule
# Of every run: the same random numbers in the workers of every tile, so that the weights of replicas stay equal.
_ENGINE_OPTIONS = {"target.deterministicWorkers": "portable"}
_ENGINE_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_CONVOLUTIONS = "convolutionOptions"  # of PopART; also has the type of the partials
# Options of PopART that belong to the backward pass or the update.
_TRAINING_ONLY = (
    *("autoRecomputation", "explicitRecomputation", "accumulateOuterFragmentSettings.schedule"),
    *("accumulateOuterFragmentSettings.excludedVirtualGraphs", "disableGradAccumulationTensorStreams"),
    *("scheduleNonWeightUpdateGradientConsumersEarly", "automaticLossScalingSettings.enabled"),
)
_LOCATION_SETTERS = {
    "optimizer": "setOptimizerLocation",
    "weights": "setWeightLocation",
    "activations": "setActivationLocation",
    "accumulators": "setAccumulatorLocation",
}


class Location(NamedTuple):
    """The argument of a call that is a `poptorch.TensorLocationSettings`: the arguments of its setters by name."""

    settings: Dict[str, Any]

    def __str__(self) -> str:
        setters = (f"{setter}({value!r})" for setter, value in self.settings.items())
        return f"TensorLocationSettings().{'.'.join(setters)}"


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
        is_name = [isinstance(each, Location) or str(each).startswith(TORCH) for each in self.arguments]
        shown = [str(each) if named else repr(each) for each, named in zip(self.arguments, is_name)]
        return f"{self.setter}({', '.join(shown)})"


def calls_of(config: Config) -> List[Call]:
    """Return the calls for a config, in their order."""
    return [*_numerics(config), *_memory(config), *_execution(config), *_further(config)]


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


def _memory(config: Config) -> Iterator[Call]:
    ipu, stages = config.ipu, config.pod.ipus_per_replica
    if ipu.available_memory_proportion is not None:
        shares = ipu.available_memory_proportion
        by_ipu = {f"IPU{index}": share for index, share in enumerate(shares * stages if len(shares) == 1 else shares)}
        yield Call("setAvailableMemoryProportion", (by_ipu,), "available_memory_proportion", is_for_training=False)
    if ipu.recomputation is not None:
        yield _popart("recomputation", "autoRecomputation", _RECOMPUTATIONS.index(ipu.recomputation))
        if ipu.recomputation != "none" and not _is_pipeline(config):
            yield _popart("recomputation", "explicitRecomputation", True)
    for kind in TENSOR_KINDS:
        settings = _location(config, kind)
        if settings:
            key = "off_chip" if kind in (ipu.off_chip or ()) else "replicated_tensor_sharding"
            yield Call(f"TensorLocations.{_LOCATION_SETTERS[kind]}", (Location(settings),), key)


def _location(config: Config, kind: str) -> Dict[str, Any]:
    """Return the settings of where tensors of a kind are stored, by their setters; {} for those of the SDK."""
    ipu = config.ipu
    is_off_chip, is_sharded = kind in (ipu.off_chip or ()), kind in (ipu.replicated_tensor_sharding or ())
    if not is_off_chip and not is_sharded:
        return {}
    settings: Dict[str, Any] = {"useOnChipStorage": not is_off_chip, "useReplicatedTensorSharding": is_sharded}
    if is_off_chip and ipu.off_chip_min_elements is not None:
        settings["minElementsForOffChip"] = ipu.off_chip_min_elements
    if is_sharded and ipu.sharding_min_elements is not None:
        settings["minElementsForReplicatedTensorSharding"] = ipu.sharding_min_elements
    return settings


def _execution(config: Config) -> Iterator[Call]:
    ipu = config.ipu
    if ipu.io_tiles is not None:
        yield Call("TensorLocations.numIOTiles", (ipu.io_tiles,), "io_tiles")
    if ipu.prefetch_depth is not None:
        yield _popart("prefetch_depth", "defaultPrefetchBufferingDepth", ipu.prefetch_depth, is_for_training=False)
    is_merged = config.pod.replicas > 1 if ipu.merged_all_reduces is None else ipu.merged_all_reduces
    if is_merged:
        # PopART's default, Serial, contradicts it.
        yield _popart("merged_all_reduces", "accumulateOuterFragmentSettings.schedule", _SCHEDULER)
        for name in ("prepareScheduleForMergingCollectives", "mergeAllReduceCollectives"):
            yield _popart("merged_all_reduces", f"replicatedCollectivesSettings.{name}", True)
    if not ipu.accumulator_streams and not config.training.combined_accumulator:  # else they have the velocity
        yield _popart("accumulator_streams", "disableGradAccumulationTensorStreams", True)


def _further(config: Config) -> Iterator[Call]:
    """Yield the calls for options by their own names."""
    ipu = config.ipu
    if ipu.synthetic_data_on_device:
        yield Call("enableSyntheticData", (True,), "synthetic_data_on_device", is_for_training=False)
    engine = {key: _engine_text(value) for key, value in {**_ENGINE_OPTIONS, **(ipu.engine_options or {})}.items()}
    yield Call("_Popart.setEngineOptions", (engine,), "engine_options", is_for_training=False)
    if ipu.popart_patterns is not None:
        yield Call("_Popart.setPatterns", (ipu.popart_patterns,), "popart_patterns", is_for_training=False)
    for name, value in (ipu.popart or {}).items():
        if name == _CONVOLUTIONS and isinstance(value, dict) and numerics_of(config)["partials"] == "half":
            value = {"partialsType": "half", **value}
        yield _popart("popart", name, value, is_for_training=name in _TRAINING_ONLY)


def _engine_text(value: Any) -> str:
    """Return a value as Poplar's engine takes it: true for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _popart(key: str, name: str, value: Any, is_for_training: bool = True) -> Call:
    return Call("_Popart.set", (name, value), key, is_for_training)


def _is_pipeline(config: Config) -> bool:
    return config.pod.ipus_per_replica > 1 and config.training.execution == "pipelined"


def check(config: Config) -> None:
    """Raise ConfigError for options that the SDK would reject after its compilation, or that have no effect."""
    if config.ipu.automatic_loss_scaling and config.training.precision == "32.32":
        raise ConfigError(
            "--automatic-loss-scaling needs gradients in half, by which the device scales; add --precision 16.16"
        )
    if config.ipu.automatic_loss_scaling and config.training.initial_loss_scaling is not None:
        raise ConfigError("--initial-loss-scaling contradicts --automatic-loss-scaling; omit one of them")
    profile = config.ipu.ipu_profile
    if profile is not None and Path(profile).expanduser().exists() and not Path(profile).expanduser().is_dir():
        raise ConfigError(f"--ipu-profile {profile} is a file; give a folder for the reports")
    _check_memory(config)
    _check_execution(config)


def _check_execution(config: Config) -> None:
    ipu = config.ipu
    if (ipu.io_tiles or 0) % 2:
        raise ConfigError(f"--io-tiles {ipu.io_tiles} must be an even number")
    if ipu.overlap_io is not None and (ipu.io_tiles is None or config.training.execution != "sharded"):
        raise ConfigError(f"--overlap-io {ipu.overlap_io} needs --io-tiles, as 32, and --execution sharded")
    for name, kind in (ipu.popart_patterns or {}).items():
        if not isinstance(kind, bool):
            raise ConfigError(f"--popart-pattern {name}={kind}: write {name}=true or {name}=false")
    if (ipu.popart or {}).get("disableOptimizerStateTensorStreams"):
        raise ConfigError(
            "--popart disableOptimizerStateTensorStreams=true: checkpoints and repairs read the optimizer's state, "
            "which the device then does not return; omit it"
        )


def _check_memory(config: Config) -> None:
    ipu, ipus = config.ipu, config.pod.ipus_per_replica
    shares = ipu.available_memory_proportion or ()
    if len(shares) > 1 and len(shares) != ipus:
        raise ConfigError(
            f"--available-memory-proportion has {len(shares)} values, and a replica has {counted(ipus, 'IPU')}: give "
            "one value, or one for each IPU"
        )
    recomputed = ipu.recomputation or ("pipeline" if _is_pipeline(config) else "none")
    if recomputed == "pipeline" and not _is_pipeline(config):
        raise ConfigError("--recomputation pipeline has no effect without a pipeline; use standard or all")
    if ipu.recomputation_checkpoints and recomputed not in ("pipeline", "all"):
        raise ConfigError(
            f"--recomputation-checkpoints {','.join(ipu.recomputation_checkpoints)} has no effect with "
            f"--recomputation {recomputed}; add --recomputation all"
        )
    if "activations" in (ipu.replicated_tensor_sharding or ()):
        raise ConfigError("--replicated-tensor-sharding activations: each replica has its own; omit it")
    needed = (
        ("off_chip_min_elements", ipu.off_chip, "--off-chip"),
        ("sharding_min_elements", ipu.replicated_tensor_sharding, "--replicated-tensor-sharding"),
    )
    for key, kinds, flag in needed:
        if getattr(ipu, key) is not None and not kinds:
            raise ConfigError(f"{_flag(key)} has no effect without {flag}")


def profile_environment(config: Config, instance: int, inherited: str = "") -> Dict[str, str]:
    """Return the variable with which an instance writes reports for PopVision; {} for none.

    Args:
        config: the config.
        instance: index of the instance, whose reports have a folder of their own.
        inherited: the present value of the variable, a JSON object.

    Raises:
        ConfigError: it is none.
    """
    if config.ipu.ipu_profile is None:
        return {}
    try:
        options = json.loads(inherited or "{}")
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(
            f"{_ENGINE_VARIABLE}={inherited} is not a JSON object, to which --ipu-profile adds its options"
        )
    folder = Path(config.ipu.ipu_profile).expanduser().absolute() / f"instance-{instance}"
    reports = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    return {_ENGINE_VARIABLE: json.dumps({**options, **reports})}


def describe(config: Config) -> Dict[str, List[str]]:
    """Return the calls as texts, for `plan.json`: those of the training, and those of the evaluation."""
    calls = calls_of(config)
    evaluation = [str(call) for call in calls if not call.is_for_training]
    return {"training": [str(call) for call in calls], "evaluation": evaluation}


def rows(config: Config) -> List[Tuple[str, str]]:
    """Return rows for the plan: the flag that changes a call, and the call."""
    calls = calls_of(config)
    width = max((len(_flag(call.key)) for call in calls), default=0)
    texts = [f"{_flag(call.key).ljust(width)}  {call}{' in training' * call.is_for_training}" for call in calls]
    if config.ipu.ipu_profile is not None:
        folder = f"{config.ipu.ipu_profile.rstrip('/')}/instance-N"
        texts.append(f"--ipu-profile  profile.pop in {folder}, which the PopVision Graph Analyser opens")
    return [("IPU options" * (not index), text) for index, text in enumerate(texts or ["those of the SDK"])]


def without_effect(config: Config, has_ipus: bool) -> str:
    """Return the end of the line about the SDK: the flags given that have no effect on it; "" for none."""
    default = type(config.ipu)()
    given = [key for key in _WITHOUT_EFFECT_ON_CPU if getattr(config.ipu, key) != getattr(default, key)]
    flags = [_flag(key) for key in given if not has_ipus]
    return f", on which {listed(flags, 'and')} ha{'s' if len(flags) == 1 else 've'} no effect" if flags else ""


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


KEY = "ipu_config"  # of the section `ipu`
Values = Dict[str, Dict[str, Any]]
_SAME = {  # the names of values that are taken as they are
    "seed": "training.seed",
    "gradient_accumulation_steps": "training.gradient_accumulation",
    "device_iterations": "training.device_iterations",
    "inference_device_iterations": "training.evaluation_iterations",
    "replication_factor": "pod.replicas",
    "ipus_per_replica": "pod.ipus_per_replica",
    "executable_cache_dir": "pod.executable_cache_path",
    "auto_loss_scaling": "ipu.automatic_loss_scaling",
    "matmul_proportion": "ipu.available_memory_proportion",
}
_OPTIMIZER = {  # of the state of the optimizer
    "optimizer_state_offchip": "ipu.off_chip",
    "replicated_tensor_sharding": "ipu.replicated_tensor_sharding",
}
# What changes no result: settings of the inference alone, which has those of the training here, and of the memory.
_WITHOUT_EFFECT = (
    *("inference_layers_per_ipu", "inference_ipus_per_replica", "inference_replication_factor"),
    *("inference_matmul_proportion", "inference_parallelize_kwargs", "explicit_ir_inference"),
    *("inference_embedding_serialization_factor", "inference_serialized_embedding_splits_per_ipu"),
    *("inference_projection_serialization_factor", "inference_serialized_projection_splits_per_ipu"),
    *("embedding_serialization_factor", "projection_serialization_factor", "recompute_checkpoint_every_layer"),
    *("output_mode", "optimum_version", "transformers_version", "profile_dir", "use_popdist", "name_or_path"),
    "_name_or_path",
)
# What would place modules otherwise than raypod does; only these values can be used.
_REFUSED: Dict[str, Tuple[Any, ...]] = {
    "serialized_embedding_splits_per_ipu": (None,),
    "serialized_projection_splits_per_ipu": (None,),
    "parallelize_kwargs": (None, {}),
    "execute_encoder_on_cpu_for_generation": (False,),
    "sharded_execution_for_inference": (None, False),
    "enable_half_first_order_momentum": (None, False),
}
_OWN = ("layers_per_ipu", "enable_half_partials")
_STAGES = ("layers_per_ipu", "pipeline_splits", "pipeline_balance")


def expand_ipu_config(values: Values) -> List[str]:
    """Replace `ipu.ipu_config` of a configuration by the settings of that file, where it has none of its own.

    Returns:
        Lines for the user: what of the file has no effect.

    Raises:
        ConfigError: the file cannot be read, or has a key that is unknown or cannot be followed.
    """
    path = values.get("ipu", {}).pop(KEY, None)
    if path is None:
        return []
    content = _read(Path(str(path)).expanduser())
    found, unused = _settings(f"--ipu-config {path}", content)
    has_stages = any(values.get("training", {}).get(key) is not None for key in _STAGES)
    for name, value in found.items():
        section, _, key = name.partition(".")
        if not (has_stages and key in _STAGES):
            values.setdefault(section, {}).setdefault(key, value)
    return [f"--ipu-config {path}: {counted(len(unused), 'key')} without effect: {', '.join(unused)}"] if unused else []


def _read(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ipu-config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--ipu-config {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--ipu-config {path} is no JSON object")
    return content


def _settings(flag: str, content: Dict[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """Return values by section.key, and the keys without effect."""
    found: Dict[str, Any] = {}
    known = (*_SAME, *_OPTIMIZER, *_WITHOUT_EFFECT, *_REFUSED, *_OWN)
    for key, given in content.items():
        value = given.get("default") if isinstance(given, dict) and key != "parallelize_kwargs" else given
        if key not in known:
            raise ConfigError(f"{flag}: optimum-graphcore has no key {key!r}{suggestion(key, known)}")
        if key in _REFUSED and value not in _REFUSED[key]:
            raise ConfigError(f"{flag}: {key} = {value!r} has no counterpart here; remove it from the file")
        if key in _SAME and value not in (None, "", "disabled"):
            found[_SAME[key]] = value
        elif key in _OPTIMIZER and value:
            found[_OPTIMIZER[key]] = ["optimizer"]
        elif key == "enable_half_partials" and value is not None:
            found["ipu.partials"] = "half" if value else "float"
    if found.get("pod.replicas") == 1:  # there is nothing to divide
        found.pop("ipu.replicated_tensor_sharding", None)
    found.update(_stages(flag, content))
    return found, [key for key in content if key in _WITHOUT_EFFECT]


def _stages(flag: str, content: Dict[str, Any]) -> Dict[str, Any]:
    """Return the layers of each IPU, or that the stages are balanced: a -1 for every IPU."""
    layers = content.get("layers_per_ipu")
    if layers is None:
        return {}
    if not isinstance(layers, list) or not all(isinstance(each, int) for each in layers):
        raise ConfigError(f"{flag}: layers_per_ipu = {layers!r} must be a list of whole numbers")
    ipus = content.get("ipus_per_replica") or len(layers)
    if -1 in layers and len(set(layers)) > 1:
        raise ConfigError(f"{flag}: layers_per_ipu = {layers} has -1 beside numbers: write the number of each IPU")
    found: Dict[str, Any] = {"pod.ipus_per_replica": ipus}
    if ipus > 1:
        is_balanced = -1 in layers
        found["training.pipeline_balance" if is_balanced else "training.layers_per_ipu"] = (
            "parameters" if is_balanced else layers
        )
    return found
