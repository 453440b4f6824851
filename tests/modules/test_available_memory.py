"""Room for tensors: what PyTorch holds of a GPU and does not use is free; results on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ficco
from ficco import _native
from ficco.engine import available_memory

GIB = 1 << 30


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_memory_that_pytorch_keeps_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    device = torch.device("cuda", 3)
    available_memory.check_on(device, 7 * GIB, "a problem")
    with pytest.raises(MemoryError, match=r"8\.00 GiB requested, but GPU 3 has 7\.00 GiB free"):
        available_memory.check_on(device, 8 * GIB, "a problem")


@pytest.mark.usefixtures("group")
def test_functions_refuse_results_that_the_host_cannot_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "available_bytes", lambda: 100 << 20)
    x, w = torch.ones(6000, 1), torch.ones(1, 6000)
    with pytest.raises(MemoryError, match=r"results of all_gather_matmul: 137\.33 MiB requested"):
        ficco.all_gather_matmul(x, w)
    assert ficco.all_gather_matmul(x[:10], w).shape == (10, 6000)
