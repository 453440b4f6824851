"""A rank that makes one check after another, as the process that started it asks for.

python serve.py DEVICE STORE RANK WORLD REPLIES

DEVICE is "cuda", or "cpu", where the checks of functions and models run on the host engine.
Every line of stdin is a JSON object with a scenario and its words. To each a line goes to the file
descriptor REPLIES when this rank is done: true, or false with a traceback on stderr. The process
ends with its stdin.
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# tests/modules has gradient_worker, which takes the device from the first argument, and llama.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "modules")]

import at_random
import experts_on_ranks
import gradient_worker
import overlapping
import pooling_at_random
import scenarios
import tables_worker
import torch
import torch.distributed as dist
from device_kernels import device_kernels
from rank import Rank
from torch.distributed.device_mesh import init_device_mesh
from tuned import tuned

import ficco

__all__ = ["SCENARIOS", "check_one"]


def _on_runtime(
    scenario: Callable[..., None], rank: int, world: int, *, timeout_s: float = 30.0, **words: Any
) -> None:
    me = Rank(rank, world, timeout_s)
    scenario(me, **words)
    me.close()


def _gradients(rank: int, world: int) -> None:
    for check in gradient_worker.checks(world):
        check(rank, world)
    ficco.close()


def _tables(rank: int, world: int) -> None:
    for check in tables_worker.checks(world):
        check(rank, world)
    ficco.close()


def _overlap(scenario: Callable[..., None], rank: int, world: int) -> None:
    mesh = init_device_mesh(gradient_worker.DEVICE.type, (world,))
    scenario(mesh)
    ficco.close(mesh)


SCENARIOS: dict[str, Callable[..., None]] = {
    **{name: partial(_on_runtime, each) for name, each in scenarios.SCENARIOS.items()},
    "device_kernels": device_kernels,
    "experts": experts_on_ranks.experts,
    "functions": scenarios.functions,
    "gradients": _gradients,
    "tables": _tables,
    "tuned": tuned,
    "random": at_random.at_random,
    "pooling_at_random": pooling_at_random.pooling_at_random,
    **{name: partial(_overlap, each) for name, each in overlapping.SCENARIOS.items()},
}


def check_one(scenario: str, rank: int, world: int, words: dict[str, Any]) -> bool:
    """Make a check; return whether it was right."""
    try:
        SCENARIOS[scenario](rank, world, **words)
    except BaseException:  # such as SystemExit of a command that a scenario calls
        traceback.print_exc()
        return False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return True


def main(store: str, rank: int, world: int, replies: int) -> None:
    """Join the group, then serve until stdin ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gradient_worker.join(store, rank, world)  # by NCCL, or gloo where ranks share GPUs or have none
    dist.barrier()

    def reply(right: bool) -> None:
        os.write(replies, f"{json.dumps(right)}\n".encode())

    reply(True)
    for line in sys.stdin:
        order = json.loads(line)
        right = check_one(order["scenario"], rank, world, order["words"])
        gc.collect()
        if right:
            torch.cuda.empty_cache()
        reply(right)
    os._exit(0)  # to take groups down can hang


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
