"""The section `ipu` of a configuration: the options of the Poplar SDK that PopTorch programs set.

`ipu_options` has the calls of PopTorch that each key makes, and the defaults that depend on other keys.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field
from typing_extensions import Literal

from raypod.plan.section import Section


class IpuSection(Section):
    """Options of the device. None is the default of `ipu_options`, or the SDK's if that has none."""

    stochastic_rounding: Optional[bool] = Field(
        None,
        description="Precision.enableStochasticRounding in training: results in half round up or down at random; else "
        "half weights lose updates that are smaller than their spacing (default: with --precision 16.16)",
    )
    partials: Optional[Literal["half", "float"]] = Field(
        None,
        description="Precision.setPartialsType: partial sums of convolutions and matrix products; half is faster and "
        "smaller, float is for losses that become NaN (default: half with --precision 16.16, else float)",
    )
    automatic_loss_scaling: bool = Field(
        False,
        description="Training.setAutomaticLossScaling: the device doubles or halves the loss scaling after each "
        "update, by the largest gradients in half; for trainings in half without a known loss scaling",
    )
    stable_norm: Optional[bool] = Field(
        None,
        description="enableStableNorm: the slower and more accurate variance of norms; off saves memory (default: that "
        "of the SDK)",
    )
    floating_point_exceptions: bool = Field(
        False,
        description="Precision.enableFloatingPointExceptions: NaN, overflow or division by zero ends the run in the "
        "operator that makes it; to find it, as it is slower",
    )
