"""Model-check the signals and epochs of the CUDA backend; docs/kernels/protocol.md explains.

python tools/model_check.py                        all standard scenarios, with their state counts
python tools/model_check.py --op ag_gemm --world 3 --rows 6,4,6 --direction pull --poison
python tools/model_check.py --bugs                 what taking out each rule leads to
python tools/model_check.py --bug push-entry       the shortest way there, step by step
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support/emulation"))

from model.bugs import BUGS
from model.check import LimitError, Mode, Report, explore
from model.program import program_of
from model.recording import RecordingDevice, build, record
from model.records import Scenario
from model.scenarios import OPS, standard


def numbers(text: str) -> tuple[int, ...]:
    """ "6,4" -> (6, 4)."""
    return tuple(int(part) for part in text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op", action="append", choices=OPS, help="op to call; several are called in turn"
    )
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--puts", action="store_true", help="connect nodes by NVSHMEM puts")
    parser.add_argument(
        "--rows", type=numbers, default=(4, 4), help="rows M of each call, as 6,4,6"
    )
    parser.add_argument("--direction", choices=("push", "pull"), default="push", help="copies")
    parser.add_argument("--order", default="direct", help="communication order: direct, ring1d ...")
    parser.add_argument("--comm-tile-rows", type=int, help="rows of a communication tile")
    parser.add_argument("--columns", type=int, help="columns N of AGGemm")
    parser.add_argument("--epochs", type=numbers, help="epoch of each call, instead of 1,2,...")
    parser.add_argument(
        "--streams", type=int, default=1, help="streams that calls of a rank alternate between"
    )
    parser.add_argument("--poison", action="store_true", help="set FLUX_POISON")
    parser.add_argument("--gather", action="store_true", help="AGGemm returns the gathered x")
    parser.add_argument("--fresh-x", action="store_true", help="give each call its own x")
    parser.add_argument(
        "--blocks", type=int, help="thread blocks of a kernel (default: one per tile)"
    )
    parser.add_argument(
        "--literal", action="store_true", help="explore every step, without reduction"
    )
    parser.add_argument("--limit", type=int, default=5_000_000, help="stop after this many states")
    parser.add_argument("--bugs", action="store_true", help="check every seeded bug")
    parser.add_argument(
        "--bug", choices=[bug.name for bug in BUGS], metavar="NAME", help="seed this bug"
    )
    return parser.parse_args()


def scenario_of(args: argparse.Namespace) -> Scenario:
    return Scenario(
        tuple(args.op),
        args.world,
        args.rows,
        args.direction,
        args.order,
        comm_tile_rows=args.comm_tile_rows,
        poison=args.poison,
        gather=args.gather,
        fresh_x=args.fresh_x,
        n=args.columns,
        epochs=args.epochs,
        streams=args.streams,
        nodes=args.nodes,
        puts=args.puts,
    )


def line(name: str, report: Report) -> str:
    result = report.violation.kind if report.violation else "holds"
    size = f"{report.states:>10,} {report.transitions:>11,}"
    return f"{name:62} {size} {report.seconds:>7.1f} s  {result}"


def main() -> int:
    args = arguments()
    mode = Mode.literal if args.literal else Mode.reduced
    with tempfile.TemporaryDirectory() as folder:  # ops load the library again in run()
        return check(args, mode, RecordingDevice(build(Path(folder))))


def check(args: argparse.Namespace, mode: Mode, device: RecordingDevice) -> int:
    def run(scenario: Scenario, edit: object = None) -> Report:
        program = program_of(record(device, scenario), args.blocks)
        if callable(edit):
            edit(program)
        return explore(program, mode, args.limit)

    if args.bug:
        bug = next(bug for bug in BUGS if bug.name == args.bug)
        print(f"{bug.scenario}\nwithout: {bug.rule}\n{run(bug.scenario, bug.edit)}")
        return 0
    if args.op:
        report = run(scenario_of(args))
        print(f"{scenario_of(args)}\n{report}")
        return 1 if report.violation else 0
    print(f"{'':62} {'states':>10} {'transitions':>11}")
    if args.bugs:
        for bug in BUGS:
            print(line(f"{bug.name}: {bug.rule}", run(bug.scenario, bug.edit)), flush=True)
        return 0
    total, failed = Report(0, 0, 0, 0.0, None), 0
    for scenario in standard():
        report = run(scenario)
        print(line(str(scenario), report), flush=True)
        failed += report.violation is not None
        total = replace(
            total,
            states=total.states + report.states,
            transitions=total.transitions + report.transitions,
            seconds=total.seconds + report.seconds,
            violation=total.violation or report.violation,
        )
    print(line("all", total))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LimitError as error:
        sys.exit(str(error))
