"""A process whose driver is the test double runs all ranks on its GPUs, one scenario a time.

python engine_worker.py SCENARIO WORDS
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import double_control as control
import engine_faults as faults
from engine_node import CUDA, LEAST, Node, captured, expected, named, problems, refused
from numpy_on_stream import NumpyOnStream
from program_entries import compile_for, entries

from ficco.core.errors import EngineError, InputError, ScheduleError
from ficco.engine import peer_signals
from ficco.engine.peer_signals import SignalsRefused
from ficco.lowering import lower
from ficco.lowering.cutting import is_edged
from ficco.operators import oracle, registry
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.program import Wait
from ficco.runtime import engine as engines
from ficco.runtime.node_runtime import NodeRuntime

DTYPES = ("float32", "float16", "bfloat16")

# ---- results


def operators(worlds: list[int], seeds: int, dtypes: list[str], calls: int | None = None) -> None:
    """Every operator in every schedule and dtype, or so many calls of them at random."""
    for world in worlds:
        node = Node(world)
        cases = []
        for seed in range(seeds):
            for dtype in dtypes:
                rng = random.Random(f"{seed} {world} {dtype}")
                for problem in problems(world, dtype, rng):
                    cases += [(problem, name, seed) for name in Schedule.names(problem.op)]
        for problem, name, seed in random.Random(world).sample(cases, calls or len(cases)):
            arrays, exact = node.arrays(problem, seed)
            for axes in ways(problem.op, name, world):
                node.runtime.synchronize()
                node.poison()
                point = named(name, world, **axes)
                try:
                    node.execute(problem, point, arrays)
                except ScheduleError:
                    assert refused(problem, name), f"{name} for {problem}"
                    continue
                node.runtime.synchronize()
                rounded = oracle.roundings(problem, point.sums_travel)
                node.judge(problem, arrays, exact, f"{name} {axes}", rounded)
        node.runtime.close()


def one_queue() -> None:
    """What needs more than one hardware queue is refused where no rank's own plan does, too."""
    node = Node(2)
    output = (Output((40, 40)),)
    problem = Problem(
        "matmul_reduce_scatter", 2, (3, 0), 87, output, "float32", depths=(0, 87)
    )  # the one with rows multiplies nothing
    arrays, _ = node.arrays(problem, 0)
    try:
        node.execute(problem, named("gated_sums_1d", 2), arrays)
    except ScheduleError as error:
        assert "sums='apart'" in str(error), error
    else:
        raise AssertionError("gated_sums_1d was taken where there is one queue")
    node.right(problem, named("gated_1d", 2))
    node.runtime.close()


IN_STEP = ("gated_1d", "gated_sums_1d", "hetero_unfused_1d")  # by `auto`, too


def ways(op: str, name: str, world: int) -> list[dict[str, str]]:
    """Return the routes to try, and the pace where one is kept; stores go to all peers at once."""
    if Schedule.named(name).transport == "sm":
        return [{"route": "all_peers"}]
    found = [{"route": "rotation"}]
    if world > 2:
        found.append({"route": "all_peers"})
        if op in ("all_gather_matmul", "matmul_all_reduce") and name in IN_STEP:
            found.append({"route": "rotation", "pace": "in_step"})
    if is_edged(registry.get(op).flow) and name in ("gated_1d", "hetero_unfused_1d"):
        edge = {"route": "rotation", "order": "by_peer", "taper": "edge"}
        found.append(edge | ({"pace": "in_step"} if registry.get(op).flow.own_columns else {}))
    return found


def disturbed(world: int, calls: int) -> None:
    """Streams that stumble, and copies that come late."""
    for seed in range(2):
        control.jitter(seed, 0.0003)
        control.delay_copies(0.02, every=5 + 6 * seed)
        operators([world], 1, ["float16"], calls)


