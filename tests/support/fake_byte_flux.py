"""A stand-in for byte-flux, and an interpreter that has it: the tests' own, led to this package.

Its classes have byte-flux's names and parameters (version 1.1.2) and compute on CPUs, so that the
adapter, its worker and what they say to one another really run.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = """
import sys

if "--probe" not in sys.argv:  # a probe looks for names alone, and importing torch takes seconds
    import torch
    import torch.distributed as dist

__version__ = "1.1.2"
group_of_shared_memory = None


def init_flux_shm(group):
    global group_of_shared_memory
    group_of_shared_memory = group


class AGKernel:
    def __init__(self, tp_group, nnodes, full_m, n_dim, k_dim, input_dtype, output_dtype=None,
                 use_pdl=False):
        assert tp_group is group_of_shared_memory and nnodes == 1
        self.group, self.m, self.n, self.k = tp_group, full_m, n_dim, k_dim
        self.dtype = input_dtype

    def forward(self, input, weight, bias=None, output=None, input_scale=None, weight_scale=None,
                output_scale=None, fast_accum=False, transpose_weight=False,
                all_gather_option=None, gathered_input=None):
        print("noise on standard output")
        assert not transpose_weight and weight.shape == (self.n, self.k)
        assert input.dtype == self.dtype and not torch.is_grad_enabled()
        shards = [torch.empty_like(input) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(shards, input, group=self.group)
        full = torch.cat(shards)
        assert full.shape[0] == self.m
        return full @ weight.t()


class GemmRS:
    def __init__(self, tp_group, nnodes, max_m, n_dim, input_dtype, output_dtype=None,
                 transpose_weight=False, fuse_reduction=False, ring_reduction=False):
        assert tp_group is group_of_shared_memory and max_m % 1024 == 0
        self.group, self.n = tp_group, n_dim

    def forward(self, input, weight, bias=None, input_scale=None, weight_scale=None,
                output_scale=None, fast_accum=False, reduce_scatter_option=None):
        FAULT
        partial = (input @ weight.t()).float()
        dist.all_reduce(partial, group=self.group)
        rows = partial.shape[0] // dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        return partial[rank * rows : (rank + 1) * rows].to(input.dtype)
"""


def make_interpreter(folder: Path, fault: str = "pass", package: str = PACKAGE) -> Path:
    """A Python whose `flux` is the stand-in; `fault` is a statement in GemmRS.forward."""
    stub = folder / "site" / "flux"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(package.replace("FAULT", fault), encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={stub.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python
