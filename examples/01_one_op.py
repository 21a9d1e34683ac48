"""One fused op: y = all_gather(x) @ weight.T, the gather hidden behind the multiply.

Run it with two ranks of its own, or with as many as torchrun starts:

    python examples/01_one_op.py
    torchrun --standalone --nproc-per-node 4 examples/01_one_op.py
"""

from __future__ import annotations

import torch
from _launch import all_rows, check_product, run

import flux

M, N, K = 2048, 512, 512  # global sizes: rows, columns, depth


def main(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # every rank holds a shard of its own

    # Construction is collective: the ranks compare what they build, and map each other's memory.
    # The context manager gives the memory back; an op that serves many calls is built only once.
    with flux.AGGemm(max_m=M, n=N, k=K) as op:
        # Rank r owns rows [r*ceil(M/W), min(M, (r+1)*ceil(M/W))) of x. The weight is its share of
        # the columns, in the layout of torch.nn.Linear, and is divided in the same way.
        x_shard = torch.randn(op.own_rows(M), K)
        weight = torch.randn(op.spec.local_n(world, rank)[0], K)

        y, x_full = op(x_shard, weight, m=M, return_gathered=True)

        if rank == 0:
            print(op)
            print(f"symmetric workspace: {op.workspace_bytes} bytes on this rank")
            print(op.schedule(M))  # what moves when, and which GEMM tile waits for what

    # The same without flux: one collective, then one matrix multiply.
    reference_x = all_rows(x_shard, M)
    assert torch.equal(x_full, reference_x), "the gathered input is not what the ranks sent"
    error = check_product(y, reference_x, weight)
    if rank == 0:
        print(f"y is {list(y.shape)} on rank 0 of {world}; largest error of all ranks {error:.1e}")


if __name__ == "__main__":
    run(main)
