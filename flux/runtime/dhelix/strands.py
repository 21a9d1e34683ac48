"""Two strands by turns: forward of one micro-batch and backward of another on one rank.

Each strand runs until it must wait for a collective of its own; there the other one goes on, whose
multiplies hide that collective. At first both run up to such a place. Then a *script* says whose
turn it is: its n-th letter is the strand that passes the n-th place. Models need no rewriting: the
linear layers of ``flux.runtime.domino.layers`` tell when they wait.

A strand is a thread, and one of the two runs at a time. The forward strand has a thread of its own,
which begins with the caller's modes of torch. Backward stays where autograd runs it: in the calling
thread on a CPU, and in autograd's thread of the device on a GPU, where greenlets could not be left.
Each strand keeps the modes that it sets (``flux.runtime.modes``). Turns decide the order in which
both strands launch kernels. On a GPU, all compute and all allocation is on the caller's stream,
collectives are on the streams of their process groups, and what a strand waits for are events
between these.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

from flux.runtime import slices
from flux.runtime.modes import ModesOfProcess, ModesOfThread, generator_states, set_generator_states

T = TypeVar("T")


class StrandEnded(RuntimeError):
    """The other strand has failed, so this one has been ended."""


class Strands:
    """Runs a forward and a backward by turns.

    Args:
        script: "F" and "B" for each place in which a strand waits for a collective, in the order
            in which they are passed; it is repeated. What comes first begins.
        timeout_s: how long a strand waits for its turn.
    """

    def __init__(self, script: str = "BF", timeout_s: float = 60.0) -> None:
        if not script or set(script) - set("FB"):
            raise ValueError(f"script must consist of F and B, got {script!r}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive time, got {timeout_s!r}")
        self.script, self.timeout_s = script, timeout_s
        self._turn = threading.Condition()
        self._current, self._passed = "", 0
        self._running: set[str] = set()
        self._begun: set[str] = set()
        self._failure: BaseException | None = None
        self._forward: threading.Thread | None = None
        self._modes: dict[str, ModesOfProcess] = {}
        self.order: list[str] = []
        """The strands that have passed a place, of the last run."""

    def run(self, forward: Callable[[], T], backward: Callable[[], object]) -> T:
        """Run both; return what ``forward`` returns.

        Raises:
            BaseException: what a strand raised first; the other one is ended where it waits next.
        """
        results: list[T] = []
        self._current, self._passed, self._failure = self.script[0], 0, None
        self._running, self._begun, self.order = {"F", "B"}, set(), []
        modes, caller = ModesOfThread(), ModesOfProcess()
        self._modes = {"F": caller, "B": caller}
        drawn = generator_states()

        def whole_forward() -> None:
            nonlocal drawn
            results.append(forward())
            drawn = generator_states()

        def strand() -> None:
            modes.run(lambda: self._guarded("F", whole_forward))

        self._forward = threading.Thread(target=strand, name="flux-forward-strand", daemon=True)
        before = slices.set_before_wait(self._before_wait)
        self._forward.start()
        try:
            self._guarded("B", backward)
        finally:
            self._forward.join(self.timeout_s)
            slices.set_before_wait(before)
            caller.put_back()
        set_generator_states(drawn)
        if self._failure is not None:
            raise self._failure
        if self._forward.is_alive():
            raise TimeoutError(f"the forward strand has not ended within {self.timeout_s:g} s")
        return results[0]

    def _guarded(self, strand: str, body: Callable[[], object]) -> None:
        """Run a strand when its turn comes, and let the other one go on after it.

        What it raises is kept for ``run``: the other strand must end first.
        """
        try:
            self._await(strand)
            self._begun.add(strand)
            body()
        except BaseException as error:
            with self._turn:
                if self._failure is None:
                    self._failure = error
        finally:
            with self._turn:
                self._running.discard(strand)
                self._give("B" if strand == "F" else "F")

    def _give(self, strand: str) -> None:
        self._current = strand
        self._turn.notify_all()

    def _await(self, strand: str) -> None:
        """Wait for the turn."""
        with self._turn:
            came = self._turn.wait_for(
                lambda: self._current == strand or self._failure is not None, self.timeout_s
            )
            if came:
                self._modes[strand].put_back()
            if self._failure is not None:
                raise StrandEnded(f"the other strand has failed: {self._failure}")
            if not came:
                raise TimeoutError(
                    f"the {'forward' if strand == 'F' else 'backward'} strand has waited "
                    f"{self.timeout_s:g} s for the other one"
                )

    def _before_wait(self) -> None:
        """Pass the turn on if the script says so; return when this strand may go on."""
        strand = "F" if threading.current_thread() is self._forward else "B"
        other = "B" if strand == "F" else "F"
        while True:
            with self._turn:
                whose = self.script[self._passed % len(self.script)]
                goes_on = whose == strand and other in self._begun
                if goes_on or other not in self._running:
                    self._passed += 1
                    self.order.append(strand)
                    if self._failure is not None:
                        raise StrandEnded(f"the other strand has failed: {self._failure}")
                    return
                self._modes[strand] = ModesOfProcess()
                self._give(other)
            self._await(strand)
