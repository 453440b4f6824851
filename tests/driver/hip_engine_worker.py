"""A process that has the double of AMD's library runs all ranks on its devices.

python hip_engine_worker.py SCENARIO WORDS
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import double_control as control
from engine_node import named, problems, refused
from hip_node import HipNode

from ficco import oracle
from ficco.cli.amd_findings import amd_findings
from ficco.errors import EngineError, FiccoError, ScheduleError
from ficco.problem import Problem
from ficco.schedule import Schedule

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
                    assert schedule.compute != "gated" or problem.flow.gathers
                    rounded = oracle.roundings(problem, schedule.sums_travel)
                    node.judge(problem, arrays, exact, name, rounded)
        wanted = {"hetero_fused_1d", "ring_1d", "shard_p2p", "gated_1d"}
        assert world == 1 or wanted <= served, served
        assert world == 1 or node.compute.kernels.launches, "no gated product ran"
        node.runtime.close()


def late(world: int) -> None:
    """A rank that stops: peers are released with NaN, and the error names the signal."""
    node = HipNode(world, timeout_s=0.5)
    problem = Problem.chunked("all_gather_matmul", world, 40, 30, 20, "float32")
    node.right(problem, named("hetero_fused_1d", world))
    arrays, _ = node.arrays(problem, 2)
    control.stall_stream(node.streams[world - 1], 4.0)
    begun = time.monotonic()
    node.execute(problem, named("hetero_fused_1d", world), arrays)
    try:
        node.runtime.synchronize()
    except EngineError as error:
        text = str(error)
        assert f"Rank {world - 1} should have raised it" in text and "0.5 s" in text, text
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begun < 8
    node.runtime.reset()
    node.right(problem, named("hetero_fused_1d", world), seed=3)
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
    assert found["HIP runtime"].ok and "HIP 7.1, 3 devices" in found["HIP runtime"].found
    assert found["AMD device 2"].ok and "gfx942, 304 compute units" in found["AMD device 2"].found
    assert found["AMD peer access"].ok
    if signals:
        assert (
            found["AMD probe: order"].ok
            and "none before its data" in found["AMD probe: order"].found
        )
        assert found["AMD probe: engines"].ok
    else:
        assert not found["AMD probes"].ok and "did not arrive" in found["AMD probes"].found


SCENARIOS = {each.__name__: each for each in (operators, late, dropped, opened, doctor)}

if __name__ == "__main__":
    words: dict[str, Any] = json.loads(sys.argv[2])
    SCENARIOS[sys.argv[1]](**words)
    print("right")
