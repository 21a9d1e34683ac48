"""Steps of `flux plan run` between two hosts with limited links: predicted and measured.

    python benchmarks/plan_hosts.py        # as root, for network namespaces; some ten minutes

One rank per host, tensor parallel. The profile is measured in the same run, before the steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

RESULT = ROOT / "benchmarks" / "results" / "plan" / "hosts.json"
LINKS = ("500mbit", "1gbit", "2gbit")
SHAPES = ((4, 256, 4), (8, 512, 4))  # divisor of GPT 6.7B's sizes, tokens, sequences
POLICIES = ("serial", "domino:slices=2", "domino:slices=4", "domino:slices=1,columns=2")


def command(link: str, shape: tuple[int, int, int], repeats: int) -> list[str]:
    """Return the arguments of flux for a link and a shape."""
    scale, sequence, batch = shape
    words = ["plan", "run", "--model", "gpt-6.7b", "--layers", "2", "--scale", str(scale)]
    words += ["--sequence", str(sequence), "--micro-batch", str(batch)]
    words += ["--hosts", "2", "--link-rate", link, "--repeats", str(repeats)]
    return words + [word for policy in POLICIES for word in ("--policy", policy)]


def rows_of(policies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each policy: predicted and measured time, and how far off.

    Policies are named as asked; flux also prints what they have chosen, such as Domino's order.
    """
    rows = []
    for asked, policy in zip(POLICIES, policies, strict=True):
        off = policy["predicted_ms"] / policy["iteration_ms"] - 1
        name = asked.replace(":", " ").replace(",", " ")
        rows.append({**policy, "policy": name, "off": off})
    return rows


def ranking_holds(rows: list[dict[str, Any]]) -> bool:
    """Return whether policies are predicted in the measured order, where they differ.

    Two differ if the quartiles of their times do not overlap.
    """
    for a, b in itertools.combinations(rows, 2):
        low, high = sorted((a, b), key=lambda row: float(row["iteration_ms"]))
        quartiles = [statistics.quantiles(row["times_ms"], n=4) for row in (low, high)]
        differ = quartiles[0][2] < quartiles[1][0]
        if differ and low["predicted_ms"] > high["predicted_ms"]:
            return False
    return True


def table(content: dict[str, Any]) -> str:
    """Return a line for each policy of each run: measured and predicted."""
    header = ["link", "sizes over", "tokens", "policy", "measured", "predicted", "off", "hidden"]
    lines = []
    for run in content["runs"]:
        for row in rows_of(run["policies"]):
            hidden = max(0.0, 1 - row["exposed_comm_ms"] / row["comm_ms"])
            lines.append(
                [
                    run["link"],
                    str(run["shape"][0]),
                    f"{run['shape'][2]} x {run['shape'][1]}",
                    row["policy"],
                    f"{row['iteration_ms']:.0f} ms",
                    f"{row['predicted_ms']:.0f} ms",
                    f"{100 * row['off']:+.0f}%",
                    f"{100 * hidden:.0f}%",
                ]
            )
    return markdown(header, lines)


def conclusion(content: dict[str, Any]) -> str:
    """Return how far predictions are off, in two sentences."""
    off = [abs(row["off"]) for run in content["runs"] for row in rows_of(run["policies"])]
    kept = sum(ranking_holds(run["policies"]) for run in content["runs"])
    return (
        f"Predictions are off by {100 * statistics.median(off):.0f}% in the median, "
        f"{100 * max(off):.0f}% at most. Where quartiles of two policies do not overlap, "
        f"the predicted order is the measured one in {kept} of {len(content['runs'])} runs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    for link, shape in itertools.product(LINKS, SHAPES):
        words = command(link, shape, options.repeats)
        flux = [sys.executable, "-m", "flux", *words, "--json", "-"]
        done = subprocess.run(flux, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"flux {' '.join(words)}: {done.stderr}")
        policies = json.loads(done.stdout)
        runs.append(
            {"command": ["flux", *words], "link": link, "shape": shape, "policies": policies}
        )
        for row in rows_of(policies):
            print(link, shape, row["policy"], f"{row['iteration_ms']:.0f} ms, {row['off']:+.1%}")
    keep({"runs": runs}, options.out)


if __name__ == "__main__":
    main()
