"""Winners of ops of experts and heads: their keys, their search, and the ops that use them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flux.bench.config import BenchConfig
from flux.core.env import TUNE_CACHE
from flux.core.knobs import SLOT_BYTES, Knobs, Op, Topology
from flux.core.problem import Problem, ceil_div
from flux.core.sparse_problem import DISPATCHING, SPARSE, SparseProblem, make_problem
from flux.launch.supervisors import Spawned
from flux.machine.cluster import Cluster, NetworkSpec, load_cluster
from flux.machine.detection import detect, product_tflops
from flux.moe import DispatchGroupedGemm
from flux.select import choose
from flux.select.all_to_all import ModelledPath, predicted_ms
from flux.select.cache import Cache
from flux.select.choose import Modelled, Tuned, modelled, threads_per_core
from flux.select.cost import gemm_ms
from flux.select.dispatching import needed_share, on_cpus, predict_sparse
from flux.select.heuristic import dispatching, resolve
from flux.select.one_shot import network_cpu_ms
from flux.select.predict import predict
from flux.select.space import candidates, load_space
from flux.select.winners import Entry, Key, Winner
from flux.tune import worker
from flux.tune.halving import median_ms
from flux.tune.machine import survey
from flux.tune.tuner import SKEWS, Options, Tuner, make_search
from flux.ulysses import AllToAllGemm
from harness import run_ranks

SPACE = """
backend = "cpu"
prune_above = 1000
[ag_gemm]
tile_rows = ["m"]
comm_tile_rows = [2, 8]
[gemm_rs]
comm_tile_rows = [2, 8]
[all_to_all_gemm]
comm_tile_rows = [3]
"""
SIZES: dict[str, Any] = {
    "dispatch_grouped_gemm": {"experts": 4},
    "all_to_all_gemm": {"heads": (4,), "head_dim": 4},
}


def _looked_up(rank: int, world: int) -> None:
    sizes = {"max_m": 32, "n": 12, "k": 16}
    experts = {"experts": 4, "topk": 2, "ep": 2}
    for kind, rest, other in (
        (DispatchGroupedGemm, sizes | experts, {"topk": 3}),
        (DispatchGroupedGemm, sizes | experts, {"experts": 5}),
        (AllToAllGemm, {"max_m": 32, "n": 12, "heads": 4, "head_dim": 4}, {"head_dim": 8}),
    ):
        op = kind(**rest)
        assert isinstance(op._choice, Tuned)
        assert op.schedule(32).knobs.path == op._choice.entry.winners[0].knobs.path
        assert op._choice.entry.key.op == op.library_name or isinstance(op, DispatchGroupedGemm)
        assert not isinstance(kind(**(rest | other))._choice, Tuned)


@pytest.mark.timeout(300)
def test_ops_use_winners_that_are_never_slower_than_the_default(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(SPACE)
    launcher, options = Spawned(2), Options(rounds=(1, 2, 3), candidate_timeout_s=10)
    here, cache = survey(launcher, "cpu", None, 1), Cache(TUNE_CACHE.path())
    searches = [
        make_search(
            make_problem(name, 32, 12, 16, "float32", 2, sizes),
            load_space(file),
            here.cluster,
            here.placement,
            options,
        )
        for name, sizes in SIZES.items()
    ]
    assert [len(search.candidates) for search in searches] == [5, 4]
    Tuner(searches, launcher, here, cache, None, options).run()
    for search in searches:
        assert search.winner is not None and not search.excluded
        assert search.winner.ms <= median_ms(search.samples["default"])
    keys = [entry.key for entry in cache.entries() if entry.key.n == 12]
    assert {key.variant for key in keys} == {"e4t2p2", "h4d4"}
    run_ranks(2, _looked_up)
    for key in keys:
        cache.remove(key)


def test_times_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flux tune` said 256 ms of an op that takes 128: it had timed two routings."""
    monkeypatch.setattr(worker.dist, "all_reduce", lambda *_, **__: None)
    one = worker._Worker.__new__(worker._Worker)
    one._rank, one._deadline, one._numbers = 0, inf, {"default": 0}
    for skews in ((0.0,), SKEWS):
        problem = make_problem("grouped_gemm_rs", 8, 8, 8, "float32", 2, {"experts": 4, "topk": 2})
        one._config = BenchConfig(problem=problem, skews=skews)
        times, over = one._slowest({"default": SimpleNamespace(wall_ms=12.0)})
        assert times == {"default": 12.0 / len(skews)} and not over


