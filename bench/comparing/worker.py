"""One rank of compare.py: open the group, measure case by case, write the results."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import torch

from comparing import zero_cta
from comparing.cases import BY_COPY_ENGINES, Case, read
from comparing.measuring import Settings, measure
from ficco.measure.cases import RecvBuffer
from ficco.measure.clock import beat
from ficco.measure.launching import Rendezvous
from ficco.measure.ranks import WAIT_S, RankLog, grow_windows, leave, open_group

FIRST_GUESS_S = 20.0  # assumed time of a case before the first is measured


def chosen(folder: Path, world: int) -> list[Case]:
    """Return the cases that this process runs."""
    wanted = set(json.loads((folder / "todo.json").read_text())["cases"])
    return [case for case in read(world) if case.id in wanted]


def run(folder: Path) -> int:
    """Measure the cases of todo.json until the deadline."""
    import ficco

    todo = json.loads((folder / "todo.json").read_text())
    settings = Settings(**{**todo["settings"], "grains": tuple(todo["settings"]["grains"])})
    rank, world = open_group(folder)
    rendezvous, rank_log = Rendezvous(folder, rank, world, WAIT_S), RankLog(folder, rank)
    beat()
    ficco.prepare(machine="cuda", timeout_s=20.0)
    reason = ficco.fallback_reason()
    rank_log("group", {"nccl": list(torch.cuda.nccl.version()), "ficco_fallback": reason})
    if reason:
        raise RuntimeError(f"ficco would run plain torch.distributed: {reason}")
    cases, recv = chosen(folder, world), RecvBuffer()
    fit = [case for case in cases if not case.unfit]
    grow_windows(fit, rank)
    lasted: list[float] = []
    for case in fit:
        expected = max(lasted[-3:], default=FIRST_GUESS_S)
        if rendezvous.gather(float(time.time() + expected > todo["deadline"]))[0]:
            rank_log("left_out", case.id)
            continue
        begin = time.time()
        rank_log("begin", case.id)
        found = measure(case, rank, rendezvous, settings, recv)
        lasted.append(time.time() - begin)
        rank_log("case", {**found, "lasted_s": round(lasted[-1], 1)})
        gc.collect()
        torch.cuda.empty_cache()
    rank_log("done", True)
    return leave()


def run_zero_cta(folder: Path) -> int:
    """Measure serial with NCCL's zero-CTA policy."""
    todo = json.loads((folder / "todo.json").read_text())
    rank_log = RankLog(folder, int(os.environ["RANK"]))
    try:
        rank, world = open_group(folder, zero_cta.options())
        zero_cta.prepare()
    except Exception as error:
        rank_log("zero_cta_missing", f"{type(error).__name__}: {error}"[:1000])
        return 1
    rendezvous = Rendezvous(folder, rank, world, WAIT_S)
    for case in chosen(folder, world):
        if case.unfit or case.op not in BY_COPY_ENGINES:
            continue
        if rendezvous.gather(float(time.time() + 5 > todo["deadline"]))[0]:
            rank_log("zero_cta_left_out", case.id)
            continue
        rank_log("begin", case.id)
        rank_log("zero_cta_case", zero_cta.measure(case, rank, rendezvous))
        gc.collect()
    rank_log("done", True)
    return leave()
