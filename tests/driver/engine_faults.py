"""Scenarios of engine_worker.py in which something fails: the driver, the library, or a rank."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import double_control as control
import numpy as np
from engine_node import Arrays, Node, captured, expected, named

from ficco.core.errors import EngineError, InputError, ScheduleError, TimeoutExceeded
from ficco.engine import cuda
from ficco.engine.cuda import Device, GpuError, Window
from ficco.engine.gpus import Gpus, PeerMemory
from ficco.engine.peer_windows import PeerWindows
from ficco.engine.window_layout import Layout
from ficco.operators.problem import Problem
from ficco.plan import WindowBytes
from ficco.plan.schedule import Schedule
from ficco.runtime import node_runtime
from ficco.runtime.meeting import ThreadMeeting

CAPTURES = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiateWithFlags")  # ours


class Refusals:
    """One function of the driver after another that fails, in every phase of a runtime's life."""

    def __init__(self, world: int) -> None:
        self.node = Node(world)
        small = Problem.chunked("all_gather_matmul", world, 20, 5, 9, "float32")
        large = Problem.chunked("matmul_reduce_scatter", world, 90, 31, 33, "float32")
        self.schedule = named("hetero_fused_1d", world)
        self.cases = [(problem, *self.node.arrays(problem, 1)) for problem in (small, large)]
        self.seen: dict[str, set[str]] = {}  # functions that failed, by phase
        self.function, self.skip = "", 0

    def attempt(self, phase: str, body: Callable[[], object]) -> bool:
        """Run a body in which the function may fail; return whether it did."""
        control.fail_call(self.function, 999, skip=self.skip)
        try:
            body()
        except (EngineError, GpuError) as error:
            assert self.function in str(error), f"{phase}, {self.function}: {error}"
            self.seen.setdefault(phase, set()).add(self.function)
            return True
        finally:
            control.reset()
        return False

    def renew(self) -> None:
        self.node.runtime = self.node.new_runtime()

    def call(self, case: int, traced: bool = False) -> None:
        """Run a problem to its end; it must be right, or raise."""
        problem, arrays, exact = self.cases[case]
        for mine in arrays:
            mine["y0"][...] = 1
        runtime = self.node.runtime
        runtime.traced = traced
        runtime.execute(problem, self.schedule, arrays)
        runtime.synchronize()
        self.node.judge(problem, arrays, exact, f"{self.function} after {self.skip}")
        if traced:
            assert runtime.timeline().spans

    def capture(self) -> None:
        problem, arrays, _ = self.cases[0]
        with captured(self.node):
            self.node.runtime.execute(problem, self.schedule, arrays)

    def recover(self, case: int) -> None:
        """After a failure outputs are NaN, calls are refused, and a reset makes all good."""
        self.node.wait()
        for rank, mine in enumerate(self.cases[case][1]):
            assert np.isnan(mine["y0"]).all(), f"{self.function} after {self.skip}, rank {rank}"
        with expected(EngineError, "call reset"):
            self.call(case)
        self.reset()
        self.call(case)

    def reset(self) -> None:
        if self.attempt("reset", self.node.runtime.reset):
            self.node.runtime.reset()

    def run(self, function: str, skip: int) -> None:
        self.function, self.skip = function, skip
        old = self.node.runtime
        if self.attempt("made", self.renew):
            self.renew()
        old.close()
        for phase, case in (("first call", 0), ("call", 0), ("growth", 1), ("traced", 0)):
            failed = self.attempt(phase, partial(self.call, case, phase == "traced"))
            if failed and self.node.failure() is not None:
                self.recover(case)
        self.call(0)
        if function not in CAPTURES and self.attempt("captured", self.capture):
            self.node.runtime.reset()
        self.call(0)
        self.reset()
        self.call(0)


def refusals(functions: list[str], world: int) -> None:
    """Every function of the driver fails in turn, wherever it is called."""
    refused = Refusals(world)
    for function in functions:
        for skip in (0, 1, 4):
            refused.run(function, skip)
    refused.function, refused.skip = "cuMemFree", 1
    assert refused.attempt("close", refused.node.runtime.close)
    print(json.dumps({phase: sorted(found) for phase, found in refused.seen.items()}))


