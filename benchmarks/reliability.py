"""Tables of docs/contribute/results/reliability.md: soak, ends of programs, damaged files.

benchmarks/soak.py, benchmarks/endings.py and tests/support/fuzz_files.py measure; tables.py
writes the tables.
"""

from __future__ import annotations

from collections import Counter

from common import RESULTS, load, markdown, versions

SOAK = RESULTS.parent / "soak" / "thirty_minutes.json"
ENDINGS = RESULTS.parent / "endings.json"
FILES = RESULTS.parent / "fuzz" / "files.json"

DISTURBANCES = {
    "in the plan, counted by each rank": {
        "signal": "signal, handler works",
        "refused": "input refused on 1 rank",
        "fork": "forked child ends",
        "close": "close during a call",
        "interrupt": "signal, handler raises",
        "full": "/dev/shm full",
    },
    "at any moment, each counted once": {
        "SIGSTOP": "stopped and continued",
        "SIGUSR1": "burst of signals",
        "SIGKILL": "one rank killed",
        "SIGKILL of all": "all ranks killed",
    },
}
"""Names of counts in the JSON of the soak, and what they are, by how they are counted."""

WITHOUT_FLUX = ("torch", "torch-compiled")


def soak() -> str:
    """Return how often each disturbance hit a rank, how often an error was raised, and findings."""
    document = load(SOAK)
    counts = document["counts"]
    rows = []
    for place, names in DISTURBANCES.items():
        for name, text in names.items():
            raised = counts.get(f"{name}: raised")
            figures = [f"{counts[name]:,}", "-" if raised is None else f"{raised:,}"]
            rows.append([text, place.split(",")[0], *figures])
    header = ["disturbance", "when", "count", "ranks with an error"]
    noticed, grown = document["noticed_s"], document["growth_bytes"] / 2**20
    facts = [
        ["episodes", f"{document['episodes']:,}"],
        ["ops built, counted by each rank", f"{counts['built']:,}"],
        ["calls, counted by each rank", f"{counts['calls']:,}"],
        ["results compared bitwise with those of a quiet run", f"{counts['compared']:,}"],
        ["survivors of a kill that were timed", f"{noticed['count']:,}"],
        ["time until they raised, median", f"{noticed['median']:.3f} s"],
        ["time until they raised, longest", f"{noticed['max']:.1f} s"],
        ["growth of resident memory", f"{grown:.1f} MiB"],
        ["findings", f"{len(document['findings'])}"],
    ]
    listed = "\n".join(f"* {finding}" for finding in document["findings"])
    parts = [markdown(header, rows), markdown(["figure", "value"], facts)]
    parts += [f"Findings, as `episode: what was found`:\n\n{listed}"] if listed else []
    return "\n\n".join(
        [*parts, f"`{document['command']}`; {versions(document)}; {document['minutes']:g} minutes."]
    )


def endings() -> str:
    """Return each run's endings and statuses; the control without flux has rows of its own."""
    rows = []
    for run in load(ENDINGS)["runs"]:
        for flux in (True, False):
            statuses: Counter[str] = Counter()
            for kind, endings_of_kind in run["statuses"].items():
                if (kind not in WITHOUT_FLUX) == flux:
                    for by_status in endings_of_kind.values():
                        statuses.update(by_status)
            if statuses:
                aborts = sum(n for status, n in statuses.items() if "-6" in status)
                killed = sum(n for status, n in statuses.items() if "-9" in status)
                with_flux = "yes" if flux else "no"
                each = (statuses.total(), aborts, killed)
                rows.append([run["code"], with_flux, *map(str, each)])
    header = ["code", "flux", "endings", "with an abort", "with a rank killed after 120 s"]
    return markdown(header, rows)


def files() -> str:
    """Return, by kind of file, what came of damaged ones."""
    document = load(FILES)
    outcomes = ("refused", "set aside", "accepted", "wrong")
    rows = [
        [kind, *(f"{counts[outcome]:,}" for outcome in outcomes)]
        for kind, counts in document["kinds"].items()
    ]
    return (
        f"{markdown(['file', *outcomes], rows)}\n\n`{document['command']}`; {versions(document)}."
    )
