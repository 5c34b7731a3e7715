"""`hvd.DistributedOptimizer`, `broadcast_optimizer_state` and `SyncBatchNorm`: as one process with the whole batch."""

from __future__ import annotations

from typing import Any, Dict, List

import horovod.torch as hvd
import pytest
import torch

from tests.support.ranks import both, error_of, set_rank

STEPS, SAMPLES = 3, 8


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def batches() -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(SAMPLES, 5, generator=generator) for _ in range(STEPS)]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def reference() -> torch.Tensor:
    """Return the weights after training in one process with the whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return weights(model)


def distributed(
    rank: int, size: int, passes: int = 1, clip: bool = False, listed: bool = False, **options: Any
) -> torch.Tensor:
    """Return the weights after training with this rank's part of every batch, in `passes` micro-batches."""
    model = network()
    if listed:
        options["groups"] = [[model[0].weight, model[2].weight]]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=passes, **options)
    for batch in batches():
        optimizer.zero_grad()
        for micro_batch in batch.chunk(size)[rank].chunk(passes):
            (model(micro_batch).square().mean() / passes).backward()
        optimizer.synchronize()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert isinstance(optimizer, torch.optim.SGD)
    return weights(model)


def start(rank: int, size: int) -> None:
    set_rank(rank, [("a", size)])
    hvd.init()


VARIANTS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "accumulated": {"passes": 2},
    "clipped": {"clip": True},
    "predivided": {"gradient_predivide_factor": 2.0},
    "grouped": {"groups": 2},
    "listed": {"listed": True},
    "compressed": {"compression": hvd.Compression.fp16},
}


EMULATED_ONLY = ["missing_sparse_gradients", "sparse_errors", "normalize"]


def train(rank: int, size: int) -> Dict[str, torch.Tensor]:
    return {name: distributed(rank, size, **options) for name, options in VARIANTS.items()}


def branches(rank: int, size: int) -> List[Any]:
    """Each rank uses another layer; the gradients of the other layers come from the other ranks."""
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(size)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    layers[rank](torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    found = [layer.weight.grad.item() for layer in layers]
    with optimizer.skip_synchronize():
        optimizer.step()
    return found


def sparse(rank: int, size: int) -> List[Any]:
    """Train an embedding with sparse gradients; then reduce one in which the ranks have different rows."""
    found: List[Any] = []
    for sparse_as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        inner = torch.optim.SGD(table.parameters(), lr=1.0)
        hvd.broadcast_optimizer_state(inner, 0, table)
        optimizer = hvd.DistributedOptimizer(inner, table.named_parameters(), sparse_as_dense=sparse_as_dense)
        table(torch.tensor([rank, 3] if rank else [0])).sum().backward()
        optimizer.step()
        found += [table.weight[:, 0].tolist(), table.weight.grad.is_sparse]
        optimizer.zero_grad()
        if rank or not sparse_as_dense:  # without `sparse_as_dense` Horovod does not support missing gradients
            table(torch.tensor([1])).sum().backward()
        optimizer.step()
        found.append(table.weight[:, 0].tolist())
    matrix = torch.diag(torch.tensor([1.0, float(rank)])).to_sparse()
    total = hvd.sparse_allreduce_async(matrix, name="matrix", op=hvd.Sum)()
    return [*found, total.to_dense().tolist()]


def missing_sparse_gradients(rank: int, size: int) -> Dict[str, Any]:
    """Some ranks have no gradient of an embedding, in the first step rank 0; the layer beside it has one on rank 0."""
    layers = torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 2, sparse=True), "dense": torch.nn.Linear(2, 1)})
    for parameter in layers.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    table, found = layers["table"].weight, []
    for users in ([1], [0], [0, 1]):
        optimizer.zero_grad()
        if rank in users:
            layers["table"](torch.tensor([rank, 3])).sum().backward()
        if rank == 0:
            layers["dense"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found.append((table.grad.is_sparse, table[:, 0].tolist(), layers["dense"].bias.item()))
    optimizer.zero_grad()
    optimizer.step()
    return {"steps": found, "nowhere": (table.grad.is_sparse, table.grad.abs().sum().item())}


def sparse_errors(rank: int, size: int) -> List[str]:
    return [error_of(lambda: step_of_table(rank == 0, None)), error_of(lambda: step_of_table(True, 1))]


def step_of_table(is_sparse: bool, groups: Any) -> None:
    table = torch.nn.Embedding(4, 2, sparse=is_sparse)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, table.named_parameters(), groups=groups)
    table(torch.tensor([0])).sum().backward()
    optimizer.step()


def misuse(rank: int, size: int) -> List[str]:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: List[Dict[str, Any]] = [
        {"named_parameters": [("a", model[0].weight)]},
        {"named_parameters": [("a", each) for each in model.parameters()]},
        {"named_parameters": list(model.parameters())},
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": [[model[0].weight], [model[0].weight]]},
    ]
    found = [error_of(lambda call=call: hvd.DistributedOptimizer(inner, **call)) for call in calls]
    unnamed = hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1))
    assert list(unnamed._parameter_names.values()) == [f"allreduce.noname.0.{index}" for index in range(4)]
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    model(batches()[0]).sum().backward()
    found += [error_of(optimizer.zero_grad), error_of(lambda: model(batches()[0]).sum().backward())]
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    return found


