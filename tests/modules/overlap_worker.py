"""A rank that runs checks of overlap(): python overlap_worker.py STORE RANK WORLD CHECK...

Checks are in the files `overlap_*.py` beside this; each takes the mesh of all ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from joining import join_gloo
from torch.distributed.device_mesh import init_device_mesh

import ficco

sys.path.insert(0, str(Path(__file__).parent))
from overlap_compiled import CHECKS as COMPILED
from overlap_entries import CHECKS as ENTRIES
from overlap_limits import CHECKS as LIMITS
from overlap_measures import CHECKS as MEASURES
from overlap_megatron import CHECKS as MEGATRON
from overlap_readers import CHECKS as READERS
from overlap_results import CHECKS as RESULTS
from overlap_schedules import CHECKS as SCHEDULES


def main() -> None:
    """Be a rank: argv has the store, the rank, the world and the names of checks."""
    rooms = (RESULTS, LIMITS, ENTRIES, READERS, MEASURES, COMPILED, SCHEDULES, MEGATRON)
    checks = {name: check for room in rooms for name, check in room.items()}
    assert len(checks) == sum(map(len, rooms)), "two checks have one name"
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    mesh = init_device_mesh("cpu", (world,))
    for name in sys.argv[4:]:
        begun = time.perf_counter()
        checks[name](mesh)
        print(f"{name}: {time.perf_counter() - begun:.1f} s")
    ficco.close(mesh)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
