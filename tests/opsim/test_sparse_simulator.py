"""The op simulator's ops that move some tokens only, or heads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux import _C
from flux.cli.app import app
from flux.core.events import Kind
from flux.core.knobs import Knobs, Topology
from flux.core.sparse_problem import SparseProblem, make_problem
from flux.machine.cluster import load_cluster
from flux.opsim.machine import SimulatedMachine
from flux.opsim.simulator import Simulated
from flux.opsim.sparse import simulate_sparse
from flux.select.all_to_all import gpu_blocks, predicted_ms
from flux.select.dispatching import predict_sparse
from flux.select.drawn import DrawnRouting, routed_call
from flux.select.hardware import COPY_SHARE, NETWORK_SHARE, STORE_SHARE
from flux.select.heuristic import dispatching
from flux.select.kernel import default_kernel

FUSED = Knobs(path="fused")
H800, PCIE = load_cluster("flux-h800"), load_cluster("flux-a100-pcie")
OPS = ("dispatch_grouped_gemm", "grouped_gemm_combine")
EXCHANGES = ("gemm_all_to_all", "all_to_all_gemm")


def problem(name: str, m: int, world: int = 4, nodes: int = 1, **sizes: Any) -> SparseProblem:
    exchanges = name in EXCHANGES
    given = {"heads": (16,), "head_dim": 64} if exchanges else {"experts": 16, "topk": 3}
    made = make_problem(name, m, 1024, 1024, "bfloat16", world, given | sizes, nodes)
    assert isinstance(made, SparseProblem)
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the bytes of each resource; crossing a link, at a share of its speed."""
    counts: Counter[int] = Counter()
    send = SimulatedMachine.send

    def counted(self: SimulatedMachine, resources: tuple[int, ...], nbytes: float) -> Any:
        counts[resources[0]] += nbytes
        return send(self, resources, nbytes)

    monkeypatch.setattr(SimulatedMachine, "send", counted)
    return counts


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("m", "world", "ep"), [(301, 4, 4), (64, 8, 4), (5, 4, 2), (2048, 2, 2)])
def test_tokens_cross_once_to_each_rank_with_an_expert(
    name: str, m: int, world: int, ep: int, sent: Counter[int]
) -> None:
    sizes = problem(name, m, world, ep=ep)
    simulate_sparse(sizes, H800, FUSED, seed=3)
    chosen = DrawnRouting(sizes, 3).chosen.tolist()
    assert len(chosen) == m and all(len(set(of_token)) == 3 for of_token in chosen)
    rows = 0
    for owner in range(world):
        for token in range(*sizes.rows(owner)):
            parts = {expert * ep // sizes.experts for expert in chosen[token]}
            ranks = {part * world // ep + at for part in parts for at in range(world // ep)}
            rows += len(ranks - {owner})
    assert sum(sent.values()) == pytest.approx(rows * sizes.row_bytes / STORE_SHARE)


def test_tiles_wait_for_the_signals_of_their_tokens() -> None:
    sizes = problem(OPS[0], 701)
    routed = routed_call(sizes, H800, Topology.flat(4), FUSED)
    chosen, rows = routed.drawn.chosen, routed.knobs.comm_tile_rows
    assert rows is not None
    for rank, work in enumerate(routed.works):
        first, local = sizes.spec().local_experts(4, rank)
        mine = [t for t in range(701) if any(first <= e < first + local for e in chosen[t])]
        wanted = {_C.core.signals_of_rows(701, 4, rows, t, t + 1)[0] for t in mine}
        assert {signal for tile in work.touches for signal in tile} == wanted
        assert work.rows == sum(first <= e < first + local for of in chosen for e in of)


def fields(run: Simulated) -> tuple[float, ...]:
    return (*run.ranks_ms, run.gemm_ms, run.comm_ms)


@pytest.mark.parametrize("name", [*OPS, *EXCHANGES])
@pytest.mark.parametrize("on", [H800, PCIE], ids=lambda cluster: cluster.name)
def test_fused_is_no_faster_than_its_parts_and_unfused_is_their_sum(name: str, on: Any) -> None:
    for m in (32, 4096):
        sizes = problem(name, m)
        library, fused = simulate_sparse(sizes, on, FUSED)
        assert fields(fused) == fields(simulate_sparse(sizes, on, FUSED)[1])
        whole = fused.gemm_ms
        link = max(
            sum(end - begin for move in fused.moves for begin, end in [move[2:4]] if move.dst == r)
            for r in range(4)
        )
        link_ms = 0.0 if name == OPS[1] else link * sizes.row_bytes / (on.link.gbs * 1e6)
        assert fused.total_ms > max(whole, link_ms)
        lanes = [e for e in library.events() if e.rank == 0]
        assert sum(e.duration_us for e in lanes) == pytest.approx(1e3 * library.total_ms)
        given = simulate_sparse(sizes, on, FUSED, gemm_ms=50.0)
        assert given[1].total_ms > 50.0 and given[0].total_ms > 50.0


@pytest.mark.parametrize("name", OPS)
def test_seeds_draw_routings(name: str) -> None:
    sizes = problem(name, 900)
    first, again, other = (simulate_sparse(sizes, H800, FUSED, seed=s)[1] for s in (0, 0, 1))
    assert first == again and list(first.events()) == list(again.events())
    assert first.ranks_ms != other.ranks_ms


@pytest.mark.parametrize("name", [*OPS, *EXCHANGES])
def test_few_ranks_and_rows_end(name: str) -> None:
    """One rank; ranks without rows; ranks and experts without a token; hosts."""
    for m, world, nodes in ((1, 1, 1), (100, 1, 1), (1, 4, 1), (5, 8, 2), (1000, 16, 4)):
        library, fused = simulate_sparse(problem(name, m, world, nodes), H800, FUSED)
        assert len(fused.ranks_ms) == world and 0 < fused.total_ms < 2 and library.total_ms > 0


@pytest.mark.parametrize("name", OPS)
def test_between_hosts_all_rows_cross_once(name: str) -> None:
    sizes = problem(name, 512, 16, 2)
    _, fused = simulate_sparse(sizes, H800, FUSED)
    across = sum(m.row_end - m.row_begin for m in fused.moves if m.src // 8 != m.dst // 8)
    assert across == 512, "a row or sum for the other host"


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(("m", "world", "nodes"), [(4096, 4, 1), (1030, 8, 2), (999, 12, 3)])
def test_every_block_crosses_once(
    name: str, m: int, world: int, nodes: int, sent: Counter[int]
) -> None:
    heads = {"heads": (48, world // 2) if name == EXCHANGES[0] else (48,)}
    width = sum(heads["heads"]) * 64
    n, k = (width, 512) if name == EXCHANGES[0] else (512, width)
    made = make_problem(name, m, n, k, "bfloat16", world, heads | {"head_dim": 64}, nodes)
    assert isinstance(made, SparseProblem)
    _, fused = simulate_sparse(made, H800, FUSED)
    lanes = world // nodes
    rows = [made.rows(rank)[1] - made.rows(rank)[0] for rank in range(world)]
    near, far = sum(rows) * (lanes - 1), sum(rows) * (world - lanes)
    share = near / COPY_SHARE + far / NETWORK_SHARE
    assert sum(sent.values()) == pytest.approx(made.row_bytes * share)
    assert sum(m.row_end - m.row_begin for m in fused.moves) == near + far


def test_no_two_ranks_of_a_host_send_to_one_rank_at_a_time() -> None:
    sizes = problem(EXCHANGES[0], 4096, 16, 4)
    tile = default_kernel(sizes, H800).cluster_tile
    topology = Topology(4, 1, 4)
    peers = [gpu_blocks(sizes, rank, topology, FUSED, tile).peers for rank in range(16)]
    for rank, order in enumerate(peers):
        assert sorted(order) == [peer for peer in range(16) if peer != rank]
        assert all(peer // 4 != rank // 4 for peer in order[:12]), "other hosts first"
    for step in range(12):
        assert len({order[step] for order in peers}) == 16


def test_heads_leave_when_their_columns_are_computed() -> None:
    sizes = problem(EXCHANGES[0], 16384)
    _, fused = simulate_sparse(sizes, PCIE, FUSED)
    gemm = [e.start_us + e.duration_us for e in fused.events() if e.kind == Kind.gemm]
    first = min(move.start_us for move in fused.moves)
    assert min(gemm) < first < max(gemm)


@pytest.mark.parametrize("on", [H800, PCIE], ids=lambda cluster: cluster.name)
def test_the_cost_model_is_near(on: Any) -> None:
    """Of some 400 shapes on four clusters 10 were beyond 20%, by up to 25%."""
    for name in OPS:
        for m, experts, topk in ((64, 256, 6), (1024, 128, 8), (8192, 8, 2)):
            made = make_problem(
                name, m, 4096, 2048, "bfloat16", 8, {"experts": experts, "topk": topk}
            )
            assert isinstance(made, SparseProblem)
            library, fused = simulate_sparse(made, on, FUSED)
            kernel = default_kernel(made, on)
            for run, knobs in ((library, Knobs(path="unfused")), (fused, dispatching(made))):
                predicted = sum(predict_sparse(made, on, knobs, kernel))
                assert predicted == pytest.approx(run.total_ms, rel=0.25), (name, m, knobs)
    for name in EXCHANGES:
        for m, nodes in ((2048, 1), (32768, 1), (32768, 2)):
            sizes = problem(name, m, 8 * nodes, nodes)
            library, fused = simulate_sparse(sizes, on, FUSED)
            assert library.gemm_ms == fused.gemm_ms, "of all heads, though unfused has one per rank"
            for run, path in ((library, "unfused"), (fused, "fused")):
                assert predicted_ms(sizes, on, path) == pytest.approx(run.total_ms, rel=0.25)


def test_commands(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    of_op = {
        OPS[0]: ["--experts", "16", "--topk", "2"],
        OPS[1]: ["--experts", "16", "--topk", "2", "--ep", "4", "--seed", "5"],
        EXCHANGES[0]: ["--heads", "8/4/4", "--head-dim", "128"],
        EXCHANGES[1]: ["--heads", "16"],
    }
    for name, more in of_op.items():
        shape = ["--m", "512", "--n", "2048", "--k", "2048", "--nproc", "4"]
        command = ["simulate", "op", "--op", name, *shape, *more]
        result = CliRunner().invoke(app, [*command, "--json", "-", "--trace", str(trace)])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["op"] == name and set(found["methods"]) == {"unfused", "flux"}
        assert trace.stat().st_size > 1000
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == 0 and f"{name} 512 x 2048 x 2048" in shown.output