def broadcast_state(rank: int, size: int) -> Dict[str, Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 1:
        model(batches()[0]).sum().backward()
        optimizer.step()
    before = weights(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    states = [optimizer.state[each] for each in model.parameters()]
    return {
        "rate": optimizer.param_groups[0]["lr"],
        "moments": torch.cat([each["exp_avg"].reshape(-1) for each in states]),
        "steps": {float(each["step"]) for each in states},
        "unchanged": torch.equal(before, weights(model)),
        "taken_over": dict(hvd.DistributedOptimizer(optimizer, model.named_parameters()).state),
    }


@pytest.fixture(scope="module", params=both())
def pod(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    functions = ["start", "train", "branches", "sparse", "misuse", "broadcast_state"]
    functions += EMULATED_ONLY if request.param == "emulated" else []
    return ranks(__file__, functions, 2, horovod=request.param)


def emulated(pod: Dict[str, List[Any]], function: str) -> List[Any]:
    """Return what a function of EMULATED_ONLY has returned; skip the test with the installed Horovod."""
    return pod[function] if function in pod else pytest.skip("the installed Horovod waits forever")


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_train_like_one_process_with_the_whole_batch(pod: Dict[str, List[Any]], variant: str) -> None:
    first, second = (found[variant] for found in pod["train"])
    assert torch.equal(first, second)
    tolerance = 1e-3 if variant == "compressed" else 1e-6
    torch.testing.assert_close(first, reference(), rtol=tolerance, atol=tolerance)


def test_a_missing_gradient_counts_as_zero_and_sparse_gradients_are_averaged(pod: Dict[str, List[Any]]) -> None:
    assert pod["branches"] == [[0.5, 0.5]] * 2
    first, whole, half = [-0.5, -0.5, 0.0, -0.5], [-0.5, -1.5, 0.0, -0.5], [-0.5, -1.0, 0.0, -0.5]
    assert pod["sparse"] == [[first, True, whole, first, True, half, [[2.0, 0.0], [0.0, 1.0]]]] * 2


def test_a_missing_sparse_gradient_has_no_rows_and_others_are_errors(pod: Dict[str, List[Any]]) -> None:
    weights = [[0.0, -0.5, 0.0, -0.5], [-0.5, -0.5, 0.0, -1.0], [-1.0, -1.0, 0.0, -2.0]]
    for found in emulated(pod, "missing_sparse_gradients"):
        assert found["steps"] == [(True, each, -0.5 * (step + 1)) for step, each in enumerate(weights)]
        assert found["nowhere"] == (False, 0.0)
    for mismatch, grouped in emulated(pod, "sparse_errors"):
        sentence = "Mismatched operations: One rank did an ALLGATHER, but another rank did an ALLREDUCE."
        assert mismatch.startswith(f"HorovodInternalError: {sentence} Operation 'allreduce.weight': rank 0: ALLGATHER")
        assert grouped.startswith("ValueError: Tensor type torch.sparse.FloatTensor is not supported")
        assert "weight has a sparse gradient. Specify sparse_as_dense=True" in grouped


def test_misuse_is_an_error(pod: Dict[str, List[Any]]) -> None:
    expected = [
        "were not named",
        "must be unique. Found duplicates: a",
        "sequence of tuples",
        "backward_passes_per_step must be > 0",
        "gradient_predivide_factor not supported",
        "A parameter can only appear once in groups",
        "AssertionError: optimizer.zero_grad() was called after loss.backward()",
        "AssertionError: Gradients were computed more than backward_passes_per_step times",
    ]
    assert [words for words, text in zip(expected, pod["misuse"][0]) if words in text] == expected


def test_broadcast_optimizer_state_copies_state_and_options(pod: Dict[str, List[Any]]) -> None:
    first, second = pod["broadcast_state"]
    assert first["rate"] == second["rate"] == 0.2
    assert torch.equal(first["moments"], second["moments"])
    assert first["moments"].abs().sum() > 0
    assert first["steps"] == second["steps"] == {1.0}
    assert first["unchanged"]
    assert first["taken_over"] == second["taken_over"] == {}, "the state of the wrapped optimizer"


SHARES = [3, 5]  # samples of each rank


def samples() -> torch.Tensor:
    return torch.randn(sum(SHARES), 4, 6, generator=torch.Generator().manual_seed(3)) * 2 + 1


def results(layer: torch.nn.Module, own: torch.Tensor) -> Dict[str, torch.Tensor]:
    own = own.clone().requires_grad_()
    output = layer(own)
    (output**3).sum().backward()
    assert own.grad is not None
    return {
        "output": output.detach(),
        "gradient": own.grad,
        "weight": layer.weight.grad,
        "mean": layer.running_mean,
        "variance": layer.running_var,
        "inference": layer.eval()(own).detach(),
    }


def normalize(rank: int, size: int) -> Dict[str, torch.Tensor]:
    return results(hvd.SyncBatchNorm(4), samples().split(SHARES)[rank])


def test_samples_are_normalized_over_all_ranks(pod: Dict[str, List[Any]]) -> None:
    found, expected = emulated(pod, "normalize"), results(torch.nn.BatchNorm1d(4), samples())
    for what in ("output", "gradient", "inference"):
        joined = torch.cat([each[what] for each in found])
        torch.testing.assert_close(joined, expected[what], rtol=1e-4, atol=1e-4, msg=what)
    for what in ("mean", "variance"):
        for each in found:
            torch.testing.assert_close(each[what], expected[what], msg=what)
    summed = found[0]["weight"] + found[1]["weight"]
    torch.testing.assert_close(summed, expected["weight"], rtol=1e-4, atol=1e-3, msg="gradients of weights are local")


def test_inputs_need_a_channel_dimension() -> None:
    with pytest.raises(ValueError, match="1D input"):
        hvd.SyncBatchNorm(4).train(False)(torch.zeros(4))
