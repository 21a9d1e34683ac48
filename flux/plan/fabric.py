"""The links that each group of ranks communicates over.

Ranks are numbered with tp fastest, then cp, dp and pp slowest, and fill one host after another:

    rank = ((pp * DP + dp) * CP + cp) * TP + tp        host = rank // devices of a host

A group is a set of ranks with a constant stride. All groups of a kind communicate at the same time,
so the ranks of a host share its network ports equally.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flux.core.problem import ceil_div
from flux.machine.cluster import Cluster
from flux.plan.graph import GROUPS
from flux.plan.mesh import parse_group
from flux.plan.model import Parallel
from flux.select.hardware import OVERLAP


@dataclass(frozen=True)
class GroupSpan:
    """Where the ranks of a group are.

    Attributes:
        size: ranks of the group.
        per_host: of them on one host.
        hosts: that the group is on.
    """

    size: int
    per_host: int
    hosts: int


@dataclass(frozen=True)
class Fabric:
    """A cluster, and how the ranks of a step are placed on it.

    Raises:
        ValueError: the cluster has too few devices, or no link of a kind that a group needs.
    """

    cluster: Cluster
    parallel: Parallel
    _spans: dict[str, GroupSpan] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        world, cluster = self.parallel.world, self.cluster
        devices = cluster.hosts * cluster.devices
        if world > devices:
            raise ValueError(
                f"{cluster.name} has {devices} devices ({cluster.hosts} hosts of {cluster.devices})"
                f", and tp * cp * dp * pp = {world}; more hosts can be assumed (--hosts)"
            )
        for group in GROUPS:
            span = self.span(group)
            if span.per_host > 1 and cluster.link.gbs <= 0:
                raise ValueError(f"{cluster.source}: link.gbs is not known, and {group} needs it")
            if span.hosts > 1 and cluster.network.gbs <= 0:
                raise ValueError(
                    f"{cluster.source}: the network's speed is not known, and {group} = "
                    f"{span.size} crosses hosts of {cluster.devices} devices"
                )

    def span(self, group: str) -> GroupSpan:
        """Return where the ranks of a group, or of a part of it (flux/plan/mesh.py), are."""
        return self._spans.get(group) or self._spans.setdefault(group, self._span(group))

    def _span(self, group: str) -> GroupSpan:
        p, part, devices = self.parallel, parse_group(group), self.cluster.devices
        expert_stride, copies = p.expert_ranks
        size, stride = {
            "tp": (p.tp, 1),
            "cp": (p.cp, p.tp),
            "ep": (p.ep, expert_stride),
            "edp": (copies, expert_stride * p.ep),
            "dp": (p.dp * p.cp, p.tp),
            "pp": (p.pp, p.tp * p.cp * p.dp),
        }[part.base]
        if part.base == "edp" and expert_stride > 1:  # those inside a replica come first
            per_host = min(p.cp, ceil_div(devices, p.tp))
            per_host *= max(1, min(p.dp // p.ep, devices // stride))
            stride = max(1, devices // per_host)
        if part.mesh:
            size, stride = part.size, stride * part.stride
        per_host = max(1, min(size, self.cluster.devices // stride))
        return GroupSpan(size, per_host, ceil_div(size, per_host))

    def resource(self, group: str) -> str:
        """Return the resource that a group's collectives occupy: ``intra`` or ``inter``."""
        return "intra" if self.span(group).hosts == 1 else "inter"

    def overlap(self, group: str) -> float:
        """Return the overlap effectiveness of computation beside a group's collectives."""
        known = self.cluster.overlap or OVERLAP[self.cluster.device.kind]
        return known[max(hosts for hosts in known if hosts <= self.span(group).hosts)]

    @property
    def port_gbs(self) -> float:
        """GB/s of one rank's share of its host's network ports."""
        return self.cluster.network.gbs / min(self.cluster.devices, self.parallel.world)
