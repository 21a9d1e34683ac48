"""Calls of all ranks of a VirtualWorld, on the emulated device and on a real one.

Bodies of VirtualWorld.run get inputs that are on the device already: a transfer waits for the
stream of its rank, whose last call may wait for a rank that has not made its call yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice
from flux import Knobs, PeerTimeoutError, Topology
from flux.core.spec import DTYPES
from flux.kernels.legality import GemmProblem
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld, least_tile_rows
from op_cases import Case, meshes
from reference import FP8, Inputs, Problem


class Transferred(Inputs):
    """Inputs on a device; results are judged on the CPU."""

    on_tensor_cores = True

    def transfer(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on the device."""
        raise NotImplementedError

    def _each(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._each(p) for p in part]
        return None if part is None else self.transfer(part)

    def local(self, rank: int, layout: str = "dense", padded: bool = False) -> tuple[Any, Any, Any]:
        host = self.x, self.weights, self.biases
        self.x, self.weights, self.biases = map(self._each, host)
        try:  # laid out there: a copy to the device would close the gaps
            return super().local(rank, layout, padded)
        finally:
            self.x, self.weights, self.biases = host

    def scales(self, rank: int, rows: int) -> dict[str, Any]:
        return {name: self._each(scale) for name, scale in super().scales(rank, rows).items()}

    def check(self, got: list[torch.Tensor], rank: int, path: str = "fused") -> None:
        super().check([g.cpu() for g in got], rank, path)


def knobs_of(rng: random.Random, world: int) -> Knobs:
    """Any knobs that the CUDA backend looks at."""
    swizzles = ["none", "rank_shift"] + (["xor"] if world & (world - 1) == 0 else [])
    orders = ["direct", "ring1d", "ring2d", "hierarchical", "numa"]
    direction = rng.choice(["push", "pull"])
    return Knobs(
        comm_tile_rows=rng.choice([None, 1, 2, 5]),
        direction=direction,
        buffers=rng.choice([None, 1]),
        order=rng.choice(orders),
        swizzle=rng.choice(swizzles),
        raster=rng.choice([None, 1, 2, 3]),
    )


def fitting(p: Problem, world: int, knobs: Knobs) -> Knobs:
    """The knobs with tiles so large that a world of one thread runs the op."""
    if not p.gathers or knobs.comm_tile_rows is None:
        return knobs
    rows = max(knobs.comm_tile_rows, least_tile_rows(world, p.max_m))
    return replace(knobs, comm_tile_rows=rows)


def topology_of(rng: random.Random, world: int) -> Topology:
    """Any mesh of that many ranks."""
    return rng.choice(meshes(world))


def finish(device: Device) -> None:
    """Wait until all results may be read."""
    if isinstance(device, EmulatedDevice):
        device.finish()
    else:
        torch.cuda.synchronize()


@contextmanager
def built(ranks: VirtualWorld, p: Problem, **options: Any) -> Iterator[list[Any]]:
    """Build the op of every rank; close the ops at the end, also after an error."""
    if isinstance(options.get("tuning"), Knobs):
        options["tuning"] = fitting(p, ranks.world, options["tuning"])
    with ExitStack() as stack:
        yield [stack.enter_context(p.build(ranks.rank(r), **options)) for r in range(ranks.world)]


def call_all(
    ranks: VirtualWorld, ops: list[Any], inputs: Inputs, gather: bool = False
) -> list[list[torch.Tensor]]:
    """One call of every rank, not waited for."""
    return run_ready(ranks, ops, [inputs.ready(r) for r in range(ranks.world)], gather)


def run_ready(
    ranks: VirtualWorld, ops: list[Any], ready: Sequence[Callable[..., Any]], gather: bool = False
) -> list[list[torch.Tensor]]:
    """The calls of Inputs.ready, of every rank."""
    return ranks.run(lambda r: ready[r](ops[r], gather))


def call_on_and_on(
    ranks: VirtualWorld, ops: list[Any], everything: list[Inputs]
) -> list[list[list[torch.Tensor]]]:
    """Calls of every rank, none of which waits for another rank's; results by call and rank."""
    ready = [[inputs.ready(r) for inputs in everything] for r in range(ranks.world)]
    by_rank = ranks.run(lambda r: [call(ops[r]) for call in ready[r]])
    return [list(of_call) for of_call in zip(*by_rank, strict=True)]


def check_all(everything: Sequence[Inputs], outs: Sequence[Any], path: str = "fused") -> None:
    """Compare results, by call and rank, with float64."""
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for rank, got in enumerate(of_ranks):
            inputs.check(got if isinstance(got, list) else [got], rank, path)


def checked_calls(
    world: VirtualWorld, p: Problem, everything: list[Inputs], path: str = "fused", **options: Any
) -> list[list[list[torch.Tensor]]]:
    """Make calls back to back on new ops, and compare them with float64.

    Returns:
        Results by call and rank.
    """
    with world as ranks, built(ranks, p, **options) as ops:
        outs = call_on_and_on(ranks, ops, everything)
        for op in ops:
            op.wait()
        finish(ranks.device)
    check_all(everything, outs, path)
    return outs


def check_same_bits(first: Iterable[Any], second: Iterable[Any]) -> None:
    """Compare the results of two runs of ``checked_calls``, bit by bit."""
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(mine, other, strict=True))


