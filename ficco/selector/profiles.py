"""Which profile a group's choices are made from: the one it was given, or that of its devices."""

from __future__ import annotations

import os
from functools import lru_cache

from ficco import data
from ficco.errors import MachineError
from ficco.machine import Machine

__all__ = ["profile_for", "shipped_for"]


def profile_for(machine: Machine, device: str, world: int) -> Machine | None:
    """Return the profile to predict from, or None where there is none.

    It is the machine that the group was opened on, if that has rates; else FICCO_MACHINE (a name or
    a .toml file, equal on all ranks), if it is set and is for the group's engine; else a shipped
    one of the same device.

    Args:
        machine: that the group was opened on.
        device: what the driver calls its devices; empty on the host engine.
        world: ranks of the group.

    Raises:
        MachineError: the profile that was given is of other devices, of too few, or has no rates;
            or FICCO_MACHINE names none, whether it would have been taken or not.
    """
    name = os.environ.get("FICCO_MACHINE", "")
    try:
        given = _named(name) if name else machine
    except MachineError as error:
        raise MachineError(f"FICCO_MACHINE: {error}") from None
    if machine.rated or given.engine != machine.engine:  # a job may have groups of both
        name, given = "", machine
    if not given.rated and not name:
        return shipped_for(device, world) if device else None
    asked = f"FICCO_MACHINE={name}" if name else f"machine {machine.name!r}"
    if given.device and device and given.device != device:
        raise MachineError(
            f"{asked}: it was measured on {given.device}, these devices are {device}; measure them "
            "by `ficco doctor --profile FILE`"
        )
    if given.ranks < world:
        raise MachineError(
            f"{asked}: it has {given.ranks} devices, the group has {world}; name one of as many, "
            "or measure these by `ficco doctor --profile FILE`"
        )
    given.check_rated()
    return given


@lru_cache(maxsize=64)
def shipped_for(device: str, world: int) -> Machine | None:
    """Return the shipped profile of a device with so many of them, else with the next more."""
    found = []
    for name in data.names("machines"):
        head = data.load("machines", name, "machine", MachineError)
        if head.get("device") == device and head["devices"] >= world:
            found.append((head["devices"], name))
    return _named(min(found)[1]) if found else None


@lru_cache(maxsize=16)
def _named(name: str) -> Machine:
    return Machine.named(name)
