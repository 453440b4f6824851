"""A rank of a group whose first call measures this machine. No figure is judged: machines differ.

python host_profile_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from values_worker import Listener

import ficco
from ficco.api import groups, host_profile
from ficco.core.machine import Machine


def call(rank: int) -> None:
    """Make a call with schedule="auto", and judge its result."""
    x, w = torch.full((8, 16), rank + 1.0), torch.ones(4, 16)
    y = ficco.all_gather_matmul(x, w.t())
    wanted = [16.0 * (1 + row // 8) for row in range(len(y))]
    assert torch.equal(y, torch.tensor(wanted)[:, None].expand(-1, 4)), y


def used(world: int) -> Machine:
    """Return what choices are made from, which is equal on all ranks."""
    found: list[Machine | None] = [None] * world
    machine = host_profile.machine_of(groups.runtime(None))
    dist.all_gather_object(found, machine)
    assert all(each == machine for each in found)
    return machine


def measures_once(rank: int, world: int, folder: Path, said: list[str]) -> None:
    """The first call measures and keeps; the next group reads; what cannot be read is replaced."""
    before = ficco.window_bytes()
    assert before == 0
    call(rank)
    first = used(world)
    assert first.rated and not first.paced and first.devices == world
    assert first.cores == len(os.sched_getaffinity(0)) or os.environ.get("LOCAL_WORLD_SIZE")
    assert ficco.window_bytes() < 1 << 20, "windows of the measurement are its own"
    kept = list((folder / "ficco").glob("host-*.toml"))
    assert len(kept) == 1, kept
    assert sum("was measured in" in line for line in said) == (1 if rank == 0 else 0), said
    call(rank)
    ficco.close()
    said.clear()
    call(rank)
    assert used(world) == first and not any("was measured in" in line for line in said), said
    ficco.close()
    dist.barrier()
    if rank == 0:
        kept[0].write_text(kept[0].read_text().replace("engine = ", "engine = 3 #"))
    dist.barrier()
    call(rank)
    assert used(world).rated and Machine.named(str(kept[0])).rated
    assert any("is not a valid profile" in line for line in said) == (rank == 0), said
    ficco.close()


def is_turned_off(rank: int, world: int) -> None:
    """By the environment, by a machine that has rates, and by FICCO_MACHINE."""
    os.environ["FICCO_MEASURE"] = "0"
    call(rank)
    assert used(world) == Machine.named("host")
    assert "FICCO_MEASURE=0" in host_profile.profile_note(groups.runtime(None))
    ficco.close()
    os.environ["FICCO_MEASURE"] = "1"
    ficco.prepare(machine="mesh4")
    call(rank)
    assert used(world) == Machine.named("mesh4")
    assert host_profile.profile_note(groups.runtime(None)) == ""
    ficco.close()
    os.environ["FICCO_MACHINE"] = "mesh4"
    call(rank)
    assert used(world) == Machine.named("host")
    del os.environ["FICCO_MACHINE"]
    ficco.close()


def fails_on_all(rank: int, world: int) -> None:
    """What one rank raises ends the measurement on all of them, and calls are serial."""
    real = host_profile.cache_file
    host_profile.cache_file = lambda *facts: Path("none") / "of.toml"
    points = host_profile.ProcessRig.least_us
    if rank == 1:

        def broken(rig: host_profile.ProcessRig, makes: object) -> list[float]:
            rig._runtime.gathered("measure the host", None)
            return [each[0] for each in rig._gathered(lambda: 1 // 0)]

        host_profile.ProcessRig.least_us = broken  # type: ignore[method-assign,assignment]
    call(rank)
    assert used(world) == Machine.named("host")
    assert "rank 1: " in host_profile.profile_note(groups.runtime(None))
    host_profile.ProcessRig.least_us = points  # type: ignore[method-assign]
    host_profile.cache_file = real
    ficco.close()


def is_explained(rank: int, world: int) -> None:
    """Before a call nothing is chosen; then explain counts, and says where the profile is from."""
    mesh = init_device_mesh("cpu", (world,))
    net = nn.Sequential(nn.Linear(16, 8, bias=False))
    parallelize_module(net, mesh, {"0": ColwiseParallel(input_layouts=Shard(0))})
    ficco.overlap(net)
    told = ficco.explain(net)
    assert "runs 1 of 1 tensor-parallel layers: 1 to be chosen at the first call" in told, told
    net(torch.ones(4, 16))
    told = ficco.explain(net)
    assert "profile of this machine: " in told, told
    chosen = "schedule: serial" in told
    assert ("layers: 1 serial" in told) == chosen == ("1 could overlap, but serial" in told), told
    assert ("ficco overlaps 1 of 1" in told) != chosen, told
    ficco.restore(net)
    ficco.overlap(net, schedule="serial")
    net(torch.ones(4, 16))
    told = ficco.explain(net)
    assert "layers: 1 serial" in told and "could overlap" not in told, told
    ficco.restore(net)
    ficco.overlap(net, schedule="shard_p2p")
    net(torch.ones(4, 16))
    assert "ficco overlaps 1 of 1 tensor-parallel layers" in ficco.explain(net)
    ficco.close()


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    folder = Path(store).parent / "cache"
    os.environ |= {"FICCO_MEASURE": "1", "XDG_CACHE_HOME": str(folder)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    listener, log = Listener(), logging.getLogger("ficco")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    measures_once(rank, world, folder, listener.said)
    is_turned_off(rank, world)
    fails_on_all(rank, world)
    is_explained(rank, world)
    assert host_profile.shared_cores([[0, 1], [1, 2]], 2, 0) == 3
    assert host_profile.shared_cores([[0, 1, 2, 3]] * 2, 2, 8) == 1  # eight processes share four
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
