"""Simulate hosts on one machine: network namespaces joined by a bridge with rate-limited links.

    host 0 --eth0 (tbf)--.
    host 1 --eth0 (tbf)--+-- bridge, in a namespace of its own
    host 2 --eth0 (tbf)--'

Each link is a veth pair. A token bucket (`tc ... tbf`) limits the rate of both ends, so both
directions have the full rate, as on a switch. Nothing is added to the machine's own namespace.
Needs root and the `ip` and `tc` commands; Linux only.

Names contain the process that made them. Namespaces of a process that has ended are leftovers (of a
crash or a SIGKILL), and the next run removes them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from flux.core.datafile import shown

MTU = 9000
SUBNET = "10.77.0"
INTERFACE = "eth0"
MAX_HOSTS = 64
LINK_UP_S = 5.0
_PREFIX = "flux-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-(\d+)-(sw|h\d+)$")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(k|m|g)?bit", re.IGNORECASE)
_LEAST_RATE, _MOST_RATE = 1e3, 1e12
"""Beyond these the sizes of a token bucket do not fit what tc takes."""
_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")


class HostsUnavailableError(RuntimeError):
    """This machine cannot simulate hosts; the message says what is missing."""


def parse_rate(text: str) -> float:
    """Return the bits per second of a rate in tc's notation: ``500mbit``, ``1gbit``.

    Raises:
        ValueError: another format, or a rate of 0.
    """
    match = _RATE.fullmatch(text.strip())
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
    rate = float(match[1]) * scale[(match[2] or "").lower()] if match else 0.0
    if rate <= 0:
        raise ValueError(f"link rate must look like 500mbit or 1gbit, got {shown(text)}")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ValueError(f"link rate must be in [1kbit, 1000gbit], got {shown(text)}")
    return rate


def parse_hosts(text: str, world: int) -> tuple[int, ...]:
    """Return the host of each rank.

    ``2`` distributes the ranks evenly over two hosts; ``3+1`` gives the number of ranks per host.

    Raises:
        ValueError: malformed, more hosts than ranks, or a sum that is not the number of ranks.
    """
    parts = text.split("+")
    if not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part, re.ASCII) for part in parts):
        raise ValueError(f"hosts must look like 2 or 3+1, got {shown(text)}")
    sizes = [int(part) for part in parts]
    if len(sizes) == 1:
        count = sizes[0]
        if not 1 <= count <= min(world, MAX_HOSTS):
            raise ValueError(f"hosts must be in [1, {min(world, MAX_HOSTS)}], got {count}")
        sizes = [world // count + (host < world % count) for host in range(count)]
    if min(sizes) < 1 or sum(sizes) != world:
        raise ValueError(f"hosts {text} have {sum(sizes)} ranks, but there are {world}")
    return tuple(host for host, size in enumerate(sizes) for _ in range(size))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise HostsUnavailableError(f"`{' '.join(command)}` failed: {why}")
    return done.stdout


def _start_time(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def check_available() -> None:
    """Check that this machine can simulate hosts.

    Raises:
        HostsUnavailableError: it cannot; the message says what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise HostsUnavailableError("several hosts on one machine need Linux network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise HostsUnavailableError(f"the command {tool} is missing: install iproute2")
    if os.geteuid() != 0:
        raise HostsUnavailableError("network namespaces need root: run as root, or on real hosts")


def remove_leftovers() -> list[str]:
    """Remove namespaces whose maker has ended, and their processes; return the names."""
    removed = []
    for path in sorted(_FOLDER.glob(f"{_PREFIX}*")):
        match = _NAME.match(path.name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _remove(path.name)
            removed.append(path.name)
    return removed


def _remove(name: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    for pid in done.stdout.split():
        if int(pid) != os.getpid():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended by itself
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(frozen=True)
class Placed:
    """The host of one rank; pickled and sent to the rank."""

    namespace: str
    host: int

    def enter(self) -> None:
        """Move this thread, and all threads and processes that it starts, onto the host.

        Call it before any socket is opened.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with open(_FOLDER / self.namespace) as handle:
            if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot enter {self.namespace}: {os.strerror(error)}")
        os.environ["FLUX_HOST"] = self.namespace
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts:
    """``count`` hosts and the links between them, for the duration of a ``with`` block.

    Args:
        count: number of hosts.
        link_rate: of every link, in both directions, in tc's notation; None: unlimited.

    Raises:
        HostsUnavailableError: rights, commands or kernel support are missing; nothing is left
            behind.
    """

    def __init__(self, count: int, link_rate: str | None = None) -> None:
        check_available()
        self.count = count
        self.link_rate = link_rate
        self._rate = None if link_rate is None else parse_rate(link_rate)
        self._pid = os.getpid()
        self._id = f"{_PREFIX}{self._pid}-{_start_time(self._pid)}"
        self.names = [f"{self._id}-h{host}" for host in range(count)]
        self.switch = f"{self._id}-sw"

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts and their processes. Idempotent.

        A forked child that leaves the ``with`` block removes nothing.
        """
        if self._pid != os.getpid():
            return
        for name in (*self.names, self.switch):
            if (_FOLDER / name).exists():
                _remove(name)

    def placed(self, hosts: Sequence[int]) -> list[Placed]:
        """Return the placement of each rank, given its host."""
        return [Placed(self.names[host], host) for host in hosts]

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "mtu", str(MTU), "up")
        for host, name in enumerate(self.names):
            port, inside = f"p{host}", ["ip", "-n", name]
            _run("ip", "netns", "add", name)
            _run(*inside, "link", "set", "lo", "up")
            create = ["link", "add", INTERFACE, "mtu", str(MTU), "type", "veth"]
            _run(*inside, *create, "peer", "name", port, "mtu", str(MTU), "netns", self.switch)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            _run(*inside, "addr", "add", f"{SUBNET}.{host + 1}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            self._limit(name, INTERFACE)
            self._limit(self.switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        """Add a token bucket to a device.

        Bursts of 64 KiB and more pass the kernel's large segments unsplit, which a real card would
        split in hardware. The queue holds 20 ms.
        """
        if self._rate is None:
            return
        burst = max(128 << 10, int(self._rate / 8 * 1e-3))
        limit = burst + int(self._rate / 8 * 20e-3)
        shape = ["rate", f"{self._rate:.0f}bit", "burst", str(burst), "limit", str(limit)]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def set_link(switch: str, host: int, up: bool) -> None:
    """Set the link of a host up or down, as plugging or pulling its cable would.

    Any process may call it.
    """
    _run("ip", "-n", switch, "link", "set", f"p{host}", "up" if up else "down")


def link_bytes() -> int:
    """Return the bytes that have left this host so far, headers included; call it on a rank."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def wait_for_link() -> None:
    """Wait until the own interface is up; a new bridge port may take a moment.

    Raises:
        HostsUnavailableError: it did not come up in time.
    """
    deadline = time.monotonic() + LINK_UP_S
    while time.monotonic() < deadline:
        if "state UP" in _run("ip", "link", "show", INTERFACE):
            return
        time.sleep(0.01)
    raise HostsUnavailableError(f"link {INTERFACE} did not come up within {LINK_UP_S:g} s")
