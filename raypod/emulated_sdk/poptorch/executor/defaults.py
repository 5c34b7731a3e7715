"""The options and the optimizer of an executor, with the defaults of PopTorch."""

from __future__ import annotations

from typing import Optional

import torch

from poptorch.enums import OutputMode
from poptorch.errors import Error
from poptorch.optim import SGD
from poptorch.options import Options
from poptorch.options.strategies import ShardedExecution

_ITERATIONS = (
    " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run for pipelined "
    "execution instead."
)


def chosen_options(options: Optional[Options], is_training: bool) -> Options:
    """Return a frozen clone of the options with an output mode; the given object is frozen too.

    Raises Error for another type, and for inference unless gradient accumulation is 1.
    """
    given = Options() if options is None else options
    if not isinstance(given, Options):
        raise Error(f"options must be a poptorch.Options, not {type(given).__name__}")
    chosen = given.clone()
    given._freeze()
    if chosen.defaultOutputMode():
        chosen.outputMode(OutputMode.Final if is_training else OutputMode.All)
    chosen._freeze()
    if not is_training and chosen.Training.gradient_accumulation != 1:
        is_pipelined = not isinstance(chosen._execution_strategy, ShardedExecution)
        raise Error(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) "
            f"when running a poptorch.inferenceModel().{_ITERATIONS if is_pipelined else ''} It is "
            f"{chosen.Training.gradient_accumulation}: use separate options for validation"
        )
    return chosen


def default_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a training model without one."""
    # A model may have nothing to train, but torch's optimizers need a parameter.
    return SGD(list(model.parameters()) or [torch.nn.Parameter(torch.zeros(()))], lr=0.01)
