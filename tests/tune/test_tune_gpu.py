"""`flux tune --backend cuda` on emulated GPUs: a process for each rank, the whole course, and ops
that then run the winner. On real GPUs: benchmarks/gpu_check.sh."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tune_gpus
from flux.bench.config import BenchConfig
from flux.bench.places import gpu, open_place
from flux.bench.sparse import FusedSparse
from flux.cli.app import app
from flux.core.knobs import Knobs
from flux.core.sparse_problem import make_problem
from flux.launch.supervisors import Launcher, Spawned
from flux.machine.cluster import load_cluster
from flux.machine.detection import detect
from flux.select import choose as choice
from flux.select import winners
from flux.select.cache import Cache
from flux.select.space import Candidate, load_space
from flux.select.winners import Winner
from flux.transport.placement import RankPlace
from flux.tune import kernels, machine
from flux.tune.journal import Journal, run_id
from flux.tune.tuner import Options, Search, Tuner, describe, make_search
from harness import more, run_ranks, stress_only
from reference import FP8, Inputs, Problem
from scripts import SUPPORT, run_script

M, N, K = 32, 16, 32
SPACE = """
backend = "cuda"
arch = "90a"
prune_above = 1000
[ag_gemm]
comm_tile_rows = ["chunk"]
direction = ["push"]
[gemm_rs]
comm_tile_rows = ["chunk"]
[gemm_ar]
comm_tile_rows = ["chunk"]
[kernel]
tile = [[64, 64, 64]]
schedule = ["pingpong"]
stages = [2, 3, 4, 5]
"""
# Of flux's own kernels on the PTX machine, one of two is built.
SPARSE_SPACE = """
backend = "cuda"
arch = "80"
prune_above = 1000
[ag_gemm]
comm_tile_rows = [8]
[gemm_rs]
swizzle = ["xor"]
[gemm_ar]
swizzle = ["xor"]
[all_to_all_gemm]
comm_tile_rows = [8]
[kernel]
tile = [[128, 128, 32]]
warps = [[2, 2]]
schedule = ["multistage"]
stages = [4, 5]
alignment = [8]
"""


# Of float8 on sm_90a the depth of a tile is 128.
FLOAT8_SPACE = """
backend = "cuda"
arch = "90a"
prune_above = 1000
[ag_gemm]
comm_tile_rows = [8]
direction = ["push"]
[gemm_rs]
swizzle = ["xor"]
[gemm_ar]
swizzle = ["xor"]
[kernel]
tile = [[64, 128, 64]]
schedule = ["pingpong"]
stages = [0, 5]
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as supervisors can see; all kernels are built."""
    tune_gpus.pretend(monkeypatch.setattr)


def start(
    folder: Path,
    make: Any,
    op: str = "ag_gemm",
    launcher: Launcher | None = None,
    sizes: tuple[int, int] = (N, K),
    scaling: str = "none",
    **options: Any,
) -> tuple[Search, Cache, Tuner]:
    """Return a search that has not started; ``sizes``: N and K. With scaling of float8."""
    file = folder / "space.toml"
    if not file.exists():
        file.write_text(SPACE)
    launcher = launcher or Spawned(2)
    surveyed = machine.survey(launcher, "cuda", None, 1)
    chosen = Options(**{"rounds": (2, 3), "candidate_timeout_s": 10, "make": make, **options})
    dtype = "bfloat16" if scaling == "none" else "float8_e4m3fn"
    problem = make_problem(op, M, *sizes, dtype, 2, {"scaling": scaling})
    search = make_search(problem, load_space(file), surveyed.cluster, surveyed.placement, chosen)
    cache = Cache(folder / "cache")
    what = describe([search], surveyed, chosen)
    journal = Journal(folder / "runs", run_id(what), what) if launcher.leads else None
    return search, cache, Tuner([search], launcher, surveyed, cache, journal, chosen)


def tune(folder: Path, make: Any, op: str = "ag_gemm", **options: Any) -> tuple[Search, Cache]:
    search, cache, tuner_of_it = start(folder, make, op, **options)
    tuner_of_it.run()
    assert not torch.cuda.is_initialized()
    return search, cache


def stages_of(search: Search, name: str) -> int:
    candidate = next(one for one in search.candidates if one.name == name)
    return 0 if candidate.kernel is None else candidate.kernel.stages


def excluded(search: Search) -> dict[int, set[str]]:
    """Reasons by the stages of the kernel; of the fixed candidates none may be excluded, but for
    that of a switch, which the described cluster has and emulated devices have not."""
    reasons: dict[int, set[str]] = {}
    for name, reason in search.excluded.items():
        if name == "in_kernel_by_switch":
            assert "needs an NVLink switch" in reason and "ranks are behind none" in reason
            continue
        assert name not in ("unfused", "medium", "default"), reason
        reasons.setdefault(stages_of(search, name), set()).add(reason)
    return reasons


def _as_tuned(
    rank: int, world: int, library: Path, cache: str, op: str, scaling: str
) -> tuple[list[Any], dict[str, Any]]:
    device = tune_gpus.open_gpu(library)
    choice._detected = lambda kind: load_cluster("flux-h800")  # type: ignore[assignment]
    os.environ["FLUX_TUNE_CACHE"] = cache
    dtype = torch.bfloat16 if scaling == "none" else FP8
    p = Problem(op, M, (N,), K, dtype, scaling=scaling)
    with p.build(backend="cuda", tuning="cache") as made:
        Inputs(p, M, world, 7).call_and_check(made, rank)
        result = made._backend.configs, asdict(made.schedule(M).knobs)
    device.close()
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("op", "scaling"),
    [
        ("gemm_rs", "none"),
        ("ag_gemm", "row"),
        *more(("ag_gemm", "none"), ("gemm_ar", "none"), ("gemm_rs", "tensor"), ("gemm_ar", "row")),
    ],
)
def test_an_op_runs_the_tuned_winner(
    here: None, emulator: Path, tmp_path: Path, op: str, scaling: str
) -> None:
    search, cache = tune(tmp_path, tune_gpus.Maker(emulator), op, scaling=scaling)
    winner = search.winner
    assert winner is not None and search.settled, search.problem_text
    assert winner.kernel == tune_gpus.config_of(op, 4, scaling)
    assert winner.ms < (winner.unfused_ms or 0) and winner.medium_ms
    reasons = excluded(search)
    assert set(reasons) == {tune_gpus.MISSING}
    assert all("refused: on rank 0 its kernel cannot run, and flux_" in r for r in reasons[5])
    (entry,) = cache.entries()
    assert entry.key.variant == ("" if scaling == "none" else scaling)
    assert entry.key.world == "1x2" and entry.machine["device"]["kind"] == "cuda"
    arguments = (emulator, str(cache.root), op, scaling)
    results = run_ranks(2, _as_tuned, *arguments, timeout=120.0, fresh=True)
    for configs, knobs in results:
        assert configs == [winner.kernel]
        for name, value in asdict(winner.knobs).items():
            assert value is None or knobs[name] == value, name


def sparse_sizes(op: str) -> tuple[int, int]:
    """Return N and K: two heads of 64, where there are some."""
    return (128, 64) if op == "gemm_all_to_all" else (64, 128)


def _as_tuned_sparse(
    rank: int, world: int, make: tune_gpus.Maker, cache: str, op: str, scaling: str = "none"
) -> tuple[list[Any], Knobs, bool]:
    choice._detected = lambda kind: load_cluster("flux-h800")  # type: ignore[assignment]
    os.environ["FLUX_TUNE_CACHE"] = cache
    dtype = "bfloat16" if scaling == "none" else "float8_e4m3fn"
    problem = make_problem(op, M, *sparse_sizes(op), dtype, world, {"scaling": scaling})
    config = BenchConfig(problem=problem, backend="cuda", skews=(0.0, 1.0))
    place = open_place(config, rank)
    inputs = place.inputs(3)
    method = FusedSparse("tuned", config, None)
    judged = place.judge(method, method(inputs), place.reference(inputs))
    tuned, chosen = method.op._choice, method.op._backend.configs
    method.close()
    others = {"topk": 1} if problem.topk > 1 else {"heads": (4,), "head_dim": 32}
    other = FusedSparse("other", replace(config, problem=replace(problem, **others)), None)
    untuned = isinstance(tuned, choice.Tuned) and not isinstance(other.op._choice, choice.Tuned)
    other.close()
    return chosen, tuned.knobs(M), untuned and judged.ok


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "op",
    [
        "grouped_gemm_rs",
        *more("ag_grouped_gemm", "grouped_gemm_ar", "grouped_gemm_combine", "gemm_all_to_all"),
        *more("dispatch_grouped_gemm", "all_to_all_gemm"),
    ],
)
def test_ops_of_experts_and_heads_run_their_winners(
    here: None, emulator: Path, ptx_kernels: Path, tmp_path: Path, op: str
) -> None:
    """By the size of the mixture, or of heads; on flux's kernels."""
    (tmp_path / "space.toml").write_text(SPARSE_SPACE)
    make = tune_gpus.Maker(emulator, of_flux=ptx_kernels, others_ms=1500.0)
    search, cache = tune(tmp_path, make, op, sizes=sparse_sizes(op), rounds=(1, 2))
    winner = search.winner
    assert winner is not None and winner.kernel is not None, search.problem_text
    assert winner.kernel.stages == 4 and winner.ms < search.samples["default"][0][0]
    ((stages, (reason,)),) = excluded(search).items()
    assert stages == tune_gpus.MISSING and "its kernel cannot run" in reason
    ranks = (2, _as_tuned_sparse, make, str(cache.root), op)
    for configs, knobs, right in run_ranks(*ranks, timeout=120.0, fresh=True):
        assert right and configs == [winner.kernel] and knobs == winner.knobs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("op", ["ag_grouped_gemm", *more("grouped_gemm_rs", "grouped_gemm_ar")])
