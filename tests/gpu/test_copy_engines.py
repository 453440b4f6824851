"""Which driver calls need a multiprocessor on these GPUs: what ficco's plans take for granted.

A kernel fills every thread slot of a GPU meanwhile: see
ficco/measure/profiling/gpu/multiprocessor_use.py. What plans push, raise and clear must end beside
it. Copies within a device are made by kernels: plans count them as work of the multiprocessors.
"""

from __future__ import annotations

import pytest

from ficco.measure.profiling.gpu.driver import writes_reach_peers
from ficco.measure.profiling.gpu.multiprocessor_use import CONTROL, WRITE_AT_PEER, Use, probe
from ficco.plan import copy_unit

ENDS, WAITS = Use(eager=False, in_graph=False), Use(eager=True, in_graph=True)
USES = {"dma": ENDS, "sm": WAITS}
TO_A_PEER, WITHIN = (USES[copy_unit("cuda", same_device=here)] for here in (False, True))
# Copies as plans have them; the others as measured on two H100s with CUDA 13.0.
EXPECTED = {
    "copy to a peer, 4 B": TO_A_PEER,
    "copy to a peer, 64 B": TO_A_PEER,
    "copy to a peer, 16 KiB": TO_A_PEER,
    "copy to a peer, 64 MiB": TO_A_PEER,
    "copy of rows to a peer, 4096 x 1 KiB": TO_A_PEER,
    WRITE_AT_PEER: ENDS,
    "write of a word": ENDS,
    "copy to the host, 64 KiB": ENDS,
    "memset, 4 B": ENDS,
    "copy within the device, 4 B": WITHIN,
    "copy within the device, 64 KiB": WITHIN,
    "copy within the device, 64 MiB": WITHIN,
    "copy of rows within the device, 4096 x 1 KiB": WITHIN,
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
    left_out = set() if writes_reach_peers() else {WRITE_AT_PEER}
    assert list(found) == [name for name in EXPECTED if name not in left_out]
    unlike = {name: use for name, use in found.items() if use != EXPECTED[name]}
    assert not unlike, f"GPU {pair[0]}: {unlike}"
