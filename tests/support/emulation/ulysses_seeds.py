"""GemmAllToAll and AllToAllGemm on real kernels under many seeds: each decides op, kernel, sizes,
lengths of the parts, and the order of all warps and transfers. As moe_seeds.py does.

    python tests/support/emulation/ulysses_seeds.py --seeds 600 --out FILE
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from every_kernel import only  # noqa: E402
from flux import Knobs  # noqa: E402
from flux.core.problem import BY_SHORT  # noqa: E402
from flux.kernels.config import GemmConfig  # noqa: E402
from flux.kernels.registry import BuiltKernel  # noqa: E402
from flux.kernels.sets import FUSED, config_set  # noqa: E402
from flux.transport.virtual import VirtualWorld  # noqa: E402
from flux.ulysses import AllToAllGemm, GemmAllToAll  # noqa: E402
from moe_seeds import seeds_of  # noqa: E402
from op_cases import same_bits  # noqa: E402
from ulysses_cases import UlyssesCase, UlyssesInputs  # noqa: E402
from virtual_cases import least_tile_rows  # noqa: E402

OPS = {"gemm_rs": GemmAllToAll, "ag_gemm": AllToAllGemm}
"""By family of the kernel."""


def suits(config: GemmConfig) -> bool:
    """Whether the ops run this kernel."""
    plain = (config.activation, config.scaling, config.reduce) == ("none", "none", "local")
    return config.op in OPS and plain


def configs() -> list[GemmConfig]:
    """Kernels of both ops in the minimal set."""
    return [config for config in config_set("minimal") if config.op in FUSED and suits(config)]


def case_of(seed: int, kernels: list[GemmConfig]) -> tuple[GemmConfig, UlyssesCase]:
    """What a seed asks for: a kernel, and the sizes of its op."""
    rng = random.Random(f"ulysses {seed}")
    family = list(OPS)[seed % 2]
    config = rng.choice([c for c in kernels if c.op == family])
    step = config.alignment_elements
    world = rng.choice([2, 2, 3, 4, 8])
    query = world * rng.randint(1, 3)
    fits = [d for d in range(1, query + 1) if query % d == 0 and (d % world == 0 or world % d == 0)]
    key = rng.choice(fits)
    most = rng.choice([3, 20, 90])
    even = [rng.randint(1, most)] * world
    uneven = [rng.choice((0, 1, rng.randint(1, most))) for _ in range(world)]
    uneven[rng.randrange(world)] += 1
    lengths, batch = tuple(rng.choice((even, uneven))), rng.randint(1, 3)
    least = least_tile_rows(world, world * batch * max(lengths), 3)
    knobs = Knobs(comm_tile_rows=rng.choice((None, max(least, rng.randint(1, 40)))))
    case = UlyssesCase(
        lengths,
        rng.choice(((query,), (query, key, key))),
        step * rng.randint(1, 4) if step > 1 else rng.choice((1, 3, 4, 8, 20)),
        step * rng.randint(1, 20),
        batch,
        BY_SHORT[config.dtype].torch,
        rng.random() < 0.5,
        config.weight == "kn",
        rng.random() < 0.5,
        (("tuning", knobs),),
    )
    return config, case


def run_case(
    device: Any,
    built: BuiltKernel,
    case: UlyssesCase,
    seed: int,
    make_world: Callable[..., VirtualWorld] = VirtualWorld,
) -> tuple[list[list[torch.Tensor]], float]:
    """Make calls of the kernel's op, one right behind the other, on ``make_world(world, device)``.

    Return results by call and rank, and the worst error as a part of the bound.

    Raises:
        AssertionError: a result is wrong.
    """
    world, kind = len(case.lengths), OPS[built.config.op]
    device.cuda.clear()
    device.cuda.seed = 1 + 1000 * seed
    device.take_turns(device.cuda.seed)
    results = []
    with only(device, built, world), make_world(world, device) as ranks, ExitStack() as closing:
        ops = [
            closing.enter_context(case.build(kind, group=ranks.rank(r), timeout_s=120.0))
            for r in range(world)
        ]
        everything = [UlyssesInputs(case, number + 7) for number in range(3)]
        given = [
            [inputs.projected(r) if kind is GemmAllToAll else inputs.given(r) for r in range(world)]
            for inputs in everything
        ]
        made = ranks.run(lambda r: [ops[r](*of_rank[r]) for of_rank in given])
        device.finish()
        for op in ops:
            op.wait()
        for number, inputs in enumerate(everything):
            check = inputs.check_projected if kind is GemmAllToAll else inputs.check_output
            results += [check(made[r][number], r) for r in range(world)]
    return results, max(inputs.worst for inputs in everything)


def run_seed(device: Any, kernels: dict[str, BuiltKernel], seed: int) -> tuple[str, float]:
    """Run a seed's case; return the op and the worst error as a part of the bound.

    Raises:
        AssertionError: a result is wrong, or differs from run to run.
        RuntimeError: the machine has found a fault.
    """
    config, case = case_of(seed, [b.config for b in kernels.values()])
    results, worst = run_case(device, kernels[config.name], case, seed)
    if seed % 4 == 0:
        again, _ = run_case(device, kernels[config.name], case, seed)
        for first, second in zip(results, again, strict=True):
            assert all(same_bits(a, b) for a, b in zip(first, second, strict=True)), case
    return f"{config.op} {OPS[config.op].__name__}", worst


def main() -> int:
    """Run seeds of the ops of sequence parallelism."""
    return seeds_of(Path(__file__).name, configs(), run_seed, case_of)


if __name__ == "__main__":
    sys.exit(bool(main()))
