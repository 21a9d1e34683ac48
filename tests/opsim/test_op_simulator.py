"""The op simulator: closed forms, order of events, bad input, and its JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.cli.app import app
from flux.core.events import Kind
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.machine.cluster import Cluster, load_cluster
from flux.opsim import report as op_report
from flux.opsim.machine import DUPLEX_SHARE, Route, SimulatedFabric, SimulatedMachine
from flux.opsim.parts import LAUNCH_US, RAISE_US
from flux.opsim.simulator import MOST_TILES, Simulated, legal_knobs, simulate, unfused
from flux.select.chunks import chunk_gemm_ms
from flux.select.cost import gemm_ms, library_ms
from flux.select.hardware import COPY_SHARE, NETWORK_SHARE, PUSH_US, STORE_SHARE
from flux.select.kernel import default_configs, default_kernel
from flux.select.share import gemm_units
from flux.trace.chrome import read_chrome

H800 = load_cluster("flux-h800")
A100 = load_cluster("flux-a100-nvlink")
PCIE = load_cluster("flux-a100-pcie")
CLUSTERS = {"sm_90": H800, "sm_80": A100, "PCIe": PCIE}


def problem(op: str, m: int = 1024, world: int = 8, nodes: int = 1) -> Problem:
    n, k = (8192, 4096) if op == "ag_gemm" else (2048, 8192)
    return Problem(Op[op], m, n, k, "bfloat16", world, nodes)


def faster(cluster: Cluster, by: float) -> Cluster:
    """Return the cluster with links of ``by`` times the speed."""
    link = cluster.link
    return replace(
        cluster,
        link=replace(link, gbs=link.gbs * by, numa_gbs=link.numa_gbs * by),
        network=replace(cluster.network, gbits=cluster.network.gbits * by),
    )


OPS = pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
ON = pytest.mark.parametrize("on", CLUSTERS)


@OPS
@ON
def test_one_rank_takes_the_time_of_its_gemm(op: str, on: str) -> None:
    one = problem(op, world=1)
    call = simulate(one, CLUSTERS[on], Knobs())
    assert call.total_ms == pytest.approx(gemm_ms(one, CLUSTERS[on]), rel=1e-9)
    assert call.moves == () and unfused(one, CLUSTERS[on]).ect_ms == 0.0


@OPS
@ON
def test_infinite_links_expose_only_fixed_costs_and_passes_over_own_memory(
    op: str, on: str
) -> None:
    cluster = faster(CLUSTERS[on], 1e9)
    cluster = replace(
        cluster,
        link=replace(cluster.link, latency_us=0.0),
        device=replace(cluster.device, memory_gbs=1e9),
    )
    call = simulate(problem(op), cluster, Knobs(sm_margin=0), gemm_ms=5.0)
    fixed_us = 10 * (LAUNCH_US + RAISE_US)  # entry, launches, and signals that nothing hides
    assert 0.0 < 1e3 * call.ect_ms < fixed_us


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_without_computation_a_gather_takes_the_time_of_its_link(direction: str) -> None:
    shape = problem("ag_gemm", m=8192)
    call = simulate(shape, H800, Knobs(direction=direction), gemm_ms=1e-6)
    moved = 7 * shape.chunk * shape.row_bytes
    link_ms = moved / (H800.link.gbs * COPY_SHARE * 1e6)
    transfers = len({(m.src, m.row_begin) for m in call.moves if m.dst == 0})
    fixed_ms = 1e-3 * (transfers + 3) * (H800.link.latency_us + LAUNCH_US + 3 * RAISE_US)
    assert link_ms <= call.total_ms <= link_ms + fixed_ms


def test_without_computation_a_scatter_takes_the_time_of_its_link() -> None:
    shape = problem("gemm_rs", m=8192)
    call = simulate(shape, H800, gemm_ms=1e-6)
    link_ms = 7 * shape.chunk * shape.row_bytes / (H800.link.gbs * STORE_SHARE * 1e6)
    # The last sum, of one tile's partials, comes behind the last transfer.
    assert link_ms <= call.total_ms <= 1.25 * link_ms + 0.05


@OPS
@ON
def test_nothing_is_faster_than_its_gemm_and_bandwidth_never_hurts(op: str, on: str) -> None:
    cluster, shape = CLUSTERS[on], problem(op, m=1024)
    for knobs, _ in legal_knobs(shape, cluster):
        times = [
            simulate(shape, faster(cluster, by), knobs, gemm_ms=0.3).total_ms
            for by in (0.5, 1.0, 4.0)
        ]
        assert min(times) >= 0.3
        # Another order of arrival may shift a tile from one block to another.
        assert all(slow >= fast * (1 - 1e-6) for slow, fast in pairwise(times))


@OPS
def test_symmetric_ranks_end_together(op: str) -> None:
    for knobs, _ in legal_knobs(problem(op), H800):
        call = simulate(problem(op), H800, knobs)
        assert max(call.ranks_ms) - min(call.ranks_ms) < 1e-6 * call.total_ms


def shares(call: Simulated) -> Counter[tuple[int, int, int]]:
    """Return how often each element arrived, as counts of (receiver, row, bytes of that row)."""
    count: Counter[tuple[int, int, int]] = Counter()
    for move in call.moves:
        for row in range(move.row_begin, move.row_end):
            count[move.dst, move.src, row] += move.column_end - move.column_begin
    return count


@pytest.mark.parametrize("m", [128, 125])
@ON
def test_every_row_is_gathered_once(m: int, on: str) -> None:
    shape, cluster = problem("ag_gemm", m=m), CLUSTERS[on]
    for knobs, _ in legal_knobs(shape, cluster):
        got: Counter[tuple[int, int]] = Counter()
        for (dst, _, row), elements in shares(simulate(shape, cluster, knobs)).items():
            got[dst, row] += elements
        wanted = {
            (rank, row): shape.k
            for rank in range(8)
            for row in range(m)
            if not shape.rows(rank)[0] <= row < shape.rows(rank)[1]
        }
        assert got == wanted


@pytest.mark.parametrize("m", [128, 125])
@ON
def test_every_partial_reaches_its_owner_once(m: int, on: str) -> None:
    shape = problem("gemm_rs", m=m)
    got = shares(simulate(shape, CLUSTERS[on]))
    wanted = {
        (owner, src, row): shape.n
        for owner in range(8)
        for src in range(8)
        if src != owner
        for row in range(*shape.rows(owner))
    }
    assert got == wanted


@OPS
def test_between_hosts_every_row_crosses_once_and_allreduce_sends_it_back(op: str) -> None:
    shape = problem(op, m=256, world=16, nodes=2)
    call = simulate(shape, H800)
    crossing = sum(
        (m.row_end - m.row_begin) * (m.column_end - m.column_begin)
        for m in call.moves
        if m.src // 8 != m.dst // 8
    )
    assert crossing == shape.m * shape.row_elements * (2 if op == "gemm_ar" else 1)
    slower = replace(H800, network=replace(H800.network, gbits=40.0))
    assert simulate(shape, slower).total_ms > call.total_ms


@pytest.mark.parametrize("nodes, m", [(2, 250), (4, 256)])
def test_between_hosts_every_rank_gets_all_rows_of_the_result(nodes: int, m: int) -> None:
    world = 4 * nodes
    shape = problem("gemm_ar", m=m, world=world, nodes=nodes)
    got: Counter[tuple[int, int]] = Counter()
    for sign, op in ((1, Op.gemm_ar), (-1, Op.gemm_rs)):  # all that arrives, less the partials
        for (dst, _, row), columns in shares(simulate(replace(shape, op=op), H800)).items():
            got[dst, row] += sign * columns
    assert {key: columns for key, columns in got.items() if columns} == {
        (rank, row): shape.n
        for rank in range(world)
        for row in range(m)
        if not shape.rows(rank)[0] <= row < shape.rows(rank)[1]
    }


def test_between_hosts_a_scatter_uses_the_links_of_all_ranks() -> None:
    """Without computation: what a rank stores for both hosts, then the last sums of the others."""
    shape = problem("gemm_rs", m=8192, world=16, nodes=2)
    call = simulate(shape, H800, gemm_ms=1e-6)
    chunk = shape.chunk * shape.row_bytes
    link_ms = 2 * 7 * chunk / (H800.link.gbs * STORE_SHARE * 1e6)
    port_ms = chunk / (H800.network.gbits / 8 * NETWORK_SHARE * 1e6)
    assert link_ms <= call.total_ms <= 1.05 * (link_ms + port_ms)


@pytest.mark.parametrize("knobs", [Knobs(), Knobs(order="ring1d", direction="pull")], ids=str)
def test_tiles_start_after_the_rows_they_wait_for(knobs: Knobs) -> None:
    shape = problem("ag_gemm")
    call = simulate(shape, PCIE, knobs)
    arrived: dict[tuple[int, int], float] = {}
    for move in call.moves:
        for row in range(move.row_begin, move.row_end):
            arrived[move.dst, row] = max(arrived.get((move.dst, row), 0.0), move.end_us)
    assert call.kernel is not None
    high = call.knobs.tile[0] if call.knobs.tile else 0
    tiles = [event for event in call.events() if event.kind == Kind.gemm]
    assert len(tiles) % shape.world == 0 and tiles
    for event in tiles:
        begin = int(event.name.removeprefix("tile ").split(",")[0])
        for row in range(begin, min(begin + high, shape.m)):
            assert event.start_us >= arrived.get((event.rank, row), 0.0)


@OPS
def test_events_of_a_lane_do_not_overlap_and_end_with_the_call(op: str) -> None:
    call = simulate(problem(op), A100)
    by_lane: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in call.events():
        by_lane.setdefault((event.rank, event.lane), []).append((event.start_us, event.end_us))
    for spans in by_lane.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))
    last = max(end for spans in by_lane.values() for _, end in spans)
    assert last <= 1e3 * call.total_ms + 1e-6


def test_a_forwarded_row_leaves_after_it_came() -> None:
    call = simulate(problem("ag_gemm"), H800, Knobs(order="ring1d"))
    came = {(m.dst, m.row_begin): m.end_us for m in call.moves}
    forwarded = [m for m in call.moves if m.row_begin // 128 != m.src]
    assert forwarded
    assert all(m.start_us >= came[m.src, m.row_begin] for m in forwarded)


MEDIUM = Knobs(path="medium")


@OPS
@ON
def test_medium_runs_a_gemm_per_chunk_in_ring_order(op: str, on: str) -> None:
    """The last chunk of 125 rows has 13, the others have 16."""
    shape = problem(op, m=125)
    call = simulate(shape, CLUSTERS[on], MEDIUM)
    came = {(m.dst, m.row_begin): m.end_us for m in call.moves}
    left = {(m.src, m.dst, m.row_begin): m.start_us for m in call.moves}
    for rank in range(8):
        gemms = [e for e in call.events() if e.rank == rank and e.kind == Kind.gemm]
        chunks = [int(e.name.removeprefix("tile ").split(",")[0]) // 16 for e in gemms]
        pairs = list(zip(gemms, chunks, strict=True))
        assert all(a.end_us <= b.start_us + 1e-6 for a, b in pairwise(gemms))
        if op == "ag_gemm":
            assert chunks == [(rank - step) % 8 for step in range(8)]
            assert all(e.start_us >= came.get((rank, 16 * c), 0.0) for e, c in pairs)
        else:
            assert sorted(chunks) == list(range(8)) and chunks[-1] == rank
            ends = {c: e.end_us for e, c in pairs}
            for owner in set(range(8)) - {rank}:
                assert left[rank, owner, 16 * owner] >= ends[owner] - 1e-6
    if op == "ag_gemm":
        assert all(m.dst == (m.src + 1) % 8 for m in call.moves) and len(call.moves) == 56


@OPS
@ON
def test_without_links_medium_takes_its_w_gemms(op: str, on: str) -> None:
    cluster, shape = faster(CLUSTERS[on], 1e9), problem(op, m=1024)
    cluster = replace(cluster, link=replace(cluster.link, latency_us=0.0))
    call = simulate(shape, cluster, MEDIUM)
    assert call.kernel is not None and (call.waves, call.blocks) == (8, 1)
    of_whole = call.gemm_ms, default_kernel(shape, cluster)
    units = gemm_units(shape, cluster)
    gemms = 8 * chunk_gemm_ms(shape, cluster.device, call.kernel, of_whole, units)
    assert gemms + 8e-3 * LAUNCH_US < call.total_ms < 1.25 * gemms + 0.1
    assert simulate(shape, cluster, MEDIUM, gemm_ms=9.0).total_ms > 9.0


def test_a_chunk_costs_full_waves_and_the_weight() -> None:
    """132 multiprocessors: 8192 rows are 12 waves of tiles of 128 x 256, 1024 rows are 2."""
    wide = Problem(Op.ag_gemm, 8192, 49152, 12288, "bfloat16", 8)
    kernel = next(k for k in default_configs(wide, "90a") if k.tile == (128, 256, 64))
    whole = gemm_ms(wide, H800), kernel
    part = chunk_gemm_ms(wide, H800.device, kernel, whole, 132)
    assert part == pytest.approx(whole[0] * 2 / 12, rel=0.05)
    few = replace(wide, m=64)
    weight_ms = 2 * 6144 * 12288 / (H800.device.memory_gbs * 1e6)
    of_few = gemm_ms(few, H800), kernel
    assert chunk_gemm_ms(few, H800.device, kernel, of_few, 132) > weight_ms
    # So at few rows medium is slower than no overlap at all (Flux paper, figure 14).
    library, ring = unfused(few, A100), simulate(few, A100, MEDIUM)
    assert ring.total_ms > 1.33 * simulate(few, A100).total_ms and ring.ect_ms > library.ect_ms


@ON
def test_blocks_push_rows_before_they_multiply(on: str) -> None:
    """The last of 8 ranks has no rows and pushes none; its tiles wait for the rows of others."""
    shape, latency_us = problem("ag_gemm", m=49), CLUSTERS[on].link.latency_us
    call = simulate(shape, CLUSTERS[on], Knobs(path="in_kernel"))
    assert call.method == "in_kernel" and call.knobs.tile is not None
    assert len(call.moves) == 49 and {move.src for move in call.moves} == set(range(7))
    assert all(move.start_us >= PUSH_US for move in call.moves)
    for event in call.events():
        if event.kind == Kind.gemm:
            begin = int(event.name.removeprefix("tile ").split(",")[0])
            end = begin + call.knobs.tile[0]
            for move in call.moves:
                if move.dst == event.rank and move.row_begin < end and move.row_end > begin:
                    assert event.start_us >= move.end_us + latency_us
    others = (unfused(shape, CLUSTERS[on]), simulate(shape, CLUSTERS[on]))
    assert call.total_ms < min(other.total_ms for other in others)


@ON
def test_blocks_sum_and_copy_the_result_out(on: str) -> None:
    """The last of 8 ranks has no rows, so it sums none."""
    shape, latency_us = problem("gemm_ar", m=49), CLUSTERS[on].link.latency_us
    call = simulate(shape, CLUSTERS[on], Knobs(path="in_kernel"))
    events = list(call.events())
    assert {e.rank for e in events if e.kind == Kind.reduce} == set(range(7))
    assert not [e for e in events if e.kind == Kind.barrier]  # ranks do not enter
    sums_end = {e.rank: e.start_us + e.duration_us for e in events if e.kind == Kind.reduce}
    for event in events:
        if event.kind == Kind.copy:
            others = [end for rank, end in sums_end.items() if rank != event.rank]
            assert event.start_us >= max(others) + latency_us
    others_ms = [c.total_ms for c in (unfused(shape, CLUSTERS[on]), simulate(shape, CLUSTERS[on]))]
    assert call.total_ms < min(others_ms)


def test_an_allgather_on_pcie_goes_round_a_ring_by_default() -> None:
    shape = Problem(Op.ag_gemm, 4096, 16384, 4096, "bfloat16", 8)
    call = simulate(shape, PCIE)
    assert call.knobs.order == "ring1d"
    assert call.total_ms < simulate(shape, PCIE, Knobs(order="direct")).total_ms
    assert simulate(shape, A100).knobs.order == "direct"
    assert simulate(problem("gemm_rs"), PCIE).knobs.order == "direct"
    assert simulate(problem("ag_gemm", 1024, 16, 2), PCIE).knobs.order == "hierarchical"


def test_flows_share_a_resource_fairly() -> None:
    machine = SimulatedMachine([10.0, 2.0])
    ends: dict[str, float] = {}

    def flow(name: str, resources: tuple[int, ...], nbytes: float) -> Any:
        yield machine.send(resources, nbytes)
        ends[name] = machine.now_us

    machine.spawn(flow("narrow", (0, 1), 20.0))  # 2 bytes per us
    machine.spawn(flow("wide", (0,), 80.0))  # the other 8
    machine.run()
    assert ends == pytest.approx({"narrow": 10.0, "wide": 10.0})


def test_pcie_ranks_of_different_domains_share_the_link_between_them() -> None:
    link = replace(PCIE.link, numa_gbs=40.0)
    fabric = SimulatedFabric(replace(PCIE, link=link), (0,) * 8)
    near, far = fabric.route(0, 3), fabric.route(0, 4)
    assert len(far.resources) == len(near.resources) + 1
    assert fabric.capacity[far.resources[-1]] == 40e3
    # All eight ranks to the other domain: 20 GB/s for each direction's four flows.
    assert fabric.route(1, 5).resources[-1] == far.resources[-1]
    assert fabric.route(4, 0).resources[-1] != far.resources[-1]


@pytest.mark.parametrize("on", ["sm_90", "PCIe"])
def test_both_directions_of_a_link_share_a_limit_on_pcie_only(on: str) -> None:
    fabric = SimulatedFabric(CLUSTERS[on], (0, 0))
    routes = [fabric.route(0, 1), fabric.route(1, 0)]
    machine = SimulatedMachine(fabric.capacity)
    nbytes = CLUSTERS[on].link.gbs * 1e9  # a second in one direction

    def flow(route: Route) -> Any:
        yield machine.send(route.resources, nbytes)

    for route in routes:
        machine.spawn(flow(route))
    machine.run()
    share = DUPLEX_SHARE if on == "PCIe" else 1.0
    assert machine.now_us == pytest.approx(1e6 / share)


def test_between_hosts_the_library_passes_all_chunks_through_each_host() -> None:
    """NCCL's ring: W - 1 chunks leave each host, where the hierarchical order sends W / 2."""
    shape = problem("gemm_rs", m=65536, world=16, nodes=2)
    slow = replace(H800, network=replace(H800.network, gbits=40.0))
    moved = 15 * shape.chunk * shape.row_bytes
    assert library_ms(shape, slow) == pytest.approx(moved / (8 * 5e6 * 0.8), rel=0.05)


