"""Links of a machine as ports, and copies as transfers through ports."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.core.curves import Curve
from ficco.core.errors import MachineError
from ficco.core.machine import Link, Machine

NO_PORT = -1


class Transfer(NamedTuple):
    """A copy over a link.

    Attributes:
        latency_ns: time before its first byte.
        size_bytes: bytes that then flow.
        gbps: its highest rate, without contention.
    """

    latency_ns: float
    size_bytes: float
    gbps: float


class Ports(NamedTuple):
    """The ports of copies, and their rates; see ficco/_native.pyi.

    Attributes:
        routes: [world * world, 3], ports by sender and receiver.
        kinds: kind of each port.
        rates: rates of each kind in GB/s, by the number of copies.
    """

    routes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]
    rates: list[list[float]]


class Wires:
    """The links of a machine between `world` ranks.

    The host engine paces every pair of ranks by the links of a node. It ignores row sizes and the
    rates that a device reaches with several peers; so do its wires.

    Attributes:
        ports: ports of the links.

    Raises:
        MachineError: ranks are on different nodes, and the network has no rate.
    """

    def __init__(self, machine: Machine, world: int) -> None:
        self.paced = machine.engine == "host" and machine.pacing
        self.devices = world if self.paced else machine.devices
        used = ("node",) if world <= self.devices else ("node", "network")
        self.links = tuple([link for link in machine.links if link.scope in used])
        if self.paced:
            link = machine.link
            self.links = (Link("node", link.per, link.gbps, link.latency_us),)
        for link in self.links:
            if not link.paced:
                raise MachineError(
                    f"machine {machine.name!r}: {world} ranks are more than a node's "
                    f"{machine.devices}, and its link {link.scope!r} has no rates (gbps) to "
                    "predict from; measure them, or use fewer ranks"
                )
        self.ports = _ports(self.links, self.devices, world)

    def link(self, one: int, other: int) -> Link:
        """Return the link between two ranks."""
        scope = "node" if one // self.devices == other // self.devices else "network"
        return next(link for link in self.links if link.scope == scope)

    def transfer(
        self, link: Link, size_bytes: int, row_bytes: int = 0, turned: bool = False
    ) -> Transfer:
        """Return the transfer of a copy.

        Args:
            link: the link between its ranks.
            size_bytes: size of the copy.
            row_bytes: size of one row, if rows are not contiguous; else 0.
            turned: whether its lane has just sent to another peer, without a wait since.

        Without contention it takes `Link.transfer_us`. The lower rate of a small copy has two
        models. The paced engine delays it and then lets it flow at the link's full rate
        (`ficco.program.encoding`); machines of that engine do so here, too. Elsewhere the
        copy flows at a lower rate, and other copies can use the rest. With one rate for all
        sizes, as in all shipped profiles of the paced engine, both models are equal.
        """
        if self.paced:
            flows_us = size_bytes / (link.peak_gbps * 1e3)
            latency_us = link.transfer_us(size_bytes) - flows_us
            return Transfer(1e3 * latency_us, size_bytes, link.peak_gbps)
        gbps = link.gbps_at(size_bytes) if size_bytes else link.peak_gbps
        if row_bytes and link.row_gbps:
            gbps = min(gbps, link.row_gbps.at(row_bytes))
        turn_us = link.turn_us.at(size_bytes) if turned and size_bytes else 0.0
        return Transfer(1e3 * (link.latency_us + turn_us), size_bytes, gbps)


@lru_cache(maxsize=32)
def _ports(links: tuple[Link, ...], devices: int, world: int) -> Ports:
    """Number the ports of all links.

    A mesh has a port per ordered pair of devices; a switch has one port out and one in per device.
    If the rates of a device with several peers are known, a mesh has the latter, too.
    """
    routes: npt.NDArray[np.int64] = np.full((world, world, 3), NO_PORT, np.int64)
    node = np.arange(world) // devices
    near = node[:, None] == node[None, :]
    kinds: list[int] = []
    rates: list[list[float]] = []

    def new(count: int, gbps: list[float]) -> npt.NDArray[np.int64]:
        first = len(kinds)
        kinds.extend([len(rates)] * count)
        rates.append(gbps)
        return np.arange(first, first + count)

    for link in links:
        here = near if link.scope == "node" else ~near
        whole = [link.peak_gbps]
        if link.per == "pair":
            routes[here, 0] = new(world * world, whole).reshape(world, world)[here]
        for side, curve in ((1, link.out_gbps), (2, link.in_gbps)):
            if curve or link.per == "port":
                numbers = new(world, _by_number(curve) if curve else whole)
                port = numbers[:, None] if side == 1 else numbers[None, :]
                routes[here, side] = np.broadcast_to(port, (world, world))[here]
    return Ports(routes.reshape(-1, 3), np.array(kinds, np.int64), rates)


def _by_number(curve: Curve) -> list[float]:
    """Return a curve's values at 1, 2, ... up to its last point."""
    return [curve.at(number) for number in range(1, math.ceil(curve.points[-1][0]) + 1)]
