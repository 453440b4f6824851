"""A process that has the double of AMD's library runs all ranks on its devices.

python hip_engine_worker.py SCENARIO WORDS
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from dataclasses import replace
from typing import Any

import double_control as control
import numpy as np
from engine_node import expected, named, problems, refused
from hip_node import HipNode

from ficco.cli.findings import amd_findings
from ficco.core.errors import EngineError, FiccoError, ScheduleError
from ficco.lowering import lower
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

UNSERVED = {"transport": "sm", "compute": "gated"}


def serves(problem: Problem, schedule: Schedule) -> bool:
    unserved = {axis for axis, value in UNSERVED.items() if getattr(schedule, axis) == value}
    return not unserved - ({"compute"} if problem.flow.gathers else set())


def operators(worlds: list[int], dtypes: list[str]) -> None:
    """Every operator in every schedule: right, or refused for all ranks."""
    for world in worlds:
        node, served = HipNode(world), set()
        for dtype in dtypes:
            for problem in problems(world, dtype, random.Random(f"{world} {dtype}")):
                arrays, exact = node.arrays(problem, 1)
                for name in Schedule.names(problem.op):
                    schedule = named(name, world)
                    node.runtime.synchronize()
                    node.poison()
                    try:
                        for _ in range(2):
                            node.execute(problem, schedule, arrays)
                    except ScheduleError as error:
                        unserved = not serves(problem, schedule) and "AMD devices" in str(error)
                        assert refused(problem, name) or unserved, f"{name}: {error}"
                        continue
                    node.runtime.synchronize()
                    served.add(name)
                    assert world == 1 or schedule.compute != "gated" or problem.flow.gathers
                    rounded = oracle.roundings(problem, schedule.sums_travel)
                    node.judge(problem, arrays, exact, name, rounded)
        wanted = {"hetero_fused_1d", "ring_1d", "shard_p2p", "gated_1d"}
        assert world == 1 or wanted <= served, served
        assert world == 1 or node.compute.kernels.launches, "no gated product ran"
        node.runtime.close()


def late(world: int, name: str = "hetero_fused_1d") -> None:
    """A rank that stops: peers are released with NaN, and the error names the signal."""
    node = HipNode(world, timeout_s=0.5)
    problem = Problem.chunked("all_gather_matmul", world, 40, 30, 20, "float32")
    node.right(problem, named(name, world))
    arrays, _ = node.arrays(problem, 2)
    control.stall_stream(node.streams[world - 1], 4.0)
    begun = time.monotonic()
    node.execute(problem, named(name, world), arrays)
    try:
        node.runtime.synchronize()
    except EngineError as error:
        text = str(error)
        assert f"Rank {world - 1} should have set it" in text and "0.5 s" in text, text
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begun < 8
    node.runtime.reset()
    node.right(problem, named(name, world), seed=3)
    node.runtime.close()


def gated(world: int) -> None:
    """A gated gather is one launch by native code, of the kernel for the layout of its matrices."""
    node = HipNode(world)
    kernels = node.compute.kernels
    problem = Problem.chunked("all_gather_matmul", world, 96, 16 * world, 32, "bfloat16", bias=True)
    schedule = named("gated_1d", world)
    found = set()
    for even, turned in ((False, False), (False, True), (True, False), (True, True)):
        arrays, exact = node.arrays(problem, 5)
        for rank, mine in enumerate(arrays):
            for name in mine if even else ("w",):
                mine[name] = laid_out(node, rank, mine[name], even, turned and name == "w")
        before = kernels.launches
        for call in range(3):
            node.execute(problem, schedule, arrays)
            node.runtime.synchronize()
            assert kernels.launches == before + world * (call + 1)
        node.judge(problem, arrays, exact, f"{even=} {turned=}")
        (bound,) = node.runtime._recent
        assert all((rank.launch_count, rank.library_calls) == (1, 0) for rank in bound.ranks)
        assert len(kernels.kinds) == 1, "one kernel for all calls"
        found |= kernels.kinds
        kernels.kinds.clear()
    assert found == {(aligned, way) for aligned in (False, True) for way in (0, 1)}, found

    scatter = Problem.chunked("matmul_reduce_scatter", world, 40, 30, 20, "float32")
    for other, own, blocked, why in (
        (scatter, kernels, "", "none for chunks of results.*per_chunk"),
        (
            replace(problem, dtype="float16"),
            kernels,
            "copies are kernels",
            r"occupy all compute units .*\(copies are kernels\).*per_chunk",
        ),
        (
            replace(problem, dtype="float32"),
            None,
            "",
            "no kernel that waits for chunks.*per_chunk",
        ),
    ):
        node.compute.kernels, node.runtime._engine.no_overlap = own, blocked
        arrays, _ = node.arrays(other, 1)
        with expected(ScheduleError, f"compute='gated' does not run on AMD devices: .*{why}"):
            node.execute(other, schedule, arrays)
    node.runtime.close()


def laid_out(node: HipNode, rank: int, matrix: Any, even: bool, turned: bool) -> Any:
    """Return a copy of a matrix on the double: with aligned rows, or columns that are adjacent."""
    shape = matrix.T if turned else matrix
    with node.compute.on(rank, node.streams[rank]):
        apart = 0 if even else 3
        whole = node.compute.empty(shape.shape[0], shape.shape[1] + apart, matrix.dtype.name)
    other = whole[:, : shape.shape[1]]
    other = other.T if turned else other
    node.wait()
    other[...] = matrix
    return other


def replayed(world: int) -> None:
    """A graph that has captured a gated gather computes anew at every replay."""
    node = HipNode(world)
    hip, streams = node.hip, node.streams.values()
    problem = Problem.chunked("all_gather_matmul", world, 40, 30, 20, "float32")
    schedule = named("gated_1d", world)
    node.right(problem, schedule)
    arrays, exact = node.arrays(problem, 7)
    before = node.compute.kernels.launches
    for stream in streams:
        hip.hipStreamBeginCapture(stream, 2)
    node.execute(problem, schedule, arrays)
    graphs = []
    for stream in streams:
        graph, ready = ctypes.c_size_t(), ctypes.c_size_t()
        hip.hipStreamEndCapture(stream, ctypes.byref(graph))
        hip.hipGraphInstantiateWithFlags(ctypes.byref(ready), graph.value, 0)
        graphs.append(ready.value)
    for turn in range(1, 4):
        for mine in arrays:
            mine["y0"].fill(np.nan)
        node.poison()
        for stream, ready in zip(streams, graphs, strict=True):
            hip.hipGraphLaunch(ready, stream)
        node.wait()
        node.judge(problem, arrays, exact, f"replay {turn}")
        assert node.compute.kernels.launches == before + turn * world
    node.runtime.close()


def missing(world: int) -> None:
    """A chunk whose signal never comes: NaN there, an error that names it, and then it goes on."""
    node = HipNode(world, timeout_s=1.0)
    problem = Problem.chunked("all_gather_matmul", world, 40, 30, 20, "float32")
    schedule = named("gated_1d", world)
    node.right(problem, schedule)
    whole = lower(problem, schedule)
    kept = [step for step in whole.ranks[1].steps if step.id != "sent.1to0"]
    assert len(kept) == len(whole.ranks[1].steps) - 1
    ranks = [whole.ranks[0], whole.ranks[1]._replace(steps=tuple(kept)), *whole.ranks[2:]]
    arrays, exact = node.arrays(problem, 2)
    node.runtime.execute_plan(whole._replace(ranks=tuple(ranks)), arrays)
    with expected(EngineError, r"gemm\[\d+\]\.wait.*data\[1\]\[1\]|Rank 1 should have set"):
        node.runtime.synchronize()
    y = arrays[0]["y0"]
    lost = np.isnan(y).all(axis=1)
    assert 0 < lost.sum() < len(y) and not np.isnan(y[~lost]).any(), lost
    want = exact[0][0].value
    assert np.allclose(y[~lost], want[~lost], rtol=1e-5, atol=1e-4)
    node.runtime.reset()
    node.right(problem, schedule, seed=3)
    node.runtime.close()


def dropped(world: int) -> None:
    """Copies that write nothing are found when the group opens."""
    try:
        HipNode(world)
    except EngineError as error:
        assert "did not arrive" in str(error), error
    else:
        raise AssertionError("a group opened where copies write nothing")


def opened() -> None:
    """Open a node, and print whether its copies overlap with kernels, or why it is refused."""
    try:
        node = HipNode(2)
    except FiccoError as error:
        print(f"refused: {error}")
        return
    problem = Problem.chunked("all_gather_matmul", 2, 40, 30, 20, "float32")
    node.right(problem, named("hetero_fused_1d", 2))
    reason = node.runtime.no_overlap
    print(f"serial: {reason}" if reason else "overlaps")
    node.runtime.close()


def doctor(signals: bool) -> None:
    """What `ficco doctor` says of the double's devices."""
    found = {finding.name: finding for finding in amd_findings()[0]}
    assert found["HIP runtime"].ok and "HIP 7.1, 2 devices" in found["HIP runtime"].found
    assert found["AMD device 1"].ok and "gfx942, 304 compute units" in found["AMD device 1"].found
    assert found["AMD peer access"].ok
    if signals:
        assert (
            found["AMD probe: order"].ok
            and "none before its data" in found["AMD probe: order"].found
        )
        assert found["AMD probe: engines"].ok
    else:
        assert not found["AMD probes"].ok and "did not arrive" in found["AMD probes"].found


SCENARIOS = {
    each.__name__: each
    for each in (operators, late, gated, replayed, missing, dropped, opened, doctor)
}

if __name__ == "__main__":
    words: dict[str, Any] = json.loads(sys.argv[2])
    SCENARIOS[sys.argv[1]](**words)
    print("right")
