"""`flux simulate`: predict one op on hardware that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.ranks import check_writable
from flux.cli.terminal import command_line, open_console, refuse, writing

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.core.problem import Problem
    from flux.machine.cluster import Cluster
    from flux.opsim.report import OrderComparison

simulate = typer.Typer(
    help="Predict one op on hardware that is not here, in virtual time.", no_args_is_help=True
)


@simulate.callback()
def _root() -> None:
    """Keep `op` a subcommand while it is the only one."""


@simulate.command("op")
def simulate_op(
    op: options.Op = "ag_gemm",
    m: options.M = 4096,
    n: options.N = 49152,
    k: options.K = 12288,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a grouped GEMM.")] = 1,
    topk: Annotated[
        int, typer.Option(min=1, help="Experts of a token: M tokens become M * topk rows.")
    ] = 1,
    ep: Annotated[
        int | None,
        typer.Option(help="Parts of the experts, of a dispatch (default: the ranks)."),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads of each packed tensor: 32/8/8.")] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a dispatch's routing.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Data type of x and the weight; the cluster file has its peak.")
    ] = "bfloat16",
    nproc: Annotated[int, typer.Option(help="Number of ranks.")] = 8,
    hosts: Annotated[
        int | None,
        typer.Option(help="Number of hosts, filled evenly (default: as few as hold the ranks)."),
    ] = None,
    cluster: options.ClusterName = "flux-h800",
    gemm_ms: Annotated[
        float | None,
        typer.Option(help="Measured time of a rank's whole GEMM in ms, instead of the roofline's."),
    ] = None,
    path: options.PathKnob = None,
    order: options.Order = None,
    direction: options.Direction = None,
    comm_tile_rows: options.CommTileRows = None,
    swizzle: options.Swizzle = None,
    tile_scheduler: Annotated[
        str | None, typer.Option(help="Knob tile_scheduler: static | dynamic.")
    ] = None,
    taken: Annotated[int, typer.Option(min=0, help="Multiprocessors that other kernels hold.")] = 0,
    trace: options.TraceFile = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Simulate unfused, medium, in_kernel and flux, the last with every order and direction.

    Runs the real tile schedule of every rank on the links of a cluster file. Needs no GPU, and
    starts no ranks. docs/use/simulator.md says what is modelled.
    """
    check_writable(trace, json_target)
    from flux.bench.config import dtype_name
    from flux.core.knobs import Knobs
    from flux.core.sparse_problem import simulated_problem
    from flux.machine.cluster import load_cluster
    from flux.opsim import report as op_report

    try:
        described = load_cluster(cluster)
        nodes = hosts if hosts is not None else -(-nproc // described.devices)
        of_op: dict[str, Any] = {"experts": experts, "topk": topk, "ep": ep, "head_dim": head_dim}
        of_op["heads"] = heads and options.sizes_of(f"heads={heads}")["heads"]
        problem = simulated_problem(op, m, n, k, dtype_name(dtype), nproc, of_op, max(nodes, 1))
        if hosts is not None and hosts < 1:
            raise ValueError(f"hosts must be at least 1, got {hosts}")
        if path in ("unfused", "in_kernel"):
            where = "always shown" if path == "unfused" else "shown where it exists"
            raise ValueError(f"--path {path}: that path is {where}; pass fused or medium")
        fixed = Knobs(
            path=path or "fused",
            order=order,
            direction=direction,
            comm_tile_rows=comm_tile_rows,
            swizzle=swizzle,
            tile_scheduler=tile_scheduler,
        )
        comparison = compared(problem, described, fixed, gemm_ms, taken, seed)
    except (ValueError, TypeError) as error:
        refuse(str(error))
    if trace is not None:
        _write_trace(comparison, trace)
    content = op_report.document(comparison, command_line())
    if not quiet and json_target != "-":
        op_report.show(comparison, open_console())
    if json_target is not None:
        from flux.bench.report import write_json

        with writing(json_target):
            write_json(content, json_target)


def compared(
    problem: Problem,
    cluster: Cluster,
    fixed: Knobs,
    gemm_ms: float | None = None,
    taken: int = 0,
    seed: int = 0,
) -> OrderComparison:
    """Return all methods, and flux with every order and direction that ``fixed`` leaves open.

    Of ``taken`` multiprocessors, which other kernels hold, the GEMMs of paths fused and in_kernel
    are told. ``seed``: of a routing.
    """
    from flux.core.knobs import Knobs
    from flux.core.sparse_problem import SparseProblem
    from flux.opsim import simulator as op_simulator
    from flux.opsim.report import OrderComparison
    from flux.select.heuristic import kernels_can_push

    given = gemm_ms is not None
    if isinstance(problem, SparseProblem):
        from flux.opsim.sparse import simulate_sparse

        if taken:
            raise ValueError(f"--taken of {problem.name} is not simulated, got {taken}")
        unfused, call = simulate_sparse(problem, cluster, fixed, gemm_ms=gemm_ms, seed=seed)
        calls = [(call, (str(call.knobs.order),))]
        return OrderComparison(cluster, unfused, None, calls, gemm_given=given)

    def run(knobs: Knobs, held: int = taken) -> op_simulator.Simulated:
        return op_simulator.simulate(problem, cluster, knobs, gemm_ms=gemm_ms, taken=held)

    legal = op_simulator.legal_knobs(problem, cluster, fixed)
    in_kernel = Knobs(path="in_kernel", tile_scheduler=fixed.tile_scheduler)
    dense = problem.experts == 1
    return OrderComparison(
        cluster=cluster,
        unfused=op_simulator.unfused(problem, cluster, gemm_ms),
        medium=run(Knobs(path="medium"), 0) if dense else None,
        flux=sorted(((run(k), orders) for k, orders in legal), key=lambda call: call[0].total_ms),
        gemm_given=given,
        in_kernel=run(in_kernel) if dense and kernels_can_push(problem) else None,
        taken=taken,
    )


def _write_trace(comparison: OrderComparison, target: str) -> None:
    from dataclasses import replace

    from flux.trace.chrome import write_chrome

    events = []
    for call in comparison.calls:
        for event in call.events():
            details = {**event.details, "method": call.method}
            events.append(replace(event, lane=f"{call.method}: {event.lane}", details=details))
    with writing(target):
        write_chrome(events, target, {"command": command_line(), "simulated": True})
