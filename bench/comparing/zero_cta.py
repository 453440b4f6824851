"""Measure serial with NCCL's zero-CTA policy: copy engines move registered memory.

The policy needs PyTorch's NCCL backend of symmetric memory. A process has either this backend or
the one that ficco and PyTorch's fused operators use. The measurement therefore runs in separate
processes, together with an ordinary serial, which links its figures to the others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from comparing import summary
from comparing.cases import Case
from ficco.measure.cases import TOLERANCE, Operands
from ficco.measure.clock import Config, Timer, beat, calls_for
from ficco.measure.launching import Rendezvous

ROUNDS = 20


def options() -> Any:
    """Return the options of a group with the policy.

    Raises:
        AttributeError: this PyTorch or its NCCL lacks the policy.
    """
    found = dist.ProcessGroupNCCL.Options()
    found.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    return found


def prepare() -> None:
    """Choose the backend of symmetric memory; call this before any allocation."""
    symmetric.set_backend("NCCL")


def registered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that is registered with NCCL on all ranks. A collective call."""
    found = symmetric.empty(shape, dtype=dtype, device="cuda")
    symmetric.rendezvous(found, group=dist.group.WORLD)
    return found


def kernels(config: Config) -> list[str] | str:
    """Return the names of NCCL's kernels in a call; none if copy engines do all the work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            config.call(0)
            torch.cuda.synchronize()
        names = {event.name for event in profile.events()}
        return sorted(name[:80] for name in names if name.startswith(("ncclDev", "ncclSym")))
    except Exception as error:
        return f"not profiled: {type(error).__name__}: {error}"


def measure(case: Case, rank: int, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return medians of serial with registered and with ordinary memory. A collective call."""
    beat()
    ordinary, special = Operands(case, rank), Operands(case, rank, registered)
    configs = [Config("serial", ordinary.serial), Config("serial zero-CTA", special.serial)]
    moves = [
        Config("transfer nccl", ordinary.nccl()), Config("transfer nccl zero-CTA", _moving(special))
    ]  # fmt: skip
    for config, operands in zip(configs, (ordinary, special), strict=True):
        for i in (0, 1):
            error = operands.error(config.call(i), i)
            if not max(rendezvous.gather(1e9 if math.isnan(error) else error)) < TOLERANCE:
                raise RuntimeError(f"{config.name}: wrong result, relative error {error:.3g}")
    estimate = max(rendezvous.gather(Timer(rendezvous, 2).run(configs[0], "eager")[0]))
    timer, pool = Timer(rendezvous, calls_for(estimate)), torch.cuda.graph_pool_handle()
    missing = {}
    for config in configs + moves:
        config.call(0)
        reason = ""
        try:
            timer.capture(config, pool)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:400]
        if any(rendezvous.gather(float(bool(reason)))):
            missing[config.name] = reason or "capture failed on another rank"
            config.graph = None
    entries = [(config, regime) for config in configs + moves for regime in summary.REGIMES]
    entries = [(c, regime) for c, regime in entries if regime != "captured" or c.graph is not None]
    times: dict[tuple[str, str], list[float]] = {(c.name, regime): [] for c, regime in entries}
    for number in range(ROUNDS + 1):
        for config, regime in entries:
            found = timer.run(config, regime)
            if number:
                times[config.name, regime] += found
    flat = torch.tensor([v for found in times.values() for v in found], device="cuda")
    dist.all_reduce(flat, dist.ReduceOp.MAX)
    values = iter(flat.tolist())
    slowest = {key: [next(values) for _ in found] for key, found in times.items()}
    return {
        "case": case.id, "regimes": summary.regime_rows(slowest, {}, {}),
        "not_captured": missing, "nccl_kernels": kernels(configs[1]),
    }  # fmt: skip


def _moving(operands: Operands) -> Any:
    """Return the transfer alone, between registered buffers."""
    if operands.layout.op == "matmul_all_to_all":
        return lambda i: operands.move(operands.y, operands.product)
    return operands.nccl()