def stalled(world: int) -> None:
    """A rank that comes too late: its peers give up, say which signal, and get NaN."""
    node = Node(world, timeout_s=0.4)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    late = world - 1
    for round_ in range(2):
        arrays, _ = node.arrays(problem, 2)
        control.stall_stream(node.streams[late], 1.5)
        begin = time.monotonic()
        node.execute(problem, schedule, arrays)
        assert time.monotonic() - begin < 1, "it waited for the stalled stream"
        if round_ == 0:
            with expected(TimeoutExceeded, r"rank \d, step '[a-z]", rf"signal \w+\[{late}\]"):
                node.runtime.synchronize()
        else:
            while node.failure() is None:
                time.sleep(0.02)
            with expected(EngineError, "an earlier call .* reset.* did not arrive within"):
                node.execute(problem, schedule, arrays)
            node.wait()
        for rank, mine in enumerate(arrays):
            if rank != late:
                assert np.isnan(mine["y0"]).any(), f"rank {rank}"
        node.runtime.reset()
        node.right(problem, schedule)
    node.runtime.close()


def check_contexts_apart(needed: bool, world: int) -> None:
    """Check that contexts were made where they are needed, alone, and one of a device at most."""
    found = control.contexts_apart()
    assert (found > 0) is needed and found <= world, found
    control.reset()


def absent(world: int, cases: list[tuple[str, str]], within_s: float, apart: bool) -> None:
    """A rank that never calls.

    Args:
        world: number of ranks.
        cases: operators and schedules.
        within_s: by when the waits have been let go.
        apart: whether that takes a context of the watch's own.
    """
    node = Node(world, timeout_s=0.6)  # present ranks may be slow where much else runs
    for op, name in cases:
        problem = Problem.chunked(op, world, 20 * world, 5 * world, 9, "float32")
        schedule = named(name, world)
        node.right(problem, schedule)
        arrays, _ = node.arrays(problem, 2)
        bound = node.runtime._recent[-1].ranks
        begin = time.monotonic()
        for rank in range(1, world):
            with node.compute.on(rank, node.streams[rank]):
                bound[rank].run(arrays[rank], 0)
        with expected(TimeoutExceeded, "rank [1-9]", r"Rank 0 should have set it"):
            node.runtime.synchronize()
        took = time.monotonic() - begin
        assert took < within_s, f"{name}: {took} s"
        for rank in range(1, world):
            y = arrays[rank]["y0"]
            lost = np.isnan(y)
            assert lost.any() if op == "all_gather_matmul" else lost.all(), f"{name}, rank {rank}"
        assert (control.contexts_apart() > 0) is apart
        node.runtime.reset()
        node.right(problem, schedule)
        check_contexts_apart(apart, world)
    node.runtime.close()


def absent_while_copies_are_held(world: int, within_s: float, apart: bool) -> None:
    """A rank that never calls, while nothing can be read before all waits have been let go.

    Args:
        world: number of ranks.
        within_s: by when that has happened.
        apart: whether that takes a context of the watch's own.
    """
    node = Node(world, timeout_s=0.3)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5 * world, 9, "float32")
    schedule = named("gated_1d", world)
    node.right(problem, schedule)
    arrays, _ = node.arrays(problem, 2)
    bound = node.runtime._recent[-1].ranks
    waiting = set(range(1, world))
    callbacks = []

    def went_on(rank: int) -> None:
        waiting.discard(rank)
        if not waiting:
            control.hold_copies(False)

    begin = time.monotonic()
    for rank in range(1, world):
        with node.compute.on(rank, node.streams[rank]):
            bound[rank].run(arrays[rank], 0)
        callbacks.append(
            node.cuda.host_function(node.streams[rank], lambda _, rank=rank: went_on(rank))
        )
    control.hold_copies(True)
    with expected(
        TimeoutExceeded, r"rank [1-9], step '[a-z].*: a signal did not arrive within 0\.",
        "The signal is not known, because the memory of its GPU could not be read. timeout_s is",
    ):  # fmt: skip
        node.runtime.synchronize()
    took = time.monotonic() - begin
    assert 2 < took < within_s, f"{took} s"
    assert not waiting
    for rank in range(1, world):
        assert np.isnan(arrays[rank]["y0"]).any(), f"rank {rank}"
    node.runtime.reset()
    node.right(problem, schedule)
    check_contexts_apart(apart, world)
    node.runtime.close()


def ended_while_a_read_stands(world: int) -> None:
    """The process ends though nothing is read any more, and nobody closes the runtime."""
    node = Node(world, timeout_s=0.3)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    node.right(problem, named("shard_p2p", world))
    arrays, _ = node.arrays(problem, 2)
    bound = node.runtime._recent[-1].ranks
    with node.compute.on(1, node.streams[1]):
        bound[1].run(arrays[1], 0)
    control.hold_copies(True)
    node.wait()
    assert np.isnan(arrays[1]["y0"]).any()


