"""What is connected to what, as far as a communication order needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Ranks as ``nodes`` x ``domains`` (NUMA) x ``lanes``, lanes fastest.

    rank = (node * domains + domain) * lanes + lane
    """

    nodes: int = 1
    domains: int = 1
    lanes: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("nodes", self.nodes),
            ("domains", self.domains),
            ("lanes", self.lanes),
        ):
            if value < 1:
                raise ValueError(f"Topology.{name} must be at least 1, got {value}")

    @staticmethod
    def flat(world: int) -> Topology:
        """All ``world`` ranks alike: one node, one domain."""
        return Topology(1, 1, world)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.domains * self.lanes

    @property
    def mesh(self) -> tuple[int, int, int]:
        """(nodes, domains, lanes), as the native maps take it."""
        return (self.nodes, self.domains, self.lanes)

    def __str__(self) -> str:
        return f"{self.nodes} node(s) x {self.domains} domain(s) x {self.lanes} rank(s)"
