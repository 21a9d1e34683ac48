"""A small GPT of Megatron-core, trained on the bytes of this repository's documentation.

    python examples/megatron_gpt.py --layers flux
    python examples/megatron_gpt.py --layers megatron --ranks 4
    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt.py --layers flux

With the same options both kinds of layers print the same losses, to about six digits: the model is
Megatron-core's own in both cases, and only its tensor-parallel linear layers differ. Needs
megatron-core (pip install "flux-overlap[megatron]"). All ranks are one tensor-parallel group.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
from _launch import run

from flux.bench.megatron_cpu import data_parallel, gpt, megatron_on_cpu, step
from flux.layers import close_pools, replace_linears

DOCS = Path(__file__).parents[1] / "docs"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", choices=("megatron", "flux"), default="flux")
    parser.add_argument("--ranks", type=int, default=2, help="unless torchrun starts them")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64, help="bytes")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--tied", action="store_true", help="one weight for embedding and output")
    return parser.parse_args(arguments)


def main(rank: int, world: int, options: argparse.Namespace) -> None:
    from megatron.core.transformer import TransformerConfig

    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    with megatron_on_cpu(world):
        config = TransformerConfig(
            num_layers=4,
            hidden_size=options.hidden,
            num_attention_heads=8,
            tensor_model_parallel_size=world,
            sequence_parallel=world > 1 and not options.no_sequence_parallel,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tp_comm_overlap=options.layers == "flux",
        )
        torch.manual_seed(0)  # the same on every rank, which takes its part of the whole weights
        model = gpt(config, 256, options.sequence, tied=options.tied)
        if options.layers == "flux":
            replace_linears(model)  # the only line that differs
        ddp = data_parallel(model)
        optimizer = torch.optim.Adam(ddp.parameters(), 2e-3)
        generator = torch.Generator().manual_seed(1)
        for number in range(1, options.steps + 1):
            most = len(data) - options.sequence - 1
            starts = torch.randint(most, (options.batch,), generator=generator)
            tokens = torch.stack([data[s : s + options.sequence + 1] for s in starts])
            loss = step(ddp, tokens)
            optimizer.step()
            if rank == 0 and (number == 1 or number % 5 == 0 or number == options.steps):
                print(f"{options.layers} layers, step {number}: loss {loss:.5f}", flush=True)
        dist.barrier()
        close_pools()


if __name__ == "__main__":
    options = parse()
    run(functools.partial(main, options=options), options.ranks)
