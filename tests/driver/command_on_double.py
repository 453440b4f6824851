"""`ficco`'s command line on the test double of a driver: python command_on_double.py WORDS...

PyTorch passes for a build with CUDA, and every rank of the command is this script again, whose
tensors pass for those of a GPU (torch_on_double.py). All else is what the command does on GPUs.
With COMMAND_ON=hip PyTorch passes for a build with ROCm, and the GPUs for AMD's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forking
import torch
import torch.distributed as dist
import torch_on_double as on_double

from ficco.cli.main import main
from ficco.engine.compute import experts, torch_experts
from ficco.measure import executors, launching
from ficco.plan import Experts


def _start(
    command: list[str], env: dict[str, str], stdout: int | None, stderr: None, pass_fds: Any
) -> forking.Forked:
    """Fork a rank: `python -P -m ficco WORDS...`, with this script in place of the module.

    It has this process's files open, those of `pass_fds` among them.
    """
    assert command[1:4] == ["-P", "-m", "ficco"], command
    words = [__file__, *command[4:]]
    if stdout is None:
        return forking.Forked(words, None, None, env)
    assert stdout == subprocess.DEVNULL
    with Path(os.devnull).open("w") as nowhere:
        return forking.Forked(words, nowhere, None, env)


class _Event(on_double._Event):
    """An event that takes times, as the host sees them behind the stream's work."""

    def __init__(self, here: on_double.Rank, enable_timing: bool = False) -> None:
        super().__init__(here)
        self._here = here

    def record(self, stream: Any = None) -> None:
        super().record(stream or SimpleNamespace(cuda_stream=self._here.stream))
        self._here.synchronize()
        self.time_ms = 1e3 * time.perf_counter()

    def synchronize(self) -> None:
        self._here.synchronize()

    def elapsed_time(self, end: _Event) -> float:
        return end.time_ms - self.time_ms


def _experts(
    work: Experts, rank: int, routing: torch.Tensor, weight: torch.Tensor | None,
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Do what `serial` does by ficco's kernels between collectives, which no double runs."""
    experts.perform(work, rank, routing.numpy(), weight, sources, targets)


def be_rank(
    rank: int, world: int, folder: Path, ranks: type[on_double.Rank] = on_double.Rank
) -> on_double.Rank:
    """Let this process be a rank whose PyTorch has a GPU of the double."""
    here = on_double.dress(rank, world, folder, ranks)
    join, generator = dist.init_process_group, torch.Generator

    def joined(backend: str, *args: Any, device_id: Any = None, **words: Any) -> None:
        join("gloo", *args, **words)

    dist.init_process_group = joined
    torch.Generator = lambda device=None: generator()  # type: ignore[assignment, misc]
    torch.randint = on_double._on_the_cpu(torch.randint)  # type: ignore[assignment]
    torch_experts.perform = _experts  # type: ignore[assignment]
    gpus: Any = torch.cuda
    gpus.set_device = lambda device: None
    gpus.Event = lambda enable_timing=False: _Event(here, enable_timing)
    return here


if __name__ == "__main__":
    torch.set_num_threads(1)
    forking.fork_from_here()
    ranks = on_double.Rank
    offers = executors.TorchOffers("13.0", 2, True, True, True)
    if os.environ.get("COMMAND_ON") == "hip":
        from torch_on_hip_double import HipRank

        ranks, offers = HipRank, executors.TorchOffers("", 2, True, True, True, rocm="7.1")
    executors.torch_offers = lambda: offers
    launching.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_start, DEVNULL=subprocess.DEVNULL
    )
    if "FICCO_STORE" in os.environ:
        store = Path(os.environ["FICCO_STORE"])
        be_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), store.parent, ranks)
    sys.exit(main())
