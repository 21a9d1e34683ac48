"""FSDP of a small Llama between two hosts with limited links: torch's FSDP2 and Centauri's.

    python benchmarks/centauri_hosts.py        # as root, for network namespaces; some eight minutes

Two ranks per host. ``--layout hsdp``: weights are sharded inside each host, and hosts are replicas;
``tp``: tensor parallelism inside each host, whose collectives are waited for, and FSDP between
hosts. All methods take turns in one run, with equal weights and data, and their losses
are compared:

    compute     the model without communication and optimizer. What FSDP2 takes beyond it says how
                much there is to hide.
    fsdp2       torch's fully_shard as it comes: on a CPU it waits for each collective
    ahead       the same with gathers that are not waited for (its private _set_unshard_async_op)
                and one unit ahead in both passes
    kept        FSDP2 with reshard_after_forward=False: whole weights on each rank until backward;
                Centauri keeps them once per host
    waited      Centauri's way to move data, but each collective is waited for where it begins: over
                FSDP2 it gains by bytes and copies alone
    centauri    the same with overlap
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT, keep, markdown
from llama import Layer, Llama, Stage, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flux.launch.hosts import Hosts, link_bytes
from flux.launch.progress import Progress
from flux.launch.spawn import run_ranks
from flux.runtime.centauri.module import RuntimePlan, parallelize, sharded

RESULT = ROOT / "benchmarks" / "results" / "plan" / "centauri.json"
LINKS = ("500mbit", "1gbit", "2gbit", "4gbit", "none")
SIZES = Llama(2048, 512, 1408, 8, 4, "float32")
HOSTS, PER_HOST, SEQUENCE = 2, 2, 256
METHODS = ("fsdp2", "ahead", "kept", "waited", "centauri")
LAYOUTS = ("fsdp", "hsdp", "tp")


class Models:
    """The model under each method, in one layout; all have equal weights.

    Args:
        layout: of LAYOUTS.
        timeout_s: of Centauri's waits.
    """

    def __init__(self, layout: str, timeout_s: float) -> None:
        mesh = init_device_mesh("cpu", (HOSTS, PER_HOST), mesh_dim_names=("hosts", "ranks"))
        self.tensor = mesh["ranks"].get_group() if layout == "tp" else None
        self.torch_mesh = {"fsdp": None, "hsdp": mesh, "tp": mesh["hosts"]}[layout]
        self.mesh = mesh["hosts"] if layout == "tp" else mesh
        self.options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "shared_memory": layout != "tp",  # ranks that share weights are on one host
            "replicate": layout == "hsdp",
        }

    def whole(self) -> Stage:
        torch.manual_seed(0)
        layers = [Layer(SIZES, self.tensor) for _ in range(SIZES.layers)]
        return Stage(SIZES, layers, first=True, last=True)

    def fsdp2(self, **options: Any) -> Stage:
        model = self.whole()
        for part in (model.embedding, *model.layers, model.norm, model.head, model):
            fully_shard(part, mesh=self.torch_mesh, **options)
        return model

    def ahead(self) -> Stage:
        model = self.fsdp2()
        parts = [model.embedding, *model.layers, model.norm, model.head]
        model._set_unshard_async_op(True)
        for here, after in pairwise(parts):
            here.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([here])
        return model

    def centauri(self, **options: Any) -> Stage:
        model = self.whole()
        parallelize(model, self.mesh, RuntimePlan(**self.options, **options))
        return model


def entry(job: dict[str, Any], rank: int, progress: Progress) -> dict[str, Any]:
    """Run one rank: all methods take turns."""
    batch, repeats = job["batch"], job["repeats"]

    of = Models(job["layout"], job["timeout_s"])
    makers: dict[str, Callable[[], Stage]] = {
        "compute": of.whole,
        "fsdp2": of.fsdp2,
        "ahead": of.ahead,
        "kept": lambda: of.fsdp2(reshard_after_forward=False),
        "waited": lambda: of.centauri(overlap=False, prefetch=0),
        "centauri": of.centauri,
    }
    models = {name: make() for name, make in makers.items()}
    steppers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3) for name, m in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    sent: dict[str, int] = dict.fromkeys(models, 0)
    for index in range(job["warmup"] + repeats):
        place = rank // PER_HOST if job["layout"] == "tp" else rank
        generator = torch.Generator().manual_seed(1000 * index + place)
        data = torch.randint(SIZES.vocabulary, (batch, SEQUENCE + 1), generator=generator)
        for name, model in models.items():
            dist.barrier()
            before, began = link_bytes(), time.perf_counter()
            steppers[name].zero_grad()
            loss = loss_of(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            if name != "compute":  # whose optimizer would have all parameters, and not a share
                steppers[name].step()
            dist.barrier()
            took = 1e3 * (time.perf_counter() - began)
            if index >= job["warmup"]:
                times[name].append(took)
                losses[name].append(loss.item())
                sent[name] = link_bytes() - before
        progress("steps", index + 1, job["warmup"] + repeats)
    for name in ("waited", "centauri"):
        sharded(models[name]).close()
    others = METHODS[1:]
    pairs = [zip(losses["fsdp2"], losses[name], strict=True) for name in others]
    off = torch.tensor([max(abs(a - b) for pair in pairs for a, b in pair)])
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    if float(off) > 1e-3:
        raise RuntimeError(f"losses differ by {float(off):g}: {losses}")
    return {
        "times_ms": times,
        "losses": {name: losses[name] for name in METHODS},
        "largest_difference_of_losses": float(off),
        "sent_bytes_of_a_host": sent,
    }


def row(run: dict[str, Any]) -> dict[str, float]:
    """Return medians, ratios of steps side by side, and FSDP2's share of communication."""
    times = run["times_ms"]
    middle = {name: statistics.median(of) for name, of in times.items()}

    def ratios(name: str) -> list[float]:
        return [a / b for a, b in zip(times[name], times["fsdp2"], strict=True)]

    return {
        **middle,
        **{f"{name}_ratio": statistics.median(ratios(name)) for name in METHODS[1:]},
        "worst": max(ratios("centauri")),
        "share": 1 - middle["compute"] / middle["fsdp2"],
    }


