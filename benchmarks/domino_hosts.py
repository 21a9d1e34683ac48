"""Training steps of a Megatron-core transformer between two hosts, with several kinds of layers.

    python benchmarks/domino_hosts.py       # as root, for network namespaces; some ten minutes

One rank per host, tensor parallel, one thread each. All forms are Megatron's layers with torch's
attention and other linear layers, but for DeepSpeed's own Domino, which is measured if `deepspeed`
can be imported; its weights are Megatron's. Results of all forms are compared with Megatron's.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import (
    LINK_NAMES,
    ROOT,
    compute_below_network,
    keep,
    markdown,
    versions,
)

from flux.bench.config import Run
from flux.bench.launch import on_ranks
from flux.bench.megatron_cpu import Norm, megatron_on_cpu
from flux.bench.metrics import ratio_interval
from flux.bench.model_layers import still_group
from flux.launch.progress import Progress, silent
from flux.launch.spawn import pin
from flux.machine import host

RESULT = ROOT / "benchmarks" / "results" / "plan" / "domino_hosts.json"
# width, hidden units of the MLP, heads, layers, tokens of a sequence, sequences; and the link
CASES = [
    ((512, 2048, 4, 3, 512, 4), "750mbit"),
    ((1024, 4096, 8, 2, 256, 4), "500mbit"),
    ((1024, 4096, 8, 2, 256, 4), "350mbit"),
]
TOLERANCE = 2e-4
"""Of results against Megatron's, relative to the largest magnitude."""
LABELS = {
    "megatron": "Megatron-core",
    "flux": "Flux's layers",
    "domino": "Domino, 2 slices",
    "domino4": "Domino, 4 slices",
    "both": "Domino, 2 slices, row-parallel layers fused",
    "deepspeed": "DeepSpeed's Domino",
}


@dataclass(frozen=True, kw_only=True)
class Case(Run):
    """One model between two hosts.

    Attributes:
        sizes: width, hidden units of the MLP, heads, layers, tokens of a sequence, sequences.
    """

    sizes: tuple[int, int, int, int, int, int]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 2


class Attention(torch.nn.Module):
    """Causal attention of torch, as DeepSpeed's Domino has it.

    Megatron's own on a CPU writes all scores to memory.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return [sequence, batch, heads * head_dim] of [sequence, batch, heads, head_dim]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(-2)


def settings(case: Case) -> Any:
    """Return Megatron's configuration of a GPT."""
    from megatron.core.transformer import TransformerConfig

    hidden, ffn, heads, layers, *_ = case.sizes
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_func=torch.nn.functional.gelu,
    )


def block(case: Case, tp: dist.ProcessGroup | None = None) -> Any:
    """Return the stack of layers; its values depend only on the case."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
    )

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    spec.submodules.self_attention.submodules.core_attention = Attention
    groups = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
    if tp is not None:
        groups.tp = tp
    torch.manual_seed(case.seed)
    submodules = TransformerBlockSubmodules([spec] * case.sizes[3], Norm)
    return TransformerBlock(settings(case), submodules, post_layer_norm=False, pg_collection=groups)


def deepspeeds(case: Case, weights: Any) -> Any:
    """Return DeepSpeed's Domino of the same layers, with the weights of Megatron's."""
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType
    from megatron.core import parallel_state

    config = SimpleNamespace(
        **vars(settings(case)),
        domino_intra_layer_overlap=False,
    )
    config.perform_initialization = False
    made = DominoTransformer(
        config, parallel_state, None, ModelType.encoder_or_decoder, post_layer_norm=False
    )
    pairs = [
        ("input_layernorm", "input_layernorm"),
        ("self_attention.query_key_value", "self_attention.linear_qkv"),
        ("self_attention.dense", "self_attention.linear_proj"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
        ("linear_fc1", "mlp.linear_fc1"),
        ("linear_fc2", "mlp.linear_fc2"),
    ]
    for theirs, megatrons in zip(made.layers, weights.layers, strict=True):
        for to, of in pairs:
            for name in ("weight", "bias"):
                into = getattr(theirs.get_submodule(to), name)
                into.data.copy_(getattr(megatrons.get_submodule(of), name).data)
    return made


def forms(case: Case) -> dict[str, Any]:
    """Return the stack of layers in every form. Collective."""
    from flux.layers import replace_linears
    from flux.runtime.domino.layers import replace
    from flux.runtime.domino.megatron import DominoDecoder

    def sliced(slices: int, fused: str = "none") -> Any:
        return DominoDecoder(replace(block(case), fused), slices, 1, order="staggered")

    stacks = {
        "compute": block(case, still_group()),
        "megatron": block(case),
        "flux": replace_linears(block(case), overlap=True),
        "domino": sliced(2),
        "domino4": sliced(4),
        "both": sliced(2, "row"),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        stacks["deepspeed"] = deepspeeds(case, stacks["megatron"])
    return stacks


class Step:
    """Forward and backward of one form with the same input; keeps output and input's gradient."""

    def __init__(self, case: Case, layers: Any) -> None:
        hidden, *_, sequence, batch = case.sizes
        torch.manual_seed(case.seed + 1)
        self.x, self.dy = torch.randn(2, sequence, batch, hidden).unbind()
        self.mask = torch.triu(torch.ones(1, 1, sequence, sequence), 1).bool()
        self.layers = layers
        self.results: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self) -> None:
        """Run one step."""
        for parameter in self.layers.parameters():
            parameter.grad = None
        x = self.x.clone().requires_grad_()
        y = self.layers(x, self.mask)
        y.backward(self.dy)
        assert x.grad is not None
        self.results = y.detach(), x.grad


