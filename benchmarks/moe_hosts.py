"""Ops of mixtures of experts, between hosts and on one: fused against gather or scatter of gloo.

    python benchmarks/moe_hosts.py [--layouts 2x1 2x2 1x2] [--rate 1gbit] [--repeats 9]
        [--parts ops layer]

Hosts are network namespaces of this machine (flux/launch/hosts.py; needs root and iproute2).
float32, one thread per rank. The unfused path is gloo's all_gather_into_tensor,
reduce_scatter_tensor or all_reduce, and the same grouped product; of dispatch and combine gloo's
all_to_all_single of routed rows, sorted by expert, as Megatron-core's dispatcher sends them, and
the product. The ways are interleaved, behind a barrier each time, and the time of a call is that of
the slowest rank. `share` is the part of the unfused time that is not the product. `layer` is
Megatron-core's MoELayer (SwiGLU, no bias), forward and backward, with its dispatchers and with
ours. Raw samples go to benchmarks/results/hosts/moe.json.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from common import keep, markdown
from multi_host import RESULTS
from one_shot import Ways, interleaved

from flux import Knobs
from flux.bench.sparse import ChosenRows
from flux.bench.sparse_reference import SparseShare
from flux.core.sparse_problem import SparseProblem, make_problem
from flux.launch.hosts import Hosts
from flux.launch.spawn import run_ranks
from flux.machine import host
from flux.moe import (
    AGGroupedGemm,
    DispatchGroupedGemm,
    GroupedGemmAR,
    GroupedGemmCombine,
    GroupedGemmRS,
)

# M, hidden, ffn, experts, topk: Comet's and Flux's shapes with every size divided.
RESULT = RESULTS / "moe.json"
SHAPES = [(2048, 1024, 1024, 8, 2), (2048, 1024, 512, 16, 4), (1024, 2048, 512, 8, 2)]
SHAPES += [(2048, 1024, 2048, 8, 2)]  # on fast cores communication is half of it
OPS: dict[str, Any] = {"ag": AGGroupedGemm, "rs": GroupedGemmRS, "ar": GroupedGemmAR}
OPS |= {"dispatch": DispatchGroupedGemm, "combine": GroupedGemmCombine}
Task = tuple[list[str], list[tuple[int, ...]], int, list[int]]


def measure(task: Task, rank: int, progress: Any) -> list[dict[str, Any]]:
    names, shapes, repeats, eps = task
    world, results = dist.get_world_size(), []
    torch.set_num_threads(1)
    for m, hidden, ffn, experts, topk in shapes:
        generator = torch.Generator().manual_seed(m + experts)
        choices = torch.rand(m, experts, generator=generator).topk(topk).indices
        for ep in eps:
            for name in names:
                if OPS[name].dispatches and ep == 1:
                    continue  # every rank has all experts
                sizes = (ffn, hidden) if name in ("ag", "dispatch") else (hidden, ffn)
                times = one(OPS[name], m, sizes, choices, experts, ep, repeats, world)
                shape = {"m": m, "hidden": hidden, "ffn": ffn, "experts": experts, "topk": topk}
                results.append({"op": name, **shape, "ep": ep, **times})
    return results


def one(
    kind: Any,
    m: int,
    sizes: tuple[int, int],
    choices: torch.Tensor,
    experts: int,
    ep: int,
    repeats: int,
    world: int,
) -> dict[str, Any]:
    """Return times of an op by way, and the path that it chose."""
    n, k = sizes
    of_experts = {"experts": experts, "topk": choices.shape[1], "ep": ep}
    tunings: dict[str, Any] = {"flux": "cache"}
    if not kind.dispatches:
        tunings["unfused"] = Knobs(path="unfused")
    ops = {
        way: kind(max_m=m, n=n, k=k, tuning=tuning, **of_experts) for way, tuning in tunings.items()
    }
    op = ops["flux"]
    routing = op.routing(choices)
    gathers = kind.kind.gathers
    x = torch.randn(op.own_rows(m) if gathers else routing.rows, op.spec.local_k(world, op.rank))
    count = op.spec.local_experts(world, op.rank)[1]
    w = torch.randn(count, op.spec.local_n(world, op.rank)[0], x.shape[1])
    probs = torch.rand(choices.shape, generator=torch.Generator().manual_seed(m))
    options = {} if gathers else {"probs": probs}
    ways: Ways = {way: lambda op=op: op(x, w, choices, **options) for way, op in ops.items()}
    # The product alone: a world of one, with this rank's part of every expert.
    rows = torch.randn(routing.rows, x.shape[1])
    out = rows.new_empty(routing.rows, w.shape[1])
    groups = routing.groups(0, m)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        for expert, begin, end in groups:
            torch.mm(rows[begin:end], w[expert].t(), out=out[begin:end])
        return out

    ways["product"] = lambda: multiply(rows)
    if kind.dispatches:
        name = "dispatch_grouped_gemm" if gathers else "grouped_gemm_combine"
        problem = make_problem(name, m, n, k, "float32", world, of_experts)
        assert isinstance(problem, SparseProblem)
        exchange = ChosenRows(SparseShare(problem, op.rank), choices, probs)

        def unfused() -> torch.Tensor:
            return multiply(exchange.dispatch(x)) if gathers else exchange.combine(multiply(rows))

        ways["unfused"] = unfused
        if not gathers:
            rows.copy_(x)
        torch.testing.assert_close(unfused(), ways["flux"](), rtol=1e-4, atol=1e-3)
    times = slowest(interleaved(ways, repeats))
    path = op.schedule(m).knobs.path
    for each in ops.values():
        each.close()
    return {"path": path, "us": times}


def measure_layer(task: Task, rank: int, progress: Any) -> list[dict[str, Any]]:
    """Time Megatron's layer with each dispatcher beside ours."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from flux.bench.megatron_cpu import megatron_on_cpu
    from flux.layers.megatron import swap

    _, shapes, repeats, _ = task
    world, results = dist.get_world_size(), []
    torch.set_num_threads(1)
    with megatron_on_cpu(1, expert_model_parallel_size=world):
        for m, hidden, ffn, experts, topk in shapes:
            settings: dict[str, Any] = {
                "num_layers": 1,
                "hidden_size": hidden,
                "num_attention_heads": 8,
                "ffn_hidden_size": ffn,
                "moe_ffn_hidden_size": ffn,
                "num_moe_experts": experts,
                "moe_router_topk": topk,
                "expert_model_parallel_size": world,
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "add_bias_linear": False,
                "bias_activation_fusion": False,
            }
            spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
            ways: Ways = {}
            x = torch.randn(m // world, 1, hidden, requires_grad=True)
            for way, dispatcher in (("unfused", "allgather"), ("alltoall",) * 2, ("flux",) * 2):
                kind = "allgather" if way == "flux" else dispatcher
                config = TransformerConfig(
                    **settings, moe_token_dispatcher_type=kind, tp_comm_overlap=way == "flux"
                )
                torch.manual_seed(1 + rank)
                layer = MoELayer(config, spec.submodules, layer_number=1)
                swap(layer, overlap=None)

                def step(layer: Any = layer, x: torch.Tensor = x) -> None:
                    layer.zero_grad()
                    layer(x)[0].sum().backward()

                ways[way] = step
            with torch.compiler.set_stance("force_eager"):
                us = slowest(interleaved(ways, repeats))
            shape = {"m": m, "hidden": hidden, "ffn": ffn, "experts": experts, "topk": topk}
            results.append({"op": "layer", **shape, "ep": world, "path": "", "us": us})
    return results


def slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the time of the slowest rank, of each call of each way."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, times)
    return {
        way: [max(call) for call in zip(*(of_rank[way] for of_rank in everybody), strict=True)]
        for way in times
    }


def row(run: dict[str, Any]) -> list[str]:
    us = {way: statistics.median(times) for way, times in run["us"].items()}
    ratios = [a / b for a, b in zip(run["us"]["flux"], run["us"]["unfused"], strict=True)]
    share = f"{1 - us['product'] / us['unfused']:.0%}" if "product" in us else ""
    if "alltoall" in us:
        share = f"alltoall {us['alltoall'] / us['unfused']:.2f}"
    return [
        run["layout"],
        run["op"],
        "x".join(str(run[key]) for key in ("m", "hidden", "ffn", "experts", "topk")),
        str(run["ep"]),
        run["path"],
        f"{us['flux'] / us['unfused']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{us['unfused'] / 1e3:.1f}",
        f"{us['flux'] / 1e3:.1f}",
        share,
    ]


def table(document: dict[str, Any]) -> str:
    """Return the table of all runs."""
    header = ["hosts x ranks", "op", "M x hidden x ffn x experts x topk", "ep", "path"]
    header += ["flux/unfused", "unfused ms", "flux ms", "share"]
    return markdown(header, [row(run) for run in document["runs"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2", "1x2"])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--parts", nargs="+", default=["ops", "layer"], choices=["ops", "layer"])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--shapes", nargs="+", help="MxHIDDENxFFNxEXPERTSxTOPK")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes or []] or SHAPES
    results = []
    for layout in args.layouts:
        hosts, each = map(int, layout.split("x"))
        task = (args.ops, shapes, args.repeats, sorted({1, hosts * each}))
        with Hosts(hosts, None if hosts == 1 else args.rate) as made:
            places = made.placed([rank // each for rank in range(hosts * each)])
            runs = []
            for part, work in (("ops", measure), ("layer", measure_layer)):
                if part in args.parts:
                    runs += run_ranks(work, task, hosts * each, places=places)
        results += [
            {"layout": layout, "rate": args.rate if hosts > 1 else "none", **r} for r in runs
        ]
        for run in results[-len(runs) :]:
            print(" ".join(row(run)), flush=True)
    document = {"device": host.device(), "versions": host.versions(), "runs": results}
    keep(document, RESULT)
    print(table(document))


if __name__ == "__main__":
    main()