def test_float8_ops_of_experts_run_their_winners(
    here: None, emulator: Path, float8_expert_kernels: Path, tmp_path: Path, op: str
) -> None:
    """On flux's kernels, by the size of the mixture."""
    (tmp_path / "space.toml").write_text(FLOAT8_SPACE)
    of_flux = {"of_flux": float8_expert_kernels, "arch": "90a"}
    make = tune_gpus.Maker(emulator, nap_ms=((0, 0.0),), others_ms=1500.0, **of_flux)  # type: ignore[arg-type]
    search, cache = tune(tmp_path, make, op, sizes=sparse_sizes(op), rounds=(1, 2), scaling="row")
    winner = search.winner
    assert winner is not None and winner.kernel is not None, search.problem_text
    assert (winner.kernel.scaling, winner.kernel.promoted) == ("row", True)
    assert winner.ms < search.samples["default"][0][0]
    assert all("its kernel cannot run" in text for text in search.excluded.values())
    ranks = (2, _as_tuned_sparse, make, str(cache.root), op, "row")
    for configs, knobs, right in run_ranks(*ranks, timeout=120.0, fresh=True):
        assert right and configs == [winner.kernel] and knobs == winner.knobs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs", "PeerTimeoutError"),
        ("faults", "rank 1: RuntimeError: CUDA error: an illegal memory access"),
        *more(("wrong", "wrong result: 1 of"), ("stale", "elements are wrong")),
        *more(("dies", "rank 1: killed by SIGSEGV")),
    ],
)
def test_bad_candidates_are_excluded_with_the_reason(
    here: None, emulator: Path, tmp_path: Path, fault: str, words: str
) -> None:
    make = tune_gpus.Maker(emulator, fault)
    # Of an AllGather, streams wait for what never comes, and unlike kernels they cannot give up.
    op, timeout_s = ("ag_gemm", 1) if fault == "hangs" else ("gemm_rs", 10)
    search, _ = tune(tmp_path, make, op, candidate_timeout_s=timeout_s)
    assert search.winner is not None and search.winner.kernel == tune_gpus.config_of(op, 4)
    reasons = excluded(search)
    assert set(reasons) == {3, tune_gpus.MISSING}
    for reason in reasons[3]:
        assert words in reason
        assert ("its ranks failed" in reason) == (fault in ("hangs", "faults", "dies"))