def again_and_again(world: int, calls: int) -> None:
    """Random calls, back to back on one runtime, always with the same bits."""
    node, rng = Node(world), random.Random(1)
    cases, found = [], {}
    for dtype in DTYPES:
        for problem in problems(world, dtype, rng):
            arrays, exact = node.arrays(problem, 3)
            names = ["serial", "hetero_fused_1d"]
            names += [] if problem.op == "embedding_all_to_all" else ["uniform_fused_2d"]
            names += ["gather_sm"] if problem.op == "all_gather_matmul" else []
            own = registry.get(problem.op).schedules
            names += [name for name in ("push_sm", "whole_sm") if name in own]
            names += ["ring_1d"] if registry.get(problem.op).flow.sums else []
            cases += [(problem, n, arrays, exact) for n in names if not refused(problem, n)]
    for _ in range(calls // 4):
        chosen = rng.sample(range(len(cases)), 4)
        results = []
        for number in chosen:
            problem, name, arrays, exact = cases[number]
            ys = [
                {y: node.empty(r, a) for y, a in mine.items() if y[0] == "y"}
                for r, mine in enumerate(arrays)
            ]
            mine = [old | new for old, new in zip(arrays, ys, strict=True)]
            axes = ways(problem.op, name, world)[-1]
            node.execute(problem, named(name, world, **axes), mine)
            results.append((number, problem, mine, exact))
        node.runtime.synchronize()
        for number, problem, mine, exact in results:
            rounded = oracle.roundings(problem, cases[number][1] == "ring_1d")
            node.judge(problem, mine, exact, roundings=rounded)
            bits = [m[y].tobytes() for m in mine for y in sorted(m) if y[0] == "y"]
            assert found.setdefault(number, bits) == bits, problem
    node.runtime.close()


# ---- graphs


@contextmanager
def forked(node: Node) -> Iterator[list[dict[int, Any]]]:
    """Fork a second branch off each rank's captured stream; give both, and join them."""
    main, other = dict(node.streams), {}
    for rank, stream in main.items():
        node.cuda.use(rank)
        other[rank] = int(node.cuda.stream())
        behind(node, other[rank], stream)
    try:
        yield [main, other]
    finally:
        for rank, stream in main.items():
            node.cuda.use(rank)
            behind(node, stream, other[rank])
        node.streams.update(main)
        node.cuda.use(0)


def behind(node: Node, stream: Any, other: Any) -> None:
    """Let a stream wait for what another one has been given."""
    event = node.cuda.cuEventCreate(2)
    node.cuda.cuEventRecord(event, other)
    node.cuda.cuStreamWaitEvent(stream, event, 0)


def graphs(world: int, replays: int, branches: bool) -> None:
    """Calls in a graph, in one branch or by turns in two, replayed with new inputs."""
    node = Node(world)
    drawn = list(problems(world, "bfloat16", random.Random(9)))
    ring = next(i for i, problem in enumerate(drawn) if problem.op == "matmul_reduce_scatter")
    names = {0: "uniform_fused_1d", 3: "uniform_fused_2d", 5: "hetero_unfused_1d", ring: "ring_1d"}
    cases = [(drawn[i], named(name, world), *node.arrays(drawn[i], 5)) for i, name in names.items()]
    for problem, schedule, arrays, exact in cases:
        node.execute(problem, schedule, arrays)
        node.runtime.synchronize()
        rounded = oracle.roundings(problem, schedule.sums_travel)
        node.judge(problem, arrays, exact, roundings=rounded)
    before = control.count("memcpy")
    for problem, schedule, arrays, _ in cases:
        node.execute(problem, schedule, arrays)
    node.runtime.synchronize()
    copies = control.count("memcpy") - before
    assert copies >= 3 * world * (world - 1)
    with captured(node) as ready, forked(node) as sides:
        for i, (problem, schedule, arrays, _) in enumerate(cases):
            node.streams.update(sides[i % 2 if branches else 0])
            node.execute(problem, schedule, arrays)
    assert None not in ready
    held = node.runtime.window_bytes
    before = control.count("memcpy")
    for replay in range(replays):
        wanted = []
        for problem, _, arrays, _ in cases:
            given = oracle.inputs(problem, 100 + replay)
            node.write(arrays, given)
            wanted.append(oracle.results(problem, given))
        node.poison()
        if replay % 7 == 3:  # eager calls in between
            problem, schedule, arrays, _ = cases[0]
            node.execute(problem, schedule, arrays)
        for _ in range(1 + replay % 2):
            for rank, graph in enumerate(ready):
                node.cuda.cuGraphLaunch(graph, node.streams[rank])
        node.runtime.synchronize()
        for (problem, schedule, arrays, _), exact in zip(cases, wanted, strict=True):
            rounded = oracle.roundings(problem, schedule.sums_travel)
            node.judge(problem, arrays, exact, f"replay {replay}", rounded)
    # Windows grow: the graphs keep theirs, and eager calls have others.
    large = Problem.chunked("all_gather_matmul", world, 900, 5, 200, "float32")
    node.right(large, named("hetero_fused_1d", world))
    assert node.runtime.window_bytes > held + 2 * world * 900 * 200
    for rank, graph in enumerate(ready):
        node.cuda.cuGraphLaunch(graph, node.streams[rank])
    node.right(large, named("shard_p2p", world))
    for (problem, schedule, arrays, _), exact in zip(cases, wanted, strict=True):
        rounded = oracle.roundings(problem, schedule.sums_travel)
        node.judge(problem, arrays, exact, "after growth", rounded)
    # In a capture they do not grow.
    larger = Problem.chunked("all_gather_matmul", world, 1900, 5, 300, "float32")
    arrays, exact = node.arrays(larger, 0)
    with captured(node) as nothing, expected(InputError, "cannot grow while a CUDA graph"):
        node.execute(larger, named("hetero_fused_1d", world), arrays)
    assert None not in nothing
    node.right(larger, named("hetero_fused_1d", world))
    node.runtime.close()
    assert node.runtime.window_bytes == 0


def lost_copies(world: int) -> None:
    """A copy that a driver does not capture makes the call fail; so does one of many."""
    node = Node(world)
    problem = Problem.chunked("all_gather_matmul", world, 40, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    for skip in (0, world):
        arrays, _ = node.arrays(problem, 1)
        for name in ("cuMemcpyAsync", "cuMemcpy2DAsync"):
            control.fail_call(name, 0, skip=skip)
        with captured(node), expected(EngineError, "copies of the .* were submitted"):
            node.execute(problem, schedule, arrays)
        control.reset()
        node.runtime.reset()
        node.right(problem, schedule)
    node.runtime.close()


def words_without_kernel(world: int, refusing: bool) -> None:
    """Where the kernel that stores words cannot be loaded, streams store them, and that is said."""
    problem = Problem.chunked("matmul_all_reduce", world, 12 * world, 24, 16, "float32")
    for _ in range(world if refusing else 0):
        control.fail_call("cuModuleLoadData", 218)
    for _ in range(2):  # what the first one found holds for the process
        node = Node(world)
        control.reset()
        for name in Schedule.names(problem.op):
            node.right(problem, named(name, world))
        assert (control.count("stored") == 0) == refusing, control.count("stored")
        assert control.count("memop"), "what waits"
        node.runtime.close()


def timelines(world: int) -> None:
    """A traced call says what every step took; others take no times."""
    node = Node(world)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    node.right(problem, schedule)
    assert not node.runtime.timeline().spans
    control.delay_copies(0.02)
    node.runtime.traced = True
    node.right(problem, schedule)
    spans = node.runtime.timeline().spans
    assert {span.rank for span in spans} == set(range(world))
    copies = [span for span in spans if span.kind == "copy"]
    assert sum(span.bytes for span in copies) == (world - 1) * problem.m * problem.k * 4
    assert all(span.end_us - span.start_us > 15e3 for span in copies)
    assert min(span.start_us for span in spans) == 0
    node.runtime.close()


def plans(world: int) -> None:
    """Plans made elsewhere run, between calls and after windows have grown and been reset."""
    node = Node(world)
    for rows in (5, 50):
        problem = Problem.chunked("all_gather_matmul", world, rows * world, 5, 9, "float32")
        schedule = named("hetero_unfused_1d", world)
        plan = lower(problem, schedule)
        for turn in range(4):
            arrays, exact = node.arrays(problem, turn)
            node.runtime.execute_plan(plan, arrays)
            node.runtime.synchronize()
            node.judge(problem, arrays, exact, "a plan")
            node.right(problem, schedule)
            if turn == 2:
                node.runtime.reset()
    node.runtime.close()


def no_start(world: int, pattern: str) -> None:
    """What a machine lacks is said at once."""
    with expected(Exception, pattern):
        NodeRuntime(world, CUDA, NumpyOnStream({}), 1.0)


def kernels_that_load(world: int) -> None:
    """A library that loads its kernels late stops no rank.

    Each operation loads its kernel at its first use on a device, later on a higher rank. Loading
    holds a lock of the process, and waits for the stream, as a driver may.
    """
    node, lock, loaded = Node(world, timeout_s=5.0), threading.Lock(), set[tuple[int, str]]()

    def load(name: str) -> None:
        stream = node.compute.stream()
        if (stream, name) in loaded:
            return
        time.sleep(0.1 * ranks[stream])
        with lock:
            loaded.add((stream, name))
            node.cuda.cuStreamSynchronize(stream)

    ranks = {stream: rank for rank, stream in node.streams.items()}
    node.compute.on_call = load
    problem = Problem.chunked("matmul_reduce_scatter", world, 20 * world, 5 * world, 9, "float32")
    for schedule in ("uniform_fused_1d", "shard_p2p"):
        loaded.clear()
        node.right(problem, named(schedule, world))
    assert loaded, "operations"
    node.runtime.close()


# ---- signals


_SOON_S = 0.7  # for signals that do not arrive; those that do take milliseconds


def signals(world: int, kind: str) -> None:
    """The runtime takes this kind of signals, and is right."""
    peer_signals._WITHIN_S = _SOON_S
    node = Node(world)
    assert node.runtime._engine.signals == kind, node.runtime._engine.signals
    node.right(
        Problem.chunked("all_gather_matmul", world, 20, 5, 9, "float32"), named("shard_p2p", world)
    )


def signals_refused(world: int, said: str) -> None:
    """No kind of signals arrives: an error says of each why, and nothing hangs."""
    peer_signals._WITHIN_S = _SOON_S
    with expected(SignalsRefused, "signals do not reach all GPUs", said):
        Node(world)


def signals_unknown(world: int) -> None:
    """FICCO_SIGNALS names nothing."""
    with expected(InputError, "FICCO_SIGNALS='wrote' is no kind of signal", "'write' or 'copy'"):
        Node(world)


def waits_unknown(world: int) -> None:
    """FICCO_WAITS names nothing."""
    with expected(InputError, "FICCO_WAITS='thread' is no way to wait", "'stream' or 'kernel'"):
        Node(world)


def waits_by_kernels(world: int) -> None:
    """FICCO_WAITS names kernels: programs have no other waits."""
    node = Node(world)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    node.right(problem, named("hetero_fused_1d", world))
    for bound in node.runtime._recent[-1].ranks:
        waits = [entry for entry in bound.program.entries if isinstance(entry, Wait)]
        assert waits and {wait.how for wait in waits} == {"kernel"}, waits
    node.runtime.close()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        operators, one_queue, disturbed, again_and_again, graphs, lost_copies, timelines, plans,
        no_start, kernels_that_load, entries,
        words_without_kernel, signals, signals_refused, signals_unknown, waits_unknown,
        waits_by_kernels,
        faults.refusals, faults.stalled, faults.absent,
        faults.absent_from_one_launch,
        faults.absent_while_copies_are_held, faults.ended_while_a_read_stands,
        faults.reset_at_once, faults.never_let_go, faults.watch_refused, faults.compute_fails,
        faults.abandoned, faults.no_group,
    )
}  # fmt: skip

if __name__ == "__main__":
    engines.LEAST = LEAST
    gc.freeze()  # as forking.collect_seldom
    gc.set_threshold(10_000, 20, 20)
    words = json.loads(sys.argv[2])
    if sys.argv[1] != "entries":
        compile_for(words.pop("target", "own"))
    SCENARIOS[sys.argv[1]](**words)
    print("right")
