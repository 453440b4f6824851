"""Links of a machine as ports that copies go through, and copies as transfers over them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.curves import Curve
from ficco.errors import MachineError
from ficco.machine import Link, Machine

__all__ = ["Ports", "Transfer", "Wires"]

NO_PORT = -1


class Transfer(NamedTuple):
    """A copy over a link.

    Attributes:
        latency_ns: before its first byte.
        size_bytes: what flows then.
        gbps: the most that it reaches, alone.
    """

    latency_ns: float
    size_bytes: float
    gbps: float


class Ports(NamedTuple):
    """Which ports a copy goes through, and what they carry; see ficco/_native.pyi.

    Attributes:
        routes: [world * world, 3], by sender and receiver.
        kinds: of each port.
        rates: of each kind, in GB/s, by the number of copies.
    """

    routes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]
    rates: list[list[float]]


class Wires:
    """The links of a machine between so many ranks.

    The host engine paces every pair of ranks by the links of a node, and knows neither rows nor
    what a device reaches with several peers; nor do its wires.

    Attributes:
        ports: of the links.

    Raises:
        MachineError: ranks on different nodes, and no rate of the network.
    """

    def __init__(self, machine: Machine, world: int) -> None:
        self.paced = machine.engine == "host" and machine.pacing
        self.devices = world if self.paced else machine.devices
        used = ("node",) if world <= self.devices else ("node", "network")
        self.links = tuple([link for link in machine.links if link.scope in used])
        if self.paced:
            link = machine.link
            self.links = (Link("node", link.per, link.gbps, link.latency_us),)
        for found in self.links:
            if not found.paced:
                raise MachineError(
                    f"machine {machine.name!r}: {world} ranks are more than a node's "
                    f"{machine.devices}, and its link {found.scope!r} has no rates (gbps) to "
                    "predict from; measure them, or use fewer ranks"
                )
        self.ports = _ports(self.links, self.devices, world)

    def link(self, one: int, other: int) -> Link:
        """Return the link between two ranks."""
        scope = "node" if one // self.devices == other // self.devices else "network"
        return next(found for found in self.links if found.scope == scope)

    def transfer(
        self, link: Link, size_bytes: int, row_bytes: int = 0, turned: bool = False
    ) -> Transfer:
        """Return a copy of so many bytes.

        Args:
            link: between its ranks.
            size_bytes: of all of it.
            row_bytes: of one row, where rows lie apart; 0 where they do not.
            turned: whether its lane has just sent to another peer, and not waited since.

        Alone it lasts `Link.transfer_us`. Where a small one loses by its size, the paced engine
        lets it begin later and then flow at the link's full rate (`ficco.engines.rows`), and so
        does this for machines of that engine. Elsewhere it is slower all the way, and leaves to
        others what it does not use. With one rate for all sizes, as in all shipped profiles of
        the paced engine, both are the same.
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

    A mesh has one for every ordered pair; a switch one out and one in of every device. Where it is
    known what a device reaches with several peers at once, it has them on a mesh, too.
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
                each = numbers[:, None] if side == 1 else numbers[None, :]
                routes[here, side] = np.broadcast_to(each, (world, world))[here]
    return Ports(routes.reshape(-1, 3), np.array(kinds, np.int64), rates)


def _by_number(curve: Curve) -> list[float]:
    """Return a curve's values at 1, 2, ... up to its last point."""
    return [curve.at(number) for number in range(1, math.ceil(curve.points[-1][0]) + 1)]
