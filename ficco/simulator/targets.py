"""The target that a machine is simulated with: what its engine compiles plans for."""

from __future__ import annotations

from ficco.machine import Machine
from ficco.target import HOST, Target, cuda_target, hip_target, own_signals

__all__ = ["simulated_target"]


def simulated_target(machine: Machine, rank: int) -> Target:
    """Return the target of a rank of a machine."""
    if machine.engine == "host":
        return HOST
    if machine.engine == "cuda":
        return cuda_target(() if machine.signals == "write" else own_signals(rank))
    return hip_target(kernels=True, copies_2d=True)
