"""Edits of a recorded program: what takes a rule out of it (bugs.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from model.program import POISON, Item, Program, Step
from model.records import Kind, What

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
    changed = False
    for thread in (*program.streams, *_threads(program)):
        for i in range(len(thread) - 1):
            one, other = thread[i], thread[i + 1]
            if isinstance(one, Step) and isinstance(other, Step) and first(one) and then(other):
                thread[i], thread[i + 1] = other, one
                changed = True
    assert changed, "there is nothing to swap"


def move_up(program: Program, matches: Matches, ahead_of: Callable[[Item], bool]) -> None:
    """Move steps of a stream up to before the last item ahead of them that ``ahead_of`` names."""
    changed = False
    for items in program.streams:
        for at in range(len(items)):
            step = items[at]
            if not isinstance(step, Step) or not matches(step):
                continue
            targets = [i for i in range(at) if ahead_of(items[i])]
            if targets:
                items.insert(targets[-1], items.pop(at))
                changed = True
    assert changed, "there is nothing to move"


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
    """Drop the waits where the ranks of a captured call meet."""

    def edit(program: Program) -> None:
        drop(program, of_word(program, Kind.await_, word))

    return edit


def no_reset(program: Program) -> None:
    drop(program, lambda s: s.kind is Kind.reset)


def reset_behind_entry(program: Program) -> None:
    """Signal peers first, then reset the own words."""
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
    """Drop all waits between streams of one rank inside calls."""

    def edit(program: Program) -> None:
        joins = on_stream(program, lambda s: s.kind is Kind.join and s.call >= 0, stream)
        drop(program, joins)

    return edit


def raised_before_copy(word: str = "signal") -> Edit:
    def edit(program: Program) -> None:
        swap(program, lambda s: s.kind is Kind.copy, of_word(program, Kind.raise_, word))

    return edit


def offer_before_copy(program: Program) -> None:
    """Offer forwarded rows before the copy that brings them."""

    def is_copy(item: Item) -> bool:
        return isinstance(item, Step) and item.kind is Kind.copy

    move_up(program, of_word(program, Kind.raise_, "offer"), is_copy)


def _pushes(step: Step) -> bool:
    """Whether a step is of the part of a kernel that pushes rows and awaits all words."""
    return step.tile == 0


def word_before_rows(program: Program) -> None:
    raises = of_word(program, Kind.raise_, "push word")
    swap(program, lambda s: s.is_access and bool(s.puts) and _pushes(s), raises)


def tiles_wait_for_no_word(program: Program) -> None:
    waits = of_word(program, Kind.await_, "push word")
    drop(program, lambda s: waits(s) and not _pushes(s))


def no_wait_for_ranks_without_rows(program: Program) -> None:
    waits = of_word(program, Kind.await_, "push word")
    drop(program, lambda s: waits(s) and _pushes(s))


def _those_of_even(names: list[str], even: str, odd: str) -> dict[int, int]:
    number = {name: place for place, name in enumerate(names)}
    moved = {
        place: number[name.replace(odd, even)]
        for name, place in number.items()
        if name.startswith(odd) and name.replace(odd, even) in number
    }
    assert moved, "there are no such buffers, or words"
    return moved


def one_buffer(even: str, odd: str) -> Edit:
    """Let all calls have their rows in the buffer of the even ones."""

    def edit(program: Program) -> None:
        moved = _those_of_even(program.cells, even, odd)
        for step in program.steps():
            step.expects = {moved.get(cell, cell): symbol for cell, symbol in step.expects.items()}
            step.puts = {moved.get(cell, cell): symbol for cell, symbol in step.puts.items()}
            step.moves = tuple((moved.get(a, a), moved.get(b, b)) for a, b in step.moves)

    return edit


def one_set_of_signals(program: Program) -> None:
    """Let all calls have the signals of the even ones."""
    moved = _those_of_even(program.words, "signal", "signal of odd calls")
    for step in program.steps():
        step.word = moved.get(step.word, step.word)


def entry_ahead_of_fork(program: Program) -> None:
    """Raise the entry of a call on the copy stream before that comes behind the call before."""

    def is_fork(item: Item) -> bool:
        return isinstance(item, Step) and item.kind is Kind.join

    raises = of_word(program, Kind.raise_, "entry")
    move_up(program, on_stream(program, raises, "copy stream"), is_fork)


def raised_before_store(word: str = "flag") -> Edit:
    def edit(program: Program) -> None:
        raises = of_word(program, Kind.raise_, word)
        swap(program, lambda s: s.is_access and bool(s.puts), raises)

    return edit


def entry_raised_early(program: Program) -> None:
    """Raise the entry of a call before the kernels of the previous call."""
    raises = of_word(program, Kind.raise_, "entry")
    for items in program.streams:
        raising = [i for i in items if isinstance(i, Step) and raises(i)]
        for step in raising:
            first = next(i for i in items if is_kernel(i) or i is step)
            if first is not step:
                items.remove(step)
                items.insert(items.index(first), step)


def entry_before_fill(program: Program) -> None:
    def is_fill(item: Item) -> bool:
        return isinstance(item, Step) and item.kind is Kind.fill and POISON in item.puts.values()

    move_up(program, of_word(program, Kind.raise_, "entry"), is_fill)


def done_before_reduction(program: Program) -> None:
    """Exchange the kernel that exchanges 'done' and the one before it."""
    raises = of_word(program, Kind.raise_, "'done'")
    changed = False
    for items in program.streams:
        kernels = [item for item in items if isinstance(item, list)]
        for before, kernel in pairwise(kernels):
            if any(raises(step) for block in kernel for step in block):
                items.remove(kernel)
                items.insert(items.index(before), kernel)
                changed = True
    assert changed, "there is no 'done'"


def entry_forgotten(program: Program) -> None:
    """Drop the entry of rank 1's second call on rank 0."""
    raises = of_word(program, Kind.raise_, "entry of rank 1 at rank 0")
    drop(program, lambda s: raises(s) and s.call == 1)


def no_epochs(program: Program) -> None:
    """Replace epochs by flags, which the first call leaves raised."""
    for step in program.steps():
        if step.word >= 0 and program.words[step.word].startswith(("signal", "flag")):
            step.value = 1


def calls_exchanged(program: Program) -> None:
    """Exchange the first two calls of rank 1."""
    for items, name in zip(program.streams, program.names, strict=True):
        if name != "rank 1, caller's stream":
            continue

        def call(item: Item) -> int:
            return item.call if isinstance(item, Step) else item[0][0].call

        turn = {0: 1, 1: 0}
        items.sort(key=lambda item: turn.get(call(item), call(item)))
        return
    raise AssertionError("there is no such stream")


def poison_in_sums(program: Program) -> None:
    """Extend the fill to memory that puts may still read."""
    sums = {cell for cell, name in enumerate(program.cells) if name.startswith("sum to put")}
    fills = [s for s in program.steps() if s.kind is Kind.fill and POISON in s.puts.values()]
    assert fills and sums, "there is nothing to fill"
    for step in fills:
        own = (c for c in sums if program.cells[c].endswith(f"rank {step.rank}"))
        step.puts |= dict.fromkeys(own, POISON)


def sums_in_place(program: Program) -> None:
    """Write the sum of a node into the slot of its first partial."""
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