def reset_at_once(world: int, rounds: int) -> None:
    """Windows that a reset frees while the watch lets their calls go are not written any more."""
    node, done = Node(world, timeout_s=5.0), list[str]()
    forget, close = Device.forget, PeerWindows.close

    def noted_forget(device: Device, window: Window) -> None:
        forget(device, window)
        done.append("forgotten")

    def noted_close(windows: PeerWindows) -> None:
        close(windows)
        done.append("freed")

    Device.forget, PeerWindows.close = noted_forget, noted_close  # type: ignore[method-assign]
    problem = Problem.chunked("matmul_reduce_scatter", world, 20 * world, 5 * world, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    for round_ in range(rounds):
        control.jitter(round_, 0.0)
        node.runtime.timeout_s = 5.0  # a call that is right may take its time on a busy machine
        node.right(problem, schedule)
        arrays, _ = node.arrays(problem, 2)
        bound = node.runtime._recent[-1].ranks
        node.runtime.timeout_s = 0.05
        control.jitter(round_, 0.001)
        for rank in range(1, world):
            with node.compute.on(rank, node.streams[rank]):
                bound[rank].run(arrays[rank], 0)
        while node.failure() is None:
            time.sleep(1e-3)
        done.clear()
        node.runtime.reset()
        assert done == ["forgotten"] * world + ["freed"], done
    done.clear()
    node.runtime.close()
    assert done == ["forgotten"] * world + ["freed"], done
    Device.forget, PeerWindows.close = forget, close  # type: ignore[method-assign]


def no_group(world: int) -> None:
    """Memory for windows is freed if the group cannot be joined, and after the devices' end."""
    sizes, freed, free = WindowBytes(1 << 16), list[int](), PeerMemory.free

    def noted_free(memory: PeerMemory) -> None:
        freed.append(memory.addresses[0])
        free(memory)

    def refused(*words: object) -> None:
        raise EngineError("no group")

    PeerMemory.free = noted_free  # type: ignore[method-assign]
    group, ThreadMeeting.group = ThreadMeeting.group, refused  # type: ignore[assignment]
    with expected(EngineError, "no group"):
        Node(world)
    assert len(freed) == len(set(freed)) == world, freed
    PeerMemory.free, ThreadMeeting.group = free, group  # type: ignore[method-assign]
    gpus = Gpus(cuda, range(world))
    memory = gpus.allocate(Layout(sizes).size)
    gpus.close()
    gpus.free(memory)
    assert not any(each._parts for each in memory)


def absent_from_one_launch(world: int) -> None:
    """A rank that never calls, while its peers' kernels wait for it and tell by themselves.

    The kernels have the timeout that was set last.
    """
    node = Node(world)
    for op, name in (
        ("matmul_all_reduce", "one_shot_sm"), ("matmul_all_reduce", "two_shot_sm"),
        ("matmul_all_reduce", "one_shot_pull"), ("matmul_all_reduce", "two_shot_pull"),
        ("all_gather_matmul", "gather_sm"), ("matmul_all_to_all", "push_sm"),
        ("matmul_all_reduce", "push_sm"), ("matmul_all_to_all", "whole_sm"),
        ("all_gather_matmul", "whole_sm"),
    ):  # fmt: skip
        problem = Problem.chunked(op, world, 5, 64, 9, "float32")
        schedule = named(name, world, route="all_peers")
        for timeout_s in (20.0, 0.3):
            node.runtime.timeout_s = timeout_s
            node.right(problem, schedule)
        arrays, _ = node.arrays(problem, 2)
        bound = node.runtime._recent[-1].ranks
        begin = time.monotonic()
        for rank in range(1, world):
            with node.compute.on(rank, node.streams[rank]):
                bound[rank].run(arrays[rank], 0)
        for rank in range(1, world):
            node.cuda.use(rank)
            node.cuda.cuStreamSynchronize(node.streams[rank])
        with expected(EngineError, r"an earlier call .* failed", r"signal entered\[0\]@[1-9]"):
            node.execute(problem, schedule, arrays)
        with expected(TimeoutExceeded, r"step 'wait\.|step '", r"signal entered\[0\]@[1-9]"):
            node.runtime.synchronize()
        assert time.monotonic() - begin < 6
        for rank in range(1, world):
            assert np.isnan(arrays[rank]["y0"]).all(), f"rank {rank}"
        node.runtime.reset()
        node.right(problem, schedule)
        check_contexts_apart(control.contexts_apart() > 0, world)
    node.runtime.close()


def never_let_go(world: int) -> None:
    """All streams wait behind one that does, and the watch gets no context of its own for long."""
    node = Node(world, timeout_s=0.3)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    arrays, _ = node.arrays(problem, 2)
    bound = node.runtime._recent[-1].ranks
    for _ in range(99):
        control.fail_call("cuCtxCreate", 2)
    with node.compute.on(1, node.streams[1]):
        bound[1].run(arrays[1], 0)
    node_runtime._IDLE_WITHIN_S = 4.0
    begin = time.monotonic()
    with expected(EngineError, r"ranks \[1\] still work 4 s after the failure"):
        node.runtime.synchronize()
    assert time.monotonic() - begin < 15
    assert control.contexts_apart() == 0
    control.reset()  # there is memory again
    node.wait()
    assert np.isnan(arrays[1]["y0"]).any()
    node.runtime.reset()
    node.right(problem, schedule)
    check_contexts_apart(True, world)
    node.runtime.close()


def watch_refused(functions: list[str], world: int) -> None:
    """The driver once refuses what the watch does about a rank that never calls: it tries again."""
    for function in functions:
        node = Node(world, timeout_s=0.2)
        problem = Problem.chunked("all_gather_matmul", world, 40, 5, 9, "float32")
        node.right(problem, named("shard_p2p", world))
        arrays, _ = node.arrays(problem, 2)
        bound = node.runtime._recent[-1].ranks
        with node.compute.on(1, node.streams[1]):
            bound[1].run(arrays[1], 0)
        control.fail_call(function, 999)
        begin = time.monotonic()
        with expected(EngineError):
            node.runtime.synchronize()
        with expected(EngineError, "call reset"):
            node.execute(problem, named("shard_p2p", world), arrays)
        node.runtime.reset()
        assert time.monotonic() - begin < 6
        control.reset()
        node.right(problem, named("shard_p2p", world))
        node.runtime.close()


def fail_in(node: Node, problem: Problem, schedule: Schedule, arrays: Arrays, at: int) -> None:
    """Make a call in which the library's call number `at`, of all ranks, fails."""
    seen: list[str] = []

    def refuse(name: str) -> None:
        seen.append(name)
        if len(seen) == at:
            raise MemoryError("none left")

    node.compute.on_call = refuse
    with expected(EngineError, r"rank \d failed: MemoryError\('none left'\); call reset"):
        node.execute(problem, schedule, arrays)
    node.compute.on_call = lambda name: None
    with expected(EngineError):
        node.runtime.synchronize()


def abandoned(world: int) -> None:
    """Once a call that was given up in its middle has ended, the watch lets nothing go any more."""
    node = Node(world, timeout_s=2)
    problem = Problem.chunked("all_gather_matmul", world, 60, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    arrays, _ = node.arrays(problem, 2)
    fail_in(node, problem, schedule, arrays, 2)
    time.sleep(0.2)  # the watch may yet be letting go
    windows = node.runtime._places[-1].windows
    data = [base + Layout(windows.sizes).data for base in windows.bases]
    for each in data:
        ctypes.memset(each, 7, 64)
    time.sleep(0.2)
    for rank, each in enumerate(data):
        assert ctypes.string_at(each, 64) == bytes([7]) * 64, f"rank {rank}'s window is written to"
    node.runtime.reset()
    node.right(problem, schedule)
    node.runtime.close()


def compute_fails(world: int) -> None:
    """An error of the library on one rank: outputs are NaN, and all goes on after a reset."""
    node = Node(world, timeout_s=10)
    problem = Problem.chunked("matmul_reduce_scatter", world, 40, 5, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    node.right(problem, schedule)
    arrays, exact = node.arrays(problem, 2)
    fail_in(node, problem, schedule, arrays, 4)
    for mine in arrays:
        assert np.isnan(mine["y0"]).all()
    node.runtime.reset()
    node.execute(problem, schedule, arrays)
    node.runtime.synchronize()
    node.judge(problem, arrays, exact)
    with expected(ScheduleError, "transport='dma'"):
        node.execute(problem, replace(schedule, transport="collective"), arrays)
    with expected(InputError, "ranks"):
        other = Problem.chunked("matmul_reduce_scatter", world - 1, 40, 5, 9, "float32")
        node.execute(other, schedule, arrays)
    node.runtime.close()
    with expected(EngineError, "closed"):
        node.execute(problem, schedule, arrays)
