"""What a forward does to Python objects shows once, on the user's objects, as PopTorch traces a model once."""

from __future__ import annotations

import copy
import time
import types
import weakref
from collections import deque

import poptorch
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.support.poptorch_models import Apply, Line, options, seeded, trained, wrapped

COUNT = [0]
total = 0


class Counter:
    total = 0

    def bump(self):
        Counter.total += 1
        return Counter.total


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def bump(self):
        self.count += 1
        return self.count


def in_a_container(make, add=lambda kept: kept.append(1)):
    def made():
        kept = make()
        return (
            types.SimpleNamespace(kept=kept),
            lambda holder: (add(holder.kept), len(holder.kept))[1],
            lambda: len(kept),
        )

    return made


def in_slots():
    kept = Slots()
    return [kept], lambda holder: holder[0].bump(), lambda: kept.count


class Guarded(Counter):
    class Guard:
        __slots__ = ("unset",)

        def __getattr__(self, name):
            raise RuntimeError(f"{name} of a class that is not complete, as pydantic's")

    guard = Guard()


def in_a_class(kind=Counter):
    Counter.total = 0
    return kind(), lambda holder: holder.bump(), lambda: Counter.total


def in_a_class_with_an_object_that_has_no_attributes():
    return in_a_class(Guarded)


def in_a_closure():
    count = 0

    def bump(holder):
        nonlocal count
        count += 1
        return count

    return None, bump, lambda: count


def in_a_module():
    global total
    total = 0

    def bump(holder):
        global total
        total += 1
        return total

    return None, bump, lambda: total


def in_a_list_of_a_module():
    COUNT[0] = 0

    def bump(holder):
        COUNT[0] += 1
        return COUNT[0]

    return None, bump, lambda: COUNT[0]


def in_a_default():
    def bump(holder, kept=[]):  # noqa: B006  # the defect is what is tested
        kept.append(1)
        return len(kept)

    return None, bump, lambda: len(bump.__defaults__[0])


def in_a_function():
    def bump(holder):
        bump.count += 1
        return bump.count

    bump.count = 0
    return None, bump, lambda: bump.count


def in_a_tensor():
    kept = [torch.zeros(())]
    return kept, lambda holder: holder[0].add_(1), lambda: kept[0].item()


@pytest.mark.parametrize(
    "made",
    [
        in_a_container(list),
        in_a_container(deque),
        in_a_container(dict, lambda kept: kept.update({len(kept): 1})),
        in_a_container(set, lambda kept: kept.add(len(kept))),
        in_slots,
        in_a_class,
        in_a_class_with_an_object_that_has_no_attributes,
        in_a_closure,
        in_a_module,
        in_a_list_of_a_module,
        in_a_default,
        in_a_function,
        in_a_tensor,
    ],
)
def test_each_forward_begins_with_the_traced_objects_and_the_trace_alone_shows(made):
    holder, bump, visible = made()
    model = Apply(lambda model, x: x * bump(model.holder), holder=holder)
    inference = poptorch.inferenceModel(model, options(replicas=2, iterations=2))
    assert ([inference(torch.ones(4)).tolist() for _ in range(3)], visible()) == ([[1] * 4] * 3, 1)
    assert model.holder is holder


class Recording(Line):
    def __init__(self):
        super().__init__()
        self.listed, self.shape = [], None

    def forward(self, x):
        self.listed.append({"module": self, "weight": self.weight, "result": x * self.weight})
        self.shape = tuple(x.shape)
        return super().forward(x)


def test_the_users_objects_refer_to_the_users_modules_and_their_own_attributes_are_those_of_a_copy():
    layer = Recording()
    model = nn.Sequential(layer)
    listed = layer.listed
    trained(model, torch.ones(2), opts=options(2))
    assert layer.listed is listed
    assert layer.shape == (1,)
    (entry,) = listed
    assert entry["module"] is layer
    assert entry["weight"] is layer.weight
    assert entry["result"].grad_fn is None
    assert len(copy.deepcopy(model)[0].listed) == 1
    model = Recording()
    inference = poptorch.inferenceModel(model, options())
    inference(torch.ones(2))
    assert model.shape is None
    assert (inference.shape, len(model.listed)) == ((2,), 1)


def test_caches_and_traces_in_other_formats_show_once_and_layers_on_the_host_in_every_call():
    class Cached(Line):
        cache = {}

        def forward(self, x):
            if "scaled" not in self.cache:
                self.cache["scaled"] = self.weight * x
            return poptorch.identity_loss(self.cache["scaled"], "mean")

    model = Cached()
    training = wrapped(model, options(2, accumulation=2), lr=1.0)
    losses = [training(torch.full((4,), value)).tolist() for value in (0.25, 0.5)]
    assert (losses, list(Cached.cache)) == ([[0.25, 0.25], [0.375, 0.375]], ["scaled"])
    calls = []

    def layer(x):
        calls.append(x.item())
        return x

    model = Apply(lambda x: poptorch.CPU(layer, "layer")(x))
    inference = poptorch.inferenceModel(model, options())
    for value in (1.0, 2.0):
        inference(torch.tensor([value]))
    assert calls == [1, 1, 2], "at the compilation, and in each call"
    calls = []
    convolution = nn.Conv2d(512, 256, 3)

    def forward(model, x):
        calls.append(1)
        model.calls.append(1)
        return model.convolution(x).view(-1)

    model = Apply(forward, convolution=convolution, calls=[])
    poptorch.inferenceModel(model, options())(torch.zeros(1, 512, 4, 4))
    assert (len(calls), len(model.calls)) == (1, 1)


def test_replicas_do_not_share_the_cache_of_parametrizations(monkeypatch):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = parametrize.register_parametrization(nn.Linear(2, 2), "weight", Doubled())

        def forward(self, x):
            with parametrize.cached():
                y = self.linear(self.linear(x))
                time.sleep(0.002)  # other replicas run
            return poptorch.identity_loss(y * y, "mean")

    def weight(at_a_time):
        monkeypatch.setenv("EMULATED_POD_REPLICAS_AT_A_TIME", at_a_time)
        model = seeded(Cached)
        training = wrapped(model, options(2, accumulation=4))
        for _ in range(2):
            training(torch.arange(16.0).view(8, 2) / 16)
        return model.linear.parametrizations.weight.original.detach()

    assert torch.equal(weight("2"), weight("1"))


def test_objects_that_raise_for_unknown_attributes_or_are_gone_are_left_alone():
    class Proxy:
        __slots__ = ()

        def __getattr__(self, name):
            raise RuntimeError(name)

    model = Apply(lambda model, x: x, proxy=Proxy())
    assert poptorch.inferenceModel(model, options())(torch.ones(1)).item() == 1
    holder = types.SimpleNamespace(kept=[], gone=weakref.proxy(Counter()))
    training = wrapped(Apply(lambda model, x: (holder.kept.append(1), model.line(x))[1], line=Line()), options(2))
    training(torch.ones(2))
    assert holder.kept == [1]