@pytest.mark.timeout(300)
def test_under_torchrun_each_rank_supervises_a_gpu(emulator: Path, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    script = tmp_path / "tune_under_torchrun.py"
    script.write_text(
        f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), *SUPPORT]!r}
from pathlib import Path
import test_tune_gpu, tune_gpus
from flux.launch.supervisors import Joined

if __name__ == "__main__":
    tune_gpus.pretend(setattr)
    launcher = Joined()
    make = tune_gpus.Maker(Path({str(emulator)!r}), "dies")
    folder = Path({str(tmp_path)!r})
    search, _, tuner = test_tune_gpu.start(folder, make, "gemm_rs", launcher)
    tuner.run()
    if launcher.leads:
        print("winner", search.winner.kernel.stages, test_tune_gpu.excluded(search)[3])
    launcher.close()
    sys.stdout.flush()
    os._exit(0)  # the job has brought the emulation here, too, whose threads would be waited for
"""
    )
    output = run_script(script, ranks=2)
    assert "winner 4 {" in output and "its ranks failed: rank 1: killed by SIGSEGV" in output


@stress_only
@pytest.mark.timeout(300)
def test_candidates_share_what_memory_is_free(here: None, emulator: Path, tmp_path: Path) -> None:
    """With room for the anchor, one, and one that is checked beside them: a fourth would fail."""
    search, _ = tune(tmp_path, tune_gpus.Counting(emulator))
    assert search.winner is not None and set(excluded(search)) == {tune_gpus.MISSING}
    assert len(search.candidates) > 4  # more than there is room for


@stress_only
@pytest.mark.timeout(300)
def test_no_candidate_is_excluded_for_memory_that_others_hold(
    here: None, emulator: Path, tmp_path: Path
) -> None:
    search, _ = tune(tmp_path, tune_gpus.Greedy(emulator))
    assert search.winner is not None and set(excluded(search)) == {tune_gpus.MISSING}


def test_kernels_that_do_not_compile_are_no_candidates(
    here: None, emulator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tune_gpus.config_of("gemm_rs", tune_gpus.MISSING).name
    tune_gpus.pretend(monkeypatch.setattr, [bad])
    search, _ = tune(tmp_path, tune_gpus.Maker(emulator), "gemm_rs")
    assert excluded(search) == {tune_gpus.MISSING: {"does not compile: nvcc failed"}}


def test_winners_are_of_the_kernels_that_the_run_has_built(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run goes by the same name whether they are built or not."""
    built: list[Any] = []
    registry = SimpleNamespace(load=lambda: SimpleNamespace(libraries=tuple(built)))
    monkeypatch.setattr("flux.kernels.registry.Registry", registry)
    winners.versions.cache_clear()

    def build(configs: Any, root: Path) -> dict[str, str]:
        built.append(SimpleNamespace(nvcc="13.0.88", cutlass="4.2.0.0"))
        return {}

    try:
        monkeypatch.setattr(kernels, "build_kernels", build)
        _, cache, first = start(tmp_path, None)
        monkeypatch.setattr(first, "_run", lambda search, job: _measured(search))
        first.run()
        (entry,) = cache.entries()
        assert entry.key.toolchain == "cutlass 4.2.0.0, nvcc 13.0" == winners.versions("cuda")[1]
        _, _, again = start(tmp_path, None)
        assert again._journal is not None and first._journal is not None
        assert again._journal.path == first._journal.path
        again._journal.close()
    finally:
        winners.versions.cache_clear()


