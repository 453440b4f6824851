"""A rank that makes checks of tests/gpu on the test double of the driver.

python gpu_checks_on_double.py KIND STORE RANK WORLD CHECKS

KIND is "double": tensors pass for those of a GPU (torch_on_double.py). CHECKS is JSON: pairs of a
scenario's name and its words. Products of few rows are smaller than on GPUs, as NumPy makes them.
With KIND "table" and nothing else, nothing runs: the table of checks is held against the parameters
of scenarios, and their calls are planned.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import double_control as control
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

sys.argv[1] = "cpu"  # where gradient_worker draws
import serve  # noqa: E402 (of a PyTorch that is as it is)
from beside import turns  # noqa: E402
from checks import CHECKS, MOST  # noqa: E402
from few_rows import SIZES, few_row_cases  # noqa: E402
from fuzzed import cases, filling_cases, shared_cases, split_tiles  # noqa: E402
from rank import CUDA, problems, refused  # noqa: E402
from scenarios import ways  # noqa: E402

from ficco.core.dtypes import DTYPES  # noqa: E402
from ficco.core.errors import ScheduleError  # noqa: E402
from ficco.lowering import lower_rank  # noqa: E402
from ficco.lowering.lowered import Lowered  # noqa: E402
from ficco.operators import OPERATORS  # noqa: E402
from ficco.operators.problem import Problem  # noqa: E402
from ficco.plan.schedule import Schedule  # noqa: E402
from ficco.program.passes.served import check_served  # noqa: E402

_CYCLES_PER_S = 1e9


def pass_for_a_gpu(rank: int, world: int, folder: Path) -> None:
    """Let this process's PyTorch have what scenarios take of a GPU: streams, graphs, delays."""
    import command_on_double

    here = command_on_double.be_rank(rank, world, folder)

    class Graph:
        def replay(self) -> None:
            here.replay(self.made)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        before = here.stream
        here.stream = here.compute._thread.stream = stream.cuda_stream
        here.compute.streams[rank] = here.stream
        try:
            yield
        finally:
            here.synchronize()
            here.stream = here.compute._thread.stream = here.compute.streams[rank] = before

    def graph(made: Any, stream: Any = None, **_: Any) -> Any:
        @contextmanager
        def capturing() -> Iterator[None]:
            with on(stream or SimpleNamespace(cuda_stream=int(here.cuda.stream()))):
                here.cuda.capture(here.stream, mode=2)
                try:
                    yield
                finally:
                    captured = here.cuda.cuStreamEndCapture(here.stream)
                made.made = here.cuda.cuGraphInstantiate(captured, 0)

        return capturing()

    gpus, tensors = torch.cuda, torch.Tensor
    given: dict[str, Any] = {
        "CUDAGraph": Graph, "graph": graph, "stream": on,
        "Stream": lambda: SimpleNamespace(cuda_stream=int(here.cuda.stream())),
        "_sleep": lambda cycles: control.stall_stream(here.stream, cycles / _CYCLES_PER_S),
        "empty_cache": lambda: None, "graph_pool_handle": lambda: None,
    }  # fmt: skip
    for name, value in given.items():
        setattr(gpus, name, value)
    gpus.current_stream = lambda device=None: SimpleNamespace(  # type: ignore[assignment, return-value]
        cuda_stream=here.stream, synchronize=here.synchronize
    )
    place = torch.device("cuda", rank)

    def to_host(self: Any) -> Any:
        found = self.clone()
        found.on_host = True
        return found

    anything: Any = tensors
    anything.cuda, anything.cpu = lambda self: self, to_host
    anything.is_cuda = property(lambda self: not hasattr(self, "on_host"))
    anything.device = property(lambda self: place if self.is_cuda else torch.device("cpu"))


def hold_the_table() -> None:
    """Bind every check's words to its scenario, and plan what the scenarios call."""
    for check in CHECKS:
        run = serve.SCENARIOS[check.scenario]
        words = dict(check.words)
        if check.repeats:
            assert check.repeats in words, check.id
        if getattr(run, "func", None) is serve._on_runtime:
            words.pop("timeout_s", None)
            inspect.signature(run.args[0]).bind("me", **words)  # type: ignore[attr-defined]
        elif getattr(run, "func", None) is serve._overlap:
            assert not words, check.id
        else:
            inspect.signature(run).bind(0, 1, **words)
    planned = 0
    for world in (2, MOST):
        own = [*shared_cases(world), *filling_cases(world), *few_row_cases(world)]
        for problem, schedule in [*turns(world), *own]:
            lower_rank(problem, schedule.resolve(world, CUDA), 0)
            planned += 1
        for problem, schedule in shared_cases(world):
            for rank in range(world):
                split = split_tiles(problem, schedule, rank, processors=132)
                some = any(shared for _, shared in split)
                assert some or schedule.name != "gated_1d", f"{problem}: no tile is split"
        given = [p for dtype in DTYPES for p in problems(world, dtype, random.Random(0))]
        assert {problem.op for problem in given} == set(OPERATORS)
        for problem in [*given, *cases(world)]:
            planned += plan_all(problem)
    print(f"{len(CHECKS)} checks, {planned} calls planned")


def plan_all(problem: Problem) -> int:
    """Plan a problem by every schedule; return by how many ways."""
    count = 0
    for name in Schedule.names(problem.op):
        schedule = Schedule.named(name)
        for way in ways(problem, name, schedule) if name != "serial" else []:
            point = Schedule.from_json({**schedule.to_json(), **way})
            try:
                point = point.resolve(problem.world, CUDA)
                check_served(Lowered(problem, point), "cuda")
            except ScheduleError:
                assert refused(problem, name), f"{name} for {problem}"
                continue
            count += 1
    assert count, problem
    return count


def main(store: str, rank: int, world: int, checks: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    SIZES[:] = [(m, n // 8, k // 4) for m, n, k in SIZES]
    pass_for_a_gpu(rank, world, Path(store).parent)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    for scenario, words in checks:
        assert serve.check_one(scenario, rank, world, words), f"{scenario} {words}"
        assert world == 1 or control.count("memcpy"), "no GPU was used"
        print(scenario, words, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__" and len(sys.argv) == 2:
    hold_the_table()
elif __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
    print("right")
