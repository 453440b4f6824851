"""One rank of compare.py: opens the group, measures case after case, writes what it found."""

from __future__ import annotations

import gc
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comparing import zero_cta
from comparing.cases import BY_COPY_ENGINES, DTYPE, EXCHANGES, Case, read
from comparing.launch import Meeting
from comparing.measuring import Settings, measure
from comparing.operands import Landing, Operands
from comparing.timing import beat

WAIT_S = 60.0  # of ranks for one another
FIRST_GUESS_S = 20.0  # how long a case lasts, before one has been measured


def open_group(folder: Path, options: Any = None) -> tuple[int, int]:
    """Join the NCCL group of all ranks on a stream that is not the default one."""
    beat()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=timedelta(seconds=WAIT_S), device_id=device, pg_options=options,
    )  # fmt: skip
    torch.cuda.set_stream(torch.cuda.Stream())
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    return rank, world


class Said:
    """What rank 0 writes for the process that started it: one JSON value a line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._writes = folder / "said.jsonl", rank == 0

    def __call__(self, kind: str, value: Any) -> None:
        """Write one line."""
        if self._writes:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")


def chosen(folder: Path, world: int) -> list[Case]:
    """Return the cases that this process is to run."""
    wanted = set(json.loads((folder / "todo.json").read_text())["cases"])
    return [case for case in read(world) if case.id in wanted]


def run(folder: Path) -> int:
    """Measure the cases of todo.json until the deadline."""
    import ficco

    todo = json.loads((folder / "todo.json").read_text())
    settings = Settings(**{**todo["settings"], "grains": tuple(todo["settings"]["grains"])})
    rank, world = open_group(folder)
    meeting, said = Meeting(folder, rank, world, WAIT_S), Said(folder, rank)
    beat()
    ficco.prepare(machine="cuda", timeout_s=20.0)
    reason = ficco.fallback_reason()
    said("group", {"nccl": list(torch.cuda.nccl.version()), "ficco_fallback": reason})
    if reason:
        raise RuntimeError(f"ficco would run plain torch.distributed: {reason}")
    cases, landing = chosen(folder, world), Landing()
    fit = [case for case in cases if not case.unfit]
    _largest_window_first(fit, rank)
    lasted: list[float] = []
    for case in fit:
        expected = max(lasted[-3:], default=FIRST_GUESS_S)
        if meeting.gather(float(time.time() + expected > todo["deadline"]))[0]:
            said("left_out", case.id)
            continue
        begin = time.time()
        said("begin", case.id)
        found = measure(case, rank, meeting, settings, landing)
        lasted.append(time.time() - begin)
        said("case", {**found, "lasted_s": round(lasted[-1], 1)})
        gc.collect()
        torch.cuda.empty_cache()
    said("done", True)
    return _leave()


def _largest_window_first(cases: list[Case], rank: int) -> None:
    """Run the case that needs the largest window, so that no graph keeps a smaller one alive."""
    from ficco.lowering import lower_rank
    from ficco.machine import Machine
    from ficco.plan import window_places
    from ficco.problem import Problem
    from ficco.schedule import Schedule

    world = int(os.environ["WORLD_SIZE"])
    schedule = Schedule.named("shard_p2p").resolve(world, Machine.named("cuda"))
    needs = {}
    for case in cases:
        m = case.m * case.world if case.op in EXCHANGES else case.m
        problem = Problem.chunked(case.op, case.world, m, case.n, case.k, DTYPE)
        needs[case] = window_places(lower_rank(problem, schedule, rank).buffers)[1]
    if needs:
        beat()
        largest = max(needs, key=lambda case: needs[case])
        Operands(largest, rank).ficco(schedule)(0)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


def run_zero_cta(folder: Path) -> int:
    """Measure serial with NCCL's zero-CTA policy."""
    todo = json.loads((folder / "todo.json").read_text())
    said = Said(folder, int(os.environ["RANK"]))
    try:
        rank, world = open_group(folder, zero_cta.options())
        zero_cta.prepare()
    except Exception as error:
        said("zero_cta_missing", f"{type(error).__name__}: {error}"[:1000])
        return 1
    meeting = Meeting(folder, rank, world, WAIT_S)
    for case in chosen(folder, world):
        if case.unfit or case.op not in BY_COPY_ENGINES:
            continue
        if meeting.gather(float(time.time() + 5 > todo["deadline"]))[0]:
            said("zero_cta_left_out", case.id)
            continue
        said("begin", case.id)
        said("zero_cta_case", zero_cta.measure(case, rank, meeting))
        gc.collect()
    said("done", True)
    return _leave()


def _leave() -> int:
    """End at once: nothing is left to do, and taking groups down can hang."""
    beat()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)
