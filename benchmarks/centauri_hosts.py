"""FSDP of a small Llama between two hosts with limited links: torch's FSDP2 and Centauri's.

    python benchmarks/centauri_hosts.py        # as root, for network namespaces; some eight minutes

Two ranks per host. Both ways and the model without communication take turns in one run, with equal
weights and data, and their losses are compared. The share of communication in FSDP2's step says how
much there is to hide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT, keep, markdown
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flux.launch.hosts import Hosts, link_bytes
from flux.launch.progress import Progress
from flux.launch.spawn import run_ranks
from flux.plan.centauri import RuntimePlan, parallelize, sharded

RESULT = ROOT / "benchmarks" / "results" / "plan" / "centauri.json"
LINKS = ("500mbit", "1gbit", "2gbit", "4gbit", "none")
SIZES = {"width": 512, "mlp": 1408, "heads": 8, "layers": 4, "vocabulary": 2048}
HOSTS, PER_HOST, SEQUENCE = 2, 2, 256


class Block(nn.Module):
    """A layer of a Llama: RMSNorm, attention with rotary positions, SwiGLU."""

    def __init__(self, width: int, mlp: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = (rotated(t.transpose(1, 2), rotary) for t in (q, k))
        attend = nn.functional.scaled_dot_product_attention
        mixed = attend(q, k, v.transpose(1, 2), is_causal=True).transpose(1, 2)
        x = x + self.proj(mixed.reshape(batch, length, width))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        out: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


def rotated(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Turn pairs of [batch, heads, tokens, dim] by the angles [2, tokens, dim / 2]."""
    cos, sin = rotary
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Llama(nn.Module):
    def __init__(self, width: int, mlp: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, mlp, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        dim = width // heads
        inverse = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(SEQUENCE)[:, None] * inverse
        self.register_buffer("rotary", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def fsdp2(model: Llama) -> Llama:
    for part in (model.embed, *model.layers, model.norm, model.head):
        fully_shard(part)
    fully_shard(model)
    return model


def centauri(model: Llama, timeout_s: float) -> Llama:
    mesh = init_device_mesh("cpu", (HOSTS, PER_HOST))
    parallelize(model, mesh, RuntimePlan(timeout_s=timeout_s))
    return model


def entry(job: dict[str, Any], rank: int, progress: Progress) -> dict[str, Any]:
    """Run one rank: all methods take turns."""
    batch, repeats = job["batch"], job["repeats"]

    def model() -> Llama:
        torch.manual_seed(0)
        return Llama(**SIZES)

    makers: dict[str, Callable[[], Llama]] = {
        "compute": model,
        "fsdp2": lambda: fsdp2(model()),
        "centauri": lambda: centauri(model(), job["timeout_s"]),
    }
    models = {name: make() for name, make in makers.items()}
    steppers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3) for name, m in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    sent: dict[str, int] = dict.fromkeys(models, 0)
    for index in range(job["warmup"] + repeats):
        generator = torch.Generator().manual_seed(1000 * index + rank)
        data = torch.randint(SIZES["vocabulary"], (batch, SEQUENCE + 1), generator=generator)
        for name, one in models.items():
            dist.barrier()
            before, began = link_bytes(), time.perf_counter()
            steppers[name].zero_grad()
            out = one(data[:, :-1])
            loss = nn.functional.cross_entropy(out.flatten(0, 1), data[:, 1:].flatten())
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
    sharded(models["centauri"]).close()
    worst = max(abs(a - b) for a, b in zip(losses["fsdp2"], losses["centauri"], strict=True))
    off = torch.tensor([worst])
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    if float(off) > 1e-3:
        raise RuntimeError(f"losses differ by {float(off):g}: {losses}")
    return {
        "times_ms": times,
        "losses": {name: losses[name] for name in ("fsdp2", "centauri")},
        "largest_difference_of_losses": float(off),
        "sent_bytes_of_a_host": sent,
    }


def row(run: dict[str, Any]) -> dict[str, float]:
    """Return medians, the ratio of steps side by side, and FSDP2's share of communication."""
    times = run["times_ms"]
    middle = {name: statistics.median(of) for name, of in times.items()}
    ratios = [a / b for a, b in zip(times["centauri"], times["fsdp2"], strict=True)]
    return {
        **middle,
        "ratio": statistics.median(ratios),
        "worst": max(ratios),
        "share": 1 - middle["compute"] / middle["fsdp2"],
    }


def table(content: dict[str, Any]) -> str:
    """Return the table of docs/centauri.md."""
    header = ["link", "FSDP2", "its communication", "Centauri", "ratio", "MB per host"]
    lines = []
    for run in content["runs"]:
        found, sent = row(run), run["sent_bytes_of_a_host"]
        lines.append(
            [
                run["link"],
                f"{found['fsdp2']:.0f} ms",
                f"{100 * found['share']:.0f}%",
                f"{found['centauri']:.0f} ms",
                f"**{found['ratio']:.2f}**",
                f"{sent['fsdp2'] / 1e6:.0f} and {sent['centauri'] / 1e6:.0f}",
            ]
        )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="*", default=LINKS)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    for link in options.links:
        job = {"batch": options.batch, "repeats": options.repeats, "warmup": 2, "timeout_s": 60.0}
        host_of = [host for host in range(HOSTS) for _ in range(PER_HOST)]
        with Hosts(HOSTS, None if link == "none" else link) as hosts:
            found = run_ranks(
                entry, job, HOSTS * PER_HOST, places=hosts.placed(host_of), timeout_s=60.0
            )
        runs.append({"link": link, **job, **found})
        print(link, {name: round(value, 3) for name, value in row(runs[-1]).items()}, flush=True)
    content = {
        "command": " ".join(["python", "benchmarks/centauri_hosts.py", *sys.argv[1:]]),
        "model": SIZES,
        "sequence": SEQUENCE,
        "ranks": f"{HOSTS} hosts of {PER_HOST}, one thread each, float32",
        "torch": torch.__version__,
        "runs": runs,
    }
    keep(content, options.out)
    print(table(content))


if __name__ == "__main__":
    main()
