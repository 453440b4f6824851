"""A model of 70 billion parameters on the meta device, as rank 0 of 8: overlap() and restore()."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import ficco

WIDTH, HIDDEN, LAYERS = 8192, 28672, 80
SIZES = {
    "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH // 8), "wv": (WIDTH, WIDTH // 8),
    "wo": (WIDTH, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (k, n) in SIZES.items():
            setattr(self, name, nn.Linear(k, n, bias=False, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mlp(nn.Module):
    """Two layers whose names differ in a number that is no index."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)


def names() -> None:
    """Only indices of layers are left out of names."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Mlp(), Mlp()]), "0": nn.Linear(64, 64)})
    styles = {"*.fc1": "colwise", "*.fc2": "colwise", "0": "colwise"}
    told = ficco.explain(ficco.overlap(model, plan=styles, share=False)).split("\n")
    for name in ("  layers.*.fc1 (2 layers)", "  layers.*.fc2 (2 layers)", "  0"):
        assert name in told, (name, told)


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    plan = {
        f"*.{name}": RowwiseParallel(output_layouts=Shard(1)) if name in ("wo", "down")
        else ColwiseParallel(input_layouts=Shard(1))
        for name in SIZES
    }  # fmt: skip
    parallelize_module(blocks, mesh, plan)
    assert sum(p.numel() for p in blocks.parameters()) > 6.8e10
    assert all(isinstance(p, DTensor) and p.is_meta for p in blocks.parameters())
    begun = time.process_time()
    ficco.overlap(blocks, strict=True)
    told = ficco.explain(blocks)
    ficco.restore(blocks)
    seconds = time.process_time() - begun
    number = 7 * LAYERS
    assert told.startswith(f"ficco runs {number} of {number} "), told
    assert f"*.{{wq, wk, wv, gate, up}} ({LAYERS} layers)" in told, told
    assert all("forward" not in module.__dict__ for module in blocks.modules())
    names()
    print(f"{seconds:.2f} s")
    assert seconds < 2, f"overlap and restore took {seconds:.1f} s"
    print("right")


if __name__ == "__main__":
    main()
