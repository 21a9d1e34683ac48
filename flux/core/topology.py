"""The arrangement of ranks on hosts and NUMA domains, for communication orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """Ranks as ``nodes`` x ``domains`` (NUMA) x ``lanes``, lanes fastest.

    rank = (node * domains + domain) * lanes + lane

    Hosts with different numbers of ranks, or with ranks that are not numbered host by host, form no
    such mesh. For them ``uneven`` holds the host of each rank, ``nodes`` is the number of hosts,
    and ``lanes`` is the number of ranks of the largest host. Only the hierarchical order uses
    ``uneven``.

    ``world`` is the number of ranks. ``mesh`` is (nodes, domains, lanes), as the native maps take
    it; flat if there is no mesh.
    """

    nodes: int = 1
    domains: int = 1
    lanes: int = 1
    uneven: tuple[int, ...] = ()
    world: int = field(init=False, repr=False, compare=False)
    mesh: tuple[int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("nodes", self.nodes),
            ("domains", self.domains),
            ("lanes", self.lanes),
        ):
            if value < 1:
                raise ValueError(f"Topology.{name} must be at least 1, got {value}")
        if self.uneven and set(self.uneven) != set(range(self.nodes)):
            raise ValueError(
                f"Topology.uneven must number its hosts from 0 to {self.nodes - 1}, "
                f"got {self.uneven}"
            )
        world = len(self.uneven) or self.nodes * self.domains * self.lanes
        mesh = (1, 1, world) if self.uneven else (self.nodes, self.domains, self.lanes)
        vars(self).update(world=world, mesh=mesh)

    @staticmethod
    def flat(world: int) -> Topology:
        """Return a topology of ``world`` equal ranks: one node, one domain."""
        return Topology(1, 1, world)

    @staticmethod
    def of_hosts(hosts: Sequence[Hashable]) -> Topology:
        """Return the topology of ranks on these hosts (one entry per rank; any hashable value)."""
        numbers: dict[Hashable, int] = {}
        of_ranks = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        nodes, lanes = len(numbers), max(Counter(of_ranks).values())
        if of_ranks == tuple(rank // lanes for rank in range(nodes * lanes)):
            return Topology(nodes, 1, lanes)
        return Topology(nodes, 1, lanes, of_ranks)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host (node) of each rank."""
        per_node = self.domains * self.lanes
        return self.uneven or tuple(rank // per_node for rank in range(self.world))

    def __str__(self) -> str:
        if self.uneven:
            return f"{self.nodes} hosts, by rank {'-'.join(map(str, self.uneven))}"
        return f"{self.nodes} node(s) x {self.domains} domain(s) x {self.lanes} rank(s)"
