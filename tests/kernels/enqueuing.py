"""Launches of kernels, enqueued or only loaded."""

from __future__ import annotations

from typing import Any

from ficco.kernels import gated, loading, one_kernel
from ficco.kernels.gated import Gate, Matrices
from ficco.kernels.gated_tables import Table
from ficco.kernels.one_kernel import Control, Prepared
from ficco.kernels.records import Record

__all__ = ["call", "gated_matmul", "warm", "warm_gated"]


def call(made: Prepared, operands: Any, told: Control, copy: int = 0) -> None:
    """Enqueue a whole call."""
    loading.enqueue(one_kernel.launch(made, operands, told, copy))


def warm(record: Record, made: Prepared, operands: Any, told: Control) -> None:
    """Load the kernel of a whole call; compute and send nothing."""
    loading.warm(one_kernel.launch(made, operands, told), record)


def gated_matmul(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Enqueue c[rows of every part] = a.b (+ bias): one launch, or none."""
    if table.tiles:
        loading.enqueue(gated.launch_of(table, matrices, gate))


def warm_gated(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Load the kernel of `gated_matmul`; compute no tile."""
    if table.tiles:
        loading.warm(gated.launch_of(table, matrices, gate), gated.RECORD)