def collectives(case: Case) -> Callable[[], None]:
    """Return a call that does the AllReduces of a step, one after the other."""
    hidden, _, _, layers, sequence, batch = case.sizes
    tensor = torch.zeros(sequence, batch, hidden)

    def run() -> None:
        for _ in range(4 * layers):
            dist.all_reduce(tensor)

    return run


def measure(job: tuple[Case, None], rank: int, progress: Progress = silent) -> dict[str, Any]:
    """Measure all forms on one rank, interleaved; return the times of the slowest rank, in ms."""
    from flux.layers import close_pools

    case, _ = job
    # A host has cores of its own; threads that are made later stay on them.
    pin(rank, case.ranks, threads=1)
    with megatron_on_cpu(2), torch.compiler.set_stance("force_eager"):
        steps = {name: Step(case, layers) for name, layers in forms(case).items()}
        calls: dict[str, Callable[[], None]] = {"comm": collectives(case), **steps}
        names, times = list(calls), {name: [] for name in calls}
        for index in range(case.warmup + case.repeats):
            if index == case.warmup:  # all threads of the network are there
                compute_below_network()
            # In another order each time: a form may leave something behind for the next one.
            for name in random.Random(index).sample(names, len(names)):
                dist.barrier()
                began = time.perf_counter()
                calls[name]()
                taken = torch.tensor([1e3 * (time.perf_counter() - began)], dtype=torch.float64)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if index >= case.warmup:
                    times[name].append(float(taken))
            progress("steps", index + 1, case.warmup + case.repeats)
        errors = {name: _error(step, steps["megatron"]) for name, step in steps.items()}
        close_pools()
    for name, error in errors.items():
        if name != "compute" and not error <= TOLERANCE:
            raise RuntimeError(f"{name}: results differ from Megatron's by {error:.1e}")
    return {"times_ms": times, "errors": {n: e for n, e in errors.items() if n != "compute"}}


def _error(step: Step, right: Step) -> float:
    assert step.results is not None and right.results is not None
    pairs = zip(step.results, right.results, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# -- the table -------------------------------------------------------------------------------------


def hidden(run: dict[str, Any], form: str) -> float:
    """Return the share of communication that a form hides, of medians."""
    middle = {name: statistics.median(times) for name, times in run["times_ms"].items()}
    return 1 - (middle[form] - middle["compute"]) / middle["comm"]


def table(content: dict[str, Any]) -> str:
    """Return the table of docs/use/domino.md."""
    header = ["layers", "link, share of comm.", "form", "step", "ratio", "hidden"]
    lines = []
    for run in content["runs"]:
        wide, _, _, layers, sequence, batch = run["sizes"]
        times = run["times_ms"]
        serial = statistics.median(times["compute"]) + statistics.median(times["comm"])
        share = statistics.median(times["comm"]) / serial
        for form, label in LABELS.items():
            if form not in times:
                continue
            ends = ratio_interval(times[form], times["megatron"])
            interval = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends and form != "megatron" else ""
            middle = statistics.median(times[form])
            lines.append(
                [
                    f"{layers} of width {wide}, {batch} x {sequence} tokens",
                    f"{LINK_NAMES.get(run['link'], run['link'])}, {share:.0%}",
                    label,
                    f"{middle:.0f} ms",
                    f"{middle / statistics.median(times['megatron']):.2f}{interval}",
                    f"{hidden(run, form):.0%}",
                ]
            )
    return (
        f"{markdown(header, lines)}\n\n{content['device']}; {versions(content)}; "
        "float32, one thread per rank; medians of interleaved steps on the slower rank; ratio "
        "to Megatron-core, with 90% intervals. Share: AllReduces of a step by themselves, "
        "over their time and that of a step on a group whose collectives return at once. "
        "Hidden: of the former, what the step does not take beyond the latter."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    for sizes, link in CASES:
        case = Case(repeats=options.repeats, warmup=2, hosts="2", link_rate=link, sizes=sizes)
        outcome = on_ranks(measure, case, None, silent)
        runs.append({"sizes": sizes, "link": link, **outcome})
        for form in (name for name in LABELS if name in outcome["times_ms"]):
            middle = statistics.median(outcome["times_ms"][form])
            print(sizes, link, form, f"{middle:.0f} ms", f"{hidden(runs[-1], form):.0%} hidden")
    from importlib.metadata import version

    packages = [
        name
        for name in ("megatron-core", "deepspeed")
        if importlib.util.find_spec(name.split("-")[0])
    ]
    content = {
        "command": ["python", "benchmarks/domino_hosts.py", *sys.argv[1:]],
        "device": host.device(),
        "versions": host.versions() | {name: version(name) for name in packages},
        "runs": runs,
    }
    keep(content, options.out)
    print(table(content))


if __name__ == "__main__":
    main()
