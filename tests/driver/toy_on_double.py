"""Programs with a kernel that a record adds, bound and run on the driver's test double.

python toy_on_double.py tiles WORDS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from engine_node import LEAST, Node
from launched_on_stream import LaunchedKernels
from one_kernel_on_stream import CALLS, OnWindows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from toy_kernel import RECORD, ToyTable

from ficco.engine.compute import own_kernels
from ficco.engine.gpu import BoundProgram
from ficco.kernels.records import Operands
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Signal
from ficco.plan.schedule import Schedule
from ficco.program import Launch, OneKernel, Program
from ficco.program.target import cuda_target
from ficco.runtime import engine

M, N, ROWS = 5, 24, 2
TILES = -(-M // ROWS)


class ToyCall(OnWindows):
    """Calls of `ToyTable`."""

    def run(self, operands: Operands, copy: int) -> None:
        self.copy, t = copy, self.table
        x, y = (np.asarray(operands[name]) for name in ("x", "y0"))
        self._enter()
        y[t.rank * t.m : (t.rank + 1) * t.m] = x
        for peer in self.peers:
            self._tiles(peer)[t.rank * t.m : (t.rank + 1) * t.m] = x
            self._set([Signal(peer, "data", t.rank, tile) for tile in range(TILES)], 1)
        entered = self._meet()
        heard = [Signal(t.rank, "data", peer, j) for peer in self.peers for j in range(TILES)]
        self._await(heard)
        for peer in self.peers:
            rows = slice(peer * t.m, (peer + 1) * t.m)
            y[rows] = self._tiles(t.rank)[rows]
        self._leave([*heard, *entered])

    def _tiles(self, rank: int) -> Any:
        return self._matrix(rank, self.table.recv, self.table.world * M, N)


def program_of(rank: int, world: int) -> Program:
    """Return a rank's program: one launch."""
    peers = [peer for peer in range(world) if peer != rank]
    waits = tuple([
        (f"wait.{name}", tuple([Signal(rank, name, peer) for peer in peers]))
        for name in ("free", "entered", "data")
    ])  # fmt: skip
    table: Any = ToyTable(rank, world, M, N, "float32", ROWS, 0)
    buffers = (
        Buffer("x", "input", M, N, "float32"),
        Buffer("y0", "output", world * M, N, "float32"),
        Buffer("tiles", "window", world * M, N, "float32"),
    )
    launch = Launch("send", "compute", (), OneKernel(table, waits), "native")
    return Program(rank, cuda_target(), buffers, (launch,))


def tiles(world: int) -> None:
    own_kernels.register(ToyTable, RECORD)
    CALLS[ToyTable] = ToyCall
    node = Node(world)
    kernels = LaunchedKernels(node.compute)
    node.compute.kernels = kernels
    problem = Problem.chunked("all_gather_matmul", world, 16, 48, 64)  # opens windows for these
    arrays, _ = node.arrays(problem, 1)
    node.execute(problem, Schedule.named("gather_sm"), arrays)
    place, bound, given = node.runtime._places[-1], [], []
    for rank in range(world):
        with node.compute.on(rank, node.streams[rank]):
            parts = program_of(rank, world), place.devices[rank], place.views[rank]
            bound.append(BoundProgram(*parts, node.compute, 99))
        given.append({
            name: node.empty(rank, np.empty((rows, N), np.float32))
            for name, rows in (("x", M), ("y0", world * M))
        })  # fmt: skip
    node.wait()
    for call in range(1, 5):
        want = np.arange(world * M * N, dtype=np.float32).reshape(-1, N) * call
        for rank, program in enumerate(bound):
            given[rank]["x"][...] = want[rank * M : (rank + 1) * M]
            with node.compute.on(rank, node.streams[rank]):
                program.run(given[rank], call % 2)
        node.wait()
        assert not node.compute.errors, node.compute.errors[0]
        assert all((mine["y0"] == want).all() for mine in given), call
    assert all(program.library_calls == 0 for program in bound), "native code launches the kernel"
    assert node.failure() is None
    node.runtime.close()


if __name__ == "__main__":
    engine.LEAST = LEAST
    {"tiles": tiles}[sys.argv[1]](**json.loads(sys.argv[2]))
    print("right")
