"""`replicaGrouping`: groups of replicas hold, train, return and save their own values of a parameter."""

from __future__ import annotations

import copy
import pickle

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options

ALL, CONSECUTIVE, ORTHOGONAL, NO_GROUPING = poptorch.CommGroupType
EACH_GROUP, EACH_REPLICA = poptorch.VariableRetrievalMode.OnePerGroup, poptorch.VariableRetrievalMode.AllReplicas


class Product(nn.Module):
    """The product of an input and a matrix, and the mean of its squares."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.shared = nn.Parameter(torch.ones(()))

    def forward(self, x):
        result = self.shared * (x @ self.weight)
        return result, poptorch.identity_loss(result**2, reduction="mean")


def wrapped(weight, kind, size, optimizer=torch.optim.SGD, mode=EACH_GROUP):
    model = Product(weight)
    opts = options(4).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, opts, optimizer(model.parameters(), lr=0.1))
    training.weight.replicaGrouping(kind, size, mode)
    return model, training


def reference(weight, x, group_of):
    """Return the weights after one update of SGD, by autograd over all replicas."""
    leaf, shared = weight.clone().requires_grad_(), torch.ones((), requires_grad=True)
    losses = [((shared * (x[r : r + 1] @ leaf[g])) ** 2).mean() for r, g in enumerate(group_of)]
    (sum(losses) / len(losses)).backward()
    return weight - 0.1 * leaf.grad, 1 - 0.1 * shared.grad


@pytest.mark.parametrize(
    ("kind", "size", "group_of"),
    [(CONSECUTIVE, 2, [0, 0, 1, 1]), (ORTHOGONAL, 2, [0, 1, 0, 1]), (NO_GROUPING, 0, [0, 1, 2, 3])],
)
@pytest.mark.parametrize("mode", [EACH_GROUP, EACH_REPLICA])
def test_each_group_computes_and_trains_its_own_values(kind, size, group_of, mode):
    of_replicas, x = torch.randn(4, 3, 2), torch.randn(4, 3)
    weight = of_replicas[[group_of.index(group) for group in sorted(set(group_of))]]  # of the first of each group
    model, training = wrapped(of_replicas if mode == EACH_REPLICA else weight.clone(), kind, size, mode=mode)
    results, _ = training(x)
    for replica, group in enumerate(group_of):
        torch.testing.assert_close(results[replica], x[replica] @ weight[group])
    expected_weight, expected_shared = reference(weight, x, group_of)
    expected_weight = expected_weight[group_of] if mode == EACH_REPLICA else expected_weight
    torch.testing.assert_close(model.weight.detach(), expected_weight)
    torch.testing.assert_close(model.shared.detach(), expected_shared)


def test_optimizer_state_has_a_value_of_each_group_and_is_restored():
    weight, x = torch.randn(4, 3, 2), torch.randn(4, 3)
    model, training = wrapped(weight.clone(), NO_GROUPING, 0, poptorch.optim.AdamW)
    training(x)
    state, values = training._optimizer.state_dict(), {name: v.clone() for name, v in model.state_dict().items()}
    assert state["ipu_state"]["Step___weight"].tolist() == [1, 1, 1, 1]
    assert state["ipu_state"]["Accl1___weight"].shape == weight.shape
    training(x)
    again, resumed = wrapped(weight.clone(), NO_GROUPING, 0, poptorch.optim.AdamW)
    again.load_state_dict(values)
    resumed._optimizer.load_state_dict(state)
    resumed(x)
    assert torch.equal(again.weight, model.weight)


def test_inference_model_has_groups():
    model = Product(torch.arange(4.0).reshape(2, 2, 1))
    inference = poptorch.inferenceModel(model, options(2))
    inference.weight.replicaGrouping(CONSECUTIVE, 1, EACH_GROUP)
    assert torch.cat([inference.weight, inference.weight]).shape == (4, 2, 1)
    for copied in (copy.copy(inference.weight), pickle.loads(pickle.dumps(inference.weight))):
        assert torch.equal(copied, model.weight)
    inference.weight.requires_grad = False
    assert not model.weight.requires_grad
    assert inference(torch.ones(2, 2))[0].flatten().tolist() == [1, 5]


SHAPES = [
    ((3, 3, 2), CONSECUTIVE, 2, "must be 2"),
    ((2, 3, 2), CONSECUTIVE, 3, "do not divide the 4 replicas"),
    ((), NO_GROUPING, 0, "Scalars cannot be passed"),
]


@pytest.mark.parametrize(("shape", "kind", "size", "message"), SHAPES)
def test_shape_that_does_not_fit_raises_error(shape, kind, size, message):
    with pytest.raises(poptorch.Error, match=message):
        wrapped(torch.ones(shape), kind, size)[1](torch.ones(4, 3))


def test_grouping_after_the_compilation_and_norms_of_groups_raise_error():
    _, plain = wrapped(torch.ones(3, 2), ALL, 0)
    assert plain(torch.ones(4, 3))[0].shape == (4, 2), "one group of all replicas has no effect"
    _, training = wrapped(torch.ones(2, 3, 2), CONSECUTIVE, 2)
    training(torch.ones(4, 3))
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        training.weight.replicaGrouping(CONSECUTIVE, 2, EACH_GROUP)
    with pytest.raises(AssertionError, match="not a CommGroupType"):
        training.weight.replicaGrouping("All", 0)
    _, lamb = wrapped(torch.ones(2, 3, 2), CONSECUTIVE, 2, poptorch.optim.LAMB)
    with pytest.raises(poptorch.Error, match="LAMB"):
        lamb(torch.ones(4, 3))