def _measured(search: Search) -> str:
    for candidate in search.candidates:
        search.samples[candidate.name] = [(1.0, 1.0)] * search.halving.rounds[-1]
    return ""


def test_kernels_that_reduce_in_flight_are_built_in_both_forms() -> None:
    config = tune_gpus.config_of("gemm_rs", 2)
    plain = Candidate("a", Knobs(reduce="local"), config)
    assert kernels.needed(plain) == [config]
    assert kernels.needed(Candidate("b", Knobs(path="unfused"))) == []
    in_flight = kernels.needed(Candidate("c", Knobs(reduce="in_flight"), config))
    assert [one.reduce for one in in_flight] == ["local", "in_flight"]


# -- choice of backend and machine -----------------------------------------------------------------


def test_backend_is_chosen_from_options_and_available_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there, usual in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert machine.resolve_backend(None, None, None) == usual
        assert machine.resolve_backend(None, "send_recv", None) == usual
        assert machine.resolve_backend(None, "shm", None) == "cpu"
        assert machine.resolve_backend(None, "nvshmem", None) == "cuda"
        assert machine.resolve_backend(None, None, "cuda") == "cuda"
        assert machine.resolve_backend("cpu", None, None) == "cpu"


def test_ranks_without_p2p_are_nodes_to_the_tuner_as_they_are_to_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = load_cluster("flux-a100-pcie")
    reaches = ({"a": True, "b": False}, {"a": False, "b": True})
    places = [
        RankPlace("here", name, surveyed) for name, surveyed in zip("ab", reaches, strict=True)
    ]
    monkeypatch.setattr(machine, "look", lambda *_: [(cluster, place) for place in places])
    monkeypatch.setattr(gpu, "gpus_here", lambda: (2, None))
    surveyed = machine.survey(Spawned(2), "cuda", None, 1)
    assert (surveyed.shape, surveyed.backend) == ("2x1", "cuda")
    assert machine.survey(Spawned(2), "cuda", "symm_mem", 1).shape == "1x2"


