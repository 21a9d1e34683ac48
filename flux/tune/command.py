"""`flux tune`: find winners."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli.options import (
    OF_OP,
    FastAccum,
    Scaling,
    integers,
    parse_duration,
    scales_of,
    sizes_of,
)
from flux.cli.ranks import torchrun_or_own
from flux.cli.terminal import EXIT_FAILED, EXIT_INTERRUPTED, complain, open_console, refuse, say
from flux.tune import command_winners as winners_cli

if TYPE_CHECKING:
    from flux.core.problem import Problem
    from flux.launch.supervisors import Launcher
    from flux.machine.cluster import Cluster
    from flux.select.space import Space
    from flux.tune.machine import TuningMachine
    from flux.tune.rank import Ranked
    from flux.tune.tuner import Options, Search

tune = typer.Typer(
    help="Find the fastest knobs for shapes on this machine; list and share winners.",
    invoke_without_command=True,
)

tune.command("show")(winners_cli.show)
tune.command("export")(winners_cli.export)
tune.command("import")(winners_cli.import_winners)
tune.command("clear")(winners_cli.clear)


@tune.callback()
def tune_shapes(
    context: typer.Context,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File of shapes, or the name of one in tuning/shapes."),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(help="Op to tune instead of a file: ag_gemm | grouped_gemm_rs | ..."),
    ] = None,
    m: Annotated[
        str, typer.Option("--m", help="Rows M of the global problem; several with commas.")
    ] = "2048",
    n: Annotated[int, typer.Option("--n", help="Columns N of the global problem.")] = 4096,
    k: Annotated[int, typer.Option("--k", help="Depth K of the global problem.")] = 2048,
    of_op: Annotated[str | None, OF_OP] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens per sequence, instead of the model's; 1 is decoding.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Sequences per batch, instead of the model's; several with commas."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type instead of the file's.")] = None,
    scaling: Scaling = None,
    fast_accum: FastAccum = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks to start, the tensor-parallel size (default: the file's, or 2)."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time limit of the whole run, such as 90s, 10m or 2h."),
    ] = None,
    threads: Annotated[int, typer.Option(help="GEMM threads of each rank.")] = 1,
    candidate_timeout: Annotated[
        float, typer.Option(help="Seconds that one call of a candidate may take.")
    ] = 20.0,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Backend: cpu | cuda (default: that of --space, else cuda if torch sees a GPU)."
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="On cpu: shm | send_recv. On cuda: symm_mem | send_recv | nvshmem."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Cluster file for the cost model, instead of the detected hardware.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with the search space, instead of the shipped one."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="List candidates and pruned ones with reasons; run nothing."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard an interrupted run and start over.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Measure candidates for each shape, and store the winners.

    An interrupted run continues when it is started again with the same arguments. The exit status
    is 1 if a shape has no winner.

    Starts its own ranks, or joins torchrun's: torchrun --nproc-per-node 8 -m -- flux tune ...
    """
    if context.invoked_subcommand is not None:
        return
    from flux.bench.config import (
        check_memory,
        check_numbers,
        check_ranks,
        memory_of,
    )
    from flux.machine.cluster import load_cluster
    from flux.select.space import load_space
    from flux.tune.machine import resolve_backend
    from flux.tune.tuner import Options

    world = torchrun_or_own(nproc)
    if (shapes is None) == (op is None):
        refuse("say what to tune: either --shapes FILE or --op OP --m M --n N --k K")
    try:
        options = Options(
            threads=threads,
            budget_s=None if budget is None else parse_duration(budget),
            candidate_timeout_s=candidate_timeout,
            seed=seed,
            transport=transport,
        )
        check_numbers(options)
        search_space = None if space is None else load_space(space)
        described = None if cluster is None else load_cluster(cluster)
        of_space = None if search_space is None else search_space.backend
        if explain and described is not None and backend is None:
            backend = described.device.kind
        backend = resolve_backend(backend, transport, of_space)
        sizes = {"sequence": sequence, "batch": batch, "of_op": sizes_of(of_op)}
        sizes["scales"] = scales_of(scaling, fast_accum)
        default_dtype = dtype or ("bfloat16" if op is not None and backend == "cuda" else None)
        check_ranks(world or nproc or 1)
        problems = _problems(shapes, op, m, n, k, sizes, default_dtype, world or nproc)
        if explain:
            _explain(problems, described, search_space, backend, options, json_output=json_output)
            return
        if backend == "cpu":
            check_memory(max(map(memory_of, problems)))
    except (ValueError, TypeError) as error:
        refuse(str(error))
    _tune(
        problems,
        described,
        search_space,
        backend,
        options,
        joining=world is not None,
        fresh=fresh,
        json_output=json_output,
    )


