"""Selecting the profile for a group's choices: the group's own, or that of its devices."""

from __future__ import annotations

import os
from functools import lru_cache

from ficco.core import data
from ficco.core.errors import MachineError
from ficco.core.machine import Machine


def profile_for(machine: Machine, device: str, world: int) -> Machine | None:
    """Return the profile to predict from, or None.

    This is the machine that the group was opened on, if it has rates; else FICCO_MACHINE (a name or
    a .toml file, equal on all ranks), if set and for the group's engine; else a shipped profile of
    the same device.

    Args:
        machine: the machine that the group was opened on.
        device: the driver's name of the devices; empty on the host engine.
        world: ranks of the group.

    Raises:
        MachineError: the profile is for other devices, for too few, or has no rates; or
            FICCO_MACHINE does not name a profile, even if it would not be used.
    """
    name = os.environ.get("FICCO_MACHINE", "")
    try:
        profile = _named(name) if name else machine
    except MachineError as error:
        raise MachineError(f"FICCO_MACHINE: {error}") from None
    if machine.rated or profile.engine != machine.engine:  # a job may have groups of both
        name, profile = "", machine
    if not profile.rated and not name:
        return shipped_for(device, world) if device else None
    source = f"FICCO_MACHINE={name}" if name else f"machine {machine.name!r}"
    if profile.device and device and profile.device != device:
        raise MachineError(
            f"{source}: it was measured on {profile.device}, these devices are {device}; measure "
            "them by `ficco doctor --profile FILE`"
        )
    if profile.ranks < world:
        raise MachineError(
            f"{source}: it has {profile.ranks} devices, the group has {world}; name one of as "
            "many, or measure these by `ficco doctor --profile FILE`"
        )
    profile.check_rated()
    return profile


@lru_cache(maxsize=64)
def shipped_for(device: str, world: int) -> Machine | None:
    """Return the shipped profile of at least `world` such devices, with the fewest, or None.

    That of AMD's devices has published figures, so it must be named.
    """
    profiles = []
    for name in data.names("machines"):
        head = data.load("machines", name, "machine", MachineError)
        if head["engine"] == "hip" or head.get("device") != device:
            continue
        if head["devices"] >= world:
            profiles.append((head["devices"], name))
    return _named(min(profiles)[1]) if profiles else None


@lru_cache(maxsize=16)
def _named(name: str) -> Machine:
    return Machine.named(name)
