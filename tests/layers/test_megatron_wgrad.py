"""Weight gradients in Megatron-core's main_grad, immediate or deferred."""

from __future__ import annotations

import contextlib

import pytest
import torch

import megatron_cases as mc
from harness import run_ranks
from megatron_cases import LayerCase


def _accumulated(rank: int, world: int) -> None:
    with mc.megatron(world):
        for kind, sp, dtype, main, waits, zero, frozen in (
            ("column", True, torch.float32, torch.float32, True, False, False),
            ("column", False, torch.float32, torch.float32, True, True, False),
            ("row", True, torch.float32, torch.float32, False, False, False),
            ("row", False, torch.bfloat16, torch.float32, True, True, False),
            ("column", True, torch.bfloat16, torch.float32, False, False, False),
            ("column", True, torch.bfloat16, torch.bfloat16, True, True, False),
            ("row", True, torch.float16, torch.float16, True, True, False),
        ):
            settings = (("gradient_accumulation_fusion", True),)
            case = LayerCase(kind, sp, dtype=dtype, settings=settings, frozen=frozen)
            results = []
            for number, module in enumerate(mc.both()):
                with mc.apex() if number == 0 else contextlib.nullcontext():
                    layer = case.make(module, world)
                    layer.weight.main_grad = torch.ones(layer.weight.shape, dtype=main)
                    if waits:
                        layer.weight.grad_added_to_main_grad = False
                        layer.weight.zero_out_wgrad = zero
                    x = case.input(rank, world)
                    for _ in range(2):
                        got = mc.run_layer(case, layer, x, rank)
                results.append((got["dx"], layer.weight.main_grad))
                placeholder = layer.weight.grad
                assert (placeholder is not None) == waits
                if waits:
                    assert layer.weight.grad_added_to_main_grad
                    assert placeholder.dtype == dtype
                    assert not zero or not placeholder.any()
            for theirs, mine in zip(*results, strict=True):
                unit = torch.finfo(dtype).eps
                worst = (mine.double() - theirs.double()).abs().max()
                assert worst <= 8 * unit * theirs.double().abs().max(), (case, worst)
            layer.close()


def test_fused_gradient_accumulation_matches_megatron() -> None:
    run_ranks(2, _accumulated)


def _unsupported_main_grad(rank: int, world: int) -> None:
    _, ours = mc.both()
    with mc.megatron(world):
        case = LayerCase("row", settings=(("gradient_accumulation_fusion", True),))
        layer = case.make(ours, world)
        layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.int32)
        y, _ = layer(case.input(rank, world))
        with pytest.raises(RuntimeError, match=r"main_grad in float32.*got torch\.int32"):
            y.sum().backward()
        layer.close()


def test_main_grad_of_another_dtype_is_refused() -> None:
    run_ranks(2, _unsupported_main_grad)


def _deferred(rank: int, world: int) -> None:
    from megatron.core.utils import drain_embedding_wgrad_compute

    with mc.megatron(world), mc.apex():
        for sp in (False, True):
            results = []
            for module in mc.both():
                activations: list[torch.Tensor] = []
                grads: list[torch.Tensor] = []
                settings = (
                    ("gradient_accumulation_fusion", True),
                    ("defer_embedding_wgrad_compute", True),
                    ("wgrad_deferral_limit", 2),
                    ("pipeline_model_parallel_size", 2),
                    ("pipeline_dtype", torch.float32),
                    ("num_layers", 2),
                )
                options = (
                    ("bias", False),
                    ("embedding_activation_buffer", activations),
                    ("grad_output_buffer", grads),
                )
                case = LayerCase("column", sp, settings=settings, options=options)
                layer = case.make(module, world)
                layer.weight.main_grad = torch.zeros_like(layer.weight)
                outputs = []
                for call in range(3):
                    x = (case.input(rank, world) + call).requires_grad_()
                    outputs.append((x, layer(x)[0]))
                for _, y in outputs:
                    y.backward(torch.cos(y.detach()))
                assert len(grads) == len(activations) == 2
                before = layer.weight.main_grad.clone()
                drain_embedding_wgrad_compute(
                    layer.config, activations, grads, layer.weight, layer.tp_group
                )
                results.append((before, layer.weight.main_grad, *[x.grad for x, _ in outputs]))
            for theirs, mine in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs)
            layer.close()


def test_deferred_weight_gradients_match_megatron() -> None:
    run_ranks(2, _deferred)
