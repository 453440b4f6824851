"""One rank of model.py: open the group, measure cell by cell, write the results."""

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
from torch.distributed.device_mesh import init_device_mesh

import ficco
from ficco.measure.clock import beat
from ficco.measure.launching import Rendezvous
from ficco.measure.ranks import RankLog
from modelling.cells import Cell, cells
from modelling.measuring import Place, measure

WAIT_S = 180.0  # longest wait of ranks for one another, as one may compile for long
FICCO_WAIT_S = {False: 20.0, True: 60.0}  # less than the limit of a step; keys: compiled or not
# Assumed time of a cell before one of its kind is measured; keys: compiled, training.
FIRST_GUESS_S = {
    (False, False): 10.0, (False, True): 14.0, (True, False): 35.0, (True, True): 70.0,
}  # fmt: skip


def open_group(folder: Path, tiny: bool) -> tuple[int, int, Any]:
    """Join the group of all ranks; on GPUs, use a non-default stream."""
    beat()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    named: dict[str, Any] = {"rank": rank, "world_size": world}
    named |= {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=WAIT_S)}
    if tiny:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **named)
        return rank, world, init_device_mesh("cpu", (world,))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **named)
    torch.cuda.set_stream(torch.cuda.Stream())
    mesh = init_device_mesh("cuda", (world,))
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    return rank, world, mesh


def run(folder: Path) -> int:
    """Measure the cells of todo.json until the deadline."""
    todo = json.loads((folder / "todo.json").read_text())
    rank, world, mesh = open_group(folder, todo["tiny"])
    torch._dynamo.config.recompile_limit = 64  # layers and variants share the code of one block
    place = Place(rank, world, mesh, Rendezvous(folder, rank, world, WAIT_S))
    rank_log = RankLog(folder, rank)
    found: dict[str, Any] = {"ficco_fallback": None}
    timeout_s = FICCO_WAIT_S[todo["part"] == "compiled"]
    place.open(timeout_s)
    if place.gpu:
        found = {"nccl": list(torch.cuda.nccl.version())}
        found["ficco_fallback"] = ficco.fallback_reason(mesh)
    rank_log("group", found)
    lasted = dict(FIRST_GUESS_S)
    chosen: list[Cell] = [c for c in cells(todo["part"], todo["tiny"]) if c.id in todo["cells"]]
    for cell in chosen:
        kind = (cell.part == "compiled", cell.mode == "training")
        late = float(time.time() + lasted[kind] > todo["deadline"])
        if place.rendezvous.gather(late)[0]:
            rank_log("left_out", cell.id)
            continue
        begin = time.time()
        place.open(timeout_s)
        result = measure(
            cell, place, lambda *where: rank_log("begin", where), todo["skipped"].get(cell.id, {}),
            todo["rounds"], todo["limit_s"], todo["end"],
        )  # fmt: skip
        lasted[kind] = time.time() - begin
        rank_log("cell", {**result, "lasted_s": round(lasted[kind], 1)})
        gc.collect()
        if place.gpu:
            torch.cuda.empty_cache()
    beat()
    place.synchronize()
    place.rendezvous.gather()
    os._exit(0)  # exit at once: destroying groups can hang
