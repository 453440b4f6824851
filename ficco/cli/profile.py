"""`ficco doctor --profile`: measure this machine and write a machine profile."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ficco.cli import engine_choice
from ficco.cli.arguments import HOST_RANKS
from ficco.cli.launch import end_with_launcher, launch
from ficco.core.errors import EngineError, InputError
from ficco.measure.launching import NO_MULTICAST
from ficco.operators.problem_checks import MAX_WORLD


def write_profile(path: str, ranks: int | None, processes: bool = False) -> int:
    """Measure this machine, on its GPUs if several are usable, else on the host engine.

    Args:
        path: the file to write; it ends in .toml and does not exist yet.
        ranks: number of ranks; None: the number of GPUs, else HOST_RANKS.
        processes: measure the host engine, with processes as ranks.

    Returns:
        The exit code.

    Raises:
        InputError: the file cannot be written, there are too few GPUs for `ranks`, or torchrun
            started this process; nothing was measured.
        EngineError: cuda-bindings is missing, or a GPU call failed.
    """
    from ficco.measure.profiling.writing import check_target

    target = check_target(path)
    if "FICCO_STORE" in os.environ:
        end_with_launcher()
        return _as_host_rank(target) if processes else _as_rank(target)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError("--profile starts its own ranks: run it once, without torchrun")
    if ranks is not None and not 1 <= ranks <= MAX_WORLD:
        raise InputError(f"--ranks {ranks}: ficco runs 1 to {MAX_WORLD} ranks")
    if processes:
        return launch(ranks or HOST_RANKS)
    here = engine_choice.gpus(ranks or engine_choice.MOST_GPUS, "cuda")
    if here.devices < 2 or here.trouble:
        if here.devices:
            reason = here.trouble or "a profile of GPUs needs two of them"
            print(f"ficco doctor: measures the host engine: {reason}", file=sys.stderr)
        return _on_host(target, ranks or HOST_RANKS)
    world = min(here.devices, engine_choice.MOST_GPUS) if ranks is None else ranks
    if not 2 <= world <= here.devices:
        raise InputError(
            f"--ranks {world}: a profile of GPUs takes 2 to {here.devices} of those here"
        )
    _check_bindings()
    for name, value in NO_MULTICAST.items():  # unless the user turns it on
        os.environ.setdefault(name, value)
    return launch(world)


def _check_bindings() -> None:
    try:
        spec = find_spec("cuda.bindings")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise EngineError(
            "--profile measures GPUs with cuda-bindings, which is not installed; pip install "
            "'ficco[cuda]'"
        )


def _on_host(target: Path, world: int) -> int:
    from ficco.measure.profiling import Progress
    from ficco.measure.profiling.host.profile import profile
    from ficco.measure.profiling.host.rig import THOROUGH, ThreadRig

    progress = Progress()
    with ThreadRig(world, len(os.sched_getaffinity(0)), THOROUGH) as rig:
        table = profile(rig, target.stem, progress)
    return _written(target, table, progress)


def _as_host_rank(target: Path) -> int:
    """Take part in the measurement of the host engine; rank 0 writes the results of all ranks."""
    from ficco.api.host_profile import measured
    from ficco.measure.profiling import Progress
    from ficco.measure.profiling.host.processes import joined
    from ficco.measure.profiling.host.rig import THOROUGH

    leads = os.environ["RANK"] == "0"
    progress = Progress(leads)
    with joined() as group:
        cores = len(os.sched_getaffinity(0))
        table = measured(group, cores, "torch", THOROUGH, target.stem, progress)
    return _written(target, table, progress) if leads else 0


def _as_rank(target: Path) -> int:
    """Take part in the measurement of GPUs; rank 0 writes the results of all ranks."""
    from ficco.measure.profiling import Progress
    from ficco.measure.profiling.gpu.profile import profile
    from ficco.measure.profiling.gpu.ranks import Ranks

    progress = Progress(os.environ["RANK"] == "0")
    try:
        with progress.part("start"):
            ranks = Ranks()
    except EngineError:
        if os.environ["RANK"] != "0":
            raise SystemExit(1) from None  # rank 0 reports the error for all
        raise
    table = profile(ranks, progress)
    code = _written(target, table, progress) if ranks.rank == 0 else 0
    ranks.close()
    return code


def _written(target: Path, table: dict[str, Any], progress: Any) -> int:
    from ficco.measure.profiling.writing import write_profile as write

    machine = write(target, table)
    print(
        f"{target}: machine {machine.name!r}, {machine.about}; measured in "
        f"{progress.seconds:.0f} s. Use it with --machine {target}"
    )
    return 0
