"""Dropout's masks: the same however the batch is cut, and however often they are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flux.runtime.domino.module import Domino, Dropout
from test_domino_modes import turn

Forward = Callable[[torch.Tensor], torch.Tensor]
PARTS = ("none", "each", "nested", "first")


class Layers(nn.Module):
    """Three layers with dropout, which take turns before and behind it.

    Args:
        part: what is a checkpoint: no layer, each, each in another, or the first one alone.
        reentrant: the kind of checkpoint.
        drops: the dropout of each layer; one may be in several.
    """

    def __init__(self, part: str, reentrant: bool, drops: list[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linears = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in drops)
        self.drops = nn.ModuleList(drops)
        self.part, self.reentrant = part, reentrant

    def layer(self, at: int, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(turn(self.linears[at](x)))
        return turn(self.drops[at](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in range(len(self.linears)):
            run: Forward = partial(self.layer, at)
            if self.part == "nested":
                run = partial(checkpoint, run, use_reentrant=self.reentrant)
            if self.part in ("each", "nested") or (self.part == "first" and at == 0):
                run = partial(checkpoint, run, use_reentrant=self.reentrant)
            x = run(x)
        return x


def own_dropouts(shared: bool) -> list[nn.Module]:
    return [Dropout(0.3, 7)] * 3 if shared else [Dropout(0.3, 7 + at) for at in range(3)]


def cut(model: nn.Module, how: str) -> nn.Module:
    """Return a model whose batch of 12 is cut: "2" in two slices, "3 in 2" each of two in three."""
    for slices in reversed(how.split(" in ")):
        model = model if slices == "0" else Domino(model, int(slices))
    return model


def gradients(model: Layers, forward: Forward) -> list[torch.Tensor]:
    """Take three forwards, and then their backwards in another order."""
    torch.manual_seed(5)
    xs = [torch.linspace(-1, at, 48, dtype=torch.float64).view(12, 4) for at in range(3)]
    xs = [x.requires_grad_() for x in xs]
    outputs = [forward(x) for x in xs]
    for at in (1, 0, 2):
        (outputs[at] ** 2).sum().backward()
    drawn = torch.rand(2)  # the caller's random numbers go on where they would without slices
    grads = [tensor.grad for tensor in (*xs, *model.parameters())]
    return [drawn, *(y.detach() for y in outputs), *(grad for grad in grads if grad is not None)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_checkpoints_compute_the_same_masks(part: str, shared: bool) -> None:
    plain = Layers("none", True, own_dropouts(shared))
    expected = gradients(plain, plain)
    cases = [*product((True, False), (None, True, False), ("2",)), (False, True, "0")]
    for reentrant, outer, how in [*cases, (True, None, "3 in 2"), (False, False, "3 in 2")]:
        model = Layers(part, reentrant, own_dropouts(shared))
        forward: Forward = cut(model, how)
        if outer is not None:
            forward = partial(checkpoint, forward, use_reentrant=outer)
        for found, wanted in zip(gradients(model, forward), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=f"{outer} {how}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_slices_of_torchs_own_dropout_compute_the_same_masks_again(reentrant: bool) -> None:
    results = []
    for part in PARTS:
        model = Layers(part, reentrant, [nn.Dropout(0.3) for _ in range(3)])
        results.append(gradients(model, Domino(model, 3)))
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    zeros = Domino(nn.Dropout(0.5), 2)(torch.ones(8, 64)) == 0
    assert not torch.equal(zeros[:4], zeros[4:])  # other masks in other slices


def test_a_seed_of_torch_repeats_masks_and_calls_differ() -> None:
    drop, x = Dropout(0.5, 3, -2), torch.ones(12, 8)
    torch.manual_seed(9)
    first, second = drop(x), Domino(drop, 4)(x)
    torch.manual_seed(9)
    again = Domino(drop, 2)(x), Domino(Domino(drop, 2), 3)(x)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, second) and drop.calls == 2
    assert Dropout(0.5, 3)(x[:0]).shape == (0, 8)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(9)
        assert torch.equal(drop(x), first)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_without_random_numbers_is_refused(reentrant: bool) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    for model in (Dropout(0.5, 41), Domino(Dropout(0.5, 42), 2)):
        y = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False)
        with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
            (y**2).sum().backward()
