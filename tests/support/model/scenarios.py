"""What is checked: the standard set of scenarios, and random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from model.records import Scenario

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
LAST_EPOCHS = (2**32 - 2, 2**32 - 1, 2**32)  # as many calls, and the 32-bit epoch wraps
# A large call, then 2**31 calls that leave most of its words alone, then a large call again.
AGE = {"rows": (8, 2, 2, 8), "epochs": (1, 2**30, 2**31, 2**31 + 2)}

# M of back-to-back calls. Tiles of the GEMM have two rows. By world: chunks of whole tiles; tiles
# that straddle owners, and ranks that own no rows in between.
ROWS = {2: ((4, 4, 4), (4, 1, 3)), 3: ((6, 6), (3, 4), (6, 4, 6), (3, 5, 1))}


def standard() -> Iterator[Scenario]:
    """All ops, directions and poison; 2 ranks x 3 calls, 3 ranks x 2 calls and x 3 calls."""
    for world, op, poison in itertools.product(ROWS, OPS, (False, True)):
        for direction in ("push", "pull") if op == "ag_gemm" else ("push",):
            for rows in ROWS[world]:
                gather = op == "ag_gemm" and poison
                yield Scenario((op,), world, rows, direction, poison=poison, gather=gather)
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d")
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d", apart=True)
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d", direction="pull")
    yield Scenario(("ag_gemm",), 3, (6, 5), comm_tile_rows=1)
    for direction in ("push", "pull"):
        yield Scenario(("ag_gemm",), 2, (4, 1, 3), direction, path="medium")
        yield Scenario(("ag_gemm",), 3, (6, 4), direction, order="ring1d", path="medium")
    yield from two_buffers()
    for op in ("gemm_rs", "gemm_ar"):
        for way in ({"path": "medium"}, {"sends": "copies"}):
            for poison in (False, True):
                yield Scenario((op,), 2, (4, 1, 3), poison=poison, **way)
                yield Scenario((op,), 3, (3, 5), poison=poison, captured=(1,), **way)
                yield Scenario((op,), 3, (6, 4), poison=poison, apart=True, **way)
        yield Scenario((op,), 2, (8, 3, 8), sends="copies", comm_tile_rows=2)
    for poison in (False, True):
        summed: dict[str, Any] = {"ops": ("gemm_rs",), "reduce": "in_kernel", "poison": poison}
        yield Scenario(world=2, rows=(4, 4, 4), **summed)
        yield Scenario(world=2, rows=(4, 1, 3), captured=(0, 2), **summed)
        yield Scenario(world=3, rows=(3, 5, 1), captured=(1,), **summed)
        yield Scenario(world=2, rows=(4, 4), streams=2, fresh_x=True, **summed)
    for rows in ((4, 4, 4), (4, 1, 3), (1, 1, 1, 1)):
        yield Scenario(("ag_gemm",), 2, rows, path="in_kernel", captured=(1,))
    yield Scenario(("ag_gemm",), 3, (3, 5, 1), path="in_kernel", gather=True)
    yield Scenario(("ag_gemm",), 2, (4, 4), streams=2, fresh_x=True, path="in_kernel")
    for rows in ((4, 4, 4), (4, 1, 3), (1, 1, 1, 1)):
        yield Scenario(("gemm_ar",), 2, rows, path="in_kernel", captured=(1,))
    yield Scenario(("gemm_ar",), 3, (3, 5, 1), path="in_kernel")
    for op in ("ag_gemm", "gemm_ar"):
        yield Scenario((op,), 2, (4, 1, 3), path="in_kernel", captured=(1,), switch=True)
        yield Scenario((op,), 3, (3, 5, 1), path="in_kernel", switch=True)
    yield Scenario(("gemm_ar",), 2, (4, 1, 3), few_rows=2, poison=True, switch=True)
    yield Scenario(("gemm_ar",), 2, (4, 4), streams=2, fresh_x=True, path="in_kernel")
    for world, rows, which in ((2, (4, 1, 3), ()), (2, (1, 4, 1), (0, 1)), (3, (2, 6, 2), ())):
        yield Scenario(("gemm_ar",), world, rows, poison=True, few_rows=2, captured=which)
    yield Scenario(("ag_gemm", "gemm_rs"), 2, (4, 3, 4))
    yield Scenario(("ag_gemm", "gemm_rs"), 3, (6, 4))
    yield Scenario(("gemm_ar", "ag_gemm"), 3, (6, 4), direction="pull")
    for op in OPS:
        yield Scenario((op,), 2, (4, 4, 4), epochs=LAST_EPOCHS)
        yield Scenario((op,), 2, comm_tile_rows=1, **AGE)
        yield Scenario((op,), 2, (4, 4), streams=2, fresh_x=True)
    for op in ("gemm_rs", "gemm_ar"):
        yield Scenario((op,), 4, (8, 5))
        for world, rows in ((2, (4, 4, 4)), (2, (4, 1, 3)), (3, (3, 5, 1))):
            for poison in (False, True):
                yield Scenario((op,), world, rows, poison=poison, apart=True)
    yield from captured()
    for op, poison, which in itertools.product(OPS[1:], (False, True), ((), (0, 1, 2))):
        for world, rows in ((2, (4, 1, 3)), (3, (3, 5, 1))):
            yield Scenario((op,), world, rows, poison=poison, captured=which, switch=True)
    # Several nodes: nodes of one rank, and of two.
    for op, direction in (
        ("ag_gemm", "push"),
        ("ag_gemm", "pull"),
        ("gemm_rs", "push"),
        ("gemm_ar", "push"),
    ):
        for poison in (False, True):
            for rows in ((4, 4), (4, 1, 3)):
                yield Scenario((op,), 2, rows, direction, poison=poison, nodes=2)
                if op != "ag_gemm":
                    yield Scenario((op,), 2, rows, poison=poison, nodes=2, puts=True)
            yield Scenario((op,), 4, (3, 2), direction, poison=poison, nodes=2)
            if op != "ag_gemm":
                yield Scenario((op,), 4, (3, 2), poison=poison, nodes=2, puts=True)
    yield Scenario(("gemm_ar",), 4, (1, 1), poison=True, nodes=2)
    yield Scenario(("gemm_rs",), 2, nodes=2, puts=True, **AGE)
    yield Scenario(("gemm_rs",), 2, (4, 4, 4), epochs=LAST_EPOCHS, nodes=2, puts=True)
    yield Scenario(("gemm_rs",), 2, (4, 4), streams=2, fresh_x=True, nodes=2, puts=True)
    yield Scenario(("gemm_ar",), 3, (5, 3), nodes=3, comm_tile_rows=1)
    yield Scenario(("ag_gemm", "gemm_ar"), 2, (4, 3), nodes=2)
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d", nodes=3)
    # A rank without columns: no kernel waits for the rows that peers push to it.
    yield Scenario(("ag_gemm",), 3, (3,), n=4, gather=True)
    yield Scenario(("ag_gemm",), 3, (3, 3), n=4, poison=True)


def two_buffers() -> Iterator[Scenario]:
    """Calls whose peers may be a call ahead, and what they may not be ahead of."""
    both: dict[str, Any] = {"ops": ("ag_gemm",), "buffers": 2}
    for poison in (False, True):
        for rows in ((4, 4, 4, 4), (4, 1, 3, 4)):
            yield Scenario(world=2, rows=rows, poison=poison, gather=poison, **both)
        yield Scenario(world=3, rows=(6, 4, 6), poison=poison, **both)
        yield Scenario(world=2, rows=(4, 1, 4, 4), captured=(1,), poison=poison, **both)
    yield Scenario(world=3, rows=(6, 4), order="ring1d", apart=True, **both)
    yield Scenario(world=2, rows=(4, 4, 4), path="medium", **both)
    yield Scenario(world=2, rows=(4, 4, 4), in_slot=True, **both)
    yield Scenario(world=2, rows=(3, 3, 3), in_slot=True, gather=True, **both)
    yield Scenario(world=2, rows=(4, 1, 4), few_rows=2, **both)
    yield Scenario(world=2, rows=(4, 4, 4), streams=2, fresh_x=True, **both)
    yield Scenario(world=2, rows=(4, 4, 4), epochs=LAST_EPOCHS, **both)
    yield Scenario(world=2, rows=(4, 4, 4), epochs=(2**30 - 1, 2**30, 2**30 + 1), **both)
    yield Scenario(world=2, comm_tile_rows=1, **AGE, **both)
    yield Scenario(world=3, rows=(3, 3), n=4, **both)


def captured() -> Iterator[Scenario]:
    """Replays of captured calls, and eager calls between them."""
    for op, poison in itertools.product(OPS, (False, True)):
        for direction in ("push", "pull") if op == "ag_gemm" else ("push",):
            for world, rows, which in (
                (2, (4, 4, 4), (0, 1, 2)),
                (2, (4, 1, 3), (0, 2)),
                (3, (3, 5, 1), (0, 1, 2)),
                (3, (6, 4, 6), (1,)),
            ):
                yield Scenario((op,), world, rows, direction, poison=poison, captured=which)
    yield Scenario(("ag_gemm",), 3, (6, 4, 6), order="ring1d", captured=(0, 1, 2))
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d", path="medium", captured=(0, 1))
    yield Scenario(("ag_gemm",), 3, (6, 4), order="ring1d", direction="pull", captured=(0, 1))
    yield Scenario(("ag_gemm", "gemm_ar"), 2, (4, 3), captured=(0, 1))
    yield Scenario(("ag_gemm",), 3, (3, 3), n=4, captured=(0, 1))


def drawn(rng: random.Random) -> Scenario:
    """Any knobs of few ranks and calls."""
    world = rng.choice([2, 2, 3])
    ops = rng.choice([("ag_gemm",), ("gemm_rs",), ("gemm_ar",), ("ag_gemm", "gemm_ar")])
    return Scenario(
        ops,
        world,
        tuple(rng.randint(1, 2 * world + 1) for _ in range(2 if len(ops) > 1 else 3)),
        direction=rng.choice(["push", "pull"]),
        order=rng.choice(["direct", "ring1d", "ring2d", "hierarchical", "numa"]),
        topology=rng.choice([(1, 1, world), (world, 1, 1), (1, world, 1)]),
        comm_tile_rows=rng.choice([None, 1, 2]),
        poison=rng.random() < 0.5,
        gather=rng.random() < 0.5,
        fresh_x=rng.random() < 0.3,
        captured=rng.choice([(), (), (0, 1), (0,), (1,)]),
    )
