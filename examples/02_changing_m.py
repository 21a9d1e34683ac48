"""One pair of ops, many sizes: M changes from call to call and need not be a multiple of anything.

This is what serving a model looks like: a long prompt, then steps with a handful of tokens. Memory
is sized once, for ``max_m``; nothing is padded, allocated or negotiated when M changes.

    python examples/02_changing_m.py
    torchrun --standalone --nproc-per-node 4 examples/02_changing_m.py
"""

from __future__ import annotations

import torch
from _launch import all_rows, check_product, run

import flux

MAX_M, N, K = 600, 384, 256
SIZES = (600, 333, 64, 3, 1, 333)  # 3 and 1 leave some ranks of a large world without rows


def main(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    gather = flux.AGGemm(max_m=MAX_M, n=N, k=K)
    reduce = flux.GemmRS(max_m=MAX_M, n=K, k=N)
    with gather, reduce:
        w1 = torch.randn(gather.spec.local_n(world, rank)[0], K)  # [N/W, K]
        w2 = torch.randn(K, reduce.spec.local_k(world, rank))  # [K, N/W]
        if rank == 0:
            total = gather.workspace_bytes + reduce.workspace_bytes
            print(f"{world} ranks, workspaces for any M up to {MAX_M}: {total} bytes per rank")

        for m in SIZES:
            x_shard = torch.randn(gather.own_rows(m), K)
            # The size of a shard does not determine M if M is ragged: pass it.
            y = gather(x_shard, w1, m=m)  # [m, N/W]
            # GemmRS sees all m rows of its input; it returns the rows that this rank owns.
            z = reduce(y, w2)  # [own rows, K]

            x = all_rows(x_shard, m)
            error = check_product(y, x, w1)
            # The second product, whole: y of all ranks side by side, and w2 likewise.
            y_full = all_rows(y.t().contiguous(), N).t()
            w2_full = all_rows(w2.t().contiguous(), N).t()
            chunk = -(-m // world)
            error = max(error, check_product(z, y_full[rank * chunk :][: z.shape[0]], w2_full))
            if rank == 0:
                rows = [max(0, min(chunk, m - r * chunk)) for r in range(world)]
                print(f"M = {m:>3}: rows per rank {rows}, largest error {error:.1e}")


if __name__ == "__main__":
    run(main)
