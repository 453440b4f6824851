"""Which engine runs a command: what was asked for, what the machine's profile says, which GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import combinations
from typing import NamedTuple

from ficco.errors import EngineError, InputError, MachineError
from ficco.machine import Machine

__all__ = [
    "MOST_GPUS",
    "Gpus",
    "chosen_engine",
    "driver_of",
    "gpus",
    "profile_of",
    "strangers",
    "told",
]

MOST_GPUS = 8  # that a command takes by itself


class Gpus(NamedTuple):
    """The GPUs that the driver sees.

    Attributes:
        devices: how many.
        trouble: why ficco cannot run on them, or nothing.
    """

    devices: int
    trouble: str = ""


def gpus(ranks: int) -> Gpus:
    """Look for GPUs, and for what ficco needs to run on the first `ranks` of them."""
    from ficco.engines import cuda

    try:
        count = cuda.device_count()
        peers = [cuda.capabilities(device).peers for device in range(min(count, ranks))]
    except cuda.GpuError as error:
        return Gpus(0, told(error))
    if not count:
        return Gpus(0, "the driver sees no GPU")
    if apart := strangers(peers):
        return Gpus(
            count,
            f"these GPUs do not reach each other's memory: {apart}; show others, by "
            "CUDA_VISIBLE_DEVICES",
        )
    if find_spec("torch") is None:
        return Gpus(count, "PyTorch is not installed; pip install 'ficco[torch]'")
    from ficco.modules.ranks import torch_offers

    return Gpus(count, torch_offers().lacking)


def told(error: Exception) -> str:
    """Return what a driver's error says, without more than three of the functions that it lacks."""
    said = str(error)
    begin = "the driver has no "
    names, _, rest = said.removeprefix(begin).partition("; ")
    missing = names.split(", ")
    if not said.startswith(begin):
        return said
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"too old: {begin}{', '.join(missing[:3])}{more}; {rest}"


def strangers(peers: Sequence[Sequence[bool]]) -> str:
    """Name the pairs of devices of which one does not reach the other, or nothing."""
    pairs = combinations(range(len(peers)), 2)
    return ", ".join(f"{a}-{b}" for a, b in pairs if not (peers[a][b] and peers[b][a]))


def chosen_engine(args: argparse.Namespace) -> tuple[str, int]:
    """Return the engine for a run, "host" or "cuda", and the number of GPUs where it is "cuda".

    A machine that is named decides; else "auto" is "cuda" where several GPUs can serve.

    Raises:
        InputError: engine, machine and GPUs do not go together.
        EngineError: GPUs that are asked for cannot serve.
    """
    engine: str = args.engine
    asked = f"--engine {engine}"
    if args.machine is not None:
        machine = Machine.named(args.machine)
        if machine.engine == "hip":
            raise InputError(f"machine {machine.name!r}: ficco does not run on GPUs of AMD yet")
        if engine not in ("auto", machine.engine):
            raise InputError(
                f"--engine {engine}: machine {machine.name!r} is for the {machine.engine} engine; "
                "leave one of the two out"
            )
        engine, asked = machine.engine, f"--machine {args.machine}"
    if engine == "host":
        return "host", 0
    found = gpus(args.ranks or MOST_GPUS)
    if engine == "auto" and (found.devices < 2 or found.trouble):
        return "host", 0
    if not found.devices:
        raise InputError(
            f"{asked}: {found.trouble}; `ficco doctor` tells more, --engine host needs no GPU"
        )
    if found.trouble:
        raise EngineError(f"{asked}: {found.trouble}")
    if args.ranks is not None and args.ranks > found.devices:
        raise InputError(
            f"--ranks {args.ranks}: there are {found.devices} GPUs here, one a rank; ask for fewer "
            "ranks, or for --engine host"
        )
    return "cuda", found.devices


def driver_of(machine: Machine) -> str | None:
    """Return the CUDA version that the driver here serves, where a machine is these GPUs.

    Raises:
        MachineError: there is no driver, or it is too old.
    """
    if machine.engine != "cuda" or machine.rated:
        return None
    from ficco.engines import cuda

    try:
        return cuda.served_version()
    except cuda.GpuError as error:
        raise _no_gpus(machine, error) from None


def profile_of(machine: Machine, ranks: int) -> Machine:
    """Return the profile to predict from for a machine, as a call's `auto` would find it.

    Raises:
        MachineError: there is none; it says how to get one.
    """
    from ficco.selector import profile_for

    device = ""
    if machine.engine == "cuda" and not machine.rated:
        from ficco.engines import cuda

        try:
            device = cuda.capabilities(0).name
        except cuda.GpuError as error:
            raise _no_gpus(machine, error) from None
    found = profile_for(machine, device, ranks)
    if found is None:
        if not device:
            machine.check_rated()  # says what to do
        raise MachineError(
            f"no profile of {device} with {ranks} devices or more is shipped; measure this machine "
            "by `ficco doctor --profile FILE`, and name it by --machine FILE, or by "
            "FICCO_MACHINE=FILE for all calls"
        )
    return found


def _no_gpus(machine: Machine, error: Exception) -> MachineError:
    return MachineError(
        f"machine {machine.name!r} is the GPUs of this node: {told(error)}; `ficco doctor` tells "
        "more, --machine h200x8 and the like need none"
    )
