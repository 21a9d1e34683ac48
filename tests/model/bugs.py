"""Bugs to seed: each takes one ordering rule out of a recorded program.

If a rule can be taken out and the checker finds nothing, then either nothing needs the rule, or the
checker does not look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.program import POISON, Item, Program, Step
from model.recording import Kind, Scenario, What

Matches = Callable[[Step], bool]
Edit = Callable[[Program], None]


def _threads(program: Program) -> list[list[Step]]:
    """Every block of a kernel; streams are edited through ``program.streams``."""
    return [
        block
        for items in program.streams
        for item in items
        if isinstance(item, list)
        for block in item
    ]


def drop(program: Program, matches: Matches) -> None:
    """Remove steps."""
    before = sum(1 for _ in program.steps())
    for items in program.streams:
        items[:] = [i for i in items if not (isinstance(i, Step) and matches(i))]
    for block in _threads(program):
        block[:] = [step for step in block if not matches(step)]
    assert sum(1 for _ in program.steps()) < before, "there is nothing to drop"


def swap(program: Program, first: Matches, then: Matches) -> None:
    """Exchange neighbours."""
    found = False
    for thread in (*program.streams, *_threads(program)):
        for i in range(len(thread) - 1):
            one, other = thread[i], thread[i + 1]
            if isinstance(one, Step) and isinstance(other, Step) and first(one) and then(other):
                thread[i], thread[i + 1] = other, one
                found = True
    assert found, "there is nothing to swap"


def move_up(program: Program, matches: Matches, ahead_of: Callable[[Item], bool]) -> None:
    """Move steps of a stream up to before the last item ahead of them that ``ahead_of`` names."""
    found = False
    for items in program.streams:
        for at in range(len(items)):
            step = items[at]
            if not isinstance(step, Step) or not matches(step):
                continue
            targets = [i for i in range(at) if ahead_of(items[i])]
            if targets:
                items.insert(targets[-1], items.pop(at))
                found = True
    assert found, "there is nothing to move"


def of_word(program: Program, kind: Kind, name: str) -> Matches:
    return lambda s: s.kind is kind and program.words[s.word].startswith(name)


def on_stream(program: Program, matches: Matches, name: str) -> Matches:
    return lambda s: matches(s) and name in program.names[s.stream]


def is_kernel(item: Item) -> bool:
    return isinstance(item, list)


# -- edits -----------------------------------------------------------------------------------------


def no_tile_wait(word: str) -> Edit:
    def edit(program: Program) -> None:
        waits = of_word(program, Kind.await_, word)
        drop(program, lambda s: waits(s) and s.tile >= 0)

    return edit


def no_tile_wait_on(word: str, stream: str) -> Edit:
    def edit(program: Program) -> None:
        waits = on_stream(program, of_word(program, Kind.await_, word), stream)
        drop(program, lambda s: waits(s) and s.tile >= 0)

    return edit


def no_meeting(word: str) -> Edit:
    """Nobody is awaited where the ranks of a captured call meet."""

    def edit(program: Program) -> None:
        drop(program, of_word(program, Kind.await_, word))

    return edit


def no_reset(program: Program) -> None:
    drop(program, lambda s: s.kind is Kind.reset)


def reset_behind_entry(program: Program) -> None:
    """A rank tells its peers first, and resets its words then."""
    for items in program.streams:
        kernels = [item for item in items if isinstance(item, list)]
        resets = [kernel for kernel in kernels if kernel[0][0].kind is Kind.reset]
        for kernel in resets:
            at = items.index(kernel)
            items[at : at + 2] = [items[at + 1], kernel]


def no_stream_wait(word: str, stream: str) -> Edit:
    def edit(program: Program) -> None:
        waits = on_stream(program, of_word(program, Kind.await_, word), stream)
        drop(program, lambda s: waits(s) and s.tile < 0)

    return edit


def no_join(stream: str) -> Edit:
    """No wait of one stream of a rank for another, inside of calls."""

    def edit(program: Program) -> None:
        joins = on_stream(program, lambda s: s.kind is Kind.join and s.call >= 0, stream)
        drop(program, joins)

    return edit


def raised_before_copy(word: str = "signal") -> Edit:
    def edit(program: Program) -> None:
        swap(program, lambda s: s.kind is Kind.copy, of_word(program, Kind.raise_, word))

    return edit


def flag_before_store(program: Program) -> None:
    raises = of_word(program, Kind.raise_, "flag")
    swap(program, lambda s: s.is_access and bool(s.puts), raises)


def entry_raised_early(program: Program) -> None:
    """A call's entry goes ahead of the kernels of the call before."""
    raises = of_word(program, Kind.raise_, "entry")
    for items in program.streams:
        found = [i for i in items if isinstance(i, Step) and raises(i)]
        for step in found:
            first = next(i for i in items if is_kernel(i) or i is step)
            if first is not step:
                items.remove(step)
                items.insert(items.index(first), step)


