"""One rank of regret.py: measure `auto` and the other ways, shape by shape."""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import spread

import ficco
from comparing.by_pytorch import Shared, ways
from comparing.random_shapes import OPERATORS, drawn
from comparing.regrets import judged
from ficco.api import auto, groups
from ficco.engine.group_kernels import OFTEN
from ficco.measure.cases import RecvBuffer
from ficco.measure.clock import Config, beat
from ficco.measure.launching import Rendezvous
from ficco.measure.layout import Layout
from ficco.measure.ranks import WAIT_S, RankLog, grow_windows, leave, open_group
from ficco.measure.rounds import Measuring
from ficco.measure.selector import Choice
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

LONGEST_S = 5.0  # most time of a shape; with less time left, no shape is started


def _choices(layout: Layout) -> dict[str, Choice]:
    """Return the choices of `auto` for a shape, by regime."""
    device = torch.device("cuda", torch.cuda.current_device())
    runtime = groups.gpu_runtime(None, device)
    assert runtime is not None, groups.fallback_reason()
    return {
        regime: auto.choice(layout.problem, runtime, device, regime)
        for regime in ("eager", "captured")
    }


def text_of(schedule: Schedule) -> str:
    """Return a schedule's name in results."""
    words = [schedule.name, f"g{schedule.chunks}"]
    words += ["in_step"] if schedule.pace == "in_step" else []
    return " ".join(words + (["edge"] if schedule.taper == "edge" else []))


def _rivals(
    op: str, choices: dict[str, Choice], count: int, named: list[str]
) -> dict[str, Schedule]:
    """Return the choices of `auto`, the next schedules by prediction, and the named ones."""
    known = [Schedule.named(name) for name in Schedule.names(op) if name in named]
    found = {f"ficco {text_of(schedule)}": schedule for schedule in known}
    for choice in choices.values():
        others = [schedule for schedule, _ in choice.alternatives][:count]
        for schedule in (choice.schedule, *others):
            found[f"ficco {text_of(schedule)}"] = schedule
    return found


def measure(
    layout: Layout, rank: int, rendezvous: Rendezvous, recv: RecvBuffer, shared: Shared,
    settings: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return a shape's result, equal on all ranks. A collective call."""
    run = Measuring(layout, rank, rendezvous, recv)
    call = run.operands.ficco(auto.AUTO)
    tune_s = None
    if settings["tune"]:
        begin = time.perf_counter()
        with ficco.tune():
            run.attempt(partial(call, 0))
        tune_s = max(rendezvous.gather(time.perf_counter() - begin))
    for i in range(2 * OFTEN):  # compile the kernels that calls need
        run.attempt(partial(call, i))
    choices = _choices(layout)
    configs = [Config("auto", call), Config("serial", run.operands.serial)]
    configs += [Config(name, way) for name, way in ways(run.operands, shared).items()]
    configs = [config for config in configs if run.ready(config)]
    if settings["rivals"] or settings["named"]:
        more = max(settings["rivals"] - 1, 0)
        rivals = _rivals(layout.op, choices, more, settings["named"])
        run.ours = [Config(name, run.operands.ficco(each)) for name, each in rivals.items()]
        configs += [config for config in run.ours if run.ready(config)]
    times = run.rounds(run.entries(configs), settings["rounds"], 1)
    for config in configs:
        if config.name == "auto":
            run.check_again(config)
    ms: dict[str, Any] = {regime: {} for regime in REGIMES}
    for (name, regime), found in times.items():
        if (name, regime) not in run.bad:
            ms[regime][name] = spread(found)
    verdicts = {regime: judged(ms[regime], regime) for regime in REGIMES}
    return {
        "case": layout.id, "op": layout.op, "m": layout.m, "n": layout.n, "k": layout.k,
        "auto": {regime: text_of(each.schedule) for regime, each in choices.items()},
        "by": {regime: each.by for regime, each in choices.items()},
        **({} if tune_s is None else {"tune_s": round(tune_s, 3)}),
        "predicted_ms": {regime: each.predicted_ms for regime, each in choices.items()},
        "ms": ms,
        "verdicts": {regime: each for regime, each in verdicts.items() if each},
        "refused": {f"{name}, {regime}": why for (name, regime), why in run.bad.items()},
    }  # fmt: skip


def run(folder: Path) -> int:
    """Measure the shapes of todo.json until the deadline."""
    todo = json.loads((folder / "todo.json").read_text())
    rank, world = open_group(folder)
    rendezvous, rank_log = Rendezvous(folder, rank, world, WAIT_S), RankLog(folder, rank)
    ficco.prepare(machine="cuda", timeout_s=20.0)
    if reason := ficco.fallback_reason():
        raise RuntimeError(f"ficco would run plain torch.distributed: {reason}")
    draw = partial(drawn, world=world, **{name: todo[name] for name in ("count", "seed", "rows")})
    by_op = [draw(op) for op in OPERATORS if op in todo["ops"]]
    layouts = [layout for one_of_each in zip(*by_op, strict=True) for layout in one_of_each]
    grow_windows(layouts, rank)
    shared, recv = Shared(layouts), RecvBuffer()
    for layout in layouts:
        if rendezvous.gather(float(time.time() + LONGEST_S > todo["deadline"]))[0]:
            rank_log("left_out", layout.id)
            continue
        beat()
        rank_log("case", measure(layout, rank, rendezvous, recv, shared, todo))
        gc.collect()
    rank_log("done", True)
    return leave()