def _problems(
    file: str | None,
    op: str | None,
    m: str,
    n: int,
    k: int,
    sizes: dict[str, Any],
    dtype: str | None,
    world: int | None,
) -> list[Problem]:
    """Return the problems to tune; raise ValueError if options contradict one another."""
    from flux.bench.config import dtype_name
    from flux.bench.shapes import load_shapes
    from flux.core.sparse_problem import make_problem

    wanted = None if dtype is None else dtype_name(dtype)
    if op is not None:
        if sizes["sequence"] or sizes["batch"]:
            raise ValueError("--sequence and --batch are for models: --shapes FILE")
        if "skew" in sizes["of_op"]:
            raise ValueError("tuning draws routings of a balanced and a skewed router: omit skew")
        shape, of_op = (n, k, wanted or "float32", world or 2), sizes["of_op"]
        of_op |= sizes["scales"]
        return [make_problem(op, rows, *shape, of_op) for rows in integers("--m", m)]
    if sizes["of_op"]:
        raise ValueError("--sizes is for one op: --op OP")
    batches = None if sizes["batch"] is None else integers("--batch", sizes["batch"])
    if sizes["sequence"] is not None and sizes["sequence"] < 1:
        raise ValueError(f"--sequence must be at least 1, got {sizes['sequence']}")
    assert file is not None
    shapes = load_shapes(file, sizes["sequence"], batches)
    return shapes.problems(world or shapes.tensor_parallel[0], wanted, sizes["scales"])


