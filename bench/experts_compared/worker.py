"""One rank of moe.py: open the group, measure point by point, report to the launcher."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from experts_compared import points
from experts_compared.by_symmetric import nvshmem
from experts_compared.layer import Layer, Weights
from experts_compared.measuring import Asked, measure
from ficco.measure.clock import beat
from ficco.measure.launching import Rendezvous
from ficco.measure.ranks import RankLog, leave, open_group

__all__ = ["run"]

FIRST_GUESS_S = 8.0  # assumed time of a point before the first one is measured
TIMEOUT_S = 20.0  # of ficco's waits
WAIT_S = 40.0  # longest wait of ranks for one another


def run(folder: Path) -> int:
    """Measure the points of todo.json until the deadline."""
    todo = json.loads((folder / "todo.json").read_text())
    rank, world, sharing = _opened(folder, todo["check"])
    rendezvous, rank_log = Rendezvous(folder, rank, world, WAIT_S), RankLog(folder, rank)
    device = "cpu" if todo["check"] else f"cuda:{torch.cuda.current_device()}"
    rank_log("group", _about(device, sharing))
    weights: Weights | None = None
    lasted: list[float] = []
    for point in chosen(todo):
        guess = max(lasted[-3:], default=FIRST_GUESS_S)
        if rendezvous.gather(float(time.time() + guess > todo["deadline"]))[0]:
            rank_log("left_out", point.id)
            continue
        begin = time.time()
        rank_log("begin", [point.id, "operands"])
        if weights is None or weights.shape != point.shape:
            weights = None
            _freed(device)
            kind = torch.float32 if todo["check"] else torch.bfloat16
            weights = Weights(point.shape, rank, world, kind, device)
        asked = Asked(
            todo["ways"], todo["regimes"], todo["rounds"], todo["point_s"], todo["deadline"],
            todo["skipped"].get(point.id, {}),
            lambda name, point=point: rank_log("begin", [point.id, name]), sharing,  # type: ignore[misc]
        )  # fmt: skip
        found = measure(Layer(point, weights, rank, world), rendezvous, asked)
        lasted.append(time.time() - begin)
        rank_log("point", {**found, "lasted_s": round(lasted[-1], 1)})
        _freed(device)
    rank_log("done", True)
    if device != "cpu":
        return leave()
    rendezvous.gather()
    os._exit(0)


def chosen(todo: dict[str, Any]) -> list[points.Point]:
    """Return the points that this process measures, in order."""
    shapes = {**points.SHAPES, points.TINY.name: points.TINY}
    return [
        points.Point(shapes[name], tokens, routing, kind)
        for name, tokens, routing, kind in todo["points"]
    ]


def _opened(folder: Path, check: bool) -> tuple[int, int, bool]:
    """Join the group; return this rank, the number of ranks, and whether they share GPUs."""
    if check:
        beat()
        torch.set_num_threads(1)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        return rank, world, False
    sharing = torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])
    rank, world = open_group(folder, sharing=sharing)
    ficco.prepare(machine="cuda", timeout_s=TIMEOUT_S)
    return rank, world, sharing


def _about(device: str, sharing: bool) -> dict[str, Any]:
    if device == "cpu":
        return {"check": True}
    return {
        "nccl": nccl(), "ficco_fallback": ficco.fallback_reason(),
        "sharing": sharing, "gpus_used": torch.cuda.device_count(),
        "all_to_all_vdev_2d": nvshmem() or "see `probe`",
    }  # fmt: skip


def nccl() -> list[int]:
    """Return NCCL's version."""
    version: Any = torch.cuda.nccl.version
    return list(version())


def _freed(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
