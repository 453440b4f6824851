"""The engine's GEMM calls of a schedule's plan, without the copies."""

from __future__ import annotations

from typing import Any

from ficco.compute.torch_device import TorchDeviceCompute
from ficco.compute.torch_dtypes import TORCH_DTYPE
from ficco.engines.library_calls import call_of
from ficco.lowering import lower_rank
from ficco.measuring.cases import Operands, Run, Tensor, plain
from ficco.passes import compile_plan
from ficco.plan import Region
from ficco.program import Gemm
from ficco.schedule import Schedule
from ficco.target import cuda_target

__all__ = ["pieces_of"]


def pieces_of(operands: Operands, schedule: Schedule) -> Run | None:
    """Return the GEMMs alone; None if cuBLAS does not run them: gated GEMMs, collectives, kernels.

    Args:
        operands: the inputs of the GEMMs; random data replaces the data of peers.
        schedule: the resolved schedule.
    """
    if schedule.transport != "dma":
        return None
    plan = lower_rank(operands.layout.problem, schedule, operands.rank)
    steps = [step for step in plan.steps if step.kind == "gemm"]
    if not steps or any(step.parts for step in steps):
        return None
    products = [product for step in steps for product in step.products]
    used = {region.buffer for p in products for region in (p.a, p.b, p.c, *p.add)}
    others = {
        buffer.name: plain((buffer.rows, buffer.cols), TORCH_DTYPE[buffer.dtype]).normal_()
        for buffer in plan.buffers
        if buffer.name in used and buffer.role not in ("input", "weight")
    }
    compute = TorchDeviceCompute()
    launches = compile_plan(plan, cuda_target()).launches
    calls = [call_of(launch.work, {}) for launch in launches if isinstance(launch.work, Gemm)]

    def run(i: int) -> Tensor:
        x, w = operands.x[i % operands.sets], operands.w[i % operands.sets]
        handles: dict[str, Any] = {**others, "x": x, "w": w}

        def view(region: Region) -> Any:
            return compute.part(handles[region.buffer], *region[2:6])

        for call in calls:
            call(compute, view)
        return operands.y

    return run