def _explain(
    problems: Sequence[Problem],
    described: Cluster | None,
    space: Space | None,
    backend: str,
    options: Options,
    *,
    json_output: bool,
) -> None:
    from flux.select.space import load_space, space_for
    from flux.transport.placement import Placement
    from flux.tune.machine import look
    from flux.tune.tuner import make_search

    try:
        assumed = described or look(backend, [0], options.threads)[0][0]
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"cannot query the {backend} device of this machine: {error}; pass --cluster"
        ) from error
    search_space = space or load_space(space_for(assumed))
    # This host is measured; only other hardware is simulated.
    simulates = described is not None and assumed.device.kind == "cuda"
    documents = []
    for problem in problems:
        # As on the described cluster: its hosts are filled one after the other.
        per_host = max(assumed.devices, 1) if assumed.device.kind == "cuda" else problem.world
        hosts = (str(rank // per_host) for rank in range(problem.world))
        search = make_search(problem, search_space, assumed, Placement(tuple(hosts)), options)
        kept = [
            (candidate.name, f"{candidate.predicted_ms:.4g} ms predicted")
            for candidate in search.candidates
        ]
        pruned = [(candidate.name, candidate.reason) for candidate in search.pruned]
        simulated, remark = _simulated(search, assumed, len(problems)) if simulates else ([], "")
        if json_output:
            documents.append(
                {
                    "shape": search.label,
                    "candidates": dict(kept),
                    "pruned": dict(pruned),
                    "simulated_ms": {
                        candidate.name: round(candidate.simulated_ms, 4) for candidate in simulated
                    },
                }
            )
            continue
        say(f"{search.label} on {problem.world} ranks, {assumed.name}:")
        for name, text in kept:
            say(f"  try   {name}: {text}")
        for name, text in pruned:
            say(f"  prune {name}: {text}")
        if remark:
            say(f"  {remark}")
        for candidate in simulated:
            say(
                f"  sim   {candidate.name}: {candidate.simulated_ms:.4g} ms simulated, "
                f"{candidate.predicted_ms:.4g} ms predicted"
            )
    if json_output:
        print(json.dumps(documents, indent=1))


def _simulated(search: Search, cluster: Cluster, shapes: int) -> tuple[list[Ranked], str]:
    """Return the simulated ranking of the best few candidates, and a sentence about it."""
    from flux.tune.rank import MOST_TILES, ranked

    if search.problem.op.exchanges:
        return [], "not simulated: the simulator has no all-to-all of heads"
    try:
        ranking = ranked(search.problem, cluster, search.candidates, MOST_TILES // shapes)
    except ValueError as error:
        return [], f"not simulated: {error}"
    names = {candidate.name for candidate in ranking}
    fused = sum(candidate.name not in ("unfused", "medium") for candidate in search.candidates)
    ran = len(names - {"unfused", "medium"})
    if ran == 0:
        return [], "not simulated: too many tiles for this many shapes; see flux simulate op"
    return ranking, (
        f"this hardware is not here, so the best {ran} of {fused} fused candidates are ranked by "
        "simulation, not measurement (docs/use/simulator.md):"
    )


def _tune(
    problems: Sequence[Problem],
    described: Cluster | None,
    space: Space | None,
    backend: str,
    options: Options,
    *,
    joining: bool,
    fresh: bool,
    json_output: bool,
) -> None:
    from filelock import Timeout

    from flux.core.env import TUNE_CACHE
    from flux.launch.supervisors import Joined, Spawned
    from flux.select.cache import Cache
    from flux.select.space import load_space, space_for
    from flux.tune.machine import survey
    from flux.tune.progress import observer
    from flux.tune.tuner import Tuner, make_search

    joined = Joined() if joining else None
    launcher: Launcher = joined or Spawned(problems[0].world)
    try:
        try:
            here = survey(launcher, backend, options.transport, options.threads)
            assumed = described or here.cluster
            search_space = space or load_space(space_for(here.cluster))
            searches = [
                make_search(problem, search_space, assumed, here.placement, options)
                for problem in problems
            ]
        except (ValueError, TypeError) as error:
            refuse(str(error))
        cache = Cache(TUNE_CACHE.path())
        # Shapes of one file may become equal once dtype and world are set.
        searches = list({search.label: search for search in searches}.values())
        with _journal(cache, searches, here, launcher, options, fresh=fresh) as journal:
            silent = json_output or not launcher.leads
            if journal is not None and journal.resumed and not silent:
                print("resuming an unfinished run")
            with observer(open_console(), silent=silent) as watching:
                Tuner(searches, launcher, here, cache, journal, options, watching).run()
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to resume")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (OSError, Timeout) as error:  # a full disk, or a lock that another process holds
        complain(f"cannot continue: {error}; run the same command again to resume")
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        if joined is not None:
            joined.close()
    if launcher.leads:
        _report(searches, cache, json_output=json_output)
    if launcher.leads and any(search.winner is None for search in searches):
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _journal(
    cache: Any,
    searches: Sequence[Search],
    here: TuningMachine,
    launcher: Launcher,
    options: Options,
    *,
    fresh: bool,
) -> Iterator[Any]:
    """Open the leader's journal; None on the others, which learn whether it exists."""
    from flux.tune.journal import BusyError, Journal, run_id
    from flux.tune.tuner import describe

    problem, journal = "", None
    if launcher.leads:
        what = describe(searches, here, options)
        try:
            cache.check_writable()
            runs, name = cache.root / "runs", run_id(what)
            if fresh:
                (runs / f"{name}.jsonl").unlink(missing_ok=True)
            journal = Journal(runs, name, what)
        except OSError as error:
            problem = f"cannot write to {cache.root}: {error}"
        except BusyError as error:
            problem = str(error)
    problem = launcher.share(problem)
    if problem:
        refuse(problem)
    try:
        yield journal
    finally:
        if journal is not None:
            journal.close()


def _report(searches: Sequence[Search], cache: Any, *, json_output: bool) -> None:
    if json_output:
        print(json.dumps([_document(search) for search in searches], indent=1))
        return
    tuned = sum(search.winner is not None for search in searches)
    say(f"{tuned} of {len(searches)} shapes have winners, in {cache.directory}")
    for search in searches:
        if search.problem_text:
            complain(f"{search.label}: {search.problem_text}")


def _document(search: Search) -> dict[str, Any]:
    best = search.best()
    return {
        "shape": search.label,
        "world": search.problem.world,
        "settled": search.settled,
        "best": best,
        "winner": None if search.winner is None else search.winner.as_dict(),
        "candidates": len(search.candidates),
        "rounds": search.rounds_done,
        "excluded": search.excluded,
        "problem": search.problem_text,
    }
