"""What the device refuses of a placement: numbers of IPUs, pipelines that cannot be filled (contract 3, 6)."""

from __future__ import annotations

from typing import Collection, Optional

from poptorch.errors import Error
from poptorch.log import logger
from poptorch.parallel.placement import Placement
from poptorch.options.strategies import PipelinedExecution, ShardedExecution
from poptorch.enums import OutputMode
from poptorch.options import Options

IPUS_PER_PROCESS = 64
_LEAST_IO_TILES = 32


def check_number(ipus: int) -> None:
    """Error for more IPUs than one process can drive."""
    if ipus > IPUS_PER_PROCESS:
        raise Error(
            f"Too many IPUs requested ({ipus}). Experiments that need more than {IPUS_PER_PROCESS} IPUs require "
            "distributed execution."
        )


def number_of_ipus(ipus_per_replica: int, options: Options) -> int:
    """IPUs that a process reserves. Error for more than 64, and unless a power of two or `autoRoundNumIPUs`."""
    needed: int = ipus_per_replica * options.replication_factor
    check_number(needed)
    reserved = 1 << (needed - 1).bit_length()
    if reserved == needed:
        return needed
    what = f"{ipus_per_replica} IPUs per replica x {options.replication_factor} replicas = {needed} IPUs"
    if not options.auto_round_num_ipus:
        raise Error(
            f"The model uses {what}, and PopTorch reserves a power of two: use another number, or let it reserve "
            f"{reserved} with poptorch.Options().autoRoundNumIPUs(True)"
        )
    logger.warning("the model uses %s; %d are reserved", what, reserved)
    return reserved


def check_placement(placement: Placement, options: Options, is_training: bool) -> None:
    """Error when the placement does not fit the process, the launcher's IPUs per replica, or the pipeline's length."""
    reserved = number_of_ipus(placement.ipus_per_replica, options)
    launched: Optional[int] = getattr(options, "_launched_ipus_per_replica", None)
    if launched is not None and reserved != launched * options.replication_factor:
        raise Error(
            f"The model uses {placement.ipus_per_replica} IPUs per replica, but the run was launched with {launched} "
            "(POPDIST_NUM_IPUS_PER_REPLICA): change --ipus-per-replica or the ipu_id of the model's blocks"
        )
    if placement.strategy == PipelinedExecution.name:
        _check_pipeline(len(placement.stages), options, is_training)


def check_overlap(options: Options, overlapped: Collection[str]) -> None:
    """Error unless strategy, IO tiles and output mode allow that host IO overlaps with compute.

    overlapped: "inputs", "outputs", both or neither. The output mode matters to outputs only [I].
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
    if tiles < _LEAST_IO_TILES:
        raise Error(
            f"Overlapped host IO needs at least {_LEAST_IO_TILES} IO tiles, and there are {tiles}: call "
            f"options.TensorLocations.numIOTiles({_LEAST_IO_TILES})"
        )
    if "outputs" in overlapped and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"Overlapped outputs need OutputMode.All or OutputMode.Sum, not {OutputMode(options.output_mode).name}"
        )


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
