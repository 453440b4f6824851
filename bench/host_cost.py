"""Measure the host's time for a call: ficco's native part, its torch part, the whole call.

Calls are enqueued ten at a time, or `--queued N`; waits for the device between these are not timed.
Further figures are the same call as the first after such a wait; as a custom operator, which
compiled code calls; with the gradient of x recorded; the backward pass of that call alone, which
autograd runs on another thread; and `serial` as ficco's own call.

    python bench/host_cost.py --gpus 2 --out bench/results

With `--ranks 8` on fewer GPUs, ranks share them. Their work is time-sliced, so device times are
meaningless; the host does the work of a call of 8 ranks. NCCL and PyTorch refuse such calls, so
their times are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from comparing.cases import Case, host_cost_cases
from record import spread, surroundings

from ficco.measure.launching import NO_MULTICAST, Rendezvous, run_ranks

if TYPE_CHECKING:  # these imports need torch
    import torch

    from ficco.measure.cases import Operands, Run
    from ficco.plan.schedule import Schedule

CALLS, WARM = 200, 2  # WARM: number of queues
NATIVE = ("start", "submit", "launch", "finish", "call", "run_prepared", "fits")
SCHEDULES = ("shard_p2p", "gated_1d")  # a library call per shard; one launch


class TimedNative:
    """Wraps a bound plan's native program and adds up the times of its calls."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.us = dict.fromkeys(NATIVE, 0.0)
        for name in NATIVE:
            if hasattr(native, name):
                setattr(self, name, self.timed(name, getattr(native, name)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds the time of a call to one of NATIVE."""

        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args)
            self.us[name] += 1e6 * (time.perf_counter() - begin)
            return found

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


class Clock(NamedTuple):
    """The number of calls between two waits for the device, and the ranks' rendezvous."""

    queued: int
    rendezvous: Rendezvous


def timed(call: Callable[[int], Any], clock: Clock, after: Callable[[float], None]) -> None:
    """Make CALLS calls; pass each call's time in us to `after`."""
    import torch

    from ficco.measure.clock import beat

    warm = WARM * clock.queued
    for i in range(warm + CALLS):
        if i % clock.queued == 0:
            beat()
            torch.cuda.synchronize()
            clock.rendezvous.gather()
        begin = time.perf_counter()
        call(i)
        elapsed = 1e6 * (time.perf_counter() - begin)
        if i >= warm:
            after(elapsed)
    torch.cuda.synchronize()


def parts_of(call: Callable[[int], Any], clock: Clock, made: Any) -> dict[str, Any]:
    """Return medians of the native calls, of the rest of the engine's part, and of the rest.

    The native call `run_prepared` allocates the results and makes the library's products, too.

    `made`: the runtime's record of the call.
    """
    bound = made.bound
    native, run, launches = bound._native, bound.run, bound._launches
    prepared_runs = [prepared.run for prepared in made.prepared]
    watched, inside = TimedNative(native), [0.0]
    found: dict[str, list[float]] = {
        name: [] for name in (*NATIVE, "native", "torch", "around", "public_with_clocks")
    }

    def timed_part(part: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(*args: Any, **words: Any) -> Any:
            begin = time.perf_counter()
            done = part(*args, **words)
            inside[0] += 1e6 * (time.perf_counter() - begin)
            return done

        return timed_run

    def once(i: int) -> None:
        watched.us.update(dict.fromkeys(NATIVE, 0.0))
        inside[0] = 0.0
        call(i)

    def after(public: float) -> None:
        total = sum(watched.us.values())
        for name in NATIVE:
            found[name].append(watched.us[name])
        found["native"].append(total)
        found["torch"].append(inside[0] - total)
        found["around"].append(public - inside[0])
        found["public_with_clocks"].append(public)

    bound.run = timed_part(run)
    for prepared in made.prepared:
        prepared.run = timed_part(watched.timed("run_prepared", prepared.run))
    if not made.prepared:  # prepared calls make no others, and need the program itself
        bound._native = watched
    if launches is not None:
        launches._program = watched  # it calls `fits` of the program
    try:
        timed(once, clock, after)
    finally:
        bound._native = native
        for prepared, run_prepared in zip(made.prepared, prepared_runs, strict=True):
            prepared.run = run_prepared
        if launches is not None:
            launches._program = native
        del bound.run
    return {name: spread(values) for name, values in found.items()}


def measure(
    case: Case, name: str, rank: int, clock: Clock, sharing: bool = False
) -> dict[str, Any]:
    """Return all host times of a case on this rank, in us; only ficco's if ranks share GPUs."""
    import torch
    from comparing.by_pytorch import FUSED, fused

    from ficco.api import groups
    from ficco.core.machine import Machine
    from ficco.measure.cases import TOLERANCE, Operands
    from ficco.plan.schedule import Schedule

    operands = Operands(case, rank)
    schedule = replace(Schedule.named(name), grain=1).resolve(case.world, Machine.named("cuda"))
    call = operands.ficco(schedule)
    for i in (0, 1):
        error = operands.error(call(i), i)
        if not error < TOLERANCE:
            raise RuntimeError(f"{case.id}: wrong result, relative error {error:.3g}")
    runtime = groups.gpu_runtime(None, torch.device("cuda", torch.cuda.current_device()))
    if runtime is None or runtime._last is None:
        raise RuntimeError(f"ficco runs plain torch.distributed: {groups.fallback_reason()}")
    made = runtime._last
    bound = made.bound
    result: dict[str, Any] = {}
    result["public"], result["after_a_wait"] = _alone(call, clock)
    result |= parts_of(call, clock, made)
    result["custom_op"], _ = _alone(as_custom_operator(operands, schedule), clock)
    forward, backward = recorded(operands, schedule)
    result["recorded"], _ = _alone(forward, clock)
    result["backward"], _ = _alone(backward, clock)
    result["native_calls"] = 3 + bound.launch_count
    result["library_calls"] = bound.library_calls
    if sharing:
        return result
    result["serial"], result["serial_after_a_wait"] = _alone(operands.serial, clock)
    plainly = Schedule.named("serial").resolve(case.world, Machine.named("cuda"))
    result["serial_by_ficco"], _ = _alone(operands.ficco(plainly), clock)
    if case.op in FUSED:
        try:
            result["torch_fused"], _ = _alone(fused(operands), clock)
        except RuntimeError as error:
            result["torch_fused"] = {"reason": str(error)[:400]}
    return result


def as_custom_operator(operands: Operands, schedule: Schedule) -> Run:
    """Return the call in a compiler's form: groups by name, schedules as text."""
    import torch

    axes = {name: value for name, value in asdict(schedule).items() if name != "name"}
    named = (torch.distributed.group.WORLD.group_name, json.dumps(axes), None)
    op = getattr(torch.ops.ficco, operands.layout.op)
    rest: dict[str, tuple[Any, ...]] = {
        "all_gather_matmul": ([], [False], None, None, False),
        "matmul_reduce_scatter": (None, None),
        "matmul_all_reduce": (None,),
    }

    def run(i: int) -> Any:
        x, w = operands.x[i % operands.sets], operands.w[i % operands.sets]
        given = x if operands.layout.op == "all_gather_matmul" else [x]
        return op(given, [w], *rest[operands.layout.op], *named)

    return run


def recorded(operands: Operands, schedule: Schedule) -> tuple[Run, Run]:
    """Return the call that records the gradient of x, and the backward pass of a stored result.

    The backward pass has the call's schedule if the gradient's operator supports it.
    """
    import torch

    import ficco

    function = getattr(ficco, operands.layout.op)
    xs = [x.detach().requires_grad_() for x in operands.x]

    def forward(i: int) -> torch.Tensor:
        y: torch.Tensor = function(xs[i % len(xs)], operands.w[i % len(xs)], schedule=schedule)
        return y

    ys = [forward(i) for i in range(len(xs))]
    dys = [torch.ones_like(y) for y in ys]

    def backward(i: int) -> Any:
        i %= len(xs)
        return torch.autograd.grad(ys[i], xs[i], dys[i], retain_graph=True)

    return forward, backward


def _alone(call: Run, clock: Clock) -> tuple[dict[str, float], dict[str, float]]:
    """Return the times of a call, and of a call that is the first after a wait."""
    found: list[float] = []
    timed(call, clock, found.append)
    return spread(found), spread(found[:: clock.queued])


def rank_main(folder: Path, queued: int, sharing: bool) -> int:
    """Measure on one rank; rank 0 writes its figures."""
    import ficco
    from ficco.measure.ranks import WAIT_S, open_group

    rank, world = open_group(folder, sharing=sharing)
    rendezvous = Rendezvous(folder, rank, world, WAIT_S)
    ficco.prepare(machine="cuda", timeout_s=20.0)
    cases = []
    for case in host_cost_cases(world):
        for name in SCHEDULES:
            us = measure(case, name, rank, Clock(queued, rendezvous), sharing)
            cases.append({**case.facts(), "schedule": name, "grain": 1, "us": us})
            rendezvous.gather()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(cases))
    rendezvous.gather()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument(
        "--ranks", type=int, metavar="P", help="ranks; if more than GPUs, they share them"
    )
    parser.add_argument("--queued", type=int, default=10, metavar="N", help="calls between waits")
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for host_cost_MACHINE.json"
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(Path(args.rank_of), args.queued, args.ranks > args.gpus)
    ranks = args.ranks or args.gpus
    with tempfile.TemporaryDirectory(prefix="host_cost") as name:
        folder = Path(name)
        numbers = {"--gpus": args.gpus, "--ranks": ranks, "--queued": args.queued}
        words = [word for option, number in numbers.items() for word in (option, str(number))]
        command = [__file__, *words, "--rank-of", name]
        reason = run_ranks(command, ranks, folder, 240.0, lambda: None)
        if not (folder / "found.json").exists():
            print(reason, file=sys.stderr)
            return 1
        cases = json.loads((folder / "found.json").read_text())
    from naming import machine_name
    from record import gpus

    found, about = surroundings(), gpus()
    found["versions"] |= about.pop("more")
    document = {
        "bench": "host_cost", **found, **about, "world": ranks, "environment": NO_MULTICAST,
        "how": f"host us a call on rank 0, {CALLS} calls, {args.queued} between two waits",
        "cases": cases,
    }  # fmt: skip
    if ranks > args.gpus:
        document["shared_gpus"] = args.gpus
    Path(args.out).mkdir(parents=True, exist_ok=True)
    path = Path(args.out, f"host_cost_{machine_name(document)}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    for case in cases:
        print(
            case["case"],
            case["schedule"],
            {k: v.get("median") for k, v in case["us"].items() if isinstance(v, dict)},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
