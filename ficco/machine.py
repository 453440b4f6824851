"""Machine: where a problem runs. Nodes, devices, engines, links and costs with their curves.

A profile is one TOML file in schedules/machines. It serves twice: what it knows of rates and costs
is what the simulator and the selector predict from; and on the host engine, links with rates make
transfers last as long as those links would (`paced`), while a profile whose links have none, or
that was measured on the machine itself (`paced = false`), runs at the machine's own speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ficco import data, reading
from ficco.costs import Costs
from ficco.curves import LEAST, MOST, Curve, GemmTimes
from ficco.errors import InputError, MachineError
from ficco.problem import DTYPES

__all__ = ["COLLECTIVES", "SLICED_ROWS", "Costs", "Link", "Machine"]

_UNKNOWN = Curve(())
_FREE = Costs()
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SLICED_ROWS = 64  # see `Machine.sliced_gemm_us`
_SLICED_STEP, _SLICED_STEP_US = 128, 0.55  # rows and depth of a step, and what it takes


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
        out_gbps: (peers, GB/s) that a device sends to so many peers at once, together; empty: a
            port is shared without loss, pairs do not disturb each other.
        in_gbps: the same, of what a device is sent by so many at once.
        row_gbps: (bytes of a row, GB/s) of transfers whose rows do not lie behind one another.
        turn_us: (bytes, us) that a transfer lasts longer where its lane sent to another peer just
            before, while all devices do so: ranks drift, and two meet at one receiver.
    """

    scope: str
    per: str
    gbps: tuple[tuple[int, float], ...] = ()
    latency_us: float = 0.0
    out_gbps: Curve = _UNKNOWN
    in_gbps: Curve = _UNKNOWN
    row_gbps: Curve = _UNKNOWN
    turn_us: Curve = _UNKNOWN

    def __post_init__(self) -> None:
        if self.scope not in ("node", "network"):
            raise MachineError(f"link scope {self.scope!r}: it is 'node' or 'network'")
        if self.per not in ("pair", "port"):
            raise MachineError(f"link per {self.per!r}: it is 'pair' or 'port'")
        try:
            Curve(self.gbps)
        except MachineError as wrong:
            raise MachineError(f"link gbps: {wrong}") from None
        if not 0 <= self.latency_us <= MOST:
            raise MachineError(f"link latency_us={self.latency_us}: it is from 0 to {MOST:g}")

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
        return Curve(self.gbps).at(size_bytes) if self.gbps else math.inf

    def transfer_us(self, size_bytes: int) -> float:
        """Return the time of one transfer alone on its link."""
        if not self.gbps or size_bytes == 0:
            return self.latency_us
        return self.latency_us + size_bytes / (self.gbps_at(size_bytes) * 1e3)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What running a GEMM in pieces loses (decomposition-induced loss).

    Attributes:
        cut: "rows", or "columns" (slices of k that accumulate).
        m, n, k: the whole.
        ratio: (pieces, time of all pieces / time of the whole).
    """

    cut: str
    m: int
    n: int
    k: int
    ratio: Curve


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes times devices, their engines, links and costs.

    Attributes:
        name: how commands call it.
        about: one line on what it stands for.
        nodes: number of nodes.
        devices: devices of a node.
        engine: the engine that runs it: "host", "cuda" or "hip".
        links: link classes, one per scope.
        copy_engines: copy engines of a device; 0: not known, as many lanes as asked for.
        gemm_gflops: dense rate of one device by dtype; empty: unpaced.
        device: what the driver calls a device; empty: the profile is of no device in particular.
        source: where the figures come from and when, in one line; empty: it has none.
        units: multiprocessors of a device; 0: not known.
        cores: that all ranks of the host engine share; times and rates are then those of a core
            that does nothing else. 0: every rank is a device of its own.
        memory_gbps: rate of a device's memory under kernels that stream; 0: not known.
        gemms: measured GEMM times by dtype.
        collectives: (bytes that leave a rank, us) of torch.distributed, by collective.
        costs: of everything else.
        pieces: what cutting GEMMs loses, by shape; for the record, since GEMM times tell it.
        signals: how streams raise words at peers, with which the figures were measured: "write" or
            "copy" (see `ficco.engines.peer_signals`); of GPUs alone.
        pacing: whether the host engine keeps to the rates; in a file it is called `paced`.
    """

    name: str
    nodes: int
    devices: int
    engine: str
    links: tuple[Link, ...]
    about: str = ""
    copy_engines: int = 0
    gemm_gflops: tuple[tuple[str, float], ...] = ()
    device: str = ""
    source: str = ""
    units: int = 0
    cores: int = 0
    memory_gbps: float = 0.0
    gemms: tuple[tuple[str, GemmTimes], ...] = ()
    collectives: tuple[tuple[str, Curve], ...] = ()
    costs: Costs = _FREE
    pieces: tuple[Pieces, ...] = ()
    signals: str = "write"
    pacing: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise MachineError(f"machine {self.name!r}: nodes and devices are 1 or more")
        if self.engine not in ("host", "cuda", "hip"):
            raise MachineError(
                f"machine {self.name!r}: engine {self.engine!r} is not one of host, cuda, hip"
            )
        if self.cores and self.engine != "host":
            what = f"machine {self.name!r}: cores={self.cores} with engine {self.engine!r}"
            raise MachineError(f"{what}: ranks share cores on the host engine alone; remove it")
        if self.signals not in ("write", "copy"):
            raise MachineError(
                f"machine {self.name!r}: signals={self.signals!r}: it is 'write' or 'copy'"
            )
        scopes = [link.scope for link in self.links]
        if len(set(scopes)) != len(scopes) or "node" not in scopes:
            raise MachineError(
                f"machine {self.name!r}: links of scope {scopes} found; it has exactly one of "
                "scope 'node' and at most one of scope 'network'"
            )
        if self.nodes > 1 and "network" not in scopes:
            raise MachineError(f"machine {self.name!r}: several nodes need a link 'network'")
        for field in ("copy_engines", "units", "cores", "memory_gbps"):
            if not 0 <= getattr(self, field) <= MOST:
                raise MachineError(
                    f"machine {self.name!r}: {field}={getattr(self, field)}: it is from 0 (not "
                    f"known) to {MOST:g}"
                )
        for dtype, rate in self.gemm_gflops:
            if not LEAST <= rate <= MOST:
                raise MachineError(
                    f"machine {self.name!r}: gemm_gflops.{dtype}={rate}: it is a number from "
                    f"{LEAST:g} to {MOST:g}"
                )

    def __hash__(self) -> int:
        return hash((self.name, self.source, self.nodes, self.devices))

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
        rates = self.link.paced or bool(self.gemm_gflops)
        return self.engine == "host" and self.pacing and rates

    @property
    def paced_link(self) -> Link | None:
        """The links that the host engine paces transfers by; None: it copies as fast as it can."""
        paces = self.engine == "host" and self.pacing and self.link.paced
        return self.link if paces else None

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

    @property
    def rated(self) -> bool:
        """Whether the profile knows enough to predict from: rates of its links and of GEMMs."""
        return self.link.paced and bool(self.gemms or self.gemm_gflops)

    def check_rated(self, dtype: str | None = None) -> None:
        """Refuse to predict for a machine that has no figures.

        Args:
            dtype: of GEMMs that are to be predicted; None: there are none.

        Raises:
            MachineError: it has none; it says where to get them.
        """
        if self.rated and dtype is not None and not self.multiplies(dtype):
            known = [name for name, _ in (*self.gemms, *self.gemm_gflops)]
            raise MachineError(
                f"machine {self.name!r} has no GEMM rate for {dtype}, only for {', '.join(known)}; "
                "add one to the profile, or ask for another dtype"
            )
        if not self.rated:
            known = [name for name in data.names("machines") if Machine.named(name).rated]
            raise MachineError(
                f"machine {self.name!r} has no rates to predict from; measure this one by "
                f"`ficco doctor --profile FILE`, or name one that has: {', '.join(known)}"
            )

    def paced_gemm_us(self, flops: float, dtype: str) -> float:
        """Return how long the host engine makes so many operations last; 0 where unpaced."""
        return self.rated_gemm_us(flops, dtype) if self.pacing else 0.0

    def multiplies(self, dtype: str) -> bool:
        """Whether the profile knows how long GEMMs of a dtype last."""
        rates = dict(self.gemm_gflops)
        return self.gemm_times(dtype) is not None or dtype in rates or "any" in rates

    def gemm_times(self, dtype: str) -> GemmTimes | None:
        """Return measured GEMM times of a dtype, of the nearest one where it was not measured."""
        found = dict(self.gemms)
        for near in (dtype, *_NEAREST.get(dtype, ())):
            if near in found:
                return found[near]
        return None

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return how long [m, k] . [k, n] lasts alone on one device, in us; 0 where unknown."""
        times = self.gemm_times(dtype)
        if times is None:
            return self.rated_gemm_us(2.0 * m * n * k, dtype)
        return times.us(m, n, k)

    def sliced_gemm_us(self, m: int, n: int, k: int, dtype: str, slices: int) -> float:
        """Return how long a GEMM lasts whose slices of columns are made by programs each, in us.

        That is how kernels multiply which store at peers. Of few rows it lasts as long as the
        library's. Of more, each program reads all of x again, and goes through it step by step
        (three shapes on an H100, 2026-11-25).
        """
        whole = self.gemm_us(m, n, k, dtype)
        if m <= SLICED_ROWS:
            return whole
        read = self.stream_us(float(slices) * m * k * DTYPES[dtype])
        steps = math.ceil(m / _SLICED_STEP) * math.ceil(k / _SLICED_STEP)
        return max(whole, read, steps * _SLICED_STEP_US)

    def rated_gemm_us(self, flops: float, dtype: str) -> float:
        """Return how long so many operations last by the plain rate; 0 where there is none."""
        rates = dict(self.gemm_gflops)
        rate = rates.get(dtype, rates.get("any", math.inf))
        return flops / (rate * 1e3)

    def stream_us(self, size_bytes: float) -> float:
        """Return how long a kernel that reads and writes so many bytes lasts; 0 where unknown."""
        return size_bytes / (self.memory_gbps * 1e3) if self.memory_gbps else 0.0

    def collective_us(self, name: str, bytes_out: float, world: int) -> float:
        """Return how long a collective lasts alone, in us.

        It is what was measured, with all devices, but never less than the links take for it; where
        it was not measured it is that.

        Args:
            name: one of COLLECTIVES.
            bytes_out: what leaves a rank if every rank sends each peer its part once (an all-reduce
                twice).
            world: ranks that take part.
        """
        links = world - 1 if self.link.per == "pair" else 1
        floor = self.link.latency_us + bytes_out / (max(links, 1) * self.link.peak_gbps * 1e3)
        curve = dict(self.collectives).get(name)
        return max(floor, curve.scaled(bytes_out)) if curve is not None and bytes_out else floor

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
            "name": str, "about": str, "nodes": int, "devices": int, "engine": str,
            "copy_engines": int, "gemm_gflops": dict, "links": list, "device": str, "source": str,
            "units": int, "cores": int, "memory_gbps": float, "gemms": dict, "collectives": dict,
            "costs": dict, "pieces": list, "signals": str, "paced": bool,
        }  # fmt: skip
        where = f"machine {name!r}"
        try:
            reading.table(table, known, where)
            for field in ("name", "devices", "engine", "links"):
                if field not in table:
                    raise MachineError(f"{where}: the field {field!r} is missing")
            links = tuple(
                _link(entry, f"{where}, links[{at}]") for at, entry in enumerate(table["links"])
            )
            gemm = _rates(table.get("gemm_gflops", {}), f"{where}, gemm_gflops")
            units, cores = table.get("units", 0), table.get("cores", 0)
            memory = float(table.get("memory_gbps", 0.0))
            known = dict.fromkeys(DTYPES, list)
            measured = reading.table(table.get("gemms", {}), known, f"{where}, gemms")
            gemms = tuple(
                (dtype, _gemm_times(points, units, memory, not cores, f"{where}, gemms.{dtype}"))
                for dtype, points in measured.items()
            )
            known = {field.name: float for field in fields(Costs)}
            costs = reading.table(table.get("costs", {}), known, f"{where}, costs")
            known = dict.fromkeys(COLLECTIVES, list)
            shapes = reading.table(table.get("collectives", {}), known, f"{where}, collectives")
            collectives = {
                name: _curve(points, f"{where}, collectives.{name}")
                for name, points in shapes.items()
            }
            pieces = tuple(
                _pieces(entry, f"{where}, pieces[{at}]")
                for at, entry in enumerate(table.get("pieces", []))
            )
        except MachineError:
            raise
        except InputError as wrong:
            raise MachineError(str(wrong)) from None
        return cls(
            name=table["name"],
            about=table.get("about", ""),
            nodes=table.get("nodes", 1),
            devices=table["devices"],
            engine=table["engine"],
            links=links,
            copy_engines=table.get("copy_engines", 0),
            gemm_gflops=gemm,
            device=table.get("device", ""),
            source=table.get("source", ""),
            units=units,
            cores=cores,
            memory_gbps=memory,
            gemms=gemms,
            collectives=tuple(collectives.items()),
            costs=Costs(**costs),
            pieces=pieces,
            signals=table.get("signals", "write"),
            pacing=table.get("paced", True),
        )


# Where a dtype was not measured: what lasts about as long.
_NEAREST = {"float16": ("bfloat16",), "bfloat16": ("float16",)}


def _link(entry: Any, where: str) -> Link:
    curves = ("out_gbps", "in_gbps", "row_gbps", "turn_us")
    known = {"scope": str, "per": str, "latency_us": float, **dict.fromkeys(curves, list)}
    reading.table(entry, known | {"gbps": list}, where)
    for field in ("scope", "per"):
        if field not in entry:
            raise MachineError(f"{where}: the field {field!r} is missing")
    points = reading.rows(entry.get("gbps", []), 2, f"{where}: gbps")
    gbps = tuple((reading.whole(size, f"{where}: gbps, bytes"), rate) for size, rate in points)
    more = {name: _curve(entry.get(name, []), f"{where}: {name}") for name in curves}
    return Link(entry["scope"], entry["per"], gbps, float(entry.get("latency_us", 0.0)), **more)


def _rates(table: Any, where: str) -> tuple[tuple[str, float], ...]:
    known = dict.fromkeys((*DTYPES, "any"), float)
    rates = reading.table(table, known, where)
    return tuple((dtype, float(rate)) for dtype, rate in rates.items())


def _curve(points: Any, where: str) -> Curve:
    found = reading.rows(points, 2, where)
    try:
        return Curve(tuple((size, value) for size, value in found))
    except MachineError as wrong:
        raise MachineError(f"{where}: {wrong}") from None


def _gemm_times(points: Any, units: int, memory_gbps: float, tiled: bool, where: str) -> GemmTimes:
    found = reading.rows(points, 4, where)
    places = []
    for at, (*sizes, us) in enumerate(found):
        m, n, k = (reading.whole(size, f"{where}[{at}], size") for size in sizes)
        places.append((m, n, k, us))
    try:
        return GemmTimes(tuple(places), units, memory_gbps, tiled)
    except MachineError as wrong:
        raise MachineError(f"{where}: {wrong}") from None


def _pieces(entry: Any, where: str) -> Pieces:
    known = {"cut": str, "m": int, "n": int, "k": int, "ratio": list}
    reading.table(entry, known, where)
    if missing := [name for name in known if name not in entry]:
        raise MachineError(f"{where}: the field {missing[0]!r} is missing")
    if entry["cut"] not in ("rows", "columns"):
        raise MachineError(f"{where}: cut={entry['cut']!r}: it is 'rows' or 'columns'")
    ratio = _curve(entry["ratio"], f"{where}: ratio")
    return Pieces(entry["cut"], entry["m"], entry["n"], entry["k"], ratio)
