"""Choice of the engine for a command, from its options, the machine's profile and the GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import combinations
from typing import NamedTuple

from ficco.core.errors import EngineError, InputError, MachineError
from ficco.core.machine import Machine
from ficco.engine import vendor_of

MOST_GPUS = 8  # the most that a command takes by default


class Gpus(NamedTuple):
    """The GPUs that the driver sees.

    Attributes:
        devices: number of GPUs.
        trouble: why ficco cannot run on them; empty if it can.
        engine: "cuda" for NVIDIA's, "hip" for AMD's.
    """

    devices: int
    trouble: str = ""
    engine: str = "cuda"


def gpus(ranks: int, engine: str = "auto") -> Gpus:
    """Look for GPUs and check that ficco can run on the first `ranks` of them.

    Args:
        ranks: the number of GPUs that are needed.
        engine: "cuda" or "hip"; "auto": NVIDIA's GPUs, or AMD's if there are none.
    """
    if engine == "auto":
        here = gpus(ranks, "cuda")
        amd = here if here.devices else gpus(ranks, "hip")
        return amd if amd.devices else here
    vendor = vendor_of(engine)
    try:
        count = vendor.device_count()
        peers = [vendor.capabilities(device).peers for device in range(min(count, ranks))]
    except vendor.GpuError as error:
        return Gpus(0, driver_trouble(error), engine)
    if not count:
        return Gpus(0, "the driver sees no GPU", engine)
    if unreachable := unreachable_pairs(peers):
        return Gpus(
            count,
            f"these GPUs do not reach each other's memory: {unreachable}; {vendor.REMEDY}",
            engine,
        )
    if find_spec("torch") is None:
        return Gpus(count, "PyTorch is not installed; pip install 'ficco[torch]'", engine)
    from ficco.measure.executors import torch_offers

    return Gpus(count, torch_offers().lacking(engine), engine)


def driver_trouble(error: Exception) -> str:
    """Return a driver error's text; it names at most three missing driver functions."""
    text = str(error)
    begin = "the driver has no "
    names, _, rest = text.removeprefix(begin).partition("; ")
    missing = names.split(", ")
    if not text.startswith(begin):
        return text
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"too old: {begin}{', '.join(missing[:3])}{more}; {rest}"


def unreachable_pairs(peers: Sequence[Sequence[bool]]) -> str:
    """List the device pairs without peer access in both directions; empty if there are none."""
    pairs = combinations(range(len(peers)), 2)
    return ", ".join(f"{a}-{b}" for a, b in pairs if not (peers[a][b] and peers[b][a]))


def chosen_engine(args: argparse.Namespace) -> tuple[str, int]:
    """Return the engine for a run and the number of GPUs (0 for "host").

    A machine named by --machine decides. Otherwise "auto" selects the engine of the GPUs if
    several are usable, else "host".

    Raises:
        InputError: engine, machine and GPUs contradict each other.
        EngineError: the requested GPUs are not usable.
    """
    engine: str = args.engine
    request = f"--engine {engine}"
    if args.machine is not None:
        machine = Machine.named(args.machine)
        if engine not in ("auto", machine.engine):
            raise InputError(
                f"--engine {engine}: machine {machine.name!r} is for the {machine.engine} engine; "
                "leave one of the two out"
            )
        engine, request = machine.engine, f"--machine {args.machine}"
    if engine == "host":
        return "host", 0
    here = gpus(args.ranks or MOST_GPUS, engine)
    if engine == "auto" and (here.devices < 2 or here.trouble):
        return "host", 0
    if not here.devices:
        raise InputError(
            f"{request}: {here.trouble}; `ficco doctor` reports more, --engine host needs no GPU"
        )
    if here.trouble:
        raise EngineError(f"{request}: {here.trouble}")
    if args.ranks is not None and args.ranks > here.devices:
        raise InputError(
            f"--ranks {args.ranks}: there are {here.devices} GPUs here, one per rank; request "
            "fewer ranks, or --engine host"
        )
    return here.engine, here.devices


def driver_of(machine: Machine) -> str | None:
    """Return the CUDA version of this driver if the machine is the local NVIDIA GPUs, else None.

    Raises:
        MachineError: there is no driver, or it is too old.
    """
    if machine.engine != "cuda" or machine.rated:
        return None
    from ficco.engine import cuda

    try:
        return cuda.served_version()
    except cuda.GpuError as error:
        raise _no_gpus(machine, error) from None


def profile_of(machine: Machine, ranks: int) -> Machine:
    """Return the profile that `auto` of a call predicts from on a machine.

    Raises:
        MachineError: there is no profile; the message says how to get one.
    """
    from ficco.measure.selector import profile_for

    device = ""
    if machine.engine != "host" and not machine.rated:
        vendor = vendor_of(machine.engine)
        try:
            device = vendor.capabilities(0).name
        except vendor.GpuError as error:
            raise _no_gpus(machine, error) from None
    profile = profile_for(machine, device, ranks)
    if profile is None:
        if not device:
            machine.check_rated()  # says what to do
        if machine.engine == "hip":
            raise MachineError(
                f"the shipped profiles of {device} hold published figures, not measured ones, so "
                "one must be named: pass --machine mi300x8, or set FICCO_MACHINE=mi300x8 for all "
                "calls"
            )
        raise MachineError(
            f"no profile of {device} with {ranks} devices or more is shipped; measure this machine "
            "with `ficco doctor --profile FILE`, and pass --machine FILE, or set "
            "FICCO_MACHINE=FILE for all calls"
        )
    return profile


def _no_gpus(machine: Machine, error: Exception) -> MachineError:
    return MachineError(
        f"machine {machine.name!r} is the GPUs of this node: {driver_trouble(error)}; "
        "`ficco doctor` reports more, --machine h200x8 and similar profiles need no GPU"
    )
