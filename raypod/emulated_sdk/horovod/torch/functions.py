"""Broadcast of whole models, optimizers and arbitrary objects (contract section 8)."""

from __future__ import annotations

import pickle
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from horovod.torch import _submission as submission
from horovod.torch._identity import rank
from horovod.torch._process_sets import global_process_set
from horovod.torch._synchronous import allgather, broadcast_

Named = Union[Dict[str, torch.Tensor], List[Union[torch.Tensor, Tuple[str, torch.Tensor]]]]


def broadcast_parameters(params: Named, root_rank: int) -> None:
    """Overwrites everyone's tensors by root's, bit by bit.

    params: a `state_dict()`, or a list of tensors or of names with tensors; the same names, shapes and dtypes on all
    ranks. They travel as one flat tensor. ValueError for anything else (a generator: make it a list) and for tensors
    that `broadcast_` does not take.
    """
    if not isinstance(params, (dict, list)):
        raise ValueError(f"invalid params of type: {type(params)}; give a state_dict or a list")
    entries: List[Any] = sorted(params.items()) if isinstance(params, dict) else params
    named = [entry if isinstance(entry, tuple) else (str(index), entry) for index, entry in enumerate(entries)]
    if named:
        names, tensors = zip(*named)
        submission.synchronize(submission.broadcast_all(tensors, names, root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Optional[torch.nn.Module] = None
) -> None:
    """Overwrites everyone's optimizer by root's: the state of its parameters and the options of its groups.

    An optimizer without state gets one first, by a step with zero gradients that leaves the parameters as they are;
    their `grad` is zero afterwards. ValueError for LBFGS. `model` is not used (it names sparse parameters).
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:
        _create_state(optimizer)
    mine = optimizer.state_dict()
    if not mine["state"]:
        return  # an optimizer that keeps none
    tensors: List[Any] = []
    values: Dict[str, Any] = {}
    assign: Dict[str, Callable[[Any], None]] = {}
    for number, (own_group, group) in enumerate(zip(optimizer.param_groups, mine["param_groups"])):
        for option in sorted(set(group) - {"params"}):
            key = f"group {number}: {option}"
            values[key], assign[key] = group[option], _setter(own_group, option)
    for number, state in sorted(mine["state"].items()):
        for item, value in sorted(state.items()):
            key = f"parameter {number}: {item}"
            if torch.is_tensor(value):
                tensors.append((key, value))
            else:
                values[key], assign[key] = value, _setter(state, item)
    broadcast_parameters(tensors, root_rank)
    for key, value in broadcast_object(values, root_rank, "optimizer state").items():
        assign[key](value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Any = global_process_set
) -> Any:
    """Root's object, pickled, on all ranks; root gets its own back. The others' are only looked at for a name."""
    name = type(obj).__name__ if name is None else name
    is_root = rank() == root_rank
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(content.numpy().tobytes())


def allgather_object(obj: Any, name: Optional[str] = None) -> List[Any]:
    """Everyone's objects, pickled, by rank."""
    name = type(obj).__name__ if name is None else name
    content = _pickled(obj)
    lengths = allgather(torch.tensor([content.numel()]), f"{name}.sz").tolist()
    gathered = allgather(content, f"{name}.t")
    return [pickle.loads(piece.numpy().tobytes()) for piece in gathered.split_with_sizes(lengths)]


def _pickled(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _setter(place: Dict[str, Any], key: str) -> Callable[[Any], None]:
    return lambda value: place.__setitem__(key, value)


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Takes a step that changes nothing; in the class below a DistributedOptimizer, whose step needs all ranks."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    local_class = getattr(optimizer, "_local_class", type(optimizer))
    local_class.step(optimizer)
    for parameter, content in zip(parameters, before):  # weight decay moves them even so
        parameter.data.copy_(content)
