"""Virtual hardware: processes in virtual time, and links of a cluster that they share.

A *process* is a generator. It yields what it waits for: a number of microseconds, a ``Flag``, or
the result of ``Machine.send``, which is also a flag. The machine resumes it when that is there.

    rank 0  out ==>  [ switch, or root complex ]  ==> in  rank 1      one direction of each rank's
    rank 1  out ==>  [                         ]  ==> in  rank 0      link is a resource
                              |  both (PCIe only): what a rank sends and receives together
                              |  numa (PCIe only): between the NUMA domains of a host
                              |  port: of a rank to the network; ports of a host: shared

A flow is a number of bytes that crosses a list of resources. Flows that cross the same resource
share it by max-min fairness: all get equal shares, and what one flow cannot use, because another
resource limits it, goes to the rest. Rates are computed anew whenever the number of flows of a
route has changed. When a flow takes the place of one that ends, as from a queue, they stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from flux.machine.cluster import Cluster
from flux.select.hardware import DUPLEX_SHARE

INSTANT_US = 1e-6
"""Events this close are at one time. Symmetric ranks thus stay in step in spite of rounding."""


class Flag:
    """A condition that becomes true once, at ``at_us``; processes wait for it.

    Attributes:
        at_us: the time at which it became true; None: not yet.
        waiting: called when it becomes true.
    """

    __slots__ = ("at_us", "waiting")

    def __init__(self, at_us: float | None = None) -> None:
        self.at_us = at_us
        self.waiting: list[Callable[[], None]] = []


Process = Generator["float | Flag", None, None]


class Counter:
    """A flag that becomes true when ``arrive`` has been called ``missing`` times."""

    __slots__ = ("flag", "missing")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.flag = Flag()


class Route(NamedTuple):
    """The way from one rank to another."""

    resources: tuple[int, ...]
    latency_us: float
    across: bool


Resources = tuple[int, ...]
"""Numbers of the resources that a flow crosses."""


@dataclass(eq=False, slots=True)
class _Flow:
    """Bytes on the way."""

    number: int
    resources: Resources
    left: float  # bytes at ``since_us``
    done: Flag
    rate: float = 0.0  # bytes per microsecond since then
    since_us: float = 0.0
    version: int = 0


class SimulatedFabric:
    """The resources between the ranks of a world, and the routes over them.

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
        ends = [self._resource(("out", src), link.gbs), self._resource(("in", dst), link.gbs)]
        if link.kind == "pcie":
            both = 2 * DUPLEX_SHARE * link.gbs
            ends += [self._resource(("both", rank), both) for rank in (src, dst)]
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
class SimulatedMachine:
    """Runs processes in virtual time. Deterministic: equal times are served in order of creation.

    Attributes:
        capacity: of each resource, bytes per microsecond.
    """

    capacity: list[float]
    now_us: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _flows: dict[Resources, list[_Flow]] = field(default_factory=dict)
    _ends: list[tuple[float, int, int, _Flow]] = field(default_factory=list)
    _rates: dict[Resources, float] = field(default_factory=dict)
    _changes: dict[Resources, int] = field(default_factory=dict)
    _begun: list[_Flow] = field(default_factory=list)
    _created: int = 0
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

    def send(self, resources: Resources, nbytes: float) -> Flag:
        """Start a flow now; the flag becomes true when its last byte has crossed."""
        done = Flag()
        if nbytes <= 0:
            self.raise_(done)
        else:
            flow = _Flow(self._created, resources, nbytes, done)
            self._created += 1
            self._flows.setdefault(resources, []).append(flow)
            self._begun.append(flow)
            self._changes[resources] = self._changes.get(resources, 0) + 1
        return done

    def run(self) -> None:
        """Run until every process has ended."""
        while True:
            if self._changes:
                self._share()
            ends = [queue[0][0] for queue in (self._events, self._ends) if queue]
            if not ends:
                break
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
        self.now_us = to_us
        ended = []
        while self._ends and self._ends[0][0] <= to_us + INSTANT_US:
            _, _, version, flow = heapq.heappop(self._ends)
            if version == flow.version:
                ended.append(flow)
        ended.sort(key=lambda flow: flow.number)
        for flow in ended:
            self._flows[flow.resources].remove(flow)
            self._changes[flow.resources] = self._changes.get(flow.resources, 0) - 1
        for flow in ended:
            self.raise_(flow.done)
        while self._events and self._events[0][0] <= to_us + INSTANT_US:
            heapq.heappop(self._events)[2]()

    def _share(self) -> None:
        """Set the rates of flows: of new ones only, if each route has as many as before."""
        if any(self._changes.values()):
            self._rates = self._fair_rates()
            for resources, flows in self._flows.items():
                for flow in flows:
                    self._set_rate(flow, self._rates[resources])
        else:
            for flow in self._begun:
                self._set_rate(flow, self._rates[flow.resources])
        self._changes.clear()
        self._begun.clear()

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        flow.left -= flow.rate * (self.now_us - flow.since_us)
        flow.since_us, flow.rate = self.now_us, rate
        flow.version += 1
        end = self.now_us + max(flow.left, 0.0) / rate
        heapq.heappush(self._ends, (end, flow.number, flow.version, flow))

    def _fair_rates(self) -> dict[Resources, float]:
        """Return the rate of each flow of a route, by max-min fairness (progressive filling)."""
        left: dict[int, float] = {}
        users: dict[int, int] = {}
        open_ = {resources: len(flows) for resources, flows in self._flows.items() if flows}
        for resources, count in open_.items():
            for resource in resources:
                left[resource] = self.capacity[resource]
                users[resource] = users.get(resource, 0) + count
        rates: dict[Resources, float] = {}
        while open_:
            share = min(left[r] / n for r, n in users.items() if n)
            limit = share * (1 + 1e-12)
            full = {r for r, n in users.items() if n and left[r] / n <= limit}
            filled = [resources for resources in open_ if not full.isdisjoint(resources)]
            for resources in filled:
                rates[resources] = share
                count = open_.pop(resources)
                for resource in resources:
                    left[resource] -= share * count
                    users[resource] -= count
        return rates
