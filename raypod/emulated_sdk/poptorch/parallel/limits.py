"""The limits of a placement: numbers of IPUs, the length of pipelines, and overlapped host I/O."""

from __future__ import annotations

from typing import Collection, Optional

from poptorch.enums import OutputMode
from poptorch.errors import Error
from poptorch.log import logger
from poptorch.options import Options, PipelinedExecution, ShardedExecution
from poptorch.parallel.placement import Placement

IPUS_PER_PROCESS = 64
_MIN_IO_TILES = 32


def check_number(ipus: int) -> None:
    """Raise Error for more IPUs than one process can use."""
    if ipus > IPUS_PER_PROCESS:
        raise Error(
            f"Too many IPUs requested ({ipus}). Experiments that need more than {IPUS_PER_PROCESS} IPUs require "
            "distributed execution."
        )


def check_placement(placement: Placement, options: Options, is_training: bool) -> None:
    """Raise Error if the placement exceeds the process, the launched IPUs per replica, or the pipeline's length."""
    reserved = _reserved_ipus(placement.ipus_per_replica, options)
    launched: Optional[int] = getattr(options, "_launched_ipus_per_replica", None)
    if launched is not None and reserved != launched * options.replication_factor:
        raise Error(
            f"The model uses {placement.ipus_per_replica} IPUs per replica, but the run was launched with {launched} "
            "(POPDIST_NUM_IPUS_PER_REPLICA): change --ipus-per-replica or the ipu_id of the model's blocks"
        )
    if placement.strategy == PipelinedExecution.name:
        _check_pipeline(len(placement.stages), options, is_training)


def check_overlap(options: Options, overlapped: Collection[str]) -> None:
    """Raise Error unless strategy, I/O tiles and output mode allow overlapped host I/O.

    Args:
        overlapped: "inputs", "outputs", both or neither. The output mode only limits outputs (inferred: the SDK's
            documentation does not state this).
    """
    if not overlapped:
        return
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        raise Error(
            "Overlapped host IO is not possible with poptorch.PipelinedExecution: call "
            "options.setExecutionStrategy(poptorch.ShardedExecution())"
        )
    tiles = _io_tiles(options)
    if tiles < _MIN_IO_TILES:
        raise Error(
            f"Overlapped host IO needs at least {_MIN_IO_TILES} IO tiles, got {tiles}: call "
            f"options.TensorLocations.numIOTiles({_MIN_IO_TILES})"
        )
    if "outputs" in overlapped and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"Overlapped outputs need OutputMode.All or OutputMode.Sum, not {OutputMode(options.output_mode).name}"
        )


def _reserved_ipus(ipus_per_replica: int, options: Options) -> int:
    """Return the IPUs that a process reserves: a power of two, at most 64."""
    needed: int = ipus_per_replica * options.replication_factor
    check_number(needed)
    reserved = 1 << (needed - 1).bit_length()
    if reserved == needed:
        return needed
    what = f"{ipus_per_replica} IPUs per replica x {options.replication_factor} replicas = {needed} IPUs"
    if not options.auto_round_num_ipus:
        raise Error(
            f"The model uses {what}, and PopTorch reserves a power of two: use another number, or reserve {reserved} "
            "by poptorch.Options().autoRoundNumIPUs(True)"
        )
    logger.warning("The model uses %s; %d are reserved", what, reserved)
    return reserved


def _io_tiles(options: Options) -> int:
    locations = options.TensorLocations
    return int(locations("numIOTiles")) if locations.exists("numIOTiles") else 0


def _check_pipeline(forward_stages: int, options: Options, is_training: bool) -> None:
    depth = 2 * forward_stages - 1 if is_training else forward_stages
    given = options.Training.gradient_accumulation if is_training else options.device_iterations
    if forward_stages == 1 or given >= depth:
        return
    if is_training:
        setter, stages = "Training.gradientAccumulation", f"{depth} = 2 x {forward_stages} forward stages - 1"
    else:
        setter, stages = "deviceIterations", f"{depth} forward stages"
    raise Error(
        f"poptorch.Options().{setter} must be greater than or equal to the number of pipeline stages ({depth}) when "
        f"using poptorch.PipelinedExecution: the model has {stages}, and {setter} is {given}. Set it to {depth} or "
        "more, or use poptorch.ShardedExecution"
    )
