"""Results of all ranks on the double of one vendor's library, as digests.

python vendor_bits_worker.py cuda|hip WORLD pairwise|complete

A process that has the double of that library prints a line for each problem and schedule that both
vendors run: the names, and the digest of the bits of all ranks' results. `complete` takes every
operator in every dtype; `pairwise` takes two operators in each, other ones for each dtype, and one
problem of each.
"""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
from engine_node import Arrays, Node, named, problems

from ficco.core.dtypes import DTYPES as ALL_DTYPES
from ficco.core.errors import ScheduleError
from ficco.operators import OPERATORS, registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes.served import check_amd_kernels

DTYPES = tuple(ALL_DTYPES)
SHARED = [op for op in OPERATORS if not registry.get(op).flow.routes]  # AMD GPUs refuse experts


def shared_names(problem: Problem) -> list[str]:
    """Return the schedules that both vendors run with GEMMs of NumPy.

    Gated products are kernels of each vendor, for which different functions stand.
    """
    found = []
    for name in Schedule.names(problem.op):
        schedule = Schedule.named(name)
        if schedule.compute == "gated":
            continue
        try:
            check_amd_kernels(problem, schedule)
        except ScheduleError:
            continue
        found.append(name)
    return found


def chosen(op: str, dtype: str, world: int) -> bool:
    """Return whether `pairwise` has an operator in a dtype: over all worlds it has each pair."""
    if op not in SHARED:
        return False
    turn = (SHARED.index(op) + 2 * DTYPES.index(dtype) + world) % len(SHARED)
    return turn < len(SHARED) // len(DTYPES)


def digest_of(arrays: Arrays) -> str:
    """Return the digest of all ranks' results."""
    bits = hashlib.sha256()
    for mine in arrays:
        for name in sorted(name for name in mine if name[0] == "y" and name[1:].isdigit()):
            bits.update(np.ascontiguousarray(mine[name]).tobytes())
    return bits.hexdigest()


def main(vendor: str, world: int, complete: bool) -> None:
    """Run operators by every schedule of both vendors."""
    if vendor == "hip":
        from hip_node import HipNode

        node: Node = HipNode(world)
    else:
        node = Node(world)
    for dtype in DTYPES:
        drawn = problems(world, dtype, random.Random(f"{world} {dtype}"))
        seen = set[str]()
        for number, problem in enumerate(drawn):
            if not complete and (problem.op in seen or not chosen(problem.op, dtype, world)):
                continue
            seen.add(problem.op)
            arrays, _ = node.arrays(problem, 1)
            for name in shared_names(problem):
                node.runtime.synchronize()
                node.poison()
                try:
                    node.execute(problem, named(name, world), arrays)
                except ScheduleError as error:
                    found = f"refused: {str(error).partition(':')[0]}"
                else:
                    node.runtime.synchronize()
                    found = digest_of(arrays)
                print(problem.op, dtype, number, name, found)
    assert not node.compute.errors, node.compute.errors[0]
    node.runtime.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "complete")
