"""Passes compile the plan of a rank into its program for a target.

Each pass turns steps of some kinds into entries:

    one_kernel    a whole plan -> one launch, if its copies are a kernel's stores
    gated         a gated step -> one launch per output; without kernels: waits, products, signals
    release       the steps that release the window -> the end of the last launch
    gemms, sums   products -> strided batches; reductions -> sums of slots in one pass
    copies        joined boxes; single rows where a target has no 2-D copies
    signals       how a target stores signals
    waits         how a target waits for signals, and on which lane

`readback` turns a program into a plan again, for proofs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.errors import EngineError, PlanError
from ficco.plan import Part, RankPlan, Signal, Step, bags_of, experts_of, has_mailbox
from ficco.program import (
    Copy,
    Entry,
    Exchange,
    Launch,
    Program,
    Reduce,
    SignalWrite,
    Work,
)
from ficco.program.passes import copies, gated, gemms, one_kernel, pools, signals, sums
from ficco.program.target import Target

__all__ = ["COMPUTE", "compile_by_step", "compile_plan"]

COMPUTE = ("gemm", "reduce", "bag", "experts")
CALLER = "caller"  # lane of waits by kernels in programs that compute nothing


def compile_plan(plan: RankPlan, target: Target) -> Program:
    """Return the program of one rank's plan on a target.

    Args:
        plan: of one rank.
        target: what the rank's device does.

    Raises:
        ScheduleError: no kernel of the target supports a gated step.
        EngineError: the target cannot run a step; the message names it.
        PlanError: a step's `after` names no earlier step.
    """
    if has_mailbox(plan.buffers) and not (target.kernels or target.threads):
        raise EngineError(
            f"rank {plan.rank}: its plan has mailboxes, which on target {target.name!r} need a "
            "kernel of ficco, and the arrays have none; use a schedule with transport='dma'"
        )
    dtypes = {buffer.dtype for buffer in plan.buffers if buffer.role in ("input", "output")}
    if not target.threads and len(dtypes) > 1 and any(step.kind == "gemm" for step in plan.steps):
        raise EngineError(
            f"rank {plan.rank}: inputs and outputs of products are {' and '.join(sorted(dtypes))}; "
            f"target {target.name!r} needs one dtype"
        )
    if target.kernels and one_kernel.is_one_kernel(plan):
        _check_lanes(plan.rank, _computing(plan), target)
        entries: Sequence[Entry] = one_kernel.one_kernel_entries(plan, target.leaves > 0)
    else:
        entries = _compiler(plan, target).compiled()
    return Program(plan.rank, target, plan.buffers, tuple(entries))


def compile_by_step(plan: RankPlan, target: Target) -> list[Sequence[Entry]]:
    """Return the entries of each step of a plan that is not one kernel.

    The entries of `compile_plan` are these, one step after the other. Some steps have none: they
    do nothing, or an entry of an earlier step does their work. Raises the errors of `compile_plan`.
    """
    compiler = _compiler(plan, target)
    return [compiler.compiled_step(step) for step in plan.steps]


def _compiler(plan: RankPlan, target: Target) -> _Compiler:
    computing = _computing(plan)
    _check_lanes(plan.rank, computing, target)
    return _Compiler(plan, {step.lane for step in computing}, target)


def _computing(plan: RankPlan) -> list[Step]:
    return [step for step in plan.steps if step.kind in COMPUTE and _has_work(step)]


def _check_lanes(rank: int, computing: Sequence[Step], target: Target) -> None:
    """Refuse the compute steps of a plan if the target does not run their lanes as they need.

    Raises:
        EngineError: a step needs concurrent lanes, which the target lacks, or compute is in several
            lanes of a device.
    """
    concurrent = next((step.id for step in computing if step.concurrent), None)
    lanes = sorted({step.lane for step in computing})
    if concurrent is not None and target.in_order:
        raise EngineError(
            f"step {concurrent!r} of rank {rank} needs concurrent lanes, so the plan cannot "
            "run in order on one thread; use a schedule without such steps"
        )
    if concurrent is not None and target.threads and len(lanes) > 1:
        raise EngineError(
            f"step {concurrent!r} needs concurrent lanes, but the host engine runs the compute "
            f"lanes {lanes} on one thread; put them into one lane"
        )
    if not target.threads and len(lanes) > 1:
        raise EngineError(
            f"compute in the lanes {lanes}; the engine of GPUs computes on the caller's stream, "
            "so put it into one lane"
        )


class _Compiler:
    """Appends the entries of step after step.

    A step may become no entry, one or several. So `ends` holds, for each step, the entries that end
    when the step has ended. `pending` holds the `after` of steps without entries, for the next
    entry of their lane.
    """

    def __init__(self, plan: RankPlan, inline: set[str], target: Target) -> None:
        self.plan, self.inline, self.target = plan, inline, target
        self.ends: dict[str, tuple[str, ...]] = {}
        self.pending: dict[str, tuple[str, ...]] = {}
        self.last: dict[str, str] = {}  # by lane: the id of its last entry
        self.how = "thread" if target.threads else target.wait
        self.caller = min(inline, default=CALLER)
        self.raises = signals.joined_raises(plan, inline, target)
        self.releases = gated.ends_of(plan) if target.kernels else {}
        self.within: set[str] = {step.id for step in self.raises.values()}
        self.cleared: set[Signal] = set()  # the `free` signals that earlier steps have cleared
        self.contiguous: dict[str, int] | None = None
        if not target.copies_2d:
            self.contiguous = {buffer.name: buffer.cols for buffer in plan.buffers}

    def compiled(self) -> list[Entry]:
        """Return the entries of all steps. A plan is compiled per shape, so this must be fast."""
        entries: list[Entry] = []
        for step in self.plan.steps:
            entries += self.compiled_step(step)
        return entries

    def compiled_step(self, step: Step) -> Sequence[Entry]:
        """Return the entries of the next step."""
        ends, last = self.ends, self.last
        name, lane = step.id, step.lane
        if name in self.within:  # an entry of an earlier step does it
            ends[name] = (last[lane],)
            return ()
        after = self._after(step) if step.after or self.pending else ()
        made = self._made(step, after)
        if made and made[-1].lane != lane:  # a wait on the caller's stream
            ends[name] = (made[-1].id,)
            last[made[-1].lane] = made[-1].id
            self.pending[lane] = (*self.pending.get(lane, ()), made[-1].id)
        elif made:
            last[lane] = made[-1].id
            ends[name] = (last[lane],)
        else:
            self.pending[lane] = after
            ends[name] = (*after, last[lane]) if lane in last else after
        return made

    def _after(self, step: Step) -> tuple[str, ...]:
        after = list(self.pending.pop(step.lane, ()))
        for name in step.after:
            if name not in self.ends:
                raise PlanError(
                    f"rank {self.plan.rank}, step {step.id!r} comes after {name!r}, but no step "
                    "before it has that id; `ficco plan --check` proves a plan"
                )
            after += [end for end in self.ends[name] if end not in after]
        return tuple(after)

    def _made(self, step: Step, after: tuple[str, ...]) -> Sequence[Entry]:
        kind = step.kind
        gated = "gated " if step.parts else ""
        if self.target.collectives and (gated or kind in ("copy", "raise", "wait", "clear")):
            raise EngineError(
                f"rank {self.plan.rank}, step {step.id!r}: target {self.target.name!r} has no "
                f"{gated}{kind} steps; use target 'cuda' or 'host', or a schedule with "
                "transport='collective'"
            )
        if kind == "wait":
            lane = self._waiting_lane(step.lane)
            if lane != step.lane and not self.cleared.isdisjoint(step.signals):
                raise EngineError(
                    f"rank {self.plan.rank}, step {step.id!r} waits for `free` behind its clear, "
                    f"in lane {step.lane!r}; target {self.target.name!r} waits by kernels, in lane "
                    f"{lane!r}: let the plan clear and wait in that lane"
                )
            return signals.waited(step.id, lane, after, step.signals, self.how)
        if kind == "clear":
            self.cleared.update(signal for signal in step.signals if signal.name == "free")
        if kind in ("raise", "clear"):
            return self._written(step, after)
        if kind in ("copy", "local_copy"):
            if kind == "copy" and len(step.reads) == 1 and self.contiguous is None:
                only = (step.reads[0], step.writes[0])
                return [Copy(step.id, step.lane, after, *only)] if only[0].area else []
            boxes = copies.boxes_of(step, self.contiguous)
            names = _names(step.id, len(boxes))
            return [
                Copy(name, step.lane, () if i else after, *box)
                for i, (name, box) in enumerate(zip(names, boxes, strict=True))
            ]
        if kind == "collective":
            if not self.target.collectives:
                raise EngineError(
                    f"rank {self.plan.rank}, step {step.id!r}: target {self.target.name!r} has no "
                    "collectives; use target 'library', or a schedule with transport='dma'"
                )
            entry = Exchange(step.id, step.lane, after, step.collective, step.reads, step.writes)
            return [entry]
        if not step.parts:
            return self._launches(step.id, step, step, after)
        return self._gated(step, after) if self._has_kernel(step) else self._by_parts(step, after)

    def _has_kernel(self, step: Step) -> bool:
        """Return whether a kernel runs a gated step."""
        target = self.target
        return target.kernels or (target.gathers and gated.only_waits(self.plan, step))

    def _waiting_lane(self, lane: str) -> str:
        """Return the lane of a wait: kernels run on the caller's stream alone."""
        return self.caller if self.how == "kernel" else lane

    def _written(self, step: Step, after: tuple[str, ...]) -> list[SignalWrite]:
        """Return a step that raises or clears signals; a kernel may also store those behind it."""
        clears = step.signals if step.kind == "clear" else ()
        raises = () if clears else step.signals
        if step.id in self.raises:
            raises = self.raises[step.id].signals
        inline = step.lane in self.inline
        return signals.stored(
            step.id, step.lane, after, clears, raises, inline=inline, target=self.target
        )

    def _gated(self, step: Step, after: tuple[str, ...]) -> list[Launch]:
        """Return a gated step as launches of one kernel; the last may release the window."""
        launches = gated.launches_of(self.plan, step, self.target.leaves)
        ends = self.releases.get(step.id)
        releasing = ends and gated.with_release(launches[-1], ends)
        if ends and releasing:  # the other launches have ended before the last
            launches[-1] = releasing
            self.within.update(end.id for end in ends)
        return _launches(step, step.id, launches, after, "native")

    def _by_parts(self, step: Step, after: tuple[str, ...]) -> list[Entry]:
        """Return a gated step as entries that wait, work and raise signals, part after part."""
        entries: list[Entry] = []
        for number, part in enumerate(step.parts):
            name = f"{step.id}[{number}]"
            if part.waits:
                entries += signals.waited(f"{name}.wait", step.lane, after, part.waits, self.how)
                after = ()
            works = self._launches(name, step, part, after)
            entries += works
            after = () if works else after
            if part.raises:
                entries += signals.stored(
                    f"{name}.signal", step.lane, after, (), part.raises,
                    inline=True, target=self.target,
                )  # fmt: skip
                after = ()
        return entries

    def _launches(
        self, name: str, step: Step, part: Step | Part, after: tuple[str, ...]
    ) -> list[Launch]:
        """Return the launches of a step, or of a part of it, by a library or by ficco's kernels."""
        works: list[Work] = []
        by = "library"
        if step.kind == "gemm":
            works += gemms.gemms_of(step, part.products, self.target.batches)
        elif step.kind == "reduce":
            (written,) = part.writes
            total = sums.sum_of(part.reads, written) if self.target.batches else None
            works.append(Reduce(part.reads, written) if total is None else total)
            by = "native" if total is not None and self.target.kernels else by
        elif step.kind == "experts":
            works.append(experts_of(step))
            by = "native" if self.target.kernels else by
        elif self.target.kernels:
            works += pools.pools_of(bags_of(part))
            by = "native"
        else:
            works += bags_of(part)
        return _launches(step, name, works, after, by)


def _has_work(step: Step) -> bool:
    """Return whether a compute step has any work, so that launches run it."""
    return bool(step.products or step.writes or step.parts)


def _launches(
    step: Step, name: str, works: Sequence[Work], after: tuple[str, ...], by: str
) -> list[Launch]:
    """Return launches of one step, in order."""
    return [
        Launch(each, step.lane, () if i else after, work, by)
        for i, (each, work) in enumerate(zip(_names(name, len(works)), works, strict=True))
    ]


def _names(name: str, count: int) -> list[str]:
    """Return the ids of a step's entries: its own, with a number if there are several."""
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
