"""Bugs to seed: each takes one ordering rule out of a recorded program.

If a rule can be taken out and the checker finds nothing, then either nothing needs the rule, or the
checker does not look.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.edits import (
    Edit,
    calls_exchanged,
    done_before_reduction,
    entry_ahead_of_fork,
    entry_before_fill,
    entry_forgotten,
    entry_raised_early,
    no_epochs,
    no_join,
    no_meeting,
    no_reset,
    no_stream_wait,
    no_tile_wait,
    no_tile_wait_on,
    no_wait_for_ranks_without_rows,
    offer_before_copy,
    one_buffer,
    one_set_of_signals,
    poison_in_sums,
    raised_before_copy,
    raised_before_store,
    reset_behind_entry,
    sums_in_place,
    tiles_wait_for_no_word,
    word_before_rows,
)
from model.records import GATHERED, PUSHED, Scenario


@dataclass(frozen=True)
class Bug:
    """A rule that is taken out of a scenario.

    Attributes:
        rule: what the edit breaks.
        finds: kinds of violation one of which shows it.
        large: too many states for the literal search.
    """

    name: str
    rule: str
    scenario: Scenario
    edit: Edit
    finds: tuple[str, ...] = ("race", "value")
    large: bool = False  # too large for the literal search


def _ag(**options: object) -> Scenario:
    scenario = {"ops": ("ag_gemm",), "world": 2, "rows": (4, 4), **options}
    return Scenario(**scenario)  # type: ignore[arg-type]


def _rs(op: str = "gemm_rs", **options: object) -> Scenario:
    return _ag(ops=(op,), **options)


_RING = {"world": 3, "rows": (6, 6), "order": "ring1d"}
_NODES = {"world": 4, "rows": (4, 4), "nodes": 2}
_PUTS = {"nodes": 2, "puts": True}

_ALL = {"rows": (4, 4, 4), "captured": (0, 1, 2)}
_ANY = ("race", "value", "deadlock")

_CAPTURED = [
    *(
        Bug(
            f"graph-{scenario.ops[0]}-{scenario.direction}-resets",
            "signals and flags of the replay before are reset",
            scenario,
            no_reset,
            _ANY,
        )
        for scenario in (_ag(**_ALL), _ag(**_ALL, direction="pull"), _rs(**_ALL))
    ),
    *(
        Bug(
            f"graph-{scenario.ops[0]}-{scenario.direction}-reset-behind-entry",
            "words are reset ahead of what lets peers raise or await them",
            scenario,
            reset_behind_entry,
            _ANY,
        )
        for scenario in (_ag(**_ALL), _ag(**_ALL, direction="pull"), _rs(**_ALL))
    ),
    Bug(
        "graph-push-entries",
        "rows go to a peer behind its entry",
        _ag(**_ALL),
        no_meeting("graph entry"),
    ),
    Bug(
        "graph-pull-entries",
        "rows are pulled, and offered, behind the entries of all ranks",
        _ag(**_ALL, direction="pull"),
        no_meeting("graph entry"),
        _ANY,
    ),
    Bug(
        "graph-tiles-wait",
        "a tile goes to its owner behind the owner's entry",
        _rs(**_ALL),
        no_tile_wait("graph entry"),
        _ANY,
    ),
    Bug(
        "graph-done-awaited",
        "the result is read behind the 'done' of all ranks",
        _rs("gemm_ar", **_ALL),
        no_meeting("graph 'done'"),
    ),
]

# GemmAR needs entries for the poison alone: without, the last call's 'done' says as much.
BUGS = [
    Bug("fork", "the copy stream begins behind what wrote x", _ag(), no_join("copy stream")),
    Bug("join", "a call ends behind its copies of x", _ag(), no_join("caller's stream")),
    Bug(
        "join-of-forwarding",
        "an entry says that the rank has forwarded what it had to",
        _ag(**_RING, fresh_x=True),
        no_join("caller's stream"),
        large=True,
    ),
    Bug(
        "push-entry",
        "rows go to a peer behind its entry",
        _ag(),
        no_stream_wait("entry", "copy stream"),
    ),
    Bug(
        "pull-entries",
        "own rows are overwritten behind the entries of those that pulled them",
        _ag(direction="pull"),
        no_stream_wait("entry", "caller's stream"),
    ),
    Bug(
        "pull-signal",
        "rows are pulled behind the offer of their source",
        _ag(direction="pull"),
        no_stream_wait("offer", "copy stream"),
    ),
    Bug(
        "pull-offer-after-copy",
        "an offer of forwarded rows comes behind the copy that brought them",
        _ag(**_RING, direction="pull"),
        offer_before_copy,
        large=True,
    ),
    Bug(
        "forwarded-signal",
        "rows are forwarded behind their signal",
        _ag(**_RING, apart=True),
        no_tile_wait_on("signal", "copy stream"),
    ),
    *(
        Bug(
            f"{direction}-signal-after-copy",
            "a signal comes behind its copy",
            _ag(direction=direction),
            raised_before_copy(),
        )
        for direction in ("push", "pull")
    ),
    *(
        Bug(
            f"{direction}-tiles-wait",
            "tiles of the GEMM wait for the rows that they read",
            _ag(direction=direction),
            no_tile_wait("signal"),
        )
        for direction in ("push", "pull")
    ),
    Bug(
        "medium-chunk",
        "the GEMM of a chunk comes behind its rows",
        _ag(path="medium"),
        no_tile_wait_on("signal", "caller's stream"),
    ),
    *(
        Bug(
            f"{scenario.ops[0]}-{scenario.direction}-entry-behind-reads",
            "an entry is raised behind all that reads the buffers",
            scenario,
            entry_raised_early,
        )
        for scenario in (_ag(), _ag(direction="pull"), _rs(), _rs("gemm_ar", poison=True))
    ),
    Bug(
        "pull-poison",
        "the fill comes behind the entries of those that pull",
        _ag(direction="pull", poison=True),
        no_stream_wait("entry", "caller's stream"),
    ),
    *(
        Bug(
            f"{scenario.ops[0]}-poison",
            "the fill comes ahead of the rank's entry",
            scenario,
            entry_before_fill,
        )
        for scenario in (_ag(poison=True), _rs(poison=True), _rs("gemm_ar", poison=True))
    ),
    *(
        Bug(
            f"{op}-{name}",
            rule,
            _rs(op, poison=op == "gemm_ar"),
            edit,
        )
        for op in ("gemm_rs", "gemm_ar")
        for name, rule, edit in (
            (
                "tiles-wait",
                "a tile goes to its owner behind the owner's entry",
                no_tile_wait("entry"),
            ),
            ("flag-after-store", "a flag comes behind its tile", raised_before_store()),
            ("flags", "the reduction waits for the flags of all sources", no_tile_wait("flag")),
        )
    ),
    Bug(
        "done-awaited",
        "the result is read behind the 'done' of all ranks",
        _rs("gemm_ar"),
        no_meeting("'done'"),
    ),
    Bug(
        "done-after-reduction",
        "'done' comes behind the reduction",
        _rs("gemm_ar"),
        done_before_reduction,
    ),
    *(
        Bug(
            f"{op}-early-join",
            "a call ends behind its reduction, which began beside the GEMM",
            _rs(op, apart=True),
            no_join("caller's stream"),
            large=op == "gemm_rs",
        )
        for op in ("gemm_rs", "gemm_ar")
    ),
    *(
        Bug(f"copied-{name}", rule, _rs(**options), edit)
        for name, rule, options, edit in (
            (
                "partials",
                "partials are copied behind the flags of their tiles",
                {"sends": "copies"},
                no_stream_wait("offer", "copy stream"),
            ),
            (
                "chunk",
                "partials are copied behind the GEMM of their rows",
                {"path": "medium"},
                no_join("copy stream"),
            ),
            (
                "entry",
                "partials go to a slot behind its owner's entry",
                {"path": "medium"},
                no_stream_wait("entry", "copy stream"),
            ),
            (
                "flag-after-copy",
                "the flag of a source comes behind its copy",
                {"sends": "copies"},
                raised_before_copy("flag"),
            ),
            (
                "join",
                "a call ends behind its copies of partials",
                {"path": "medium", "rows": (4, 4, 4)},
                no_join("caller's stream"),
            ),
        )
    ),
    Bug(
        "entry-forgotten",
        "an entry is raised at every peer",
        _ag(),
        entry_forgotten,
        ("deadlock",),
    ),
    *(
        Bug(
            f"switch-{name}",
            rule,
            _rs(op, switch=True, poison=poison),
            edit,
        )
        for op, name, rule, edit, poison in (
            (
                "gemm_rs",
                "tiles-wait",
                "a rank overwrites its partials when their owner has read them",
                no_tile_wait("entry"),
                False,
            ),
            (
                "gemm_rs",
                "poison",
                "the fill comes behind the entries of those that read partials",
                no_stream_wait("entry", "caller's stream"),
                True,
            ),
            (
                "gemm_ar",
                "done-awaited",
                "the result is read behind the 'done' of all ranks",
                no_meeting("'done'"),
                False,
            ),
        )
    ),
    *(
        Bug(
            f"{op}-no-epochs",
            "signals say of which call they are",
            _ag(ops=(op,)),
            no_epochs,
        )
        for op in ("ag_gemm", "gemm_rs")
    ),
    Bug(
        "calls-exchanged",
        "ranks make their calls in the same order",
        _ag(ops=("ag_gemm", "gemm_rs"), rows=(4,)),
        calls_exchanged,
        ("deadlock",),
    ),
    *_CAPTURED,
    *(
        Bug(f"credit-{name}", rule, _ag(buffers=2, **options), edit)
        for name, rule, options, edit in (
            (
                "awaited",
                "rows go to a peer behind its entry of the call before",
                {"rows": (4, 1, 4)},
                no_stream_wait("entry", "copy stream"),
            ),
            (
                "behind-the-last-call",
                "an entry is raised behind the kernel of the call before",
                {"rows": (4, 1, 4)},
                entry_ahead_of_fork,
            ),
            ("buffers", "calls use two buffers in turn", {}, one_buffer(*GATHERED)),
            (
                "signals",
                "each buffer has its signals",
                {"world": 3, "rows": (6, 3), "comm_tile_rows": 1},
                one_set_of_signals,
            ),
        )
    ),
    *(
        Bug(f"pushed-{name}", rule, _ag(path="in_kernel", rows=rows), edit)
        for name, rule, rows, edit in (
            ("word", "the word of a rank comes behind its rows", (4, 4), word_before_rows),
            (
                "tiles-wait",
                "tiles wait for the words of their rows",
                (4, 4),
                tiles_wait_for_no_word,
            ),
            ("buffers", "calls push to two buffers in turn", (4, 4, 4), one_buffer(*PUSHED)),
            (
                "all-words",
                "a call ends behind the words of all ranks, those without rows as well",
                (1, 1, 1),
                no_wait_for_ranks_without_rows,
            ),
        )
    ),
    Bug(
        "own-sums-wait",
        "sums beside the multiplication wait for the flags of their partials",
        _rs(reduce="in_kernel", rows=(4, 4, 4)),
        no_tile_wait("flag"),
    ),
    *(
        Bug(f"sums-{name}", rule, _rs("gemm_ar", path="in_kernel", rows=(4, 4, 4)), edit)
        for name, rule, edit in (
            ("flag", "the flag of a partial comes behind it", raised_before_store("sum flag")),
            ("wait", "sums wait for the flags of their partials", no_tile_wait("sum flag")),
            ("word", "the word of a sum comes behind it", raised_before_store("sum word")),
            (
                "copies-wait",
                "sums of others are copied behind their words",
                no_tile_wait("sum word"),
            ),
        )
    ),
    *(
        Bug(
            f"switched-sums-{name}",
            rule,
            _rs("gemm_ar", path="in_kernel", switch=True, rows=(4, 4, 4)),
            no_tile_wait(word),
        )
        for name, rule, word in (
            ("wait", "the switch adds up partials behind their flags", "sum flag"),
            ("read", "a source overwrites its partials behind the words of their sums", "sum word"),
        )
    ),
    *(
        Bug(f"nodes-{name}", rule, scenario, edit, large=True)
        for name, rule, scenario, edit in (
            (
                "fork",
                "other nodes may write what earlier calls have read",
                _rs(nodes=2),
                no_join("network's stream"),
            ),
            (
                "open",
                "a send waits until its receiver has opened the call",
                _rs(nodes=2),
                no_stream_wait("opened", "network's stream"),
            ),
            (
                "box",
                "a receive is done when its box is raised",
                _rs(nodes=2),
                no_stream_wait("box", "network's stream"),
            ),
            (
                "join",
                "the sum of all nodes comes behind what other nodes send",
                _rs(nodes=2),
                no_join("caller's stream"),
            ),
            (
                "flags",
                "the sum of a node waits for its partials",
                _rs(**_NODES),
                no_tile_wait("flag"),
            ),
            (
                "tiles-wait",
                "a tile goes to its holder behind the holder's entry",
                _rs(**_NODES),
                no_tile_wait("entry"),
            ),
            (
                "forwarded-signal",
                "rows of other nodes are forwarded behind their signal",
                _ag(**_NODES),
                no_stream_wait("signal", "copy stream"),
            ),
        )
    ),
    *(
        Bug(f"relay-{name}", rule, scenario, edit, large=True)
        for name, rule, scenario, edit in (
            (
                "open",
                "a sum is made and put when its owner has opened the call",
                _rs(**_PUTS),
                no_tile_wait("opened"),
            ),
            (
                "flags",
                "the relay waits for the partials of its node",
                _rs(**_PUTS),
                no_tile_wait_on("flag", "network's stream"),
            ),
            (
                "join",
                "the next entry comes behind the relay, which reads slots",
                _rs(**_PUTS),
                no_join("caller's stream"),
            ),
            (
                "fork",
                "other nodes may write what earlier calls have read",
                _rs(**_PUTS),
                no_join("network's stream"),
            ),
            (
                "word",
                "the owner adds up a strip of another node behind its word",
                _rs(**_PUTS),
                no_tile_wait("box"),
            ),
            (
                "word-after-data",
                "the word of a put comes behind its data",
                _rs(**_PUTS),
                raised_before_copy("box"),
            ),
            (
                "sums-in-place",
                "what is put lies where no source writes",
                _rs(**_PUTS),
                sums_in_place,
            ),
            (
                "poison",
                "the fill leaves out what puts may still read",
                _rs(**_PUTS, poison=True),
                poison_in_sums,
            ),
        )
    ),
]
