"""FLUX_CHECK=1: calls of a process group are compared before they begin.

Ops meet their peers on memory of their own, so ranks that call two ops in different orders wait for
each other in different places. On GPUs the host meets no rank at all. In this mode every call of
every op of a group is announced to all ranks first, through torch.distributed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from flux.transport.exchange import Exchange

_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))


class Comparison:
    """Compare the calls of one op. Construction is collective.

    Rank 0 numbers the ops of a group. Ranks cannot count for themselves: of an op that one rank
    fails to build, the others may have come this far.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        number = exchange.all_gather(next(_numbers[exchange.group_name]))[0]
        self._name = f"{exchange.label} {number}"
        self._calls = 0

    def compare(self, what: str) -> ValueError | None:
        """Announce a call; return the error of all ranks if they make different calls. Collective.

        The error is returned, since a ValueError that is raised may be that of a signal handler.
        """
        return self._meet(what, "")

    def refuse(self, why: str) -> None:
        """Announce that this rank's input was refused; its caller raises that itself."""
        self._meet("", why)

    def _meet(self, what: str, refusal: str) -> ValueError | None:
        self._calls += 1
        mine = f"call {self._calls} of {self._name} (of the group's ops), {what}"
        entries = self._exchange.all_gather((mine, refusal))
        if refusal:
            return None
        for rank, (_, why) in enumerate(entries):
            if why:
                return ValueError(f"{self._name}: rank {rank} refused its input: {why}")
        texts = [text for text, _ in entries]
        common = Counter(texts).most_common(1)[0][0]
        for rank, text in enumerate(texts):
            if text != common:
                other = texts.index(common)
                return ValueError(
                    f"{self._name}: ranks make different calls: rank {rank} {text}; rank {other} "
                    f"{common}"
                )
        return None
