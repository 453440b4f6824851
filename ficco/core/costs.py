"""Costs of a call besides its GEMMs and transfers: launches, words, and the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ficco.core.errors import MachineError


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of steps besides bytes and operations, in us, and contention factors.

    Attributes:
        launch_us: from the end of a kernel to the start of the next kernel on its stream.
        call_us: duration of a call besides its steps (its lanes fork and join).
        signal_us: time that a lane needs to raise a word; `raise_us`: from then until a lane that
            waits for the word continues. wait_us, clear_us: time that a lane needs for a wait that
            is already satisfied, and to clear, per word.
        host_call_us: host time of a call before its first step and after its last.
        host_launch_us, host_copy_us, host_words_us: host time to submit one library call, one copy,
            and one step of words.
        host_kernel_us: host time to submit one of ficco's own kernels (gated GEMMs, sums).
        host_serial_us: host time of a call of a whole GEMM and a collective, including checks.
        host_direct_us: host time of a call of one launch (transport "sm"), including checks; 0:
            host_call_us plus host_kernel_us is assumed. See also `host_native_us`.
        host_product_us: host time of a library's product before the one launch of a call; 0: not
            known, so host_launch_us is assumed.
        skew_us: time between the ranks' starts of a call.
        store_us: from a kernel's store at a peer until a waiting kernel there has the data; 0: not
            known, so nothing is predicted for transport "sm".
        direct_us: extra time of a gather by stores over its launch, product and stores, if ranks
            signal by words; 0 if they signal by mailboxes.
        pull_us: time of a call whose kernel reads peers' products, beyond its GEMM, its launch
            and the reads, with one shot; 0: not known, so nothing is predicted for such schedules.
        gated_gemm: duration of a gated GEMM over that of the library's, alone, at a depth of
            `curves.GATED_DEPTH`.
        direct_gemm: the same for a launch that gathers by stores.
        sending_gemm: the same for a launch that sends rows, or products by rows (`push_sm`); 0: not
            known, so auto does not choose such launches, and predictions take gated_gemm.
        peer_reads: duration of a kernel's reads of a peer's window, over that at the link's peak.
        gemm_beside_copies: slowdown of a GEMM while copies run on its device.
        copies_beside_gemm: slowdown of a copy while a GEMM runs on either device.
        gemm_beside_collective, collective_beside_gemm: the same for torch.distributed; recorded
            only, not used for predictions.
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
    host_product_us: float = 0.0
    skew_us: float = 0.0
    store_us: float = 0.0
    direct_us: float = 0.0
    pull_us: float = 0.0
    gated_gemm: float = 1.0
    direct_gemm: float = 1.0
    sending_gemm: float = 0.0
    peer_reads: float = 1.0
    gemm_beside_copies: float = 1.0
    copies_beside_gemm: float = 1.0
    gemm_beside_collective: float = 1.0
    collective_beside_gemm: float = 1.0

    @property
    def host_native_us(self) -> float | None:
        """Host time, without launches, of a call that needs no library: of one launch, or gated.

        None: not known.
        """
        return max(self.host_direct_us - self.host_kernel_us, 0.0) if self.host_direct_us else None

    def pulling_us(self, twice: bool) -> float:
        """Return `pull_us`; with two shots, where ranks meet once more, half as much again.

        On 2 H200s two shots took 4 us more, of a `pull_us` of 7 (bench/NOTES.md).
        """
        return self.pull_us * (1.5 if twice else 1.0)

    def __post_init__(self) -> None:
        for field in fields(self):
            known = field.name.endswith("_us") or field.name == "sending_gemm"
            value, least = getattr(self, field.name), 0.0 if known else 1.0
            if not (math.isfinite(value) and value >= least):
                raise MachineError(f"costs.{field.name}={value}: {least:g} or more is needed")
