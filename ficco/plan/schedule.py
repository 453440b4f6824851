"""Schedule: how a call is cut and interleaved. A frozen dataclass of eleven axes, and named points.

A schedule does not depend on sizes. Values that depend on the group or machine are "world" (grain)
and "machine" (route, order, transport). `resolve` replaces them by concrete values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ficco.core import data, logs, reading
from ficco.core.errors import InputError, ScheduleError, closest, shown
from ficco.core.machine import Machine
from ficco.operators import registry

MAX_CHUNKS = 256  # chunks of one shard; it determines the signals' places in a window

AXES: dict[str, tuple[str, ...]] = {
    "cut": ("rows", "columns"),
    "route": ("all_peers", "rotation", "machine"),
    "order": ("by_step", "by_peer", "machine"),
    "start": ("together", "local_first"),
    "compute": ("whole", "per_step", "per_chunk", "gated"),
    "transport": ("dma", "sm", "collective", "machine"),
    "taper": ("none", "head", "tail", "both", "edge"),
    "pace": ("free", "in_step"),
    "shots": ("two", "one"),
    "sums": ("apart", "within", "along"),
}


_RETIRED = "network_transport"  # in files of earlier versions


@dataclass(frozen=True, slots=True)
class Schedule:
    """A point of the design space.

    Attributes:
        grain: chunks per shard, 1 (shard level) to 256, or "world": the number of ranks (FiCCO's).
        cut: "rows" (1-D), or "columns" (2-D: slices of k that accumulate).
        route: "all_peers" (a stream to every peer, all links at once), "rotation" (one peer at a
            time: rank+1, rank+2, ...), or "machine": the best for the machine's links.
        order: "by_step" (chunk j to every peer, then j+1), "by_peer" (all chunks to one peer, then
            the next), or "machine".
        start: "together" (this rank's shard is part of the steps), or "local_first" (this rank's
            shard is multiplied during the first transfers).
        compute: "whole" (one GEMM), "per_step" (one GEMM over the chunks of a step), "per_chunk",
            or "gated" (one kernel whose tiles wait for the chunks that they read).
        transport: "dma" (copy engines), "sm" (a kernel's stores at peers: few rows, cut by
            "columns", or any number, cut by "rows"; with compute="whole" one kernel stores rows of
            x at peers before the GEMM, or loads products from peers after it), or "collective"
            (torch.distributed), within a node; "machine": the best for whole shards.
        pace: "free" (pushes follow one another without waits), or "in_step" (with rotation: the
            next peer's turn begins after this turn's chunk has arrived here, so that ranks do not
            drift apart and meet at one receiver; in matmul_all_reduce, for sums).
        shots: for matmul_all_reduce: "two" (every rank sums its block and pushes the sums), or
            "one" (every rank gets all products and sums all of them).
        sums: for matmul_reduce_scatter and matmul_all_reduce: "apart" (a separate pass sums the
            parts), "within" (with compute="gated": a first kernel computes the peers' parts; a
            second one adds arrivals to its own tiles before it stores them, and sets signals for
            chunks that are pushed on), or "along" (partial sums circulate on a ring of ranks; each
            rank adds its product and pushes the sum; in matmul_all_reduce two chunks at a time, if
            "by_step").
        taper: "head": the first chunks are a quarter and half of the others; "tail": the last;
            "both". "edge" (with rotation, by peer): only one shard is cut, because no other work
            hides it: the last to arrive, into ever smaller chunks (in scattering operators the
            first block to leave, into ever larger ones). All other shards are sent whole.
        name: a label without effect.

    Raises:
        ScheduleError: an axis has an invalid value; the message lists the valid ones.

    Example:
        >>> from dataclasses import replace
        >>> schedule = replace(ficco.Schedule.named("hetero_fused_1d"), grain=4, name="mine")
        >>> schedule.start, schedule.compute
        ('local_first', 'per_step')
        >>> xs = [np.ones((8, 8), np.float32)] * 2
        >>> with ficco.Node(2, schedule=schedule) as node:
        ...     ys = node.matmul_all_reduce(xs, xs)
    """

    grain: int | str = "world"
    cut: str = "rows"
    route: str = "machine"
    order: str = "by_step"
    start: str = "together"
    compute: str = "per_step"
    transport: str = "dma"
    taper: str = "none"
    pace: str = "free"
    shots: str = "two"
    sums: str = "apart"
    name: str = "custom"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ScheduleError(f"schedule name={_shown(self.name)}: it must be a text")
        for axis, values in AXES.items():
            value = getattr(self, axis)
            if not isinstance(value, str) or value not in values:
                near = closest(value, values) if isinstance(value, str) else ""
                raise ScheduleError(
                    f"schedule {self.name!r}: {axis}={_shown(value)}{near}. "
                    f"{axis} is one of {', '.join(values)}"
                )
        grain = self.grain
        if isinstance(grain, str):
            fits = grain == "world"
        else:
            fits = isinstance(grain, Integral) and not isinstance(grain, bool)
            fits = fits and 1 <= int(grain) <= MAX_CHUNKS
        if not fits:
            raise ScheduleError(
                f"schedule {self.name!r}: grain={_shown(grain)}; it is a whole number from 1 to "
                f"{MAX_CHUNKS}, or 'world' for as many chunks as there are ranks"
            )
        if not isinstance(grain, str):
            object.__setattr__(self, "grain", int(grain))  # also of NumPy's integers

    @classmethod
    def named(cls, name: str, op: str | None = None) -> Schedule:
        """Read a shipped schedule, or a file if the name ends in .toml.

        A file without the field `name` names its schedule by its own name, without .toml.

        Args:
            name: of the schedule, or a path.
            op: the operator whose schedules an error names; None: it names all.

        Raises:
            ScheduleError: there is no such schedule, or the file is not a schedule.
        """
        if op is not None and isinstance(name, str) and not name.endswith(".toml"):
            known = cls.names(op)
            if name not in data.names("named"):
                raise ScheduleError(
                    f"unknown schedule {shown(name)}{closest(name, known)}. Those of {op}: "
                    f"{', '.join(known)}; `ficco list schedules` describes them; or give a path "
                    "that ends in .toml"
                )
        table = data.load("named", name, "schedule", ScheduleError)
        return cls.from_toml({"name": Path(name).stem, **table}, name)

    @classmethod
    def read(cls, schedule: str | Schedule, op: str | None = None) -> Schedule:
        """Return a schedule from a Schedule, a name or a JSON text; `op` as in `named`.

        Raises:
            ScheduleError: there is no such schedule, or the text is not a schedule.
        """
        if isinstance(schedule, Schedule):
            return schedule
        if not isinstance(schedule, str):
            raise ScheduleError(
                f"schedule={_shown(schedule)}: a Schedule, its name or its JSON text is needed"
            )
        if schedule.startswith("{"):
            where = f"schedule={shown(schedule)}"
            return cls.from_json(reading.parsed_json(schedule, where, ScheduleError))
        return cls.named(schedule, op)

    @staticmethod
    def names(op: str | None = None) -> tuple[str, ...]:
        """Return the shipped names, plainest first, and the schedules of `op` alone last.

        Args:
            op: an operator's name; None: only schedules for every operator.

        Raises:
            InputError: `op` is not a text, or names no operator.
        """
        if op is not None and not isinstance(op, str):
            raise InputError(f"op={_shown(op)}: the name of an operator, or None, is needed")
        if op is not None and not registry.get(op).general:
            return ("serial", *registry.get(op).schedules)
        first = ("serial", "shard_p2p")
        others = {name for known in registry.names() for name in registry.get(known).schedules}
        general = sorted(set(data.names("named")) - {*first, *others}, reverse=True)
        return (*first, *general, *(registry.get(op).schedules if op is not None else ()))

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], name: str = "custom") -> Schedule:
        """Build a schedule from a parsed file; `name` is used in messages.

        Raises:
            ScheduleError: it is not a table, a field is unknown or has an invalid value.
        """
        _check_table(table, name)
        known = [field.name for field in fields(cls)]
        if _RETIRED in table:
            _warn_of_retired(name)
        for field in table:
            if field not in known and field not in ("about", _RETIRED):
                raise ScheduleError(
                    f"schedule {name!r}: unknown axis {shown(field)}{closest(field, known)}. "
                    f"Known: {', '.join(known)}, about"
                )
        if not isinstance(table.get("about", ""), str):
            raise ScheduleError(
                f"schedule {name!r}: about={shown(table['about'])}: a text is needed"
            )
        try:
            return cls(**{key: table[key] for key in known if key in table})
        except ScheduleError as wrong:
            if table.get("name", "custom") == name:
                raise
            raise ScheduleError(f"schedule {name!r}: {wrong}") from None

    def resolve(self, world: int, machine: Machine) -> Schedule:
        """Return the schedule with concrete values for this group and machine."""
        return replace(
            self,
            grain=world if self.grain == "world" else self.grain,
            route=machine.best_route if self.route == "machine" else self.route,
            order=machine.best_order if self.order == "machine" else self.order,
            transport=machine.whole_transport if self.transport == "machine" else self.transport,
        )

    @property
    def chunks(self) -> int:
        """Chunks per shard.

        Raises:
            ScheduleError: the schedule is not resolved.
        """
        if isinstance(self.grain, str):
            raise ScheduleError(
                f"schedule {self.name!r}: grain='world' has no value yet; call "
                "Schedule.resolve(world, machine) first"
            )
        return self.grain

    @property
    def grain_text(self) -> str:
        """The chunks of a shard in words: "4", or "4 of one shard" if others travel whole."""
        return f"{self.chunks} of one shard" if self.taper == "edge" else str(self.chunks)

    @property
    def sums_travel(self) -> bool:
        """Whether sums are added to and rounded on their way, not only at their owner."""
        return self.transport == "collective" or self.sums == "along"

    @property
    def sums_at_once(self) -> bool:
        """Whether one launch adds up all of a rank's sums, after the last arrival."""
        return self.sums == "apart" and (self.compute == "whole" or self.order == "by_peer")

    @property
    def moves(self) -> bool:
        """Whether a library multiplies, and one kernel moves rows before or after it."""
        return self.transport == "sm" and self.compute == "whole"

    @property
    def stores(self) -> bool:
        """Whether one kernel multiplies, or pools, and stores at peers."""
        return self.transport == "sm" and not self.moves

    @property
    def for_few_rows(self) -> bool:
        """Whether one kernel multiplies and stores columns at peers, which gains for few rows."""
        return self.stores and self.cut == "columns"

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as JSON values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Schedule:
        """Build a schedule from the values that `to_json` returns.

        Raises:
            ScheduleError: it is not a table, a field is unknown or has an invalid value.
        """
        _check_table(table, "custom")
        name = table.get("name", "custom")
        return cls.from_toml(table, name if isinstance(name, str) else "custom")


@lru_cache(maxsize=64)
def _warn_of_retired(name: str) -> None:
    """Warn, once per schedule, that an axis of earlier versions is ignored."""
    logs.log.warning("schedule %r: %s is ignored; leave it out", name, _RETIRED)


def _check_table(table: Any, name: str) -> None:
    if not isinstance(table, Mapping):
        raise ScheduleError(
            f"schedule {name!r}: {type(table).__name__} found; a table is needed, with a value by "
            "the name of each axis"
        )


def _shown(value: Any) -> str:
    """Return a value as text for messages; for arrays, lists and others only the type."""
    if value is None or isinstance(value, (str, Real)):
        return shown(value)
    return f"<{type(value).__name__}>"
