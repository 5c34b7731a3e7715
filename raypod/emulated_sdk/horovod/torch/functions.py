"""Broadcast of models, optimizers and Python objects, and allgather of Python objects."""

from __future__ import annotations

import hmac
import os
import pickle
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

import torch
from _pod.activation import SECRET
from _pod.store_protocol import PROOF_BYTES, content_proof

from horovod.common.exceptions import HorovodInternalError
from horovod.torch._basics import rank
from horovod.torch._collectives import broadcast_all
from horovod.torch._engine import DUPLICATE, synchronize
from horovod.torch._operations import check_name
from horovod.torch._process_sets import ProcessSet, engine_of, global_process_set
from horovod.torch.mpi_ops import allgather, broadcast_

Named = Union[Dict[str, torch.Tensor], List[Union[torch.Tensor, Tuple[str, torch.Tensor]]]]


def broadcast_parameters(params: Named, root_rank: int) -> None:
    """Overwrite the tensors of all ranks with root's, bit by bit, in one transfer.

    Args:
        params: a `state_dict()`, or a list of tensors or (name, tensor) pairs; names, shapes and dtypes must be the
            same on all ranks.

    Raises:
        ValueError: `params` has another type (convert a generator to a list), or `broadcast_` does not take a tensor.
    """
    if not isinstance(params, (dict, list)):
        raise ValueError(f"invalid params of type: {type(params)}; pass a state_dict or a list")
    entries: List[Any] = sorted(params.items()) if isinstance(params, dict) else params
    named = [entry if isinstance(entry, tuple) else (str(index), entry) for index, entry in enumerate(entries)]
    if named:
        names, tensors = zip(*named)
        given = [entry[0] for entry in entries if isinstance(entry, tuple) and entry[0] is not None]
        if len(set(given)) < len(given):
            raise ValueError(DUPLICATE)
        synchronize(broadcast_all(tensors, names, root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Optional[torch.nn.Module] = None
) -> None:
    """Overwrite the optimizers of all ranks with root's: parameter state and options of the parameter groups.

    An optimizer without state first creates it by a step with zero gradients; the parameters are restored, and their
    `grad` is zero afterwards. SparseAdam gets sparse ones, and SGD for the embeddings of `model` with `sparse=True`.

    Raises:
        ValueError: the optimizer is LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:
        _create_state(optimizer, model)
    own = optimizer.state_dict()
    if not own["state"]:
        return  # the optimizer has no state
    tensors: List[Any] = []
    values: Dict[str, Any] = {}
    assign: Dict[str, Callable[[Any], None]] = {}
    for number, (param_group, group) in enumerate(zip(optimizer.param_groups, own["param_groups"])):
        for option in sorted(set(group) - {"params"}):
            key = f"group {number}: {option}"
            values[key], assign[key] = group[option], partial(param_group.__setitem__, option)
    for number, state in sorted(own["state"].items()):
        for item, value in sorted(state.items()):
            key = f"parameter {number}: {item}"
            if torch.is_tensor(value):
                tensors.append((key, value))
            else:
                values[key], assign[key] = value, partial(state.__setitem__, item)
    broadcast_parameters(tensors, root_rank)
    for key, value in broadcast_object(values, root_rank, "optimizer state").items():
        assign[key](value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root's object on all ranks, transferred by pickle; root gets the object itself.

    Args:
        name: name of the operations, by default that of the type of `obj`, which must be the same on all ranks then.

    Raises:
        HorovodInternalError: what has arrived does not prove that a process of this pod has sent it; it is not read.
    """
    name = _name_of(obj, name)
    is_root = rank() == root_rank
    context = engine_of(process_set, "broadcast").next_object(f"broadcast of {name} from {root_rank}")
    content = _pickled(obj, context) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickled(content, context)


def allgather_object(obj: Any, name: Optional[str] = None) -> List[Any]:
    """Return the objects of all ranks, by rank, transferred by pickle; errors as of `broadcast_object`."""
    name = _name_of(obj, name)
    context = engine_of(global_process_set, "allgather").next_object(f"allgather of {name}")
    content = _pickled(obj, f"{context} from {rank()}")
    lengths = allgather(torch.tensor([content.numel()]), f"{name}.sz").tolist()
    gathered = allgather(content, f"{name}.t")
    pieces = gathered.split_with_sizes(lengths)
    return [_unpickled(piece, f"{context} from {index}") for index, piece in enumerate(pieces)]


def _name_of(obj: Any, name: Optional[str]) -> str:
    """Return the name of the operations, by default that of the type; TypeError if it is no text."""
    check_name(name)
    return type(obj).__name__ if name is None else name


def _pickled(obj: Any, context: str) -> torch.Tensor:
    """Return a proof of the run's secret, and the pickled object: uint8 [bytes]."""
    content = pickle.dumps(obj)
    return torch.frombuffer(bytearray(content_proof(_secret(), context, content) + content), dtype=torch.uint8)


def _unpickled(received: torch.Tensor, context: str) -> Any:
    """Return the object of `_pickled`. Gloo authenticates nobody, and reading a pickle executes what it says."""
    data = received.numpy().tobytes()
    proof, content = data[:PROOF_BYTES], data[PROOF_BYTES:]
    if not hmac.compare_digest(proof, content_proof(_secret(), context, content)):
        raise HorovodInternalError(f"an object was not sent by a process of this pod, and is not read: {context}")
    return pickle.loads(content)


def _secret() -> bytes:
    """Return the secret of the processes of this pod; a single process needs none."""
    return bytes.fromhex(os.environ.get(SECRET, ""))


def _create_state(optimizer: torch.optim.Optimizer, model: Optional[torch.nn.Module]) -> None:
    """Take a step with zero gradients, and restore the parameters, which weight decay changes."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    sparse = _sparse_parameters(model) if isinstance(optimizer, torch.optim.SGD) else set()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse:
            parameter.grad = parameter.grad.to_sparse()
    # A DistributedOptimizer's own `step` would need all ranks.
    local_class = getattr(optimizer, "_local_class", type(optimizer))
    local_class.step(optimizer)
    for parameter, content in zip(parameters, before):
        parameter.data.copy_(content)


def _sparse_parameters(model: Optional[torch.nn.Module]) -> Set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    modules = model.modules() if model is not None else ()
    embeddings = [each for each in modules if isinstance(each, torch.nn.Embedding) and each.sparse]
    return {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
