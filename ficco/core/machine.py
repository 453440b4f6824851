"""Machine: where a problem runs. Nodes, devices, engines, links and costs with their curves.

A profile is one TOML file in schedules/machines. It has two uses. The simulator and the selector
predict from its rates and costs. On the host engine, links with rates make transfers last as long
as they would on those links (`paced`); a profile whose links have no rates, or that was measured on
the machine itself (`paced = false`), runs at the machine's own speed.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ficco.core import data, reading
from ficco.core.costs import Costs
from ficco.core.curves import LEAST, MOST, Curve, GemmTimes
from ficco.core.dtypes import DTYPES
from ficco.core.errors import InputError, MachineError, closest, shown

__all__ = ["COLLECTIVES", "SLICED_ROWS", "Costs", "Link", "Machine"]

T = TypeVar("T")
_UNKNOWN = Curve(())
_NO_COSTS = Costs()
ENGINES = ("host", "cuda", "hip")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SLICED_ROWS = 64  # see `Machine.sliced_gemm_us`
_SLICED_STEP, _SLICED_STEP_US = 128, 1.1  # rows, columns and depth of a step; its duration
_SLICED_NARROW, _SLICED_ROW_US = 32, 0.04  # columns of half a step; to store and add up a row


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links.

    Attributes:
        scope: "node" (between devices of a node) or "network" (between nodes).
        per: the owner of the rate. "pair": every ordered pair of devices has its own link (full
            mesh). "port": every device has one port out and one port in, shared by all its
            transfers (switch).
        gbps: (bytes of a transfer, GB/s it reaches alone) points, by increasing size; empty:
            unpaced.
        latency_us: from the start of a transfer to its first byte.
        out_gbps: (peers, GB/s): the total rate at which a device sends to a number of peers at
            once; empty: a port is shared without loss, and pairs do not affect each other.
        in_gbps: the same, for the rate at which a device receives from a number of peers.
        row_gbps: (bytes of a row, GB/s) of transfers whose rows are not contiguous.
        turn_us: (bytes, us): extra time of a transfer if its lane sent to another peer just before,
            while all devices do so: ranks drift, and two send to one receiver at the same time.
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
            near = closest(self.scope, ("node", "network"))
            raise MachineError(f"scope={shown(self.scope)}{near}: 'node' or 'network' is needed")
        if self.per not in ("pair", "port"):
            near = closest(self.per, ("pair", "port"))
            raise MachineError(f"per={shown(self.per)}{near}: 'pair' or 'port' is needed")
        try:
            Curve(self.gbps)
        except MachineError as wrong:
            raise MachineError(f"gbps: {wrong}") from None
        if not 0 <= self.latency_us <= MOST:
            raise MachineError(f"latency_us={self.latency_us}: it must be from 0 to {MOST:g}")

    @property
    def paced(self) -> bool:
        """Whether the link has a rate."""
        return bool(self.gbps)

    @property
    def peak_gbps(self) -> float:
        """The highest rate of the link; infinite if it has none."""
        return max((rate for _, rate in self.gbps), default=math.inf)

    def gbps_at(self, size_bytes: int) -> float:
        """Return the rate of one transfer alone, interpolated over the log of the size."""
        return Curve(self.gbps).at(size_bytes) if self.gbps else math.inf

    def transfer_us(self, size_bytes: int) -> float:
        """Return the time of one transfer alone on its link."""
        if not self.gbps or size_bytes == 0:
            return self.latency_us
        return self.latency_us + size_bytes / (self.gbps_at(size_bytes) * 1e3)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The loss from running a GEMM in pieces (decomposition-induced loss).

    Attributes:
        cut: "rows", or "columns" (slices of k that accumulate).
        m, n, k: sizes of the whole GEMM.
        ratio: (pieces, time of all pieces / time of the whole GEMM).
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
        name: the name used in commands.
        about: a one-line description.
        nodes: number of nodes.
        devices: devices per node.
        engine: the engine that runs it: "host", "cuda" or "hip".
        links: link classes, one per scope.
        copy_engines: copy engines of a device; 0: not known, as many streams as requested.
        gemm_gflops: dense rate of one device by dtype, in GFLOP/s; empty: no rate.
        device: the driver's name of the device; empty: no particular device.
        source: origin and date of the figures, in one line; empty: none.
        units: SMs (streaming multiprocessors) of a device; 0: not known.
        cores: number of cores that all ranks of the host engine share; times and rates are then
            those of an otherwise idle core. 0: every rank is a separate device.
        memory_gbps: memory rate of a device under streaming kernels, in GB/s; 0: not known.
        gemms: measured GEMM times by dtype.
        collectives: (bytes that leave a rank, us) of torch.distributed, by collective.
        costs: all other costs.
        pieces: the loss from cutting GEMMs, by shape; recorded only, as GEMM times include it.
        signals: how streams set signals at peers when the figures were measured: "write" or
            "copy" (see `ficco.engine.peer_signals`); for GPUs only.
        pacing: whether the host engine emulates the rates; the field `paced` of a file.

    Raises:
        MachineError: a field is invalid; the message names it.

    Example:
        >>> machine = ficco.Machine.named("h200x4")  # or a path that ends in .toml
        >>> machine.ranks, machine.device, machine.link.per
        (4, 'NVIDIA H200', 'port')
        >>> machine.gemm_us(8192, 8192, 8192, "bfloat16") > 0  # us, alone on one device
        True
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
    costs: Costs = _NO_COSTS
    pieces: tuple[Pieces, ...] = ()
    signals: str = "write"
    pacing: bool = True

    def __post_init__(self) -> None:
        for field in ("nodes", "devices"):
            if not 1 <= getattr(self, field) <= MOST:
                found = shown(getattr(self, field))
                raise MachineError(f"{field}={found}: it must be from 1 to {MOST:g}")
        if self.engine not in ENGINES:
            raise MachineError(
                f"engine={shown(self.engine)}{closest(self.engine, ENGINES)}: it must be one of "
                f"{', '.join(ENGINES)}"
            )
        if self.cores and self.engine != "host":
            raise MachineError(
                f"cores={shown(self.cores)} with engine={self.engine!r}: ranks share cores only on "
                "the host engine; remove it"
            )
        if self.signals not in ("write", "copy"):
            raise MachineError(f"signals={shown(self.signals)}: 'write' or 'copy' is needed")
        scopes = [link.scope for link in self.links]
        if len(set(scopes)) != len(scopes) or "node" not in scopes:
            raise MachineError(
                f"links: the scopes are {shown(scopes)}; exactly one link of scope 'node' and at "
                "most one of scope 'network' are needed"
            )
        if self.nodes > 1 and "network" not in scopes:
            raise MachineError(
                f"nodes={self.nodes}, and no link has the scope 'network'; several nodes need one"
            )
        for field in ("copy_engines", "units", "cores", "memory_gbps"):
            if not 0 <= getattr(self, field) <= MOST:
                found = shown(getattr(self, field))
                raise MachineError(f"{field}={found}: it must be from 0 (not known) to {MOST:g}")
        for dtype, rate in self.gemm_gflops:
            if not LEAST <= rate <= MOST:
                raise MachineError(
                    f"gemm_gflops.{dtype}={rate}: it must be from {LEAST:g} to {MOST:g}"
                )

    def __hash__(self) -> int:
        return hash((self.name, self.source, self.nodes, self.devices))

    @property
    def identity(self) -> str:
        """The name, and a number that differs where any figure does."""
        return f"{self.name} (profile {zlib.crc32(repr(self).encode()):08x})"

    @property
    def ranks(self) -> int:
        """The largest number of ranks, one per device."""
        return self.nodes * self.devices

    @property
    def link(self) -> Link:
        """The links inside a node."""
        return next(link for link in self.links if link.scope == "node")

    @property
    def paced(self) -> bool:
        """Whether the host engine slows transfers or GEMMs down to the profile's rates."""
        rates = self.link.paced or bool(self.gemm_gflops)
        return self.engine == "host" and self.pacing and rates

    @property
    def paced_link(self) -> Link | None:
        """The links whose rates pace the host engine's transfers; None: transfers are unpaced."""
        paces = self.engine == "host" and self.pacing and self.link.paced
        return self.link if paces else None

    @property
    def best_route(self) -> str:
        """The route that fills the links: all peers on a mesh, one peer at a time on a switch.

        On 8 H200s on a switch, pushes to one peer at a time reached 386 GB/s per GPU, to all seven
        at once 198 (2026-11-20).
        """
        return "all_peers" if self.link.per == "pair" else "rotation"

    @property
    def best_order(self) -> str:
        """The order of chunks in which ranks do not send to the same receiver at once."""
        return "by_step" if self.link.per == "pair" else "by_peer"

    @property
    def whole_transport(self) -> str:
        """The transport of whole shards: the vendor's collectives on GPUs, copies on the host."""
        return "dma" if self.engine == "host" else "collective"

    @property
    def rated(self) -> bool:
        """Whether the profile has the rates needed for predictions: of its links and of GEMMs."""
        return self.link.paced and bool(self.gemms or self.gemm_gflops)

    def check_rated(self, dtype: str | None = None) -> None:
        """Refuse to predict for a machine that has no figures.

        Args:
            dtype: of the GEMMs to predict; None: there are none.

        Raises:
            MachineError: it has none; the message says how to get them.
        """
        if self.rated and dtype is not None and not self.multiplies(dtype):
            known = [name for name, _ in (*self.gemms, *self.gemm_gflops)]
            raise MachineError(
                f"machine {self.name!r} has no GEMM rate for {dtype}, only for {', '.join(known)}; "
                "add one to the profile, or use another dtype"
            )
        if not self.rated:
            known = [name for name in data.names("machines") if Machine.named(name).rated]
            raise MachineError(
                f"machine {self.name!r} has no rates to predict from; measure this machine by "
                f"`ficco doctor --profile FILE`, or name one that has rates: {', '.join(known)}"
            )

    def paced_gemm_us(self, flops: float, dtype: str) -> float:
        """Return the paced time of a number of operations on the host engine; 0 if unpaced."""
        return self.rated_gemm_us(flops, dtype) if self.pacing else 0.0

    def multiplies(self, dtype: str) -> bool:
        """Return whether the profile has GEMM times or rates for a dtype."""
        rates = dict(self.gemm_gflops)
        return self.gemm_times(dtype) is not None or dtype in rates or "any" in rates

    def gemm_times(self, dtype: str) -> GemmTimes | None:
        """Return measured GEMM times of a dtype, or of the nearest dtype that was measured."""
        measured = dict(self.gemms)
        for near in (dtype, *_NEAREST.get(dtype, ())):
            if near in measured:
                return measured[near]
        return None

    def gemm_us(self, m: float, n: float, k: float, dtype: str) -> float:
        """Return the time of [m, k] . [k, n] alone on one device, in us; 0 if unknown."""
        times = self.gemm_times(dtype)
        if times is None:
            return self.rated_gemm_us(2.0 * m * n * k, dtype)
        return times.us(m, n, k)

    def sliced_gemm_us(self, m: int, n: int, k: int, dtype: str, slices: int) -> float:
        """Return the time of a GEMM in which each program makes a slice of columns, in us.

        Few rows take the library's time. With more, each program reads all of x again, in steps (14
        shapes on H100s and H200s, 2026-11-30), and moves its slice alone (3 shapes, 2026-11-27).
        """
        whole = self.gemm_us(m, n, k, dtype)
        if m <= SLICED_ROWS:
            return whole
        read = self.stream_us(float(slices) * m * k * DTYPES[dtype])
        width = n / slices
        across = 0.5 if width <= _SLICED_NARROW else math.ceil(width / _SLICED_STEP)
        steps = math.ceil(m / _SLICED_STEP) * across * math.ceil(k / _SLICED_STEP)
        return max(whole, read, steps * _SLICED_STEP_US) + (m - SLICED_ROWS) * _SLICED_ROW_US

    def rated_gemm_us(self, flops: float, dtype: str) -> float:
        """Return the time of a number of operations at the plain rate; 0 if there is no rate."""
        rates = dict(self.gemm_gflops)
        rate = rates.get(dtype, rates.get("any", math.inf))
        return flops / (rate * 1e3)

    def stream_us(self, size_bytes: float) -> float:
        """Return the time of a kernel that reads and writes a number of bytes; 0 if unknown."""
        return size_bytes / (self.memory_gbps * 1e3) if self.memory_gbps else 0.0

    def collective_us(self, name: str, bytes_out: float, world: int) -> float:
        """Return the time of a collective alone, in us.

        It is the time measured with all devices, but at least the time that the links need. If it
        was not measured, it is the time that the links need.

        Args:
            name: one of COLLECTIVES.
            bytes_out: bytes that leave a rank if every rank sends each peer its part once (twice
                for an all-reduce).
            world: number of ranks that take part.
        """
        links = world - 1 if self.link.per == "pair" else 1
        floor = self.link.latency_us + bytes_out / (max(links, 1) * self.link.peak_gbps * 1e3)
        curve = dict(self.collectives).get(name)
        return max(floor, curve.scaled(bytes_out)) if curve is not None and bytes_out else floor

    @classmethod
    def named(cls, name: str) -> Machine:
        """Read a shipped profile, or a file if the name ends in .toml.

        Raises:
            MachineError: there is no such profile, or it is invalid.
        """
        table = data.load("machines", name, "machine", MachineError)
        return cls.from_toml(table, name) if name.endswith(".toml") else _shipped(name)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], name: str) -> Machine:
        """Build a machine from a parsed profile; `name` is used in messages.

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
            reading.check_known(table, known, where, ("name", "devices", "engine", "links"))
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
        return _located(
            where,
            cls,
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
            costs=_located(where, Costs, **costs),
            pieces=pieces,
            signals=table.get("signals", "write"),
            pacing=table.get("paced", True),
        )


# The dtype with about the same times, if a dtype was not measured.
_NEAREST = {"float16": ("bfloat16",), "bfloat16": ("float16",)}


@functools.cache
def _shipped(name: str) -> Machine:
    return Machine.from_toml(data.load("machines", name, "machine", MachineError), name)


def _located(where: str, make: Callable[..., T], *args: Any, **fields_: Any) -> T:
    """Return what `make` returns; its errors begin with the place in the file."""
    try:
        return make(*args, **fields_)
    except MachineError as wrong:
        raise MachineError(f"{where}: {wrong}") from None


def _link(entry: Any, where: str) -> Link:
    curves = ("out_gbps", "in_gbps", "row_gbps", "turn_us")
    known = {"scope": str, "per": str, "latency_us": float, **dict.fromkeys(curves, list)}
    known |= {"gbps": list}
    reading.table(entry, known, where)
    reading.check_known(entry, known, where, ("scope", "per"))
    points = reading.rows(entry.get("gbps", []), 2, f"{where}: gbps")
    gbps = tuple(
        (reading.whole(size, f"{where}: gbps[{at}][0]"), rate)
        for at, (size, rate) in enumerate(points)
    )
    more = {name: _curve(entry.get(name, []), f"{where}: {name}") for name in curves}
    latency_us = float(entry.get("latency_us", 0.0))
    return _located(where, Link, entry["scope"], entry["per"], gbps, latency_us, **more)


def _rates(table: Any, where: str) -> tuple[tuple[str, float], ...]:
    known = dict.fromkeys((*DTYPES, "any"), float)
    rates = reading.table(table, known, where)
    return tuple((dtype, float(rate)) for dtype, rate in rates.items())


def _curve(points: Any, where: str) -> Curve:
    pairs = reading.rows(points, 2, where)
    return _located(where, Curve, tuple((size, value) for size, value in pairs))


def _gemm_times(points: Any, units: int, memory_gbps: float, tiled: bool, where: str) -> GemmTimes:
    times = []
    for at, (*sizes, us) in enumerate(reading.rows(points, 4, where)):
        m, n, k = (
            reading.whole(size, f"{where}[{at}][{column}]") for column, size in enumerate(sizes)
        )
        times.append((m, n, k, us))
    return _located(where, GemmTimes, tuple(times), units, memory_gbps, tiled)


def _pieces(entry: Any, where: str) -> Pieces:
    known = {"cut": str, "m": int, "n": int, "k": int, "ratio": list}
    reading.table(entry, known, where)
    reading.check_known(entry, known, where, known)
    if entry["cut"] not in ("rows", "columns"):
        raise MachineError(f"{where}: cut={shown(entry['cut'])}: 'rows' or 'columns' is needed")
    for size in ("m", "n", "k"):
        if not 1 <= entry[size] <= MOST:
            raise MachineError(
                f"{where}: {size}={shown(entry[size])}: it must be from 1 to {MOST:g}"
            )
    ratio = _curve(entry["ratio"], f"{where}: ratio")
    return Pieces(entry["cut"], entry["m"], entry["n"], entry["k"], ratio)