NAMES = {"hsdp": "DP2+FSDP2", "tp": "TP2+FSDP2"}


def table(content: dict[str, Any], hybrids: bool = False) -> str:
    """Return the table of docs/use/centauri.md, or that of benchmarks/results/centauri.md."""
    header = ["layout"] if hybrids else []
    header += ["link", "FSDP2", "its communication", "ahead", "kept"]
    header += ["waited", "Centauri", "worst", "MB per host"]
    lines = []
    for run in content["runs"]:
        if (run["layout"] != "fsdp") != hybrids:
            continue
        figures, sent = row(run), run["sent_bytes_of_a_host"]
        lines.append(
            [
                *((NAMES[run["layout"]],) if hybrids else ()),
                run["link"],
                f"{figures['fsdp2']:.0f} ms",
                f"{100 * figures['share']:.0f}%",
                f"{figures['ahead_ratio']:.2f}",
                f"{figures['kept_ratio']:.2f}",
                f"{figures['waited_ratio']:.2f}",
                f"**{figures['centauri_ratio']:.2f}**",
                f"{figures['worst']:.2f}",
                f"{sent['fsdp2'] / 1e6:.0f} and {sent['centauri'] / 1e6:.0f}",
            ]
        )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS)
    parser.add_argument("--layout", default="fsdp", choices=LAYOUTS)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--add", action="store_true", help="to the other runs in --out")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.add else []
    runs = [r for r in runs if r["layout"] != options.layout or r["link"] not in options.links]
    for link in options.links:
        job = {"batch": options.batch, "repeats": options.repeats, "warmup": 2, "timeout_s": 60.0}
        job["layout"] = options.layout
        host_of = [host for host in range(HOSTS) for _ in range(PER_HOST)]
        with Hosts(HOSTS, None if link == "none" else link) as hosts:
            outcome = run_ranks(
                entry, job, HOSTS * PER_HOST, places=hosts.placed(host_of), timeout_s=60.0
            )
        command = " ".join(["python", "benchmarks/centauri_hosts.py", *sys.argv[1:]])
        runs.append({"link": link, "command": command, **job, **outcome})
        print(link, {name: round(value, 3) for name, value in row(runs[-1]).items()}, flush=True)
        content = {
            "model": asdict(SIZES),
            "sequence": SEQUENCE,
            "ranks": f"{HOSTS} hosts of {PER_HOST}, one thread each, float32",
            "torch": torch.__version__,
            "runs": sorted(
                runs, key=lambda run: (LAYOUTS.index(run["layout"]), LINKS.index(run["link"]))
            ),
        }
        keep(content, options.out)
    print(table(content, hybrids=options.layout != "fsdp"))


if __name__ == "__main__":
    main()