def drop_at_once(
    ranks: VirtualWorld, ops: list[Any], everything: list[Inputs], kept: int
) -> list[list[torch.Tensor]]:
    """Drop x, weight and result of a call when it returns, and let others write to their memory.

    Returns the results of the last ``kept`` calls, by rank, which are not dropped.
    """
    arguments = []
    for r, stream in enumerate(ranks.streams):  # whose memory is used again in its order
        with ranks.device.on_stream(stream):
            arguments.append([inputs.local(r) for inputs in everything])
    like = [[t.new_empty(t.shape) for t in of_call] for of_call in arguments[0]]
    torch.full_like(like[0][0], float("nan"))  # a first use would wait for kernels that wait

    def calls(r: int) -> list[torch.Tensor]:
        outs = []
        for number in range(len(everything)):
            out = ops[r](*arguments[r].pop(0))
            if number >= len(everything) - kept:
                outs.append(out)
            del out
            for each in like[number]:
                torch.full_like(each, float("nan"))
        return outs

    return ranks.run(calls)


def _is_built(device: Device, p: Problem, world: int, reduce: str) -> bool:
    """Whether there is a kernel for the problem on every rank."""
    op = "ag_gemm" if p.gathers else "gemm_rs"
    for n in p.n:
        whole = n if p.gathers else p.k
        for share in {max(whole // world, 1), -(-whole // world)}:  # the ranks' shares differ
            sizes = (share, p.k) if p.gathers else (n, share)
            kernels = device.registry.candidates(
                op,
                DTYPES[p.dtype].short,
                device.capability,
                GemmProblem(p.max_m, *sizes, world),
                weight="kn" if p.transpose_weight else "nk",
                scaling=p.scaling,
                fast_accum=p.fast_accum,
                reduce=reduce,
            )
            if not kernels:
                return False
    return True


def _nearest(p: Problem, world: int) -> Iterator[Problem]:
    """The problem, then ones that more kernels can do: other dtypes, [N, K], aligned sizes."""
    yield p
    for dtype in (p.dtype, torch.float16, torch.bfloat16):
        scaling = p.scaling if dtype == FP8 else "none"
        fast = p.fast_accum and dtype == FP8
        step = 16 * world
        aligned = {"n": tuple(-(-n // step) * step for n in p.n), "k": -(-p.k // step) * step}
        for change in ({}, {"transpose_weight": False}):
            yield replace(p, dtype=dtype, scaling=scaling, fast_accum=fast, **change)
            yield replace(p, dtype=dtype, scaling=scaling, fast_accum=fast, **change, **aligned)


def on_one_device(device: Device, case: Case, world: int) -> Case:
    """The case as far as kernels for it are built."""
    path = "fused" if case.knobs.path == "unfused" else case.knobs.path  # that has no kernels
    knobs = replace(case.knobs, path=path)
    reduce = knobs.reduce or "local"
    for p in _nearest(case.problem, world):
        if _is_built(device, p, world, reduce):
            return replace(case, problem=p, knobs=knobs)
    raise AssertionError(f"no kernel is built for anything like {case}")


def check_cases(
    device: Device,
    world: int,
    cases: Sequence[Case],
    inputs_of: Callable[..., Inputs] = Inputs,
    nodes: int = 1,
) -> int:
    """Run cases on virtual ranks and compare every result with float64; return how many calls."""
    calls = 0
    for case in (on_one_device(device, c, world) for c in cases):
        p, options = case.problem, {"tuning": case.knobs, "topology": case.topology}
        with VirtualWorld(world, device, nodes) as ranks, built(ranks, p, **options) as ops:
            for call in case.calls:
                inputs = inputs_of(p, call.m, world, call.seed, call.bias)
                ready = [
                    inputs.ready(r, layout=call.layout, padded=call.padded) for r in range(world)
                ]
                outs = run_ready(ranks, ops, ready, call.gather)
                finish(device)
                for r in range(world):
                    try:
                        ops[r].wait()
                        inputs.check(outs[r], r, "fused" if nodes == 1 else "two_levels")
                    except Exception as error:
                        text = f"rank {r} of {world}: {error}\n  {call}\n  {case}"
                        raise AssertionError(text) from error
                calls += 1
    return calls


def check_missing_node(world: VirtualWorld, p: Problem, how: str, timeout_s: float) -> None:
    """Call on the two ranks of node 0 alone: all ranks must notice.

    Args:
        world: of two nodes of two ranks.
        p: the op.
        how: ``wait`` | ``close``: what the callers do.
        timeout_s: of the op.
    """
    with world as ranks, built(ranks, p, timeout_s=timeout_s) as ops:
        inputs = Inputs(p, 16, 4, seed=1)
        good = call_all(ranks, ops, inputs)
        finish(ranks.device)
        inputs.check(good[0], 0, "two_levels")
        ranks.run(lambda r: inputs.call(ops[r], r) if r < 2 else None)
        for rank in (0, 1):
            if how == "wait":
                with pytest.raises(PeerTimeoutError, match=rf"rank {rank}"):
                    ops[rank].wait()
            ops[rank].close()
        with pytest.raises(PeerTimeoutError, match=r"rank 2: rank [01] gave up in call 2"):
            ops[2].wait()
        ops[3].close()
        finish(ranks.device)
