"""Which driver calls need a multiprocessor on these GPUs: what ficco's plans take for granted.

A kernel fills every thread slot of a GPU meanwhile (ficco/profiling/gpu/multiprocessor_use.py).
What plans push, raise and clear must end beside it. Copies within a device are made by kernels:
plans count them as work of the multiprocessors.
"""

from __future__ import annotations

import pytest

from ficco.profiling.gpu.multiprocessor_use import CONTROL, Use, probe

ENDS, WAITS = Use(eager=False, in_graph=False), Use(eager=True, in_graph=True)
# As measured on two H100s with CUDA 13.0, eager and in a graph alike.
EXPECTED = {
    "copy to a peer, 4 B": ENDS,
    "copy to a peer, 64 B": ENDS,
    "copy to a peer, 16 KiB": ENDS,
    "copy to a peer, 64 MiB": ENDS,
    "copy of rows to a peer, 4096 x 1 KiB": ENDS,
    "write of a word at a peer": ENDS,
    "write of a word": ENDS,
    "copy to the host, 64 KiB": ENDS,
    "memset, 4 B": ENDS,
    "copy within the device, 4 B": WAITS,
    "copy within the device, 64 KiB": WAITS,
    "copy within the device, 64 MiB": WAITS,
    "copy of rows within the device, 4096 x 1 KiB": WAITS,
    CONTROL: WAITS,
}


@pytest.mark.quick
@pytest.mark.timeout(60)
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)], ids=["GPU 0", "GPU 1"])
def test_calls_need_the_units_that_plans_give_them(gpus: int, pair: tuple[int, int]) -> None:
    import torch

    for device in pair:  # contexts are there, and idle
        torch.zeros(1, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    found = probe(*pair)
    assert list(found) == list(EXPECTED)
    unlike = {name: use for name, use in found.items() if use != EXPECTED[name]}
    assert not unlike, f"GPU {pair[0]}: {unlike}"
