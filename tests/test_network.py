"""Ranks on several hosts: results, routes and life cycle over send and receive.

Hosts are names here (FLUX_HOST): ranks that give different ones share no memory, so everything
between them crosses the loopback. tests/test_hosts.py uses links of limited speed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from flux import Knobs, Topology
from harness import run_ranks
from op_cases import Case, check_cases, meshes, random_case
from reference import Inputs, Problem

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
PLACEMENTS = ("ab", "aab", "aaab", "aabb", "abab", "abc", "aabbcc", "aaabbc")


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Ops built inside are on the host of this name."""
    before = os.environ.get("FLUX_HOST")
    os.environ["FLUX_HOST"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLUX_HOST"]
        else:
            os.environ["FLUX_HOST"] = before


def check_on_hosts(rank: int, world: int, hosts: str, cases: list[Case]) -> int:
    with on_host(hosts[rank]):
        return check_cases(rank, world, cases)


def networked(case: Case, rng: random.Random) -> Case:
    """A case with what exists between hosts: tiles are pushed; hosts as found, or any mesh."""
    world = case.topology.world if case.topology else 0
    topology = rng.choice((None, None, *(meshes(world) if world else ())))
    direction = rng.choice((None, "push"))
    return replace(case, knobs=replace(case.knobs, direction=direction), topology=topology)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_random_cases(op: str, hosts: str) -> None:
    rng = random.Random(f"{op} {hosts}")
    cases = [networked(random_case(rng, op, len(hosts)), rng) for _ in range(12)]
    run_ranks(len(hosts), check_on_hosts, hosts, cases)