def test_cpu_ranks_are_one_host_unless_they_use_send_recv(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.survey(Spawned(2), "cpu", None, 1).shape == "1x2"
    assert machine.survey(Spawned(2), "cpu", "send_recv", 1).shape == "2x1"
    parts = machine.survey(Spawned(2), "cpu", None, 1).parts
    assert parts == detect("cpu", 1).parts("1x2")


def test_each_rank_has_the_gpu_that_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [gpu.gpu_of(rank) for rank in (0, 3)] == [0, 3], "left over from something else"
    monkeypatch.setenv("RANK", "3")
    assert gpu.gpu_of(3) == 1


def test_gpus_are_queried_by_another_process() -> None:
    if torch.cuda.is_available():
        (sight,) = machine.look("cuda", [0], 1)
        assert sight[0].device.kind == "cuda"
    else:
        with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):
            machine.look("cuda", [0], 1)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--backend", "tpu"), "--backend must be cpu or cuda"),
        (("--transport", "virtual"), "puts all ranks on one GPU, for which there are no winners"),
        (("--transport", "loopback"), "ops run the heuristic's knobs there"),
        (("--backend", "cpu", "--transport", "symm_mem"), "has the transports shm, send_recv"),
        (("--backend", "cuda", "--nproc", "1"), "there is nothing to tune on one GPU"),
        (("--backend", "cuda", "--nproc", "4"), "4 ranks need a GPU each, and torch sees 1"),
        (("--nproc", "4"), "--backend cpu tunes ranks on the CPU"),
        (("--backend", "cuda", "--dtype", "fp32", "--nproc", "2"), "no kernels for float32"),
    ],
)
def test_untunable_problems_are_errors_of_one_line(
    arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = 2 if "fp32" in arguments else 1
    sight = (load_cluster("flux-h800"), RankPlace("here"))
    monkeypatch.setattr(machine, "look", lambda backend, gpus, threads: [sight] * len(gpus))
    monkeypatch.setattr(gpu, "gpus_here", lambda: (gpus, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shape = ["--op", "ag_gemm", "--m", "8", "--n", "16", "--k", "16"]
    result = CliRunner().invoke(app, ["tune", *shape, *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert text in line


def test_without_a_gpu_the_cpu_is_tuned_unless_gpus_are_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    shape = ["--op", "ag_gemm", "--m", "8", "--n", "16", "--k", "16"]
    result = CliRunner().invoke(app, ["tune", *shape, "--backend", "cuda"])
    assert result.exit_code == 2
    assert "needs a CUDA device that torch can see" in result.stderr
    shown = CliRunner().invoke(app, ["tune", *shape, "--explain"])
    assert shown.exit_code == 0 and "on 2 ranks, this host" in shown.stdout


def test_winner_of_a_gpu_goes_through_json() -> None:
    winner = Winner(8, Knobs(direction="push"), 1.0, kernel=tune_gpus.config_of("ag_gemm", 4))
    assert Winner.from_dict(winner.as_dict()) == winner
