"""What a call costs besides its GEMMs and its bytes: launches, words, and the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ficco.errors import MachineError

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps cost besides bytes and operations, in us, and how much work slows work down.

    Attributes:
        launch_us: from the end of a kernel to the start of the next one on its stream.
        call_us: what a call lasts besides its steps (its lanes fork and join).
        signal_us: what raising a word takes its lane; `raise_us`: from then until a lane that
            waits for it goes on. wait_us, clear_us: what a wait that holds already and clearing
            take a lane, per word.
        host_call_us: what the host does for a call before its first step and after its last.
        host_launch_us, host_copy_us, host_words_us: what submitting one call of a library, one
            copy, and one step of words takes the host.
        host_kernel_us: what submitting one kernel of ficco's own takes it (gated GEMMs, sums).
        host_serial_us: what a call that is a whole GEMM and a collective takes it, checks and all.
        host_direct_us: what a call that is one launch (transport "sm") takes it, checks and all; 0:
            taken to be host_call_us and host_kernel_us. See `host_native_us`, too.
        skew_us: how far apart ranks begin a call.
        store_us: from a kernel's store at a peer until a kernel there that awaits it has it; 0: not
            known, so that nothing is predicted of transport "sm" here.
        direct_us: how much longer a gather by stores lasts than its launch, product and stores, for
            ranks hear of each other by words; where they do by mailboxes, nothing.
        gated_gemm: how much longer a gated GEMM lasts than the library's, alone.
        direct_gemm: the same of a launch that gathers by stores.
        gemm_beside_copies: how much longer a GEMM lasts while copies run on its device.
        copies_beside_gemm: how much longer a copy lasts while a GEMM runs on either device.
        gemm_beside_collective, collective_beside_gemm: the same, for torch.distributed; for the
            record, nothing is predicted from them.
    """

    launch_us: float = 0.0
    call_us: float = 0.0
    signal_us: float = 0.0
    raise_us: float = 0.0
    wait_us: float = 0.0
    clear_us: float = 0.0
    host_call_us: float = 0.0
    host_launch_us: float = 0.0
    host_kernel_us: float = 0.0
    host_copy_us: float = 0.0
    host_words_us: float = 0.0
    host_serial_us: float = 0.0
    host_direct_us: float = 0.0
    skew_us: float = 0.0
    store_us: float = 0.0
    direct_us: float = 0.0
    gated_gemm: float = 1.0
    direct_gemm: float = 1.0
    gemm_beside_copies: float = 1.0
    copies_beside_gemm: float = 1.0
    gemm_beside_collective: float = 1.0
    collective_beside_gemm: float = 1.0

    @property
    def host_native_us(self) -> float | None:
        """What the host does for a call that native code launches whole, but for its launches.

        None: not known. Calls of one launch are such, and gated ones.
        """
        return max(self.host_direct_us - self.host_kernel_us, 0.0) if self.host_direct_us else None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0.0 if field.name.endswith("_us") else 1.0
            if not (math.isfinite(value) and value >= least):
                raise MachineError(f"costs: {field.name}={value}: it is {least:g} or more")
