"""Results of all ranks on the double of one vendor's library, as digests.

python vendor_bits_worker.py cuda|hip WORLD DTYPE

A process that has the double of that library prints a line for each operator, problem and schedule
that both vendors run: the names, and the digest of the bits of all ranks' results.
"""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
from engine_node import Node, named, problems

from ficco.errors import ScheduleError
from ficco.passes.served import check_amd_kernels
from ficco.problem import Problem
from ficco.schedule import Schedule


def shared_names(problem: Problem) -> list[str]:
    """Return the schedules that both vendors run with kernels of NumPy."""
    found = []
    for name in Schedule.names(problem.op):
        try:
            check_amd_kernels(problem, Schedule.named(name))
        except ScheduleError:
            continue
        found.append(name)
    return found


def main(vendor: str, world: int, dtype: str) -> None:
    """Run every operator by every schedule of both vendors."""
    if vendor == "hip":
        from hip_node import HipNode

        node: Node = HipNode(world)
    else:
        node = Node(world)
    for number, problem in enumerate(problems(world, dtype, random.Random(f"{world} {dtype}"))):
        arrays, _ = node.arrays(problem, 1)
        for name in shared_names(problem):
            node.runtime.synchronize()
            node.poison()
            try:
                node.execute(problem, named(name, world), arrays)
            except ScheduleError as error:
                print(problem.op, number, name, "refused", str(error).partition(":")[0])
                continue
            node.runtime.synchronize()
            bits = hashlib.sha256()
            for mine in arrays:
                for key in sorted(key for key in mine if key[0] == "y" and key[1:].isdigit()):
                    bits.update(np.ascontiguousarray(mine[key]).tobytes())
            print(problem.op, number, name, bits.hexdigest())
    assert not node.compute.errors, node.compute.errors[0]
    node.runtime.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
