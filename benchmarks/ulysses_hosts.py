"""Ulysses' two ops, between hosts and on one: fused against gloo's all_to_all and one GEMM.

    python benchmarks/ulysses_hosts.py [--layouts 2x1 1x2] [--rate 1gbit] [--repeats 9]
        [--shapes BATCHxSEQUENCExHIDDENxHEADSxKV_HEADS ...] [--out ulysses.json]

Hosts are network namespaces of this machine (flux/launch/hosts.py; needs root and iproute2).
float32, one thread per rank, heads of 64. `qkv` is the projection to queries, keys and values, and
`out` the output projection. The unfused way is one torch.mm, all_to_all_single, and the copies that
put heads or tokens in order. Ways are interleaved, behind a barrier each time, and the time of a
call is that of the slowest rank. `share` is the part of the unfused time that is not the GEMM.
`slabs` is the output projection without FEW_ROWS (flux/ulysses/blocks.py), on one host. Raw samples
go to benchmarks/results/hosts. Few rows on one host:

    python benchmarks/ulysses_hosts.py --layouts 1x2 --repeats 61 --out ulysses_small.json --shapes
        1x{16,64,128,256,512,1024}x256x4x4 1x{64,256,1024}x1024x16x4
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import keep, markdown
from moe_hosts import slowest
from multi_host import RESULTS
from one_shot import Ways, interleaved

from flux import Knobs
from flux.launch.hosts import Hosts
from flux.launch.spawn import run_ranks
from flux.machine import host
from flux.ulysses import AllToAllGemm, GemmAllToAll, blocks

HEAD_DIM = 64
# batch, sequence, hidden, heads, key and value heads
SHAPES = [(1, 2048, 512, 8, 8), (1, 2048, 768, 12, 12), (1, 4096, 1024, 16, 4)]
Task = tuple[list[tuple[int, ...]], int, list[int | None]]


def measure(task: Task, rank: int, progress: Any) -> list[dict[str, Any]]:
    shapes, repeats, tiles = task
    results = []
    torch.set_num_threads(1)
    for shape in shapes:
        for name, one in (("qkv", qkv), ("out", out)):
            ops, ways = one(*shape, tiles)
            times = slowest(interleaved(ways, repeats))
            results.append({"op": name, "shape": list(shape), "us": times})
            for op in ops:
                op.close()
    return results


def tunings(tiles: list[int | None]) -> dict[str, Any]:
    """Return knobs by way: what an op chooses, the unfused path, and tiles of some rows."""
    fixed = {f"rows{rows}": Knobs(comm_tile_rows=rows) for rows in tiles if rows}
    return {"flux": "cache", "path_unfused": Knobs(path="unfused"), **fixed}


def qkv(
    batch: int, sequence: int, hidden: int, heads: int, kv: int, tiles: list[int | None]
) -> tuple[list[Any], Ways]:
    world = dist.get_world_size()
    packed, own = [heads, kv, kv], sequence // world
    ops = {
        way: GemmAllToAll(
            max_m=batch * sequence, k=hidden, heads=packed, head_dim=HEAD_DIM, tuning=tuning
        )
        for way, tuning in tunings(tiles).items()
    }
    x = torch.randn(batch, own, hidden)
    w = torch.randn(sum(packed) * HEAD_DIM, hidden)

    def unfused() -> list[torch.Tensor]:
        y = torch.mm(x.view(-1, hidden), w.t()).view(batch, own, -1, HEAD_DIM)
        parts = [part.unflatten(2, (world, -1)) for part in y.split(packed, 2)]
        sent = torch.cat(parts, 3).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        whole = received.permute(1, 3, 0, 2, 4).reshape(batch, -1, sequence, HEAD_DIM)
        return list(whole.split([part // world for part in packed], 1))

    got, wanted = ops["flux"](x, w), unfused()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    ways: Ways = {way: lambda op=op: op(x, w) for way, op in ops.items()}
    ways |= {"unfused": unfused, "gemm": lambda: torch.mm(x.view(-1, hidden), w.t())}
    return list(ops.values()), ways


def out(
    batch: int, sequence: int, hidden: int, heads: int, kv: int, tiles: list[int | None]
) -> tuple[list[Any], Ways]:
    world = dist.get_world_size()
    own, depth = sequence // world, heads * HEAD_DIM
    ops = {
        way: AllToAllGemm(
            max_m=batch * sequence, n=hidden, heads=heads, head_dim=HEAD_DIM, tuning=tuning
        )
        for way, tuning in tunings(tiles).items()
    }
    x = torch.randn(batch, heads // world, sequence, HEAD_DIM)
    w = torch.randn(hidden, depth)
    rows = torch.randn(batch * own, depth)

    def unfused() -> torch.Tensor:
        sent = x.unflatten(2, (world, own)).permute(2, 0, 3, 1, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        whole = received.permute(1, 2, 0, 3, 4).reshape(batch * own, depth)
        return torch.mm(whole, w.t()).view(batch, own, hidden)

    torch.testing.assert_close(ops["flux"](x, w), unfused(), rtol=1e-3, atol=1e-3)
    ways: Ways = {way: lambda op=op: op(x, w) for way, op in ops.items()}
    ways |= {"unfused": unfused, "gemm": lambda: torch.mm(rows, w.t())}

    def slabs() -> torch.Tensor:
        with mock.patch.object(blocks, "FEW_ROWS", 0):
            return ops["flux"](x, w)

    return list(ops.values()), ways | {"slabs": slabs}


def row(run: dict[str, Any]) -> list[str]:
    us = {way: median(times) for way, times in run["us"].items()}
    ratios = [a / b for a, b in zip(run["us"]["flux"], run["us"]["unfused"], strict=True)]
    others = [way for way in us if way not in ("flux", "unfused", "gemm")]
    return [
        run["layout"],
        run["op"],
        "x".join(map(str, run["shape"])),
        f"{us['flux'] / us['unfused']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{us['unfused'] / 1e3:.1f}",
        f"{us['flux'] / 1e3:.1f}",
        f"{1 - us['gemm'] / us['unfused']:.0%}",
        " ".join(f"{way} {us[way] / us['unfused']:.2f}" for way in others),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["2x1", "1x2"])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--shapes", nargs="+", help="BATCHxSEQUENCExHIDDENxHEADSxKV_HEADS")
    parser.add_argument("--tile-rows", nargs="+", type=int, default=[], help="beside the default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", default="ulysses.json")
    args = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes or []] or SHAPES
    task = (shapes, args.repeats, args.tile_rows)
    results = []
    for layout in args.layouts:
        hosts, each = map(int, layout.split("x"))
        with Hosts(hosts, None if hosts == 1 else args.rate) as made:
            places = made.placed([rank // each for rank in range(hosts * each)])
            runs = run_ranks(measure, task, hosts * each, places=places)
        rate = args.rate if hosts > 1 else "none"
        results += [{"layout": layout, "rate": rate, **run} for run in runs]
        for run in results[-len(runs) :]:
            print(" ".join(row(run)), flush=True)
    document = {"device": host.device(), "versions": host.versions(), "runs": results}
    keep(document, RESULTS / args.out)
    header = ["hosts x ranks", "op", "batch x sequence x hidden x heads x kv heads"]
    header += ["flux/unfused", "unfused ms", "flux ms", "share", "others"]
    print(markdown(header, [row(run) for run in results]))


if __name__ == "__main__":
    main()