def test_a_measured_speed_of_the_library_takes_the_place_of_its_share() -> None:
    shape = problem("ag_gemm", m=8192)
    measured = replace(PCIE, link=replace(PCIE.link, library_gbs=10.0))
    moved = 7 * shape.chunk * shape.row_bytes
    assert library_ms(shape, measured) == pytest.approx(moved / 10e6, rel=0.05)


def test_equal_arguments_give_equal_results() -> None:
    first, second = (simulate(problem("gemm_rs"), A100) for _ in range(2))
    assert first == second and list(first.events()) == list(second.events())


# -- bad input -------------------------------------------------------------------------------------


DISPATCH = ["--op", "dispatch_grouped_gemm", "--experts", "8", "--topk", "2"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--op", "gemm"], "op must be one of"),
        (["--m", "0"], "m must be at least 1"),
        (["--nproc", "0"], "world must be at least 1"),
        (["--hosts", "0"], "hosts must be at least 1"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--dtype", "float64"], "no kernel of the default set"),
        (["--order", "star"], "Knobs.order must be one of"),
        (["--direction", "sideways"], "Knobs.direction must be one of"),
        (["--comm-tile-rows", "0"], "Knobs.comm_tile_rows must be a positive integer"),
        (["--gemm-ms", "0"], "the GEMM's time must be above 0"),
        (["--gemm-ms", "nan"], "the GEMM's time must be above 0"),
        (["--cluster", "nowhere"], "no file nowhere"),
        (["--cluster", "cpu"], "models GPUs"),
        (["--nproc", "16", "--hosts", "1"], "hosts of 8 devices"),
        (["--nproc", "9", "--hosts", "2"], "cannot be divided evenly"),
        (["--nproc", "16", "--direction", "pull"], "direction = pull needs memory"),
        (["--op", "gemm_rs", "--direction", "pull"], "stores partials itself"),
        (["--path", "unfused"], "always shown"),
        (["--path", "in_kernel"], "shown where it exists"),
        (["--m", "1048576"], f"at most {MOST_TILES}"),
        (["--op", "grouped_gemm_rs"], "needs --experts"),
        (["--ep", "2"], "--ep is of dispatch_grouped_gemm and grouped_gemm_combine"),
        (["--heads", "8"], "--heads is of all-to-alls of heads"),
        (["--op", "gemm_all_to_all", "--heads", "8"], "n must be heads * head_dim"),
        (["--op", "gemm_all_to_all", "--taken", "3"], "--taken of gemm_all_to_all is not"),
        ([*DISPATCH, "--path", "medium"], "path = medium of dispatch_grouped_gemm is not"),
        ([*DISPATCH, "--order", "ring1d"], "kernels send rows where their experts are"),
        ([*DISPATCH, "--ep", "3"], "ep must divide the 8 ranks"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "op", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert complaint in line


def test_sums_in_flight_are_those_of_a_switch() -> None:
    """A rank sends the partials and the sums of m rows to others; or m rows and own sums, once.

    Of few rows the link's latency is all that counts, and both take it as often.
    """
    by_switch = Knobs(path="in_kernel", reduce="in_flight")
    for m, least, most in ((1, 0.95, 1.0), (512, 0.7, 0.9)):
        few = Problem(Op.gemm_ar, m, 5120, 13824, "bfloat16", 8)
        ratio = simulate(few, H800, by_switch).total_ms
        ratio /= simulate(few, H800, Knobs(path="in_kernel")).total_ms
        assert least < ratio < most
    for cluster, knobs in ((H800, Knobs(reduce="in_flight")), (A100, by_switch)):
        with pytest.raises(
            ValueError, match="path in_kernel behind an NVLink switch of sm_90 alone"
        ):
            simulate(few, cluster, knobs)


# -- output ----------------------------------------------------------------------------------------

SMALL = ["simulate", "op", "--m", "1024", "--n", "8192", "--k", "4096"]


def test_json_is_that_of_bench_op(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = CliRunner().invoke(app, [*SMALL, "--json", "-", "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    root = Path(__file__).resolve().parents[2]
    bench = json.loads(
        (root / "benchmarks/results/cpu/ag_gemm_1024x4096x1024_float32_w2.json").read_text()
    )
    assert set(bench) <= set(document) and document["simulated"] is True
    assert set(document["methods"]) == {"unfused", "medium", "flux"}
    for name, method in document["methods"].items():
        assert set(bench["methods"][name]) <= set(method)
    best = document["methods"]["flux"]
    assert best["overall_ms"] == document["schedules"][0]["overall_ms"]
    times = [one["overall_ms"] for one in document["schedules"]]
    assert times == sorted(times)
    directions = {one["direction"] for one in document["schedules"]}
    orders = {order for one in document["schedules"] for order in one["orders"]}
    assert directions == {"push", "pull"}
    assert orders == {"direct", "ring1d", "ring2d", "hierarchical", "numa"}
    read = read_chrome(trace)
    assert {event.details["method"] for event in read.events} == {"unfused", "medium", "flux"}


def test_ops_of_experts_have_their_names() -> None:
    of_experts = ["--experts", "8", "--topk", "2", "--m", "512", "--quiet", "--json", "-"]
    shown = [
        json.loads(CliRunner().invoke(app, [*SMALL, "--op", op, *of_experts]).stdout)["methods"]
        for op in ("gemm_rs", "grouped_gemm_rs")
    ]
    assert shown[0] == shown[1]


def test_paths_of_few_rows_are_shown() -> None:
    few = ["simulate", "op", "--m", "64", "--n", "8192", "--k", "4096", "--json", "-"]
    document = json.loads(CliRunner().invoke(app, few).stdout)
    assert set(document["methods"]) == {"unfused", "medium", "in_kernel", "flux"}
    assert "in_kernel" in CliRunner().invoke(app, few[:-2]).stdout


def test_table_and_timeline(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL, "--order", "ring1d", "--direction", "pull"])
    assert result.exit_code == 0, result.output
    for text in ("ring1d", "pull", "medium", "unfused", "rank 0", "GEMM  |", "link  |"):
        assert text in result.stdout
    assert "hierarchical" not in result.stdout
    quiet = CliRunner().invoke(app, [*SMALL, "--quiet", "--json", str(tmp_path / "out.json")])
    assert quiet.exit_code == 0 and quiet.stdout == ""


def test_a_line_of_the_timeline_shows_shares() -> None:
    assert op_report.shades([(0.0, 50.0)], 1, 100.0, 4) == "██  "
    assert op_report.shades([(0.0, 100.0)], 2, 100.0, 2) == "▒▒"


# -- candidates of the tuner -----------------------------------------------------------------------


def test_explain_ranks_the_best_candidates_of_hardware_that_is_not_here() -> None:
    shape = ["--op", "gemm_rs", "--m", "512", "--n", "4096", "--k", "8192", "--nproc", "8"]
    command = ["tune", *shape, "--cluster", "flux-h800", "--explain", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)
    times = list(document["simulated_ms"].values())
    assert (
        {"unfused", "medium", "default"}
        <= set(document["simulated_ms"])
        <= set(document["candidates"])
    )
    assert times == sorted(times)


def test_sums_leave_for_other_hosts_while_the_gemm_runs() -> None:
    """A host's sums would all be complete at once if owners were visited one by one: see
    tile_order.h. Slices of a fourth leave behind a fourth of the tiles of other hosts.
    """
    two = Problem(Op.gemm_rs, 8192, 8192, 24576, "bfloat16", 16, 2)
    sliced = simulate(two, A100, Knobs())
    whole = simulate(two, A100, Knobs(comm_tile_rows=512))
    assert sliced.knobs.comm_tile_rows == 128
    assert sliced.total_ms < 0.9 * whole.total_ms

    def first_sum(call: Simulated) -> float:
        return min(m.start_us for m in call.moves if m.src // 8 != m.dst // 8)

    assert first_sum(sliced) < 0.4 * first_sum(whole)
