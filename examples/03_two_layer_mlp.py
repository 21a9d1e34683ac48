"""A tensor-parallel MLP, forward and backward: AGGemm -> gelu -> GemmRS.

Activations outside the MLP are split by rows (sequence parallelism), weights by hidden units:

    x [M/W, D] --AGGemm--> h [M, F/W] --gelu--> [M, F/W] --GemmRS--> y [M/W, D]

Autograd runs through both ops: the gradient of AGGemm's input is a GemmRS and that of GemmRS's
input is an AGGemm, so the backward pass overlaps its communication in the same way.

    python examples/03_two_layer_mlp.py
    torchrun --standalone --nproc-per-node 4 examples/03_two_layer_mlp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from _launch import run
from torch import nn
from torch.nn.functional import gelu, linear

import flux

M, D, F = 130, 96, 384  # tokens, model width, hidden width
DTYPE = torch.float64  # so that the comparison can be strict; use what your model uses


class ParallelMLP(nn.Module):
    """One rank's share of the MLP whose whole weights are given."""

    def __init__(self, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor):
        super().__init__()
        self.up = flux.AGGemm(max_m=M, n=F, k=D, dtype=DTYPE)
        self.down = flux.GemmRS(max_m=M, n=D, k=F, dtype=DTYPE)
        chunk = -(-F // self.up.world)
        mine = slice(self.up.rank * chunk, (self.up.rank + 1) * chunk)
        self.w1 = nn.Parameter(w1[mine].clone())  # [F/W, D]
        self.b1 = nn.Parameter(b1[mine].clone())  # [F/W]
        self.w2 = nn.Parameter(w2[:, mine].clone())  # [D, F/W]
        self.b2 = nn.Parameter(b2.clone())  # [D], the same on every rank

    def forward(self, x: torch.Tensor, m: int) -> torch.Tensor:
        return self.down(gelu(self.up(x, self.w1, self.b1, m=m)), self.w2, self.b2)


def main(rank: int, world: int) -> None:
    torch.manual_seed(0)  # the same on every rank: each can compute the whole MLP to compare with
    whole = [torch.randn(shape, dtype=DTYPE) / 8 for shape in ((F, D), (F,), (D, F), (D,))]
    x, dy = torch.randn(M, D, dtype=DTYPE), torch.randn(M, D, dtype=DTYPE)

    mlp = ParallelMLP(*whole)
    chunk = -(-M // world)
    rows = slice(rank * chunk, (rank + 1) * chunk)
    x_shard = x[rows].clone().requires_grad_()
    y = mlp(x_shard, M)
    y.backward(dy[rows])
    # A rank adds the second bias to its own rows only, and sees only their gradient. Everything
    # that is replicated under sequence parallelism (norms too) is summed over the ranks like this.
    dist.all_reduce(mlp.b2.grad)

    w1, b1, w2, b2 = (t.clone().requires_grad_() for t in whole)
    x_all = x.clone().requires_grad_()
    expected = linear(gelu(linear(x_all, w1, b1)), w2, b2)
    expected.backward(dy)

    f = slice(rank * -(-F // world), (rank + 1) * -(-F // world))
    compared = {
        "y": (y, expected[rows]),
        "dx": (x_shard.grad, x_all.grad[rows]),
        "dw1": (mlp.w1.grad, w1.grad[f]),
        "db1": (mlp.b1.grad, b1.grad[f]),
        "dw2": (mlp.w2.grad, w2.grad[:, f]),
        "db2": (mlp.b2.grad, b2.grad),
    }
    for name, (got, want) in compared.items():
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
    dist.barrier()  # past this point, all ranks agree
    if rank == 0:
        print(f"{', '.join(compared)} agree with one process's PyTorch on all {world} ranks")
    mlp.up.close()
    mlp.down.close()
    flux.ops.clear_workspaces()  # what the backward pass built for itself


if __name__ == "__main__":
    run(main)
