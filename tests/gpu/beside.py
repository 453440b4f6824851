"""Calls beside other kernels: NCCL's, a second group's, and such as hold multiprocessors."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from rank import CUDA, Rank

from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.process_gpu import GpuProcessRuntime

# Every block takes a multiprocessor whole, by its shared memory, until it is let go.
HOLD = r"""
extern "C" __global__ void hold(unsigned* begun, volatile unsigned* go, unsigned long long ns) {
    unsigned long long began, now;
    atomicAdd(begun, 1);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*go && now - began < ns);
}
"""
STORING = 32  # programs of a gather that store at peers, at most


def crowding(world: int) -> list[tuple[Problem, Schedule]]:
    """Return calls of few rows whose launches have more programs than may find room."""

    def reduced(m: int) -> Problem:
        return Problem.chunked("matmul_all_reduce", world, m, 8192, 512 * world, "bfloat16")

    gather = Problem.chunked("all_gather_matmul", world, 64, 8192 * world, 2048, "bfloat16")
    one, two = Schedule.named("one_shot_sm"), Schedule.named("two_shot_sm")
    many = replace(Schedule.named("gather_sm"), grain=2 * STORING)  # slices for every one of them
    return [(reduced(1), one), (reduced(64), two), (reduced(200), two), (gather, many)]


def crowded(me: Rank) -> None:
    """Launches that begin where there is little room end, for ranks may wait for each other there.

    As NCCL's kernels do: those that came first here wait for those that at a peer wait for this
    call, and go from their multiprocessors when it has ended.
    """
    import cupy

    hold = cupy.RawKernel(HOLD, "hold")
    device = torch.cuda.get_device_properties("cuda")
    processors, held_bytes = device.multi_processor_count, device.shared_memory_per_block_optin
    hold.max_dynamic_shared_size_bytes = held_bytes
    others, copies = torch.cuda.Stream(), torch.cuda.Stream()
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    for problem, point in crowding(me.world):
        arrays, exact = me.arrays(problem, 3)
        name = point.name
        me.judge(problem, me.execute(problem, point, arrays), exact, f"{name} at first")
        lone = problem.op == "matmul_all_reduce" and problem.m <= 64  # no library's GEMM is needed
        for free in (STORING, 1) if lone else (STORING,):
            words, seen = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros_like(one)
            seen = seen.pin_memory()
            me.meet()
            with cupy.cuda.ExternalStream(others.cuda_stream):
                begun, go = words.data_ptr(), words.data_ptr() + 4
                arguments = (cupy.uint64(begun), cupy.uint64(go), cupy.uint64(60 * 10**9))
                hold((processors - free,), (1,), arguments, shared_mem=held_bytes)
            begin = time.monotonic()
            while seen.item() < processors - free:
                assert time.monotonic() - begin < 20, "the multiprocessors cannot be held"
                with torch.cuda.stream(copies):
                    seen.copy_(words[:1], non_blocking=True)
                copies.synchronize()
            begin = time.monotonic()
            ys = me.execute(problem, point, arrays)
            torch.cuda.current_stream().synchronize()
            took = time.monotonic() - begin
            held = not others.query()
            with torch.cuda.stream(copies):
                words[1:].copy_(one, non_blocking=True)
            me.judge(problem, ys, exact, f"{name} on {free} multiprocessors")
            assert held, f"{name}: the multiprocessors were let go in {took:.1f} s"
            if me.rank == 0:
                print(f"{name} {problem.m} rows, {free} multiprocessors: {took:.2f} s", flush=True)
    print("right")


def aside(me: Rank) -> None:
    """Windows that are opened on a stream while another, the default one, is busy, stay as made."""
    for problem, point in crowding(me.world)[::3]:  # mailboxes, and windows
        arrays, exact = me.arrays(problem, 5)
        me.meet()
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        with torch.cuda.stream(torch.cuda.Stream()):
            ys = me.execute(problem, point, arrays)
            torch.cuda.current_stream().synchronize()
        me.judge(problem, ys, exact, point.name)
    print("right")


def turns(world: int) -> list[tuple[Problem, Schedule]]:
    """Return calls that wait on multiprocessors, or hold them; the first is a gather."""
    dtype = "bfloat16"
    gather = Problem.chunked("all_gather_matmul", world, 4096, 2048 * world, 2048, dtype)
    reduce = Problem.chunked("matmul_all_reduce", world, 16, 4096, 1024 * world, dtype)
    scatter = Problem.chunked(
        "matmul_reduce_scatter", world, 1024 * world, 2048, 512 * world, dtype
    )
    few = Problem.chunked("all_gather_matmul", world, 64, 512 * world, 4096, dtype)  # in parts
    named = [(gather, "gated_1d"), (reduce, "one_shot_sm"), (reduce, "two_shot_sm"),
             (few, "gather_sm"), (scatter, "gated_sums_1d")]  # fmt: skip
    return [*[(problem, Schedule.named(name)) for problem, name in named], *crowding(world)]


def opposite(me: Rank, rounds: int) -> None:
    """Other kernels in the opposite order on another stream: NCCL's, and a second group's."""
    cases = turns(me.world)
    gather = cases[0][0]
    other = GpuProcessRuntime(dist.new_group(list(range(me.world))), CUDA, 30.0)
    found = [(p, point, *me.arrays(p, 7)) for p, point in cases]
    for problem, point, arrays, exact in found:
        me.judge(problem, me.execute(problem, point, arrays), exact, point.name)
    stream, numbers = torch.cuda.Stream(), torch.ones(1 << 22, device="cuda")
    gated = found[0]
    ys = me.outputs(gather)
    resolved = gated[1].resolve(me.world, CUDA)
    other.execute(gather, resolved, {**gated[2], **ys})
    me.meet()
    for turn in range(rounds):
        problem, point, arrays, exact = found[turn % len(found)]

        def library() -> None:
            with torch.cuda.stream(stream):
                dist.all_reduce(numbers.fill_(1.0))

        def second() -> None:
            with torch.cuda.stream(stream):
                other.execute(gather, resolved, {**gated[2], **ys})

        alone = point.transport == "sm" or point.sums == "within"
        beside = library if alone or turn % 3 else second
        # Several calls, of which the next may have begun while peers wait for the library's kernel.
        often = 3 if alone else 1
        calls = [lambda: me.execute(problem, point, arrays)] * often + [beside]  # noqa: B023
        results = [call() for call in (calls if me.rank % 2 else calls[::-1])]
        torch.cuda.synchronize()
        mine = next(result for result in results if result is not None)
        if turn < 2 * len(found):
            me.judge(problem, mine, exact, f"{point.name} in turn {turn}")
    me.judge(gather, ys, gated[3], "the other group")
    assert float(numbers[0]) == me.world
    other.close()
    print("right")
