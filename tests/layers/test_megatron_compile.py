"""Our forms of Megatron-core's layers under torch.compile: one graph, results of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import harness
from flux.bench.megatron_cpu import Norm, megatron_on_cpu
from flux.layers import close_pools, replace_linears
from harness import more, run_ranks
from megatron_cases import config

harness.PRELOAD += ["torch._dynamo", "torch._inductor.compile_fx"]


class Pair(torch.nn.Module):
    """A column layer and a row layer with an activation between, as Megatron's MLP has them."""

    def __init__(self, settings: Any) -> None:
        from flux.layers.megatron import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        options: dict[str, Any] = {"config": settings, "init_method": settings.init_method}
        self.up = ColumnParallelLinear(32, 96, bias=True, skip_bias_add=True, **options)
        self.down = RowParallelLinear(
            96, 32, bias=True, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.up(x)
        z: torch.Tensor = self.down(torch.nn.functional.gelu(y + bias))[0]
        return z


def _results(run: Any, pair: Pair, x: torch.Tensor) -> dict[str, Any]:
    x = x.detach().requires_grad_()
    pair.zero_grad()
    z = run(x)
    z.square().sum().backward()
    grads = {name: p.grad for name, p in pair.named_parameters()}
    return {"z": z.detach(), "dx": x.grad, **grads}


def _compiled(rank: int, world: int, backend: str, sp: bool) -> None:
    with megatron_on_cpu(world):
        pair = Pair(config(world, sequence_parallel=sp, params_dtype=torch.float32))
        torch._dynamo.reset()
        run = torch.compile(pair, fullgraph=True, backend=backend, dynamic=True)
        targets: list[str] = []
        for rows in (4, 6, 14):
            torch.manual_seed(rank if sp else 0)
            x = torch.randn(rows, 2, 32)
            want, got = _results(pair, pair, x), _results(run, pair, x)
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}")
        torch._dynamo.reset()

        def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            targets.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        with torch.no_grad():
            torch.compile(pair, fullgraph=True, backend=look)(x)
        assert sum("flux.column_linear" in t for t in targets) == 1, targets
        assert sum("flux.row_linear" in t for t in targets) == 1, targets
        close_pools()


# Of the same ops tests/layers/test_compile_layers.py runs Inductor's code each time.
FURTHER = more(("aot_eager", False), ("inductor", True))


@pytest.mark.parametrize(("backend", "sp"), [("aot_eager", True), *FURTHER])
def test_megatrons_layers_are_one_graph(backend: str, sp: bool) -> None:
    run_ranks(2, _compiled, backend, sp)


def _whole_layer(rank: int, world: int) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    with megatron_on_cpu(world):
        spec = get_gpt_layer_local_spec()
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        settings = config(world, sequence_parallel=True)
        layer = TransformerLayer(settings, spec.submodules, layer_number=1)
        layer = replace_linears(layer, overlap=True)
        x, mask = torch.randn(4, 2, 32), torch.triu(torch.ones(1, 1, 8, 8), 1).bool()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        want, got = (f(x, attention_mask=mask)[0] for f in (layer, run))
        torch.testing.assert_close(got, want)
        close_pools()


def test_megatrons_transformer_layer_is_one_graph() -> None:
    run_ranks(2, _whole_layer)


def _accumulated(rank: int, world: int) -> None:
    with megatron_on_cpu(world):
        settings = config(world, sequence_parallel=True, gradient_accumulation_fusion=True)
        pair, x = Pair(settings), torch.randn(4, 2, 32)
        found = []
        for run in (pair, torch.compile(pair, backend="aot_eager")):
            for parameter in pair.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
                parameter.grad_added_to_main_grad = parameter.zero_out_wgrad = False
            run(x).square().sum().backward()
            found.append([parameter.main_grad for parameter in pair.parameters()])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        assert found[1][0].abs().sum() > 0
        close_pools()


def test_gradients_are_accumulated_outside_of_graphs() -> None:
    run_ranks(2, _accumulated)