def entry_before_fill(program: Program) -> None:
    def is_fill(item: Item) -> bool:
        return isinstance(item, Step) and item.kind is Kind.fill and POISON in item.puts.values()

    move_up(program, of_word(program, Kind.raise_, "entry"), is_fill)


def done_before_reduction(program: Program) -> None:
    move_up(program, of_word(program, Kind.raise_, "'done'"), is_kernel)


def entry_forgotten(program: Program) -> None:
    """Rank 1 does not tell rank 0 of its second call."""
    raises = of_word(program, Kind.raise_, "entry of rank 1 at rank 0")
    drop(program, lambda s: raises(s) and s.call == 1)


def no_epochs(program: Program) -> None:
    """Signals are flags that the first call leaves raised."""
    for step in program.steps():
        if step.word >= 0 and program.words[step.word].startswith(("signal", "flag")):
            step.value = 1


def calls_exchanged(program: Program) -> None:
    """Rank 1 makes its first two calls the other way round."""
    for items, name in zip(program.streams, program.names, strict=True):
        if name != "rank 1, caller's stream":
            continue

        def call(item: Item) -> int:
            return item.call if isinstance(item, Step) else item[0][0].call

        turn = {0: 1, 1: 0}
        items.sort(key=lambda item: turn.get(call(item), call(item)))
        return
    raise AssertionError("there is no such stream")


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
    given = {"ops": ("ag_gemm",), "world": 2, "rows": (4, 4), **options}
    return Scenario(**given)  # type: ignore[arg-type]


def _rs(op: str = "gemm_rs", **options: object) -> Scenario:
    return _ag(ops=(op,), **options)


def poison_in_sums(program: Program) -> None:
    """The fill takes in what puts may still read."""
    sums = {cell for cell, name in enumerate(program.cells) if name.startswith("sum to put")}
    fills = [s for s in program.steps() if s.kind is Kind.fill and POISON in s.puts.values()]
    assert fills and sums, "there is nothing to fill"
    for step in fills:
        own = (c for c in sums if program.cells[c].endswith(f"rank {step.rank}"))
        step.puts |= dict.fromkeys(own, POISON)


def sums_in_place(program: Program) -> None:
    """The sum of a node is made in the slot of its first partial."""
    moved: dict[int, int] = {}
    for step in program.steps():
        for cell, symbol in step.puts.items():
            if program.cells[cell].startswith("sum to put"):
                first = (What.partial, *symbol[1:])
                moved[cell] = next(c for c, held in step.expects.items() if held == first)
    assert moved, "there is no sum to put"
    for step in program.steps():
        step.puts = {moved.get(cell, cell): symbol for cell, symbol in step.puts.items()}
        step.moves = tuple((moved.get(source, source), to) for source, to in step.moves)


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
        "signals are reset behind the entries of those that awaited them",
        _ag(**_ALL, direction="pull"),
        no_meeting("graph entry"),
        _ANY,
    ),
    Bug(
        "graph-pull-resets-awaited",
        "a peer's signals are awaited when it has reset them",
        _ag(**_ALL, direction="pull"),
        no_meeting("graph reset"),
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
        "rows are pulled behind the signal of their owner",
        _ag(direction="pull"),
        no_stream_wait("signal", "copy stream"),
    ),
    Bug(
        "forwarded-signal",
        "rows are forwarded behind their signal",
        _ag(**_RING),
        no_stream_wait("signal", "copy stream"),
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
            ("flag-after-store", "a flag comes behind its tile", flag_before_store),
            ("flags", "the reduction waits for the flags of all sources", no_tile_wait("flag")),
        )
    ),
    Bug(
        "done-awaited",
        "the result is read behind the 'done' of all ranks",
        _rs("gemm_ar"),
        no_stream_wait("'done'", "caller's stream"),
    ),
    Bug(
        "done-after-reduction",
        "'done' comes behind the reduction",
        _rs("gemm_ar"),
        done_before_reduction,
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
                no_stream_wait("'done'", "caller's stream"),
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
