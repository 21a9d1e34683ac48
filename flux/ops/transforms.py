"""Ops of torch.library, and the transforms of PyTorch: torch.func, forward mode, twice backward.

Each of them gives right results or an error. Where PyTorch knows no rule of an op it may go on with
zeros, constants or local sums, without a word.

    torch.func.grad, vjp, jacrev (by loops)  right
    torch.func.vmap, jvp, forward_ad         ValueError
    a gradient of a gradient                 RuntimeError
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import register_flop_formula

from flux.ops import torch_internals
from flux.ops.torch_internals import NO_FORWARD_MODE, check_no_forward_mode


class Formula(NamedTuple):
    """The derivative of an op.

    ``setup`` saves what ``backward`` needs, and takes the node, inputs and output. ``backward``
    takes the node, the saved tensors, which inputs need a gradient, and the gradients of the
    outputs. It returns a gradient or None for each input, which cannot be differentiated again.
    """

    setup: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]


LIBRARY: torch.library.Library = torch.library.Library("flux", "DEF")
FORMULAS: dict[str, Formula] = {}
"""By name of an op of torch.library."""


def define(
    schema: str,
    kernel: Callable[..., object],
    fake: Callable[..., object],
    *,
    ordered: bool = False,
    formula: Formula | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Define ``torch.ops.flux.NAME``.

    Args:
        schema: NAME, arguments and results.
        kernel: computes it, on any device, without autograd.
        fake: returns empty tensors with the shapes and strides of the results.
        ordered: torch.compile may neither drop calls nor merge or reorder them. They meet other
            ranks: a compiler that removes one whose result nobody reads, or that swaps two because
            this rank's shapes make it look better, leaves the other ranks waiting in another place.
        formula: of its derivative; None: differentiating the op raises, unless ``FORMULAS`` gets
            one later.
        flops: returns the operations of this rank's products, for counters as torch's
            FlopCounterMode: takes the arguments with shapes in place of tensors, and out_shape;
            None: it has no products.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, plain_kernel(name, kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flux::{name}", fake, lib=LIBRARY)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.flux, name))(flops)
    if ordered:
        torch_internals.register_ordered(getattr(torch.ops.flux, name).default)
    FORMULAS[name] = formula or no_formula(name)

    @torch_internals.never_compiled
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any, **options: Any) -> None:
        FORMULAS[name].setup(ctx, inputs, output)

    # torch.library calls ``save`` with keyword-only arguments of the op by a name of their own.
    torch.library.register_autograd(
        f"flux::{name}", partial(run_once, name), setup_context=save, lib=LIBRARY
    )


def call(name: str, *args: Any, **options: Any) -> Any:
    """Call ``torch.ops.flux.NAME``, also inside transforms of torch.func.

    Those know autograd.Function with ``setup_context`` only, which torch.library does not make.
    """
    if torch.compiler.is_compiling() or not torch_internals.transform_needs_a_rule():
        return getattr(torch.ops.flux, name)(*args, **options)
    leaves, inputs = tree_flatten(args, is_leaf=_is_setting)
    outputs = _Outputs()
    results = cast(Any, _Transformed).apply(name, options, inputs, outputs, *leaves)
    return tree_unflatten(results, outputs.structure)


class _Outputs:
    """Takes the structure of results, past torch.func."""

    structure: Any = None


def _is_setting(value: Any) -> bool:
    """Return whether an argument is a list, but of numbers, which have no gradient."""
    return isinstance(value, list) and not all(isinstance(item, torch.Tensor) for item in value)


class _Transformed(torch.autograd.Function):
    """An op of torch.library as torch.func takes it; lists of tensors are flattened."""

    @staticmethod
    def forward(
        name: str, options: dict[str, Any], inputs: Any, outputs: _Outputs, *leaves: Any
    ) -> tuple[Any, ...]:
        result = getattr(torch.ops.flux, name)(*tree_unflatten(leaves, inputs), **options)
        tensors, structure = tree_flatten(result)
        outputs.structure = structure
        return tuple(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.name, _, ctx.inputs, outputs, *leaves = inputs
        ctx.outputs = outputs.structure
        args = tree_unflatten(leaves, ctx.inputs)
        FORMULAS[ctx.name].setup(ctx, args, tree_unflatten(output, ctx.outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needs = tree_unflatten(ctx.needs_input_grad[4:], ctx.inputs)
        of_outputs = tree_unflatten(grads, ctx.outputs)
        if not isinstance(of_outputs, tuple):
            of_outputs = (of_outputs,)
        results = run_once(ctx.name, ctx, *of_outputs, needs=needs)
        return None, None, None, None, *tree_leaves(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ValueError(f"flux::{ctx.name}: {NO_FORWARD_MODE}")

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, *args: Any) -> Any:
        raise ValueError(
            f"flux::{name}: torch.func.vmap has no rule for this op, whose ranks would have to "
            "agree on the batch: flatten the batch into rows, or call the op in a loop"
        )


@torch_internals.never_compiled
def run_once(name: str, ctx: Any, *grads: Any, needs: Sequence[Any] | None = None) -> Any:
    """Return the gradients of an op, which raise when they are differentiated.

    Without that autograd would treat sums over ranks as constants, or as local.

    Args:
        name: of the op, in ``FORMULAS``.
        ctx: the node of autograd.
        grads: of the outputs.
        needs: which inputs need a gradient; None: as ``ctx`` says.
    """
    saved = ctx.saved_tensors  # looked up once: hooks may give them out only once
    needed = ctx.needs_input_grad if needs is None else needs
    with torch.no_grad():
        results = FORMULAS[name].backward(ctx, saved, needed, *grads)
    leaves = tree_leaves([list(grads), saved])
    sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not torch.is_grad_enabled() or not sources:
        return results
    leaves, structure = tree_flatten(results)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    refusing = iter(cast(Any, RefuseTwice).apply(len(tensors), *tensors, *sources))
    kept = [next(refusing) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(kept, structure)


class RefuseTwice(torch.autograd.Function):
    """Returns the first ``count`` tensors; differentiating through them raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views: an input of the node may not be its output."""
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            "an op of flux or a layer of flux.layers cannot be differentiated twice: its backward "
            "communicates, and there is no backward of that. Compute the gradient that is "
            "differentiated again (create_graph=True, torch.func.hessian) without it"
        )


def no_formula(name: str) -> Formula:
    """Return the formula of an op without one: its backward raises."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            f"flux::{name} has no backward: use an op (flux.AGGemm, flux.GemmRS, flux.GemmAR) or a "
            "layer of flux.layers where gradients are needed"
        )

    return Formula(setup, backward)


def check_no_transforms(name: str) -> None:
    """Raise ValueError inside any transform of torch.func, and inside forward mode."""
    check_no_forward_mode(name)
    if torch_internals.transforms_are_active():
        raise ValueError(
            f"{name}: transforms of torch.func have no rule for what it does; use the ops or "
            "flux.layers there"
        )


def plain_kernel(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
    """Return the kernel of an op, which raises inside forward-mode differentiation.

    It runs without autocast, whose region a backward may be in: that would round float32 products.
    """

    @wraps(kernel)
    @torch_internals.never_compiled
    def run(*args: Any, **options: Any) -> object:
        check_no_forward_mode(f"flux::{name}")
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return run(*args, **options)
        return kernel(*args, **options)

    return run
