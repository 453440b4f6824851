"""Machine: where a problem runs. Nodes, devices, engines and links with their curves.

A profile is one TOML file in schedules/machines. A profile whose links have rates makes the host
engine last as long as those links would (`paced`); one without runs at the machine's own speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ficco import data
from ficco.errors import MachineError

__all__ = ["Link", "Machine"]


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links.

    Attributes:
        scope: "node" (between devices of a node) or "network" (between nodes).
        per: what the rate belongs to. "pair": every ordered pair of devices has a link of its own
            (full mesh). "port": every device has one port out and one port in, shared by all its
            transfers (switch).
        gbps: (bytes of a transfer, GB/s it reaches alone) points, by rising size; empty: unpaced.
        latency_us: from the start of a transfer to its first byte.
    """

    scope: str
    per: str
    gbps: tuple[tuple[int, float], ...] = ()
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if self.scope not in ("node", "network"):
            raise MachineError(f"link scope {self.scope!r}: it is 'node' or 'network'")
        if self.per not in ("pair", "port"):
            raise MachineError(f"link per {self.per!r}: it is 'pair' or 'port'")
        sizes = [size for size, _ in self.gbps]
        if sizes != sorted(set(sizes)) or any(size < 1 for size in sizes):
            raise MachineError(f"link gbps: sizes {sizes} must be positive and rise")
        if any(not (math.isfinite(rate) and rate > 0) for _, rate in self.gbps):
            raise MachineError("link gbps: every rate is a positive number of GB/s")
        if not (math.isfinite(self.latency_us) and self.latency_us >= 0):
            raise MachineError(f"link latency_us={self.latency_us}: it is 0 or more")

    @property
    def paced(self) -> bool:
        """Whether the link has a rate at all."""
        return bool(self.gbps)

    @property
    def peak_gbps(self) -> float:
        """The rate of the largest transfers; infinite where the link has none."""
        return max((rate for _, rate in self.gbps), default=math.inf)

    def gbps_at(self, size_bytes: int) -> float:
        """Return the rate of one transfer of this size alone, between points by log of the size."""
        if not self.gbps:
            return math.inf
        below = [point for point in self.gbps if point[0] <= size_bytes]
        above = [point for point in self.gbps if point[0] > size_bytes]
        if not below:
            return above[0][1]
        if not above:
            return below[-1][1]
        (size0, rate0), (size1, rate1) = below[-1], above[0]
        share = math.log(size_bytes / size0) / math.log(size1 / size0)
        return rate0 + share * (rate1 - rate0)

    def transfer_us(self, size_bytes: int) -> float:
        """Return the time of one transfer alone on its link."""
        if not self.gbps or size_bytes == 0:
            return self.latency_us
        return self.latency_us + size_bytes / (self.gbps_at(size_bytes) * 1e3)


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes times devices, their engines and links.

    Attributes:
        name: how commands call it.
        about: one line on what it stands for.
        nodes: number of nodes.
        devices: devices of a node.
        engine: the engine that runs it: "host", "cuda" or "hip".
        links: link classes, one per scope.
        copy_engines: copy engines of a device; 0: not known, as many lanes as asked for.
        gemm_gflops: dense rate of one device by dtype; empty: unpaced.
    """

    name: str
    nodes: int
    devices: int
    engine: str
    links: tuple[Link, ...]
    about: str = ""
    copy_engines: int = 0
    gemm_gflops: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise MachineError(f"machine {self.name!r}: nodes and devices are 1 or more")
        if self.engine not in ("host", "cuda", "hip"):
            raise MachineError(
                f"machine {self.name!r}: engine {self.engine!r} is not one of host, cuda, hip"
            )
        scopes = [link.scope for link in self.links]
        if len(set(scopes)) != len(scopes) or "node" not in scopes:
            raise MachineError(
                f"machine {self.name!r}: links of scope {scopes} found; it has exactly one of "
                "scope 'node' and at most one of scope 'network'"
            )
        if self.nodes > 1 and "network" not in scopes:
            raise MachineError(f"machine {self.name!r}: several nodes need a link 'network'")
        for dtype, rate in self.gemm_gflops:
            if not (math.isfinite(rate) and rate > 0):
                raise MachineError(
                    f"machine {self.name!r}: gemm_gflops.{dtype}={rate}: it is a positive number"
                )

    @property
    def ranks(self) -> int:
        """How many ranks it has room for, one a device."""
        return self.nodes * self.devices

    @property
    def link(self) -> Link:
        """The links inside a node."""
        return next(link for link in self.links if link.scope == "node")

    @property
    def paced(self) -> bool:
        """Whether the host engine makes transfers or GEMMs last longer than they really do."""
        return self.engine == "host" and (self.link.paced or bool(self.gemm_gflops))

    @property
    def best_route(self) -> str:
        """The route that fills the links: all at once on a mesh, one peer at a time on a switch.

        On 8 H200s behind a switch pushes to one peer at a time reached 386 GB/s a GPU, to all
        seven at once 198 (2026-11-20).
        """
        return "all_peers" if self.link.per == "pair" else "rotation"

    @property
    def best_order(self) -> str:
        """The order of chunks that keeps ranks from meeting at one receiver."""
        return "by_step" if self.link.per == "pair" else "by_peer"

    @property
    def whole_transport(self) -> str:
        """What moves whole shards: the vendor's collectives on GPUs, copies on the host engine."""
        return "dma" if self.engine == "host" else "collective"

    def gemm_us(self, flops: float, dtype: str) -> float:
        """Return how long a GEMM of so many operations lasts by the profile; 0 where unpaced."""
        rates = dict(self.gemm_gflops)
        rate = rates.get(dtype, rates.get("any", math.inf))
        return flops / (rate * 1e3)

    @classmethod
    def named(cls, name: str) -> Machine:
        """Read a shipped profile, or a file where the name ends in .toml.

        Raises:
            MachineError: there is none, or it is no profile.
        """
        return cls.from_toml(data.load("machines", name, "machine", MachineError), name)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], name: str) -> Machine:
        """Build a machine from a parsed profile; `name` serves for messages.

        Raises:
            MachineError: a field is missing, unknown or wrong.
        """
        known = {
            "name": str,
            "about": str,
            "nodes": int,
            "devices": int,
            "engine": str,
            "copy_engines": int,
            "gemm_gflops": dict,
            "links": list,
        }
        _check_fields(table, known, f"machine {name!r}")
        for field in ("name", "devices", "engine", "links"):
            if field not in table:
                raise MachineError(f"machine {name!r}: the field {field!r} is missing")
        try:
            links = tuple(_link(entry, f"machine {name!r}, links") for entry in table["links"])
            gemm = tuple((str(k), float(v)) for k, v in table.get("gemm_gflops", {}).items())
        except (TypeError, ValueError) as wrong:
            raise MachineError(f"machine {name!r}: {wrong}") from None
        return cls(
            name=table["name"],
            about=table.get("about", ""),
            nodes=table.get("nodes", 1),
            devices=table["devices"],
            engine=table["engine"],
            links=links,
            copy_engines=table.get("copy_engines", 0),
            gemm_gflops=gemm,
        )


def _link(entry: Any, where: str) -> Link:
    if not isinstance(entry, dict):
        raise MachineError(f"{where}: {entry!r} found, a table [[links]] expected")
    _check_fields(entry, {"scope": str, "per": str, "gbps": list, "latency_us": float}, where)
    for field in ("scope", "per"):
        if field not in entry:
            raise MachineError(f"{where}: the field {field!r} is missing")
    curve = tuple((int(size), float(rate)) for size, rate in entry.get("gbps", []))
    return Link(entry["scope"], entry["per"], curve, float(entry.get("latency_us", 0.0)))


def _check_fields(table: Mapping[str, Any], known: Mapping[str, type], where: str) -> None:
    for field, value in table.items():
        if field not in known:
            raise MachineError(f"{where}: unknown field {field!r}. Known: {', '.join(known)}")
        kind = known[field]
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or isinstance(value, bool):
            raise MachineError(f"{where}: {field}={value!r}: a {kind.__name__} is expected")
