"""The environment of the programs of `raypod launch`."""

from __future__ import annotations

import sys
from typing import List, Optional

import pytest

from raypod.launcher.mpi_arguments import parse_mpi_arguments
from raypod.launcher.options import parse
from raypod.launcher.programs import Programs
from raypod.launcher.records import HostFacts
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Sizes, place


@pytest.mark.parametrize(
    ("strict", "inherited", "expected"),
    [([], None, None), ([], "1", "1"), (["--strict"], "0", "1"), (["--strict", "no"], "1", "0")],
)
def test_strict_mode_is_a_variable_of_the_instances_of_every_host(
    strict: List[str], inherited: Optional[str], expected: Optional[str]
) -> None:
    request, _ = parse([*strict, "--num-instances", "2", "program"])
    caller = {"EMULATED_POD_STRICT": inherited} if inherited else {}
    placement = place(Cluster("pod", (Host("a", "a"), Host("b", "b"))), Sizes(2, 2, 1))
    interpreters = [sys.executable] * 2
    programs = Programs(request, placement, parse_mpi_arguments(request), caller, ".", (), interpreters=interpreters)
    for spec in placement.instances:
        environment = programs.environment(spec, HostFacts("", {}))
        assert environment.get("EMULATED_POD_STRICT") == expected
