"""The virtual hardware of the op simulator: processes in virtual time, and links they share.

A *process* is a generator. It yields what it waits for: a number of microseconds, a ``Flag``, or
the result of ``Machine.send``, which is also a flag. The machine resumes it when that is there.

    rank 0  out ==>  [ switch, or root complex ]  ==> in  rank 1      one direction of each rank's
    rank 1  out ==>  [                         ]  ==> in  rank 0      link is a resource
                              |  numa (PCIe only): between the NUMA domains of a host
                              |  port: of a rank to the network; ports of a host: shared

A flow is a number of bytes that crosses a list of resources. Flows that cross the same resource
share it by max-min fairness: all get equal shares, and what one flow cannot use, because another
resource limits it, goes to the rest. Rates are computed anew whenever a flow starts or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from flux.machine.cluster import Cluster

INSTANT_US = 1e-6
"""Events this close are at one time. Symmetric ranks thus stay in step in spite of rounding."""


class Flag:
    """A condition that becomes true once, at ``at_us``; processes wait for it.

    Attributes:
        at_us: the time at which it became true; None: not yet.
        waiting: called when it becomes true.
    """

    __slots__ = ("at_us", "waiting")

    def __init__(self) -> None:
        self.at_us: float | None = None
        self.waiting: list[Callable[[], None]] = []


Process = Generator["float | Flag", None, None]


class Counter:
    """A flag that becomes true when ``arrive`` has been called ``missing`` times."""

    __slots__ = ("flag", "missing")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.flag = Flag()


class Route(NamedTuple):
    """The way from one rank to another.

    Attributes:
        resources: numbers of the resources that it crosses.
        latency_us: latency of one message.
        across: whether it leaves the host.
    """

    resources: tuple[int, ...]
    latency_us: float
    across: bool


@dataclass(eq=False)
class _Flow:
    """Bytes on the way.

    Attributes:
        resources: numbers of the resources that they cross.
        left: bytes still to be moved.
        done: raised when none are left.
        rate: bytes per microsecond.
    """

    resources: tuple[int, ...]
    left: float
    done: Flag
    rate: float = 0.0


class Fabric:
    """The resources between the ranks of a world, and the routes over them.

    Args:
        cluster: devices and links.
        hosts: the host of each rank.

    Attributes:
        capacity: of each resource, bytes per microsecond.
    """

    def __init__(self, cluster: Cluster, hosts: tuple[int, ...]) -> None:
        self._cluster, self._hosts = cluster, hosts
        self._numbers: dict[object, int] = {}
        self.capacity: list[float] = []
        lanes = [0] * (max(hosts) + 1)
        self._domain = []
        self._devices = max(cluster.devices, max(map(hosts.count, hosts)))
        for host in hosts:
            self._domain.append(lanes[host] * cluster.numa_domains // self._devices)
            lanes[host] += 1

    def _resource(self, key: object, gbs: float) -> int:
        """Return the number of a resource of this name and speed, in GB/s."""
        if key not in self._numbers:
            self._numbers[key] = len(self.capacity)
            self.capacity.append(gbs * 1e3)
        return self._numbers[key]

    def route(self, src: int, dst: int) -> Route:
        """Return the way from rank ``src`` to rank ``dst``."""
        cluster, link = self._cluster, self._cluster.link
        ends = [
            self._resource(("out", src), link.gbs),
            self._resource(("in", dst), link.gbs),
        ]
        if self._hosts[src] != self._hosts[dst]:
            network, port = cluster.network, cluster.network.gbits / 8
            ports = [
                self._resource(("port out", src), port),
                self._resource(("host out", self._hosts[src]), network.gbs),
                self._resource(("host in", self._hosts[dst]), network.gbs),
                self._resource(("port in", dst), port),
            ]
            # A network card reads the memory of a GPU through its PCIe link.
            shared = ends if link.kind == "pcie" else []
            return Route((*shared, *ports), network.latency_us, True)
        domains = self._domain[src], self._domain[dst]
        if link.kind == "pcie" and link.numa_gbs and domains[0] != domains[1]:
            ends.append(self._resource(("numa", self._hosts[src], *domains), link.numa_gbs))
        return Route(tuple(ends), link.latency_us, False)


@dataclass
class Machine:
    """Runs processes in virtual time. Deterministic: equal times are served in order of creation.

    Attributes:
        capacity: of each resource, bytes per microsecond.
        now_us: the virtual time.
        steps: number of instants at which anything happened.
    """

    capacity: list[float]
    now_us: float = 0.0
    steps: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _flows: list[_Flow] = field(default_factory=list)
    _created: int = 0
    _stale: bool = False
    _running: int = 0

    def spawn(self, process: Process) -> None:
        """Start a process now."""
        self._running += 1
        self._later(0.0, lambda: self._resume(process))

    def raise_(self, flag: Flag) -> None:
        """Make a flag true now; a second time changes nothing."""
        if flag.at_us is not None:
            return
        flag.at_us = self.now_us
        for resume in flag.waiting:
            resume()
        flag.waiting.clear()

    def arrive(self, counter: Counter) -> None:
        """Count one arrival."""
        counter.missing -= 1
        if counter.missing == 0:
            self.raise_(counter.flag)

    def send(self, resources: tuple[int, ...], nbytes: float) -> Flag:
        """Start a flow now; the flag becomes true when its last byte has crossed."""
        done = Flag()
        if nbytes <= 0:
            self.raise_(done)
        else:
            self._flows.append(_Flow(resources, nbytes, done))
            self._stale = True
        return done

    def run(self) -> None:
        """Run until every process has ended.

        Raises:
            RuntimeError: processes wait for flags that no process raises.
        """
        while self._events or self._flows:
            if self._stale:
                self._share()
            ends = [self.now_us + flow.left / flow.rate for flow in self._flows]
            if self._events:
                ends.append(self._events[0][0])
            self._advance(min(ends))
        if self._running:
            raise RuntimeError(f"{self._running} processes wait for flags that none raises")

    def _later(self, after_us: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_us + after_us, self._created, action))
        self._created += 1

    def _resume(self, process: Process) -> None:
        """Run a process up to its next wait that is not over yet."""
        for awaited in process:
            if isinstance(awaited, Flag):
                if awaited.at_us is None:
                    awaited.waiting.append(lambda: self._resume(process))
                    return
            elif awaited > 0:
                self._later(awaited, lambda: self._resume(process))
                return
        self._running -= 1

    def _advance(self, to_us: float) -> None:
        """Move the virtual time, and serve everything that happens at that instant."""
        passed = to_us - self.now_us
        self.now_us = to_us
        self.steps += 1
        ended = []
        for flow in self._flows:
            flow.left -= flow.rate * passed
            if flow.left <= flow.rate * INSTANT_US:
                ended.append(flow)
        if ended:
            self._flows = [flow for flow in self._flows if flow not in ended]
            self._stale = True
            for flow in ended:
                self.raise_(flow.done)
        while self._events and self._events[0][0] <= to_us + INSTANT_US:
            heapq.heappop(self._events)[2]()

    def _share(self) -> None:
        """Set the rates of all flows by max-min fairness (progressive filling)."""
        self._stale = False
        left: dict[int, float] = {}
        users: dict[int, int] = {}
        for flow in self._flows:
            for resource in flow.resources:
                left[resource] = self.capacity[resource]
                users[resource] = users.get(resource, 0) + 1
        open_ = list(self._flows)
        while open_:
            share = min(left[r] / n for r, n in users.items() if n)
            limit = share * (1 + 1e-12)
            full = {r for r, n in users.items() if n and left[r] / n <= limit}
            rest = []
            for flow in open_:
                if full.isdisjoint(flow.resources):
                    rest.append(flow)
                    continue
                flow.rate = share
                for resource in flow.resources:
                    left[resource] -= share
                    users[resource] -= 1
            open_ = rest
