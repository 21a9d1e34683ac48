"""Maps that csrc/cuda_moe/route.cuh makes, beside those of csrc/schedule/grouped.h."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flux import _C, Knobs, Topology
from flux.core.knobs import ClusterTile
from flux.core.schedule import TileSchedule
from flux.moe import Routing
from flux.select.heuristic import make_schedule
from harness import STRESS
from moe_cases import ROUTINGS, MoeCase, routing_of
from ptx_device import MachineDevice
from ptx_target import ptx_target
from ptx_text import nvcc
from side_by_side import built_once
from virtual_cases import knobs_of, topology_of

ROOT = Path(__file__).parents[2]
TILE_N = 32
MAPS = ("items", "experts", "rows", "tokens", "sources", "counts", "pushes", "pushed", "shares")
MANY_ROWS, BAD_EXPERT = 8, 9  # of csrc/cuda/abi.h
BLOCKS = ("", "_many")  # one; three, each phase with a launch of its own
MANY_WARPS = 16

KERNELS = """
#include "cuda/gemm/kernel.cuh"
#include "cuda_moe/route.cuh"
template <int kM, int (*kMaps)(FluxRouteArgs const*, void*) = &flux::route<>>
struct Maps {
  static constexpr int kTileM = kM, kTileN = 32;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;
  static constexpr int (*kRoute)(FluxRouteArgs const*, void*) = kMaps;
  static std::uint64_t workspace_bytes(FluxGemmArgs const*) { return 0; }
  static int prepare(int device) { return flux::prepare_route(device); }
  static int launch(FluxGemmArgs const*, void*) { return FLUX_REFUSED; }
};
FLUX_KERNEL(maps_1, Maps<1>)
FLUX_KERNEL(maps_3, Maps<3>)
FLUX_KERNEL(maps_16, Maps<16>)
FLUX_KERNEL(maps_64, Maps<64>)
// As of many choices, by three blocks.
FLUX_KERNEL(maps_1_many, Maps<1, &flux::route<0, 3>>)
FLUX_KERNEL(maps_3_many, Maps<3, &flux::route<0, 3>>)
FLUX_KERNEL(maps_16_many, Maps<16, &flux::route<0, 3>>)
FLUX_KERNEL(maps_64_many, Maps<64, &flux::route<0, 3>>)
"""


def _build(folder: Path) -> Path:
    """A library of kernels that make maps alone, of four heights of tiles."""
    target = ptx_target()
    source, library = folder / "maps.cu", folder / "libmaps.so"
    source.write_text(KERNELS)
    runtime = [path for path in target.runtime if path.suffix == ".cpp"]
    command = [nvcc(), *target.flags, target.code["80"], "-shared", *target.link_flags]
    command += [f"-I{ROOT / 'csrc'}", f"-I{runtime[0].parent}", source, *runtime, "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def machine(pytestconfig: pytest.Config) -> MachineDevice:
    nvcc()
    device = MachineDevice(arch="80")
    device.maps = built_once(pytestconfig, "maps", _build)  # type: ignore[attr-defined]
    return device


@dataclass
class Made:
    """Maps of the host and of the device, by name, and what the device reported."""

    host: dict[str, list[int]]
    device: dict[str, list[int]]
    status: list[int]
    tail: torch.Tensor


class Case:
    """A random routing of one rank, and the kernel's arguments."""

    def __init__(self, seed: int, gathers: bool) -> None:
        rng = random.Random(f"{seed} {gathers}")
        self.gathers, self.seed = gathers, seed
        world = rng.choice([1, 2, 3, 4, 8])
        m = rng.choice([1, world, rng.randint(2, 60), rng.randint(60, 300)])
        total, self.tile_m = rng.choice([1, 2, 5, 13, 70, 300]), rng.choice([1, 3, 16, 64])
        case = MoeCase("gather", m, 8, 8, total, topk=rng.randint(1, min(total, 9)))
        self.ep = rng.choice([d for d in range(1, world + 1) if world % d == 0])
        rank, self.parallel = rng.randrange(world), rng.random() < 0.6
        self.experts = routing_of(case, m, rng.choice(ROUTINGS), seed)
        bounds = [
            (_C.core.row_begin(total, self.ep, p), _C.core.row_end(total, self.ep, p))
            for p in range(self.ep)
        ]
        first, last = bounds[rank // (world // self.ep)]
        self.routing = Routing(self.experts, total, first, last - first, world)
        inside = [((self.experts >= b) & (self.experts < e)).sum().item() for b, e in bounds]
        self.rows = [int(rows) for rows in inside]
        self.max_rows = max(1, *self.rows) + rng.choice([0, 0, 1, 100])
        self.columns, self.ahead = rng.randint(0 if gathers else 1, 3), rng.randint(0, 5)
        self.dtype = rng.choice([torch.int32, torch.int64])
        self.n = max(self.columns * TILE_N - rng.choice([0, 0, 1, 5]), 0)
        self.schedule = self._schedule(rng, m, world, rank)

    def _schedule(self, rng: random.Random, m: int, world: int, rank: int) -> TileSchedule:
        knobs = Knobs() if world == 1 else knobs_of(rng, world)
        topology = Topology(1, 1, 1) if world == 1 else topology_of(rng, world)
        if topology.nodes > 1:  # between which ops refuse to pull
            knobs = replace(knobs, direction="push")
        op, sizes = "ag_gemm" if self.gathers else "gemm_rs", (m, self.n or 1, 8)
        options = {"itemsize": 2, "cluster": ClusterTile(self.tile_m, TILE_N)}
        return make_schedule(op, sizes, world, rank, topology, knobs, **options)

    def on_host(self) -> dict[str, list[int]]:
        native, routing = self.schedule.native, self.routing
        if self.gathers:
            work = routing.native.gather_work(native, self.tile_m, self.columns)
        else:
            work = routing.native.sum_work(native, self.tile_m, TILE_N, self.ahead)
        if self.parallel:
            add = work.dispatch if self.gathers else work.combine
            add(native, routing.experts.data_ptr(), routing.topk, routing.total, self.ep)
        room = torch.empty(sum(work.sizes), dtype=torch.int32)
        work.fill(room.data_ptr())
        return dict(zip(MAPS, (part.tolist() for part in room.split(work.sizes)), strict=True))

    def run(
        self, device: MachineDevice, experts: torch.Tensor | None = None, blocks: str = ""
    ) -> Made:
        host = self.on_host()
        name = f"maps_{self.tile_m}{blocks}"
        kernel = _C.Kernel(str(device.maps), name)  # type: ignore[attr-defined]
        chosen = (self.experts if experts is None else experts).to(self.dtype).contiguous()
        count = (len(self.routing.native.offsets) - 1) // self.schedule.world
        route = _C.Route(
            schedule=self.schedule.native,
            kernel=kernel,
            experts=chosen.data_ptr(),
            expert_bytes=chosen.itemsize,
            topk=chosen.shape[1],
            total=self.routing.total,
            ep=self.ep,
            max_rows=self.max_rows,
            n=self.n,
            ahead=self.ahead,
            parallel=self.parallel,
        )
        more = MANY_WARPS * (count | 1) if blocks else 0  # than one block has
        room = torch.full((route.words + more,), -77, dtype=torch.int32)
        tail = torch.ones(self.max_rows, self.n, dtype=torch.bfloat16)
        status = torch.zeros(8, dtype=torch.int64)
        device.keep(room, chosen, tail, status)
        weights = [1000 + e for e in range(count)]
        kernel.prepare(0)
        route.use(room.data_ptr(), weights, tail.data_ptr(), tail.itemsize)
        device.cuda.seed = self.seed
        route.launch(kernel, status.data_ptr(), device.current_stream())
        device.finish()
        begins = route.offsets
        found = {n: room[begins[n] :][: len(host[n])].tolist() for n in MAPS if n != "pushed"}
        found["pushed"] = room[begins["pushed"] :].tolist()  # each push has room for all its rows
        found["totals"] = room[begins["totals"] :][:2].tolist()
        found["positions"] = room[begins["positions"] :][: chosen.numel()].tolist()
        found["routed"] = room[begins["routed"] :][: self.max_rows].tolist()
        found["weights"] = room[begins["weights"] :][: 2 * count].view(torch.int64).tolist()
        host["weights"] = weights
        return Made(host, found, status.tolist(), tail)


def pushes(maps: dict[str, list[int]]) -> list[tuple[int, int, list[int]]]:
    """Peer, signal and rows of each push, in their order."""
    words = maps["pushes"]
    fours = [words[at : at + 4] for at in range(0, len(words), 4)]
    return [(peer, signal, maps["pushed"][b:e]) for peer, signal, b, e in fours]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("gathers", [True, False])
def test_maps_are_those_of_the_host(machine: MachineDevice, gathers: bool, blocks: str) -> None:
    first = 50 * STRESS * BLOCKS.index(blocks)
    for seed in range(first, first + 50 * STRESS):
        case = Case(seed, gathers)
        made = case.run(machine, blocks=blocks)
        host, device, routing = made.host, made.device, case.routing
        assert not any(made.status), seed
        assert device["totals"] == [len(host["items"]), routing.rows], seed
        same = [
            n for n in MAPS if n not in ("pushes", "pushed") and (n != "sources" or not gathers)
        ]
        for name in (*same, "weights"):
            assert device[name] == host[name], (seed, name)
        assert pushes(device) == pushes(host), seed
        assert device["positions"] == routing.positions.view(-1).tolist(), seed
        behind = [0] * (case.max_rows - routing.rows)
        assert device["routed"] == routing.tokens.tolist() + behind, seed
        assert made.tail[: routing.rows].eq(1).all() and not made.tail[routing.rows :].any(), seed


def test_choices_without_a_result_are_reported_by_every_rank(machine: MachineDevice) -> None:
    for seed in range(40):
        blocks = BLOCKS[seed // 2 % 2]
        case = Case(seed, seed % 2 == 0)
        most = max(case.rows)
        if most > 1:
            case.max_rows = most - 1
            made = case.run(machine, blocks=blocks)
            where = [MANY_ROWS, most - 1, case.rows.index(most), 0, most]
            assert made.status[:5] == where and made.device["totals"] == [0, 0], seed
        case.max_rows = most + 1
        beyond, topk = case.experts.clone(), case.routing.topk
        bad = random.Random(seed).randrange(beyond.numel())
        beyond.view(-1)[bad:] = case.routing.total + seed
        made = case.run(machine, beyond, blocks)
        where = [BAD_EXPERT, bad // topk, case.routing.total + seed, 0, 0]
        assert made.status[:5] == where and made.device["totals"] == [0, 0], seed