def test_keys_of_variants_differ_and_those_of_dense_ops_stay() -> None:
    sizes: list[tuple[str, dict[str, Any]]] = [("ag_gemm", {})]
    sizes += [("ag_grouped_gemm", {"topk": topk, "ep": ep}) for topk in (1, 2) for ep in (1, 2)]
    sizes += [("gemm_all_to_all", {"heads": h, "head_dim": 8}) for h in ((4,), (2, 2), (2, 1, 1))]
    keys = [
        Key.of(make_problem(name, 64, 32, 16, "float32", 2, of), "1x2", {}, "cpu")
        for name, of in sizes
    ]
    assert len({key.name for key in keys}) == len(keys)
    for key in keys:
        entry = Entry(key, {}, (Winner(64, Knobs(), 1.0),))
        assert Entry.from_dict(entry.as_dict()).key == key
        assert ("variant" in key.as_dict()) == bool(key.variant)
    pinned = replace(keys[0], kernels="cpu 1 r1", toolchain="torch 2.9")
    assert pinned.name == "ag_gemm_float32_n32_k16_1x2_3e296df26681"


@pytest.mark.parametrize("name", [*Op.__members__, *SPARSE])
def test_tuning_tries_what_the_model_chooses_between_hosts(name: str) -> None:
    cluster, space = between_hosts(), load_space("cpu")
    for world, m in product((2, 4), (16, 512, 4096)):
        problem = replace(make_problem(name, m, 1024, 1024, "float32", world), nodes=2)
        kept, _ = candidates(space, problem, Topology(2, 1, world // 2), cluster)
        assert ("one_shot" in {way.knobs.path for way in kept}) == ("all_to_all" not in name)
        if "all_to_all" in name:
            continue
        choice = modelled(problem, cluster, True, problem.name in DISPATCHING).knobs(m)
        full = resolve(problem.scheduled, choice)
        assert full in [resolve(problem.scheduled, way.knobs) for way in kept], (world, m)


def test_a_winner_of_path_one_shot_keeps_its_sizes() -> None:
    """Only its path was stored: an op of a winner with one GEMM cut it into rounds."""
    problem = replace(make_problem("grouped_gemm_ar", 512, 1024, 1024, "float32", 2), nodes=2)
    kept, _ = candidates(load_space("cpu"), problem, Topology(2, 1, 1), between_hosts())
    stored: list[Entry] = []
    one = Tuner.__new__(Tuner)
    one._machine = SimpleNamespace(shape="2x1", parts={}, backend="cpu")  # type: ignore[assignment]
    one._cache = SimpleNamespace(store=stored.append)  # type: ignore[assignment]
    for name in ("one_gemm", "columns=256"):
        best = SimpleNamespace(best=lambda name=name: name, ms=lambda name: 1.0, winner=None)
        best.candidates, best.problem, best.samples = kept, problem, {name: [(1.0, 1.0)]}
        one._crown(best, settled=False)  # type: ignore[arg-type]
        (winner,) = stored.pop().winners
        (candidate,) = (way for way in kept if way.name == name)
        assert winner.knobs == candidate.knobs and winner.knobs.tile is not None


def test_pushed_rows_are_rated_by_their_bytes_not_by_copies() -> None:
    """Kernels push rows and store partials: a tile starts no copy, and no stream raises a word."""
    cluster = load_cluster("flux-h800")
    for name in DISPATCHING:
        for m in (64, 1024, 8192):
            problem = make_problem(name, m, 4096, 4096, "bfloat16", 8)
            assert isinstance(problem, SparseProblem)
            unfused, fused, fine = (
                sum(predict_sparse(problem, cluster, knobs))
                for knobs in (Knobs(path="unfused"), dispatching(problem), Knobs(comm_tile_rows=8))
            )
            assert fused < unfused and fine < 1.5 * fused, (name, m, fused, unfused, fine)


def test_the_share_of_tokens_that_a_rank_needs() -> None:
    for experts, topk, ep in ((8, 2, 8), (6, 3, 2), (5, 1, 5), (4, 4, 2)):
        sizes = {"experts": experts, "topk": topk, "ep": ep}
        problem = make_problem("dispatch_grouped_gemm", 64, 64, 64, "bfloat16", ep, sizes)
        assert isinstance(problem, SparseProblem)
        chosen = list(combinations(range(experts), topk))
        needed = sum(min(of_token) < experts // ep for of_token in chosen)
        assert needed_share(problem) == pytest.approx(needed / len(chosen))


def test_tokens_go_to_other_nodes_by_the_path_that_sends_fewer() -> None:
    """Fused, a token crosses to each other node once; unfused, once for each rank that needs it."""
    cluster = load_cluster("flux-h800")
    for topk, path in ((1, "unfused"), (8, "fused")):
        sizes = {"experts": 64, "topk": topk, "ep": 16}
        problem = make_problem("dispatch_grouped_gemm", 8192, 4096, 4096, "bfloat16", 16, sizes, 2)
        assert isinstance(problem, SparseProblem)
        chosen = Modelled(problem, cluster, (Knobs(), Knobs(path="unfused")))
        assert chosen.knobs(8192) == Knobs(path=path)


def test_heads_of_several_nodes_take_the_faster_path() -> None:
    cluster = load_cluster("flux-h800")
    for name in ("gemm_all_to_all", "all_to_all_gemm"):
        problem = make_problem(name, 16384, 4096, 4096, "bfloat16", 16, nodes=2)
        assert isinstance(problem, SparseProblem)
        kept, _ = candidates(load_space("sm90a"), problem, Topology(2, 1, 8), cluster)
        times = {c.name: c.predicted_ms for c in kept}
        slow = replace(cluster, network=replace(cluster.network, gbits=cluster.network.gbits / 8))
        assert predicted_ms(problem, slow, "fused") > times["default"]
        path = "fused" if times["default"] < times["unfused"] else "unfused"
        assert ModelledPath(problem, cluster).knobs(problem.m).path == path


def test_winners_of_dispatch_between_nodes_can_be_built() -> None:
    """Copies of other nodes' rows have any order there: that of dense ops is the default."""
    sizes = {"experts": 64, "topk": 8, "ep": 8}
    problem = make_problem("dispatch_grouped_gemm", 8192, 4096, 4096, "bfloat16", 8, sizes, 2)
    assert isinstance(problem, SparseProblem)
    space, cluster = load_space("sm90a"), load_cluster("flux-h800")
    kept, _ = candidates(space, problem, Topology(2, 1, 4), cluster)
    assert kept[1].knobs.order == "hierarchical" and len(kept) > 2
    assert all(problem.spec().reason_not_on_gpus(c.knobs, 2) is None for c in kept)
    assert problem.spec().reason_not_on_gpus(kept[1].knobs, 1) is not None


def between_hosts(gflops: float = 78.0) -> Cluster:
    """Return hosts whose ranks have a core each, joined by 1 Gbit/s."""
    cpu = detect("cpu")
    device = replace(cpu.device, units=1, tflops={"float32": gflops * 1e-3})
    return replace(cpu, device=device, network=NetworkSpec("ethernet", 1, 1.0, 50.0))


def chosen(name: str, m: int, world: int, cluster: Cluster) -> Knobs:
    """Return the choice of an op with 8 experts, 2 of a token, on two hosts; N = K = 1024."""
    sizes = {"experts": 8, "topk": 2}
    problem = make_problem(name, m, 1024, 1024, "float32", world, sizes, nodes=2)
    return modelled(on_cpus(problem), cluster, True).knobs(m)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("m", "k"), [(1024, 1024), (2048, 1024), (1024, 2048)])
def test_slabs_of_tokens_pack_the_weights_of_all_experts(m: int, k: int, world: int) -> None:
    """Two hosts, 8 experts, 2 of a token.

    Measured with ranks that share memory, M and K 1024: fused 42 ms, one_shot 58; M 2048: 71 and
    98. One rank per host, K 2048: 56 and 46.
    """
    cluster = between_hosts(166.0)
    sizes = {"experts": 8, "topk": 2}
    n = 1024 * 1024 // k
    problem = make_problem("ag_grouped_gemm", m, n, k, "float32", world, sizes, nodes=2)
    dense = on_cpus(problem)
    path = modelled(dense, cluster, True).knobs(m).path
    assert path == ("fused" if world == 4 else "one_shot")
    in_rounds = Knobs(path="one_shot")
    of_one_weight = predict(problem.dense, cluster, in_rounds).exposed_ms
    assert predict(dense, cluster, in_rounds).exposed_ms > of_one_weight


def test_an_all_reduce_between_hosts_has_as_many_blocks_as_its_cuts_are_worth() -> None:
    """Blocks of columns do not pack the weights of all experts again.

    Measured of the unfused path, one rank per host: M 16 in 2 blocks 0.72, 8 0.82; M 512 in 4
    0.61, 8 0.56, 4 slabs of rows 0.69; M 2048 in 4 0.70, 8 0.65, 4 slabs 0.71. Two ranks per host,
    beside whose multiply a slot is on the wire: M 4096 in 8 blocks, of two slots, 0.66, 16 0.58.
    """
    for m, blocks in ((16, 2), (512, 8), (2048, 8)):
        knobs = chosen("grouped_gemm_ar", m, 2, between_hosts())
        assert knobs.path == "one_shot" and knobs.tile is not None and knobs.tile[0] >= m
        assert abs(ceil_div(1024, knobs.tile[1]) - blocks) <= 1
    knobs = chosen("grouped_gemm_ar", 4096, 4, between_hosts().crowded(2.0))
    assert knobs.tile is not None and 4096 * knobs.tile[1] * 4 <= SLOT_BYTES


def test_partials_of_experts_leave_by_hosts() -> None:
    """With few rows: with many, the first of two slabs leaves late.

    Measured, two ranks per host: M 512 two slabs 0.65, four 0.81, on a Zen 5 0.56 and 0.58; M 2048
    0.45 and 0.40 there.
    """
    for m, tile in ((512, (256, 1024)), (2048, None)):
        knobs = chosen("grouped_gemm_rs", m, 4, between_hosts())
        assert (knobs.path, knobs.tile) == ("fused", tile)
    assert chosen("grouped_gemm_rs", 1024, 2, between_hosts()).tile is None  # one rank per host


def test_rows_that_sockets_do_not_hold_wait_for_a_thread() -> None:
    """Measured, one rank per host: M 4096 whole chunks 0.67, one round 0.73; M 1024 0.71, 0.72."""
    for m, path in ((1024, "one_shot"), (4096, "fused")):
        assert chosen("ag_grouped_gemm", m, 2, between_hosts()).path == path


def test_rows_that_come_last_are_multiplied_behind_all() -> None:
    """Measured on a Zen 5, chunks of 1024 rows: tiles of 768 and 256 rows 53 ms, of 1024 59 ms."""
    problem = on_cpus(make_problem("ag_grouped_gemm", 2048, 1024, 1024, "float32", 2, nodes=2))
    fewer, half, whole = (
        predict(problem, between_hosts(166.0), Knobs(tile=(256, 512), comm_tile_rows=rows))
        for rows in (768, 512, 1024)
    )
    assert fewer.exposed_ms < half.exposed_ms < whole.exposed_ms


def test_ranks_that_share_cores_cut_less() -> None:
    """Measured, two hosts of two ranks on two cores, AllReduce: M 64 in 4 blocks 0.54, 8 0.59."""
    assert threads_per_core([("a", {0, 1}, 1), ("b", {0}, 1), ("a", {1}, 1)]) == 1.0
    assert threads_per_core([("a", {0, 1}, 1)] * 4 + [("b", {0, 1, 2}, 4)]) == 2.0
    alone, crowded = between_hosts(), between_hosts().crowded(2.0)
    problem = Problem(Op.gemm_ar, 512, 1024, 1024, "float32", 4, 2)
    assert network_cpu_ms(problem, crowded) == 2 * network_cpu_ms(problem, alone)
    tiles = [chosen("grouped_gemm_ar", 64, 4, cluster).tile for cluster in (alone, crowded)]
    assert tiles[0] is not None and tiles[1] is not None and tiles[0][1] < tiles[1][1]


@pytest.mark.parametrize("name", DISPATCHING)
@pytest.mark.parametrize("path", ["fused", "unfused"])
def test_hosts_exchange_the_tokens_that_they_need(name: str, path: str) -> None:
    """Of 64 experts on 4 ranks of 2 hosts: 1 of a token is on the other host for half of them.

    The library sends a token to each rank that needs it, a fused op once to the host.
    """
    cluster, ms = between_hosts(1e4), {}
    for topk in (1, 2):
        sizes = {"experts": 64, "topk": topk, "ep": 4}
        problem = make_problem(name, 4096, 4096, 256, "float32", 4, sizes, nodes=2)
        assert isinstance(problem, SparseProblem)
        knobs = Knobs(path=path, direction="push", comm_tile_rows=1024)
        ms[topk] = predict_sparse(problem, cluster, knobs).exposed_ms
        assert needed_share(problem, 2) == pytest.approx(1 - 0.5**topk, abs=0.01)
        assert on_cpus(problem).row_bytes == pytest.approx(
            problem.row_bytes * needed_share(problem, 2)
        )
    needed = {"fused": (1 - 0.5**2) / 0.5, "unfused": (1 - 0.75**2) / 0.25}[path]
    assert ms[2] / ms[1] == pytest.approx(needed, rel=0.1)


def test_products_between_hosts_are_as_fast_as_those_of_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = between_hosts()
    monkeypatch.setattr(choose, "product_tflops", lambda dtype, threads: 0.5)
    ranks = SimpleNamespace(all_gather=lambda own: [own, 0.02])
    for dtype in ("float32", "float8_e4m3fn", "bfloat16"):
        host = choose.with_measured_speeds(cluster, ranks, None, dtype)  # type: ignore[arg-type]
        problem = Problem(Op.gemm_rs, 1024, 1024, 1024, dtype, 2, 2)
        assert gemm_ms(problem, host) == pytest.approx(2 * 1024 * 1024 * 512 / 0.02e9, rel=1e-6)
        assert host.network == cluster.network


def test_a_measured_product_is_none_of_the_callers() -> None:
    product_tflops.cache_clear()
    with FlopCounterMode(display=False) as counted, torch.autocast("cpu"), torch.device("meta"):
        assert 1e-3 < product_tflops(torch.float32, torch.get_num_threads()) < 1e2
    assert counted.get_total_flops() == 0
