"""Groups of replicas with their own values of a parameter (`replicaGrouping`)."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import Error

Groupings = Mapping[str, Tuple[CommGroupType, int, VariableRetrievalMode]]  # by parameter


class ReplicaGroups(NamedTuple):
    """The groups of one parameter.

    On the device its values are one tensor of shape [groups, *shape]. On the host dimension 0 is the number of groups,
    or with `VariableRetrievalMode.AllReplicas` the number of replicas.

    Attributes:
        group_of: the group of each replica of all processes.
        is_per_replica: whether the host has a value of each replica.
    """

    group_of: Sequence[int]
    is_per_replica: bool

    @property
    def number(self) -> int:
        """Number of groups."""
        return max(self.group_of) + 1

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return the values of the groups; of a value for each replica, those of the first replica of each group."""
        first = [list(self.group_of).index(group) for group in range(self.number)]
        return host[first] if self.is_per_replica else host

    def to_host(self, device: torch.Tensor) -> torch.Tensor:
        """Return the values as the host has them."""
        return device[list(self.group_of)] if self.is_per_replica else device


def groups_of(groupings: Groupings, parameters: Mapping[str, torch.Tensor], replicas: int) -> Dict[str, ReplicaGroups]:
    """Return the groups of the parameters with a grouping. `CommGroupType.All` has no effect.

    Args:
        replicas: the number of replicas of all processes.

    Raises:
        Error: a parameter is a scalar, its first dimension does not fit, or the size does not divide the replicas.
    """
    found = {}
    for name, (kind, shards, mode) in groupings.items():
        if kind == CommGroupType.All:
            continue
        groups = ReplicaGroups(_group_of(kind, shards, replicas), mode == VariableRetrievalMode.AllReplicas)
        shape = list(parameters[name].shape)
        if not shape:
            raise Error("Scalars cannot be passed as per-replica weight tensor values")
        expected = replicas if groups.is_per_replica else groups.number
        if shape[0] != expected:
            raise Error(
                f"replicaGrouping: dimension 0 of {name!r} of shape {shape} must be {expected}, one value for each"
            )
        found[name] = groups
    return found


def _group_of(kind: CommGroupType, shards: int, replicas: int) -> List[int]:
    size = 1 if kind == CommGroupType.NoGrouping else shards
    if size < 1 or replicas % size:
        raise Error(f"replicaGrouping: groups of {size} replicas do not divide the {replicas} replicas")
    if kind == CommGroupType.Orthogonal:
        return [replica % (replicas // size) for replica in range(replicas)]
    return [replica // size for replica in range(replicas)]


def stacked(gradient: Any, groups: ReplicaGroups, replica: int) -> Any:
    """Return the gradient of one replica as a gradient of all groups, which is zero for the others; None stays None."""
    if gradient is None:
        return None
    result = torch.zeros((groups.number, *gradient.shape), dtype=gradient.dtype)
    result[groups.group_of[replica]] = gradient
    return result
